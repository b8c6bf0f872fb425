"""Muon (Jordan 2024): SGD with momentum that makes the update of each matrix orthogonal first.

    optimizer = Muon([{"params": [weight]}], lr=0.02, momentum=0.95)
    optimizer = Muon([{"params": [c_attn], "matrix_rows": (768, 768, 768)}], lr=0.02, momentum=0.95)

As in modded-nanogpt, Muon has Nesterov momentum and a rate that grows with sqrt(max(1, rows / columns)). The update of
a matrix W with gradient G:

    M = momentum * M + (1 - momentum) * G           the average of the gradients; the only state
    N = momentum * M + (1 - momentum) * G           Nesterov: the average after one more gradient G
    W = (1 - lr * weight_decay) * W
    W = W - lr * sqrt(max(1, rows / columns)) * orthogonalize(N)

If N = U S V^T is the singular value decomposition, orthogonalize(N) is about U V^T: every direction of the gradient
changes the weights by the same amount.

torch.optim.Muon has two drawbacks here: it treats stacked matrices (queries, keys and values) as one matrix, and it
launches its kernels for each matrix instead of once for all matrices of a shape.
"""

import torch
from torch import Tensor

from system import machine

# Newton-Schulz in bfloat16 is precise enough (Jordan 2024), and fastest on GPUs.
NEWTON_SCHULZ_DTYPE = torch.bfloat16

# Each iteration applies the polynomial a X + b (X X^T) X + c (X X^T)^2 X with these coefficients (Jordan 2024). Five
# iterations bring the singular values into about [0.7, 1.2]. The singular values do not converge to 1.
NEWTON_SCHULZ_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
NEWTON_SCHULZ_STEPS = 5


def orthogonalize(X: Tensor) -> Tensor:
    """Move the singular values of each matrix of X (n, rows, columns) to about 1, by Newton-Schulz iterations. The
    result is in bfloat16, or in float32 if the device only emulates bfloat16."""
    # Work on wide matrices, because there X X^T is the smaller product. Below, m <= k: (n, rows, columns) -> (n, m, k)
    is_tall = X.size(-2) > X.size(-1)
    if is_tall:
        X = X.mT

    # GPUs before Ampere and older CPUs emulate bfloat16, which is slower than float32, on some CPUs ten times slower.
    is_fast = NEWTON_SCHULZ_DTYPE in machine.supported_dtypes(X.device)
    X = X.to(NEWTON_SCHULZ_DTYPE if is_fast else torch.float32)

    # The iterations need singular values of at most about 1: divide by the Frobenius norm, which bounds them.
    X = X / (X.norm(dim=(-2, -1), keepdim=True) + 1e-10)

    # Each iteration applies the polynomial to the singular values: s becomes a s + b s^3 + c s^5. The singular vectors
    # stay the same.
    a, b, c = NEWTON_SCHULZ_COEFFICIENTS
    for _ in range(NEWTON_SCHULZ_STEPS):
        A = X @ X.mT  # (n, m, m)
        B = torch.baddbmm(A, A, A, beta=b, alpha=c)  # b A + c A A
        X = torch.baddbmm(X, B, X, beta=a)  # a X + B X

    # (n, m, k) -> (n, rows, columns)
    return X.mT if is_tall else X


class Muon(torch.optim.Optimizer):
    """Muon for parameters (rows, columns). If each parameter of a group stacks several matrices, the group's
    matrix_rows has the number of rows of each matrix, and each matrix is made orthogonal alone. () means one matrix per
    parameter.

    The matrices of a group that have the same shape are made orthogonal together, so 12 layers launch no more kernels
    than one. The state has the layout of torch.optim.Muon's.
    """

    def __init__(
        self,
        params: list[dict],
        lr: float,
        momentum: float,
        weight_decay: float = 0.0,
        matrix_rows: tuple[int, ...] = (),
    ):
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "matrix_rows": matrix_rows}
        super().__init__(params, defaults)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]  # torch's also takes a closure
        """Update the weights by the formulas above. Overwrites the gradients."""
        for group in self.param_groups:
            # Parameters without a gradient are left alone.
            params = [p for p in group["params"] if p.grad is not None]
            if not params:
                continue

            for p in params:
                if not self.state[p]:
                    self.state[p]["momentum_buffer"] = torch.zeros_like(p)

            # Nesterov momentum: the buffer averages the gradients, and the update looks one step ahead. The updates
            # overwrite the gradients, which saves a copy of every matrix.
            gradients = [p.grad for p in params]
            buffers = [self.state[p]["momentum_buffer"] for p in params]
            torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
            torch._foreach_lerp_(gradients, buffers, group["momentum"])

            # Group all matrices by shape: {(rows, columns): (weights, updates)}. Take stacked matrices apart as views,
            # such as queries, keys and values: (3C, C) -> three of (C, C)
            by_shape: dict[torch.Size, tuple[list[Tensor], list[Tensor]]] = {}
            for p, update in zip(params, gradients, strict=True):
                rows_of_each = group["matrix_rows"] or (len(p),)
                for weight, matrix in zip(p.split(rows_of_each), update.split(rows_of_each), strict=True):
                    weights, matrices = by_shape.setdefault(weight.shape, ([], []))
                    weights.append(weight)
                    matrices.append(matrix)

            # Orthogonalize all matrices of a shape at once, and update the weights. Tall matrices get a higher rate.
            if group["weight_decay"]:
                torch._foreach_mul_(params, 1 - group["lr"] * group["weight_decay"])
            for (rows, columns), (weights, matrices) in by_shape.items():
                change = orthogonalize(torch.stack(matrices))  # (n, rows, columns)
                rate = group["lr"] * max(1, rows / columns) ** 0.5
                torch._foreach_add_(weights, change.to(weights[0].dtype).unbind(), alpha=-rate)
