"""What a machine lacks is reported: a GPU that torch cannot use, a compiler; and how its precision is chosen: by
measurement, the same on all ranks and after a resume."""

import logging.handlers
import os
import subprocess
import sys
import time

import pytest
import torch
from helpers import CPU, ROOT, load_curve, train_quickstart
from torch.torch_version import TorchVersion

from system import machine
from system.cli import UserError
from system.distributed import Runtime
from training import checkpoint


@pytest.fixture
def machine_with_an_old_driver(tmp_path, monkeypatch):
    """A machine whose GPU torch cannot use, because its driver is older than torch's CUDA. Returns the GPU's device
    file, without which the machine has no GPU."""

    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).\nMore words")

    device_file = tmp_path / "nvidia0"
    device_file.touch()
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(machine, "GPU_FILES", (str(tmp_path / "nvidia[0-9]*"),))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")  # by which the tests hide GPUs
    return device_file


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_a_gpu_that_torch_cannot_use_is_an_error(machine_with_an_old_driver, name):
    """A rented machine must not train on its CPU at the price of its GPUs."""
    with pytest.raises(UserError, match=r"too old \(found version 12040\)\.\).*export CUDA_VISIBLE_DEVICES="):
        machine.choose_device(name)


@pytest.mark.parametrize("name", ["auto", "cuda", "cuda:0"])
def test_a_torch_without_cuda_on_a_machine_with_a_gpu_is_an_error(machine_with_an_old_driver, monkeypatch, name):
    """`make install` on a CPU pod puts torch for CPUs onto a volume, which a GPU pod then mounts."""
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UserError, match=r"built without CUDA.*make clean install TORCH_BUILD=\. .*--device cpu"):
        machine.choose_device(name)
    assert machine.choose_device("cpu").type == "cpu"


def test_the_cpu_is_used_if_it_is_asked_for_or_the_gpus_are_hidden_or_not_there(
    machine_with_an_old_driver, monkeypatch
):
    assert machine.choose_device("cpu").type == "cpu"
    with monkeypatch.context() as hidden:
        hidden.setenv("CUDA_VISIBLE_DEVICES", "")
        assert machine.choose_device("auto").type == "cpu"
    machine_with_an_old_driver.unlink()
    assert machine.choose_device("auto").type == "cpu"


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("has_compiler, has_headers, missing", [
    (False, False, "compiler"), (True, False, "Python.h"), (True, True, ""),
])  # fmt: skip
def test_a_machine_that_cannot_compile_is_told_what_is_missing(
    monkeypatch, tmp_path, device, has_compiler, has_headers, missing
):
    """Debian has the compiler and Python's headers in different packages, and torch's C++ includes Python.h, too."""
    monkeypatch.setattr(machine.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    monkeypatch.setattr(machine.shutil, "which", lambda name: name if has_compiler else None)
    if has_headers:
        (tmp_path / "Python.h").touch()
    found = machine.missing_compiler(torch.device(device))
    assert missing in found and bool(found) == bool(missing)


@pytest.mark.parametrize("version, device", [("2.13.1", "cpu"), ("2.14.0", "mps"), ("2.15.0+cpu", "mps")])
def test_a_mac_gpu_is_used_from_the_torch_on_that_computes_its_gradients_correctly(monkeypatch, version, device):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch, "__version__", TorchVersion(version))
    assert machine.choose_device("auto").type == device


def test_a_mac_gpu_with_an_older_torch_is_refused(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))
    with pytest.raises(UserError, match="'mps' is not available here"):
        machine.choose_device("mps")


# ------------------------------------------------------------------------- precision

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
BOTH = [BF16, FP32]
AMPERE, TURING = [BF16, FP16, FP32], [FP16, FP32]


def set_cpu(monkeypatch, supported, speedup=None):
    """Let this CPU support these precisions, and multiply bfloat16 `speedup` times as fast as float32."""

    def bfloat16_speedup(product):
        assert speedup is not None, "nothing should be measured"
        return speedup

    monkeypatch.setattr(machine, "supported_dtypes", lambda device: supported)
    monkeypatch.setattr(machine, "bfloat16_speedup", bfloat16_speedup)


class Gpu(Runtime):
    """A rank with a GPU, beside another rank whose precisions `other` are."""

    other: tuple = ()

    def gather(self, value):
        return [value, {machine.dtype_name(dtype): float("inf") for dtype in type(self).other}]


def set_gpus(monkeypatch, own, other) -> Runtime:
    """The Runtime of a GPU with the precisions `own`, beside a rank with the precisions `other`."""
    monkeypatch.setattr(machine, "supported_dtypes", lambda device: own)
    monkeypatch.setattr(Gpu, "other", tuple(other))
    return Gpu(torch.device("cuda", 0), FP32, world_size=2)


@pytest.mark.parametrize("speedup, chosen", [(0.5, FP32), (1.1, FP32), (1.3, BF16), (4.0, BF16)])
def test_a_cpu_takes_bfloat16_only_where_it_clearly_wins(monkeypatch, speedup, chosen):
    """0.5 is a Xeon with AVX512-BF16 and without AMX, 4 a Zen 5: their flags are the same."""
    set_cpu(monkeypatch, BOTH, speedup)

    assert machine.choose_dtype(CPU)[0] == chosen


