"""Starting or resuming a run: which checkpoint it continues from, with which network and data, and what may differ from
the run that made it.

    run, saved = open_run(cfg, rt)                          # decides all of it, from top to bottom
    load_state(saved, trainer)
    state = train_state(run, step, trainer)                 # what the next resume loads

Called by train_gpt2.py. A resumed run gives the same bits as a run that was never stopped. Settings, data or a network
that would change its result are refused, and so are ranks that would train different runs; another version of torch or
of the code is announced.
"""

import hashlib
import itertools
import os
import shlex
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from lifecycle.metrics import read_config, read_metrics, read_step
from lifecycle.run import Run
from model import GPT
from system import distributed, machine
from system.cli import UserError, explain_errors, print0, require
from system.distributed import Runtime
from tokens.loader import Loader
from tokens.shards import find_shards
from training import optim, schedule
from training.config import TrainConfig, as_flag, changed_settings, flag, has_mark, shapes_result
from training.microbatch import explain_out_of_memory
from training.presets import PRESETS, is_network_from_init
from training.step import Trainer
from weights import checkpoint, convert, names
from weights.open_model import open_model


def open_run(cfg: TrainConfig, rt: Runtime) -> tuple[Run, dict[str, Any] | None]:
    """Everything that a run starts from, and the train state to continue from (load_state), or None for a new run.
    Raises UserError if it cannot start so, or if the ranks did not find the same. Every rank must call it."""
    # The checkpoint, then the data: missing data are reported before any weights are downloaded.
    saved = find_checkpoint(cfg)
    find_shards(cfg.data_dir, "train")

    # The network and its weights. A resumed run keeps those that it has, also if they came from --init-from.
    if saved:
        old = TrainConfig.from_dict(saved["config"])
        if cfg.init_from not in ("scratch", old.init_from):
            print0(f"--init-from {cfg.init_from} is not used: the run continues from its own checkpoint")
        is_from_init = old.init_from != "scratch"
        cfg = replace(cfg, init_from=old.init_from, model=old.model if is_from_init else cfg.model)
        model = open_model(saved["model_file"])
    elif cfg.init_from != "scratch":
        model = open_init_from(cfg)
        cfg = replace(cfg, model=model.config)
    else:
        # Random weights depend on the seed alone. Nothing draws from torch's global generator afterwards.
        torch.manual_seed(cfg.seed)
        model = GPT(cfg.model)

    # Weights are mapped from their file. Copy them, so that deleting the file (--keep) frees its space on the disk.
    for p in model.parameters():
        p.data = p.data.clone()

    # Nothing that would change the result in silence.
    data, val_data = open_data(cfg)
    check_ranks_agree(cfg, rt, saved, data)
    if saved:
        check_drift(cfg, saved, data)
        print0(f"resumed from {saved['model_file']}")
        announce_changes(cfg, saved, data)
        announce_skipped(saved)
    is_own = saved is not None and is_in_folder(saved, cfg.run_dir)
    if rt.is_main and not is_own:
        set_metrics_aside(cfg.run_dir)

    rt = distributed.choose_precision(rt, cfg.dtype, saved.get("dtype") if saved else None)
    max_steps = cfg.total_steps(data.order.sequences_per_epoch)
    start = saved["step"] if saved else 0
    return Run(cfg, rt, model, data, val_data, data.fingerprint(), start, max_steps), saved


def announce_skipped(saved: dict[str, Any]) -> None:
    """Print which newer weights of the folder the run does not continue from, because they lack their optim_*.pt."""
    folder = saved["model_file"].parent
    incomplete = set(names.complete_steps(folder, ["model"])) - set(names.complete_steps(folder))
    skipped = dict.fromkeys(incomplete, "has no complete optim_*.pt beside it")
    skipped |= {names.step_of(path): "is damaged" for path in names.damaged_models(folder)}
    for step, reason in sorted(skipped.items()):
        if step > saved["step"]:
            print0(f"not from {names.model_path(folder, step)}, which {reason}: its steps are trained again")


