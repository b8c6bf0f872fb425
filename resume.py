"""Stopping and exact resume: the signals and bad updates that end a run, the state it saves besides its weights, how
that is found again, and what may differ on resume."""

from __future__ import annotations

import ctypes
import math
import os
import shlex
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

import checkpoint
import optim
import runtime
from checkpoint import Writer
from cli import UserError, env_rank, print0
from config import TrainConfig, drift, model_from_init, parse_duration
from loader import Loader
from metrics import duration
from runtime import Runtime

TRAIN_STATE = {  # the entries of a train state that resuming reads
    "step": int, "max_steps": int, "optimizers": list, "rng": list, "scaler": dict, "config": dict, "data": str,
    "record": dict, "best": dict | None, "evaluated": bool,
}  # fmt: skip


def read(path: str | Path) -> dict[str, Any]:
    """checkpoint.read_train_state, with the presence and type of every entry checked. Raises UserError."""
    saved = checkpoint.read_train_state(path)
    odd = [key for key, kind in TRAIN_STATE.items() if key not in saved or not isinstance(saved[key], kind)]
    best = saved.get("best")
    if isinstance(best, dict) and {k: type(v) for k, v in best.items()} != {"step": int, "val_loss": float}:
        odd.append("best")
    if odd or not 0 <= saved["step"] < 2**53:
        mend = "resume from another checkpoint or start a new run from its weights with --init-from"
        raise UserError(f"the train state of {path} has no usable {(odd or ['step'])[0]}; {mend}")
    return saved


class Stopped(Exception):
    """All ranks have agreed to stop."""


class Stopper:
    """Whether and why to stop: a signal (a handler sets stop["signal"]), or --time-limit, counted from here."""

    def __init__(self, stop: dict[str, Any], time_limit: str, rt: Runtime):
        self.stop, self.limit, self.rt, self.began = stop, parse_duration(time_limit), rt, time.monotonic()

    def seconds(self) -> float:
        return time.monotonic() - self.began

    def asked(self) -> bool:
        """Whether this rank was asked to stop."""
        return bool(self.stop["signal"]) or self.seconds() > self.limit

    def check(self, timed: bool) -> None:
        """Raise Stopped on all ranks if any was asked to stop. timed=False ignores --time-limit, as in the first
        evaluation, so at least one step runs."""
        if self.rt.any(self.asked() if timed else self.stop["signal"]):
            raise Stopped

    def why(self) -> str:
        if self.stop["signal"]:
            return f"signal {self.stop['signal']}"
        return "the time limit" if self.seconds() > self.limit else "the time limit or another rank's signal"


@dataclass
class RunState:
    """A run's progress. Checkpoints include it, so a resumed run does nothing twice."""

    step: int = 0
    record: dict[str, Any] = field(default_factory=lambda: {"step": 0})  # what has been measured at this step
    best: dict[str, Any] | None = None  # step and val loss of the best saved step: no other can be kept as the best
    evaluated: bool = False  # whether this step's evaluations are done

    @staticmethod
    def of(saved: dict[str, Any] | None, run_dir: Path) -> RunState:
        """The progress in a train state; its best step counts if it is in this run's folder, too."""
        if saved is None:
            return RunState()
        best = saved["best"]
        if best and not checkpoint.model_path(run_dir, best["step"]).exists():
            best = None
        return RunState(saved["step"], saved["record"], best, saved["evaluated"])


def nothing_left(cfg: TrainConfig, step: int) -> str:
    further = f"--max-steps {2 * step}" if cfg.max_steps else f"--epochs {cfg.epochs + 1}"
    example = f"{command(cfg, step, None if cfg.resume == 'auto' else cfg.resume)} {further}"
    return f"{cfg.run_dir} is complete at step {step}; to train further, for example: {example}"


def done(cfg: TrainConfig, end: RunState, seconds: float) -> str:
    """What a finished run prints."""
    text = f"done: {end.step} steps in {duration(seconds)}; {checkpoint.model_path(cfg.run_dir, end.step)}"
    if end.best and end.best["step"] < end.step:
        text += f"\nbest val loss {end.best['val_loss']:.4f}: {checkpoint.model_path(cfg.run_dir, end.best['step'])}"
    return text


