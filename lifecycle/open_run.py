"""Opening a run, new or resumed: which checkpoint it continues from, with which network and data, and what may differ
from the run that wrote the checkpoint.

    run, saved = open_run(cfg, rt)

On a CPU a resumed run ends with the same bits as a run that was never stopped, on GPUs the same up to rounding. Changed
facts that would change the result are refused, and so are ranks that would train different runs. Other changes are
printed.
"""

import os
import shlex
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from checkpoints import checkpoint, run_folder
from checkpoints.open_model import open_model
from evaluation.evaluations import Evaluation, list_facts, open_list
from model import GPT
from system import distributed, machine
from system.cards import MIN_WIDTH
from system.distributed import Runtime, check_ranks
from system.errors import UserError, require
from system.facts import NOTED, RESULT, START, Fact, Facts, compare
from system.printing import print0
from tokens.shards import find_shards
from training.config import TrainConfig, settings_facts
from training.loader import Loader
from training.presets import is_network_from_init
from training.schedule import count_steps, lr_factor


@dataclass(frozen=True)
class Run:
    """What a run starts from, decided once from the flags, the run folder and the data. Nothing in it changes while the
    run trains, except the weights of the model."""

    cfg: TrainConfig  # with the network that is really trained
    rt: Runtime  # with the precision that all ranks use
    model: GPT  # that network with its first weights: random ones, or those of the checkpoint or of --init-from
    data: Loader
    evaluations: list[Evaluation]
    facts: Facts  # what identifies the run, besides its settings; saved in each checkpoint
    first_step: int  # the step that this start begins at: 0, or the checkpoint's
    max_steps: int

    def is_complete(self) -> bool:
        """Whether nothing is left to do, as when the command of a finished run is repeated: all steps are done, and the
        last step is evaluated. A run that has done more steps than --max-steps is complete, too. Every rank must call
        this."""
        # Rank 0 writes metrics.jsonl. Another machine may not have the file.
        is_evaluated = self.rt.gather(bool(run_folder.read_step(self.cfg.run_dir, self.first_step)))[0]
        return self.first_step > self.max_steps or (self.first_step == self.max_steps and is_evaluated)


def open_run(asked: TrainConfig, rt: Runtime) -> tuple[Run, dict[str, Any] | None]:
    """Everything that a run starts from, and the train state to continue from (State.load), or None for a new run.
    asked: the settings of the command line. Raises UserError if the run cannot start like this, or if the ranks have
    different facts. Every rank must call this."""
    # The checkpoint, then the data: missing data are reported before any weights are downloaded.
    saved = find_checkpoint(asked)
    if not saved:
        check_cpu_is_meant(asked, rt)
    find_shards(asked.data_dir, "train")

    # The network and its weights. A run that began with --init-from keeps its network. Otherwise the flags say which
    # network is asked for, and check_changes refuses another one than the checkpoint's.
    if saved:
        print0(f"resumed from {saved['model_file']}")
        model, old = open_model(saved["model_file"]), saved["config"]
        problem = f"{saved['model_file']} and its optim file have different networks"
        require(model.config == old.model, f"{problem}; take both files of a step from one run")
        network = asked.model if old.init_from == "scratch" else old.model
        cfg = replace(asked, init_from=old.init_from, model=network)
    else:
        model = open_first_weights(asked)
        cfg = replace(asked, model=model.config)

    # Weights from a file are mapped from it. Copy them, so that deleting the file (--keep) frees its space on the disk.
    for p in model.parameters():
        p.data = p.data.clone()

    # The data and the evaluations, the precision, and how long the run is.
    data = open_data(cfg)
    evaluations = open_list(cfg)
    max_steps = count_steps(cfg, data.order.sequences_per_epoch)
    old_facts: Facts = {name: Fact(*fact) for name, fact in saved["facts"].items()} if saved else {}
    old_precision = old_facts["the precision"].value if saved else None
    rt = distributed.choose_precision(rt, cfg.dtype, old_precision)

    # Refuse or print every difference that could change the result.
    facts = {
        "the checksum of the training data": Fact(data.fingerprint(), RESULT),
        "the precision": Fact(machine.dtype_name(rt.dtype), NOTED),
        **list_facts(evaluations),
        **machine.version_facts(),
    }
    first_step = saved["step"] if saved else 0
    check_ranks_agree(settings_facts(cfg) | facts, first_step, cfg, rt)
    if saved:
        check_changes(old_facts, facts, saved, cfg, max_steps)

    # The curve of a run that was killed before its first save, or whose checkpoints were deleted, is not overwritten.
    metrics = cfg.run_dir / "metrics.jsonl"
    if rt.is_main and metrics.exists() and run_folder.latest_step(cfg.run_dir) is None:
        kept = metrics.with_name(f"metrics_old_{time.strftime('%Y%m%d-%H%M%S')}.jsonl")
        os.rename(metrics, kept)
        print0(f"{cfg.run_dir} has metrics but no checkpoint: the run starts again; the metrics so far are in {kept}")
    return Run(cfg, rt, model, data, evaluations, facts, first_step, max_steps), saved


