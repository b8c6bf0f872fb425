"""The structure of the code: who imports whom, no cycles, and what stays quick to import."""

import ast
import inspect
import re
import subprocess
import sys
from graphlib import TopologicalSorter

import pytest
from helpers import ROOT

import hub

SCRIPTS = {"train_gpt2", "fineweb", "hellaswag", "infer", "hub", "plots"}
# Each layer may import itself and those before it.
LAYERS = [{"model", "system"}, {"tokens"}, {"training"}, SCRIPTS]


def source_files():
    """{module: path} of everything that users run or import: scripts, model.py and the packages."""
    paths = [*ROOT.glob("*.py"), *(ROOT / "system").glob("*.py"), *(ROOT / "tokens").glob("*.py")]
    paths += (ROOT / "training").glob("*.py")
    return {".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}


def project_imports(path, modules):
    """Modules of the project that a file imports at its top level, those for type checkers included. Imports inside
    functions are left out: they happen at run time, after everything is loaded."""
    tree = ast.parse(path.read_text())
    functions = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef)]
    inside = {id(node) for function in functions for node in ast.walk(function)}
    found = set()
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module}
    return found & modules.keys()


def layer_of(module):
    return next(i for i, names in enumerate(LAYERS) if module.split(".")[0] in names)


def test_imports_go_downwards():
    """Scripts, then training, then tokens, then model and system. No package imports a script."""
    modules = source_files()
    upward = [
        f"{module} imports {imported}"
        for module, path in modules.items()
        for imported in project_imports(path, modules)
        if layer_of(imported) > layer_of(module) or (imported in SCRIPTS and module not in SCRIPTS)
    ]
    assert upward == []


def test_no_module_imports_itself_through_others():
    modules = source_files()
    graph = {module: project_imports(path, modules) for module, path in modules.items()}
    list(TopologicalSorter(graph).static_order())  # raises CycleError, which names the cycle


def test_the_network_imports_nothing_of_the_project():
    modules = source_files()
    assert project_imports(modules["model"], modules) == set()


@pytest.mark.parametrize("module", ["training.metrics", "training.reference", "plots", "system.cli"])
def test_reading_what_a_run_wrote_needs_no_torch(module):
    code = f"import sys, {module}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_git_ignores_what_runs_and_tools_write():
    """In log/ and data/, and what cloud/slurm.sbatch, plots.py, pulls and exports leave in this folder."""
    written = """log/gpt2-124m/model_00500.pt log/gpu-report/gpu-report.md data/stdlib/x_train_000001.npy curves.png
    gpt2-4711.log gpt2-4711.status.json gpt2-mine/model.safetensors gpt2-mine/gpt2-mine-q8_0.gguf pulled/optim_00500.pt
    """.split()
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout")
    command = ["git", "-c", "safe.directory=*", "check-ignore", "--no-index", *written]
    assert subprocess.run(command, cwd=ROOT, capture_output=True, text=True).stdout.split() == written


@pytest.mark.parametrize(
    "command",
    [hub.push_data, hub.pull_data, hub.push_model, hub.pull_model, hub.check, hub.export, hub.import_old],
)
def test_help_explains_every_argument_of_hub(command):
    explained = re.findall(r"^ {8}(\w+): ", command.__doc__, re.MULTILINE)
    assert explained == list(inspect.signature(command).parameters)
