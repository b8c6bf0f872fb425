"""The head and its loss without all the logits: a chunk of rows at a time, forward and backward at once.

    loss = head.loss(model, x, targets)     # GPT.forward's, and its gradients, to rounding

Logits are the widest tensor of a step. A chunk's are made, their loss and gradient taken, both products of the backward
pass done, and the next chunk's take their place: nothing is computed twice. Liger Kernel (Hsu et al. 2024) does this in
kernels of its own; here a graph of a few lines does the softmax and the library multiplies.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from model import GPT, softcap


def chunks(rows: int, kind: str) -> int:
    """Into how many chunks rows on that kind of device are split. 512 rows fill a CPU (bench/head.py); on a GPU each
    chunk costs a pass over the weight's gradient in memory, so it gets more: assumed, not measured."""
    return max(1, rows // (512 if kind == "cpu" else 8192))


def chunk_loss(logits: Tensor, targets: Tensor, cap: float, backward: bool) -> Tensor:
    """The summed cross-entropy, in nats, of logits (R, V) before their soft-cap and targets (R,); rows whose target is
    -100 are left out. With `backward`, the logits are overwritten with their gradient."""
    capped, pull = torch.func.vjp(lambda z: softcap(z.float(), cap), logits)
    kept, targets = (targets >= 0).float()[:, None], targets.clamp(min=0)[:, None]
    total = capped.logsumexp(-1, keepdim=True)
    loss = ((total - capped.gather(-1, targets)) * kept).sum()
    if backward:
        hit = torch.arange(logits.size(-1), device=logits.device) == targets
        (gradient,) = pull(((capped - total).exp() - hit.float()) * kept)
        logits.copy_(gradient)
    return loss


class Loss(torch.autograd.Function):
    """Mean cross-entropy of x (N, C) @ weight.T (C, V) + bias (V,), if there is one, and targets (N,), by `chunk_loss`
    or its compiled twin. The gradients are those of the sum: the backward pass divides. In float16 that keeps the loss
    scale out of them, and their products in range; the parameters' are summed over the chunks in float32."""

    @staticmethod
    def forward(ctx, x, weight, bias, targets, cap, backward, chunk_loss):
        kind = x.device.type
        dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else weight.dtype
        w, n = weight.to(dtype), chunks(len(x), kind)
        total, dx = torch.zeros((), device=x.device), torch.empty_like(x)
        dw, db = (
            torch.zeros_like(p, dtype=torch.float32) if backward and p is not None else None for p in (weight, bias)
        )
        for rows, labels, d_rows in zip(x.chunk(n), targets.chunk(n), dx.chunk(n), strict=True):
            rows = rows.to(dtype)
            logits = rows @ w.T if bias is None else torch.addmm(bias.to(dtype), rows, w.T)  # (R, V)
            total += chunk_loss(logits, labels, cap, backward)
            if backward:  # the logits are now their gradient
                d_rows.copy_(logits @ w)
                if dtype == dw.dtype:
                    dw.addmm_(logits.T, rows)
                else:
                    dw += logits.T @ rows
                if bias is not None:
                    db += logits.sum(0, dtype=torch.float32)
            del logits  # before the next chunk's are made
        count = (targets >= 0).sum()
        ctx.save_for_backward(dx, dw, db, count)
        return total / count

    @staticmethod
    def backward(ctx, g):
        *sums, count = ctx.saved_tensors
        return *(None if s is None else s.mul_(g / count) for s in sums), None, None, None, None


def loss(model: GPT, x: Tensor, targets: Tensor, chunk_loss: Callable = chunk_loss) -> Tensor:
    """Mean cross-entropy, in nats per token, of hidden states (B, T, C) and targets (B, T)."""
    x, weight, bias = model.transformer.ln_f(x).flatten(0, 1), model.lm_head.weight, model.lm_head.bias
    return Loss.apply(x, weight, bias, targets.flatten(), model.config.softcap, torch.is_grad_enabled(), chunk_loss)
