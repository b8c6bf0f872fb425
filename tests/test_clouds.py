"""The recipes for machines that are not here, run with stand-ins for torchrun and the tools of the cloud."""

import json
import os
import re
import shlex
import subprocess
import sys
import time

import pytest
from helpers import ROOT

from training.presets import parse

TWO_MACHINES = (ROOT / "docs" / "two-machines.md").read_text()
CONTAINER = (ROOT / "docs" / "container.md").read_text()
LAMBDA = (ROOT / "docs" / "lambda.md").read_text()

# ------------------------------------------------------------------------- Slurm

# What the stand-ins do beyond writing down how they were called. srun drops its own flags and runs the rest; torchrun
# writes the trainer's status, if there is one to write; python is the real one, which reads that status.
STAND_INS = {
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"',
    "scontrol": "echo node-a; echo node-b",
    "torchrun": '[ -z "$STATUS" ] || echo "$STATUS" > "$TRAIN_STATUS_FILE"; exit "${CODE:-0}"',
    "python": f'exec {sys.executable} "$@"',
    "sleep": "",
}


def run_slurm_job(folder, exit_code=0, stand_ins=STAND_INS, job_id="7", **env):
    """Run slurm.sbatch in `folder` with stand-ins, expecting this exit code. Returns the commands that it called, each
    a list of words."""
    # one folder serves as the project's .venv and as the system's PATH
    bin_folder = folder / ".venv" / "bin"
    bin_folder.mkdir(parents=True, exist_ok=True)
    (folder / "calls").write_text("")
    for name, action in stand_ins.items():
        (bin_folder / name).write_text(f'#!/bin/sh\necho "{name} $@" | head -n 1 >> {folder}/calls\n{action}\n')
        (bin_folder / name).chmod(0o755)

    env = {"PATH": f"{bin_folder}:/usr/bin:/bin", "HOME": str(folder), **env}
    env |= {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NODELIST": "node-[a,b]", "SLURM_NNODES": "2"}
    env |= {"SLURM_JOB_ID": job_id, "SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_PER_TASK": "48"}
    command = ["bash", str(ROOT / "cloud" / "slurm.sbatch"), "gpt2-350m", "--out-dir", "/shared/log/x"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == exit_code, done.stderr
    (folder / "log").write_text(done.stdout)
    return [shlex.split(line) for line in (folder / "calls").read_text().splitlines() if "python" not in line]


def find_call(calls, name):
    return next(call for call in calls if call[0] == name)


def train_config(torchrun_call):
    """The TrainConfig that the arguments of a torchrun call come to."""
    script = torchrun_call.index("train_gpt2.py")
    return parse(torchrun_call[script + 1 :], None)


def test_slurm_starts_one_torchrun_a_node_that_meets_at_the_first(tmp_path):
    calls = run_slurm_job(tmp_path)

    # srun does not inherit sbatch's --cpus-per-task
    assert "--cpus-per-task=48" in find_call(calls, "srun")
    torchrun = find_call(calls, "torchrun")
    assert {"--nnodes=2", "--nproc_per_node=4", "--rdzv-endpoint=node-a:20007", "--rdzv-id=7"} <= set(torchrun)
    cfg = train_config(torchrun)
    assert (cfg.preset, cfg.out_dir, cfg.resume, cfg.time_limit) == ("gpt2-350m", "/shared/log/x", "auto", "28200")
    # the variable that docs/two-machines.md has people export on each of several machines
    assert re.search(r"export TORCH_\w+=\w+", TWO_MACHINES)[0] in (ROOT / "cloud" / "slurm.sbatch").read_text()


def test_two_slurm_jobs_on_one_node_do_not_meet_in_one_store(tmp_path):
    def endpoint(job_id):
        torchrun = find_call(run_slurm_job(tmp_path, job_id=job_id), "torchrun")
        return next(word for word in torchrun if word.startswith("--rdzv-endpoint="))

    # two consecutive job ids, and a very large one
    endpoints = [endpoint(job_id) for job_id in ("7", "8", "48213377")]
    assert len(set(endpoints)) == 3
    # below the ports that the kernel hands out
    assert all(20000 <= int(word.rsplit(":", 1)[1]) < 30000 for word in endpoints)


@pytest.mark.parametrize("minutes, seconds", [(240, 230 * 60), (10, 5 * 60)])
def test_slurm_saves_before_the_time_of_the_job_is_over(tmp_path, minutes, seconds):
    def time_limit(**env):
        job_end = int(time.time()) + 60 * minutes
        calls = run_slurm_job(tmp_path, SLURM_JOB_END_TIME=str(job_end), **env)
        return train_config(find_call(calls, "torchrun")).time_limit

    assert seconds - 30 <= int(time_limit()) <= seconds
    assert time_limit(TIME_LIMIT="3h20m") == "3h20m"


@pytest.mark.parametrize(
    "status, reason, exit_code, requeued",
    [
        ("stopped", "the time limit", 0, True),
        ("stopped", "the time limit or another rank's signal", 0, True),
        ("stopped", "signal SIGTERM", 1, True),
        ("stopped", "signal SIGINT", 0, False),
        ("finished", "", 0, False),
        ("user_error", "out of memory; stopped signal SIGTERM", 1, False),
        ("system_error", "the disk is full", 1, False),
        (None, "", 1, False),  # crashed
    ],
)
def test_slurm_queues_a_job_again_whose_time_was_over_and_no_other(tmp_path, status, reason, exit_code, requeued):
    # a status that an earlier start of the same job has left must not count
    left = tmp_path / "gpt2-7.status.json"
    left.write_text(json.dumps({"status": "stopped", "reason": "signal SIGTERM"}))

    written = json.dumps({"status": status, "reason": reason}) if status else ""
    calls = run_slurm_job(tmp_path, 0 if requeued else exit_code, STATUS=written, CODE=str(exit_code))

    assert (["scontrol", "requeue", "7"] in calls) == requeued
    # the last line of the log says how a job ended that is not queued again
    if not requeued:
        how = f"{status} {reason}".rstrip() if status else "the trainer crashed, see above"
        assert (tmp_path / "log").read_text().splitlines()[-1].rstrip() == f"the job ends: {how}"


def test_slurm_waits_for_a_status_that_the_network_file_system_shows_late(tmp_path):
    status = json.dumps({"status": "stopped", "reason": "the time limit"})
    torchrun = f"(/bin/sleep 0.5; echo '{status}' > \"$TRAIN_STATUS_FILE\") >/dev/null 2>&1 &"
    late = {**STAND_INS, "torchrun": torchrun, "sleep": "exec /bin/sleep 0.1"}

    calls = run_slurm_job(tmp_path, stand_ins=late)

    assert ["scontrol", "requeue", "7"] in calls


# ------------------------------------------------------------------------- container images


def test_dockerfile_has_the_pins_and_every_file_a_command_needs():
    """There is no container runtime here to build the image: this checks what can be known without one."""
    text = re.sub(r"\\\n", " ", (ROOT / "cloud" / "Dockerfile").read_text())
    instructions = [line.split(maxsplit=1) for line in text.splitlines() if line and line[0] != "#"]

    # the image's Python is the one that the project is written for
    image = next(argument for name, argument in instructions if name == "FROM")
    major, minor = map(int, re.fullmatch(r"python:(\d+)\.(\d+)-slim-\w+", image).groups())
    assert (major, minor) >= (3, 11)
    assert f'target-version = "py{major}{minor}"' in (ROOT / "pyproject.toml").read_text()

    # every source of a COPY exists, and lands under its own name: of a folder the contents are copied
    copied = set()
    for name, argument in instructions:
        if name == "COPY":
            *sources, target = argument.split()
            found = {str(p.relative_to(ROOT)) for source in sources for p in ROOT.glob(source)}
            assert len(found) >= len(sources), argument
            assert found == {target} if len(found) == 1 else target == "./", argument
            copied |= found

    # every script, every package and what they need is in the image
    others = {"requirements.txt", "constraints.txt", "train.sh", "plots.ipynb"}
    assert {p.name for p in ROOT.glob("*.py")} | others <= copied
    assert {p.parent.name for p in ROOT.glob("*/__init__.py")} <= copied
    assert any("make install" in argument for name, argument in instructions if name == "RUN")
    ignored = set((ROOT / "cloud" / "Dockerfile.dockerignore").read_text().split())
    assert {"data", "log", ".venv"} <= ignored and not copied & ignored
    assert os.access(ROOT / "train.sh", os.X_OK)


def test_a_container_on_the_users_folder_has_a_venv_of_its_own(tmp_path):
    """`make clean install` in it must not delete the .venv of the host."""
    mounts_project = [line for line in CONTAINER.splitlines() if "docker run" in line and '"$PWD:/gpt2"' in line]
    assert mounts_project and all("-v /gpt2/.venv " in line for line in mounts_project)

    # what the container sees: another folder mounted over the host's .venv
    (tmp_path / "Makefile").write_text((ROOT / "Makefile").read_text())
    venv = tmp_path / ".venv"
    venv.mkdir()
    (venv / "of the host").touch()
    if subprocess.run(["mount", "-t", "tmpfs", "tmpfs", venv], capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount")
    try:
        (venv / "of the container").touch()
        subprocess.run(["make", "clean"], cwd=tmp_path, check=True, capture_output=True, timeout=30)
        assert not list(venv.iterdir())
    finally:
        subprocess.run(["umount", venv], check=True)
    assert [path.name for path in venv.iterdir()] == ["of the host"]


def test_the_torch_of_an_image_takes_the_place_of_the_pinned_one(tmp_path):
    """`make clean install SYSTEM_TORCH=1`, as the messages about a torch that does not fit the GPU say, in a folder
    where the pinned torch is installed. torchrun must then start the venv's Python, which alone has the other packages.
    """
    # a project with an installed .venv
    for name in ("Makefile", "requirements.txt", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "pinned").touch()
    (tmp_path / ".venv" / ".installed").touch()
    # an image's Python, as far as the Makefile calls it: it makes a .venv and writes down its arguments
    python = tmp_path / "python3"
    make_venv = '[ "$2" = venv ] && mkdir -p .venv/bin && cp "$0" .venv/bin/python'
    python.write_text(f'#!/bin/sh\n{make_venv}\necho "$@" >> calls\n')
    python.chmod(0o755)

    command = ["make", "clean", "install", "SYSTEM_TORCH=1", f"PYTHON={python}"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=30)
    subprocess.run([tmp_path / ".venv" / "bin" / "torchrun", "--standalone", "a b"], cwd=tmp_path, check=True)

    assert not (tmp_path / ".venv" / "pinned").exists() and (tmp_path / ".venv" / ".installed").exists()
    assert not re.search(r"^torch\b", (tmp_path / ".venv" / "requirements.txt").read_text(), re.M)
    assert (tmp_path / "calls").read_text().splitlines()[-1] == "-m torch.distributed.run --standalone a b"


# ------------------------------------------------------------------------- Lambda


def test_the_call_that_terminates_an_instance_at_lambda_survives_its_quotes(tmp_path):
    """train.sh runs SHUTDOWN_CMD with bash -c. The key is not in the variable, which train.sh prints in its log."""
    settings = re.search(r"^    export SHUTDOWN_CMD='.*?'$", LAMBDA, re.M | re.S).group()
    curl = tmp_path / "curl"
    curl.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {tmp_path}/words\n')
    curl.chmod(0o755)

    script = f'{settings.replace("ID", "0920582c", 1)}\nbash -c "$SHUTDOWN_CMD"\n! echo "$SHUTDOWN_CMD" | grep secret'
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "LAMBDA_API_KEY": "secret"}
    subprocess.run(["bash", "-e", "-c", script], env=env, check=True)

    *flags, url = (tmp_path / "words").read_text().splitlines()
    assert url.startswith("https://") and url.endswith("/api/v1/instance-operations/terminate")
    assert flags[flags.index("-u") + 1] == "secret:"
    assert json.loads(flags[flags.index("-d") + 1]) == {"instance_ids": ["0920582c"]}
    assert flags[flags.index("-H") + 1] == "Content-Type: application/json"
