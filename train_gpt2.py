"""Train a GPT, on one CPU or many GPUs.

python train_gpt2.py quickstart                                            # minutes on a laptop
torchrun --standalone --nproc_per_node=8 train_gpt2.py gpt2-124m           # GPT-2 124M on 8 GPUs
python train_gpt2.py --resume log/gpt2-124m/model_19073.pt --epochs 2      # resume from a checkpoint

Begin with `train`: it is the whole run, and the functions below it are its parts. `main`, at the end, chooses between
training and the modes that do not train. Under torchrun, every rank (process) executes this file, on its own share of
each batch. Four objects are passed around:

cfg         every setting: the preset, changed by the flags (training/config.py)
rt          this rank: its number, device and precision, and the collectives (system/distributed.py)
run         the progress: the step, what was measured there (lifecycle/metrics.py)
train_step  the model and everything that updates it (training/step.py)
"""

import shlex
import sys
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import NamedTuple

from system import cli

cli.set_omp_wait_policy()  # before torch is imported
import torch

import hellaswag
from lifecycle import plan, resume
from lifecycle.evaluator import Evaluator, num_val_sequences, validate
from lifecycle.metrics import MetricsLogger, RunState, best_step
from lifecycle.stop import Stopped, StopRequest
from system import distributed, machine
from system.cli import UserError, format_duration, print0, require
from system.distributed import Runtime
from system.files import lock_folder
from tokens.loader import Loader
from tokens.shards import find_shards
from training.config import TrainConfig, settings_by_flag
from training.presets import parse
from training.schedule import set_learning_rates
from training.step import Forward, TrainStep, UpdateRefused
from weights import checkpoint
from weights.open_model import open_model


class Ending(NamedTuple):
    """How a run ended: "finished", "stopped" (by `reason`; saved, to be resumed) or "refused" (an update; saved)."""

    status: str
    message: str
    reason: str = ""


def train(cfg: TrainConfig, rt: Runtime, stop: StopRequest) -> Ending:
    """One run, from its first or resumed step to its last, or until `stop` is requested. Raises UserError if the run
    cannot start or resume as asked, or if the last checkpoint cannot be written. Every rank must call it."""
    # What the run continues from, its network and its data. A run that exists is never overwritten, and missing data
    # are reported before any weights are downloaded.
    saved = resume.find_checkpoint(cfg)
    find_shards(cfg.data_dir, "train")
    cfg, model = resume.open_network(cfg, saved)
    data, val_data = open_data(cfg)
    run = resume.start_or_resume(cfg, rt, data, saved)
    if run.is_complete:
        return Ending("finished", f"the run is complete at step {run.step}; to train on, raise --max-steps")

    # The model with all that updates it, the evaluations, the log, and this rank's batches: (micro_steps, B, T + 1)
    # tokens for each step from here on.
    rt = machine.choose_precision(rt, cfg.dtype, saved and saved.get("dtype"))
    train_step = TrainStep(cfg, rt, model, saved)
    plan.print_plan(train_step, data, run)
    if rt.is_main:
        plan.check_disk(train_step, run)
        plan.write_config(train_step, run)
    score_hellaswag = hellaswag.make_scorer(cfg.hellaswag_data, cfg.model) if cfg.hellaswag_every else None
    evaluator = Evaluator(train_step, data, val_data, score_hellaswag, run.max_steps)
    metrics = MetricsLogger(train_step, run)
    batches = data.batches(
        run.step, cfg.sequences_per_step, train_step.micro_batch_size, rt, fixed=cfg.overfit_single_batch
    )

    # A thread writes checkpoints while training continues. Leaving this block, also by an exception, waits for it.
    with checkpoint.CheckpointWriter(cfg.run_dir, cfg.keep, best=partial(best_step, cfg.run_dir)) as writer:
        save = partial(save_checkpoint, train_step, run, metrics, writer)
        stop_requested = rt.any_rank(stop.signal)  # during start-up, and perhaps to one rank alone
        ending = None
        try:
            # Save and evaluate if that is due at run.step, then train one step. So step 0 evaluates the untrained
            # network, and the last iteration ends before it trains.
            while True:
                # All ranks leave at the same step: they learned of the request in the last step's collective.
                if stop_requested:
                    raise Stopped

                # Save before the evaluations: these take long, and a run killed meanwhile resumes from here.
                if run.is_save_due(cfg.save_every):
                    save()
                if not run.evaluated:
                    # The first evaluation ignores the time limit, so that every start does at least one step.
                    check_stop = partial(stop.check, rt, timed=run.step > run.start_step)
                    run.measured |= evaluator.evaluate(run, check_stop)
                    run.evaluated = True
                    metrics.log_text(run.step, evaluator.sample_text(run, stop.is_requested))
                if run.is_at_end:
                    break

                # Gradients that are not finite are dropped. Only this is timed, without the wait for the batch. On a
                # GPU the update is still running at the end; its time counts toward the next step.
                batch = next(batches)
                start_time = time.perf_counter()
                result = train_step.compute_gradients(batch, stop.is_requested())
                lr = set_learning_rates(train_step.optimizers, run.step, run.max_steps, cfg)
                if result.is_finite:
                    train_step.update()
                else:
                    train_step.refuse_update(run.step, result)
                metrics.log_step(run, result, lr, time.perf_counter() - start_time)
                stop_requested = result.stop_requested
                run.advance()
            metrics.write(run.measured)
        except Stopped:
            save()
            fix = f"to resume: the same command with --resume {shlex.quote(str(cfg.run_dir))}"
            ending = Ending("stopped", f"stopped by {stop.reason()} at step {run.step}, saved; {fix}", stop.reason())
        except UpdateRefused as refused:
            save()
            ending = Ending("refused", str(refused))

        # All ranks wait until the last checkpoint is on the disk: torchrun ends every rank when one exits early.
        metrics.close()
        writer.finish()
        rt.barrier()
    return ending or Ending("finished", describe_result(cfg, run, stop))


