"""Starting or resuming a run: which checkpoint it continues from, with which network and data, and what may differ from
the run that made it. What stands around the loop is made from the Run:

    run, saved = open_run(cfg, rt)              # decides all of it, from top to bottom
    metrics = MetricsLogger(run)
    evaluator = Evaluator(run, trainer)
    saver = Saver(run, trainer, metrics)

On a CPU a resumed run gives the bits of a run that was never stopped, on GPUs the same to rounding. Settings, data or a
network that would change its result are refused, and so are ranks that would train different runs; another version of
torch or of the code is announced.
"""

import os
import shlex
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from evaluation import multiple_choice
from lifecycle.metrics import read_step
from model import GPT
from system import distributed, machine
from system.cards import MIN_WIDTH
from system.distributed import Runtime
from system.errors import UserError, require
from system.printing import print0
from tokens.shards import find_shards
from training.config import TrainConfig, changed_settings, flag, has_mark, shapes_result
from training.loader import Loader
from training.presets import is_network_from_init
from training.schedule import count_steps, sequences_before
from weights import checkpoint, run_folder
from weights.open_model import open_model


@dataclass(frozen=True)
class Run:
    """What a run starts from, decided once from the flags, the run folder and the data. Nothing in it changes while the
    run trains, but for the weights of the model."""

    cfg: TrainConfig  # with the network that is really trained
    rt: Runtime  # with the precision that all ranks use
    model: GPT  # that network, with its first weights: those of the checkpoint or of --init-from, or random ones
    data: Loader
    val_data: Loader | None  # None if the run does not validate
    start: int  # the step that it starts or resumes at
    sequences: int  # that have been read by then
    max_steps: int

    def sequences_before(self, step: int) -> int:
        """How many sequences of the data come before a step, from `start` on: after those that have been read, whatever
        batch they were read in."""
        return self.sequences + sequences_before(step, self.cfg) - sequences_before(self.start, self.cfg)


def open_run(cfg: TrainConfig, rt: Runtime) -> tuple[Run, dict[str, Any] | None]:
    """Everything that a run starts from, and the train state to continue from (State.load), or None for a new run.
    Raises UserError if it cannot start so, or if the ranks did not find the same. Every rank must call it."""
    # The checkpoint, then the data: missing data are reported before any weights are downloaded.
    saved = find_checkpoint(cfg)
    is_meant = saved or rt.device.type != "cpu" or cfg.device != "auto" or cfg.init_from != "scratch"
    problem = f"there is no GPU here, and on a CPU a network of width {cfg.model.n_embd} trains for months"
    fix = "use the preset quickstart, or --device cpu to do it all the same"
    require(is_meant or cfg.model.n_embd < MIN_WIDTH, f"{problem}; {fix}")
    find_shards(cfg.data_dir, "train")

    # The network and its weights. A resumed run keeps those that it has, also if they came from --init-from.
    if saved:
        old = saved["config"]
        network = cfg.model if old.init_from == "scratch" else old.model
        cfg = replace(cfg, init_from=old.init_from, model=network)
        print0(f"resumed from {saved['model_file']}")
        model = open_model(saved["model_file"])
        fix = "take both files of a step from one run"
        require(model.config == old.model, f"{saved['model_file']} and its optim file are of different networks; {fix}")
    else:
        model = open_first_weights(cfg)
        cfg = replace(cfg, model=model.config)

    # Weights are mapped from their file. Copy them, so that deleting the file (--keep) frees its space on the disk.
    for p in model.parameters():
        p.data = p.data.clone()

    # Nothing that would change the result in silence.
    data, val_data = open_data(cfg)
    max_steps = count_steps(cfg, data.order.sequences_per_epoch)
    check_ranks_agree(cfg, rt, saved, data)
    if saved:
        check_changes(cfg, saved, data, max_steps)

    # The curve of a run that was killed before its first save, or whose checkpoints were deleted, is not overwritten.
    metrics = cfg.run_dir / "metrics.jsonl"
    if rt.is_main and metrics.exists() and run_folder.latest_step(cfg.run_dir) is None:
        kept = metrics.with_name(f"metrics_old_{time.strftime('%Y%m%d-%H%M%S')}.jsonl")
        os.rename(metrics, kept)
        print0(f"{cfg.run_dir} has metrics but no checkpoint: the run starts again; the metrics so far are in {kept}")

    rt = distributed.choose_precision(rt, cfg.dtype, saved.get("dtype") if saved else None)
    start, sequences = (saved["step"], saved["sequences"]) if saved else (0, 0)
    return Run(cfg, rt, model, data, val_data, start, sequences, max_steps), saved


