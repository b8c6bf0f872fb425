"""Ranks that die and machines that meet: torchrun restarts, two torchruns on loopback, resume after the loss of one."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest
from helpers import (
    ROOT,
    assert_curves_close,
    load_curve,
    load_weights,
    make_hellaswag_rows,
    same_bits,
    train_quickstart,
    write_jsonl,
)
from processes import find_free_port, rank_pids, start_torchrun, wait_for

from tokens import shards
from training import checkpoint

SCRIPT = str(ROOT / "train_gpt2.py")
LAST_STEP = 60
RUN_FLAGS = ["--max-steps", str(LAST_STEP), "--save-every", "10", "--val-every", "40", "--resume", "auto"]

# The variable that docs/clusters.md has people export on each of several machines.
EXPORTED_NAME, EXPORTED_VALUE = re.search(
    r"export (TORCH_\w+)=(\w+)", (ROOT / "docs" / "clusters.md").read_text()
).groups()

linux_only = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="finds the ranks through /proc")


def start_machine(port, arguments, restarts=0, script=SCRIPT):
    """Start the torchrun of one of two machines, which meet at `port` of this one and run a rank each."""
    flags = ["--nnodes=2", "--nproc_per_node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=127.0.0.1:{port}"]
    flags += [f"--max-restarts={restarts}", "--rdzv-conf=join_timeout=60", "--local-addr=127.0.0.1"]
    return start_torchrun(*flags, str(script), *arguments, **{EXPORTED_NAME: EXPORTED_VALUE})


def kill_last_rank_of(torchrun, run_dir):
    """SIGKILL a rank of this torchrun once the run has saved a few times."""
    wait_for(lambda: (checkpoint.latest_step(run_dir) or 0) >= 20)
    os.kill(rank_pids(torchrun.pid)[-1], signal.SIGKILL)


def assert_restarted_and_equal(torchruns, run_dir, undisturbed):
    """The torchruns end with success, after a restart of the ranks, and the run has the bits of the undisturbed one."""
    output = "".join(torchrun.communicate(timeout=120)[0] for torchrun in torchruns)
    assert not any(torchrun.returncode for torchrun in torchruns), output[-3000:]
    assert output.count("torch ") >= 2, "it was not restarted"
    assert load_curve(run_dir) == load_curve(undisturbed)
    assert same_bits(load_weights(run_dir, LAST_STEP), load_weights(undisturbed, LAST_STEP))


@linux_only
@pytest.mark.slow  # as `torchrun-kill` in tests/faults/torture.py, with more kills
def test_torchrun_restarts_a_killed_rank_and_the_bits_are_the_same(tiny_args, tmp_path, run_ranks):
    arguments = ["quickstart", *tiny_args, *RUN_FLAGS, "--out-dir"]
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"
    run_ranks(2, "train_gpt2.py", *arguments, undisturbed)

    torchrun = start_torchrun("--standalone", "--nproc_per_node=2", "--max-restarts=3", SCRIPT, *arguments, str(killed))
    kill_last_rank_of(torchrun, killed)

    assert_restarted_and_equal([torchrun], killed, undisturbed)


@pytest.mark.slow  # in `make test`: two ranks equal one in test_ranks.py, a real torchrun in test_preemption.py
def test_two_machines_train_the_curve_of_one(tiny_args, tmp_path):
    one = train_quickstart(tiny_args, tmp_path / "one")

    arguments = ["quickstart", *tiny_args, "--out-dir", str(tmp_path / "two"), "--resume", "auto"]
    port = find_free_port()
    machines = [start_machine(port, arguments) for _ in range(2)]
    outputs = [machine.communicate(timeout=120)[0] for machine in machines]

    assert [machine.returncode for machine in machines] == [0, 0], outputs
    assert_curves_close(load_curve(tmp_path / "two"), load_curve(one))


@pytest.mark.slow
@linux_only
def test_a_rank_killed_on_one_of_two_machines_is_restarted_and_the_bits_are_the_same(tiny_args, tmp_path):
    """The ranks of the first machine start later: those of the second could find what the dead ones have left."""
    arguments = ["quickstart", *tiny_args, *RUN_FLAGS, "--out-dir"]
    undisturbed, killed = tmp_path / "undisturbed", tmp_path / "killed"

    # The undisturbed run, on two machines as well: a rank that has a machine to itself computes with all of its cores,
    # and other numbers of threads round differently.
    port = find_free_port()
    machines = [start_machine(port, [*arguments, str(undisturbed)]) for _ in range(2)]
    outputs = [machine.communicate(timeout=120)[0] for machine in machines]
    assert [machine.returncode for machine in machines] == [0, 0], outputs

    # The same with a rank that is killed, where the script of the first machine sleeps before each start.
    late_script = tmp_path / "late.py"
    command = f"[sys.executable, {SCRIPT!r}, *sys.argv[1:]]"
    late_script.write_text(f"import os, sys, time\ntime.sleep(2)\nos.execv(sys.executable, {command})")

    port = find_free_port()
    late_machine = start_machine(port, [*arguments, str(killed)], restarts=1, script=late_script)
    machine = start_machine(port, [*arguments, str(killed)], restarts=1)
    kill_last_rank_of(machine, killed)

    assert_restarted_and_equal([late_machine, machine], killed, undisturbed)


# ------------------------------------------------------------------------- two hosts with networks of their own


class Hosts:
    """Two hosts on this machine, each with its own network, name and /etc/hosts, connected by a cable."""

    def __init__(self, folder):
        self.folder = folder
        self.namespaces = [f"gpt2-{os.getpid()}-{i}" for i in range(2)]
        self.addresses = ["10.77.0.1", "10.77.0.2"]

        # A network namespace for each host, and a pair of virtual interfaces as the cable.
        first, second = self.namespaces
        self.run_ip(f"netns add {first}", f"netns add {second}")
        self.run_ip(f"link add cable0 netns {first} type veth peer name cable1 netns {second}")
        for i, name in enumerate(self.namespaces):
            self.run_ip(f"-n {name} addr add {self.addresses[i]}/24 dev cable{i}")
            self.run_ip(f"-n {name} link set cable{i} up", f"-n {name} link set lo up")

    def run_ip(self, *commands):
        """Run `ip` with each of these arguments; raises CalledProcessError without the right to."""
        for command in commands:
            subprocess.run(["ip", *command.split()], check=True, capture_output=True)

    def remove(self):
        """Delete the namespaces, and the cable with them."""
        for name in self.namespaces:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def start(self, i, *arguments, script=SCRIPT, own_address=None, **env):
        """Start the torchrun of host i. own_address: what the host's own name resolves to there."""
        # The host's own name and /etc/hosts, which knows both names: in namespaces of their own, so that this machine's
        # stay as they are.
        known = {**dict(enumerate(self.addresses)), i: own_address or self.addresses[i]}
        hosts = self.folder / f"hosts{i}"
        hosts.write_text("127.0.0.1 localhost\n" + "".join(f"{a} host{n}\n" for n, a in known.items()))
        shell = f'hostname host{i} && mount --bind {hosts} /etc/hosts && exec "$@"'
        command = ["ip", "netns", "exec", self.namespaces[i], "unshare", "--uts", "--mount", "sh", "-c", shell, "sh"]

        # Its torchrun, with one rank.
        command += [sys.executable, "-m", "torch.distributed.run", "--nnodes=2", "--nproc_per_node=1"]

        # torchrun tells by the endpoint whether it hosts the store. It compares addresses first; if the host's name
        # resolves to another address, only the name can match.
        endpoint = "host0" if own_address else self.addresses[0]
        command += ["--rdzv-backend=c10d", f"--rdzv-endpoint={endpoint}:29400", "--rdzv-conf=join_timeout=60"]
        command += [f"--local-addr={self.addresses[i]}", str(script), *map(str, arguments)]
        env = {**os.environ, "OMP_NUM_THREADS": "1", EXPORTED_NAME: EXPORTED_VALUE, **env}
        return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


