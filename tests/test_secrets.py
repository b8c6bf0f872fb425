"""Tokens in the environment stay there: nothing that is written, printed or put on a command line contains one.

The tests plant values that occur nowhere else, use the scripts with them, then search all files and all output.
"""

import pytest
from corpora import read_bytes
from faults import hub_server
from helpers import ROOT, TINY_FLAGS
from pod import Pod

# Each is written in two parts: a run may store this file.
SECRETS = {"HF_TOKEN": "hf_" + "plantedTokenOfTheHub0", "WANDB_API_KEY": "b" * 20 + "plantedKeyOfWandb000"}


@pytest.fixture
def assert_no_secret(tmp_path):
    """assert_no_secret(output, ...): neither in these texts, nor in a file below tmp_path or its name."""

    def check(*outputs):
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        texts = [text.encode() for text in outputs] + [str(path).encode() + path.read_bytes() for path in files]
        assert files and all(texts)
        for secret in SECRETS.values():
            assert not [text[:200] for text in texts if secret.encode() in text]

    return check


def test_no_token_in_what_a_run_writes(tiny_data, tmp_path, run_in_fork, assert_no_secret):
    flags = [*TINY_FLAGS, "--max-steps", "3", "--tracker", "tensorboard", "--data-dir", tiny_data]
    done = run_in_fork("train_gpt2.py", "quickstart", *flags, "--out-dir", tmp_path / "run", env=SECRETS)

    assert list((tmp_path / "run/tensorboard").iterdir())
    assert_no_secret(done.stdout)


def test_no_token_in_what_the_hub_gets_and_answers(tmp_path, run_in_fork, assert_no_secret):
    with hub_server.start(tmp_path / "hub", token=SECRETS["HF_TOKEN"]) as hub:
        how = {"env": {**SECRETS, **hub.env()}, "cwd": tmp_path}
        made = run_in_fork("fineweb.py", "--source", ROOT / "model.py", "--shard-size", 2000, "--out", "data", **how)
        pushed = run_in_fork("hub.py", "push-data", "data", "tester/tokens", **how)
        pulled = run_in_fork("hub.py", "pull-data", "tester/tokens", "pulled", **how)

        # An error of the Hub that quotes the token.
        message = f"no: {SECRETS['HF_TOKEN']}"
        hub.faults.append(hub_server.Fault("status", "/api/", times=9, code=403, message=message))
        refused = run_in_fork("hub.py", "pull-data", "tester/tokens", "again", check=False, **how)

    # What is pushed is private, and what comes back identical.
    assert hub.private == {"datasets/tester/tokens"}
    assert read_bytes(tmp_path / "pulled") == read_bytes(tmp_path / "data")
    assert refused.returncode == 1
    assert_no_secret(*(done.stdout + done.stderr for done in (made, pushed, pulled, refused)))


def test_no_token_on_a_command_line_of_train_sh(tmp_path, assert_no_secret):
    """The stand-ins of the pod write down what they are called with."""
    with Pod(tmp_path) as pod:
        pod.start("quickstart", PUSH_TO="me/x", REMOVE_POD="1", **SECRETS)
        log = pod.wait_until_ended()

    assert pod.read("starts") and pod.read("pushed") and pod.read("removed")
    assert_no_secret(log)
