"""Train a GPT, on one CPU or many GPUs.

python train_gpt2.py quickstart                                            # minutes on a laptop
torchrun --standalone --nproc_per_node=8 train_gpt2.py gpt2-124m           # GPT-2 124M on 8 GPUs
python train_gpt2.py --resume log/gpt2-124m --max-steps 38146 --out-dir log/second     # train on

`train` is the loop of train_gpt2_plain.py, with what a long run needs around it. The larger additions are marked:

    [memory]   what makes room for larger micro-batches
    [speed]    reading ahead in a thread, the compiler, Python's garbage collector
    [resume]   what a checkpoint must have, so that the next start continues exactly (on GPUs to rounding)
    [ranks]    what the ranks tell each other
    [stop]     how a signal or --time-limit ends the run where it can be resumed
    [safety]   what is done about numbers that are not finite

Under torchrun, every rank (process) executes this file, on its own share of each batch. The names in `train`:

    cfg      every setting: the preset, changed by the flags (training/config.py)
    rt       this rank: its number, device and precision, and the collectives (system/distributed.py)
    state    what a kill must not lose: step, weights, optimizers (training/state.py)
    trainer  the network, and what a step does with it: gradients and update (training/step.py)
"""

import gc
import math
import shlex
import sys
import time
from contextlib import nullcontext
from typing import Any

from system import process

process.set_omp_wait_policy()  # before torch is imported
import torch

from lifecycle import plan, start
from lifecycle.command_line import parse
from lifecycle.evaluator import Evaluator, evaluate_weights, is_due
from lifecycle.metrics import MetricsLogger
from lifecycle.save import Saver
from lifecycle.stop import StopRequest, spare_programs
from system import distributed
from system.distributed import Runtime
from system.errors import TransientError
from system.files import lock_folder
from system.printing import print0
from training.build import build_trainer
from training.config import TrainConfig, settings_by_flag
from training.schedule import set_learning_rates