def open_data(cfg: TrainConfig) -> tuple[Loader, Loader | None]:
    """The training data and, if the run validates, the validation data. Raises UserError if they are missing or
    damaged."""
    data = Loader(cfg.data_dir, "train", cfg.sequence_length, cfg.model.vocab_size, cfg.seed, cfg.shuffle)
    val_data = Loader(cfg.data_dir, "val", cfg.sequence_length, cfg.model.vocab_size) if cfg.val_every else None
    return data, val_data


def save_checkpoint(
    train_step: TrainStep, run: RunState, metrics: MetricsLogger, writer: checkpoint.CheckpointWriter
) -> None:
    """Save the current step, unless that has been done. Raises UserError if the ranks' weights differ. Every rank
    must call it: parts of the state are gathered."""
    # The loop may have saved this step before a stop or an error asks for it again.
    if run.last_saved_step == run.step:
        return
    rt = train_step.rt

    # At most one snapshot is in host memory: wait until the one before is written. The other ranks wait for it below,
    # in a collective that is patient; the others give up after ten minutes.
    writer.join()

    # If the weights differ, the ranks train different models from here on, of which only rank 0's would be saved: DDP
    # averages gradients, but never compares the weights. A single rank has nothing to compare with.
    if rt.world_size > 1:
        checksum = distributed.weight_checksum(list(train_step.weights.named.values()))
        fix = f"step {run.step} is not saved. Unlike cards need --zero-stage 1; one that differs again is defective"
        rt.check_equal({"the checksum of the weights": checksum}, fix)

    # model_*.pt: the weights in float32, even if the model's own are bfloat16, and a few facts about them.
    # optim_*.pt: what else resuming needs, which is the progress, the optimizer state, config and versions.
    train_step_state = train_step.state_dict()
    if rt.is_main:
        model_content = checkpoint.model_file(train_step.model, run.step, preset=train_step.cfg.preset)
        model_content["model"] = train_step.weights.state_dict()
        versions = {"config": train_step.cfg.to_dict(), "versions": machine.versions()}
        train_content = run.state_dict() | train_step_state | versions

        # metrics.jsonl goes to the disk first: a resumed run needs every line before the checkpoint's step.
        metrics.flush()
        writer.save(run.step, model_content, train_content)
    run.last_saved_step = run.step


def describe_result(cfg: TrainConfig, run: RunState, stop: StopRequest) -> str:
    """What a finished run prints: where its best weights are, by val loss, and the commands to look at them."""
    best = best_step(cfg.run_dir, checkpoint.complete_steps(cfg.run_dir))
    path = shlex.quote(str(checkpoint.model_path(cfg.run_dir, run.step if best is None else best)))
    what = "weights" if best is None else "of the saved weights, the lowest val loss"
    text = f"done: {run.step} steps in {format_duration(stop.elapsed_s())}; {what}: {path}"
    return f'{text}\nnext: python plots.py {shlex.quote(str(cfg.run_dir))}; python infer.py {path} "Once upon a time"'


# ------------------------------------------------------------------------- without training