@pytest.fixture
def hosts(tmp_path):
    """Two Hosts; the test is skipped where namespaces of the network cannot be made."""
    try:
        found = Hosts(tmp_path)
    except (OSError, subprocess.CalledProcessError) as e:
        pytest.skip(f"needs root and iproute2: {e}")
    yield found
    found.remove()


def make_difference(kind, flags, tmp_path, tiny_data):
    """What is started on the second host, as {flags, script}, and what the refusal says. The first host is started
    with `flags`."""
    how = {"flags": flags, "script": SCRIPT}
    match kind:
        case "setting":
            return how | {"flags": [*flags, "--val-every", "3"]}, "--val-every is 4 on rank"
        case "data":
            other = shutil.copytree(tiny_data, tmp_path / "other data")
            shards.write_shard(other / "tiny_train_000001.npy", np.arange(60, dtype=np.uint16))
            return how | {"flags": [*flags, "--data-dir", other]}, "the data is"
        case "rows":
            rows = write_jsonl(tmp_path / "fewer.jsonl", make_hellaswag_rows(6))
            return how | {"flags": [*flags, "--hellaswag-data", rows]}, "the HellaSwag file is 7 rows"
        case "checkpoint":
            out = train_quickstart(flags, tmp_path / "other run", "--max-steps", "3")
            how["flags"] = [*flags, "--out-dir", out, "--resume", "auto"]
            return how, "the checkpoint to resume from is none on rank"
        case "code":
            copy = shutil.copytree(ROOT, tmp_path / "code", ignore=shutil.ignore_patterns(".*", "data", "log", "tests"))
            (copy / "model.py").write_text((copy / "model.py").read_text() + "# changed\n")
            return how | {"script": copy / "train_gpt2.py"}, "the code (a hash) is"
        case "torch":
            script = tmp_path / "other_torch.py"
            run = f"sys.path.insert(0, {str(ROOT)!r}); runpy.run_path({SCRIPT!r}, run_name='__main__')"
            script.write_text(f"import runpy, sys, torch\ntorch.__version__ = '2.11.0'\n{run}\n")
            return how | {"script": script}, "torch is"
        case _:
            raise ValueError(kind)


