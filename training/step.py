"""One optimizer step: forward and backward passes, clipping, update, and what to do if a number is not finite.

    train_step = TrainStep(cfg, rt, model)
    result = train_step.compute_gradients(batch)            # all micro-batches, reduced over the ranks, clipped
    lr = set_learning_rates(train_step.optimizers, step, max_steps, cfg)     # training/schedule.py
    if result.is_finite:
        train_step.update()
    else:
        train_step.refuse_update(step, result)

Called by train_gpt2.py for training, by lifecycle/plan.py to measure a step, and by the benches. The order of a step:

    for each micro-batch (B, T + 1)     forward with autocast; loss / micro_steps; backward adds to the gradients
    the last backward                   DDP averages the gradients over the ranks
    once, on the sums                   undo the loss scale (float16), copy to the master weights (bfloat16), clip
    one all_reduce                      the mean loss, whether a rank was asked to stop, whether a norm is not finite
    update                              AdamW and Muon; copy the master weights to the model (bfloat16)
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from model import GPT
from system import machine
from system.cli import explain_errors, print0
from system.distributed import Runtime
from tokens.loader import to_device
from training import head, optim
from training.config import TrainConfig
from training.microbatch import choose_micro_batch_size, explain_out_of_memory


class UpdateRefused(Exception):
    """A loss or gradient that is not finite, and no --skip-bad-steps left. Nothing was updated."""


class StepResult(NamedTuple):
    """What the forward and backward passes of a step gave; all but the norm is the same on all ranks."""

    loss: float  # mean over all sequences of the step, in nats per token
    norm: float  # L2 norm of the gradients of all parameters, before clipping
    is_finite: bool  # whether loss and norm are finite on every rank; if not, the update is refused
    stop_requested: bool  # whether any rank was asked to stop


class TrainStep:
    """The model with everything that trains it: compiled forward pass, DDP, master weights, optimizers, loss scale."""

    def __init__(self, cfg: TrainConfig, rt: Runtime, model: GPT, saved: dict[str, Any] | None = None):
        """saved: a train state to continue from, as resume.find_checkpoint returns it; `model` has its weights. Every
        rank must make one. Raises UserError if the network or not even one sequence fits in memory, if the batch does
        not divide evenly over the ranks, or if `saved` does not fit."""
        self.cfg, self.rt, self.model = cfg, rt, model
        self.refused_steps = 0
        with explain_out_of_memory(rt):
            # All ranks begin with rank 0's weights: random ones may differ by rounding between processors.
            model.recompute = cfg.recompute
            model.to(rt.device).train()
            for p in model.parameters():
                rt.broadcast(p.detach(), source=0)

            # A GPU without bfloat16 trains float32 weights in float16, with a loss scale.
            is_float16 = rt.dtype == torch.float16
            self.scaler = torch.amp.GradScaler(rt.device.type, enabled=is_float16)
            self.weights = optim.MasterWeights(model, keep_float32_copy=cfg.weights == "bfloat16" and not is_float16)
            if is_float16 and cfg.weights == "bfloat16":
                print0("--weights bfloat16 needs a GPU with bfloat16: here weights stay in float32, with a loss scale")
            self.optimizers = optim.build_optimizers(self.weights.named, cfg, rt)

            # Validation calls `forward`; training calls it through DDP. The micro-batch is chosen in between: a rank
            # that runs out of memory inside DDP would leave the others waiting in a collective.
            self.forward = make_forward(model, cfg, rt)
            parts = rt.world_size if cfg.zero_stage == 1 else 1
            state_bytes = optim.state_bytes(self.weights.named, cfg) // parts
            self.micro_batch_size = choose_micro_batch_size(cfg, rt, state_bytes, self._run_passes)
            self.ddp_forward = wrap_in_ddp(self.forward, rt)
            if saved:
                self._load(saved)

    def compute_gradients(self, batch: Tensor, stop_requested: bool = False) -> StepResult:
        """Forward and backward over the micro-batches of a step, then clip the global norm to --grad-clip.

        batch: (micro_steps, B, T + 1) uint16, this rank's tokens. stop_requested: whether this rank was asked to stop.
        The gradients are those of the mean loss over all ranks. Every rank must call it.
        """
        local_loss = torch.zeros((), device=self.rt.device)
        for i, tokens in enumerate(batch):
            # Inputs and targets: (B, T + 1) -> 2 x (B, T)
            x, y = to_device(tokens, self.rt.device)

            # DDP averages the gradients in the last backward pass. Without DDP the attribute has no effect.
            self.ddp_forward.require_backward_grad_sync = i == len(batch) - 1
            with self.rt.autocast():
                loss = self.ddp_forward(x, y)

            # The micro-batches are of equal size, so the mean of their means is the mean over the step.
            self.scaler.scale(loss / len(batch)).backward()
            local_loss += loss.detach() / len(batch)
        norm = self._clip_gradients()

        # One collective, and one wait for the device, sums three numbers over the ranks: their shares of the mean loss,
        # how many were asked to stop, and how many have a norm that is not finite.
        mean_share = local_loss / self.rt.world_size
        stop_flag = norm.new_full((), float(stop_requested))
        bad_norm_flag = (~norm.isfinite()).float()
        loss, stops, bad_norms = self.rt.all_reduce(torch.stack([mean_share, stop_flag, bad_norm_flag])).tolist()
        is_finite = math.isfinite(loss) and bad_norms == 0
        return StepResult(loss, norm.item(), is_finite, stops > 0)

    def _clip_gradients(self) -> Tensor:
        """Undo the loss scale of float16, move the gradients to the master weights, clip. Returns the norm before
        clipping, over all parameters together."""
        # Without float16 the scaler does nothing. Gradients in DDP's buckets stay there.
        for optimizer in self.optimizers:
            self.scaler.unscale_(optimizer)
        weights = self.weights.take_gradients(keep=self.rt.world_size > 1)
        norm = nn.utils.get_total_norm([p.grad for p in weights if p.grad is not None])
        if self.cfg.grad_clip:
            nn.utils.clip_grads_with_norm_(weights, self.cfg.grad_clip, norm)
        return norm

    def update(self) -> None:
        """Apply the gradients. On a GPU the work is still running when this returns."""
        for optimizer in self.optimizers:
            self.scaler.step(optimizer)
        self.weights.copy_to_model()
        self._finish_step()

    def refuse_update(self, step: int, result: StepResult) -> None:
        """Drop gradients that are not finite. A float16 overflow halves the loss scale. Anything else is counted, and
        UpdateRefused is raised once --skip-bad-steps is used up. Every rank must call it."""
        # With float16 a finite loss with infinite gradients is expected now and then: the loss scale was too high. Once
        # halving has brought it down to 1, the scale is not to blame. In other precisions it is always 1.
        scale = self.scaler.get_scale()
        if math.isfinite(result.loss) and scale > 1:
            print0(f"step {step}: float16 overflow at loss scale {scale:g}; step skipped")
        else:
            self.refused_steps += 1
            problem = f"step {step}: loss {result.loss}, gradient norm {result.norm}; the update was refused"
            print0(f"{problem} (number {self.refused_steps} of --skip-bad-steps {self.cfg.skip_bad_steps})")
            if self.refused_steps > self.cfg.skip_bad_steps:
                raise UpdateRefused(problem)
        self._finish_step()

    def _finish_step(self) -> None:
        """Adjust the loss scale and clear the gradients, after an update or a refusal."""
        # After an overflow GradScaler.update halves the loss scale; otherwise it doubles the scale now and then.
        self.scaler.update()

        # With several ranks the gradients live in DDP's buckets and are set to zero there. One rank frees their memory.
        if self.rt.world_size > 1:
            torch._foreach_zero_([p.grad for p in self.model.parameters()])
        else:
            self.model.zero_grad(set_to_none=True)
        self.weights.drop_gradients()

    def _run_passes(self, B: int) -> None:
        """Forward and backward with micro-batches of B sequences of zeros, to see whether they fit in memory: two of
        them, because the second runs beside the gradients of the first, or beside DDP's buckets."""
        try:
            for tokens in torch.zeros(2, B, self.cfg.sequence_length + 1, dtype=torch.uint16):
                x, y = to_device(tokens, self.rt.device)  # (B, T) each
                with self.rt.autocast():
                    loss = self.forward(x, y)
                self.scaler.scale(loss).backward()
        finally:
            self.model.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """What resuming needs besides the weights and the run's progress, as copies in host memory; the optimizers are
        rank 0's alone. Every rank must call it. There are no random states: after the initialization nothing draws from
        torch's global generators."""
        return {
            "optimizers": [optim.copy_state(optimizer, self.rt) for optimizer in self.optimizers],
            "scaler": self.scaler.state_dict(),
            "dtype": machine.dtype_name(self.rt.dtype),
        }

    def _load(self, saved: dict[str, Any]) -> None:
        """Load what state_dict returned. Raises UserError if it does not fit."""
        problem = f"the train state of step {saved['step']} does not fit this run"
        with explain_errors(problem, "start a new run from its weights with --init-from"):
            optim.load_state(self.optimizers, saved["optimizers"])
            if saved["scaler"]:
                self.scaler.load_state_dict(saved["scaler"])


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

    def forward(self, idx: Tensor, targets: Tensor) -> Tensor:
        """idx, targets (B, T) int64 -> the mean cross-entropy in nats per token."""
        x = self.model.hidden(idx, blocks=self.blocks)  # (B, T, C)
        return head.mean_loss(self.model, x, targets, self.chunk_loss)


