"""`make install` on machines this one is not, with indexes of made-up packages; and is every version pinned?"""

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

linux = pytest.mark.skipif(sys.platform != "linux", reason="PyPI's torch brings CUDA on Linux alone")


def pins(path):
    """{name: requirement} of the lines of a requirements file that hold on this platform, each one version."""
    lines = [line.split("#")[0].strip() for line in path.read_text().splitlines()]
    found = [Requirement(line) for line in lines if line and not line.startswith("-")]
    found = [r for r in found if r.marker is None or r.marker.evaluate()]
    assert all(re.fullmatch(r"==[\w.]+", str(r.specifier)) for r in found), path
    return {canonicalize_name(r.name): r for r in found}


CONSTRAINTS = pins(ROOT / "constraints.txt")
DIRECT = pins(ROOT / "requirements.txt") | pins(ROOT / "tests" / "requirements.txt")


def by_the_machine(name):
    """Torch, and what its builds with CUDA bring: which of them it is depends on the machine."""
    return re.match(r"(torch|triton)$|nvidia-|cuda-", name)


def brought(requirements):
    """{name: who requires it} of all that these requirements bring here, as the installed packages say."""
    todo = [(r, "requirements.txt or tests/requirements.txt") for r in requirements]
    found, seen = {}, set()
    while todo:
        requirement, by = todo.pop()
        name = canonicalize_name(requirement.name)
        found.setdefault(name, by)
        if by_the_machine(name) and name != "torch":
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
    """A package that is missing from constraints.txt is one that its author may break our install with, some day."""
    settings = Path(sys.prefix) / "pyvenv.cfg"
    if not settings.is_file() or re.search(r"system-site-packages *= *true", settings.read_text()):
        pytest.skip("the packages here are the system's, with versions of their own")
    for name, by in brought(DIRECT.values()).items():
        if not by_the_machine(name):
            assert name in CONSTRAINTS, (
                f"{by} requires {name}, which constraints.txt lacks: its first lines say how to make it anew"
            )
            here = distribution(name).version
            assert CONSTRAINTS[name].specifier.contains(here, prereleases=True), (
                f"{name} is {here} here and {CONSTRAINTS[name]} in constraints.txt"
            )


