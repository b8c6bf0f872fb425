"""One optimizer step: forward and backward passes, clipping, update, and what to do if a number is not finite.

    train_step = TrainStep(cfg, rt, model)
    result = train_step.compute_gradients(batch)            # all micro-batches, reduced over the ranks, clipped
    lr = train_step.set_learning_rates(step, max_steps)
    if result.is_finite:
        train_step.update()
    else:
        train_step.refuse_update(step, result, data)

Called by train_gpt2.py for training, by training/plan.py to measure a step, and by the benches. The order of a step:

    for each micro-batch (B, T + 1)     forward with autocast; loss / micro_steps; backward adds to the gradients
    the last backward                   DDP averages the gradients over the ranks
    once, on the sums                   undo the loss scale (float16), copy to the master weights (bfloat16), clip
    one all_reduce                      the mean loss, whether a rank was asked to stop, whether a norm is not finite
    update                              AdamW and Muon; copy the master weights to the model (bfloat16)
"""

from __future__ import annotations

import math
from inspect import signature
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from model import GPT
from system import machine
from system.cli import UserError, print0
from system.distributed import Runtime
from system.machine import dtype_name
from tokens.loader import Loader, to_device
from training import head, optim, schedule
from training.config import TrainConfig
from training.master_weights import MasterWeights
from training.microbatch import choose_micro_batch_size, explain_out_of_memory, sequences_per_rank


class UpdateRefused(Exception):
    """A loss or gradient that is not finite, and no --skip-bad-steps left. Nothing was updated."""


class StepResult(NamedTuple):
    """What the forward and backward passes of a step gave. loss, is_finite and stop_requested are the same on all
    ranks; norm is, too, unless something is wrong."""

    loss: float  # mean over all sequences of the step, in nats per token
    norm: float  # L2 norm of the gradients of all parameters, before clipping
    is_finite: bool  # whether loss and norm are finite on every rank; if not, the update is refused
    stop_requested: bool  # whether any rank was asked to stop
    local_loss: float  # mean over this rank's sequences


