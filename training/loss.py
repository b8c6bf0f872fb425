"""The loss of training: from the tokens of a micro-batch to what is minimized, compiled, and averaged over the ranks.

    loss = make_loss(model, cfg, rt)
    _, val_loss = loss(x, y)                    # x, y (B, T); validation: the mean cross-entropy, in nats per token
    objective, train_loss = wrap_in_ddp(loss, rt)(x, y)     # training: objective.backward()

It computes what GPT.forward computes with targets, up to rounding, but never holds all the logits (B * T, V): these are
the largest tensor of a step, for GPT-2 124M with 64 sequences of 1,024 tokens 13 GB in float32. So the head and its
loss process the rows in chunks. Each chunk computes its logits, their loss and gradient, and both matrix products of
the backward pass; then the next chunk reuses the memory. Nothing is computed twice. Liger Kernel (Hsu et al. 2024) does
this with its own kernels; here a small compiled graph computes the loss and its gradient, and the library's matmul does
the rest. For each chunk of R rows:

    x (R, C)  --- @ weight.T --->  products (R, V)  --- GPT.to_logits, token_losses, objective --->  two sums
                                        |
                                        v  overwritten by autograd's gradient
    d_x (R, C)  <-- @ weight ---  d_products (R, V)  --- d_products.T @ x --->  added to d_weight (V, C)
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from model import GPT, Head, token_losses
from system import machine
from system.distributed import Runtime
from system.errors import require
from system.printing import print0
from training.config import TrainConfig


def token_objectives(logits: Tensor, losses: Tensor) -> Tensor:
    """What training minimizes, for each token (N,): logits (N, V) and their cross-entropies (N,). A penalty on the
    logits is a line here, such as a z-loss: `losses + 1e-4 * logits.logsumexp(-1) ** 2`. The log, validation and
    HellaSwag have the cross-entropy alone."""
    return losses


# ------------------------------------------------------------------------- the network, compiled


class Loss(nn.Module):
    """GPT.forward with targets, for training and validation. It never holds all the logits.

    It is compiled block by block: all blocks share one graph, and the loss of a chunk of logits is another. The first
    step comes sooner than with one graph of the whole model, and DDP still overlaps the reduction with the backward
    pass.
    """

    def __init__(self, model: GPT, compiles: bool):
        super().__init__()
        # DDP finds the parameters in the model; the plain list of blocks below registers none.
        self.model = model
        self.compiles = compiles  # training/microbatch.py turns it off if the compiler fails
        if compiles:
            self.compiled_blocks = [torch.compile(block, dynamic=False) for block in model.transformer.h]
            self.compiled_chunk = torch.compile(self.finish_chunk, dynamic=False)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor | None, Tensor]:
        """idx, targets (B, T) int64 -> the mean of what training minimizes, whose gradients are wanted, and the mean
        cross-entropy, both per token; None and the cross-entropy where no gradients are wanted (torch.no_grad).
        Targets of -100 are left out. A loss of the blocks themselves, as of a mixture of experts, is added here."""
        x = self.model.hidden(idx, blocks=self.compiled_blocks if self.compiles else ())  # (B, T, C)
        objective, loss = self.head_losses(x.flatten(0, 1), targets.flatten())  # (B * T, C), (B * T,)
        return (objective, loss) if torch.is_grad_enabled() else (None, loss)

    def head_losses(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """x (N, C) as of GPT.hidden, targets (N,) -> the mean objective and the mean cross-entropy, chunk by chunk."""
        x = self.model.transformer.ln_f(x)
        with torch.no_grad():  # ChunkedHead computes the gradient of the weight
            head = self.model.round_head()
        return ChunkedHead.apply(x, self.model.lm_head.weight, head, targets, self, torch.is_grad_enabled())

    def finish_chunk(self, products: Tensor, shift: Tensor | None, targets: Tensor, with_gradients: bool) -> tuple:
        """The summed objective and cross-entropy of a chunk: products (R, V) and shift (R,) of Head, targets (R,). With
        gradients, that of the objective overwrites the products, and its sum over V comes third: that of the shift."""

        def sums(products: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
            logits = self.model.to_logits(products, shift)
            losses = token_losses(logits, targets)
            objective = (token_objectives(logits, losses) * (targets >= 0)).sum()
            return objective, (objective, losses.sum())

        if not with_gradients:
            return *sums(products)[1], None
        d_products, (objective, loss) = torch.func.grad(sums, has_aux=True)(products)
        products.copy_(d_products)
        d_shift = None if shift is None else products.sum(-1, dtype=torch.float32)
        return objective, loss, d_shift

    def chunk_rows(self, dtype: torch.dtype) -> int:
        """How many rows a chunk has, with a head of this precision. 512 keep a CPU busy. On a GPU each chunk reads and
        writes the whole gradient of the weight, so chunks are larger there: of GPT-2's logits 0.8 GB or, on a large
        card, 3.3 GB; these sizes are not measured. Without the compiler, several copies of a chunk's logits are in
        memory at once; and in float16 the sum over many rows could exceed the largest number, 65,504."""
        device = self.model.lm_head.weight.device
        if device.type == "cpu":
            return 512
        if not self.compiles or dtype == torch.float16:
            return 1024
        return 32_768 if torch.cuda.mem_get_info(device)[1] >= 40e9 else 8192


def make_loss(model: GPT, cfg: TrainConfig, rt: Runtime) -> Loss:
    """The loss of training and validation. HellaSwag, sampling and checkpoints use the model itself."""
    # Each step allocates the same large tensors again, which on a CPU costs time.
    if rt.device.type == "cpu":
        machine.keep_freed_memory()

    if not (cfg.compile and machine.can_compile(rt.device)):
        return Loss(model, compiles=False)

    # --micro-batch-size auto compiles for each size that it tries, and validation adds a graph. DDP would split the
    # graphs at its buckets.
    torch._dynamo.config.recompile_limit = 16
    torch._dynamo.config.optimize_ddp = False
    print0("compiling takes up to two minutes, at first; --no-compile starts at once, and trains slower")
    return Loss(model, compiles=True)


def wrap_in_ddp(loss: Loss, rt: Runtime) -> nn.Module:
    """Wrap the loss in DDP, which averages the gradients over the ranks. From here on, the gradients are views into
    DDP's buckets."""
    if rt.world_size == 1:
        return loss

    # DDP reduces gradients in buckets. If a gradient is None when a backward pass begins, it gets a tensor of its own
    # beside its place in the bucket: 4 bytes more per parameter while micro-batches accumulate. So each one that trains
    # gets a gradient of zeros, which DDP moves into the bucket, where it stays from then on. Expanded from one number,
    # the zeros take no memory.
    for p in loss.parameters():
        if p.requires_grad:
            p.grad = p.new_zeros(()).expand_as(p)

    # All ranks have the same weights already.
    device_ids = [rt.device.index] if rt.device.type == "cuda" else None
    return nn.parallel.DistributedDataParallel(loss, device_ids, gradient_as_bucket_view=True, init_sync=False)


