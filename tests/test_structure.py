"""The structure of the code: who imports whom."""

import re
from graphlib import TopologicalSorter

from helpers import ROOT

SCRIPTS = {"train_gpt2", "train_gpt2_plain", "fineweb", "hellaswag", "infer", "hub", "plots"}
# Each layer may import itself and those before it.
LAYERS = [{"system"}, {"model"}, {"tokens"}, {"training"}, {"weights"}, {"lifecycle"}, SCRIPTS]


def find_imports() -> dict[str, set[str]]:
    """{module: the project's modules that it imports at its top level}, of all that users run or import. Imports inside
    functions are left out: they happen at run time, after everything is loaded."""
    packages = [ROOT, *(ROOT / name for name in ("system", "tokens", "training", "weights", "lifecycle"))]
    paths = [path for package in packages for path in package.glob("*.py") if path.stem != "__init__"]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    imports = {}
    for module, path in modules.items():
        found = set()
        for package, names in re.findall(r"^(?:from (\S+) )?import (.+)", path.read_text(), re.MULTILINE):
            found |= {package} | {f"{package}.{name}".strip(".") for name in names.split(", ")}
        imports[module] = found & modules.keys()
    return imports


def layer_of(module):
    return next(i for i, names in enumerate(LAYERS) if module.split(".")[0] in names)


def test_imports_go_downwards_and_in_no_circle():
    """As docs/changing.md has it: scripts, the rooms, the network, which imports nothing of ours, and system."""
    imports = find_imports()
    assert "system.cli" in imports["plots"] and imports["model"] == set()
    upward = [(a, b) for a in imports for b in imports[a] if layer_of(b) > layer_of(a) or b in SCRIPTS]
    assert upward == []
    list(TopologicalSorter(imports).static_order())  # raises CycleError, which names the cycle
