"""Starting or resuming a run: which checkpoint it continues from, and what may differ from the run that made it.

    saved = find_checkpoint(cfg)                   # the train state that --resume names, or None
    cfg, model = open_network(cfg, saved)          # the network that is really trained, with its first weights
    run = start_or_resume(cfg, rt, data, saved)    # how far the run is; all ranks have found the same

Called by train_gpt2.py before anything is built. A resumed run gives the same bits as a run that was never stopped;
whatever would silently change its result is refused, and so are ranks that would train different runs.
"""

import hashlib
import os
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lifecycle.metrics import RunState, read_metrics
from model import GPT
from system.cli import UserError, print0, require
from system.distributed import Runtime
from tokens.loader import Loader
from training import schedule
from training.config import TrainConfig, config_drift
from training.presets import is_network_from_init
from weights import checkpoint
from weights.open_model import open_model


def find_checkpoint(cfg: TrainConfig) -> dict[str, Any] | None:
    """The train state that --resume names, or None for a new run. Raises UserError if the run folder already holds a
    run that this one would overwrite."""
    run_dir = cfg.run_dir
    newest = checkpoint.latest_step(run_dir)

    # auto: the newest complete checkpoint of the run folder, if there is one. A path: that checkpoint, of any run.
    saved = None
    if cfg.resume == "auto" and newest is not None:
        saved = checkpoint.read_train_state(run_dir)
    elif cfg.resume not in ("none", "auto"):
        saved = checkpoint.read_train_state(cfg.resume)

    # A run is never overwritten: not by a new one, not by one that resumes from an earlier step or from another run.
    is_its_newest = saved is not None and saved["step"] == newest and is_in_folder(saved, run_dir)
    if newest is not None and not is_its_newest:
        how = "auto" if cfg.resume == "none" else shlex.quote(str(checkpoint.model_path(run_dir, newest)))
        fix = f"continue it with --resume {how}, or write to another folder with --out-dir"
        raise UserError(f"{run_dir} already holds a run at step {newest}, which is never overwritten; {fix}")

    # Weights without their optimizer state, pulled from the Hub or left by a damaged disk, are not overwritten either.
    weights_only = checkpoint.complete_steps(run_dir, ["model"]) if newest is None else []
    if weights_only:
        path = checkpoint.model_path(run_dir, weights_only[-1])
        fix = f"to start a new run from them, use --init-from {shlex.quote(str(path))} and another --out-dir"
        raise UserError(f"{path} has no complete optim_*.pt next to it, so the run cannot resume; {fix}")
    return saved


def is_in_folder(saved: dict[str, Any], run_dir: Path) -> bool:
    """Whether a train state is that of a checkpoint in this folder."""
    return saved["model_file"].parent.resolve() == run_dir.resolve()


# ------------------------------------------------------------------------- the network


def open_network(cfg: TrainConfig, saved: dict[str, Any] | None) -> tuple[TrainConfig, GPT]:
    """The config with the network that is really trained, and the network with the weights that this start begins with:
    those of the checkpoint, of --init-from, or random ones from the seed. From here on use `cfg.model`. Raises
    UserError if the weights are of another network than asked for."""
    # A resumed run keeps the network of the weights that it began with.
    if saved:
        old = TrainConfig.from_dict(saved["config"])
        if old.init_from != "scratch":
            cfg = replace(cfg, init_from=old.init_from, model=old.model)
        print0(f"resumed from {saved['model_file']}")
        return cfg, open_model(saved["model_file"])

    # Random weights depend on the seed alone. Nothing draws from torch's global generator afterwards.
    if cfg.init_from == "scratch":
        torch.manual_seed(cfg.seed)
        return cfg, GPT(cfg.model)

    # A new run begins with these weights. The vocabulary may differ: OpenAI's weights have 50,257 tokens, the presets
    # pad them to a round number.
    model = open_model(cfg.init_from)
    print0(f"weights of {cfg.init_from}")
    found, wanted = vars(model.config), vars(cfg.model)
    names = [name for name in found if found[name] != wanted[name] and name != "vocab_size"]
    different = ", ".join(f"{name} is {found[name]}, not {wanted[name]}" for name in names)
    is_free = not different or is_network_from_init(cfg)
    require(is_free, f"in --init-from {cfg.init_from}, {different}; drop the --model flags")
    return replace(cfg, model=model.config), model


# ------------------------------------------------------------------------- where the run starts