# ------------------------------------------------------------------------- the head and its loss, in chunks


class ChunkedHead(torch.autograd.Function):
    """The mean objective and the mean cross-entropy of x (N, C), after the final norm, and targets (N,).

    The saved gradients are those of the summed objective; the backward pass divides by the number of targets, in place,
    so it can run once. In float16 the loss scale therefore never enters the matrix products, and they cannot overflow
    because of it. The gradient of the weight is summed over the chunks in float32.
    """

    @staticmethod
    def forward(ctx, x, weight, head: Head, targets, loss: Loss, with_gradients: bool):
        """weight: the parameter (V, C) that `head` is rounded from."""
        finish_chunk = loss.compiled_chunk if loss.compiles else loss.finish_chunk
        sums = torch.zeros(2, device=x.device)  # of the objective and the cross-entropy
        d_x = torch.empty_like(x if with_gradients else x[:0])
        d_weight = torch.zeros_like(weight if with_gradients else weight[:0], dtype=torch.float32)

        # Chunk by chunk: R rows of x, their targets, and the part of d_x that is theirs.
        n = math.ceil(len(x) / loss.chunk_rows(head.weight.dtype))
        d_chunks = d_x.chunk(n) if with_gradients else n * (d_x,)
        for rows, row_targets, d_rows in zip(x.chunk(n), targets.chunk(n), d_chunks, strict=False):
            rows = rows.to(head.weight.dtype)
            products = head.products(rows)  # (R, C) @ (C, V) -> (R, V)
            *both, d_shift = finish_chunk(products, head.shift(rows), row_targets, with_gradients)
            sums += torch.stack(both)
            if with_gradients:
                d_products = products  # finish_chunk has overwritten them
                d_rows.copy_(d_products @ head.weight)  # (R, V) @ (V, C) -> (R, C)
                if d_shift is not None and head.mean is not None:
                    d_rows.addcmul_(d_shift[:, None], head.mean)  # (R, 1) * (C,)
                # The weight is what was rounded and the mean row together: its gradient is that of all the logits.
                if d_products.dtype == torch.float32:
                    d_weight.addmm_(d_products.T, rows)  # (V, R) @ (R, C) -> (V, C)
                else:
                    # addmm_ adds no product in half precision to a float32 sum. The head may have more rows.
                    d_weight.add_((d_products.T @ rows)[: len(d_weight)])
                del d_products
            # Free the logits of this chunk before the next chunk computes its own.
            del products

        # Divide by the number of targets that count. It stays on the device: reading it here would wait for the GPU.
        count = (targets >= 0).sum()
        ctx.save_for_backward(d_x, d_weight, count)
        objective, mean_loss = (sums / count).unbind()
        ctx.mark_non_differentiable(mean_loss)
        return objective, mean_loss

    @staticmethod
    def backward(ctx, grad_output, _):
        """The gradients of the mean objective, times grad_output, for the arguments of forward."""
        # grad_output is 1, times the loss scale in float16, over the number of micro-batches.
        d_x, d_weight, count = ctx.saved_tensors
        scale = grad_output / count
        return d_x.mul_(scale), d_weight.mul_(scale), None, None, None, None


