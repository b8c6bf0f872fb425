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

# srun drops its own flags and runs the rest; torchrun writes the trainer's status, if there is one to write.
STAND_INS = {
    "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"',
    "scontrol": "echo node-a; echo node-b",
    "torchrun": '[ -z "$STATUS" ] || echo "$STATUS" > "$TRAIN_STATUS_FILE"; exit "${CODE:-0}"',
    "python": f'exec {sys.executable} "$@"',
    "sleep": "",
}


def run_slurm_job(folder, exit_code=0, job_id="7", **env):
    """Run slurm.sbatch in `folder`, expecting this exit code. Returns the commands that it called, each a list of
    words."""
    # One folder serves as the project's .venv and as the system's PATH.
    bin_folder = folder / ".venv" / "bin"
    bin_folder.mkdir(parents=True, exist_ok=True)
    (folder / "calls").write_text("")
    for name, action in STAND_INS.items():
        (bin_folder / name).write_text(f'#!/bin/sh\necho "{name} $@" | head -n 1 >> {folder}/calls\n{action}\n')
        (bin_folder / name).chmod(0o755)

    env = {"PATH": f"{bin_folder}:/usr/bin:/bin", **env, "SLURM_JOB_NODELIST": "node-[a,b]", "SLURM_NNODES": "2"}
    env |= {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_ID": job_id, "SLURM_GPUS_ON_NODE": "4"}
    command = ["bash", str(ROOT / "cloud" / "slurm.sbatch"), "gpt2-350m", "--out-dir", "/shared/log/x"]
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == exit_code, done.stderr
    return [shlex.split(line) for line in (folder / "calls").read_text().splitlines() if "python" not in line]


def find_torchrun(calls):
    """The words of the call of torchrun, and the settings that its trainer parses."""
    words = next(call for call in calls if call[0] == "torchrun")
    return words, parse(words[words.index("train_gpt2.py") + 1 :], None)


def test_slurm_starts_one_torchrun_a_node_that_meets_at_the_first(tmp_path):
    words, cfg = find_torchrun(run_slurm_job(tmp_path))
    assert {"--nnodes=2", "--nproc_per_node=4", "--rdzv-endpoint=node-a:20007", "--rdzv-id=7"} <= set(words)
    assert (cfg.preset, cfg.out_dir, cfg.resume, cfg.time_limit) == ("gpt2-350m", "/shared/log/x", "auto", "28200")

    # Two jobs that share a node do not meet.
    words, _ = find_torchrun(run_slurm_job(tmp_path, job_id="48213378"))
    assert "--rdzv-endpoint=node-a:23378" in words


@pytest.mark.parametrize("minutes, seconds", [(240, 230 * 60), (10, 5 * 60)])
def test_slurm_saves_before_the_time_of_the_job_is_over(tmp_path, minutes, seconds):
    end = {"SLURM_JOB_END_TIME": str(int(time.time()) + 60 * minutes)}
    _, cfg = find_torchrun(run_slurm_job(tmp_path, **end))
    assert seconds - 30 <= int(cfg.time_limit) <= seconds
    _, cfg = find_torchrun(run_slurm_job(tmp_path, TIME_LIMIT="3h20m", **end))
    assert cfg.time_limit == "3h20m"


@pytest.mark.parametrize(
    "status, reason, exit_code, requeued",
    [
        ("stopped", "the time limit", 0, True),
        ("stopped", "another rank", 0, True),  # whose clock was first
        ("stopped", "signal SIGTERM", 1, True),
        ("stopped", "signal SIGINT", 0, False),
        ("finished", "", 0, False),
        ("user_error", "out of memory; stopped signal SIGTERM", 1, False),
        (None, "", 1, False),  # crashed
    ],
)
def test_slurm_queues_a_job_again_whose_time_was_over_and_no_other(tmp_path, status, reason, exit_code, requeued):
    # The status that an earlier start of the same job has left must not count.
    left = tmp_path / "gpt2-7.status.json"
    left.write_text(json.dumps({"status": "stopped", "reason": "signal SIGTERM"}))

    written = json.dumps({"status": status, "reason": reason}) if status else ""
    calls = run_slurm_job(tmp_path, 0 if requeued else exit_code, STATUS=written, CODE=str(exit_code))
    assert (["scontrol", "requeue", "7"] in calls) == requeued


def test_dockerfile_copies_every_file_that_a_command_needs():
    text = (ROOT / "cloud" / "Dockerfile").read_text()
    copied = set()
    for sources in re.findall(r"^COPY (.*) \S+$", text, re.M):
        for source in sources.split():
            found = {str(path.relative_to(ROOT)) for path in ROOT.glob(source)}
            assert found, source
            copied |= found
    needed = {"requirements.txt", "constraints.txt", "train.sh"}
    needed |= {path.name for path in ROOT.glob("*.py")} | {path.parent.name for path in ROOT.glob("*/__init__.py")}
    assert needed <= copied and os.access(ROOT / "train.sh", os.X_OK)
