"""One optimizer step: the only place that knows how.

step = Step(cfg, rt, model)
result = step.gradients(batch)         # forward and backward of every micro-batch, clipped; ranks have agreed
step.set_rates(at, max_steps)
step.update() if result.finite else step.refuse(at, result, data)
"""

from __future__ import annotations

import math
from dataclasses import replace
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from model import GPT
from system import machine
from system.cli import UserError, print0
from system.distributed import Runtime
from tokens.loader import Loader, to_device
from training import head, optim
from training.config import TrainConfig
from training.microbatch import micro_batch_size


class Refused(Exception):
    """A loss or gradient that is not finite, and no --skip-bad-steps left. Nothing was updated."""


class Result(NamedTuple):
    """What one step's forward and backward passes gave; the ranks agree on all but the last."""

    loss: float  # mean over all sequences of the step, nats per token
    norm: float  # of the gradients of all parameters, before clipping
    finite: bool  # whether the loss and the norm are finite on every rank; if not, the update is refused
    halt: bool  # whether any rank was asked to stop
    local_loss: float  # mean over this rank's sequences


class Step:
    """The model, its compiled forward pass, DDP, the weights that are updated, the optimizers and the loss scale."""

    def __init__(self, cfg: TrainConfig, rt: Runtime, model: GPT):
        self.cfg, self.rt, self.model = replace(cfg, model=model.config), rt, model  # --init-from may have chosen it
        if rt.dtype == torch.float16:  # of a GPU that lacks bfloat16
            cfg = replace(cfg, weights="float32")
        self.weights = optim.Weights(model, cfg)
        self.optimizers = optim.build(self.weights, cfg, rt)
        self.scaler = torch.amp.GradScaler(rt.device.type, enabled=rt.dtype == torch.float16)
        self.forward = make_forward(model, cfg, rt)
        self.ddp_forward = distributed(self.forward, rt)
        self.B = micro_batch_size(self.cfg, rt, model, self.ddp_forward)
        self.skipped = 0  # steps refused because of a loss or gradient that is not finite

    def gradients(self, batch: Tensor, asked: bool = False) -> Result:
        """Forward and backward over the micro-batches (micro_steps, B, T + 1), then clip the gradients' global norm to
        --grad-clip. Gradients of the mean loss over all ranks are reduced once, in the last backward; the ranks agree
        on the loss, on stopping (`asked` on any of them) and on bad norms in one wait for the device."""
        total = torch.zeros((), device=self.rt.device)
        for i, tokens in enumerate(batch):
            x, y = to_device(tokens, self.rt.device)
            self.ddp_forward.require_backward_grad_sync = i == len(batch) - 1  # DDP's switch; unused without DDP
            with self.rt.autocast():
                _, loss = self.ddp_forward(x, y)
            self.scaler.scale(loss / len(batch)).backward()
            total += loss.detach() / len(batch)
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(self.weights.take_gradients(), self.cfg.grad_clip or math.inf)
        mine = [total / self.rt.world_size, norm.new_full((), asked), (~norm.isfinite()).float()]
        loss, halt, bad_norms = self.rt.all_reduce(torch.stack(mine)).tolist()
        finite = math.isfinite(loss) and bad_norms == 0
        return Result(loss, norm.item(), finite, halt > 0, total.item())

    def set_rates(self, at: int, max_steps: int) -> float:
        """Set the learning rates for step `at`; return the rate for a peak of --max-lr."""
        return optim.set_rates(self.optimizers, at, max_steps, self.cfg)

    def update(self) -> None:
        """Apply the gradients. On a GPU this is still running when it returns."""
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.weights.copy_to_model()
        self._drop_gradients()

    def refuse(self, at: int, result: Result, data: Loader) -> None:
        """Drop the gradients of step `at`, which are not finite. A float16 overflow halves the loss scale; anything
        else is reported, with the rank and the data, and counted. Raises Refused once --skip-bad-steps is used up.
        Every rank must call it."""
        scale = self.scaler.get_scale()
        if math.isfinite(result.loss) and scale > 1:
            print0(f"step {at}: float16 overflow at loss scale {scale:g}; step skipped, scale halved")
        else:
            self.skipped += 1
            message = self._blame(at, result, data)
            if self.skipped > self.cfg.skip_bad_steps:
                raise Refused(message)
            print0(f"{message} ({self.skipped} of --skip-bad-steps {self.cfg.skip_bad_steps})")
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        self.scaler.update()  # once a step: it halves the scale after an overflow, else doubles it now and then
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def _blame(self, at: int, result: Result, data: Loader) -> str:
        """Names the rank, shard and window of a loss or gradient that is not finite."""
        rt = self.rt
        mine = torch.tensor([result.local_loss, result.norm], device=rt.device)
        found = torch.stack(rt.all_gather(mine)).tolist()
        bad_losses = [rank for rank, (loss, _) in enumerate(found) if not math.isfinite(loss)]
        bad_norms = [rank for rank, (_, norm) in enumerate(found) if not math.isfinite(norm)]
        rank = [*bad_losses, *bad_norms, 0][0]  # a bad loss first: it makes the norm bad on every rank
        loss, norm = found[rank]
        read = 0 if self.cfg.overfit_single_batch else at
        windows = data.step_windows(read, self.cfg.sequences_per_step, self.B, rank, rt.world_size)
        shard, window = windows.reshape(-1, 2)[0]
        return (
            f"step {at}: loss {loss}, gradient norm {norm} on rank {rank}, whose data starts at "
            f"{data.paths[shard].name} window {window}; the update was refused"
        )

    def state(self) -> dict[str, Any]:
        """What resuming needs besides the weights and the run's progress. Every rank must call it."""
        on_cuda = self.rt.device.type == "cuda"
        rng = torch.cuda.get_rng_state(self.rt.device) if on_cuda else torch.get_rng_state()
        return {
            "optimizers": optim.full_state(self.optimizers, self.rt),
            "rng": self.rt.all_gather(rng.to(self.rt.device)),
            "scaler": self.scaler.state_dict(),
            "dtype": str(self.rt.dtype).removeprefix("torch."),
        }

    def restore(self, saved: dict[str, Any]) -> None:
        """Load what `state` returned; a rank that did not exist then keeps its fresh seed. Raises UserError if it does
        not fit."""
        rt = self.rt
        try:
            optim.load_state(self.optimizers, saved["optimizers"])
            if saved["scaler"]:
                self.scaler.load_state_dict(saved["scaler"])
            if rt.rank < len(saved["rng"]):
                state = saved["rng"][rt.rank].cpu()
                of_cuda = len(state) < 100  # a few bytes; a CPU's has kilobytes, and neither can be set on the other
                if of_cuda and rt.device.type == "cuda":
                    torch.cuda.set_rng_state(state, rt.device)
                elif not of_cuda and rt.device.type != "cuda":
                    torch.set_rng_state(state)
        except Exception as e:  # torch raises many exception types
            why = f"the train state of step {saved['step']} does not fit this run ({type(e).__name__}: {e!s:.200})"
            raise UserError(f"{why}; start a new run from its weights with --init-from") from None