# ------------------------------------------------------------------------- a check


class AutogradLoss(Loss):
    """The same by GPT.logits and autograd, with all logits at once."""

    def head_losses(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.model.logits(x)  # (N, V)
        losses = token_losses(logits, targets)
        return token_objectives(logits, losses).mean(), losses.mean()


def check_gradients(model: GPT) -> None:
    """Raise UserError, before a run begins, unless the chunks give each parameter the gradient that autograd gives it
    from GPT.logits: of a head that multiplies, adds or reads something else, they know nothing.

    On a few tokens, in the precision of the weights. Leaves no gradients behind."""
    model.eval()  # dropout would differ from one pass to the other
    T = min(64, model.config.block_size)
    weight = model.lm_head.weight
    idx = torch.arange(T + 1, device=weight.device)[None] % model.config.vocab_size  # (1, T + 1)
    x, y = idx[:, :-1], idx[:, 1:]

    # With a head of logits of about 30: on small ones a soft-cap does nothing, and the run's own may start at zero.
    kept = weight.detach().clone()
    generator = torch.Generator(weight.device).manual_seed(0)
    nn.init.normal_(weight, std=30 / model.config.n_embd**0.5, generator=generator)

    model.zero_grad()
    # The gradients of the chunks minus autograd's: 5% is far from rounding, also that of TF32, and nearer than any
    # omission. What is not a number is refused by the first step.
    trained: dict[str, Any] = {name: p for name, p in model.named_parameters() if p.requires_grad}
    Loss(model, compiles=False)(x, y)[0].backward()
    allowed = {name: 0.05 * p.grad.norm() + 1e-6 for name, p in trained.items() if p.grad is not None}
    (-AutogradLoss(model, compiles=False)(x, y)[0]).backward()
    for name, p in trained.items():
        require(p.grad is not None, f"{name} gets no gradient from {T} tokens: nothing would train it")
        is_same = name in allowed and not p.grad.norm() > allowed[name]
        fix = "what GPT.logits does to the products stands in GPT.to_logits, and in eval mode nothing is random"
        require(is_same, f"training/loss.py computes another gradient of {name} than GPT.logits gives; {fix}")
    model.zero_grad()
    model.train()
    with torch.no_grad():
        weight.copy_(kept)