def find_checkpoint(cfg: TrainConfig) -> dict[str, Any] | None:
    """The train state that --resume names, with its "config" as a TrainConfig, or None for a new run. Raises UserError
    if the run folder already holds what this run would overwrite."""
    run_dir = cfg.run_dir
    newest = run_folder.latest_step(run_dir)

    # auto: the newest complete checkpoint of the run folder, if there is one. A path: that checkpoint, of any run.
    saved = None
    if cfg.resume == "auto" and newest is not None:
        saved = checkpoint.read_train_state(run_dir)
    elif cfg.resume not in ("none", "auto"):
        saved = checkpoint.read_train_state(cfg.resume)

    # A run is overwritten neither by a new one, nor by one that resumes from an earlier step or from another run.
    if newest is not None:
        is_newest = saved and saved["model_file"].samefile(run_folder.model_path(run_dir, newest))
        problem = f"{run_dir} already holds a run at step {newest}, which is never overwritten"
        fix = "continue it with --resume auto, or start another run with another --out-dir"
        require(is_newest, f"{problem}; {fix}")

    # Nor are weights without their optimizer state, as they are pulled from the Hub. Beside an older complete step they
    # are trained again.
    weights = next(run_dir.glob("model_[0-9]*.pt"), None)
    if weights and newest is None:
        problem = f"{weights} ({weights.stat().st_size:,} bytes) is damaged, or has no complete optim_*.pt next to it"
        fix = "move it away, then --resume auto; or start from these weights with"
        raise UserError(f"{problem}; {fix} --init-from {shlex.quote(str(weights))} and another --out-dir")
    return saved and saved | {"config": TrainConfig.from_dict(saved["config"])}


def open_first_weights(cfg: TrainConfig) -> GPT:
    """The network of a new run: of random weights, or the one that --init-from names. Raises UserError if that is
    another network than the flags ask for."""
    if cfg.init_from == "scratch":
        # Random weights depend on the seed alone. Nothing draws from torch's global generator afterwards.
        torch.manual_seed(cfg.seed)
        return GPT(cfg.model)

    # The vocabulary may differ: OpenAI's weights have 50,257 tokens, the presets pad them to a round number.
    model = open_model(cfg.init_from)
    print0(f"weights of {cfg.init_from}")
    is_same = model.config == replace(cfg.model, vocab_size=model.config.vocab_size)
    problem = f"--init-from {cfg.init_from} is another network than the --model flags ask for: {model.config}"
    require(is_same or is_network_from_init(cfg), f"{problem}; drop these flags")
    return model


def open_data(cfg: TrainConfig) -> tuple[Loader, Loader | None]:
    """The training data and, if the run validates, the validation data. Raises UserError if they are missing or
    damaged."""
    data = Loader(cfg.data_dir, "train", cfg.sequence_length, cfg.model.vocab_size, cfg.seed, cfg.shuffle)
    val_data = Loader(cfg.data_dir, "val", cfg.sequence_length, cfg.model.vocab_size) if cfg.val_every else None
    return data, val_data


def check_changes(cfg: TrainConfig, saved: dict[str, Any], data: Loader, max_steps: int) -> None:
    """Raise UserError if what shapes the result has changed since the checkpoint was made, unless --allow-drift accepts
    it; the network cannot change at all. Print what else is different from here on."""
    old, step, old_steps = saved["config"], saved["step"], saved["max_steps"]

    # What has changed. A --max-steps that was left out would end the run early.
    refused = []
    for name, (before, after) in changed_settings(old, cfg).items():
        if shapes_result(name):
            refused.append(f"{name}: {before} -> {after}")
        elif not has_mark(name, "per_start") and not has_mark(name, "per_rank"):
            print0(f"resume: {flag(name)} {before} -> {after}")
    if step < old_steps and max_steps < old_steps:
        refused.append(f"max_steps: {old_steps} -> {max_steps}")
    if saved["data"] != data.fingerprint():
        refused.append(f"data: the shards in {cfg.data_dir} are not those the run was trained on, in their order")
    if refused:
        problem = f"the checkpoint of step {step} was made with other settings: {'; '.join(refused)}"
        # Of another network or optimizer the checkpoint has no state.
        can_go_on = old.model == cfg.model and old.optimizer == cfg.optimizer
        path = shlex.quote(str(saved["model_file"]))
        fix = f"to keep the old ones: python train_gpt2.py --resume {path}, without a preset and without these flags"
        fix += "; to go on with the new ones: --allow-drift" if can_go_on else ""
        require(cfg.allow_drift and can_go_on, f"{problem}; {fix}")
        print0(f"resume: {problem}")

    # Other software rounds otherwise.
    for name, after in machine.versions().items():
        before = saved.get("versions", {}).get(name, after)
        if before != after:
            print0(f"resume: {name} {before} -> {after}")


def is_complete(run: Run) -> bool:
    """Whether nothing is left to do, as when the command of a finished run is repeated: all steps are done, and the
    last one is evaluated. So is a run that has done more steps than --max-steps asks for. Every rank must call it."""
    # Rank 0 writes that file; on another machine there may be none.
    is_evaluated = run.rt.gather(bool(read_step(run.cfg.run_dir, run.start)))[0]
    return run.start > run.max_steps or (run.start == run.max_steps and is_evaluated)


# ------------------------------------------------------------------------- the ranks


def check_ranks_agree(cfg: TrainConfig, rt: Runtime, saved: dict[str, Any] | None, data: Loader) -> None:
    """Raise UserError on every rank unless all found the same checkpoint, network, data and HellaSwag rows. Ranks on
    several machines may differ in these: then DDP would silently train different weights, or the ranks would wait for
    each other in different evaluations. Every rank must call it."""
    facts = {
        "the step to resume from": str(saved["step"]) if saved else "none",
        "the network": str(cfg.model),
        "the data": data.fingerprint(),
        "the HellaSwag file": multiple_choice.checksum(cfg),
    }
    # Other cards round otherwise. With ZeRO-1 each weight is updated by one rank, which sends it to the others.
    if cfg.zero_stage != 1:
        facts["the card"] = machine.device_name(rt.device)
    rt.check_equal(facts, "give every machine the same files and flags, and --zero-stage 1 if the cards are not alike")