KINDS = ["setting", "data", "rows", "checkpoint", "code", "torch"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_hosts_that_differ_refuse_within_a_minute(hosts, tiny_args, tiny_data, tmp_path, kind):
    """Both say the same, soon, and nothing restarts them."""
    rows = write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(7))
    flags = [*tiny_args, "--model.vocab-size", "50304", "--hellaswag-every", "4", "--hellaswag-data", rows]
    flags += ["--out-dir", tmp_path / "run"]
    other, message = make_difference(kind, flags, tmp_path, tiny_data)
    statuses = [tmp_path / f"status{i}.json" for i in range(2)]

    start_time = time.monotonic()
    first = hosts.start(0, "quickstart", *flags, TRAIN_STATUS_FILE=str(statuses[0]))
    second = hosts.start(1, "quickstart", *other["flags"], script=other["script"], TRAIN_STATUS_FILE=str(statuses[1]))
    outputs = [torchrun.communicate(timeout=120)[0] for torchrun in (first, second)]

    assert time.monotonic() - start_time < 60
    assert first.returncode and second.returncode
    for output, status in zip(outputs, statuses, strict=True):
        assert message in output, output[-3000:]
        assert 'Traceback (most recent call last):\n  File "' + SCRIPT not in output
        assert json.loads(status.read_text())["status"] == "user_error", output[-3000:]
    assert not checkpoint.complete_steps(tmp_path / "run")


@pytest.mark.slow
def test_hosts_whose_names_stand_for_the_loopback_train_over_the_interface_that_is_named(hosts, tiny_args, tmp_path):
    """As Debian writes /etc/hosts; docs/clusters.md names the variable."""
    flags = [*tiny_args, "--out-dir", tmp_path / "run"]
    how = {"own_address": "127.0.1.1"}
    torchruns = [hosts.start(i, "quickstart", *flags, GLOO_SOCKET_IFNAME=f"cable{i}", **how) for i in range(2)]
    outputs = [torchrun.communicate(timeout=150)[0] for torchrun in torchruns]

    assert [torchrun.returncode for torchrun in torchruns] == [0, 0], outputs
    assert checkpoint.latest_step(tmp_path / "run") == 12


# ------------------------------------------------------------------------- machines that die


@pytest.mark.slow
def test_a_run_survives_a_machine_that_dies_and_comes_back(tiny_args, tmp_path):
    """Its torchrun and its rank are killed. Whatever supervises the machines (train.sh, Slurm's requeue) starts a
    torchrun again that ended badly, also the survivor's; the run resumes from its newest checkpoint."""
    steps = ["--max-steps", "400", "--save-every", "10", "--val-every", "0"]
    arguments = ["quickstart", *tiny_args, *steps, "--out-dir", str(tmp_path / "run"), "--resume", "auto"]
    port = find_free_port()
    ended = []  # (exit code, end of the output) of each torchrun

    def supervise(torchrun):
        """Start a machine's torchrun again as long as it ends badly, at most a few times."""
        for _ in range(5):
            output = torchrun.communicate()[0]
            ended.append((torchrun.returncode, output[-300:]))
            if torchrun.returncode == 0:
                return
            torchrun = start_machine(port, arguments, restarts=1)

    # Two machines, each with its supervisor.
    machines = [start_machine(port, arguments, restarts=1) for _ in range(2)]
    supervisors = [threading.Thread(target=supervise, args=(machine,), daemon=True) for machine in machines]
    for supervisor in supervisors:
        supervisor.start()

    # The second machine dies once the run has saved a few times.
    wait_for(lambda: (checkpoint.latest_step(tmp_path / "run") or 0) >= 20, 120)
    for pid in [*rank_pids(machines[1].pid), machines[1].pid]:
        os.kill(pid, signal.SIGKILL)
    for supervisor in supervisors:
        supervisor.join(400)

    # Both machines end with success in the end, and no step is missing.
    assert [exit_code for exit_code, _ in ended].count(0) == 2, ended
    assert list(load_curve(tmp_path / "run")) == list(range(401))
