"""Is every imported package required, is every file in a wheel, and what does make do with what is missing?"""

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest
from helpers import ROOT, write_script
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]

# ------------------------------------------------------------------------- the lists of packages and files


def test_every_imported_package_is_required():
    """What comes only because another package needs it may be gone with the next version of that one."""
    ours, project = {*SETUPTOOLS["packages"], *SETUPTOOLS["py-modules"]}, PYPROJECT["project"]
    imported = set()
    for path in [*ROOT.glob("*.py"), *(path for name in ours for path in ROOT.glob(f"{name}/*.py"))]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import | ast.ImportFrom):
                name = getattr(node, "module", None) or node.names[0].name
                imported.add(name.split(".")[0])

    lines = sum(project["optional-dependencies"].values(), project["dependencies"])
    required = {canonicalize_name(Requirement(line).name) for line in lines}
    origin = packages_distributions()
    for name in imported - sys.stdlib_module_names - ours:
        assert required & {canonicalize_name(d) for d in origin.get(name, [name])}, name


def test_a_wheel_has_every_file():
    assert set(SETUPTOOLS["py-modules"]) == {path.stem for path in ROOT.glob("*.py")}
    assert set(SETUPTOOLS["packages"]) == {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert SETUPTOOLS["package-data"] == {path.parent.name: [path.name] for path in ROOT.glob("*/*.csv")}


# ------------------------------------------------------------------------- make

# Python, as far as make calls it: it writes down its arguments. No index has torch, and none the plays.
RECORDER = f"""#!/bin/sh
echo "$@" >> calls
case "$*" in
-c*) exec "{sys.executable}" "$@" ;;
-m\\ venv*) mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
*--no-deps*) exit 1 ;;
esac
"""


@pytest.fixture
def make(tmp_path):
    """make("install", ...) -> the finished process, and its calls of pip, in a folder with what the Makefile reads."""
    (tmp_path / "tests").mkdir()
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "requirements.txt").write_text('numpy\ntorch==2.13.0; sys_platform != "darwin"\n')
    (tmp_path / "constraints.txt").touch()
    (tmp_path / "tests/requirements.txt").touch()
    write_script(tmp_path / "python3", RECORDER)
    command = ["make", "UV=", f"PYTHON={tmp_path}/python3"]
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}

    def run(*words):
        done = subprocess.run([*command, *words], cwd=tmp_path, env=env, capture_output=True, text=True)
        calls = (tmp_path / "calls").read_text().splitlines()
        return done, [call for call in calls if "pip install" in call]

    return run


@pytest.mark.parametrize("build, installs", [("cpu", 3), ("cu126", 1)])
def test_torch_comes_alone_and_only_the_one_for_cpus_may_be_replaced(make, build, installs):
    """By the usual one, where its index, which has old versions of all else, cannot be reached."""
    done, calls = make("install", f"TORCH_BUILD={build}")
    assert (done.returncode == 0) == (build == "cpu")
    assert f"--no-deps --extra-index-url https://download.pytorch.org/whl/{build} torch==2.13.0;" in calls[0]
    assert len(calls) == installs and all("-r requirements.txt -c constraints.txt" in call for call in calls[1:2])


@pytest.mark.parametrize("cuda, build", [("12.4", "/whl/cu126"), ("12.8", "/whl/cu126"), ("13.0", "")])
def test_torch_is_one_that_the_driver_runs(make, tmp_path, cuda, build):
    """And not 5 GB that it cannot run."""
    line = f"| NVIDIA-SMI 550.54    Driver Version: 550.54    CUDA Version: {cuda}     |"
    write_script(tmp_path / "nvidia-smi", f"#!/bin/sh\necho '{line}'\n")
    done, (install, *_) = make("install", "NVIDIA=/dev/nvidia0", "CC=true")
    assert ("/whl/" in install, "TORCH_BUILD=cu126" in done.stdout) == (bool(build), bool(build)) and build in install


@pytest.mark.parametrize("lacks", ["CC=false", "PYTHON_H=none/Python.h"])
def test_a_gpu_without_a_compiler_is_refused_before_the_download(make, lacks):
    done, calls = make("install", "NVIDIA=/dev/nvidia0", lacks)
    assert done.returncode and "gcc python3-dev" in done.stderr and not calls
