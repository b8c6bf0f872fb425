"""The forward pass of training: from the tokens of a micro-batch to its loss, compiled, and averaged over the ranks.

    forward = make_forward(model, cfg, rt)      # validation calls this
    ddp_forward = wrap_in_ddp(forward, rt)      # training calls this
    loss = ddp_forward(x, y)                    # x, y (B, T); the mean cross-entropy in nats per token

It computes what GPT.forward computes with targets, up to rounding, but never holds all the logits (B * T, V): these are
the largest tensor of a step, for GPT-2 124M with 64 sequences of 1,024 tokens 13 GB in float32. So the head and its
loss process the rows in chunks. Each chunk computes its logits, their loss and gradient, and both matrix products of
the backward pass; then the next chunk reuses the memory. Nothing is computed twice. Liger Kernel (Hsu et al. 2024) does
this with its own kernels; here a small compiled graph computes the softmax, and the library's matmul does the rest. For
each chunk of R rows:

    x (R, C)  --- @ weight.T --->  logits (R, V)  --- chunk_loss --->  loss, added to the total
                                        |
                                        v  overwritten
    d_x (R, C)  <-- @ weight ---  d_logits (R, V)  --- d_logits.T @ x --->  added to d_weight (V, C)

Called by train_gpt2.py; evaluation/multiple_choice.py casts the head as it is cast here.
"""

import math
import warnings
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from model import GPT
from system import machine
from system.distributed import Runtime
from system.printing import print0
from training.config import TrainConfig

# ------------------------------------------------------------------------- the network, compiled


class Forward(nn.Module):
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
            self.compiled_chunk_loss = torch.compile(chunk_loss, dynamic=False)

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        """idx, targets (B, T) int64 -> the mean cross-entropy in nats per token."""
        blocks = self.compiled_blocks if self.compiles else self.model.transformer.h
        compute_loss = self.compiled_chunk_loss if self.compiles else chunk_loss
        x = self.model.hidden(idx, blocks=blocks)  # (B, T, C)
        return mean_loss(self.model, x, targets, compute_loss, choose_chunk_rows(x.device.type, self.compiles))


def make_forward(model: GPT, cfg: TrainConfig, rt: Runtime) -> Forward:
    """The forward pass of training and validation. HellaSwag, sampling and checkpoints use the model itself."""
    # Each step allocates the same large tensors again, which on a CPU costs time.
    if rt.device.type == "cpu":
        machine.keep_freed_memory()

    if not cfg.compile:
        return Forward(model, compiles=False)

    # --micro-batch-size auto compiles for each size that it tries, and validation adds a graph. DDP would split the
    # graphs at its buckets.
    torch._dynamo.config.recompile_limit = 16
    torch._dynamo.config.optimize_ddp = False
    print0("compiling takes up to two minutes, at first; --no-compile starts at once, and trains slower")
    return Forward(model, compiles=True)


def wrap_in_ddp(forward: Forward, rt: Runtime) -> nn.Module:
    """Wrap the forward pass in DDP, which averages the gradients over the ranks. From here on, the gradients are views
    into DDP's buckets."""
    if rt.world_size == 1:
        return forward

    # DDP reduces gradients in buckets. If a gradient is None when a backward pass begins, it gets a tensor of its own
    # beside its place in the bucket: 4 bytes more per parameter while micro-batches accumulate. So each parameter gets
    # a gradient of zeros, which DDP moves into the bucket, where it stays from then on. Expanded from one number, the
    # zeros take no memory.
    for p in forward.parameters():
        p.grad = p.new_zeros(()).expand_as(p)

    # All ranks have the same weights already, and the same only buffer, RoPE's table. torch 2.13 warns of a newer name,
    # which older versions do not have.
    warnings.filterwarnings("ignore", "`broadcast_buffers` is deprecated")
    return nn.parallel.DistributedDataParallel(
        forward,
        device_ids=[rt.device.index] if rt.device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        broadcast_buffers=False,
        init_sync=False,
    )


# ------------------------------------------------------------------------- the head and its loss, in chunks


def choose_chunk_rows(device_type: str, compiles: bool) -> int:
    """How many rows a chunk has. 512 keep a CPU busy. On a GPU each chunk reads and writes the whole gradient of the
    weight, so chunks are larger there; that size is not measured. Without the compiler, several copies of a chunk's
    logits are in memory at once, which for 8,192 rows of GPT-2's would take 7.5 GB."""
    if device_type == "cpu":
        return 512
    return 8192 if compiles else 1024


def cast_head(weight: Tensor) -> Tensor:
    """The head's weight (V, C) in autocast's precision or, without autocast, as it is."""
    device_type = weight.device.type
    dtype = torch.get_autocast_dtype(device_type)
    if not torch.is_autocast_enabled(device_type) or dtype == weight.dtype:
        return weight

    # OpenAI's weights give logits near -100, where bfloat16 steps by 0.5. Softmax ignores a number that is added to all
    # logits of a row. So subtract the mean row of the weight before the cast rounds: it takes one number, x @ mean, off
    # all logits of a row. The backward pass may ignore that, because the gradients of a row of logits sum to 0.
    return (weight - weight.mean(0)).to(dtype)


