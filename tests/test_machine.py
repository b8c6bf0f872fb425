"""What a machine lacks is reported: a GPU that torch cannot use, a compiler; and how its precision is chosen: by
measurement, the same on all ranks and after a resume."""

import gc
import itertools
import os
import subprocess
import sys
import time
from dataclasses import replace
from unittest.mock import MagicMock, Mock

import pytest
import torch
from helpers import CPU, refused
from networks import make_network
from torch.torch_version import TorchVersion

import train_gpt2_plain
from checkpoints import checkpoint
from lifecycle.build import make_loss
from system import machine
from system.distributed import Runtime, choose_precision
from system.machine import choose_device
from training.loader import to_device
from training.presets import PRESETS

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def gpu(monkeypatch, tmp_path):
    """gpu("the reason") -> this machine has two NVIDIA GPUs, which torch cannot use for that reason, or can, for ""."""
    (tmp_path / "nvidia0").touch()
    monkeypatch.setattr(machine, "NVIDIA_FILES", (str(tmp_path / "nvidia[0-9]*"),))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")  # by which the tests hide GPUs
    monkeypatch.setattr(torch.cuda, "set_device", Mock())

    def gpu(error):
        def zeros(size, device):
            if error or device.index > 1:
                raise RuntimeError(error or "invalid device ordinal")

        monkeypatch.setattr(torch, "zeros", zeros)

    return gpu


@pytest.mark.parametrize("name", ["auto", "cuda", "cuda:0"])
def test_a_gpu_that_torch_cannot_use_is_an_error(gpu, name):
    """A rented machine must not train on its CPU at the price of its GPUs."""
    gpu("The NVIDIA driver is too old (found version 12040)\nMore words")
    with refused(r"12040\).*--device cpu"):
        choose_device(name)
    gpu("CUDA error: out of memory")  # another program has filled it: a crash, which is restarted
    with pytest.raises(RuntimeError, match="out of memory"):
        choose_device(name)


def test_the_cpu_is_for_who_asks_hides_the_gpus_or_has_none(gpu, tmp_path, monkeypatch):
    gpu("unusable")
    assert choose_device("cpu").type == "cpu"
    with monkeypatch.context() as hidden:
        hidden.setenv("CUDA_VISIBLE_DEVICES", "")
        assert choose_device("auto").type == "cpu"
    (tmp_path / "nvidia0").unlink()
    assert choose_device("auto").type == "cpu"


def test_a_rank_has_the_gpu_of_its_number(gpu, monkeypatch):
    gpu("")
    monkeypatch.setenv("LOCAL_RANK", "1")
    for name, index in ("auto", 1), ("cuda:0", 0):
        device = choose_device(name)
        assert device.index == index and torch.cuda.set_device.call_args.args == (device,)
    monkeypatch.setenv("LOCAL_RANK", "2")
    with refused("cuda:2"):
        choose_device("auto")


@pytest.mark.parametrize("release, variables, expected", [
    ("6.1.0", {}, True), ("6.1.0-Microsoft-WSL2", {}, False), ("6.1.0", {"PYTORCH_CUDA_ALLOC_CONF": "x"}, False),
])  # fmt: skip
def test_segments_are_expandable_unless_configured(monkeypatch, release, variables, expected):
    monkeypatch.setattr(machine.platform, "release", lambda: release)
    monkeypatch.setattr(os, "environ", dict(variables))
    machine.use_expandable_segments()
    assert (os.environ.get("PYTORCH_ALLOC_CONF") == "expandable_segments:True") == expected


# ------------------------------------------------------------------------- a Mac


@pytest.fixture
def mac(monkeypatch):
    """torch has mps here."""
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.14.0"))
    return Runtime(torch.device("mps"), FP32)


def test_a_mac_takes_its_gpu(mac):
    assert choose_device("auto") == choose_device("mps") == mac.device


@pytest.mark.parametrize("version, ranks", [("2.13.1", "1"), ("2.14.0", "2")])
def test_a_mac_takes_its_cpu(mac, monkeypatch, version, ranks):
    """With a torch that gets gradients wrong, and for several ranks, whose tensors no process group sends."""
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    monkeypatch.setenv("WORLD_SIZE", ranks)
    assert choose_device("auto").type == "cpu"
    with refused("--device cpu"):
        choose_device("mps")


def test_a_mac_trains_uncompiled_in_float32(mac, monkeypatch):
    cfg = replace(PRESETS["quickstart"], compile=True)
    assert not make_loss(make_network(), cfg, mac).compiles
    assert choose_precision(mac).dtype == FP32
    with refused("float32"):
        choose_precision(mac, "bfloat16")

    tokens = MagicMock()  # no uint16 goes to the device
    to_device(tokens, mac.device)
    assert tokens.to.call_args.args == (torch.int64,)

    monkeypatch.setattr(torch.accelerator, "synchronize", Mock())
    mac.synchronize()
    torch.accelerator.synchronize.assert_called()
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 7)
    assert machine.peak_memory(mac.device) == 7


def test_the_plain_trainer_takes_a_macs_gpu(mac, monkeypatch, tiny_data, tmp_path):
    """Without autocast. Here nothing can be moved there."""
    move, autocast = Mock(side_effect=InterruptedError), Mock()
    monkeypatch.setattr(train_gpt2_plain, "GPT", Mock(return_value=Mock(to=move)))
    monkeypatch.setattr(torch, "autocast", autocast)
    sizes = {"total_batch_size": 256, "micro_batch_size": 4, "sequence_length": 32, "val_every": 0}
    with pytest.raises(InterruptedError):
        train_gpt2_plain.train(train_gpt2_plain.Config(data_dir=tiny_data, out_dir=tmp_path / "run", **sizes))
    move.assert_called_with(mac.device)
    autocast.assert_called_with("mps", torch.bfloat16, enabled=False)