# ------------------------------------------------------------------------- what a run starts from


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

    # A new run overwrites no run, and neither does a run that resumes from an earlier step or from another folder.
    if newest is not None:
        is_newest = saved and saved["model_file"].samefile(run_folder.model_path(run_dir, newest))
        require(is_newest, f"{run_dir} holds a run at step {newest}; use --resume auto, or another --out-dir")

    # Weights pulled from the Hub may have no optimizer state, so a run cannot resume from them, and must not overwrite
    # them. If there is an older complete step, the run resumes from that step, and trains these weights again.
    weights = next(run_dir.glob("model_[0-9]*.pt"), None)
    if weights and newest is None:
        problem = f"{weights} ({weights.stat().st_size:,} bytes) is damaged, or has no complete optim_*.pt next to it"
        fix = f"move it away, or start from it: --init-from {shlex.quote(str(weights))} and another --out-dir"
        raise UserError(f"{problem}; {fix}")
    return saved and saved | {"config": TrainConfig.from_dict(saved["config"], saved["defaults"])}


def check_cpu_is_meant(cfg: TrainConfig, rt: Runtime) -> None:
    """Raise UserError for a new run of a large network on a CPU, unless --device or --init-from is given."""
    is_meant = rt.device.type != "cpu" or cfg.device != "auto" or cfg.init_from != "scratch"
    problem = f"there is no GPU here, and on a CPU a network of width {cfg.model.n_embd} trains for months"
    require(is_meant or cfg.model.n_embd < MIN_WIDTH, f"{problem}; use the preset quickstart, or --device cpu")


def open_first_weights(cfg: TrainConfig) -> GPT:
    """The network of a new run, with random weights or those of --init-from. Raises UserError if --init-from names
    another network than the flags ask for."""
    if cfg.init_from == "scratch":
        # The seed and the network determine random weights. Each training step seeds the generator anew.
        torch.manual_seed(cfg.seed)
        return GPT(cfg.model)

    # The vocabulary may differ: OpenAI's weights have 50,257 tokens, the presets pad them to a round number.
    model = open_model(cfg.init_from)
    print0(f"weights of {cfg.init_from}")
    is_same = model.config == replace(cfg.model, vocab_size=model.config.vocab_size)
    problem = f"--init-from {cfg.init_from} is another network than the --model flags ask for: {model.config}"
    require(is_same or is_network_from_init(cfg), f"{problem}; drop these flags")
    return model


def open_data(cfg: TrainConfig) -> Loader:
    """The training data. Raises UserError if they are missing or damaged."""
    return Loader(cfg.data_dir, "train", cfg.sequence_length, cfg.model.vocab_size, cfg.seed, cfg.shuffle)


# ------------------------------------------------------------------------- what must be equal


def check_ranks_agree(facts: Facts, first_step: int, cfg: TrainConfig, rt: Runtime) -> None:
    """Raise UserError on every rank unless all ranks have equal facts and start at the same step. Ranks on several
    machines may find different files: then DDP would train different weights in silence, or the ranks would wait for
    each other in different evaluations. Every rank must call this."""
    facts = facts | {"the step to start from": Fact(str(first_step), START)}
    # Different models of GPUs round differently. With ZeRO-1 that does no harm: one rank updates each weight, and sends
    # the weight to the other ranks.
    if cfg.zero_stage != 1:
        facts["the card"] = Fact(machine.device_name(rt.device), START)
    check_ranks(rt, facts, "give every machine the same files and flags, and --zero-stage 1 if the cards are not alike")


def check_changes(old_facts: Facts, facts: Facts, saved: dict[str, Any], cfg: TrainConfig, max_steps: int) -> None:
    """Raise UserError if what shapes the result has changed since the checkpoint, unless --allow-drift accepts the
    change. The network and the optimizer cannot change at all. Print what else has changed."""
    old, step = saved["config"], saved["step"]
    before, after = settings_facts(old) | old_facts, settings_facts(cfg) | facts
    refused = []
    for name, (old_value, new_value) in compare(before, after).items():
        scope = (before | after)[name].scope
        if scope == RESULT:
            refused.append(f"{name}: {old_value} -> {new_value}")
        elif scope == NOTED:
            print0(f"resume: {name}: {old_value} -> {new_value}")

    # A longer run has a longer schedule, in which the rate of this step may be higher.
    old_lr = old.max_lr * lr_factor(step, saved["max_steps"], old)
    lr = cfg.max_lr * lr_factor(step, max_steps, cfg)
    if lr != old_lr:
        print0(f"resume: the learning rate of step {step}: {old_lr:.3g} -> {lr:.3g}")

    # If somebody forgets --max-steps, the preset's smaller value would end the run early.
    if step < saved["max_steps"] and max_steps < saved["max_steps"]:
        refused.append(f"--max-steps: {saved['max_steps']} -> {max_steps}")
    if not refused:
        return

    problem = f"the checkpoint of step {step} was made with other settings or data: {'; '.join(refused)}"
    # The checkpoint has no state for another network or optimizer.
    can_go_on = old.model == cfg.model and old.optimizer == cfg.optimizer
    path = shlex.quote(str(saved["model_file"]))
    fix = f"to keep the old ones: python train_gpt2.py --resume {path}, without a preset and without these flags"
    fix += "; to go on with the new ones: --allow-drift" if can_go_on else ""
    require(cfg.allow_drift and can_go_on, f"{problem}; {fix}")
    print0(f"resume: {problem}")
