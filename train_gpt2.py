"""Train a GPT, on one CPU or many GPUs.

python train_gpt2.py quickstart                                            # minutes on a laptop
torchrun --standalone --nproc_per_node=8 train_gpt2.py gpt2-124m           # GPT-2 124M on 8 GPUs
python train_gpt2.py --resume log/gpt2-124m/model_19073.pt --epochs 2      # resume from a checkpoint
"""

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from system import cli

cli.set_omp_wait_policy()  # before torch is imported
import torch

import hellaswag
from model import GPT
from system import distributed, machine
from system.cli import UserError, print0, require
from system.distributed import Runtime
from system.files import lock_folder
from system.units import format_duration
from tokens.hub_data import pull_data
from tokens.loader import Loader
from training import checkpoint, plan, precision, predict, resume
from training.config import TrainConfig
from training.evaluator import Evals, EvaluationFailed, val_windows, validate
from training.metrics import Record
from training.open_model import open_model
from training.presets import model_from_init, parse
from training.resume import Run
from training.step import Forward, Refused, Step
from training.stop import FailedElsewhere, Stop, Stopped


def train(cfg: TrainConfig, rt: Runtime, stop: Stop) -> None:
    """One run, from its first or resumed step to its last, or until `stop` is asked for."""
    data, val_data = open_data(cfg, rt)
    run = resume.find(cfg, rt, data)
    if run.complete:
        mend = "to train further: the same command with --resume auto and a larger --max-steps or --epochs"
        return print0(f"{cfg.run_dir} is complete at step {run.step}; {mend}")
    step = open_step(cfg, rt, run.saved)
    plan.describe(step, data, run)
    plan.check_disk(step, run)
    plan.write_config(step, run)
    evals, record = Evals(step, data, val_data), Record(step, run)
    batches = data.batches(run.step, cfg.sequences_per_step, step.B, rt, fixed=cfg.overfit_single_batch)
    with checkpoint.CheckpointWriter(cfg.run_dir, cfg.keep) as writer:
        save = partial(save_run, step, run, record, writer)
        try:
            halt = rt.any_rank(stop.signal)
            while True:
                if halt:
                    raise Stopped
                # save, evaluate, sample; a resumed run skips what is done
                if run.save_due(cfg.save_every):
                    save()  # first, because an evaluation may fail
                if not run.evaluated:
                    run.measured |= evals.measure(run, partial(stop.check, rt, timed=run.step > run.start))
                    run.evaluated = True
                    run.note_best()
                    if rt.is_main and run.step and run.due(evals.sample_every):
                        record.text(run.step, evals.samples(stop.asked))
                if run.last:
                    break
                # accumulate, clip; set the rates; step
                batch = next(batches)
                began = time.perf_counter()
                result = step.gradients(batch, stop.asked())
                lr = step.set_rates(run.step, run.max_steps)
                if result.finite:
                    step.update()
                else:
                    step.refuse(run.step, result, data)
                # on a GPU the update is still running, and its time counts toward the next step
                record.step(run, result, lr, time.perf_counter() - began)
                halt = result.halt
                run.advance()
            record.write(run.measured)
            ending = done(cfg, run, stop)
        except Stopped:
            save()
            ending = f"stopped by {stop.why()} at step {run.step}, all saved; go on: the same command and --resume auto"
        except EvaluationFailed as failed:
            saved = save_before_an_error(save, writer, rt)
            if isinstance(failed.__cause__, FailedElsewhere):
                raise SystemExit(f"rank {rt.rank}: an evaluation failed on another rank; {saved}") from None
            raise failed.__cause__ from None
        except Refused as refused:
            saved = save_before_an_error(save, writer, rt)
            mend = "to go on without it: the same command, --resume auto and --skip-bad-steps 5"
            raise UserError(
                f"{refused}; {saved}; {mend}; if it happens again, lower --max-lr with --allow-drift"
            ) from None
        record.close()
        writer.wait(run.best_step)
        rt.barrier(hours=2)  # a rank that exits, or times out here, would end the one that is still writing
    print0(ending)


def open_step(cfg: TrainConfig, rt: Runtime, saved: dict[str, Any] | None) -> Step:
    """The model and all that trains it: as `saved`, or new from the seed."""
    rt = precision.agree_on_dtype(cfg, rt, saved)
    torch.manual_seed(cfg.seed)
    step = Step(cfg, rt, make_model(cfg, rt, saved))
    if saved:
        step.restore(saved)
    return step


def save_run(step: Step, run: Run, record: Record, writer: checkpoint.CheckpointWriter) -> None:
    """Save the run as it is, unless it was. Every rank must call it: parts of the state are gathered."""
    if run.stored == run.step:
        return
    cfg = step.cfg
    state = {**run.state(), **step.state(), "config": cfg.to_dict(), "versions": machine.versions()}
    if step.rt.is_main:
        weights = step.weights.state_dict()
        facts = {"val_loss": run.measured.get("val_loss"), "preset": cfg.preset}
        file = checkpoint.model_file(step.model, run.step, **facts) | {"model": weights}
        record.flush()
        writer.save(run.step, file, state, run.best_step)
    run.stored = run.step
    run.note_best()


def save_before_an_error(save: Callable[[], None], writer: checkpoint.CheckpointWriter, rt: Runtime) -> str:
    """Save the run as it is and wait for it on every rank: one that exits would end the one that is still writing.
    Returns what became of it; every rank must call it."""
    save()
    try:
        writer.wait()
        told = "all before it is saved"
    except UserError as e:
        told = str(e)
    rt.barrier(hours=2)
    return told