def check(cfg: TrainConfig) -> None:
    """--check, which train.sh adds: print the run folder and the number of ranks for this machine, a line each. Raises
    UserError if the data are missing, the run folder has another run, or the GPU cannot be used."""
    is_training = not (cfg.card or cfg.dry_run or cfg.eval_only)
    require(is_training, "train.sh only trains: for --card, --dry-run and --eval-only use python train_gpt2.py")
    resume.find_checkpoint(cfg)
    open_data(cfg)
    device = machine.choose_device(cfg.device)
    ranks = torch.cuda.device_count() if device.type == "cuda" and ":" not in cfg.device else 1
    print(cfg.run_dir.resolve(), ranks, sep="\n")


def dry_run(cfg: TrainConfig, rt: Runtime) -> None:
    """--dry-run: print the plan, then measure a step on this machine and print what the run costs. Needs no data if the
    preset fixes the number of steps. Nothing is saved. Every rank must call it."""
    cfg, model = resume.open_network(cfg, saved=None)
    data = None
    if Path(cfg.data_dir).is_dir() or not (cfg.max_steps or cfg.steps_per_epoch):
        data, _ = open_data(cfg)
    run = RunState(cfg.total_steps(data.order.sequences_per_epoch if data else 0), data_id="")
    train_step = TrainStep(cfg, machine.choose_precision(rt, cfg.dtype), model)
    plan.print_plan(train_step, data, run)
    plan.dry_run(train_step, run)


def evaluate(cfg: TrainConfig, rt: Runtime) -> None:
    """--eval-only: print val loss and HellaSwag of the weights named by --init-from, as a run reports them. Every rank
    must call it.

    For OpenAI's 124M (--init-from gpt2) expect a val loss of about 3.29 on FineWeb-Edu, and 0.2955 in HellaSwag
    (acc_norm). Raises UserError without weights or data."""
    fix = "add --init-from gpt2, a run folder or a model_*.pt"
    require(cfg.init_from != "scratch", f"--eval-only needs trained weights: {fix}")
    model = open_model(cfg.init_from).to(rt.device)
    rt = machine.choose_precision(rt, cfg.dtype)

    # The val split, in sequences no longer than the model's context. All ranks must have found the same files.
    T = min(cfg.sequence_length, model.config.block_size)
    val_data = Loader(cfg.data_dir, "val", T, model.config.vocab_size)
    rt.check_equal(resume.describe_files(cfg, val_data), "give every machine the same files")

    # Validation loss. Not compiled: compiling would take longer than it saves.
    B = 4 if cfg.micro_batch_size == "auto" else cfg.micro_batch_size
    loss = validate(Forward(model, compiles=False), val_data, cfg, rt, B)
    tokens = num_val_sequences(val_data, cfg) * T
    print0(f"{cfg.init_from} on {tokens:,} tokens of {val_data.paths[0]} | val loss: {loss:.4f}")
    score = hellaswag.make_scorer(cfg.hellaswag_data, model.config) if cfg.hellaswag_every else None
    if score:
        print0(hellaswag.summary_line(score(model, rt, lambda: None)))


def main() -> None:
    """Read the command line, then predict, measure, evaluate or train."""
    # The preset and the flags. With --resume PATH the settings of that checkpoint are the defaults.
    words = [word for word in sys.argv[1:] if word != "--check"]
    cfg = parse(words, lambda path: checkpoint.read_train_state(path)["config"])
    if "--check" in sys.argv:
        return check(cfg)
    if cfg.card:
        return print0(plan.predict(cfg))

    # Signals are handled from the start, so that one during start-up is not lost. Entering the session joins the other
    # ranks, if there are any, and refuses different settings.
    stop = StopRequest(cfg.time_limit)
    session = distributed.session(cfg.device, cfg.deterministic, settings_by_flag(cfg))
    if cfg.dry_run or cfg.eval_only:
        with session as rt:
            return dry_run(cfg, rt) if cfg.dry_run else evaluate(cfg, rt)

    # One process at a time may write to the run folder: rank 0 holds its lock.
    with stop.handle_signals(), session as rt, lock_folder(cfg.run_dir) if rt.is_main else nullcontext():
        ending = train(cfg, rt, stop)
        print0(ending.message)
        if ending.status == "refused":
            fix = "to skip such steps: --resume auto --skip-bad-steps 5; if it comes again, lower --max-lr"
            raise UserError(f"{ending.message}; everything before it is saved in {cfg.run_dir}; {fix}")
        if rt.is_main:
            cli.write_status(ending.status, ending.reason)


if __name__ == "__main__":
    cli.run_cli(main)
