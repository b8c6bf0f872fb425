"""Train a GPT, on one CPU or many GPUs.

python train_gpt2.py quickstart                                            # minutes on a laptop
torchrun --standalone --nproc_per_node=8 train_gpt2.py gpt2-124m           # GPT-2 124M on 8 GPUs
python train_gpt2.py --resume log/gpt2-124m/model_19073.pt --epochs 2      # resume from a checkpoint

Begin with `train`: it is the whole run, and the functions below it are its parts. `main`, at the end, chooses between
training and the modes that do not train. Under torchrun, every rank (process) executes this file, on its own share of
each batch. Four objects are passed around:

cfg         every setting: the preset, changed by the flags (training/config.py)
rt          this rank: its number, device and precision, and the collectives (system/distributed.py)
run         the progress: the step, what was measured there, the best step so far (training/run_state.py)
train_step  the model and everything that updates it (training/step.py)
"""

import shlex
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from system import cli

cli.set_omp_wait_policy()  # before torch is imported
import torch

from model import GPT, VOCAB_SIZE, GPTConfig
from system import distributed, machine
from system.cli import UserError, format_duration, print0, require
from system.distributed import Runtime
from system.files import lock_folder
from tokens.hub_data import pull_for_training
from tokens.loader import Loader
from tokens.shards import find_shards
from training import checkpoint, hellaswag_eval, plan, replicas, resume
from training.config import TrainConfig
from training.evaluator import Evaluator, num_val_sequences, validate
from training.metrics import MetricsLogger
from training.open_model import open_model
from training.presets import parse
from training.run_state import RunState
from training.step import Forward, TrainStep, UpdateRefused
from training.stop import Stopped, StopRequest


