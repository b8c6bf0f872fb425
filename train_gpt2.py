"""Train a GPT, on one CPU or many GPUs.

python train_gpt2.py quickstart                                            # minutes on a laptop
torchrun --standalone --nproc_per_node=8 train_gpt2.py gpt2-124m           # GPT-2 124M on 8 GPUs
python train_gpt2.py --resume log/gpt2-124m --max-steps 38146 --out-dir log/second     # train on

`train` is the loop of train_gpt2_plain.py, plus what a long run needs. The larger additions are marked, here,
in lifecycle/build.py and in training/step.py:

    [memory]   what makes room for larger micro-batches
    [speed]    reading ahead in a thread, the compiler, Python's garbage collector
    [resume]   what a checkpoint must have, so that the next start continues exactly (on GPUs to rounding)
    [ranks]    what the ranks tell each other
    [stop]     how a signal, --time-limit or --stop-off-track ends the run after a save
    [safety]   what happens to numbers that are not finite

Under torchrun, every rank (process) executes this file, on its own share of each batch. The names in `train`:

    cfg      every setting: the preset, changed by the flags (training/config.py)
    rt       this rank: its number, device and precision, and the collectives (system/distributed.py)
    now      the present step: its number, its batch size, its learning-rate factor (training/schedule.py)
    trainer  the network, and what a step does with it: gradients and update (training/step.py)
    state    what must survive a kill: step, weights, optimizers (training/step.py)
"""

import gc
import itertools
import math
import shlex
import sys
import time
from contextlib import nullcontext, suppress
from dataclasses import replace
from typing import Any

import system  # noqa: F401  # first

# isort: split
import torch

from evaluation.evaluations import Validation, measure
from evaluation.verdict import Verdict
from lifecycle import plan
from lifecycle.build import build_trainer
from lifecycle.command_line import parse
from lifecycle.metrics import MetricsLogger
from lifecycle.open_run import Run, open_run
from lifecycle.save import Saver
from lifecycle.stop import StopRequest, spare_programs
from system import distributed, process
from system.distributed import Runtime, Stopped
from system.errors import TransientError
from system.facts import START, Fact
from system.files import lock_folder
from system.printing import print0
from training.config import TrainConfig, settings_facts
from training.schedule import at
from training.step import Trainer


def train(run: Run, trainer: Trainer, stop: StopRequest) -> str:
    """Train from the first step of this start to the last, or until `stop` is requested. Returns who asked for the
    stop, or "" if the run has finished. Raises UserError or OSError if the last checkpoint cannot be written, and
    TransientError if an update is refused. Every rank must call this."""
    cfg, rt, state = run.cfg, run.rt, trainer.state
    metrics = MetricsLogger(run)
    saver = Saver(run, trainer, metrics)
    verdict = Verdict(cfg, run.max_steps)
    if rt.is_main:
        plan.check_disk(cfg, trainer, run.max_steps)
        plan.write_config(cfg, rt, run.max_steps)

    # This rank's batches: (micro_steps, B, T + 1) tokens for each step from here on. [speed] A thread reads ahead.
    counts = (at(step, cfg, run.max_steps).sequences for step in itertools.count(run.first_step))
    batches = run.data.batches(state.sequences, counts, trainer.B, rt, cfg.overfit_single_batch)

    stops = 0  # [stop] how many ranks were asked to stop
    with saver:  # [resume] joins the thread that writes, also if the run crashes
        while not stops:
            now = at(state.step, cfg, run.max_steps)
            trainer.set_step(now)
            # The line of metrics.jsonl for this step. tokens: read before this step.
            row: dict[str, Any] = {"step": now.number, "tokens": state.sequences * cfg.sequence_length}

            # [resume] Save before the evaluations: these take long, and a run that is killed meanwhile resumes from
            # here.
            if now.is_last or (now.number > run.first_step and now.is_due(cfg.save_every)):
                saver.save()

            # Step 0 evaluates the initial weights. The last iteration ends before it trains.
            due = [evaluation for evaluation in run.evaluations if evaluation.is_due(now)]
            try:
                row |= measure(due, trainer, f"step {now.number:5d}/{run.max_steps}")
            except Stopped:  # [stop] the next start evaluates this step again
                stops = 1
                break
            if verdict.is_lost(now, row):
                stop.request("--stop-off-track")
            if now.is_last:
                metrics.write(row)
                break

            # Forward and backward. The wait for the batch is timed apart from the step. On a GPU the update below is
            # asynchronous, so most of its time falls into the next step.
            wait_start = time.perf_counter()
            batch = next(batches)
            step_start = time.perf_counter()
            loss, norm = trainer.compute_gradients(batch)

            # [ranks] One collective sums three numbers over the ranks: each rank's share of the mean loss, whether the
            # rank was asked to stop after this step, and whether its norm is not finite. (DDP gives all ranks the same
            # norm. If a faulty card computes another one, all ranks must still decide alike.)
            shares = torch.tensor([loss / rt.world_size, stop.is_requested(), not math.isfinite(norm)])
            loss, stops, bad_norms = rt.all_reduce(shares).tolist()

            if math.isfinite(loss) and not bad_norms:
                saver.writer.check()  # [resume] a save that failed for good ends the run
                trainer.update()
            elif math.isfinite(loss) and trainer.scaler.get_scale() > 1:
                # [safety] With float16, infinite gradients are expected now and then: the loss scale was too high.
                scale = f"{trainer.scaler.get_scale():g}"
                print0(f"step {now.number}: float16 overflow at loss scale {scale}; step skipped")
            else:
                # [safety] A network with a weight that is not a number never recovers. So the run ends here, and
                # train.sh restarts it: an error of the hardware often does not come again. The present weights may be
                # bad already. So save them, but delete no earlier checkpoint.
                saver.writer.keep = 0
                saver.finish()
                norms = f"gradient norm {norm}, not finite on {bad_norms:g} ranks"
                fix = "if it comes again after a restart: a lower --max-lr with --allow-drift, or --dtype float32"
                raise TransientError(f"step {now.number}: loss {loss}, {norms}; the update was refused; {fix}")

            trainer.finish_step()
            if now.number == run.first_step:
                # [speed] A full collection takes half a second, in which the other ranks wait. After freeze, later
                # collections skip the objects that exist here.
                gc.collect()
                gc.freeze()

            row |= {"train_loss": loss, "lr": now.lr_factor * cfg.max_lr, "grad_norm": norm}
            metrics.log_step(now, row, time.perf_counter() - step_start, step_start - wait_start)
            state.step += 1
            state.sequences += now.sequences
    saver.finish()

    if not stops:
        return ""

    # [stop] Without a val loss, nobody could tell whether the newest weights are the best. A signal leaves no time for
    # that. The last step is left to the next start, with all other evaluations.
    now = at(state.step, cfg, run.max_steps)
    trainer.set_step(now)
    validations = [evaluation for evaluation in run.evaluations if isinstance(evaluation, Validation)]
    if validations and not now.is_last:
        with suppress(Stopped):
            row = measure(validations, trainer, f"step {now.number:5d}/{run.max_steps}")
            metrics.write({"step": now.number} | row)

    reason = stop.reason or "another rank"
    print0(f"stopped by {reason} at step {state.step} of {run.max_steps}, saved in {cfg.run_dir}")
    return reason


