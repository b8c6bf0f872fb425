"""The recipes for machines that are not here: their own parsers take them where there is one, and what they would run
is run with stand-ins for torchrun and the cloud."""

import copy
import os
import re
import shlex
import subprocess
import time

import pytest
import yaml
from helpers import ROOT

from training.presets import parse

CLOUDS = (ROOT / "docs" / "clouds.md").read_text()
SKY = yaml.safe_load((ROOT / "cloud" / "sky.yaml").read_text())


def run_recipe(script, folder, ends=0, without="", **env):
    """Run a shell script in `folder` with a .venv of stand-ins; returns the commands they were called with. torchrun's
    says SAYS and exits with CODE."""
    bin_ = folder / ".venv" / "bin"
    bin_.mkdir(parents=True, exist_ok=True)
    (folder / "calls").write_text("")
    for name in {"torchrun", "python", "make", "srun", "scontrol", "conda", "sudo"} - {without}:
        then = {
            "srun": 'while [ "${1#-}" != "$1" ]; do shift; done; exec "$@"',
            "scontrol": "echo node-a; echo node-b",
            "torchrun": 'echo "$SAYS"; exit "${CODE:-0}"',
        }.get(name, "")
        (bin_ / name).write_text(f'#!/bin/sh\necho "{name} $@" >> {folder}/calls\n{then}\n')
        (bin_ / name).chmod(0o755)
    env = {"PATH": f"{bin_}:/usr/bin:/bin", "HOME": str(folder), **env}
    done = subprocess.run(["bash", "-c", script], cwd=folder, env=env, capture_output=True, text=True, timeout=30)
    assert done.returncode == ends, done.stderr
    return [shlex.split(line) for line in (folder / "calls").read_text().splitlines()]


def train_config(call):
    """The TrainConfig that a torchrun call of a recipe comes to."""
    at = call.index("train_gpt2.py")
    return parse(call[at + 1 :], None)


