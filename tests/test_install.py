"""`make install` on machines that this one is not, with indexes of made-up packages; and is every version pinned?"""

import http.server
import os
import pty
import re
import shutil
import subprocess
import sys
import threading
import time
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest
from helpers import ROOT
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from system import machine

linux_only = pytest.mark.skipif(sys.platform != "linux", reason="PyPI's torch brings CUDA on Linux alone")


# ------------------------------------------------------------------------- every version is pinned


def read_pins(path):
    """{name: requirement} of the lines of a requirements file that apply to this platform; each must pin a version."""
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    requirements = [Requirement(line) for line in lines if line and not line.startswith("-")]
    requirements = [r for r in requirements if r.marker is None or r.marker.evaluate()]
    assert all(re.fullmatch(r"==[\w.]+", str(r.specifier)) for r in requirements), path
    return {canonicalize_name(r.name): r for r in requirements}


CONSTRAINTS = read_pins(ROOT / "constraints.txt")
DIRECT = read_pins(ROOT / "requirements.txt") | read_pins(ROOT / "tests" / "requirements.txt")


def depends_on_machine(name):
    """Whether this is torch, or a package that its builds with CUDA require: which of them is installed depends on the
    machine."""
    return re.match(r"(torch|triton)$|nvidia-|cuda-", name)


def find_dependencies(requirements):
    """{name: who requires it} of all that these requirements need here, as the installed packages say."""
    todo = [(r, "requirements.txt or tests/requirements.txt") for r in requirements]
    found = {}
    seen = set()  # (name, extra) whose own requirements are in `todo`
    while todo:
        requirement, required_by = todo.pop()
        name = canonicalize_name(requirement.name)
        found.setdefault(name, required_by)
        if depends_on_machine(name) and name != "torch":
            continue
        for extra in {"", *requirement.extras}:
            if (name, extra) not in seen:
                seen.add((name, extra))
                needed = [Requirement(line) for line in distribution(name).requires or []]
                todo += [(r, name) for r in needed if r.marker is None or r.marker.evaluate({"extra": extra})]
    return found


def test_constraints_repeat_the_direct_requirements():
    assert "torch" not in CONSTRAINTS
    for name in DIRECT.keys() - {"torch"}:
        assert name in CONSTRAINTS and CONSTRAINTS[name].specifier == DIRECT[name].specifier, (
            f"{DIRECT[name]} is not in constraints.txt: its first lines say how to make it anew"
        )


def test_constraints_are_what_is_installed():
    """A new version of a package that is missing from constraints.txt may break the install some day."""
    settings = Path(sys.prefix) / "pyvenv.cfg"
    if not settings.is_file() or re.search(r"system-site-packages *= *true", settings.read_text()):
        pytest.skip("the packages here are the system's, with versions of their own")

    for name, required_by in find_dependencies(DIRECT.values()).items():
        if not depends_on_machine(name):
            assert name in CONSTRAINTS, (
                f"{required_by} requires {name}, which constraints.txt lacks: its first lines say how to make it anew"
            )
            installed = distribution(name).version
            assert CONSTRAINTS[name].specifier.contains(installed, prereleases=True), (
                f"{name} is {installed} here and {CONSTRAINTS[name]} in constraints.txt"
            )


# ------------------------------------------------------------------------- package indexes, and a project


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


class IndexServer(http.server.ThreadingHTTPServer):
    """Serves a folder of package indexes on loopback, and remembers which paths were requested. pip and uv can read the
    page that http.server makes of a folder."""

    def __init__(self, root):
        self.root = root
        self.requested = []
        server = self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *args):
                super().__init__(*args, directory=root)

            def log_message(self, form, *args):
                server.requested.append(self.path)

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def url(self, name):
        return f"http://127.0.0.1:{self.server_port}/{name}"


@pytest.fixture
def indexes(tmp_path):
    """A server with three indexes: `cpu`, which has the CPU build of torch and, as PyTorch's index does, old versions
    of other packages; `cu126`, with the build for an older driver; and `usual`, which has the rest."""
    root = tmp_path / "indexes"
    write_wheel(root / "cpu", "torch", "2.13.0+cpu")
    write_wheel(root / "cpu", "numpy", "1")
    write_wheel(root / "cu126", "torch", "2.13.0+cu126")
    for name, version in (("torch", "2.13.0"), ("numpy", "2"), ("pip", "99"), ("setuptools", "99"), ("wheel", "99")):
        write_wheel(root / "usual", name, version)
    with IndexServer(root) as server:
        yield server
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


def clean_environment(**more):
    """The environment without this machine's settings of pip and uv."""
    env = {k: v for k, v in os.environ.items() if not k.upper().startswith(("PIP_", "UV", "TORCH_CPU", "MAKE"))}
    return {**env, "PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1", **{k: str(v) for k, v in more.items()}}


