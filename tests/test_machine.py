"""The machine as it is: a GPU that cannot be used, a compiler that is not there, a card's peak, no bfloat16."""

import re

import pytest
import torch
from helpers import train_quickstart
from torch.torch_version import TorchVersion

from system import cards, machine
from system.cli import UserError


def test_a_gpu_that_torch_cannot_use_is_not_paid_for_in_vain(tmp_path, monkeypatch):
    """A pod whose driver is older than the torch there: it must not train on its CPU at the price of its GPUs."""

    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).\nMore words")

    (tmp_path / "nvidia0").touch()
    there = str(tmp_path / "nvidia[0-9]*")
    unusable = machine.unusable_gpu_reason
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(machine, "unusable_gpu_reason", lambda: unusable(there))
    assert machine.choose_device("auto").type == "cpu"  # the tests hide GPUs, as a user may
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for name in ("auto", "cuda"):
        with pytest.raises(UserError, match=r"too old \(found version 12040\)\.\).*export CUDA_VISIBLE_DEVICES="):
            machine.choose_device(name)
    assert machine.choose_device("cpu").type == "cpu"
    (tmp_path / "nvidia0").unlink()
    assert machine.choose_device("auto").type == "cpu"


def test_a_machine_that_cannot_compile_is_told_what_is_missing(monkeypatch, tmp_path):
    """Debian has the compiler and Python's headers in different packages, and torch's C++ includes Python.h, too."""
    monkeypatch.setattr(machine.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    for there, header, says in ((False, False, "compiler"), (True, False, "Python.h"), (True, True, "")):
        monkeypatch.setattr(machine.shutil, "which", lambda name, there=there: name if there else None)
        if header:
            (tmp_path / "Python.h").touch()
        for kind in ("cpu", "cuda"):
            missing = machine.missing_compiler(torch.device(kind))
            assert says in missing and bool(missing) == bool(says)


def test_a_mac_gpu_needs_a_torch_that_computes_its_gradients_rightly(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    for version, device in {"2.13.1": "cpu", "2.14.0": "mps", "2.15.0+cpu": "mps"}.items():
        monkeypatch.setattr(torch, "__version__", TorchVersion(version))
        assert machine.choose_device("auto").type == device
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))
    with pytest.raises(UserError, match="'mps' is not available here"):
        machine.choose_device("mps")


@pytest.mark.parametrize("there", [True, False])
def test_bfloat16_weights_warn_where_they_are_emulated(there, tiny_args, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(machine, "cpu_has_bfloat16", lambda: there)
    train_quickstart(tiny_args, tmp_path / "run", "--max-steps", "1", "--weights", "bfloat16")
    assert ("many times slower than --weights float32" in capsys.readouterr().out) == (not there)


PEAKS = """
A100-SXM4-80GB 312; H100 80GB HBM3 989; H100 PCIe 756; H800 989; H800 PCIe 756; H200 989; H200 NVL 835; B200 2250
L4 121; Tesla T4 65; Tesla V100-SXM2-16GB 125; Tesla V100-PCIE-32GB 112; GeForce RTX 3090 71; GeForce RTX 4090 165.2
GeForce RTX 5090 209.5; GeForce RTX 2080 Ti 56.9; GeForce RTX 3090 Ti -; GeForce RTX 4090 Laptop GPU -
GeForce RTX 4090 D -; A100-SXM4-40GB MIG 1g.5gb -; H20 -; AMD Instinct MI300X -"""  # TFLOP/s; -: not known


def test_peak_of_a_card_is_the_data_sheets_or_unknown(monkeypatch):
    for card in re.split("[;\n]", PEAKS.strip()):
        name, peak = card.strip().rsplit(" ", 1)
        name = name if name.startswith(("Tesla", "AMD")) else f"NVIDIA {name}"
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda device, name=name: name)
        assert cards.peak_flops(torch.device("cuda", 0)) == (None if peak == "-" else float(peak) * 1e12), name
    assert cards.peak_flops(torch.device("cpu")) is None