def train(cfg: TrainConfig, rt: Runtime, stop: StopRequest) -> None:
    """One run, from its first or resumed step to its last, or until `stop` is requested. Raises UserError if the run
    cannot start or resume as asked, if a loss is not finite, or if the last checkpoint cannot be written. Every rank
    must call it."""
    # The checkpoint to resume from, or None. A run that exists is never overwritten.
    saved = resume.find_checkpoint(cfg)

    # The network, which --init-from may determine, and the data. Missing data are reported before any weights are
    # downloaded.
    if not cfg.data_dir.startswith("hf://"):
        find_shards(cfg.data_dir, "train")
    cfg, initial_model = resume.resolve_network(cfg, saved)
    data, val_data = open_data(cfg, rt)

    # Where the run starts: at step 0, or at the checkpoint's step. A run is never resumed with other settings or data.
    run = resume.start_or_resume(cfg, rt, data, saved)

    # The same command starts and resumes a run, so the run may already be complete.
    if run.is_complete:
        fix = "run the same command with --resume auto and a larger --max-steps or --epochs"
        print0(f"{cfg.run_dir} is complete at step {run.step}; to train further, {fix}")
        return finish("finished", rt)

    # Build the model, its optimizers and the compiled forward pass.
    train_step = build_train_step(cfg, rt, saved, initial_model)

    # Print what the run will do, and refuse it if its checkpoints do not fit on the disk, before anybody pays for hours
    # of training.
    plan.print_plan(train_step, data, run)
    if rt.is_main:
        plan.check_disk(train_step, run)
    plan.write_config(train_step, run)

    # Set up the evaluations and the log.
    evaluator = Evaluator(train_step, data, val_data)
    metrics = MetricsLogger(train_step, run)

    # This rank's batch for each step from here on, (micro_steps, B, T + 1) tokens. A background thread prefetches them.
    batches = data.batches(
        run.step, cfg.sequences_per_step, train_step.micro_batch_size, rt, fixed=cfg.overfit_single_batch
    )

    # Everything above may fail on one rank alone, for example if its disk is full or the tracker is missing. At this
    # barrier the other ranks receive the error of such a rank; in a collective they would wait for it in vain.
    rt.barrier(hours=1)

    # A thread writes checkpoints while training continues. Leaving this block, also by an exception, waits for it.
    # check_save_time warns if torchrun would not wait for a save that takes so long.
    with checkpoint.CheckpointWriter(cfg.run_dir, cfg.keep, stop.check_save_time) as writer:
        save = partial(save_checkpoint, train_step, run, metrics, writer)
        try:
            # A signal may have come during start-up, and to one rank alone.
            stop_requested = rt.any_rank(stop.signal)

            # Each iteration saves and evaluates if that is due at run.step, then trains one step. So step 0 evaluates
            # the untrained network, and the last iteration ends before it trains.
            while True:
                # All ranks leave at the same step: they learned of the request in the last step's collective.
                if stop_requested:
                    raise Stopped

                # Save before the evaluations: these take long, and a run killed meanwhile resumes from here.
                if run.is_save_due(cfg.save_every):
                    save()

                # Evaluate and sample, unless this step was evaluated before the run was interrupted.
                if not run.evaluated:
                    # Check for a stop between batches. The first evaluation ignores the time limit, so that every start
                    # does at least one step.
                    check_stop = partial(stop.check, rt, timed=run.step > run.start_step)
                    run.measured |= evaluator.evaluate(run, check_stop)
                    run.evaluated = True
                    run.update_best()
                    if rt.is_main and run.step > 0 and run.is_due(evaluator.sample_every):
                        metrics.log_text(run.step, evaluator.sample_text(stop.is_requested))

                # All steps are done, saved and evaluated.
                if run.is_at_end:
                    break

                # One optimizer step: accumulate and clip the gradients, set the learning rates, update. Gradients that
                # are not finite are dropped instead. Only this is timed, without the wait for the batch.
                batch = next(batches)
                start_time = time.perf_counter()
                result = train_step.compute_gradients(batch, stop.is_requested())
                lr = train_step.set_learning_rates(run.step, run.max_steps)
                if result.is_finite:
                    train_step.update()
                else:
                    train_step.refuse_update(run.step, result, data)

                # On a GPU the update is still running here; its time counts toward the next step.
                metrics.log_step(run, result, lr, time.perf_counter() - start_time)
                stop_requested = result.stop_requested
                run.advance()

            # No training step follows the last evaluations, so their results get a line of their own in metrics.jsonl.
            metrics.write(run.measured)
            status, reason = "finished", ""
            message = describe_result(cfg, run, stop, evaluator.val_prompt)
        # Asked to stop, by a signal or the time limit: save, and exit with code 0.
        except Stopped:
            save()
            status, reason = "stopped", stop.reason()
            outcome = f"stopped by {stop.reason()} at step {run.step}; checkpoint saved"
            message = f"{outcome}. To resume, run the same command with --resume auto"
        # A loss or gradient was not finite. The weights are still good: save them, then report it as an error.
        except UpdateRefused as refused:
            outcome = save_before_error(save, writer, rt)
            fix = "to skip such steps, run the same command with --resume auto --skip-bad-steps 5"
            hint = "if it happens again, lower --max-lr with --allow-drift"
            raise UserError(f"{refused}; {outcome}; {fix}; {hint}") from None
        metrics.close()

        # Finished or stopped: wait until the last checkpoint is on disk. All ranks do, because torchrun ends every rank
        # when one exits early.
        writer.wait(run.best_step)
        rt.barrier(hours=2)
    print0(message)
    finish(status, rt, reason)


def finish(status: str, rt: Runtime, reason: str = "") -> None:
    """Tell the program that started this run, such as train.sh, how it ended. status: finished or stopped."""
    if rt.is_main:
        cli.write_status(status, reason)