def test_what_needs_no_measurement_is_not_measured(monkeypatch):
    """A CPU that emulates bfloat16, and a precision that was asked for."""
    set_cpu(monkeypatch, [FP32])
    assert machine.choose_dtype(CPU)[0] == FP32

    set_cpu(monkeypatch, BOTH)
    assert machine.choose_dtype(CPU, "float16") == (FP16, "by --dtype")


@pytest.mark.parametrize("slow_tries", [1, 4])
def test_a_busy_machine_does_not_change_the_speedup(monkeypatch, slow_tries):
    """bfloat16 takes 1 ms, float32 2 ms. The first tries, cold or beside another program, take a second."""
    now = 0.0
    calls = {BF16: 0, FP32: 0}

    def make_linear(weight):
        def multiply(x):
            nonlocal now
            calls[x.dtype] += 1
            is_cold = calls[x.dtype] <= slow_tries
            now += 1.0 if is_cold else {BF16: 0.001, FP32: 0.002}[x.dtype]

        return multiply

    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert machine.bfloat16_speedup(machine.Product(8, 8, 8, make_linear=make_linear)) == pytest.approx(2.0)


def test_the_speedup_of_this_cpu_is_a_ratio_of_times():
    assert 0.01 < machine.bfloat16_speedup(machine.Product(512, 64, 256)) < 100


def test_a_run_resumes_in_the_precision_it_began_in(monkeypatch, tiny_args, tmp_path, capsys):
    """Whatever is measured now. A flag changes it, and the run says so."""
    set_cpu(monkeypatch, BOTH, speedup=4.0)
    run = train_quickstart([*tiny_args, "--dtype", "auto"], tmp_path / "run", "--max-steps", "4")
    assert checkpoint.read_train_state(run)["dtype"] == "bfloat16"

    set_cpu(monkeypatch, BOTH, speedup=0.5)
    capsys.readouterr()
    train_quickstart([*tiny_args, "--dtype", "auto"], run, "--max-steps", "6", "--resume", "auto")
    assert "precision: bfloat16, as the run began" in capsys.readouterr().out

    train_quickstart(tiny_args, run, "--max-steps", "8", "--resume", "auto", "--dtype", "float32")
    assert "precision: float32, by --dtype" in capsys.readouterr().out
    assert checkpoint.read_train_state(run)["dtype"] == "float32"


@pytest.mark.parametrize("own, other, chosen", [
    (AMPERE, TURING, FP16), (TURING, AMPERE, FP16), (AMPERE, AMPERE, BF16), (TURING, TURING, FP16),
])  # fmt: skip
def test_gpus_of_different_kinds_agree_on_what_all_have(monkeypatch, own, other, chosen):
    """A 2080 Ti beside a 3090: the 3090 alone would take bfloat16, and the other scales its gradients by 65,536."""
    rt = set_gpus(monkeypatch, own, other)

    assert machine.choose_dtype(rt)[0] == chosen
    assert machine.choose_dtype(rt, "float32")[0] == FP32
    assert machine.choose_dtype(rt, began_in="bfloat16")[0] == chosen


@pytest.mark.parametrize("own, other", [(AMPERE, TURING), (TURING, AMPERE)])
def test_a_precision_that_a_gpu_lacks_is_refused(monkeypatch, own, other):
    rt = set_gpus(monkeypatch, own, other)
    with pytest.raises(UserError, match=r"--dtype bfloat16.*use --dtype float16"):
        machine.choose_dtype(rt, "bfloat16")


def only_rank_1_lacks_bfloat16():
    """Runs in each rank's process before the script."""
    machine.supported_dtypes = lambda device: [FP32] if os.environ["RANK"] == "1" else BOTH
    machine.bfloat16_speedup = lambda product: 4.0


def test_ranks_that_report_different_capabilities_train_in_one_precision(tiny_args, tmp_path, run_ranks):
    """Real ranks: together they end with the curve of a run in the precision that both have."""
    one_rank = train_quickstart(tiny_args, tmp_path / "one_rank")
    flags = ["quickstart", *tiny_args, "--dtype", "auto", "--out-dir", tmp_path / "two_ranks"]

    out = run_ranks(2, "train_gpt2.py", *flags, prepare=only_rank_1_lacks_bfloat16)

    assert "precision: float32" in out
    assert load_curve(tmp_path / "two_ranks")[11][0] == pytest.approx(load_curve(one_rank)[11][0], rel=2e-4)


# ------------------------------------------------------------------------- Windows


def test_windows_is_refused_with_one_message():
    """Before the modules are imported that it lacks."""
    code = "import sys, os; sys.modules['fcntl'] = None; os.name = 'nt'; import system.cli"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "Traceback" not in done.stderr and "wsl --install" in done.stderr


def test_a_run_on_the_cpu_is_not_told_that_there_is_no_cuda_runtime(monkeypatch):
    """The warning that a torch built for CUDA gives where nvcc is installed and no GPU is."""
    from torch.utils import cpp_extension

    # A machine with nvcc, and a handler that keeps what torch's logger is given.
    logger = logging.getLogger("torch.utils.cpp_extension")
    handler = logging.handlers.BufferingHandler(10)
    monkeypatch.setenv("CUDA_HOME", "/usr/local")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "handlers", [handler])
    monkeypatch.setattr(logger, "level", logger.level)  # back to this afterwards
    logger.setLevel(logging.WARNING)

    # torch warns, until the CPU was chosen.
    cpp_extension._find_cuda_home()
    assert len(handler.buffer) == 1

    machine.choose_device("cpu")
    cpp_extension._find_cuda_home()
    assert len(handler.buffer) == 1
