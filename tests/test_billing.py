"""The end of a rented machine: what is left, what was billed and what the log says when the last push goes wrong.

train.sh is the real one, on the stand-ins of pod.py. The clock is simulated: a pause takes no time, and
`RentedPod.ending` tells what it would have cost, 8 GPUs at 2.50 dollars an hour. docs/promises.md has these rows
as a table.
"""

import os
import shutil
import signal

import pytest
from faults import hub_server
from helpers import train_quickstart
from pod import GPU_PRICE, HOUR, NEVER, START_OF_CLOCK, RentedPod, alive

has_util_linux = shutil.which("setsid") and shutil.which("flock")
pytestmark = pytest.mark.skipif(not has_util_linux, reason="needs util-linux")

MINUTE = 60


@pytest.fixture
def rented(tmp_path):
    with RentedPod(tmp_path) as pod:
        yield pod


def last_lines(log):
    return "\n".join(log.splitlines()[-3:])


# ------------------------------------------------------------------------- the Hub is away


@pytest.mark.parametrize(
    "away, env, ending, most_dollars",
    [
        (MINUTE, {}, "removed", 0.50),
        (MINUTE, {"PERSISTENT": "1"}, "removed", 0.50),
        pytest.param(HOUR, {}, "removed", 1.2 * GPU_PRICE, marks=pytest.mark.slow),
        pytest.param(HOUR, {"PERSISTENT": "1"}, "removed", 0.25 * GPU_PRICE, marks=pytest.mark.slow),
        pytest.param(
            HOUR, {"STOP_CMD": "runpodctl pod stop pod7"}, "stopped", 0.25 * GPU_PRICE, marks=pytest.mark.slow
        ),
        pytest.param(NEVER, {"PERSISTENT": "1"}, "removed", 0.25 * GPU_PRICE, marks=pytest.mark.slow),
        pytest.param(
            NEVER, {"STOP_CMD": "runpodctl pod stop pod7"}, "stopped", 0.25 * GPU_PRICE, marks=pytest.mark.slow
        ),
    ],
)
def test_a_hub_that_is_away_costs_little_and_loses_nothing(rented, away, env, ending, most_dollars):
    rented.hub_is_away(away)
    rented.start(**env)
    log = rented.wait_until_ended()

    how, dollars = rented.ending()
    assert how == ending and dollars <= most_dollars, log
    # what is left: the weights on the Hub, on the volume, or on the disk of a stopped machine
    pushed = "the weights are at me/gpt2" in log
    assert pushed == (away == MINUTE or (away == HOUR and not env))
    if not pushed and "PERSISTENT" in env:
        assert "the weights are on persistent storage, and not at me/gpt2" in log and "to push by hand" in log
    if how == "stopped":
        assert "only copy of the weights" in log and "to push by hand" in log


@pytest.mark.slow
def test_the_only_copy_stays_when_the_hub_never_comes_back_and_the_log_says_what_that_costs(rented):
    rented.hub_is_away(NEVER)
    rented.start()
    log = rented.wait_until_ended(seconds=120)

    # tried for 12 hours, in pauses of at most 10 minutes
    assert rented.ending()[0] == "stays" and 70 <= rented.pushes() <= 85
    assert 11.8 * HOUR < rented.clock() < 12.2 * HOUR
    end = last_lines(log)
    assert "to push by hand" in end and "it holds the only copy of the weights" in end
    assert "it costs $20.00 an hour (8 x $2.50 an hour), until you remove it: runpodctl pod delete pod7" in end


def test_a_push_that_hangs_is_ended_and_the_volume_lets_the_machine_go(rented):
    """A transfer to Xet storage that never ends: no timeout of HTTP reaches it."""
    (rented.root / "hub_hangs").touch()
    done = rented.start(PERSISTENT="1", BUDGET_USD="30")
    assert "for 15 minutes (PUSH_RETRY_HOURS), which BUDGET_USD does not cover: up to $5.00 more" in done.stdout
    log = rented.wait_until_ended()

    how, dollars = rented.ending()
    assert "that push did not end in 600 seconds" in log
    assert how == "removed" and dollars <= GPU_PRICE  # less than an hour


@pytest.mark.slow
def test_a_runpod_pod_is_stopped_only_if_its_disk_outlives_that(rented):
    rented.hub_is_away(NEVER)
    rented.set_mount("/workspace")
    done = rented.start()
    assert "If they cannot be pushed, this machine is stopped, with the weights on its disk" in done.stdout
    rented.wait_until_ended()
    assert rented.ending()[0] == "stopped"

    # it could not be stopped: the log ends with what it costs
    rented.add_tool("runpodctl", "#!/bin/sh\nexit 1\n")
    rented.start("--out-dir", "second")
    assert "THAT FAILED" in last_lines(rented.wait_until_ended("second"))
    assert "costs $20.00 an hour" in last_lines(rented.log("second"))


# ------------------------------------------------------------------------- the token


def test_a_token_that_expires_is_reported_at_once_and_replaced_by_a_log_in(rented):
    (rented.root / "token").write_text("renewed")
    rented.env["HF_TOKEN"] = "expired"
    # after half an hour somebody logs in on the machine
    saved = rented.root / "hf-home" / "token"
    saved.parent.mkdir()
    sleep = rented.read("bin/sleep").replace(
        "exec", f'[ "$now" -lt {START_OF_CLOCK + HOUR // 2} ] || printf renewed > {saved}\nexec'
    )
    rented.add_tool("sleep", sleep)
    rented.start()
    log = rented.wait_until_ended()

    # the Python of these stand-ins has no hf beside it
    advice = log.index("If the token has expired, run on this machine: hf auth login")
    assert log.index("the token is refused") < advice < log.index("try 2")
    assert "the weights are at me/gpt2" in log
    how, dollars = rented.ending()
    assert how == "removed" and dollars <= GPU_PRICE