def build_train_step(
    cfg: TrainConfig, rt: Runtime, saved: dict[str, Any] | None = None, initial_model: GPT | None = None
) -> TrainStep:
    """Build the model, its optimizers and its forward pass. The weights are those of `saved` (a train state, as
    resume.find_checkpoint returns it), or of `initial_model`, or random ones from the seed. Raises UserError if the
    ranks cannot train together. Every rank must call it."""
    # Refuse cards that would round the updates differently, and choose a precision that all ranks have.
    replicas.check_cards(cfg, rt)
    rt = choose_dtype(cfg, rt, cfg.model, saved)

    # The weights. Random ones depend on the seed alone. Nothing draws from torch's global generator afterwards.
    torch.manual_seed(cfg.seed)
    if saved:
        model = open_model(saved["model_file"])
        print0(f"resumed from {saved['model_file']}")
    else:
        model = initial_model or GPT(cfg.model)

    # To the device, in training mode.
    model.recompute = cfg.recompute
    model = model.to(rt.device).train()

    # Every rank must begin with the same weights: --init-from or --resume may name different files on two machines.
    # Random weights may differ by rounding between processors; in that case rank 0 broadcasts its own.
    difference = replicas.find_difference(rt, dict(model.named_parameters()))
    if difference:
        fix = "give every machine the same checkpoint to start from"
        require(not saved and not initial_model, f"{difference} before training: {fix}")
        for p in model.parameters():
            rt.broadcast(p.detach(), source=0)

    # The optimizers and the compiled forward pass; a resumed run gets its optimizer state back.
    train_step = TrainStep(cfg, rt, model)
    if saved:
        train_step.load_state_dict(saved)
    return train_step


def choose_dtype(cfg: TrainConfig, rt: Runtime, network: GPTConfig, saved: dict[str, Any] | None = None) -> Runtime:
    """The Runtime with the precision that all ranks use. Prints which and why. Every rank must call it."""
    product = machine.Product(rows=1024, width=network.n_embd, columns=min(network.vocab_size, 4096))
    began_in = saved.get("dtype") if saved else None
    dtype, reason = machine.choose_dtype(rt, cfg.dtype, product, began_in)
    print0(f"precision: {machine.dtype_name(dtype)}, {reason}")
    if dtype == torch.float16 and cfg.weights == "bfloat16":
        print0("--weights bfloat16 needs a GPU with bfloat16: here weights stay in float32, with a float16 loss scale")
    return replace(rt, dtype=dtype)


def save_checkpoint(
    train_step: TrainStep, run: RunState, metrics: MetricsLogger, writer: checkpoint.CheckpointWriter
) -> None:
    """Save the current step, unless that has been done. Raises an error, after saving elsewhere, if the ranks' weights
    differ. Every rank must call it: parts of the state are gathered."""
    # The loop may have saved this step before a stop or an error asks for it again.
    if run.last_saved_step == run.step:
        return
    cfg, rt = train_step.cfg, train_step.rt

    # If the ranks' weights differ, the ranks train different models, and only rank 0's can be saved. It must not become
    # the newest checkpoint: save it in a folder that --resume auto does not read, and end the run.
    difference = replicas.find_difference(rt, train_step.weights.named)
    if difference:
        writer = checkpoint.CheckpointWriter(cfg.run_dir / replicas.FOLDER, keep=1)
        writer.run_dir.mkdir(exist_ok=True)

    # Gather the optimizer state, of which each rank may have a part.
    train_step_state = train_step.state_dict()

    # Rank 0 writes.
    if rt.is_main:
        # If the previous save has failed, its step cannot be the best one.
        run.forget_failed_save(writer.failed_step())

        # model_*.pt: the weights in float32, even if the model's own are bfloat16, and a few facts about them.
        facts = {"val_loss": run.measured.get("val_loss"), "preset": cfg.preset}
        model_content = checkpoint.model_file(train_step.model, run.step, **facts)
        model_content["model"] = train_step.weights.state_dict()

        # optim_*.pt: what else resuming needs, which is the progress, the optimizer state, config and versions.
        versions = {"config": cfg.to_dict(), "versions": machine.versions()}
        train_content = run.state_dict() | train_step_state | versions

        # metrics.jsonl goes to the disk first: a resumed run needs every line before the checkpoint's step.
        metrics.flush()
        writer.save(run.step, model_content, train_content, run.best_step)

    # Different weights end the run here, after the save in their own folder.
    if difference:
        raise replicas.error_after_saving(cfg, rt, run.step, difference, writer)

    # A step that is both saved and evaluated may be the best so far.
    run.last_saved_step = run.step
    run.update_best()