def find_checkpoint(cfg: TrainConfig) -> dict[str, Any] | None:
    """The train state that --resume names, or None for a new run. Raises UserError if the run folder already holds a
    run that this one would overwrite."""
    run_dir = cfg.run_dir
    newest = names.latest_step(run_dir)

    # auto: the newest complete checkpoint of the run folder, if there is one. A path: that checkpoint, of any run.
    saved = None
    if cfg.resume == "auto" and newest is not None:
        saved = checkpoint.read_train_state(run_dir)
    elif cfg.resume not in ("none", "auto"):
        saved = checkpoint.read_train_state(cfg.resume)

    refuse_to_overwrite(cfg, saved, newest)
    return saved


def refuse_to_overwrite(cfg: TrainConfig, saved: dict[str, Any] | None, newest: int | None) -> None:
    """Raise UserError if the run folder holds what a run that continues from `saved` would overwrite: a new one, or one
    that resumes from an earlier step or from another run. newest: the newest complete step of the folder."""
    run_dir = cfg.run_dir
    is_its_newest = saved is not None and saved["step"] == newest and is_in_folder(saved, run_dir)
    elsewhere = f"--out-dir {shlex.quote(str(free_folder(run_dir)))}"
    if newest is not None and not is_its_newest:
        how = "auto" if cfg.resume == "none" else shlex.quote(str(names.model_path(run_dir, newest)))
        data_dir = read_config(run_dir).get("data_dir")
        what = f"a run on {data_dir}" if data_dir else "a run"
        fix = f"continue it with --resume {how}, or start another run with {elsewhere}"
        if saved and not is_in_folder(saved, run_dir):
            folder = shlex.quote(str(saved["model_file"].parent))
            fix = f"to continue the run in {folder}, add --out-dir {folder}; for a run of its own, {elsewhere}"
        raise UserError(f"{run_dir} already holds {what} at step {newest}, which is never overwritten; {fix}")

    # A damaged file is neither used in silence nor overwritten.
    for path in names.damaged_models(run_dir):
        problem = f"{path} is damaged ({path.stat().st_size:,} bytes)"
        fix = f"move it and its optim_*.pt away to {'start again' if newest is None else f'resume from step {newest}'}"
        raise UserError(f"{problem}; {fix}, or write elsewhere with {elsewhere}")

    # Weights without their optimizer state, pulled from the Hub or left by a damaged disk, are not overwritten either.
    weights_only = names.complete_steps(run_dir, ["model"]) if newest is None else []
    if weights_only:
        path = names.model_path(run_dir, weights_only[-1])
        fix = f"to start a new run from them, use --init-from {shlex.quote(str(path))} {elsewhere}"
        raise UserError(f"{path} has no complete optim_*.pt next to it, so the run cannot resume; {fix}")


def free_folder(run_dir: Path) -> Path:
    """This folder or, if it exists, one beside it that does not: log/quickstart-2."""
    numbered = (run_dir.with_name(f"{run_dir.name}-{number}") for number in itertools.count(2))
    return next(folder for folder in itertools.chain([run_dir], numbered) if not folder.exists())


def is_in_folder(saved: dict[str, Any], run_dir: Path) -> bool:
    """Whether a train state is that of a checkpoint in this folder."""
    return saved["model_file"].parent.resolve() == run_dir.resolve()


def open_init_from(cfg: TrainConfig) -> GPT:
    """The weights that --init-from names. Raises UserError if they are of another network than the flags ask for."""
    try:
        model = open_model(cfg.init_from)
    except UserError as e:
        if cfg.init_from not in convert.OPENAI_NAMES:
            raise
        out_dir = cfg.run_dir.with_name(Path(cfg.data_dir).name)
        folders = f"--data-dir {shlex.quote(cfg.data_dir)} --out-dir {shlex.quote(str(out_dir))}"
        command = f"python train_gpt2.py quickstart {folders} --sample-prompt @val"
        raise UserError(f"{e}; without these weights, from scratch: {command}") from None
    print0(f"weights of {cfg.init_from}")

    # The vocabulary may differ: OpenAI's weights have 50,257 tokens, the presets pad them to a round number.
    actual, wanted = vars(model.config), vars(cfg.model)
    differing = [name for name in actual if actual[name] != wanted[name] and name != "vocab_size"]
    preset = PRESETS.get(cfg.preset, cfg)
    typed = [name for name in differing if wanted[name] != getattr(preset.model, name)]
    different = ", ".join(f"{name} is {actual[name]}, not {wanted[name]}" for name in typed or differing)
    is_free = not differing or is_network_from_init(cfg)
    require(is_free, f"in --init-from {cfg.init_from}, {different}; drop the --model flags")
    return model