# ------------------------------------------------------------------------- the user, and runs that fail


@pytest.mark.slow
def test_a_run_that_always_fails_is_pushed_to_be_resumed_and_the_machine_goes(rented):
    rented.start(plan="save-crash", MAX_RESTARTS="2")
    log = rented.wait_until_ended()

    assert "training failed" in log and rented.read("pushed").endswith("--with-optimizer\n")
    assert rented.ending() == ("removed", pytest.approx(0, abs=0.01))

    # kept on purpose: the log says what that costs
    rented.start("--out-dir", "kept", plan="save-crash", MAX_RESTARTS="0", KEEP_ON_FAILURE="1")
    end = last_lines(rented.wait_until_ended("kept"))
    assert "stays: KEEP_ON_FAILURE=1" in end and "costs $20.00 an hour" in end


@pytest.mark.slow
def test_a_stop_ends_the_tries_and_keeps_the_machine(rented):
    rented.add_tool("sleep", "#!/bin/sh\nexec /bin/sleep 30\n")
    rented.hub_is_away(NEVER)
    rented.start()
    rented.wait(lambda: "Next try" in rented.log())

    os.kill(rented.pid(), signal.SIGTERM)
    end = last_lines(rented.wait_until_ended())
    assert "stays: asked to stop while it pushed" in end and "costs $20.00 an hour" in end
    assert rented.ending()[0] == "stays"


def test_a_pod_that_will_stay_says_so_before_the_first_step_with_its_price_a_day(rented):
    done = rented.start(plan="user-error", REMOVE_POD="", PUSH_TO="")
    expected = "THIS MACHINE STAYS, AND COSTS $480.00 a day (8 x $2.50 an hour) until you remove it"
    assert expected in done.stdout
    log = rented.wait_until_ended()
    assert log.index(expected) < log.index("start 1:")


# ------------------------------------------------------------------------- with the real Hub client


@pytest.fixture
def trained(tiny_args, tmp_path):
    """A run folder with a checkpoint, made by the real trainer."""
    return train_quickstart(tiny_args, tmp_path / "trained", "--max-steps", "2", "--save-every", "1")


def start_with_real_hub(rented, hub, trained, plan="finish", **env):
    """Start a run whose trainer 'saves' the checkpoint of `trained`, with the real hub.py."""
    rented.use_real_hub()
    trainer = rented.root / "train_gpt2.py"
    write = '(out / f"{kind}_{step}.pt").write_text("weights")'
    assert write in trainer.read_text()
    copy = f'__import__("shutil").copy("{trained}/" + kind + "_00002.pt", out / f"{{kind}}_00002.pt")'
    trainer.write_text(trainer.read_text().replace(write, copy))
    # two processes of this machine stand for the eight GPUs
    env = {"NPROC": "1", "PUSH_TO": "tester/run", **hub.env(), **env}
    data = ["overfit", "--data-dir", "hf://me/tokens", "--out-dir", "log/gpt2-124m"]
    return rented.start(*data, plan=plan, **env)


@pytest.mark.slow
def test_a_full_account_is_reported_with_the_hub_s_own_words(rented, trained, tmp_path):
    with hub_server.start(tmp_path / "hub") as hub:
        hub.quota = 1000
        start_with_real_hub(rented, hub, trained, PERSISTENT="1", PUSH_RETRY_HOURS="0.01")
        rented.wait(lambda: "training " in rented.log() and not rented.pid(), 120)

    log = rented.log()
    assert "Private repository storage limit reached, please upgrade your plan; delete what" in log
    assert "on persistent storage, and not at tester/run" in log
    how, dollars = rented.ending()
    assert how == "removed" and dollars <= 0.25 * GPU_PRICE


@pytest.mark.slow
def test_a_machine_that_is_taken_away_during_a_push_leaves_a_run_that_the_next_one_finishes(rented, trained, tmp_path):
    with hub_server.start(tmp_path / "hub") as hub:
        # the upload does not end
        hub.faults.append(hub_server.Fault("status", "/preupload/", code=503, times=10**6))
        start_with_real_hub(rented, hub, trained, PERSISTENT="1")
        rented.wait(lambda: hub.count("POST", "/preupload/"), 120)
        push = [int(pid) for pid in os.listdir("/proc") if pid.isdigit() and is_push(pid, rented.root)]
        assert push and list((rented.root / "log/gpt2-124m").glob(".pushing-*"))
        for pid in [rented.pid(), *push]:
            os.kill(pid, signal.SIGKILL)
        rented.wait(lambda: not any(map(alive, push)))
        assert not list((hub.root / "models/tester/run").glob("*.pt"))  # all of a commit or nothing

        # the next machine, with the same volume and the same command
        hub.faults.clear()
        data = ["overfit", "--data-dir", "hf://me/tokens", "--out-dir", "log/gpt2-124m"]
        rented.start(*data, NPROC="1", PERSISTENT="1", **hub.env(), PUSH_TO="tester/run")
        rented.wait(lambda: "the weights are at tester/run" in rented.log(), 120)
        rented.wait(lambda: rented.ending()[0] == "removed")
        pushed = (hub.root / "models/tester/run/model_00002.pt").read_bytes()

    assert pushed == (trained / "model_00002.pt").read_bytes()
    assert not list((rented.root / "log/gpt2-124m").glob(".pushing-*"))


def is_push(pid, root):
    """Whether this process is a push of the pod's hub.py, or the timeout around it."""
    try:
        with open(f"/proc/{pid}/cmdline") as f:
            return f"{root}/hub.py\0push-model" in f.read()
    except OSError:
        return False