def test_windows_is_told_of_wsl():
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.modules['fcntl'] = None; import infer"], capture_output=True, text=True
    )
    assert done.returncode == 1 and "WSL" in done.stderr and "Traceback" not in done.stderr


# ------------------------------------------------------------------------- a run


def test_the_collector_passes_over_what_stays(train):
    gc.unfreeze()
    train("run")
    assert gc.get_freeze_count() > 10_000


# ------------------------------------------------------------------------- precision


@pytest.mark.parametrize("speedup, chosen", [(0.5, FP32), (1.2, FP32), (1.25, BF16)])
def test_a_cpu_takes_bfloat16_where_it_clearly_wins(monkeypatch, speedup, chosen):
    """0.5 is a Xeon with AVX512-BF16 and without AMX; a Zen 5, with the same flags, has 4. The slower one decides."""
    gather = lambda self, value: [value, 4.0 if isinstance(value, float) else value]
    monkeypatch.setattr(Runtime, "gather", gather)
    monkeypatch.setattr(machine, "supported_dtypes", lambda device: [BF16, FP32])
    monkeypatch.setattr(machine, "bfloat16_speedup", lambda: speedup)
    assert choose_precision(CPU).dtype == chosen


def test_a_busy_machine_does_not_change_the_speedup(monkeypatch):
    """bfloat16 takes 1 ms, float32 2 ms. Most tries, cold or beside another program, take a second."""
    seconds = {BF16: itertools.cycle([1, 1, 0.001]), FP32: itertools.cycle([1, 1, 0.002])}
    times = []
    monkeypatch.setattr(time, "perf_counter", lambda: sum(times))
    monkeypatch.setattr(machine, "linear", lambda x, weight: times.append(next(seconds[x.dtype])))
    assert machine.bfloat16_speedup() == pytest.approx(2.0)


def test_a_run_resumes_in_the_precision_it_began_in(train, monkeypatch, trained_run):
    """Here float32, whatever is measured now. A flag changes it."""
    monkeypatch.setattr(machine, "supported_dtypes", lambda device: [BF16, FP32])
    monkeypatch.setattr(machine, "bfloat16_speedup", lambda: 4.0)
    for steps, flag, dtype in (13, "auto", "float32"), (14, "bfloat16", "bfloat16"):
        train(trained_run, f"--resume auto --max-steps {steps} --dtype {flag}")
        assert checkpoint.read_train_state(trained_run)["facts"]["the precision"][0] == dtype


@pytest.mark.parametrize("capability, first, others", [
    ((8, 0), BF16, ["float16", "float32"]), ((7, 5), FP16, ["bfloat16", "float16", "float32"]),
])  # fmt: skip
def test_gpus_of_two_kinds_agree_on_what_both_have(monkeypatch, capability, first, others):
    """A 3090 and a 2080 Ti: the 3090 alone would take bfloat16, and the other scales its gradients by 65,536."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    rt = Runtime(torch.device("cuda", 0), FP32, world_size=2)
    assert machine.supported_dtypes(rt.device)[0] == first

    monkeypatch.setattr(Runtime, "gather", lambda self, names: [names, others])
    assert choose_precision(rt).dtype == FP16
    assert choose_precision(rt, "float32").dtype == FP32
    assert choose_precision(rt, saved_dtype="bfloat16").dtype == FP16
    with refused(r"--dtype bfloat16.*--dtype float16"):
        choose_precision(rt, "bfloat16")


# ------------------------------------------------------------------------- versions


def test_two_edits_of_one_commit_are_two_versions(tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "ROOT", tmp_path)
    commit = "git init -q; touch model.py; git add .; git -c user.name=x -c user.email=x@localhost commit -qm x"
    subprocess.run(commit, shell=True, cwd=tmp_path, check=True)
    found = []
    for text in ("", "second", "third"):
        (tmp_path / "model.py").write_text(text)
        machine.versions.cache_clear()
        found.append(machine.versions()["commit"])
    machine.versions.cache_clear()
    clean, *edited = found
    assert len(set(edited)) == 2
    assert all(version.startswith(f"{clean}-dirty-") for version in edited)


def test_only_what_fits_into_an_eighth_of_the_host_is_pinned(monkeypatch):
    """torch rounds 6 KB up to 8 KB: pinned on a host of more than 64 KB. A CPU's tensors wait for no GPU."""
    pinned = []
    on_gpu = Mock(spec=torch.Tensor, is_cuda=True, nbytes=6000, shape=(1500,))
    monkeypatch.setattr(torch, "empty_like", lambda tensor, pin_memory, **how: pinned.append(pin_memory) or Mock())
    synchronize = Mock()
    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    for kilobytes in (65, 63):
        monkeypatch.setattr(machine, "host_memory", lambda kilobytes=kilobytes: kilobytes * 1024)
        machine.copy_to_host({"weight": on_gpu})
    assert pinned == [True, False] and synchronize.call_count == 2
    machine.copy_to_host({"weight": torch.ones(3)})
    assert synchronize.call_count == 2 and not pinned[-1]