def chunk_loss(logits: Tensor, targets: Tensor, with_gradients: bool) -> Tensor:
    """The summed cross-entropy, in nats, of logits (R, V) and targets (R,). Rows whose target is -100 are left out.
    With gradients, that of the logits overwrites them: they are not needed again."""
    z = logits.float()

    # Which rows count: 1, or 0 where the target is -100. There any column will do as the target.
    included = (targets >= 0).float()[:, None]  # (R,) -> (R, 1)
    targets = targets.clamp(min=0)[:, None]  # (R,) -> (R, 1)

    # cross-entropy = logsumexp(logits) - logit of the target, summed over the rows that count.
    normalizer = z.logsumexp(-1, keepdim=True)  # (R, V) -> (R, 1)
    target_logits = z.gather(-1, targets)  # (R, V) -> (R, 1)
    loss = ((normalizer - target_logits) * included).sum()

    # d loss / d logits = softmax(logits) - one_hot(target)
    if with_gradients:
        columns = torch.arange(logits.size(-1), device=logits.device)  # (V,)
        one_hot = (columns == targets).float()  # (V,) == (R, 1) -> (R, V)
        logits.copy_(((z - normalizer).exp() - one_hot) * included)
    return loss


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a @ b, where total is float32, and a and b may be in half precision."""
    if a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        # addmm_ adds no product in half precision to a float32 sum. In float16 the sum over all rows could exceed its
        # largest number, 65,504: divide by a power of two first, which is exact but for numbers below 0.004.
        total.add_(a @ (b / 64), alpha=64)


class ChunkedHeadLoss(torch.autograd.Function):
    """Mean cross-entropy of the logits x (N, C) @ weight.T (C, V) and targets (N,).

    In float32 it is this, chunk by chunk:

        logits = x @ weight.T                                       # (R, V)
        loss = F.cross_entropy(logits, targets, reduction="sum")
        d_logits = logits.softmax(-1) - F.one_hot(targets, V)       # (R, V)
        d_x = d_logits @ weight                                     # (R, C)
        d_weight += d_logits.T @ x                                  # (V, C)

    The saved gradients are those of the summed loss; the backward pass divides by the number of targets, in place, so
    it can run once. In float16 the loss scale therefore never enters the matrix products, and they cannot overflow
    because of it. The gradient of the weight is summed over the chunks in float32.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, with_gradients, compute_loss, chunk_rows):
        """The mean loss. with_gradients: whether a backward pass will follow; validation needs only the loss.
        compute_loss: chunk_loss or its compiled version."""
        # Autocast does not cast the inputs of a custom function.
        cast_weight = cast_head(weight)  # (V, C)
        total = torch.zeros((), device=x.device)
        d_x = torch.empty_like(x) if with_gradients else None
        d_weight = torch.zeros_like(weight, dtype=torch.float32) if with_gradients else None

        # Chunk by chunk: R rows of x, their targets, and the part of d_x that is theirs.
        n = math.ceil(len(x) / chunk_rows)
        d_chunks = d_x.chunk(n) if with_gradients else n * [None]
        for rows, row_targets, d_rows in zip(x.chunk(n), targets.chunk(n), d_chunks, strict=False):
            rows = rows.to(cast_weight.dtype)
            logits = F.linear(rows, cast_weight)  # (R, C) @ (C, V) -> (R, V)
            total += compute_loss(logits, row_targets, with_gradients)
            if with_gradients:
                d_logits = logits  # compute_loss has overwritten them
                d_rows.copy_(d_logits @ cast_weight)  # (R, V) @ (V, C) -> (R, C)
                add_product_(d_weight, d_logits.T, rows)  # (V, R) @ (R, C) -> (V, C)
                del d_logits
            # Free the logits of this chunk before the next chunk computes its own.
            del logits

        # Divide by the number of targets that count. It stays on the device: reading it here would wait for the GPU.
        count = (targets >= 0).sum()
        ctx.save_for_backward(d_x, d_weight, count)
        return total / count

    @staticmethod
    def backward(ctx, grad_output):
        """The gradients of the mean loss, times grad_output, for the arguments of forward."""
        # grad_output is 1, times the loss scale in float16, over the number of micro-batches.
        d_x, d_weight, count = ctx.saved_tensors
        scale = grad_output / count
        return d_x.mul_(scale), d_weight.mul_(scale), None, None, None, None


def mean_loss(
    model: GPT, x: Tensor, targets: Tensor, compute_loss: Callable = chunk_loss, chunk_rows: int = 512
) -> Tensor:
    """Mean cross-entropy, in nats per token, of hidden states x (B, T, C), as GPT.hidden returns them, and targets
    (B, T). Targets of -100 are left out. Without gradients (torch.no_grad) none are computed."""
    x = model.transformer.ln_f(x).flatten(0, 1)  # (B, T, C) -> (B * T, C)
    with_gradients = torch.is_grad_enabled()
    return ChunkedHeadLoss.apply(x, model.lm_head.weight, targets.flatten(), with_gradients, compute_loss, chunk_rows)