def make_forward(model: GPT, cfg: TrainConfig, rt: Runtime) -> Forward:
    """The forward pass of training and validation, compiled where that is possible. HellaSwag, sampling and checkpoints
    use the model itself."""
    # Each step allocates the same large tensors again, which on a CPU costs time.
    if rt.device.type == "cpu":
        machine.keep_freed_memory()

    if not cfg.compile or rt.device.type == "mps":
        return Forward(model, compiles=False)
    missing = machine.missing_compiler(rt.device)
    if missing:
        print0(f"no {missing}: training without torch.compile, several times slower")
        return Forward(model, compiles=False)

    # --micro-batch-size auto compiles for each size that it tries, and validation adds a graph. DDP would split the
    # graphs at its buckets.
    torch._dynamo.config.recompile_limit = 16
    torch._dynamo.config.optimize_ddp = False
    print0("the first step compiles, which takes a while; --no-compile starts at once but then trains slower")
    return Forward(model, compiles=True)


def wrap_in_ddp(forward: Forward, rt: Runtime) -> nn.Module:
    """Wrap the forward pass in DDP, which averages the gradients over the ranks. From here on, the gradients are views
    into DDP's buckets."""
    if rt.world_size == 1:
        return forward
    DDP = nn.parallel.DistributedDataParallel

    # A gradient that is None when a backward pass begins would be a new tensor beside its bucket until the ranks reduce
    # it: 4 bytes more per parameter while micro-batches accumulate. These zeros take no memory: each is one number,
    # expanded, which DDP copies into the bucket.
    for p in forward.parameters():
        p.grad = p.new_zeros(()).expand_as(p)

    # The only buffer is RoPE's table, which is the same on all ranks; the weights are, too.
    DDP._set_params_and_buffers_to_ignore_for_model(forward, [name for name, _ in forward.named_buffers()])
    device_ids = [rt.device.index] if rt.device.type == "cuda" else None
    return DDP(forward, device_ids=device_ids, gradient_as_bucket_view=True, init_sync=False)
