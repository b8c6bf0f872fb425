"""Muon is torch's, matrix by matrix."""

import pytest
import torch

from system import machine
from training import muon

# Parameters by the names that the network gives them. The first has queries, keys and values; the first MLP's is as
# tall as those, but is one matrix.
MATRICES = {
    "transformer.h.0.attn.c_attn.weight": (48, 16),
    "transformer.h.0.mlp.c_fc.weight": (48, 16),
    "transformer.h.1.mlp.c_fc.weight": (64, 16),
    "transformer.h.2.mlp.c_fc.weight": (64, 16),
    "transformer.h.0.mlp.c_proj.weight": (16, 64),
    "transformer.h.0.attn.c_proj.weight": (16, 16),
}


def split_matrices(name, tensor):
    """The matrices that are in a parameter, or in its gradient or its momentum."""
    return tensor.chunk(3 if name.endswith("attn.c_attn.weight") else 1)


def test_muon_is_torchs_for_each_matrix(monkeypatch):
    """Matrices of one shape together; queries, keys and values each alone, though they share a parameter; a parameter
    of an MLP as one, though it is three times as tall as wide."""
    monkeypatch.setattr(machine, "cpu_has_bfloat16", lambda: True)  # torch's Muon takes bfloat16 on any machine
    torch.manual_seed(0)
    settings = {"lr": 0.02, "momentum": 0.9}

    # This project's Muon takes the parameters as they are, torch's each matrix as a parameter of its own.
    parameters = {name: torch.nn.Parameter(torch.randn(shape)) for name, shape in MATRICES.items()}
    parameters["transformer.h.0.attn.c_attn.weight"].matrix_rows = (16, 16, 16)  # as Attention marks it
    split = [matrix for name, p in parameters.items() for matrix in split_matrices(name, p.detach().clone())]
    matrices = [torch.nn.Parameter(matrix) for matrix in split]
    optimizer = muon.Muon([{"params": list(parameters.values())}], **settings)
    reference = torch.optim.Muon([{"params": matrices, "weight_decay": 0.0}], **settings)

    for _ in range(3):
        for p in parameters.values():
            p.grad = torch.randn(p.shape)
        gradients = [g.clone() for name, p in parameters.items() for g in split_matrices(name, p.grad)]
        for p, gradient in zip(matrices, gradients, strict=True):
            p.grad = gradient
        optimizer.step()
        reference.step()
        found = [matrix for name, p in parameters.items() for matrix in split_matrices(name, p.detach())]
        for a, b in zip(found, matrices, strict=True):
            torch.testing.assert_close(a, b.detach(), atol=2e-4, rtol=0)  # lr times the rounding of bfloat16
    assert {tuple(state) for state in optimizer.state.values()} == {("momentum_buffer",)}  # as torch's


@pytest.mark.parametrize("has_bfloat16, dtype", [(True, torch.bfloat16), (False, torch.float32)])
def test_muon_uses_bfloat16_where_it_is_fast(has_bfloat16, dtype, monkeypatch):
    """A T4 and older CPUs emulate it, more slowly than they multiply float32."""
    monkeypatch.setattr(machine, "cpu_has_bfloat16", lambda: has_bfloat16)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0) if has_bfloat16 else (7, 5))

    on_a_cpu = muon.orthogonalize(torch.randn(1, 16, 64))

    assert on_a_cpu.dtype == dtype
    assert muon.newton_schulz_dtype(torch.device("cuda", 0)) == dtype
