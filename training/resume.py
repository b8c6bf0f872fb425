"""Starting or resuming a run: which checkpoint it continues from, and what may differ from the run that made it.

    saved = find_checkpoint(cfg)                   # the train state that --resume names, or None
    cfg, model = resolve_network(cfg, saved)       # the network that is really trained; --init-from may determine it
    run = start_or_resume(cfg, rt, data, saved)    # how far the run is; all ranks have found the same

Called by train_gpt2.py before anything is built. A resumed run gives the same bits as a run that was never stopped;
whatever would silently change its result is refused. Ranks that would train different runs are refused, too:
settings_by_flag has the settings that all ranks must share, and check_ranks_agree compares the files that they found.
"""

from __future__ import annotations

import hashlib
import os
import shlex
from dataclasses import replace
from pathlib import Path
from typing import Any

from model import GPT, GPTConfig
from system.cli import UserError, print0, require
from system.distributed import Runtime
from tokens.loader import Loader
from training import checkpoint, hellaswag_eval, schedule
from training.config import MAY_DIFFER, TrainConfig, config_drift
from training.metrics import read_metrics
from training.open_model import open_model
from training.presets import PRESETS, is_network_from_init
from training.run_state import RunState

EVALUATION_KEYS = ("val_loss", "val_bpb", "hellaswag_acc", "hellaswag_acc_norm")


def find_checkpoint(cfg: TrainConfig) -> dict[str, Any] | None:
    """The train state that --resume names, or None for a new run. Raises UserError if the run folder already holds a
    run that this one would overwrite."""
    run_dir = cfg.run_dir
    newest = checkpoint.latest_step(run_dir)

    # auto: the newest complete checkpoint of the run folder, if there is one. A path: that checkpoint, of any run.
    saved = None
    if cfg.resume == "auto":
        if newest is not None:
            saved = checkpoint.read_train_state(run_dir)
    elif cfg.resume != "none":
        saved = checkpoint.read_train_state(cfg.resume)

    # A run is never overwritten: not by a new one, not by one that resumes from an earlier step.
    if newest is not None and (saved is None or saved["step"] < newest):
        # A command without --resume names its preset, so suggest `--resume auto`. One that resumes from a path may name
        # none: suggest the path of the newest checkpoint.
        how = "auto" if cfg.resume == "none" else shlex.quote(str(checkpoint.model_path(run_dir, newest)))
        fix = f"continue it with --resume {how}, or write to another folder with --out-dir"
        raise UserError(f"{run_dir} already holds a run at step {newest}, which is never overwritten; {fix}")

    # Weights without their optimizer state, pulled from the Hub or left by a damaged disk, are not overwritten either.
    weights_only = checkpoint.complete_steps(run_dir, ["model"]) if newest is None else []
    if weights_only:
        path = checkpoint.model_path(run_dir, weights_only[-1])
        problem = (
            f"{path} has no complete optim_*.pt next to it, so the run cannot resume, and no weights are overwritten"
        )
        fix = f"to start a new run from them, use --init-from {shlex.quote(str(path))} and another --out-dir"
        raise UserError(f"{problem}; {fix}")
    return saved


# ------------------------------------------------------------------------- the network


def resolve_network(cfg: TrainConfig, saved: dict[str, Any] | None) -> tuple[TrainConfig, GPT | None]:
    """The config with the network that is really trained, and the weights of --init-from if the run begins with them.
    From here on use `cfg.model`. Raises UserError if the weights are of another network than asked for."""
    # A resumed run began with what its checkpoint says. A command that resumes it without --init-from must not turn it
    # into a run from scratch, which would be compared with public runs.
    old = TrainConfig.from_dict(saved["config"]) if saved else cfg
    if old.init_from != "scratch":
        cfg = replace(cfg, init_from=old.init_from)
    if cfg.init_from == "scratch":
        return cfg, None

    # A resumed run keeps the network of its checkpoint, which --init-from determined when the run began. If --model
    # flags ask for a network, they are kept, except that the vocabulary comes from the checkpoint; check_drift compares
    # the rest.
    if saved:
        old_network = old.model
        if is_network_from_init(cfg):
            return with_network(cfg, old_network), None
        return with_network(cfg, replace(cfg.model, vocab_size=old_network.vocab_size)), None

    # A new run begins with these weights. The vocabulary may differ: OpenAI's weights have 50,257 tokens, the presets
    # pad them to a round number.
    model = open_model(cfg.init_from)
    print0(f"weights of {cfg.init_from}")
    found, wanted = vars(model.config), vars(cfg.model)
    names = [name for name in found if found[name] != wanted[name] and name != "vocab_size"]
    different = ", ".join(f"{name} is {found[name]}, not {wanted[name]}" for name in names)
    require(
        not different or is_network_from_init(cfg),
        f"in --init-from {cfg.init_from}, {different}; drop the --model flags",
    )
    return with_network(cfg, model.config), model