class Forward(nn.Module):
    """GPT.forward with targets, as training and validation call it: never with all logits at once (training/head.py).
    Compiled block by block: all blocks share one graph, and what the head does with a chunk of logits is another. The
    first step comes sooner than with one graph of everything, and gradients are reduced just as early."""

    def __init__(self, model: GPT, compiles: bool):
        super().__init__()
        self.model = model  # DDP finds the parameters here; the plain list below registers none
        self.blocks, self.chunk_loss = list(model.transformer.h), head.chunk_loss
        if compiles:
            self.blocks = [torch.compile(block, dynamic=False) for block in self.blocks]
            self.chunk_loss = torch.compile(head.chunk_loss, dynamic=False)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[None, Tensor]:
        x = self.model.hidden(idx, blocks=self.blocks)
        return None, head.loss(self.model, x, targets, self.chunk_loss)


def make_forward(model: GPT, cfg: TrainConfig, rt: Runtime) -> Forward:
    """The forward pass of training and validation; HellaSwag, sampling and checkpoints use the model itself."""
    if rt.device.type == "cpu":
        machine.keep_freed_memory()
    if not cfg.compile or rt.device.type == "mps":
        return Forward(model, compiles=False)
    if missing := machine.missing_compiler(rt.device):
        print0(f"no {missing}: training without torch.compile, several times slower")
        return Forward(model, compiles=False)
    torch._dynamo.config.recompile_limit = 16  # --micro-batch-size auto may try seven sizes; validation adds a graph
    torch._dynamo.config.optimize_ddp = False  # it would split graphs at DDP's buckets
    print0("the first step compiles, which takes a while; --no-compile starts at once but then trains slower")
    return Forward(model, compiles=True)


def distributed(forward: nn.Module, rt: Runtime) -> nn.Module:
    """Wrap in DDP, which averages gradients over the ranks; the gradients are views into its buckets."""
    if rt.world_size == 1:
        return forward
    DDP = nn.parallel.DistributedDataParallel
    ids = [rt.device.index] if rt.device.type == "cuda" else None
    renamed = "forward_sync_buffers" in signature(DDP).parameters  # by torch 2.13
    no_sync = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    return DDP(forward, device_ids=ids, gradient_as_bucket_view=True, **no_sync)