def done(cfg: TrainConfig, run: Run, stop: Stop) -> str:
    """What a finished run prints."""
    text = (
        f"done: {run.step} steps in {format_duration(stop.seconds())}; {checkpoint.model_path(cfg.run_dir, run.step)}"
    )
    if run.best and run.best_step < run.step:
        text += f"\nbest val loss {run.best['val_loss']:.4f}: {checkpoint.model_path(cfg.run_dir, run.best_step)}"
    return text


def dry_run(cfg: TrainConfig, rt: Runtime) -> None:
    """--dry-run: the plan and its cost; needs no data if the preset fixes the number of steps. With --card it is
    predicted, for 1,000 steps if only the data would tell how many."""
    data, fixed = None, cfg.max_steps or cfg.steps_per_epoch
    if cfg.card:
        max_steps = cfg.horizon(0) if fixed else 1000
        return print0(predict.report(cfg, predict.predict(cfg, cfg.card), max_steps))
    if Path(cfg.data_dir).is_dir() or not fixed:
        data = train_loader(cfg, cfg.data_dir)
    run = Run(cfg.horizon(data.order.per_epoch if data else 0), data_id="")
    rt = precision.agree_on_dtype(cfg, rt)
    step = Step(cfg, rt, make_model(cfg, rt))
    plan.describe(step, data, run)
    plan.estimate(step, run.max_steps)


def evaluate(cfg: TrainConfig, rt: Runtime) -> None:
    """--eval-only: val loss and HellaSwag of the weights named by --init-from, as a run reports them."""
    mend = "add --init-from gpt2, a run folder or a model_*.pt"
    require(cfg.init_from != "scratch", f"--eval-only needs trained weights: {mend}")
    model = open_model(cfg.init_from).to(rt.device)
    data = Loader(
        local_data(cfg, rt), "val", min(cfg.sequence_length, model.config.block_size), model.config.vocab_size
    )
    B = 4 if cfg.micro_batch_size == "auto" else cfg.micro_batch_size  # not compiled: compiling would cost more time
    loss = validate(Forward(model, compiles=False), data, cfg, rt, B)
    tokens = val_windows(data, cfg) * data.T
    print0(f"{cfg.init_from} on {tokens:,} tokens of {data.paths[0]} | val loss: {loss:.4f}")
    if cfg.hellaswag_every or cfg.hellaswag_data:
        examples = hellaswag.examples_at_hand(cfg.hellaswag_data, model.config)
        if examples:
            print0(hellaswag.summary_line(hellaswag.evaluate(model, examples, rt.device, rt)))


def open_data(cfg: TrainConfig, rt: Runtime) -> tuple[Loader, Loader | None]:
    """The windows to train on, and those to validate on if the run does."""
    folder = local_data(cfg, rt)
    val_data = Loader(folder, "val", cfg.sequence_length, cfg.model.vocab_size) if cfg.val_every else None
    return train_loader(cfg, folder), val_data


def train_loader(cfg: TrainConfig, folder: str | Path) -> Loader:
    return Loader(folder, "train", cfg.sequence_length, cfg.model.vocab_size, cfg.seed, cfg.shuffle)


def local_data(cfg: TrainConfig, rt: Runtime) -> Path:
    """The shard folder; hf://OWNER/NAME is pulled and verified first (by one rank per machine)."""
    if not cfg.data_dir.startswith("hf://"):
        return Path(cfg.data_dir)
    repo = cfg.data_dir.removeprefix("hf://")
    folder = Path("data") / repo.replace("/", "--")
    if rt.local_rank == 0:
        pull_data(repo, folder)
    rt.barrier(hours=24)
    return folder


def make_model(cfg: TrainConfig, rt: Runtime, saved: dict[str, Any] | None = None) -> GPT:
    """The model on its device: from the checkpoint, from --init-from, or random from the seed."""
    if saved:
        model = open_model(saved["model_file"])
        print0(f"resumed from {saved['model_file']}")
    elif cfg.init_from == "scratch":
        model = GPT(cfg.model)
    else:
        model = open_model(cfg.init_from)
        print0(f"weights of {cfg.init_from}")
    found, asked = vars(model.config), vars(cfg.model)
    other = [f"{k} is {found[k]}, not {asked[k]}" for k in found if found[k] != asked[k] and k != "vocab_size"]
    mend = "drop the --model flags"
    require(not other or model_from_init(cfg), f"in --init-from {cfg.init_from}, {', '.join(other)}; {mend}")
    T, limit = cfg.sequence_length, model.config.block_size
    require(T <= limit, f"--sequence-length {T} is too long for {cfg.init_from}; use --sequence-length {limit}")
    model.recompute = cfg.recompute
    return model.to(rt.device).train()


def main() -> None:
    cfg = parse(sys.argv[1:], lambda path: checkpoint.read_train_state(path)["config"])
    dtype = cfg.dtype if cfg.eval_only else "float32"  # a run's is settled once its ranks are here: training/precision
    session = distributed.session(cfg.device, dtype, cfg.deterministic)
    if cfg.dry_run or cfg.eval_only:  # nothing to save: Ctrl-C just ends it
        with session as rt:
            return dry_run(cfg, rt) if cfg.dry_run else evaluate(cfg, rt)
    stop = Stop(cfg.time_limit)
    with stop.signals(), session as rt:
        with lock_folder(cfg.run_dir) if rt.is_main else nullcontext():
            train(cfg, rt, stop)


if __name__ == "__main__":
    cli.run_cli(main)
