"""Muon is torch's, matrix by matrix."""

import pytest
import torch

from system import machine
from training import muon

# Parameters, and how many matrices each stacks: queries, keys and values in the first. The second is as tall.
MATRICES = [((48, 16), 3), ((48, 16), 1), ((64, 16), 1), ((16, 64), 1), ((16, 64), 1)]


def split_matrices(tensors):
    """The matrices that are in parameters, or in their gradients."""
    return [m.clone() for tensor, (_, n) in zip(tensors, MATRICES, strict=True) for m in tensor.detach().chunk(n)]


def test_muon_is_torchs_for_each_matrix(monkeypatch):
    """Matrices of one shape together; queries, keys and values each alone, though they share a parameter; a parameter
    of an MLP as one, though it is three times as tall as wide."""
    # torch's Muon iterates in bfloat16, and rounds differently on every machine: here in float64, and ours in float32.
    monkeypatch.setattr(machine, "supported_dtypes", lambda device: [torch.float32])
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.double)
    torch.manual_seed(0)
    settings = {"lr": 0.02, "momentum": 0.9, "weight_decay": 0.5}

    # This project's Muon takes the parameters as they are, torch's each matrix as a parameter of its own.
    parameters = [torch.nn.Parameter(torch.randn(shape)) for shape, _ in MATRICES]
    matrices = [torch.nn.Parameter(matrix) for matrix in split_matrices(parameters)]
    groups = [{"params": parameters[:1], "matrix_rows": (16, 16, 16)}, {"params": parameters[1:]}]
    optimizer = muon.Muon(groups, **settings)
    reference = torch.optim.Muon([{"params": matrices}], **settings)

    for _ in range(3):
        for p in parameters:
            p.grad = torch.randn(p.shape)
        for p, gradient in zip(matrices, split_matrices(p.grad for p in parameters), strict=True):
            p.grad = gradient
        optimizer.step()
        reference.step()
        for a, b in zip(split_matrices(parameters), matrices, strict=True):
            torch.testing.assert_close(a, b.detach(), atol=1e-5, rtol=0)
    assert {tuple(state) for state in optimizer.state.values()} == {("momentum_buffer",)}  # as torch's


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_muon_uses_bfloat16_where_it_is_fast(dtype, monkeypatch):
    """A T4 and older CPUs emulate it, more slowly than they multiply float32."""
    monkeypatch.setattr(machine, "supported_dtypes", lambda device: [dtype])
    assert muon.orthogonalize(torch.randn(1, 16, 64)).dtype == dtype