def start_or_resume(cfg: TrainConfig, rt: Runtime, data: Loader, saved: dict[str, Any] | None) -> RunState:
    """How far the run is: at its beginning, or at the checkpoint `saved` if that fits this run's config and data.
    Raises UserError if it does not fit, or if the ranks did not find the same. Every rank must call it."""
    run = RunState(cfg.total_steps(data.order.sequences_per_epoch), data.fingerprint())
    check_ranks_agree(cfg, rt, saved, run, data)
    if saved:
        check_drift(cfg, saved, run)
        run = RunState(run.max_steps, run.data_id, saved["step"])

    # A checkpoint is written before its step is evaluated: metrics.jsonl shows whether it has been evaluated since, and
    # the result.
    if saved and is_in_folder(saved, cfg.run_dir):
        run.last_saved_step = run.step
        for row in read_metrics(cfg.run_dir / "metrics.jsonl"):
            if row["step"] == run.step:
                run.evaluated = True
                run.measured |= row

    # A checkpoint of another folder: metrics in this one are another run's.
    elif rt.is_main:
        set_metrics_aside(cfg.run_dir)

    # Rank 0, whose folder it is, decides for all.
    run.evaluated, run.last_saved_step = rt.gather((run.evaluated, run.last_saved_step))[0]
    return run


def set_metrics_aside(run_dir: Path) -> None:
    """Rename the metrics.jsonl of a folder that has no checkpoint, so that the run that starts there does not overwrite
    the curve of a run that was killed before its first save, or whose checkpoints were deleted."""
    path = run_dir / "metrics.jsonl"
    if checkpoint.latest_step(run_dir) is None and read_metrics(path):
        kept = path.with_name(f"metrics_old_{time.strftime('%Y%m%d-%H%M%S')}.jsonl")
        os.rename(path, kept)
        print0(f"{run_dir} has metrics but no checkpoint: the run starts again; the metrics so far are kept as {kept}")


# ------------------------------------------------------------------------- the ranks


def check_ranks_agree(cfg: TrainConfig, rt: Runtime, saved: dict[str, Any] | None, run: RunState, data: Loader) -> None:
    """Raise UserError on every rank unless all found the same checkpoint, length of the run, data and HellaSwag rows.
    Ranks on several machines may differ in these: then DDP would silently train different weights, or the ranks would
    wait for each other in different evaluations. Every rank must call it."""
    facts = {
        "the checkpoint to resume from": f"step {saved['step']}" if saved else "none",
        "the number of steps": str(run.max_steps),
        "the network": str(cfg.model),
        **describe_files(cfg, data),
    }
    rt.check_equal(facts, "give every machine the same files and flags")


def describe_files(cfg: TrainConfig, data: Loader) -> dict[str, str]:
    """The shards and HellaSwag rows that this rank has found, as short texts that differ if the files do."""
    shards = f"{data.fingerprint()} ({len(data.paths)} shards, {sum(data.tokens):,} tokens)"
    rows = "none"
    path = Path(cfg.hellaswag_data)
    if cfg.hellaswag_every and path.is_file():
        rows = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return {"the data": shards, "the HellaSwag file": rows}


# ------------------------------------------------------------------------- what has changed


def check_drift(cfg: TrainConfig, saved: dict[str, Any], run: RunState) -> None:
    """Print what has changed since the checkpoint was made. Raises UserError if that shapes the result, unless
    --allow-drift accepts it; the network cannot change at all."""
    old = TrainConfig.from_dict(saved["config"])
    harmless, refused = config_drift(old, cfg)

    # A flag that was left out would end the run early, at a lower rate from here on.
    if run.max_steps < saved["max_steps"]:
        refused.append(f"max_steps: {saved['max_steps']} -> {run.max_steps}")
    if saved["data"] != run.data_id:
        refused.append(f"data: the shards in {cfg.data_dir} are not those the run was trained on, in their order")

    network = [change for change in refused if change.startswith("model.")]
    problem = f"the checkpoint of step {saved['step']} was made with other settings: {'; '.join(refused)}"
    fix = "its network cannot change" if network else "or continue anyway with --allow-drift"
    require(not refused or (cfg.allow_drift and not network), f"{problem}. Restore them; {fix}")
    for change in harmless + refused:
        if not change.startswith(("resume:", "out_dir:")):
            print0(f"resume: {change}")

    # A cosine over more steps is higher at the same step; a trapezoid that has not begun to decay stays where it is.
    step, old_steps = saved["step"], saved["max_steps"]
    before = schedule.lr_factor(step, old_steps, old) * old.max_lr
    after = schedule.lr_factor(step, run.max_steps, cfg) * cfg.max_lr
    if old_steps != run.max_steps or before != after:
        print0(
            f"resume: {old_steps} steps become {run.max_steps}; the learning rate at step {step} moves from "
            f"{before:.3e} to {after:.3e}"
        )