@contextmanager
def signals() -> Iterator[dict[str, Any]]:
    """SIGTERM and SIGINT set stop["signal"], which a collective shares with all ranks; a later signal kills as usual,
    but not at once: torchrun passes on what a terminal or Slurm has sent to its ranks already. A helper thread receives
    the signals while this one blocks them: compilers started here inherit the mask and survive Ctrl-C."""
    stop: dict[str, Any] = {"signal": None}

    def kill_as_usual() -> None:
        for s in before:  # by the C library: Python sets handlers in its main thread only, which may be in a collective
            ctypes.CDLL(None).signal(int(s), None)

    kill_from_now = threading.Timer(2, kill_as_usual)  # seconds
    kill_from_now.daemon = True

    def handler(number: int, frame: Any) -> None:
        if stop["signal"] is None:
            stop["signal"] = signal.Signals(number).name
            kill_from_now.start()
            words = f"{stop['signal']}: saving the run, then stopping; a second signal stops without saving\n"
            if env_rank() == 0:
                with suppress(OSError):  # not print: the signal may have interrupted one, which cannot be reentered
                    os.write(1, words.encode())

    before = {s: signal.signal(s, handler) for s in (signal.SIGTERM, signal.SIGINT)}
    threading.Thread(target=threading.Event().wait, daemon=True).start()
    signal.pthread_sigmask(signal.SIG_BLOCK, before)
    try:
        yield stop
    finally:
        kill_from_now.cancel()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, before)
        for s, h in before.items():
            signal.signal(s, h)


def find(cfg: TrainConfig, data_id: str, max_steps: int) -> dict[str, Any] | None:
    """The train state to resume from, checked against this run's config, data (Loader.fingerprint) and folder; None for
    a new run. Raises UserError rather than overwrite another run or later steps of this one."""
    out, newest = cfg.run_dir, checkpoint.latest_step(cfg.run_dir)
    saved = None
    if cfg.resume == "auto" and newest is not None:
        saved = read(out)
    elif cfg.resume not in ("auto", "none"):
        saved = read(cfg.resume)
    if newest is not None and (saved is None or saved["step"] < newest):
        how = "auto" if cfg.resume == "none" else checkpoint.model_path(out, newest)  # auto needs the preset, too
        mend = f"continue it with --resume {how}, or write to another folder with --out-dir"
        raise UserError(f"{out} already holds a run at step {newest}, which is never overwritten; {mend}")
    if newest is None and (weights := checkpoint.complete_steps(out, ["model"])):  # as pulled without the optimizer
        path = checkpoint.model_path(out, weights[-1])
        why = f"{path} has no whole optim_*.pt next to it, so the run cannot resume, and no weights are overwritten"
        raise UserError(f"{why}; to train on from them, use --init-from {path} and another --out-dir")
    if saved is None:
        return None
    old = TrainConfig.from_dict(saved["config"])
    if cfg.init_from != "scratch":  # which set the network when the run began, or at least the vocabulary
        model = old.model if model_from_init(cfg) else replace(cfg.model, vocab_size=old.model.vocab_size)
        cfg = replace(cfg, model=model)
    harmless, refused = drift(old, cfg)
    for change in harmless:
        if change.split(":")[0] not in ("resume", "out_dir"):
            print0(f"resume: {change}")
    if saved["data"] != data_id:
        same = saved["data"].partition("-")[0] == data_id.partition("-")[0]  # older versions mixed none
        why = "would now be mixed in another way" if same else "are not those the run was trained on"
        refused.append(f"data: the shards in {cfg.data_dir} {why}")
    network = [c for c in refused if c.startswith("model.") and not c.startswith("model.vocab_size")]
    if refused and (network or not cfg.allow_drift):
        why = f"the checkpoint of step {saved['step']} was made with other settings: {'; '.join(refused)}"
        mend = "its network cannot change" if network else "or continue anyway with --allow-drift"
        raise UserError(f"{why}. Restore them; {mend}")
    for change in refused:
        print0(f"resume, by --allow-drift: {change}")
    if saved["max_steps"] != max_steps:
        before = optim.lr_factor(saved["step"], saved["max_steps"], old) * old.max_lr
        after = optim.lr_factor(saved["step"], max_steps, cfg) * cfg.max_lr
        moves = f"stays {after:.3e}" if before == after else f"moves from {before:.3e} to {after:.3e}"
        spans = f"{saved['max_steps']} steps become {max_steps}; the {cfg.schedule} schedule now spans them"
        print0(f"resume: {spans}, and the learning rate at step {saved['step']} {moves}")
    return saved


