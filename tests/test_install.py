"""Is the version of every package pinned, and what does `make install` ask pip for?"""

import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distribution

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


def test_every_package_has_one_pinned_version():
    """A new version of a package that is missing from constraints.txt may break the install some day."""
    constraints = read_pins(ROOT / "constraints.txt")
    todo = list((read_pins(ROOT / "requirements.txt") | read_pins(ROOT / "tests" / "requirements.txt")).values())
    seen = set()
    while todo:
        requirement = todo.pop()
        name = canonicalize_name(requirement.name)
        # Which build of torch is installed, and what it brings, depends on the machine.
        if name != "torch" and not re.match(r"triton$|nvidia-|cuda-", name):
            assert name in constraints, f"{name} is not in constraints.txt, whose first lines say how to make it anew"
            pins = [str(s) for s in requirement.specifier if s.operator == "=="]
            assert str(constraints[name].specifier) in (pins or [str(constraints[name].specifier)])
        for extra in {"", *requirement.extras} - {e for n, e in seen if n == name}:
            seen.add((name, extra))
            needed = [Requirement(line) for line in distribution(name).requires or []]
            todo += [r for r in needed if r.marker is None or r.marker.evaluate({"extra": extra})]


def test_pins_are_within_the_ranges_of_pyproject():
    ours, dev = PYPROJECT["project"]["dependencies"], PYPROJECT["dependency-groups"]["dev"]
    for file, lines in (("requirements.txt", ours), ("tests/requirements.txt", dev)):
        pins, ranges = read_pins(ROOT / file), for_this_machine(lines)
        assert set(pins) == set(ranges)
        for name, pin in pins.items():
            (version,) = pin.specifier
            assert ranges[name].specifier.contains(version.version), name


# ------------------------------------------------------------------------- make install

# Python and uv, as far as the Makefile calls them: they write down their arguments. PyTorch's index is away, and pip is
# misled where NVIDIA's containers pin the versions of their image.
RECORDER = """#!/bin/sh
echo "${0##*/} $@" >> calls
case "$*" in
-m\\ venv*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
*--no-deps*) exit 1 ;;
-m\\ pip*) [ -z "$PIP_CONSTRAINT" ] ;;
esac
"""


@pytest.fixture
def project(tmp_path):
    """A folder with the Makefile, the requirements of two packages, and tools/python3 and tools/uv that record."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    (tmp_path / "requirements.txt").write_text('numpy\ntorch==2.13.0; sys_platform != "darwin"\n')
    (tmp_path / "constraints.txt").write_text("numpy==2\n")
    (tmp_path / "tools").mkdir()
    for name in ("python3", "uv"):
        (tmp_path / "tools" / name).write_text(RECORDER)
        (tmp_path / "tools" / name).chmod(0o755)
    return tmp_path


def run_make(project, *arguments):
    """make with these arguments, where tools/ is first on the PATH."""
    env = {"PATH": f"{project / 'tools'}:/usr/bin:/bin", "PIP_CONSTRAINT": "/etc/pip.txt"}
    how = {"cwd": project, "env": env, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(["make", *arguments], **how)


PIP = "python -m pip install --disable-pip-version-check"
UV = "uv pip install --python .venv/bin/python"
CPU_BUILD = "--retries 1 --extra-index-url https://download.pytorch.org/whl/cpu"
TORCH = '--no-deps torch==2.13.0; sys_platform != "darwin"'
PINNED = "-r .venv/requirements.txt -c constraints.txt"


@pytest.mark.parametrize(
    "settings, expected",
    [
        ("UV= TORCH_BUILD=", [f"{PIP} {PINNED}"]),
        ("UV= TORCH_BUILD=cpu SYSTEM_TORCH=1", [f"{PIP} {PINNED}"]),
        ("UV= TORCH_BUILD=cpu", [f"{PIP} {CPU_BUILD} {TORCH}", f"{PIP} {PINNED}"]),
        ("UV=uv TORCH_BUILD=cu126", [f"{UV} --torch-backend cu126 {TORCH}", f"{UV} {PINNED}"]),
    ],
)
def test_install_asks_for_pinned_packages(project, settings, expected):
    """A build of torch comes alone and first, from an index that may be away and has old versions of all else."""
    done = run_make(project, "install", "PYTHON=python3", *settings.split())
    calls = (project / "calls").read_text().splitlines()
    assert done.returncode == 0 and [call for call in calls if "pip install" in call] == expected
    assert "is up to date" in run_make(project, ".venv/.installed", *settings.split()).stdout


def test_torch_of_an_image_takes_the_place_of_ours(project):
    """torchrun must then start the Python of .venv, which alone has the other packages."""
    run_make(project, "clean", "install", "SYSTEM_TORCH=1", "UV=", "PYTHON=python3")
    subprocess.run([project / ".venv/bin/torchrun", "--standalone", "a b"], cwd=project, check=True)

    assert (project / ".venv/requirements.txt").read_text() == "numpy\n"
    calls = (project / "calls").read_text().splitlines()
    assert "-m venv --system-site-packages .venv" in calls[1]
    assert calls[-1] == "python -m torch.distributed.run --standalone a b"


def test_a_python_that_is_too_old_is_passed_over(project):
    (project / "tools/python3").write_text("#!/bin/sh\n[ $1 = --version ] && echo Python 3.10.12; exit 1\n")
    done = run_make(project, "install", "PYTHON=python3")
    assert done.returncode != 0 and "Python 3.10.12" in done.stdout and not (project / ".venv").exists()

    (project / "tools/uv").rename(project / "tools/python3.11").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    assert "python3.11 -m venv" in run_make(project, "-n", "install").stdout