def open_and_train(cfg: TrainConfig, rt: Runtime, stop: StopRequest) -> str:
    """One start of a run: open it, build what trains, and train. Returns what `train` returns. Raises UserError if the
    run cannot start or resume as asked. Every rank must call this."""
    # The checkpoint that the run continues from, its data and its network. A run that exists is never overwritten.
    rt = replace(rt, is_signalled=lambda: stop.is_urgent)
    run, saved = open_run(cfg, rt)
    if saved and run.is_complete():
        path = shlex.quote(str(saved["model_file"]))
        more = f"--resume {path} --max-steps {2 * run.first_step}, and another --out-dir"
        print0(f"the run is complete at step {run.first_step}; to train on: python train_gpt2.py {more}")
        return ""
    plan.print_plan(run.cfg, run.rt, run.model, run.data, at(run.first_step, run.cfg, run.max_steps), run.max_steps)

    # The model with everything that updates it. From a checkpoint, the optimizers continue where they were.
    with spare_programs():  # [stop] keep stop signals from the compiler, which would die of them
        trainer = build_trainer(run.model, run.cfg, run.rt, run.max_steps, saved)
    del saved  # its tensors are mapped from a file; while they live, deleting that file (--keep) frees no space

    reason = train(run, trainer, stop)
    if run.rt.is_main and not reason:
        plan.print_result(run.cfg, run.first_step, trainer.state.step, stop.elapsed_s())
    return reason


def main() -> None:
    """Read the command line. Then predict (--card), measure a step (--dry-run), evaluate (--eval-only), or train."""
    # The preset and the flags. With --resume PATH the settings of that checkpoint are the defaults.
    cfg, mode, card = parse(sys.argv[1:])
    if card:
        return print0(plan.predict(cfg, card))

    # Entering the session joins the other ranks, if there are any, and refuses ranks with different settings. While the
    # ranks wait for each other, a signal ends them without a save.
    stop = StopRequest(cfg.time_limit)
    with distributed.session(cfg.device, settings_facts(cfg) | {"what to do": Fact(mode, START)}) as rt:
        if mode == "dry-run":
            return plan.dry_run(cfg, rt)
        if mode == "eval-only":
            return plan.evaluate_weights(cfg, rt)

        # From here on, a signal asks for a stop. One process at a time may write to the run folder: rank 0 holds its
        # lock.
        with stop.handle_signals(), lock_folder(cfg.run_dir) if rt.is_main else nullcontext():
            reason = open_and_train(cfg, rt, stop)
            if rt.is_main:
                process.write_status("stopped" if reason else "finished", reason)


if __name__ == "__main__":
    process.run_cli(main)
