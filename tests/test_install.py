"""`make install` as an ordinary user meets it, with indexes of made-up packages; and is every version pinned?"""

import os
import re
import shutil
import subprocess
import sys
import threading
import zipfile
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import distribution

import pytest
from helpers import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="PyPI's torch brings CUDA on Linux alone")


def read_pins(path):
    """{name: requirement} of the lines of a requirements file that apply here; each must pin a version."""
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    requirements = [Requirement(line) for line in lines if line and not line.startswith("-")]
    requirements = [r for r in requirements if r.marker is None or r.marker.evaluate()]
    assert all(re.fullmatch(r"==[\w.]+", str(r.specifier)) for r in requirements), path
    return {canonicalize_name(r.name): r for r in requirements}


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
    """The address of three indexes: /cpu and /cu126 with builds of torch, and old versions of other packages as
    PyTorch's own indexes have them; and /usual."""
    root = tmp_path / "indexes"
    for build in ("cpu", "cu126"):
        write_wheel(root / build, "torch", f"2.13.0+{build}")
        write_wheel(root / build, "numpy", "1")
    for name, version in (("torch", "2.13.0"), ("numpy", "2"), ("pip", "99"), ("setuptools", "99"), ("wheel", "99")):
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
    torch = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("torch==2.13.0;")]
    (folder / "requirements.txt").write_text("\n".join([*torch, "numpy", ""]))
    (folder / "constraints.txt").write_text("numpy==2\n")
    return folder


def run_make(project, *arguments, check=True, **env):
    """What make prints in the project, without this machine's settings of pip and uv."""
    clean = {k: v for k, v in os.environ.items() if not k.upper().startswith(("PIP_", "UV", "TORCH_CPU", "MAKE"))}
    clean |= {"PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1", "HOME": str(project.parent), "LC_ALL": "C", **env}
    how = {"cwd": project, "env": clean, "capture_output": True, "text": True, "timeout": 120}
    done = subprocess.run(["make", *arguments], **how)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done.stdout


UV = pytest.param("uv", marks=pytest.mark.skipif(not shutil.which("uv"), reason="uv is not installed"))


@linux_only
@pytest.mark.slow  # it installs three times, from indexes of its own
@pytest.mark.parametrize("tool", ["pip", UV])
@pytest.mark.parametrize("build, settings", [("cpu", ["CUDA="]), ("cu126", ["CUDA=1", "TORCH_BUILD=cu126"])])
def test_build_of_torch_that_the_machine_needs_is_installed_and_kept(project, index_url, tool, build, settings):
    def install(*more):
        env = {"PIP_NO_CACHE_DIR": "1", "UV_CACHE_DIR": str(project.parent / "cache")}
        env["PIP_INDEX_URL" if tool == "pip" else "UV_DEFAULT_INDEX"] = f"{index_url}/usual"
        printed = run_make(project, "install", f"PYTHON={sys.executable}", f"TORCH_INDEX={index_url}", *more, **env)
        folders = project.glob(".venv/lib/*/site-packages/*.dist-info")
        return printed, dict(path.name.removesuffix(".dist-info").split("-") for path in folders)

    # For an older driver it replaces the usual build, which satisfies the pinned version.
    if build == "cu126":
        _, versions = install("CUDA=1")
        assert versions["torch"] == "2.13.0"
    _, versions = install(*settings)
    assert (versions["torch"], versions["numpy"]) == (f"2.13.0+{build}", "2")

    # A second time there is nothing to do; with newer requirements, as after a pull, the build stays.
    printed, _ = install(settings[0])
    assert "nothing" in printed.lower()
    (project / "requirements.txt").touch()
    _, versions = install(settings[0])
    assert versions["torch"] == f"2.13.0+{build}"


def test_python_that_is_too_old_is_refused_and_a_newer_one_found(project, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    (tools / "python3").write_text('#!/bin/sh\n[ "$1" = --version ] && echo Python 3.10.12; exit 1\n')
    (tools / "python3").chmod(0o755)
    path = f"{tools}:/usr/bin:/bin"
    printed = run_make(project, "install", "CUDA=1", "UV=", "PYTHON=python3", check=False, PATH=path)
    assert "Python 3.10.12" in printed and "3.11 or newer" in printed and not (project / ".venv").exists()

    (tools / "python3.11").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    (tools / "python3.11").chmod(0o755)
    printed = run_make(project, "-n", "install", "CUDA=1", "UV=", PATH=path)
    assert "python3.11 -m venv .venv" in printed


def test_torch_of_an_image_takes_the_place_of_the_pinned_one(project, tmp_path):
    """torchrun must then start the Python of .venv, which alone has the other packages."""
    # An image's Python, as far as the Makefile calls it: it makes a .venv and writes down its arguments.
    python = tmp_path / "python3"
    make_venv = '[ "$2" = venv ] && mkdir -p .venv/bin && cp "$0" .venv/bin/python'
    python.write_text(f'#!/bin/sh\n{make_venv}\necho "$PIP_CONSTRAINT $@" >> calls\n')
    python.chmod(0o755)

    # NVIDIA's containers pin the image's versions by PIP_CONSTRAINT, which would conflict with ours.
    run_make(project, "clean", "install", "SYSTEM_TORCH=1", f"PYTHON={python}", PIP_CONSTRAINT="/etc/pip.txt")
    subprocess.run([project / ".venv" / "bin" / "torchrun", "--standalone", "a b"], cwd=project, check=True)

    assert "torch" not in (project / ".venv" / "requirements.txt").read_text()
    calls = (project / "calls").read_text().splitlines()
    assert [call for call in calls if "pip install" in call and "pip.txt" in call] == []
    assert calls[-1].strip() == "-m torch.distributed.run --standalone a b"


@linux_only
def test_cpu_index_that_is_away_costs_a_message(project, tmp_path):
    python = tmp_path / "python3"
    commands = '[ "$2" = venv ] && mkdir -p .venv/bin && cp "$0" .venv/bin/python\n'
    commands += f'[ "$2" = venv ] || [ "$2" = pip ] && exit 0\nexec {sys.executable} "$@"'
    python.write_text(f"#!/bin/sh\n{commands}\n")
    python.chmod(0o755)
    printed = run_make(project, "install", "CUDA=", "UV=", f"PYTHON={python}", "TORCH_INDEX=http://127.0.0.1:9")
    assert "no torch==2.13.0 from http://127.0.0.1:9/cpu: using the usual index" in printed