def save_before_error(save: Callable[[], None], writer: checkpoint.CheckpointWriter, rt: Runtime) -> str:
    """Save the current step and wait for the write on every rank, because torchrun ends all ranks when one exits with
    an error. Returns a text that says whether it was saved. Every rank must call it."""
    # If the write fails, the text says so: the error to raise is the one that ended the run.
    save()
    try:
        writer.wait()
        outcome = "everything before it is saved"
    except UserError as e:
        outcome = str(e)
    rt.barrier(hours=2)
    return outcome


def describe_result(cfg: TrainConfig, run: RunState, stop: StopRequest, val_prompt: str = "") -> str:
    """What a finished run prints: the path of the last weights, the path of the best ones if an earlier step was
    better, and the commands to use them. `val_prompt`: the words that --sample-prompt @val stood for."""
    # The last weights and, if an earlier step had a lower val loss, the best ones.
    path = checkpoint.model_path(cfg.run_dir, run.step)
    text = f"done: {run.step} steps in {format_duration(stop.elapsed_s())}; {path}"
    if run.best and run.best_step < run.step:
        best_path = checkpoint.model_path(cfg.run_dir, run.best_step)
        text += f"\nbest val loss {run.best['val_loss']:.4f}: {best_path}"
        path = best_path

    # Commands to paste. infer.py samples only models with GPT-2's vocabulary.
    commands = [f"python plots.py {shlex.quote(str(cfg.run_dir))}"]
    if cfg.model.vocab_size >= VOCAB_SIZE:
        prompt = val_prompt if cfg.sample_prompt == "@val" else cfg.sample_prompt
        commands.append(f"python infer.py {shlex.quote(str(path))} {shlex.quote(prompt)}")
    return f"{text}\nnext: {'; '.join(commands)}"


# ------------------------------------------------------------------------- without training


def dry_run(cfg: TrainConfig, rt: Runtime) -> None:
    """--dry-run: print the plan, then measure a step on this machine and print what the run costs. Needs no data if the
    preset fixes the number of steps."""
    # The network, and the data if they are here or if the number of steps depends on them.
    cfg, initial_model = resume.resolve_network(cfg, saved=None)
    data = None
    if Path(cfg.data_dir).is_dir() or not (cfg.max_steps or cfg.steps_per_epoch):
        data = train_loader(cfg, cfg.data_dir)

    # A run of the same length from its first step, and everything that training needs. Nothing is saved.
    run = RunState(cfg.total_steps(data.order.sequences_per_epoch if data else 0), data_id="")
    train_step = build_train_step(cfg, rt, initial_model=initial_model)
    plan.print_plan(train_step, data, run)
    plan.dry_run(train_step, run)