def wheel(folder, name, version):
    """A package of nothing but a name and a version."""
    info = f"{name}-{version}.dist-info"
    files = {f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"}
    files[f"{info}/WHEEL"] = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    files[f"{info}/RECORD"] = "".join(f"{f},,\n" for f in [*files, f"{info}/RECORD"])
    (folder / name).mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(folder / name / f"{name}-{version}-py3-none-any.whl", "w") as archive:
        for path, text in files.items():
            archive.writestr(path, text)


class Indexes(http.server.ThreadingHTTPServer):
    """A folder of package indexes on loopback (http.server's list of a folder is a page that pip and uv read)."""

    def __init__(self, root):
        self.root, self.asked, server = root, [], self

        class Handler(http.server.SimpleHTTPRequestHandler):
            def __init__(self, *args):
                super().__init__(*args, directory=root)

            def log_message(self, form, *args):
                server.asked.append(self.path)

        super().__init__(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def url(self, name):
        return f"http://127.0.0.1:{self.server_port}/{name}"


@pytest.fixture
def indexes(tmp_path):
    root = tmp_path / "indexes"
    wheel(root / "cpu", "torch", "2.13.0+cpu")
    wheel(root / "cpu", "numpy", "1")  # as PyTorch's index has packages of others, older ones
    for name, version in (("torch", "2.13.0"), ("numpy", "2"), ("pip", "99"), ("setuptools", "99"), ("wheel", "99")):
        wheel(root / "usual", name, version)
    with Indexes(root) as server:
        yield server
        server.shutdown()


@pytest.fixture
def project(tmp_path):
    """The Makefile and requirements of two packages."""
    folder = tmp_path / "project"
    folder.mkdir()
    shutil.copy(ROOT / "Makefile", folder)
    torch = [line for line in (ROOT / "requirements.txt").read_text().splitlines() if line.startswith("torch==2.13.0;")]
    (folder / "requirements.txt").write_text("\n".join([*torch, "numpy", ""]))
    (folder / "constraints.txt").write_text("numpy==2\n")
    return folder


def clean(**more):
    """The environment without this machine's settings of pip and uv."""
    env = {k: v for k, v in os.environ.items() if not k.upper().startswith(("PIP_", "UV", "TORCH_CPU", "MAKE"))}
    return {**env, "PIP_CONFIG_FILE": os.devnull, "UV_NO_CONFIG": "1", **{k: str(v) for k, v in more.items()}}


def make(project, *words, **env):
    start = time.monotonic()
    done = subprocess.run(["make", *words], cwd=project, env=clean(**env), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    done.seconds = time.monotonic() - start
    return done


def versions(project):
    folders = project.glob(".venv/lib/*/site-packages/*.dist-info")
    return dict(p.name.removesuffix(".dist-info").split("-") for p in folders)


UV = pytest.param("uv", marks=pytest.mark.skipif(not shutil.which("uv"), reason="uv is not installed"))


@linux
@pytest.mark.parametrize("tool", ["pip", UV])
def test_without_a_gpu_the_cpu_build_is_installed_and_all_else_comes_from_the_usual_index(
    project, indexes, tmp_path, tool
):
    env = {"HOME": tmp_path, "PIP_NO_CACHE_DIR": "1", "UV_CACHE_DIR": tmp_path / "cache"}
    env |= {"PIP_INDEX_URL" if tool == "pip" else "UV_DEFAULT_INDEX": indexes.url("usual")}
    words = ["install", f"PYTHON={sys.executable}", "CUDA=", f"TORCH_CPU_INDEX={indexes.url('cpu')}"]
    done = make(project, *words, **env)
    found = versions(project)
    assert (found["torch"], found["numpy"]) == ("2.13.0+cpu", "2"), done.stdout
    assert "no NVIDIA GPU here" in done.stdout and (f"{tool} pip" in done.stdout) == (tool == "uv")
    assert "/cpu/numpy/" not in indexes.asked
    assert "nothing" in make(project, *words, **env).stdout.lower()
    indexes.asked.clear()
    (project / "requirements.txt").touch()  # and once more, as after a pull: torch is there
    make(project, *words, **env)
    assert versions(project) == found and not any(path.endswith(".whl") for path in indexes.asked)


def stand_in(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.fixture
def calls(project, tmp_path):
    """What `make install` asks of pip and uv, which do nothing here; everything else of Python is real."""
    log = tmp_path / "calls"
    venv = "mkdir -p .venv/bin && cp"
    python = stand_in(
        tmp_path / "fake" / "python3",
        f'[ "$1 $2" != "-m venv" ] || {{ {venv} "$0" .venv/bin/python; exit; }}\n'
        f'[ "$1 $2 $3" != "-m pip install" ] || {{ echo "$@" >> {log}; exit $CODE; }}\n'
        f'exec {sys.executable} "$@"',
    )
    stand_in(
        tmp_path / "uv" / "uv",
        f'echo "uv $@ UV_INDEX=$UV_INDEX" >> {log}\n[ "$1" != venv ] || {venv} {python} .venv/bin/python',
    )

    def run(*words, uv=False, **env):
        log.write_text("")
        shutil.rmtree(project / ".venv", ignore_errors=True)
        paths = [tmp_path / "uv"] if uv else []
        path = os.pathsep.join(map(str, [*paths, tmp_path / "fake", "/usr/bin", "/bin"]))
        env = {"HOME": tmp_path, "PATH": path, "CODE": "0", **env}
        run.done = make(project, "install", "PYTHON=python3", *words, **env)
        return log.read_text().splitlines()

    return run


@linux
@pytest.mark.parametrize("how", ["CUDA=/dev/nvidia0", "TORCH_CPU_INDEX=", "nvidia-smi", "sbatch"])
def test_where_cuda_is_meant_one_command_installs_what_is_pinned(calls, indexes, tmp_path, how):
    words = [f"TORCH_CPU_INDEX={indexes.url('cpu')}"]
    if "=" in how:
        words.append(how)
    else:
        stand_in(tmp_path / "fake" / how, "")
    (installed,) = calls(*words)
    assert installed.endswith("-r requirements.txt -c constraints.txt")
    assert not indexes.asked


@linux
@pytest.mark.parametrize("index", ["http://127.0.0.1:9", "http://nowhere.invalid/whl/cpu", "empty"])
def test_a_cpu_index_that_is_not_there_costs_a_line_and_no_more(calls, indexes, index):
    if index == "empty":
        (indexes.root / "empty" / "torch").mkdir(parents=True)
        index = indexes.url("empty")
    (installed,) = calls("CUDA=", f"TORCH_CPU_INDEX={index}")
    assert installed.endswith("-r requirements.txt -c constraints.txt")
    assert f"no torch==2.13.0 from {index}: using the usual index" in calls.done.stdout and calls.done.seconds < 15


@linux
def test_a_cpu_index_that_does_not_answer_costs_seconds(calls):
    with http.server.socketserver.TCPServer(("127.0.0.1", 0), None, bind_and_activate=True) as deaf:
        (installed,) = calls("CUDA=", f"TORCH_CPU_INDEX=http://127.0.0.1:{deaf.server_address[1]}")
    assert installed.endswith("-c constraints.txt") and 4 < calls.done.seconds < 20


def test_the_settings_of_pip_and_uv_are_added_to_and_uv_waits_where_only_pip_has_some(calls, indexes):
    cpu = indexes.url("cpu")
    words = ["CUDA=", f"TORCH_CPU_INDEX={cpu}"]
    first, *more = calls(*words, uv=True, UV_INDEX="http://mine/simple")
    assert first.startswith("uv venv") and all(line.startswith("uv pip install --python .venv") for line in more)
    assert more[-1].endswith("-r requirements.txt -c constraints.txt UV_INDEX=http://mine/simple")
    if sys.platform == "linux":
        assert more[0].endswith(f"--no-deps torch==2.13.0 UV_INDEX=http://mine/simple {cpu}")
    for env in ({"PIP_INDEX_URL": "http://mine/simple"}, {"PIP_EXTRA_INDEX_URL": "http://mine/simple"}):
        lines = calls(*words, uv=True, **env)
        assert all(line.startswith("-m pip install") and "--index-url" not in line for line in lines)
        if sys.platform == "linux":
            assert lines[0].endswith(f"--no-deps torch==2.13.0 --extra-index-url {cpu}")
    assert all(line.startswith("-m pip install") for line in calls(*words, "UV=", uv=True))


def test_progress_is_for_a_terminal(project):
    command = ["make", "-n", "install", "CUDA=1", f"PYTHON={sys.executable}"]
    ours, theirs = pty.openpty()
    try:
        seen = subprocess.run(command, cwd=project, env=clean(), stdout=subprocess.PIPE, stderr=theirs, check=True)
    finally:
        os.close(ours)
        os.close(theirs)
    assert b" install" in seen.stdout and b"--quiet -r" not in seen.stdout
    assert "--quiet -r requirements.txt" in make(project, *command[1:]).stdout


def test_first_minutes_tells_what_a_newcomer_waits_for(tmp_path):
    repo = tmp_path / "repo"
    repo.mkdir()
    (repo / "Makefile").write_text(
        "install:\n\tmkdir -p .venv && head -c 3000000 /dev/urandom > .venv/torch\n"
        'quickstart:\n\ttest -z "$$(ls -A $$HOME)" && sleep 1 && echo "step     0/2 | loss: 10.1 |$(TRAIN_ARGS)"\n'
        '\tsleep 1 && mkdir -p log/quickstart && echo \'{"step": 1, "val_loss": 3.14159}\' > '
        "log/quickstart/metrics.jsonl\n"
    )
    git = ["git", "-C", str(repo), "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], check=True)
    command = [sys.executable, "-m", "bench.first_minutes", "--repo", str(repo), "TRAIN_ARGS=--dtype float32"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    names, _, values = (re.split(r" *\| *", line.strip("| ")) for line in done.stdout.splitlines())
    row = dict(zip(names, values, strict=True))
    assert row["val loss"] == "3.142" and row[".venv"] == "3 MB" and row["make's words"] == "TRAIN_ARGS=--dtype float32"
    assert 1 <= int(row["first loss"].split()[0]) < int(row["end"].split()[0]), row
