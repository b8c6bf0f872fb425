"""The loss of training: from the tokens of a micro-batch to the number that is minimized.

    loss = Loss(model, compiles=True)
    objective, mean_loss = loss(x, y)       # x, y (B, T) int64; objective.backward() gives the gradients
    with torch.no_grad():
        _, val_loss = loss(x, y)            # mean cross-entropy, in nats per token

`Loss` computes what `GPT.forward` computes with targets, up to rounding. All logits together, (B * T, V), would be the
largest tensor of a step: 13 GB in float32 for GPT-2 124M with 64 sequences of 1,024 tokens. So the head takes a chunk
of R positions at a time, and computes the gradients of the chunk before it goes on to the next one, which reuses the
memory. Nothing is computed twice. Liger Kernel (Hsu et al. 2024) does the same with kernels of its own.

    x (R, C)  --- GPT.logits, token_losses, token_objectives, sum --->  objective of the chunk
                                                                            | torch.autograd.grad
    gradients of x (R, C), and of each parameter that GPT.logits uses  <----'
         |                                    |
         v a row for each position            v added up over the chunks, in float32
"""

import math
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from model import GPT, token_losses

# For GPUs. To tune a kernel that overwrites the logits, torch would first copy them, 3.3 GB, into pinned host memory,
# and keep it. The fast exp has a relative error of 4e-6 at most, and bfloat16 rounds the gradient by up to 4e-3.
HEAD_OPTIONS: dict[str, Any] = {"triton.autotune_pointwise": False, "use_fast_math": True}


def token_objectives(logits: Tensor, losses: Tensor) -> Tensor:
    """What training minimizes for each token, (N,), from the logits (N, V) and the cross-entropies (N,). To penalize
    the logits, change the line below, as for a z-loss: `return losses + 1e-4 * logits.logsumexp(-1) ** 2`. The log,
    validation and HellaSwag always report the cross-entropy."""
    return losses