def evaluate(cfg: TrainConfig, rt: Runtime) -> None:
    """--eval-only: print val loss and HellaSwag of the weights named by --init-from, as a run reports them. Every rank
    must call it.

    For OpenAI's 124M (--init-from gpt2) expect a val loss of about 3.29 on FineWeb-Edu, and 0.2955 in HellaSwag
    (acc_norm). Raises UserError without weights or data."""
    # The weights, in float32, whatever precision the preset trains them in.
    fix = "add --init-from gpt2, a run folder or a model_*.pt"
    require(cfg.init_from != "scratch", f"--eval-only needs trained weights: {fix}")
    model = open_model(cfg.init_from).to(rt.device)
    rt = choose_dtype(replace(cfg, weights="float32"), rt, model.config)

    # The val split, in sequences no longer than the model's context. All ranks must have found the same files.
    T = min(cfg.sequence_length, model.config.block_size)
    val_data = Loader(local_data(cfg, rt), "val", T, model.config.vocab_size)
    files = resume.describe_files(cfg, val_data, val_data.fingerprint())
    rt.check_equal(files, {"": "give every machine the same files"})

    # Validation loss. Not compiled: compiling would take longer than it saves.
    B = 4 if cfg.micro_batch_size == "auto" else cfg.micro_batch_size
    result = validate(Forward(model, compiles=False), val_data, cfg, rt, B)
    tokens = num_val_sequences(val_data, cfg) * T
    print0(f"{cfg.init_from} on {tokens:,} tokens of {val_data.paths[0]} | {result.summary_line()}")

    # HellaSwag, if its rows have been downloaded.
    if cfg.hellaswag_every or cfg.hellaswag_data:
        examples = hellaswag_eval.available_examples(cfg.hellaswag_data, model.config)
        if examples:
            print0(hellaswag_eval.summary_line(hellaswag_eval.evaluate(model, examples, rt.device, rt)))


# ------------------------------------------------------------------------- data


def open_data(cfg: TrainConfig, rt: Runtime) -> tuple[Loader, Loader | None]:
    """The training data and, if the run validates, the validation data. Raises UserError if they are missing or
    damaged. Every rank must call it."""
    folder = local_data(cfg, rt)
    val_data = Loader(folder, "val", cfg.sequence_length, cfg.model.vocab_size) if cfg.val_every else None
    return train_loader(cfg, folder), val_data


def train_loader(cfg: TrainConfig, folder: str | Path) -> Loader:
    """The training data in a folder of token shards."""
    return Loader(folder, "train", cfg.sequence_length, cfg.model.vocab_size, cfg.seed, cfg.shuffle)


def local_data(cfg: TrainConfig, rt: Runtime) -> Path:
    """The folder of token shards. If it is hf://OWNER/NAME, one rank per machine pulls and verifies it first. Every
    rank must call it."""
    if not cfg.data_dir.startswith("hf://"):
        return Path(cfg.data_dir)

    # One rank per machine downloads; the others wait, for hours if necessary.
    repo = cfg.data_dir.removeprefix("hf://")
    folder = Path("data") / repo.replace("/", "--")
    if rt.local_rank == 0:
        pull_for_training(repo, folder)
    rt.barrier(hours=24)
    return folder


def main() -> None:
    """Read the command line, then predict, measure, evaluate or train."""
    # The preset and the flags. With --resume PATH the settings of that checkpoint are the defaults.
    cfg = parse(sys.argv[1:], lambda path: checkpoint.read_train_state(path)["config"])

    # --dry-run --card: a prediction needs no device.
    if cfg.card:
        return print0(plan.predict(cfg))

    # Entering the session joins the other ranks, if there are any, and refuses different settings. The precision is
    # chosen after that (choose_dtype); until then float32 is a placeholder.
    settings = resume.settings_by_flag(cfg)
    session = distributed.session(cfg.device, "float32", cfg.deterministic, settings=settings)

    # --eval-only and --dry-run save nothing, so Ctrl-C may end them at once.
    if cfg.dry_run or cfg.eval_only:
        with session as rt:
            if cfg.eval_only:
                return evaluate(cfg, rt)
            return dry_run(cfg, rt)

    # Train. Signals are handled from the start, so that one during start-up is not lost. One process at a time may
    # write to the run folder: rank 0 holds its lock.
    stop = StopRequest(cfg.time_limit)
    with stop.handle_signals(), session as rt:
        with lock_folder(cfg.run_dir) if rt.is_main else nullcontext():
            train(cfg, rt, stop)


if __name__ == "__main__":
    cli.run_cli(main)