def test_skypilot_reads_its_file(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    sky = pytest.importorskip("sky", reason="skypilot is not installed")
    ours = {"env_overrides": [("BUCKET", "mine")], "secrets_overrides": [("HF_TOKEN", "hf_x")]}
    task = sky.Task.from_yaml_config(copy.deepcopy(SKY), **ours)
    assert all(r.use_spot and r.autostop_config.down and r.job_recovery for r in task.resources)
    assert task.storage_mounts["/runs"].name == "mine" and task.storage_mounts["/runs"].mode.value == "MOUNT_CACHED"
    assert "hf_x" not in repr(task.secrets) + repr(task)


def test_sky_yaml_installs_trains_and_publishes(tmp_path):
    plain = {k: str(v) for k, v in SKY["envs"].items()}
    calls = run_recipe(SKY["setup"], tmp_path, **plain)
    assert ["python", "hellaswag.py"] in calls and ["python", "fineweb.py"] in calls
    assert ["make", "install", f"PYTHON={tmp_path}/py311/bin/python"] in calls
    (trained,) = run_recipe(SKY["run"], tmp_path, **plain, SKYPILOT_NUM_GPUS_PER_NODE="8")
    cfg = train_config(trained)
    assert "--nproc_per_node=8" in trained and cfg.preset == "gpt2-124m" and cfg.resume == "auto"
    assert cfg.out_dir == "/runs/gpt2-124m"  # the bucket: what a machine that is preempted leaves to the next
    mine = {**plain, "TRAIN": "speedrun-124m --seed 7", "DATA": "me/tokens", "PUSH_TO": "me/x"}
    trained, pushed = run_recipe(SKY["run"], tmp_path, **mine, SKYPILOT_NUM_GPUS_PER_NODE="1")
    cfg = train_config(trained)
    assert (cfg.preset, cfg.seed, cfg.data_dir) == ("speedrun-124m", 7, "hf://me/tokens")
    assert pushed == ["python", "hub.py", "push-model", "/runs/speedrun-124m", "me/x"]
    assert ["python", "fineweb.py"] not in run_recipe(SKY["setup"], tmp_path, **mine)


def test_sky_yaml_takes_python_from_uv_on_an_image_without_conda(tmp_path):
    uv = tmp_path / ".local" / "bin" / "uv"
    uv.parent.mkdir(parents=True)
    uv.write_text(f'#!/bin/sh\necho "uv $@" >> {tmp_path}/calls\n[ "$2" != find ] || echo /uv/python3.11\n')
    uv.chmod(0o755)
    calls = run_recipe(SKY["setup"], tmp_path, without="conda", **SKY["envs"])
    assert ["uv", "python", "install", "3.11"] in calls and ["make", "install", "PYTHON=/uv/python3.11"] in calls


def slurm(folder, ends=0, **env):
    """The commands that a job of slurm.sbatch calls."""
    env |= {"SLURM_SUBMIT_DIR": str(folder), "SLURM_JOB_NODELIST": "node-[a,b]", "SLURM_NNODES": "2"}
    env |= {"SLURM_JOB_ID": "7", "SLURM_GPUS_ON_NODE": "4", "SLURM_CPUS_PER_TASK": "48", "TMPDIR": str(folder)}
    script = shlex.join(["bash", str(ROOT / "cloud" / "slurm.sbatch"), "gpt2-350m", "--out-dir", "/shared/log/x"])
    return run_recipe(script, folder, ends, **env)


def test_slurm_starts_one_torchrun_a_node_that_meets_at_the_first(tmp_path):
    calls = slurm(tmp_path)
    assert "--cpus-per-task=48" in next(c for c in calls if c[0] == "srun")  # which does not inherit sbatch's
    assert re.search(r"export TORCH_\w+=\w+", CLOUDS)[0] in (ROOT / "cloud" / "slurm.sbatch").read_text()
    torchrun = next(c for c in calls if c[0] == "torchrun")
    assert {"--nnodes=2", "--nproc_per_node=4", "--rdzv-endpoint=node-a:29500", "--rdzv-id=7"} <= set(torchrun)
    cfg = train_config(torchrun)
    assert (cfg.preset, cfg.out_dir, cfg.resume, cfg.time_limit) == ("gpt2-350m", "/shared/log/x", "auto", "28200")


@pytest.mark.parametrize("minutes, seconds", [(240, 230 * 60), (10, 5 * 60)])
def test_slurm_saves_before_the_time_of_the_job_is_over(tmp_path, minutes, seconds):
    def limit(**env):
        calls = slurm(tmp_path, SLURM_JOB_END_TIME=str(int(time.time()) + 60 * minutes), **env)
        return train_config(next(c for c in calls if c[0] == "torchrun")).time_limit

    assert seconds - 30 <= int(limit()) <= seconds
    assert limit(TIME_LIMIT="3h20m") == "3h20m"


@pytest.mark.parametrize(
    "says, code, again",
    [
        ("stopped by the time limit at step 900, all saved; go on: ...", 0, True),
        ("stopped by signal SIGTERM at step 900, all saved; go on: ...", 1, True),
        ("stopped by signal SIGINT at step 900, all saved; go on: ...", 0, False),
        ("done: 19073 steps in 7h00m", 0, False),
        ("/shared/log/x is complete at step 19073", 0, False),
        ("error: out of memory", 1, False),
    ],
)
def test_slurm_queues_what_was_out_of_time_again_and_nothing_else(tmp_path, says, code, again):
    calls = slurm(tmp_path, ends=0 if again else code, SAYS=f"resumed from ...\n{says}", CODE=str(code))
    assert (["scontrol", "requeue", "7"] in calls) == again


def test_dockerfile_has_the_pins_and_every_file_a_command_needs():
    """Nothing builds it here: no container runtime. What can be known without one is."""
    lines = re.sub(r"\\\n", " ", (ROOT / "cloud" / "Dockerfile").read_text()).splitlines()
    steps = [line.split(maxsplit=1) for line in lines if line and line[0] != "#"]
    image = next(text for word, text in steps if word == "FROM")
    major, minor = map(int, re.fullmatch(r"python:(\d+)\.(\d+)-slim-\w+", image).groups())
    assert (3, 11) <= (major, minor) and f'target-version = "py{major}{minor}"' in (ROOT / "pyproject.toml").read_text()
    copied = set()
    for word, text in steps:
        if word == "COPY":
            *sources, target = text.split()
            found = {str(p.relative_to(ROOT)) for source in sources for p in ROOT.glob(source)}
            assert len(found) >= len(sources), text
            assert found == {target} if len(found) == 1 else target == "./", text  # of a folder its contents are copied
            copied |= found
    others = {"requirements.txt", "constraints.txt", "train.sh", "plots.ipynb"}
    assert {p.name for p in ROOT.glob("*.py")} | others <= copied
    assert {p.parent.name for p in ROOT.glob("*/__init__.py")} <= copied
    assert any("make install" in text for word, text in steps if word == "RUN")  # which installs requirements.txt
    ignored = set((ROOT / "cloud" / "Dockerfile.dockerignore").read_text().split())
    assert {"data", "log", ".venv"} <= ignored and not copied & ignored
    assert os.access(ROOT / "train.sh", os.X_OK)


def test_the_torch_of_an_image_takes_the_place_of_the_pinned_one(tmp_path):
    """The messages about a torch that does not fit the GPU say `make clean install SYSTEM_TORCH=1`, in a folder where
    the pinned one is installed; and torchrun must then start the venv's Python, which alone has the other packages."""
    for name in ("Makefile", "requirements.txt", "constraints.txt"):
        (tmp_path / name).write_text((ROOT / name).read_text())
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "pinned").touch()
    (tmp_path / ".venv" / ".installed").touch()
    python = tmp_path / "python3"  # like an image's, as far as the Makefile asks
    python.write_text(
        '#!/bin/sh\n[ "$2" = venv ] && mkdir -p .venv/bin && cp "$0" .venv/bin/python\necho "$@" >> calls\n'
    )
    python.chmod(0o755)
    command = ["make", "clean", "install", "SYSTEM_TORCH=1", f"PYTHON={python}"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, timeout=30)
    assert not (tmp_path / ".venv" / "pinned").exists() and (tmp_path / ".venv" / ".installed").exists()
    assert not re.search(r"^torch\b", (tmp_path / ".venv" / "requirements.txt").read_text(), re.M)
    subprocess.run([tmp_path / ".venv" / "bin" / "torchrun", "--standalone", "a b"], cwd=tmp_path, check=True)
    assert (tmp_path / "calls").read_text().splitlines()[-1] == "-m torch.distributed.run --standalone a b"
