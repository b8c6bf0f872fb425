"""`make install` as an ordinary user meets it, with indexes of made-up packages; and is every version pinned?"""

import re
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
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


@pytest.mark.parametrize(
    "file, lines",
    [
        ("requirements.txt", PYPROJECT["project"]["dependencies"]),
        ("tests/requirements.txt", PYPROJECT["dependency-groups"]["dev"]),
    ],
)
def test_pins_are_within_the_ranges_of_pyproject(file, lines):
    pins, ranges = read_pins(ROOT / file), for_this_machine(lines)
    assert set(pins) == set(ranges)
    for name, pin in pins.items():
        (version,) = pin.specifier
        assert ranges[name].specifier.contains(version.version), name


# ------------------------------------------------------------------------- make install


def write_wheel(folder, name, version):
    """Write a package of nothing but a name and a version into an index: folder/name/name-version.whl."""
    info = f"{name}-{version}.dist-info"
    files = {f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"}
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/RECORD"] = "".join(f"{f},,\n" for f in [*files, f"{info}/RECORD"])
    (folder / name).mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / name / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


@pytest.fixture
def index_url(tmp_path):
    """The address of two indexes: /cpu with a build of torch and, as PyTorch's own has them, old versions of other
    packages; and /usual."""
    root = tmp_path / "indexes"
    write_wheel(root / "cpu", "torch", "2.13.0+cpu")
    write_wheel(root / "cpu", "numpy", "1")
    for name, version in (("torch", "2.13.0"), ("torch", "2.99"), ("numpy", "2"), ("numpy", "3")):
        write_wheel(root / "usual", name, version)
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SimpleHTTPRequestHandler, directory=root)) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def project(tmp_path):
    """A folder with the Makefile and the requirements of two packages."""
    folder = tmp_path / "project"
    folder.mkdir()
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "requirements.txt").write_text('numpy\ntorch==2.13.0; sys_platform != "darwin"\n')
    (folder / "constraints.txt").write_text("numpy==2\n")
    return folder


def run_make(project, *arguments, check=True, **env):
    """What make prints; it finds no other configuration of pip or make than `env`."""
    env = {"PATH": "/usr/bin:/bin", "HOME": str(project), "PIP_CONFIG_FILE": "/dev/null", **env}
    command = ["make", *arguments]
    done = subprocess.run(command, cwd=project, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert (done.returncode == 0) is check, done.stdout
    return done.stdout


@pytest.mark.skipif(sys.platform != "linux", reason="PyPI's torch brings CUDA on Linux alone")
@pytest.mark.parametrize("build, expected", [("cpu", "2.13.0+cpu"), ("away", "2.13.0"), ("", "2.13.0")])
def test_install_takes_the_pinned_torch_in_its_build(project, index_url, build, expected):
    """Also where that build's index is away, or has old versions of other packages."""
    settings = [f"PYTHON={sys.executable}", "UV=", f"TORCH_BUILD={build}"]
    settings.append(f"WITH_BUILD=--retries 0 --extra-index-url {index_url}/{build}")
    run_make(project, "install", *settings, PIP_INDEX_URL=f"{index_url}/usual")

    code = "from importlib.metadata import version as v; print(v('torch'), v('numpy'))"
    done = subprocess.run([project / ".venv/bin/python", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == [expected, "2"]
    assert "is up to date" in run_make(project, ".venv/.installed", *settings)


def write_python(path, script):
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def test_python_that_is_too_old_is_refused_and_a_newer_one_found(project, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    write_python(tools / "python3", '[ "$1" = --version ] && echo Python 3.10.12; exit 1')
    path = f"{tools}:/usr/bin:/bin"
    printed = run_make(project, "install", "PYTHON=python3", check=False, PATH=path)
    assert "Python 3.10.12" in printed and not (project / ".venv").exists()

    write_python(tools / "python3.11", f'exec {sys.executable} "$@"')
    assert "python3.11 -m venv" in run_make(project, "-n", "install", PATH=path)


def test_torch_of_an_image_takes_the_place_of_the_pinned_one(project, tmp_path):
    """torchrun must then start the Python of .venv, which alone has the other packages."""
    # An image's Python, as far as the Makefile calls it: it makes a .venv and writes down its arguments.
    make_venv = '[ "$2" = venv ] && mkdir -p .venv/bin && cp "$0" .venv/bin/python'
    write_python(tmp_path / "python3", f'{make_venv}\necho "$PIP_CONSTRAINT $@" >> calls')

    # NVIDIA's containers pin the image's versions by PIP_CONSTRAINT, which would conflict with ours.
    settings = ["SYSTEM_TORCH=1", "UV=", f"PYTHON={tmp_path / 'python3'}"]
    run_make(project, "clean", "install", *settings, PIP_CONSTRAINT="/etc/pip.txt")
    subprocess.run([project / ".venv/bin/torchrun", "--standalone", "a b"], cwd=project, check=True)

    assert "torch" not in (project / ".venv" / "requirements.txt").read_text()
    calls = (project / "calls").read_text().splitlines()
    assert [call for call in calls if "pip install" in call and "pip.txt" in call] == []
    assert calls[-1].strip() == "-m torch.distributed.run --standalone a b"