def train(cfg: TrainConfig, rt: Runtime, stop: StopRequest) -> str:
    """One run, from its first or resumed step to its last, or until `stop` is requested: returns who asked, or "" if
    the run has finished. Raises UserError if the run cannot start or resume as asked, if an update is refused, or if
    the last checkpoint cannot be written. Every rank must call it."""
    # The checkpoint that the run continues from, its data and its network. A run that exists is never overwritten. From
    # here on, cfg has the network that is trained, and rt the precision that all ranks have.
    run, saved = start.open_run(cfg, rt)
    cfg, rt, max_steps = run.cfg, run.rt, run.max_steps
    if saved and start.is_complete(run):
        path = shlex.quote(str(saved["model_file"]))
        more = f"--resume {path} --max-steps {2 * run.start}, and another --out-dir"
        print0(f"the run is complete at step {run.start}; to train on: python train_gpt2.py {more}")
        return ""

    plan.print_plan(cfg, rt, run.model, run.data, run.start, max_steps)

    # The model with all that updates it. From a checkpoint, the optimizers continue where they were.
    with spare_programs():  # [stop] a signal that came to the compiler, too, would be its end
        trainer = build_trainer(run.model, cfg, rt, max_steps, saved)
    del saved  # it is mapped from its file
    state = trainer.state
    if rt.is_main:
        plan.check_disk(cfg, state, max_steps)

    # The evaluations, the log and the checkpoints.
    evaluator = Evaluator(run, trainer)
    metrics = MetricsLogger(run)
    saver = Saver(run, trainer, metrics)
    if rt.is_main:
        plan.write_config(cfg, rt, max_steps)

    # This rank's batches: (micro_steps, B, T + 1) tokens for each step from here on. [speed] A thread reads ahead.
    batches = run.data.batches(run.start, run.sequences_before, trainer.B, rt, cfg.overfit_single_batch)

    stops = 0  # [stop] how many ranks were asked to stop
    with saver:  # [resume] joins the thread that writes, also if the run crashes
        while not stops:
            step = state.step
            row: dict[str, Any] = {"step": step}  # becomes the line of metrics.jsonl for this step

            # [resume] Save before the evaluations: these take long, and a run killed meanwhile resumes from here.
            if step == max_steps or (step > run.start and is_due(step, cfg.save_every, max_steps)):
                saver.save()

            # Step 0 evaluates the untrained network, and the last iteration ends before it trains.
            row |= evaluator.measure(step, trainer.weights, stop)
            metrics.log_text(step, evaluator.sample_text(step, trainer.weights))
            if step == max_steps:
                metrics.write(row)
                break

            # Forward and backward. The wait for the batch is timed apart from the step. On a GPU the update below is
            # asynchronous, so most of its time falls into the next step.
            wait_time = time.perf_counter()
            batch = next(batches)
            start_time = time.perf_counter()
            # [resume] What draws random numbers, as dropout does, draws those of the step and the rank.
            torch.manual_seed(cfg.seed + step * rt.world_size + rt.rank)
            loss, norm = trainer.compute_gradients(batch)

            # [ranks] One collective sums three numbers over the ranks: their shares of the mean loss, how many were
            # asked to stop after this step, and how many have a norm that is not finite. (DDP gives all the same norm.
            # If a faulty card differs, all ranks must still decide alike.)
            numbers = torch.tensor([loss / rt.world_size, stop.is_requested(), not math.isfinite(norm)])
            loss, stops, bad_norms = rt.all_reduce(numbers).tolist()

            # Rate and update.
            lr = set_learning_rates(trainer.optimizers, step, max_steps, cfg)
            if math.isfinite(loss) and not bad_norms:
                saver.writer.check()  # [resume] a save that failed for good ends the run
                trainer.update()
            elif math.isfinite(loss) and trainer.scaler.get_scale() > 1:
                # [safety] With float16, infinite gradients are expected now and then: the loss scale was too high.
                print0(f"step {step}: float16 overflow at loss scale {trainer.scaler.get_scale():g}; step skipped")
            else:
                # [safety] A network with a weight that is not a number never recovers. This ends the run, and train.sh
                # restarts it: an error of the hardware does not come again. The weights of now may be bad already, so
                # they are saved, but every earlier checkpoint stays.
                saver.writer.keep = 0
                saver.finish()
                norms = f"gradient norm {norm}, not finite on {bad_norms:g} ranks"
                fix = "if it comes again after a restart: a lower --max-lr with --allow-drift, or --dtype float32"
                raise TransientError(f"step {step}: loss {loss}, {norms}; the update was refused; {fix}")

            trainer.finish_step()
            if step == run.start:
                # [speed] A collection over all that is there by now takes half a second, and the other ranks wait.
                gc.collect()
                gc.freeze()

            row |= {"train_loss": loss, "lr": lr, "grad_norm": norm}
            metrics.log_step(row, time.perf_counter() - start_time, start_time - wait_time)
            state.step += 1
            state.sequences = run.sequences_before(state.step)
    saver.finish()

    if stops:
        reason = stop.reason or "another rank"
        print0(f"stopped by {reason} at step {state.step} of {max_steps}, saved in {cfg.run_dir}")
        return reason
    if rt.is_main:
        plan.print_result(cfg, run.start, state.step, stop.elapsed_s())
    return ""


def main() -> None:
    """Read the command line, then predict, measure, evaluate or train."""
    # The preset and the flags. With --resume PATH the settings of that checkpoint are the defaults.
    cfg, mode, card = parse(sys.argv[1:])
    if card:
        return print0(plan.predict(cfg, card))

    # Entering the session joins the other ranks, if there are any, and refuses different settings. While they wait for
    # each other a signal simply ends them.
    stop = StopRequest(cfg.time_limit)
    with distributed.session(cfg.device, settings=settings_by_flag(cfg) | {"what to do": mode}) as rt:
        if mode == "dry-run":
            return plan.dry_run(cfg, rt)
        if mode == "eval-only":
            return evaluate_weights(cfg, rt)

        # From here on, a signal asks for a stop. One process at a time may write to the run folder: rank 0 holds its
        # lock.
        with stop.handle_signals(), lock_folder(cfg.run_dir) if rt.is_main else nullcontext():
            reason = train(cfg, rt, stop)
            if rt.is_main:
                process.write_status("stopped" if reason else "finished", reason)


if __name__ == "__main__":
    process.run_cli(main)
