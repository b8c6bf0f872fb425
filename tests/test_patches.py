"""The worked changes in docs/patches/ apply, pass their own tests, and lose nothing to a kill.

The first lines of a diff say with which flags its feature is on, and which tests it has besides tests/test_NAME.py:

    # flags: --model.first-window 4
    # tests: tests/test_bad_input.py 'tests/test_model.py::test_cache[gpt2 first_window=2]'
    diff --git a/model.py b/model.py

Each is tried on a copy of the tree. There, one pytest process runs its tests, and the last test of this file with its
flags; without a patch that test is of the program as it is.
"""

import importlib
import itertools
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, load_metrics, same_weights

from checkpoints import checkpoint
from training.step import Trainer

PATCHES = {path.stem: path for path in sorted((ROOT / "docs/patches").glob("*.diff"))}
FLAGS_OF_THE_PATCH = "PATCH_FLAGS"  # an environment variable
KILL_TEST = "tests/test_patches.py::test_a_killed_run_ends_with_the_same_bits"


def read_words(patch, name):
    """The words after "# NAME:" in the lines before the diff."""
    head = patch.read_text().partition("diff --git ")[0]
    return shlex.split(" ".join(re.findall(rf"^# {name}:(.*)$", head, re.MULTILINE)))


def copy_tree(folder):
    """Copy the tracked files, as they are now."""
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for name in filter(None, names.split("\0")):
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        if (ROOT / name).exists():
            shutil.copy(ROOT / name, folder / name)


@pytest.mark.parametrize("name", PATCHES)
def test_the_patch_applies_and_passes(tmp_path, name):
    patch, tree = PATCHES[name], tmp_path / "tree"
    flags = read_words(patch, "flags")
    assert flags, f"{patch} has no line '# flags: ...' above the diff: the run would be one without the feature"
    copy_tree(tree)
    subprocess.run(["git", "apply", patch], cwd=tree, check=True)

    # The kill comes first: it forks, which is safe before anything has used torch's threads.
    tests = [KILL_TEST, f"tests/test_{name}.py", *read_words(patch, "tests")]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--basetemp", tmp_path / "temp", *tests]
    env = {**os.environ, FLAGS_OF_THE_PATCH: shlex.join(flags), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True)

    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


# ------------------------------------------------------------------------- what each patch must survive


def train_and_die(train, flags):
    """Train "killed" in a forked process, which is killed within step 7 of 12; returns the signal that it died of. Of
    two saves before, at steps 3 and 6, the later one may still be written."""
    child = os.fork()
    if child == 0:
        try:
            update, steps = Trainer.update, itertools.count()

            def update_or_die(trainer):
                if next(steps) == 7:
                    os.kill(os.getpid(), signal.SIGKILL)
                update(trainer)

            Trainer.update = update_or_die
            train("killed", *flags)
        finally:
            os._exit(1)  # it must not return into pytest
    return os.WTERMSIG(os.waitpid(child, 0)[1])


def measured(run):
    """The lines of metrics.jsonl, without the times."""
    times = {"step_ms", "wait_ms", "tokens_per_second", "mfu"}
    return [{key: value for key, value in row.items() if key not in times} for row in load_metrics(run)]


def state_of(run):
    """All that the newest checkpoint has besides the weights."""
    saved = checkpoint.read_train_state(run)
    return [saved[key] for key in ("step", "sequences", "components")]


def test_a_killed_run_ends_with_the_same_bits(train, tmp_path):
    """Losses, norms and all else that is measured, weights, and each part of the state."""
    # An optimizer imports it, which takes two seconds: once, instead of in the fork and here.
    importlib.import_module("torch._dynamo")
    flags, killed = shlex.split(os.environ.get(FLAGS_OF_THE_PATCH, "")), tmp_path / "killed"
    assert train_and_die(train, flags) == signal.SIGKILL
    assert 7 not in {row["step"] for row in load_metrics(killed)}

    train("killed", "--resume auto", *flags)
    whole = train("whole", *flags)

    last = load_metrics(whole)[-1]["step"]
    assert measured(killed) == measured(whole)
    assert same_weights(killed, whole, last)
    torch.testing.assert_close(state_of(killed), state_of(whole), rtol=0, atol=0)