def open_data(cfg: TrainConfig) -> tuple[Loader, Loader | None]:
    """The training data and, if the run validates, the validation data. Raises UserError if they are missing or
    damaged."""
    data = Loader(cfg.data_dir, "train", cfg.sequence_length, cfg.model.vocab_size, cfg.seed, cfg.shuffle)
    val_data = Loader(cfg.data_dir, "val", cfg.sequence_length, cfg.model.vocab_size) if cfg.val_every else None
    return data, val_data


def is_complete(run: Run) -> bool:
    """Whether nothing is left to do, as when the command of a finished run is repeated: all steps are done, and the
    last one is evaluated. So is a run that has done more steps than --max-steps asks for. Every rank must call it."""
    is_evaluated = bool(read_step(run.cfg.run_dir, run.start))
    is_evaluated = run.rt.gather(is_evaluated)[0]  # rank 0 writes that file; on another machine there may be none
    return run.start > run.max_steps or (run.start == run.max_steps and is_evaluated)


def set_metrics_aside(run_dir: Path) -> None:
    """Rename the metrics.jsonl of a folder that has no checkpoint, so that the run that starts there does not overwrite
    the curve of a run that was killed before its first save, or whose checkpoints were deleted."""
    path = run_dir / "metrics.jsonl"
    if names.latest_step(run_dir) is None and read_metrics(path):
        kept = path.with_name(f"metrics_old_{time.strftime('%Y%m%d-%H%M%S')}.jsonl")
        os.rename(path, kept)
        print0(f"{run_dir} has metrics but no checkpoint: the run starts again; the metrics so far are kept as {kept}")


# ------------------------------------------------------------------------- the state of a run


def train_state(run: Run, step: int, trainer: Trainer) -> dict[str, Any]:
    """What resuming needs besides the weights, as copies in host memory; the optimizers are rank 0's alone. Every rank
    must call it.

    There are no random states: after the initialization nothing draws from torch's global generators.
    """
    return {
        "step": step,
        "max_steps": run.max_steps,
        "data": run.data_id,
        "optimizers": [optim.copy_state(optimizer, run.rt) for optimizer in trainer.optimizers],
        "scaler": trainer.scaler.state_dict(),
        "dtype": machine.dtype_name(run.rt.dtype),
        "config": run.cfg.to_dict(),
        "versions": machine.versions(),
    }


def load_state(saved: dict[str, Any], trainer: Trainer) -> None:
    """Load what train_state returned. Raises UserError if the state does not fit."""
    problem = f"the train state of step {saved['step']} does not fit this run"
    fix = "start a new run from its weights with --init-from"
    with explain_out_of_memory(trainer.rt), explain_errors(problem, fix):
        optim.load_state(trainer.optimizers, saved["optimizers"])
        if saved["scaler"]:
            trainer.scaler.load_state_dict(saved["scaler"])


# ------------------------------------------------------------------------- the ranks


def check_ranks_agree(cfg: TrainConfig, rt: Runtime, saved: dict[str, Any] | None, data: Loader) -> None:
    """Raise UserError on every rank unless all found the same checkpoint, length of the run, data and HellaSwag rows.
    Ranks on several machines may differ in these: then DDP would silently train different weights, or the ranks would
    wait for each other in different evaluations. Every rank must call it."""
    # Other cards round otherwise. With ZeRO-1 each weight is updated by one rank, which sends it to the others.
    cards = dict.fromkeys(rt.gather(machine.device_name(rt.device)))
    is_safe = len(cards) == 1 or cfg.zero_stage == 1
    require(is_safe, f"on {' and '.join(cards)} the weights of the ranks would drift apart; use --zero-stage 1")

    facts = {
        "the checkpoint to resume from": describe_checkpoint(saved) if saved else "none",
        "the number of steps": str(cfg.total_steps(data.order.sequences_per_epoch)),
        "the network": str(cfg.model),
        **describe_files(cfg, data),
    }
    rt.check_equal(facts, "give every machine the same files and flags")


def describe_checkpoint(saved: dict[str, Any]) -> str:
    """The step, and what identifies its files: two machines may have two runs at the same step."""
    return f"step {saved['step']} ({names.fingerprint(saved['model_file'])})"


