"""The recipes for machines that are not here, run with stand-ins for torchrun and the tools of the cloud."""

import json
import os
import shlex
import subprocess
import sys
import time

import pytest
from helpers import ROOT, read_table, write_script

from lifecycle.command_line import parse

# srun drops its own flags and runs the rest; torchrun writes the trainer's status, if there is one to write.
STAND_INS = {
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"',
    "scontrol": "echo node-a; echo node-b",
    "torchrun": '[ -z "$STATUS" ] || echo "$STATUS" > "$TRAIN_STATUS_FILE"; exit "${CODE:-0}"',
    "python3": f'[ "$1" != -m ] || {{ shift 2; exec torchrun "$@"; }}; exec {shlex.quote(sys.executable)} -S "$@"',
    "sleep": "",
}


@pytest.fixture
def run_slurm_job(tmp_path):
    """run_slurm_job(NAME=value, ...) -> the exit code of slurm.sbatch, and {program: the words of its last call}."""
    bin_folder = tmp_path / "bin"
    for name, action in STAND_INS.items():
        write_script(bin_folder / name, f'#!/bin/sh\necho "{name} $@" | head -n 1 >> {tmp_path}/calls\n{action}\n')

    def run(*words, **env):
        job = {"SLURM_JOB_NODELIST": "node-[a,b]", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "4", "SLURM_JOB_ID": "7"}
        env = {**job, "SLURM_SUBMIT_DIR": str(tmp_path), "PATH": f"{bin_folder}:/usr/bin:/bin", **env}
        command = ["bash", ROOT / "cloud/slurm.sbatch", *(words or ("gpt2-350m", "--out-dir", "/shared/x"))]
        done = subprocess.run(command, env=env, capture_output=True, timeout=30)
        calls = [line.split() for line in (tmp_path / "calls").read_text().splitlines()]
        return done.returncode, {words[0]: words for words in calls}

    return run


# A job's number | where its nodes meet | the seconds that are left | TIME_LIMIT | the --time-limit of its ranks.
# Two jobs that share a node do not meet. The ranks save ten minutes before the job is over, or in the middle of a short
# job, or when the user says.
JOBS = """
7        | 20007 |       |       | 28200
48213378 | 23378 | 14400 |       | 13800
7        | 20007 | 600   |       | 300
7        | 20007 | 14400 | 12000 | 12000
"""


@pytest.mark.parametrize("job_id, port, left, setting, seconds", read_table(JOBS))
def test_slurm_starts_a_torchrun_on_each_node(run_slurm_job, job_id, port, left, setting, seconds):
    env = {"SLURM_JOB_END_TIME": str(int(time.time()) + int(left))} if left else {}
    words = run_slurm_job(SLURM_JOB_ID=job_id, TIME_LIMIT=setting, **env)[1]["torchrun"]
    meeting = {f"--rdzv-endpoint=node-a:{port}", f"--rdzv-id={job_id}"}
    assert {"--nnodes=2", "--nproc_per_node=4", *meeting} <= set(words)
    cfg = parse(words[words.index("train_gpt2.py") + 1 :])[0]
    assert (cfg.preset, cfg.out_dir, cfg.resume) == ("gpt2-350m", "/shared/x", "auto")
    assert 0 <= int(seconds) - int(cfg.time_limit) <= 30


def test_slurm_prefers_the_projects_own_python(run_slurm_job, tmp_path):
    """Without a .venv, as in the tests above and below, the active one serves."""
    write_script(tmp_path / ".venv/bin/python", "#!/bin/sh\nexit 3\n")
    assert run_slurm_job()[0] == 3


@pytest.mark.parametrize("words", [["--resume", "/shared/x"], ["--resume=/shared/x"]])
def test_slurm_resumes_the_run_that_is_named(run_slurm_job, words):
    assert run_slurm_job(*words)[1]["torchrun"][-3:-2] == words[-1:]


# How the trainer ended, and why; torchrun's exit code. Only a run whose time is over is queued again: another rank's
# clock may have been first. Without a status it has crashed.
ENDS = """
stopped    | the time limit                        | 0 | again
stopped    | another rank                          | 0 | again
stopped    | signal SIGTERM                        | 1 | again
stopped    | signal SIGINT                         | 0 |
finished   |                                       | 0 |
user_error | out of memory; stopped signal SIGTERM | 1 |
           |                                       | 1 |
"""


@pytest.mark.parametrize("status, reason, code, again", read_table(ENDS))
def test_slurm_queues_a_job_again_if_its_time_is_over(run_slurm_job, tmp_path, status, reason, code, again):
    # The status that an earlier start of the same job has left must not count.
    left = json.dumps({"status": "stopped", "reason": "the time limit"})
    (tmp_path / "gpt2-7.status.json").write_text(left)

    written = json.dumps({"status": status, "reason": reason}) if status else ""
    exit_code, calls = run_slurm_job(STATUS=written, CODE=code)
    assert (calls["scontrol"] == ["scontrol", "requeue", "7"]) == bool(again)
    assert exit_code == (0 if again else int(code))


def test_the_image_has_every_file_that_a_command_needs():
    lines = (ROOT / "cloud/Dockerfile").read_text().splitlines()
    patterns = [word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]]
    copied = {path for pattern in patterns for path in ROOT.glob(pattern)}
    needed = {ROOT / name for name in ("Makefile", "requirements.txt", "constraints.txt", "train.sh")}
    assert needed | {*ROOT.glob("*.py")} | {path.parent for path in ROOT.glob("*/__init__.py")} <= copied
    assert os.access(ROOT / "train.sh", os.X_OK)