def run_make(project, *arguments, **env):
    """Run make in the project, with success. The result has its `seconds`, too."""
    start = time.monotonic()
    command = ["make", *arguments]
    done = subprocess.run(
        command, cwd=project, env=clean_environment(**env), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
    done.seconds = time.monotonic() - start
    return done


def installed_versions(project):
    """{name: version} of what is installed in the project's .venv."""
    folders = project.glob(".venv/lib/*/site-packages/*.dist-info")
    return dict(p.name.removesuffix(".dist-info").split("-") for p in folders)


# ------------------------------------------------------------------------- real installs

UV = pytest.param("uv", marks=pytest.mark.skipif(not shutil.which("uv"), reason="uv is not installed"))


@linux_only
@pytest.mark.slow  # it installs three times, from indexes of its own
@pytest.mark.parametrize("tool", ["pip", UV])
def test_without_a_gpu_the_cpu_build_is_installed_and_all_else_comes_from_the_usual_index(
    project, indexes, tmp_path, tool
):
    env = {"HOME": tmp_path, "PIP_NO_CACHE_DIR": "1", "UV_CACHE_DIR": tmp_path / "cache"}
    env |= {"PIP_INDEX_URL" if tool == "pip" else "UV_DEFAULT_INDEX": indexes.url("usual")}
    arguments = ["install", f"PYTHON={sys.executable}", "CUDA=", f"TORCH_CPU_INDEX={indexes.url('cpu')}"]

    done = run_make(project, *arguments, **env)
    versions = installed_versions(project)
    assert (versions["torch"], versions["numpy"]) == ("2.13.0+cpu", "2"), done.stdout
    assert "no NVIDIA GPU here" in done.stdout and (f"{tool} pip" in done.stdout) == (tool == "uv")
    assert "/cpu/numpy/" not in indexes.requested

    # a second time there is nothing to do
    assert "nothing" in run_make(project, *arguments, **env).stdout.lower()

    # with newer requirements, as after a pull, it installs again, but does not download torch
    indexes.requested.clear()
    (project / "requirements.txt").touch()
    run_make(project, *arguments, **env)
    assert installed_versions(project) == versions
    assert not any(path.endswith(".whl") for path in indexes.requested)


@linux_only
@pytest.mark.slow  # it installs three times, from indexes of its own
@pytest.mark.parametrize("tool", ["pip", UV])
def test_the_command_for_an_older_driver_replaces_the_installed_torch(project, indexes, tmp_path, tool):
    """`pip install torch==2.13.0` from another index finds the requirement satisfied, and changes nothing."""
    env = {"HOME": tmp_path, "PIP_NO_CACHE_DIR": "1", "UV_CACHE_DIR": tmp_path / "cache"}
    env |= {"PIP_INDEX_URL" if tool == "pip" else "UV_DEFAULT_INDEX": indexes.url("usual")}
    settings = [f"PYTHON={sys.executable}", "CUDA=1", f"TORCH_INDEX={indexes.url('')}"]
    run_make(project, "install", *settings, **env)
    assert installed_versions(project)["torch"] == "2.13.0"

    make, *command = machine.OLDER_DRIVER_COMMAND.split()
    assert make == "make"
    run_make(project, *command, *settings, **env)
    assert installed_versions(project)["torch"] == "2.13.0+cu126"
    assert "nothing" in run_make(project, *command, *settings, **env).stdout.lower()

    # a later install keeps it, also with newer requirements
    assert "nothing" in run_make(project, "install", *settings, **env).stdout.lower()
    (project / "requirements.txt").touch()
    run_make(project, "install", *settings, **env)
    assert installed_versions(project)["torch"] == "2.13.0+cu126"


def test_the_command_for_a_torch_without_cuda_installs_again(project):
    """An install that is complete stays as it is, whatever TORCH_CPU_INDEX says; the command removes it first."""
    (project / ".venv").mkdir()
    (project / ".venv" / ".installed").touch()
    env = clean_environment(PYTHON="no-such-python", LC_ALL="C")

    def make(*arguments):
        return subprocess.run(["make", *arguments], cwd=project, env=env, capture_output=True, text=True)

    assert "Nothing to be done" in make("install", "TORCH_CPU_INDEX=").stdout
    command = machine.CUDA_TORCH_COMMAND.split()[1:]
    assert "Python 3.11 or newer is needed" in make(*command).stdout  # this install has begun


# ------------------------------------------------------------------------- which install commands are run


def write_stand_in(path, text):
    """Write an executable shell script."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def run_install(project, tmp_path):
    """run_install("CUDA=", uv=True) -> the calls of pip and uv that `make install` makes, a line each. pip and uv are
    stand-ins that install nothing; everything else of Python is real. run_install.done is what run_make returned."""
    log = tmp_path / "calls"
    make_venv = "mkdir -p .venv/bin && cp"
    python = write_stand_in(
        tmp_path / "fake" / "python3",
        f'[ "$1 $2" != "-m venv" ] || {{ {make_venv} "$0" .venv/bin/python; exit; }}\n'
        f'[ "$1 $2 $3" != "-m pip install" ] || {{\n'
        f'  echo "$@" >> {log}; echo "${{PIP_CONSTRAINT-none}}" > {tmp_path / "constraint"}; exit $CODE; }}\n'
        f'exec {sys.executable} "$@"',
    )
    write_stand_in(
        tmp_path / "uv" / "uv",
        f'echo "uv $@ UV_INDEX=$UV_INDEX" >> {log}\n[ "$1" != venv ] || {make_venv} {python} .venv/bin/python',
    )

    def run(*arguments, uv=False, **env):
        log.write_text("")
        shutil.rmtree(project / ".venv", ignore_errors=True)
        folders = [tmp_path / "uv"] if uv else []
        path = os.pathsep.join(map(str, [*folders, tmp_path / "fake", "/usr/bin", "/bin"]))
        env = {"HOME": tmp_path, "PATH": path, "CODE": "0", **env}
        run.done = run_make(project, "install", "PYTHON=python3", *arguments, **env)
        return log.read_text().splitlines()

    return run


@linux_only
@pytest.mark.parametrize("sign_of_cuda", ["CUDA=/dev/nvidia0", "TORCH_CPU_INDEX=", "nvidia-smi", "sbatch"])
def test_where_cuda_is_wanted_one_command_installs_what_is_pinned(run_install, indexes, tmp_path, sign_of_cuda):
    arguments = [f"TORCH_CPU_INDEX={indexes.url('cpu')}"]
    if "=" in sign_of_cuda:
        arguments.append(sign_of_cuda)
    else:
        write_stand_in(tmp_path / "fake" / sign_of_cuda, "")

    (call,) = run_install(*arguments)

    assert call.endswith("-r requirements.txt -c constraints.txt")
    assert not indexes.requested


@pytest.mark.parametrize("uv", [False, True])
def test_the_command_for_an_older_driver_names_the_build_in_the_version(run_install, project, uv):
    first, *installs = run_install(*machine.OLDER_DRIVER_COMMAND.split()[2:], "CUDA=1", uv=uv)
    installs = installs if uv else [first, *installs]  # uv makes the .venv, too

    index = "https://download.pytorch.org/whl/cu126"
    assert (project / ".venv" / "torch.txt").read_text() == "torch==2.13.0+cu126\n"
    assert "--no-deps -r .venv/torch.txt" in installs[0] and installs[0].endswith(index)
    assert "-r requirements.txt -c constraints.txt -c .venv/torch.txt" in installs[1]


@pytest.mark.parametrize("system_torch", [[], ["SYSTEM_TORCH=1"]])
def test_the_versions_that_nvidias_containers_pin_do_not_apply(run_install, project, tmp_path, system_torch):
    """They set PIP_CONSTRAINT to a file of the versions in the image, with which the pinned ones conflict."""
    (project / "torch.py").write_text("__version__ = '2.13.0'\n")  # the image's

    run_install("CUDA=1", *system_torch, PIP_CONSTRAINT="/etc/pip/constraint.txt", PYTHONPATH=project)

    assert (tmp_path / "constraint").read_text().split() == ["none"]


def test_the_first_python_that_is_new_enough_is_taken(project, tmp_path):
    write_stand_in(tmp_path / "bin" / "python3", '[ "$1" = --version ] && echo Python 3.10.12; exit 1')
    path = f"{tmp_path / 'bin'}:/usr/bin:/bin"
    command = ["make", "-n", "install", "CUDA=1", "UV="]

    # Lambda's and Ubuntu 22.04's: the message names the commands.
    done = subprocess.run(command[:1] + command[2:], cwd=project, env=clean_environment(PATH=path, PYTHON="python3"),
                          capture_output=True, text=True)  # fmt: skip
    assert done.returncode != 0
    for words in ("python3 is Python 3.10.12", "3.11 or newer", "uv python install 3.11", "make install PYTHON="):
        assert words in done.stdout

    # With another one beside it, it is taken.
    write_stand_in(tmp_path / "bin" / "python3.11", f'exec {sys.executable} "$@"')
    done = subprocess.run(command, cwd=project, env=clean_environment(PATH=path), capture_output=True, text=True)
    assert "python3.11 -m venv .venv" in done.stdout


@linux_only
@pytest.mark.parametrize("index", ["http://127.0.0.1:9", "http://nowhere.invalid/whl/cpu", "empty"])
def test_a_cpu_index_without_torch_costs_one_message(run_install, indexes, index):
    if index == "empty":
        (indexes.root / "empty" / "torch").mkdir(parents=True)
        index = indexes.url("empty")

    (call,) = run_install("CUDA=", f"TORCH_CPU_INDEX={index}")

    assert call.endswith("-r requirements.txt -c constraints.txt")
    assert f"no torch==2.13.0 from {index}: using the usual index" in run_install.done.stdout
    assert run_install.done.seconds < 15


@linux_only
def test_a_cpu_index_that_does_not_answer_costs_seconds(run_install):
    with http.server.socketserver.TCPServer(("127.0.0.1", 0), None, bind_and_activate=True) as silent_server:
        port = silent_server.server_address[1]
        (call,) = run_install("CUDA=", f"TORCH_CPU_INDEX=http://127.0.0.1:{port}")

    assert call.endswith("-c constraints.txt") and 4 < run_install.done.seconds < 20


def test_the_cpu_index_is_added_to_those_of_uv(run_install, indexes):
    cpu = indexes.url("cpu")
    first, *installs = run_install("CUDA=", f"TORCH_CPU_INDEX={cpu}", uv=True, UV_INDEX="http://mine/simple")

    assert first.startswith("uv venv") and all(line.startswith("uv pip install --python .venv") for line in installs)
    assert installs[-1].endswith("-r requirements.txt -c constraints.txt UV_INDEX=http://mine/simple")
    if sys.platform == "linux":
        assert installs[0].endswith(f"--no-deps torch==2.13.0 UV_INDEX=http://mine/simple {cpu}")


@pytest.mark.parametrize("variable", ["PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL"])
def test_pip_is_used_and_its_settings_kept_where_the_user_has_set_its_index(run_install, indexes, variable):
    cpu = indexes.url("cpu")
    calls = run_install("CUDA=", f"TORCH_CPU_INDEX={cpu}", uv=True, **{variable: "http://mine/simple"})

    assert all(line.startswith("-m pip install") and "--index-url" not in line for line in calls)
    if sys.platform == "linux":
        assert calls[0].endswith(f"--no-deps torch==2.13.0 --extra-index-url {cpu}")


def test_an_empty_uv_chooses_pip(run_install, indexes):
    calls = run_install("CUDA=", f"TORCH_CPU_INDEX={indexes.url('cpu')}", "UV=", uv=True)

    assert calls and all(line.startswith("-m pip install") for line in calls)


def test_progress_is_shown_on_a_terminal_only(project):
    arguments = ["-n", "install", "CUDA=1", f"PYTHON={sys.executable}"]
    controller, terminal = pty.openpty()
    try:
        on_terminal = subprocess.run(
            ["make", *arguments],
            cwd=project,
            env=clean_environment(),
            stdout=subprocess.PIPE,
            stderr=terminal,
            check=True,
        )
    finally:
        os.close(controller)
        os.close(terminal)
    elsewhere = run_make(project, *arguments)

    assert b" install" in on_terminal.stdout and b"--quiet -r" not in on_terminal.stdout
    assert "--quiet -r requirements.txt" in elsewhere.stdout


# ------------------------------------------------------------------------- bench.first_minutes


def test_first_minutes_measures_what_a_newcomer_waits_for(tmp_path):
    # a repository whose quickstart prints its first loss after a second, and ends another second later; it fails if its
    # home folder is not empty, as a newcomer's is
    repo = tmp_path / "repo"
    repo.mkdir()
    (repo / "Makefile").write_text(
        "install:\n\tmkdir -p .venv && head -c 3000000 /dev/urandom > .venv/torch\n"
        'quickstart:\n\ttest -z "$$(ls -A $$HOME)" && sleep 1 && echo "step     0/2 | loss: 10.1 |$(TRAIN_ARGS)"\n'
        '\tsleep 1 && mkdir -p log/quickstart && echo \'{"step": 1, "val_loss": 3.14159}\' > '
        "log/quickstart/metrics.jsonl\n"
    )
    git = ["git", "-C", str(repo), "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *arguments], check=True)

    command = [sys.executable, "-m", "bench.first_minutes", "--repo", str(repo), "TRAIN_ARGS=--dtype float32"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)

    assert done.returncode == 0, done.stderr
    names, _, values = (re.split(r" *\| *", line.strip("| ")) for line in done.stdout.splitlines())
    row = dict(zip(names, values, strict=True))
    assert row["val loss"] == "3.142" and row[".venv"] == "3 MB" and row["make's words"] == "TRAIN_ARGS=--dtype float32"
    assert 1 <= int(row["first loss"].split()[0]) < int(row["end"].split()[0]), row