class TrainStep:
    """The model with everything that trains it: compiled forward pass, DDP, master weights, optimizers, loss scale."""

    def __init__(self, cfg: TrainConfig, rt: Runtime, model: GPT):
        """`model` is on the device, in training mode. Every rank must make one. Raises UserError if not even one
        sequence fits in memory, or if the batch does not divide evenly over the ranks."""
        self.cfg, self.rt, self.model = cfg, rt, model

        # A schedule without a function raises here, before a run has written a file or compiled anything.
        schedule.choose_decay(cfg)

        # Precision. A GPU without bfloat16 trains float32 weights in float16, with a loss scale.
        self.scaler = make_scaler(rt)

        # The weights to update, and the optimizers with their state. They are allocated before the micro-batch is
        # chosen, so that the search for its size sees the memory that is really left.
        match cfg.weights:
            case "float32":
                keep_float32_copy = False
            case "bfloat16":
                keep_float32_copy = rt.dtype != torch.float16
            case _:
                raise ValueError(f"no weights in {cfg.weights!r}: add a case to TrainStep in training/step.py")
        self.weights = MasterWeights(model, keep_float32_copy)
        self.optimizers = optim.build_optimizers(self.weights.named, cfg, rt)

        # Validation calls `forward`; training calls it through DDP.
        self.forward = make_forward(model, cfg, rt)
        self.ddp_forward = wrap_in_ddp(self.forward, rt)

        # The number of sequences in a forward pass, which `auto` finds by trying whole steps.
        self.micro_batch_size = choose_micro_batch_size(cfg, rt, self.rehearse)
        self.refused_steps = 0

    def compute_gradients(self, batch: Tensor, stop_requested: bool = False) -> StepResult:
        """Forward and backward over the micro-batches of a step, then clip the global norm to --grad-clip.

        batch: (micro_steps, B, T + 1) uint16, this rank's tokens. stop_requested: whether this rank was asked to stop.
        The gradients are those of the mean loss over all ranks. Every rank must call it.
        """
        # The work of this rank; in the last backward pass the ranks average their gradients.
        with explain_out_of_memory(self.cfg, self.rt, len(batch[0])):
            local_loss = self._accumulate_gradients(batch, reduce=True)
            norm = self._clip_gradients()

        # One collective, and one wait for the device, sums three numbers over the ranks: their shares of the mean loss,
        # how many were asked to stop, and how many have a norm that is not finite.
        mean_share = local_loss / self.rt.world_size
        stop_flag = norm.new_full((), float(stop_requested))
        bad_norm_flag = (~norm.isfinite()).float()
        loss, stops, bad_norms = self.rt.all_reduce(torch.stack([mean_share, stop_flag, bad_norm_flag])).tolist()
        return StepResult(
            loss=loss,
            norm=norm.item(),
            is_finite=math.isfinite(loss) and bad_norms == 0,
            stop_requested=stops > 0,
            local_loss=local_loss.item(),
        )

    def _accumulate_gradients(self, batch: Tensor, reduce: bool) -> Tensor:
        """Forward and backward over the micro-batches; returns the mean loss of this rank. With `reduce` DDP averages
        the gradients over the ranks, once, in the last backward pass; otherwise no collective is called."""
        local_loss = torch.zeros((), device=self.rt.device)
        for i, tokens in enumerate(batch):
            # Inputs and targets: (B, T + 1) -> 2 x (B, T)
            x, y = to_device(tokens, self.rt.device)

            # DDP reads this attribute; without DDP it has no effect.
            self.ddp_forward.require_backward_grad_sync = reduce and i == len(batch) - 1
            with self.rt.autocast():
                _, loss = self.ddp_forward(x, y)

            # The micro-batches are of equal size, so the mean of their means is the mean over the step.
            self.scaler.scale(loss / len(batch)).backward()
            local_loss += loss.detach() / len(batch)
        return local_loss

    def _clip_gradients(self) -> Tensor:
        """Undo the loss scale of float16, move the gradients to the master weights, clip. Returns the norm before
        clipping. Without --grad-clip the norm is only measured."""
        # Without float16 the scaler does nothing.
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)

        # Gradients in DDP's buckets stay there.
        weights = self.weights.take_gradients(keep=self.rt.world_size > 1)

        # One norm over all parameters together. An infinite limit scales nothing.
        return nn.utils.clip_grad_norm_(weights, self.cfg.grad_clip or math.inf)

    def set_learning_rates(self, step: int, max_steps: int) -> float:
        """Set the learning rates for `step`; return the scheduled value of --max-lr, the rate that is logged."""
        return schedule.set_learning_rates(self.optimizers, step, max_steps, self.cfg)

    def update(self) -> None:
        """Apply the gradients. On a GPU the work is still running when this returns."""
        with explain_out_of_memory(self.cfg, self.rt, self.micro_batch_size):
            for optimizer in self.optimizers:
                self.scaler.step(optimizer)
            self.weights.copy_to_model()
        self._finish_step()

    def refuse_update(self, step: int, result: StepResult, data: Loader) -> None:
        """Drop gradients that are not finite. A float16 overflow halves the loss scale. Anything else is reported with
        the rank and the data, and counted; UpdateRefused is raised once --skip-bad-steps is used up. Every rank must
        call it."""
        # With float16 a finite loss with infinite gradients is expected now and then: the loss scale was too high. Once
        # halving has brought it down to 1, the scale is not to blame. In other precisions it is always 1.
        scale = self.scaler.get_scale()
        if math.isfinite(result.loss) and scale > 1:
            print0(f"step {step}: float16 overflow at loss scale {scale:g}; step skipped, scale halved")
        # Otherwise something is wrong with the data or the settings: report it.
        else:
            self.refused_steps += 1
            message = self._describe_bad_step(step, result, data)
            if self.refused_steps > self.cfg.skip_bad_steps:
                raise UpdateRefused(message)
            print0(f"{message} ({self.refused_steps} of --skip-bad-steps {self.cfg.skip_bad_steps})")
        self._finish_step()

    def _finish_step(self) -> None:
        """What follows every step, updated or refused."""
        # After an overflow GradScaler.update halves the loss scale; otherwise it doubles the scale now and then.
        self.scaler.update()
        self._drop_gradients()

    def _drop_gradients(self) -> None:
        """Clear the gradients, so that the next step begins its sums at zero."""
        # With several ranks the gradients live in DDP's buckets and are set to zero there (see wrap_in_ddp). One rank
        # frees their memory.
        if self.rt.world_size > 1:
            torch._foreach_zero_([p.grad for p in self.model.parameters()])
        else:
            self.model.zero_grad(set_to_none=True)
        self.weights.drop_gradients()

    def rehearse(self, B: int, with_other_ranks: bool) -> None:
        """Do a whole step with micro-batches of B sequences of zeros, and undo it. A step of training takes no more
        memory. If nothing was trained or loaded yet, weights, optimizer state and loss scale stay the same bit for bit.

        with_other_ranks: reduce over the ranks as in training, for which every rank must call it. Otherwise no
        collective is called.
        """
        # Two micro-steps, if the run has more than one: the second runs while the gradients of the first are in memory.
        micro_steps = min(2, sequences_per_rank(self.cfg, self.rt.world_size) // B)
        batch = torch.zeros(micro_steps, B, self.cfg.sequence_length + 1, dtype=torch.uint16)

        # The learning rates, to put back at the end.
        rates = [(group, group["lr"]) for o in self.optimizers for group in optim.all_groups(o)]
        try:
            if with_other_ranks:
                self.compute_gradients(batch)
            else:
                self._accumulate_gradients(batch, reduce=False)
                self._clip_gradients()

            # An update at a learning rate of 0 changes no weight, as long as the gradients are finite. In float16 they
            # may have overflowed, so set them to 1.
            for group, _ in rates:
                group["lr"] = 0.0
            for p in self.weights.named.values():
                # A parameter that the forward pass skips has no gradient.
                if p.grad is not None:
                    p.grad.fill_(1.0)
            for optimizer in self.optimizers:
                if with_other_ranks:
                    self.scaler.step(optimizer)
                else:
                    optim.unwrap(optimizer).step()  # with ZeRO-1, the update of this rank's share alone

        # Undo everything that the step has changed, also if it ran out of memory.
        finally:
            for group, rate in rates:
                group["lr"] = rate
            optim.reset_state(self.optimizers)
            self.scaler = make_scaler(self.rt)
            self._drop_gradients()

    def _describe_bad_step(self, step: int, result: StepResult, data: Loader) -> str:
        """Name the rank, shard and sequence of a loss or gradient that is not finite. Every rank must call it."""
        # Every rank's loss and norm.
        rt = self.rt
        local = torch.tensor([result.local_loss, result.norm], device=rt.device)
        per_rank = torch.stack(rt.all_gather(local)).tolist()  # (ranks, 2)

        # Prefer a rank with a bad loss: its gradients also make the norms of all other ranks bad.
        bad_losses = [rank for rank, (loss, _) in enumerate(per_rank) if not math.isfinite(loss)]
        bad_norms = [rank for rank, (_, norm) in enumerate(per_rank) if not math.isfinite(norm)]
        rank = (bad_losses or bad_norms or [0])[0]
        loss, norm = per_rank[rank]

        # Where that rank's data of this step begins.
        data_step = 0 if self.cfg.overfit_single_batch else step
        sequences = data.step_sequences(
            data_step, self.cfg.sequences_per_step, self.micro_batch_size, rank, rt.world_size
        )  # (micro_steps, B, 2) of (shard, sequence)
        shard, sequence = sequences.reshape(-1, 2)[0]
        return (
            f"step {step}: loss {loss}, gradient norm {norm} on rank {rank}, whose data starts at "
            f"{data.paths[shard].name} sequence {sequence}; the update was refused"
        )

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs besides the weights and the run's progress. Every rank must call it. There are no random
        states: after the initialization nothing draws from torch's global generators."""
        return {
            "optimizers": optim.full_state(self.optimizers, self.rt),
            "scaler": self.scaler.state_dict(),
            "dtype": dtype_name(self.rt.dtype),
        }

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Load what state_dict returned. Raises UserError if it does not fit."""
        try:
            optim.load_state(self.optimizers, saved["optimizers"])
            if saved["scaler"]:
                self.scaler.load_state_dict(saved["scaler"])
        except Exception as e:  # torch raises many exception types
            reason = f"{type(e).__name__}: {e!s:.200}"
            problem = f"the train state of step {saved['step']} does not fit this run ({reason})"
            raise UserError(f"{problem}; start a new run from its weights with --init-from") from None


class Forward(nn.Module):
    """GPT.forward with targets, for training and validation. It never holds all the logits at once (training/head.py).

    It is compiled block by block: all blocks share one graph, and the loss of a chunk of logits is another. The first
    step comes sooner than with one graph of the whole model, and DDP still overlaps the reduction with the backward
    pass.
    """

    def __init__(self, model: GPT, compiles: bool):
        super().__init__()
        # DDP finds the parameters in the model; the plain list of blocks below registers none.
        self.model = model
        self.blocks = list(model.transformer.h)
        self.chunk_loss = head.chunk_loss
        if compiles:
            self.blocks = [torch.compile(block, dynamic=False) for block in self.blocks]
            self.chunk_loss = torch.compile(head.chunk_loss, dynamic=False)

    def forward(self, idx: Tensor, targets: Tensor) -> tuple[None, Tensor]:
        """idx, targets (B, T) int64 -> (None, mean cross-entropy in nats per token)."""
        x = self.model.hidden(idx, blocks=self.blocks)  # (B, T, C)
        return None, head.mean_loss(self.model, x, targets, self.chunk_loss)

    def validation_losses(self, idx: Tensor, targets: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
        """The mean cross-entropy of idx, targets (B, T), with the same bits as forward, and the summed cross-entropy of
        those among the B * T targets whose indices are in `chosen` (n,), both in nats."""
        x = self.model.hidden(idx, blocks=self.blocks)  # (B, T, C)
        loss = head.mean_loss(self.model, x, targets, self.chunk_loss)

        # The chosen targets are few. Their number differs from batch to batch, so this is not compiled. Take a limited
        # number n at a time, because their logits (n, V) are large.
        x, targets = x.flatten(0, 1), targets.flatten()  # (B * T, C), (B * T,)
        chosen_loss = torch.zeros_like(loss)
        for start in range(0, len(chosen), 512):
            rows = chosen[start : start + 512]
            # mean_loss takes a batch: (n, C) -> (1, n, C), (n,) -> (1, n)
            chosen_loss += head.mean_loss(self.model, x[None, rows], targets[None, rows]) * len(rows)
        return loss, chosen_loss


def make_scaler(rt: Runtime) -> torch.amp.GradScaler:
    """The loss scale of float16, at its start; in other precisions it does nothing."""
    return torch.amp.GradScaler(rt.device.type, enabled=rt.dtype == torch.float16)


def make_forward(model: GPT, cfg: TrainConfig, rt: Runtime) -> Forward:
    """The forward pass of training and validation, compiled where that is possible. HellaSwag, sampling and checkpoints
    use the model itself."""
    # Each step allocates the same large tensors again, which on a CPU costs time.
    if rt.device.type == "cpu":
        machine.keep_freed_memory()

    # Without torch.compile: by --no-compile, on MPS, or because a compiler is missing.
    if not cfg.compile or rt.device.type == "mps":
        return Forward(model, compiles=False)
    missing = machine.missing_compiler(rt.device)
    if missing:
        print0(f"no {missing}: training without torch.compile, several times slower")
        return Forward(model, compiles=False)

    # With torch.compile. --micro-batch-size auto compiles for each size that it tries, and validation adds a graph.
    torch._dynamo.config.recompile_limit = 16
    # DDP would split the graphs at its buckets.
    torch._dynamo.config.optimize_ddp = False
    print0("the first step compiles, which takes a while; --no-compile starts at once but then trains slower")
    return Forward(model, compiles=True)


def wrap_in_ddp(forward: nn.Module, rt: Runtime) -> nn.Module:
    """Wrap the forward pass in DDP, which averages the gradients over the ranks. From the first micro-step on, the
    gradients are views into DDP's buckets."""
    if rt.world_size == 1:
        return forward

    # DDP turns existing gradients into views of its buckets. A gradient that is None when a backward pass begins would
    # be a new tensor beside its bucket until the ranks reduce it: 4 bytes more per parameter while micro-batches
    # accumulate. So the gradients exist from here on, and are set to zero after each step. These first zeros take no
    # memory: each is one number, expanded, which DDP copies into the bucket.
    parameters = list(forward.parameters())
    for p in parameters:
        p.grad = p.new_zeros(()).expand_as(p)

    DDP = nn.parallel.DistributedDataParallel
    device_ids = [rt.device.index] if rt.device.type == "cuda" else None

    # The only buffer is RoPE's table, which is the same on all ranks, so DDP need not broadcast it. torch 2.13 renamed
    # the argument that says so.
    is_renamed = "forward_sync_buffers" in signature(DDP).parameters
    no_buffer_sync = {"forward_sync_buffers" if is_renamed else "broadcast_buffers": False}
    ddp = DDP(forward, device_ids=device_ids, gradient_as_bucket_view=True, **no_buffer_sync)

    # After its first backward pass DDP rebuilds its buckets, with the parameters in the order in which their gradients
    # arrived. The place of a gradient in its bucket decides in which order three or more ranks sum it, so the first
    # step after a restart would round differently from the same step of a run that was never stopped. Therefore do one
    # backward pass here, without the network: its gradients are zero and arrive in about the same order as in training.
    # An attribute of the instance hides the method of its class; del uncovers the method again.
    forward.forward = lambda zero: zero * sum(p.float().sum() for p in parameters)
    ddp(torch.zeros((), device=rt.device)).backward()
    del forward.forward
    return ddp