def with_network(cfg: TrainConfig, network: GPTConfig) -> TrainConfig:
    """The same settings with another network. If its context is shorter than the preset's sequences, they are shortened
    to it. Raises UserError if a --sequence-length of the user's own exceeds it."""
    T, limit = cfg.sequence_length, network.block_size
    preset = PRESETS.get(cfg.preset)
    if T > limit and preset and T == preset.sequence_length:
        print0(f"sequences of {limit} tokens, not {T} as in {cfg.preset}: that is the context of {cfg.init_from}")
        return replace(cfg, model=network, sequence_length=limit)
    require(T <= limit, f"--sequence-length {T} is too long for {cfg.init_from}; use --sequence-length {limit}")
    return replace(cfg, model=network)


# ------------------------------------------------------------------------- the progress


def start_or_resume(cfg: TrainConfig, rt: Runtime, data: Loader, saved: dict[str, Any] | None) -> RunState:
    """How far the run is: at its beginning, or at the checkpoint `saved` if that fits this run's config and data.
    Raises UserError if it does not fit, or if the ranks did not find the same. Every rank must call it."""
    # A new run is at its beginning.
    run = RunState(cfg.total_steps(data.order.sequences_per_epoch), data.fingerprint())
    check_ranks_agree(cfg, rt, saved, run, data)
    if saved is None:
        if rt.is_main:
            set_metrics_aside(cfg.run_dir)
        return run
    check_drift(cfg, saved, run, data)

    # If the best checkpoint is in another run's folder, from which this one starts, this run cannot keep it: forget it.
    step, best = saved["step"], saved["best"]
    if best and not checkpoint.model_path(cfg.run_dir, best["step"]).exists():
        best = None

    # A checkpoint is written before its step is evaluated. metrics.jsonl shows whether it has been evaluated
    # since, and the result.
    evaluated, measured = saved["evaluated"], saved["record"]
    is_in_run_dir = saved["model_file"].parent.resolve() == cfg.run_dir.resolve()
    if is_in_run_dir and not evaluated:
        for row in read_metrics(cfg.run_dir / "metrics.jsonl"):
            if row["step"] == step:
                evaluated = True
                measured = measured | {key: row[key] for key in EVALUATION_KEYS if key in row}

    # If the checkpoint is from another folder, metrics in this one belong to another run.
    if rt.is_main and not is_in_run_dir:
        set_metrics_aside(cfg.run_dir)

    last_saved_step = step if is_in_run_dir else None
    return RunState(run.max_steps, run.data_id, step, measured, evaluated, best, last_saved_step)


def set_metrics_aside(run_dir: Path) -> None:
    """Rename the metrics.jsonl of a folder that has no checkpoint, so that the run that starts there does not overwrite
    the curve of a run that was killed before its first save, or whose checkpoints were deleted."""
    path = run_dir / "metrics.jsonl"
    if checkpoint.latest_step(run_dir) is not None or not read_metrics(path):
        return

    # The first free number: metrics_old_1.jsonl.
    number = 1
    while (run_dir / f"metrics_old_{number}.jsonl").exists():
        number += 1
    kept = run_dir / f"metrics_old_{number}.jsonl"
    os.rename(path, kept)
    print0(f"{run_dir} has metrics but no checkpoint: the run starts again; the metrics so far are kept as {kept.name}")


# ------------------------------------------------------------------------- the ranks


def settings_by_flag(cfg: TrainConfig) -> dict[str, str]:
    """The settings that all ranks must have been started with, by flag: all but those in MAY_DIFFER. Of a path only
    the kind is compared, because ranks with different kinds would wait for each other."""
    # The fields of the network are flags of their own: --model.n-layer.
    settings = cfg.to_dict()
    network = settings.pop("model")
    flags = {name: value for name, value in settings.items() if name not in MAY_DIFFER}
    flags |= {f"model.{name}": value for name, value in network.items()}

    # A rank that downloads its data, or loads weights, waits for the others where a rank that does not would not.
    flags["data_dir"] = cfg.data_dir if cfg.data_dir.startswith("hf://") else "a folder"
    flags["init_from"] = "scratch" if cfg.init_from == "scratch" else "weights"
    return {f"--{name.replace('_', '-')}": str(value) for name, value in flags.items()}