def describe_files(cfg: TrainConfig, data: Loader) -> dict[str, str]:
    """The shards and HellaSwag rows that this rank has found, as short texts that differ if the files do."""
    shards = f"{data.fingerprint()} ({len(data.paths)} shards, {sum(data.token_counts):,} tokens)"
    rows = "none"
    path = Path(cfg.hellaswag_data)
    if cfg.hellaswag_every and path.is_file():
        rows = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    return {"the data": shards, "the HellaSwag file": rows}


# ------------------------------------------------------------------------- what has changed


def check_drift(cfg: TrainConfig, saved: dict[str, Any], data: Loader) -> None:
    """Raise UserError if what shapes the result has changed since the checkpoint was made, unless --allow-drift accepts
    it; the network cannot change at all."""
    old = TrainConfig.from_dict(saved["config"])
    max_steps = cfg.total_steps(data.order.sequences_per_epoch)

    # What has changed, and the flag that restores it.
    changed = {}
    for name, (before, after) in changed_settings(old, cfg).items():
        if shapes_result(name):
            changed[f"{name}: {before} -> {after}"] = as_flag(name, before)
    is_unfinished = saved["step"] < saved["max_steps"]
    if is_unfinished and max_steps < saved["max_steps"]:
        # A flag that was left out would end the run early, at a lower rate from here on.
        changed[f"max_steps: {saved['max_steps']} -> {max_steps}"] = f"--max-steps {saved['max_steps']}"
    if saved["data"] != data.fingerprint():
        what = f"data: the shards in {cfg.data_dir} are not those the run was trained on, in their order"
        changed[what] = as_flag("data_dir", old.data_dir)

    is_network = old.model != cfg.model
    if changed and (is_network or not cfg.allow_drift):
        problem = f"the checkpoint of step {saved['step']} was made with other settings"
        go_on = "" if is_network else "to go on with the new ones: --allow-drift; "
        out_dir = shlex.quote(str(free_folder(cfg.run_dir)))
        start = f"to start another run: all its flags, without --resume, with --out-dir {out_dir}"
        restore = f"to restore them: {' '.join(changed.values())}"
        raise UserError(f"{problem}: {'; '.join(changed)}; {go_on}{restore}; {start}")


def announce_changes(cfg: TrainConfig, saved: dict[str, Any], data: Loader) -> None:
    """Print what is different from here on, and was accepted by check_drift."""
    old = TrainConfig.from_dict(saved["config"])
    step, old_steps = saved["step"], saved["max_steps"]
    max_steps = cfg.total_steps(data.order.sequences_per_epoch)

    # The settings, but for those of one start or one rank, which concern no result; and the versions.
    changes = changed_settings(old, cfg)
    for name, (before, after) in changes.items():
        shapes_nothing = has_mark(name, "per_start") or has_mark(name, "per_rank")
        if not shapes_nothing and name not in ("max_steps", "epochs"):
            print0(f"resume: {flag(name)} {before} -> {after}")
    if saved["data"] != data.fingerprint():
        print0(f"resume: the shards in {cfg.data_dir} are not those the run was trained on, in their order")
    for name, now in machine.versions().items():
        before = saved.get("versions", {}).get(name, now)
        if before != now:
            print0(f"resume: {name} {before} -> {now}")

    # The position in the data is the number of steps times their sequences.
    if (old.total_batch_size, old.sequence_length) != (cfg.total_batch_size, cfg.sequence_length):
        was, now = step * old.sequences_per_step, step * cfg.sequences_per_step
        print0(f"resume: the order of the data continues at sequence {now:,}, not at {was:,}: another batch size")

    # A cosine over more steps is higher at the same step; a trapezoid that has not begun to decay stays where it is.
    before = schedule.lr_factor(step, old_steps, old) * old.max_lr
    after = schedule.lr_factor(step, max_steps, cfg) * cfg.max_lr
    if step < max_steps and (old_steps != max_steps or before != after):
        length = f"{old_steps} steps become {max_steps}; " if old_steps != max_steps else ""
        rate = f"stays at {before:.3e}" if before == after else f"moves from {before:.3e} to {after:.3e}"
        print0(f"resume: {length}the learning rate at step {step} {rate}")
