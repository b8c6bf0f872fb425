"""What a machine lacks is reported: a GPU that torch cannot use, a compiler, bfloat16; and a card's peak is known or
unknown, never another card's."""

import logging.handlers
import os
import subprocess
import sys

import pytest
import torch
from helpers import ROOT
from torch.torch_version import TorchVersion

from system import machine
from system.cli import UserError


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
    with pytest.raises(UserError, match=r"built without CUDA.*make clean install TORCH_CPU_INDEX=\. .*--device cpu"):
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


# ------------------------------------------------------------------------- Windows


def test_windows_is_refused_with_one_message_that_names_wsl():
    """Before the modules are imported that it lacks."""
    # Every script in turn, in an interpreter that has what Windows has. What imports these modules themselves is
    # imported before they are taken away.
    code = """if True:
        import asyncio, ctypes, pathlib, runpy, shutil, subprocess, sys, numpy, tyro, os
        sys.modules["fcntl"] = sys.modules["resource"] = None
        os.name = "nt"
        for script in sys.argv[1:]:
            try:
                runpy.run_path(script, run_name="__main__")
            except SystemExit as e:
                print(e)
    """
    scripts = ["train_gpt2.py", "fineweb.py", "hellaswag.py", "infer.py", "hub.py", "plots.py"]
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, *scripts], cwd=ROOT, env=env, capture_output=True, text=True)

    assert done.stderr == "" and len(done.stdout.splitlines()) == len(scripts)
    assert all("error: " in line and "wsl --install" in line for line in done.stdout.splitlines())


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