def check_ranks_agree(cfg: TrainConfig, rt: Runtime, saved: dict[str, Any] | None, run: RunState, data: Loader) -> None:
    """Raise UserError on every rank unless all found the same checkpoint, length of the run, data and HellaSwag rows.
    Ranks on several machines may differ in these: then DDP would silently train different weights, or the ranks would
    wait for each other in different evaluations. Every rank must call it."""
    facts = {
        "the checkpoint to resume from": f"step {saved['step']}" if saved else "none",
        "the number of steps": str(run.max_steps),
        "the network": str(cfg.model),
        **describe_files(cfg, data, run.data_id),
    }
    fixes = {
        "": "give every machine the same files, from the same shared folder or a copy, and the same flags",
        "the checkpoint to resume from": "let --out-dir or --resume name the same run on every machine",
    }
    rt.check_equal(facts, fixes)


def describe_files(cfg: TrainConfig, data: Loader, data_id: str) -> dict[str, str]:
    """The shards and HellaSwag rows that this rank has found, as short texts that differ if the files do. data_id: the
    fingerprint of the data's folder."""
    # If there is a manifest, the fingerprint covers the sha256 of each shard.
    manifest = "with" if data.manifest else "without"
    shards = f"{data_id} ({len(data.paths)} shards, {sum(data.tokens):,} tokens, {manifest} a manifest)"

    # A file that is missing or damaged is reported by the evaluator.
    rows = "none"
    path = Path(cfg.hellaswag_data or hellaswag_eval.DEFAULT_PATH)
    if cfg.hellaswag_every and path.is_file():
        content = path.read_bytes()
        count = sum(1 for line in content.splitlines() if line.strip())
        rows = f"{count:,} rows ({hashlib.sha256(content).hexdigest()[:12]})"
    return {"the data": shards, "the HellaSwag file": rows}


# ------------------------------------------------------------------------- what has changed


def check_drift(cfg: TrainConfig, saved: dict[str, Any], run: RunState, data: Loader) -> None:
    """Print what has changed since the checkpoint was made. Raises UserError if that shapes the result, unless
    --allow-drift accepts it; the network cannot change at all."""
    # Print harmless changes, except those of --resume and --out-dir.
    old = TrainConfig.from_dict(saved["config"])
    harmless, refused = config_drift(old, cfg)
    for change in harmless:
        if change.split(":")[0] not in ("resume", "out_dir"):
            print0(f"resume: {change}")

    # The same shards in another order are other data, too: versions up to November 2026 did not shuffle small shards
    # together. The fingerprint is HASH or HASH-SHARDS_PER_GROUP.
    # A manifest may have been made since (fineweb.py --verify); then only names and sizes can be compared.
    if saved["data"] != run.data_id and saved["data"] != data.fingerprint(with_hashes=False):
        same_shards = saved["data"].partition("-")[0] == run.data_id.partition("-")[0]
        change = "would now be shuffled differently" if same_shards else "are not those the run was trained on"
        refused.append(f"data: the shards in {cfg.data_dir} {change}")

    # Refuse, naming every change.
    network = [c for c in refused if c.startswith("model.")]
    problem = f"the checkpoint of step {saved['step']} was made with other settings: {'; '.join(refused)}"
    fix = "its network cannot change" if network else "or continue anyway with --allow-drift"
    require(not refused or (cfg.allow_drift and not network), f"{problem}. Restore them; {fix}")
    for change in refused:
        print0(f"resume, by --allow-drift: {change}")
    print_rate_change(cfg, old, saved, run)


def print_rate_change(cfg: TrainConfig, old: TrainConfig, saved: dict[str, Any], run: RunState) -> None:
    """Print how another number of steps, or another schedule with --allow-drift, changes the learning rate."""
    # A cosine over more steps is higher at the same step; a trapezoid that has not begun to decay stays where it is.
    step, old_steps = saved["step"], saved["max_steps"]
    before = schedule.lr_factor(step, old_steps, old) * old.max_lr
    after = schedule.lr_factor(step, run.max_steps, cfg) * cfg.max_lr
    if old_steps == run.max_steps and before == after:
        return
    steps = f"{old_steps} steps become {run.max_steps}" if old_steps != run.max_steps else f"{run.max_steps} steps"
    change = f"stays {after:.3e}" if before == after else f"moves from {before:.3e} to {after:.3e}"
    print0(
        f"resume: {steps}; the {cfg.schedule} schedule now spans them, and the learning rate at step {step} {change}"
    )