class Loss(nn.Module):
    """GPT.forward with targets, for training and validation, which never holds all the logits.

    torch.compile compiles one block, reuses its graph for every block, and compiles a chunk of the head. The first step
    comes sooner than with one graph of the whole model, and DDP still sends gradients during the backward pass.
    """

    def __init__(self, model: GPT, compiles: bool):
        super().__init__()
        self.model = model  # a submodule, so that DDP finds the parameters
        self.compiles = compiles  # lifecycle/microbatch.py turns it off if the compiler fails
        if compiles:
            self.compiled_blocks = [torch.compile(block, dynamic=False) for block in model.transformer.h]
            self.compiled_sums = torch.compile(self.chunk_sums, dynamic=False, options=HEAD_OPTIONS)
        self.head_parameters = self.find_head_parameters()

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """idx, targets (B, T) int64 -> the mean of what training minimizes, and the mean cross-entropy, both per token.
        Targets of -100 are left out. Add a loss of the blocks here, such as the balancing loss of a mixture of
        experts."""
        x = self.model.hidden(idx, blocks=self.compiled_blocks if self.compiles else ())  # (B, T, C)
        return self.head_losses(x.flatten(0, 1), targets.flatten())  # (B * T, C), (B * T,)

    def head_losses(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """x (N, C), as GPT.hidden returns it, and targets (N,) -> the mean objective and the mean cross-entropy, in
        chunks."""
        chunk_sums = self.compiled_sums if self.compiles else self.chunk_sums
        num_chunks = math.ceil(len(x) / self.chunk_rows(x.device))
        if torch.is_grad_enabled():
            return ChunkedHead.apply(x, targets, chunk_sums, num_chunks, *self.head_parameters)
        chunks = zip(x.chunk(num_chunks), targets.chunk(num_chunks), strict=True)
        sums = torch.stack([torch.stack(chunk_sums(*chunk)) for chunk in chunks]).sum(0)
        objective, mean_loss = (sums / (targets >= 0).sum()).unbind()
        return objective, mean_loss

    def chunk_sums(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """x (R, C), targets (R,) -> the sum of the objectives, and the sum of the cross-entropies."""
        logits = self.model.logits(x)  # (R, V)
        losses = token_losses(logits, targets)
        objectives = token_objectives(logits, losses) * (targets >= 0)
        return objectives.sum(), losses.detach().sum()

    @torch.enable_grad()
    def find_head_parameters(self) -> list[nn.Parameter]:
        """The parameters that the head uses and that train: those that get a gradient from a single position."""
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        x = self.model.lm_head.weight.new_ones(1, self.model.config.n_embd).requires_grad_()
        objective, _ = self.chunk_sums(x, torch.zeros(1, dtype=torch.int64, device=x.device))
        gradients = torch.autograd.grad(objective, parameters, allow_unused=True)
        return [p for p, gradient in zip(parameters, gradients, strict=True) if gradient is not None]

    def chunk_rows(self, device: torch.device) -> int:
        """How many positions a chunk has. Each chunk reads and writes the gradient of the whole head, and larger chunks
        need more memory. 512 positions are as fast as 1,024 on a CPU, with less memory. On a GPU, a chunk is the
        largest power of two whose logits, at 2 bytes each, fit in 3.3 GB and in a 24th of the card. These sizes were
        not measured on a GPU."""
        if device.type == "cpu":
            return 512
        # In float16, the gradient of the head's weight is a sum over the positions of a chunk, which could exceed
        # 65,504. Without the compiler, several copies of the logits are in memory at once.
        is_float16 = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type) == torch.float16
        if is_float16 or not self.compiles:
            return 1024
        chunk_bytes = min(3.3e9, memory_bytes(device) / 24)
        return 2 ** int(math.log2(chunk_bytes / (2 * self.model.config.vocab_size)))


class ChunkedHead(torch.autograd.Function):
    """The mean objective and the mean cross-entropy of x (N, C) and targets (N,), in chunks. See Loss.head_losses.

    The forward pass computes the gradients of the summed objective, and the backward pass hands them on, scaled. So
    the gradients reach each parameter once in a micro-batch, as DDP needs it. The loss scale of float16 comes in the
    backward pass, after the matrix products of the head, so it cannot make these overflow.
    """

    @staticmethod
    def forward(ctx, x: Tensor, targets: Tensor, chunk_sums: Callable, num_chunks: int, *parameters: nn.Parameter):
        sums = torch.zeros(2, device=x.device)  # of the objectives and the cross-entropies
        d_x = torch.empty_like(x)
        d_parameters = [torch.zeros_like(p, dtype=torch.float32) for p in parameters]

        for rows, row_targets, d_rows in zip(*(t.chunk(num_chunks) for t in (x, targets, d_x)), strict=True):
            with torch.enable_grad():
                rows = rows.detach().requires_grad_()
                objective, loss = chunk_sums(rows, row_targets)
            # Turn autocast off, because it is for the forward pass alone.
            with torch.autocast(x.device.type, enabled=False):
                gradients = torch.autograd.grad(objective, (rows, *parameters))
            sums += torch.stack((objective.detach(), loss))
            d_rows.copy_(gradients[0])
            for total, gradient in zip(d_parameters, gradients[1:], strict=True):
                total += gradient
            # Free what is left of this chunk before the next one computes its own.
            del objective, loss, gradients, gradient

        # Divide by the number of targets that count. It stays on the device: reading it here would wait for the GPU.
        count = (targets >= 0).sum()
        ctx.save_for_backward(count, d_x, *d_parameters)
        objective, mean_loss = (sums / count).unbind()
        ctx.mark_non_differentiable(mean_loss)
        return objective, mean_loss

    @staticmethod
    def backward(ctx, grad_output: Tensor, _):
        """grad_output: the loss scale of float16, or 1, divided by the number of micro-batches."""
        count, d_x, *d_parameters = ctx.saved_tensors
        scale = grad_output / count
        # In place, so the backward pass can run only once.
        return d_x.mul_(scale), None, None, None, *(total.mul_(scale) for total in d_parameters)


@cache
def memory_bytes(device: torch.device) -> int:
    """The memory of a GPU."""
    return torch.cuda.get_device_properties(device).total_memory