def check_ranks(rt: Runtime, saved: dict[str, Any] | None, data_id: str, max_steps: int) -> None:
    """Raise UserError unless all ranks found the same checkpoint, data and number of steps. On several machines they
    may not: DDP would train them side by side, from different weights, without a word."""
    found = torch.tensor([saved["step"] if saved else -1, max_steps, int(data_id[:15], 16)], device=rt.device)
    first, *others = torch.stack(rt.gather(found)).tolist()
    names = ("checkpoint (step, -1: none)", "max-steps", "data (hash)")
    for rank, other in enumerate(others, 1):
        for what, theirs, ours in zip(names, other, first, strict=True):
            if theirs != ours:
                mend = "every machine must see the same --out-dir and --data-dir and get the same flags"
                raise UserError(f"rank {rank} and rank 0 differ in {what}: {theirs} and {ours}; {mend}")


def train_state(
    cfg: TrainConfig, rt: Runtime, run: RunState, optimizers: list, scaler: torch.amp.GradScaler, data_id: str,
    max_steps: int,
) -> dict[str, Any]:  # fmt: skip
    """What resuming needs besides the weights. Every rank must call it (ZeRO and random states are gathered)."""
    rng = torch.get_rng_state() if rt.device.type != "cuda" else torch.cuda.get_rng_state(rt.device)
    return {
        **vars(run),
        "max_steps": max_steps,
        "optimizers": optim.full_state(optimizers, rt),
        "rng": rt.gather(rng.to(rt.device)),
        "scaler": scaler.state_dict(),
        "config": cfg.to_dict(),
        "data": data_id,
        "versions": runtime.versions(),
    }


def restore(saved: dict[str, Any], optimizers: list, scaler: torch.amp.GradScaler, rt: Runtime) -> None:
    """Restore optimizers, loss scale and random state; a rank that did not exist when they were saved keeps its fresh
    seed. Raises UserError if the state does not fit."""
    try:
        optim.load_state(optimizers, saved["optimizers"])
        if saved["scaler"]:
            scaler.load_state_dict(saved["scaler"])
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


def command(cfg: TrainConfig, step: int, path: str | Path | None = None) -> str:
    """The command that resumes from `step`: the one typed, with --resume set to the saved checkpoint, or to `path`."""
    launcher = "python"
    if "TORCHELASTIC_RUN_ID" in os.environ:
        local = os.environ["LOCAL_WORLD_SIZE"]
        how = "--standalone" if local == os.environ["WORLD_SIZE"] else "[as on each node]"
        launcher = f"torchrun {how} --nproc_per_node={local}"
    script = sys.argv[0] if sys.argv[0].endswith("train_gpt2.py") else "train_gpt2.py"
    words = sys.argv[1:]
    while "--resume" in words:
        at = words.index("--resume")
        words = words[:at] + words[at + 2 :]
    words = [w for w in words if not w.startswith("--resume=")]
    path = path or checkpoint.model_path(cfg.run_dir, step)
    return f"{launcher} {shlex.join([script, *words, '--resume', str(path)])}"


def refuse(
    cfg: TrainConfig, rt: Runtime, step: int, loss: float, norm: float, skipped: int, data: Loader, B: int,
    save: Callable[[], None], writer: Writer,
) -> None:  # fmt: skip
    """Report the rank, shard and window of a non-finite loss or gradient. Once --skip-bad-steps is used up, save the
    run as it was before this step and raise UserError. Every rank calls this, with its own loss and norm, before any
    update."""
    found = torch.stack(rt.gather(torch.tensor([loss, norm], device=rt.device))).tolist()
    bad_loss = [rank for rank, (x, _) in enumerate(found) if not math.isfinite(x)]
    bad_norm = [rank for rank, (_, x) in enumerate(found) if not math.isfinite(x)]
    rank = [*bad_loss, *bad_norm, 0][0]  # a bad loss first: it makes the norm bad on every rank
    loss, norm = found[rank]
    read = 0 if cfg.overfit_single_batch else step
    shard, window = data.step_windows(read, cfg.sequences_per_step, B, rank, rt.world_size).reshape(-1, 2)[0]
    message = (
        f"step {step}: loss {loss}, gradient norm {norm} on rank {rank}, whose data starts at "
        f"{data.paths[shard].name} window {window}; the update was refused"
    )
    if skipped <= cfg.skip_bad_steps:
        return print0(f"{message} ({skipped} of --skip-bad-steps {cfg.skip_bad_steps})")
    save()
    try:
        writer.wait()
        safe = f"all before it is saved; to go on without it: {command(cfg, step)} --skip-bad-steps 5"
    except UserError as e:
        safe = str(e)
    rt.barrier(hours=2)  # a rank that exits would end the one that is still writing
    raise UserError(f"{message}; {safe}; if it happens again, lower --max-lr with --allow-drift")
