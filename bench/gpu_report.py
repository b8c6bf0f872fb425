"""Measure a machine with a GPU, and write one Markdown file to paste into an issue: `make gpu-report`.

    python -m bench.gpu_report                       # the parts marked *, within half an hour
    python -m bench.gpu_report --only attention head # other parts
    python -m bench.gpu_report --toy                 # tiny, on the CPU: tests the report itself

The report is OUT/gpu-report.md. It is rewritten after each part, so an interrupted report keeps the finished parts. For
a part that fails or runs out of time, it has the last lines of the output; then the next part runs. In this order:

    machine *       cards, driver, versions, links between the cards
    data *          tokens to train on: Python's standard library, unless --data-dir has shards
    steps *         time, MFU and memory of a step, and the micro-batch that `auto` finds; its time also as predicted
    tests *         tests/test_cuda.py: samples, scores and curves agree with the CPU's; a killed run resumes exactly
    resume *        a full-width run with --deterministic that is killed resumes exactly
    hellaswag *     rows scored per second
    sampling *      tokens generated per second
    two-ranks *     whether two cards have the loss curve of one, and how much faster they are; needs two cards
    larger *        as `steps`, for the larger presets
    profile *       the kernels that take most of a step
    attention, head, checkpoint, longer, tuning, recipes     the other benchmarks, by --only
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import tyro

from system import cli, machine
from system.cli import UserError, require
from system.files import atomic_write
from training import cards, hellaswag_eval, metrics, plan
from training.presets import parse

ROOT = Path(__file__).resolve().parent.parent
REPORT_SECONDS = 28 * 60
TAIL_LINES = 25  # of what a failed command printed
TEST_TAIL_LINES = 200  # of failed tests: each has a traceback


@dataclass(frozen=True)
class Args:
    out_dir: Path = Path("log/gpu-report")
    data_dir: Path = Path("data/stdlib")
    only: tuple[str, ...] = ()
    """Parts to run instead of those marked * in the list above."""
    seconds: int = REPORT_SECONDS
    """No part starts after this, and the running one is stopped."""
    toy: bool = False
    """Tiny networks on the CPU, to test the report itself: its figures are meaningless."""


# ------------------------------------------------------------------------- sizes


@dataclass(frozen=True)
class Sizes:
    """What is measured: flags of train_gpt2.py (after a preset) and of the other benchmarks."""

    steps: tuple[str, ...]
    larger: tuple[str, ...]
    preset: str  # for the parts that train one preset
    micro_batch: str  # added to `preset` where --micro-batch-size auto would compile several sizes
    timed_steps: int
    tests: tuple[str, ...]
    resume: tuple[str, ...]
    two_ranks_steps: int
    hellaswag: tuple[str, ...]
    sampling: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    card: str = ""  # the card to predict for; empty: this machine's


# A smaller batch than the presets' only leaves out micro-steps.
BATCH = "--total-batch-size=131072"
ON_A_GPU = Sizes(
    # The second is the network of OpenAI's GPT-2, whose vocabulary is no round number.
    steps=(f"gpt2-124m {BATCH}", f"gpt2-124m {BATCH} --model.vocab-size=50257", f"speedrun-124m {BATCH}"),
    larger=(f"gpt2-350m {BATCH}", f"gpt2-774m {BATCH}", f"gpt2-1558m {BATCH}", f"gpt2-1558m {BATCH} --recompute"),
    preset=f"gpt2-124m {BATCH}",
    micro_batch="--micro-batch-size=8",
    timed_steps=5,
    tests=(),
    resume=("--ways", "deterministic"),
    two_ranks_steps=12,
    hellaswag=("--limit", "400"),
    sampling=("--only", "ours", "memory", "transformers"),
)
# With --toy: one narrow layer, in steps of eight short sequences.
TOY_NETWORK = (
    "--optimizer=adamw --sequence-length=32 --total-batch-size=256 --model.vocab-size=50304 --model.n-layer=1 "
    "--model.n-head=2 --model.n-embd=32 --model.block-size=32 --no-compile"
)
ON_A_CPU = Sizes(
    steps=(f"gpt2-124m {TOY_NETWORK}", f"speedrun-124m {TOY_NETWORK} --weights=float32"),
    larger=(f"gpt2-350m {TOY_NETWORK}",),
    preset=f"gpt2-124m {TOY_NETWORK}",
    micro_batch="--micro-batch-size=4",
    timed_steps=1,
    tests=("-k", "samples"),
    resume=("--steps", "60", "--ways", "deterministic"),
    two_ranks_steps=4,
    hellaswag=("--limit", "2", "--device", "cpu"),
    sampling=("--only", "ours", "--new-tokens", "2", "--samples", "1", "--device", "cpu"),
    environment={"DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""},
    card="H100",
)

# ------------------------------------------------------------------------- commands


class PartFailed(Exception):
    """A command of a part failed or ran out of time. The message ends with what it printed last."""


def end_group(process: subprocess.Popen) -> None:
    """End a command that was started in a session of its own, and every process that it has started."""
    # SIGINT first, so that a training run can leave its process group; SIGKILL if that takes too long.
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(10)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
    process.wait()


@dataclass
class Report:
    """The report file, and what the parts need to be measured and written."""

    args: Args
    sizes: Sizes
    start_time: float
    sections: list[str] = field(default_factory=list)
    summary: list[str] = field(default_factory=list)

    @property
    def path(self) -> Path:
        return self.args.out_dir / "gpu-report.md"

    def seconds_left(self) -> float:
        return self.args.seconds - (time.monotonic() - self.start_time)

    def run(
        self,
        *command: str,
        limit: float = 600,
        environment: dict[str, str] | None = None,
        tail_lines: int = TAIL_LINES,
    ) -> str:
        """What a command prints to its standard output. It gets `limit` seconds at most, and what is left of the
        report's time. Raises PartFailed with the last `tail_lines` of its output."""
        environment = os.environ | self.sizes.environment | (environment or {})
        limit = max(1, min(limit, self.seconds_left()))

        # The outputs go to files: a pipe that nobody reads would stop the command when it is full.
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(
                command, stdout=output, stderr=errors, env=environment, cwd=ROOT, start_new_session=True
            )
            # Whatever happens, no process is left behind that would disturb the next measurement.
            try:
                exit_code = process.wait(limit)
                problem = f"exit code {exit_code}" if exit_code else ""
            except subprocess.TimeoutExpired:
                problem = f"stopped after {limit:.0f} s"
            finally:
                end_group(process)
            # Of a command that failed, report what it printed last.
            output.seek(0)
            errors.seek(0)
            text = output.read()
            if problem:
                lines = (text + errors.read()).strip().splitlines()[-tail_lines:]
                raise PartFailed(f"{problem}: {' '.join(command)}\n" + "\n".join(lines))
            return text

    def bench(self, module: str, *arguments: str, limit: float = 600) -> str:
        """The table that a benchmark prints."""
        return self.run(sys.executable, "-m", f"bench.{module}", *arguments, limit=limit)

    def write(self) -> None:
        """Write the file: the summary of all parts so far, then their sections."""
        table = ["| part | result | s |", "|---|---|---|", *self.summary]
        text = "\n".join(["# GPU report", "", *table, "", *self.sections])

        # The report will be public: hide the user's paths.
        for private, public in ((str(ROOT), "."), (str(Path.home()), "~")):
            text = text.replace(private, public)

        # All or nothing: if this is interrupted, the file of the part before stays.
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.path) as f:
            f.write(text.encode(errors="replace"))


def as_code(text: str) -> str:
    """A block of Markdown that shows the text as it is."""
    return f"```\n{text.strip()}\n```"


def list_gpus() -> list[str]:
    """The names of this machine's NVIDIA GPUs, as the driver lists them. Asking torch would use their memory."""
    # Without a driver there is no nvidia-smi.
    try:
        command = ["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return done.stdout.split("\n")[:-1]


# ------------------------------------------------------------------------- the parts


def machine_part(report: Report) -> str:
    """What is measured: versions, cores, cards and the links between them."""
    # In a process of its own, because torch would keep memory of the card that the other parts need.
    code = "import torch; from system import machine; print(machine.versions(), 'CUDA', torch.version.cuda)"
    lines = [report.run(sys.executable, "-c", code, limit=120), f"{os.cpu_count()} CPU cores"]

    # The cards as the driver sees them. A low power limit, low clocks or few PCIe lanes may explain slow steps.
    if list_gpus():
        fields = "name,driver_version,memory.total,power.limit,clocks.max.sm,pcie.link.gen.max,pcie.link.width.current"
        lines.append(report.run("nvidia-smi", f"--query-gpu={fields}", "--format=csv", limit=60))
    if len(list_gpus()) > 1:
        lines.append(report.run("nvidia-smi", "topo", "-m", limit=60))
    return as_code("\n".join(line.strip() for line in lines))


def data_part(report: Report) -> str:
    """Make tokens to train on, unless --data-dir has some."""
    if any(report.args.data_dir.glob("*train*")):
        return f"shards of `{report.args.data_dir}`"
    command = [sys.executable, "fineweb.py", "--source", "stdlib", "--out", str(report.args.data_dir)]
    return as_code(report.run(*command, limit=120))


def train_flags(report: Report, preset_and_flags: str, *more: str) -> list[str]:
    """The arguments of bench.train for a preset with flags."""
    preset, *flags = preset_and_flags.split()
    return [preset, "--data-dir", str(report.args.data_dir), "--rounds", "1", *more, "--", *flags]


def measure_step(report: Report, preset_and_flags: str, limit: float) -> dict:
    """What the child of bench.train prints about this project's step."""
    # The child is one process of bench.train. The last line that it prints is JSON.
    steps = str(report.sizes.timed_steps)
    arguments = train_flags(report, preset_and_flags, "--steps", steps, "--child", "ours")
    command = [sys.executable, "-m", "bench.train", *arguments]
    output = report.run(*command, limit=limit, environment={"BENCH_BEGAN": str(time.time())})
    return json.loads(output.splitlines()[-1])


def predict_step_ms(report: Report, preset_and_flags: str) -> str:
    """Milliseconds of a step as --dry-run --card predicts them; "?" for a card that it does not know."""
    cfg = parse(preset_and_flags.split(), None)
    try:
        names = cards.find_cards(report.sizes.card or list_gpus()[0])
    except UserError:
        return "?"
    return f"{1e3 * plan.predict_step_s(cfg, names):,.0f}"


def step_row(preset_and_flags: str, predicted_ms: str, measured: dict) -> str:
    """A row of the table of steps."""
    # MFU is known if the card has a data sheet.
    rate = measured["tokens"] / measured["ms"] * 1e3
    mfu = f"{rate * measured['flops_per_token'] / measured['peak_flops']:.1%}" if measured["peak_flops"] else "?"
    # The last part of a step is the optimizer's update.
    update_ms = statistics.median(parts[-1] for parts in measured["times"])
    cells = [str(measured["B"]), f"{measured['peak_gb'] * 1e9 / 2**30:.1f}"]
    cells += [f"{predicted_ms} → {measured['ms']:,.0f}", mfu]
    cells += [f"{update_ms:,.1f}", f"{rate:,.0f}", f"{measured['first_s']:.0f}", f"{measured['loss']:.4f}"]
    return f"| `{preset_and_flags}` | {' | '.join(cells)} |"


def steps_table(report: Report, rows: tuple[str, ...], limit: float) -> str:
    """Measure a step of each preset with flags. One that fails still has a row, and its message is below the table."""
    lines = [
        "Milliseconds of a step: predicted → measured.",
        "",
        "| preset, flags | micro-batch | peak GiB | step ms | MFU | update ms | tokens/s | first step s | loss |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    problems = []
    measured_any = False
    for row in rows:
        predicted_ms = predict_step_ms(report, row)
        try:
            lines.append(step_row(row, predicted_ms, measure_step(report, row, limit)))
            measured_any = True
        except PartFailed as e:
            lines.append(f"| `{row}` | failed, see below |")
            problems.append(str(e))
    # The table, then each problem once. The part has failed only if nothing was measured.
    text = "\n".join(lines + [f"\n{as_code(problem)}" for problem in dict.fromkeys(problems)])
    if not measured_any:
        raise PartFailed(f"no step was measured\n{text}")
    return text


def steps_part(report: Report) -> str:
    """A step of the usual presets, predicted and measured."""
    return steps_table(report, report.sizes.steps, limit=240)


def larger_part(report: Report) -> str:
    """A step of the larger presets. One that does not fit fails, and its row says so."""
    return steps_table(report, report.sizes.larger, limit=240)


def tests_part(report: Report) -> str:
    """Run the tests that need a GPU, and show the name and outcome of each."""
    # In one process (-n 0), because several would share the card's memory. -vv, because pyproject.toml has a -q, which
    # takes away one v: with names, the report shows how far tests came that ran out of time.
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n",
        "0",
        "-vv",
        "--durations=0",
        "--no-header",
        "tests/test_cuda.py",
        *report.sizes.tests,
    ]
    output = report.run(*command, limit=540, tail_lines=TEST_TAIL_LINES)
    return as_code("\n".join(output.splitlines()[-60:]))


def resume_part(report: Report) -> str:
    """Kill a run and resume it: whether it ends with the same bits."""
    preset, *flags = report.sizes.preset.split()
    flags.append(report.sizes.micro_batch)
    data = ["--data-dir", str(report.args.data_dir)]
    return report.bench("resume", preset, *data, *report.sizes.resume, "--", *flags, limit=480)


def hellaswag_part(report: Report) -> str:
    """Rows scored per second."""
    # Use the downloaded rows or else, to measure only the speed, made-up rows of usual lengths.
    rows = hellaswag_eval.DEFAULT_PATH
    note = ""
    if not rows.exists():
        rows = report.args.out_dir / "made-up-rows.jsonl"
        note = "Made-up rows: only the speed is meaningful, not the agreement of predictions.\n\n"
        ending = "puts the ball down and walks away from the table."
        row = {"ctx": "A man stands in a room and holds a ball. " * 5, "endings": [ending] * 4, "label": 0}
        different = [{**row, "endings": [f"{i} {j} {ending}" for j in range(4)]} for i in range(400)]
        rows.parent.mkdir(parents=True, exist_ok=True)
        rows.write_text("".join(json.dumps(r) + "\n" for r in different))
    return note + report.bench("hellaswag", "--data", str(rows), "--rounds", "1", *report.sizes.hellaswag, limit=180)


def sampling_part(report: Report) -> str:
    """Tokens generated per second."""
    return report.bench("generate", "--rounds", "1", *report.sizes.sampling, limit=180)


def two_ranks_part(report: Report) -> str:
    """Train on one card and on two: how much faster two are, and whether their curves agree."""
    if not report.args.toy and len(list_gpus()) < 2:
        return "This machine has one card."

    # The same run on one rank and on two.
    preset, *flags = report.sizes.preset.split()
    steps = report.sizes.two_ranks_steps
    curves = {}
    step_ms = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (1, 2):
            out = Path(folder) / str(ranks)
            launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
            command = [*launcher, "train_gpt2.py", preset, "--data-dir", str(report.args.data_dir), "--out-dir", out]
            command += ["--max-steps", steps, *"--val-every 0 --hellaswag-every 0 --sample-every 0".split()]
            command += ["--save-every", 0, *flags, report.sizes.micro_batch]
            report.run(*map(str, command), limit=240)

            # The first steps warm up, so the time is that of the second half.
            rows = [row for row in metrics.read_metrics(out / "metrics.jsonl") if "train_loss" in row]
            curves[ranks] = [row["train_loss"] for row in rows]
            step_ms[ranks] = statistics.median(row["step_ms"] for row in rows[steps // 2 :])

    # Two ranks sum the gradients in another order, so the losses may differ by rounding.
    largest = max(abs(a - b) for a, b in zip(curves[1], curves[2], strict=True))
    speedup = step_ms[1] / step_ms[2]
    times = f"One rank: {step_ms[1]:,.0f} ms a step; two: {step_ms[2]:,.0f} ms, {speedup:.2f} times as fast."
    losses = f"Largest difference in loss: {largest:.1e} of {curves[1][-1]:.3f}."
    return f"`{report.sizes.preset}`, {steps} steps. {times} {losses}"


def profile_part(report: Report) -> str:
    """The kernels that take most of a step."""
    preset = f"{report.sizes.preset} {report.sizes.micro_batch}"
    return report.bench("train", *train_flags(report, preset, "--steps", "2", "--only", "ours", "--profile"), limit=180)


def attention_part(report: Report) -> str:
    """The attention kernels that torch has, compared."""
    return report.bench("attention")


def head_part(report: Report) -> str:
    """The ways to compute the head and its loss, compared."""
    return report.bench("head", "--rounds", "1", "--rows", "65536", "--width", "768", "--columns", "50257")


def checkpoint_part(report: Report) -> str:
    """How long a save stalls training."""
    size = ["--sequence-length", "1024", "--micro-batch-size", "64"]
    return report.bench("checkpoint", "--dir", str(report.args.out_dir), *size)


def longer_part(report: Report) -> str:
    """A step with longer contexts, then with recomputation."""
    contexts = tuple(f"{report.sizes.preset} --sequence-length={T} --model.block-size={T}" for T in (2048, 4096))
    return steps_table(report, (*contexts, f"{report.sizes.preset} --recompute"), limit=180)


def tuning_part(report: Report) -> str:
    """A step with bfloat16 weights, with Muon, and with kernels that Inductor has tuned on this card."""
    rows = tuple(f"{report.sizes.preset} {flag}" for flag in ("--weights=bfloat16", "--optimizer=muon"))
    table = steps_table(report, rows, limit=150)

    # The commands of the report inherit the variable.
    os.environ["TORCHINDUCTOR_COORDINATE_DESCENT_TUNING"] = "1"
    tuned = steps_table(report, (report.sizes.preset,), limit=240)
    del os.environ["TORCHINDUCTOR_COORDINATE_DESCENT_TUNING"]
    return f"{table}\n\nWith TORCHINDUCTOR_COORDINATE_DESCENT_TUNING=1:\n\n{tuned}"


def recipes_part(report: Report) -> str:
    """The val losses of three recipes, on the same tokens in the same order."""
    out = str(report.args.out_dir / "recipes")
    size = "--size 124m --steps 480 --seeds 1 --share 0.4 --recipes adamw speedrun record8".split()
    return report.bench("recipes", "--data-dir", str(report.args.data_dir), "--out", out, "--report", out, *size)


# What runs without --only, in this order: what is most wanted comes first, in case the time runs out.
PARTS: dict[str, Callable[[Report], str]] = {
    "machine": machine_part,
    "data": data_part,
    "steps": steps_part,
    "tests": tests_part,
    "resume": resume_part,
    "hellaswag": hellaswag_part,
    "sampling": sampling_part,
    "two-ranks": two_ranks_part,
    "larger": larger_part,
    "profile": profile_part,
}
MORE_PARTS: dict[str, Callable[[Report], str]] = {
    "attention": attention_part,
    "head": head_part,
    "checkpoint": checkpoint_part,
    "longer": longer_part,
    "tuning": tuning_part,
    "recipes": recipes_part,
}

# ------------------------------------------------------------------------- the report


@contextmanager
def part_of(report: Report, name: str) -> Iterator[list[str]]:
    """Write into the report what the part appends to the list, or why it failed."""
    # The caller's block is the part itself. Its errors end here, so that the next part runs.
    start_time = time.monotonic()
    lines: list[str] = []
    result = "done"
    try:
        yield lines
    except PartFailed as e:
        result = "FAILED"
        lines.append(as_code(str(e)))
    # A mistake in this file must not lose what the other parts measured.
    except Exception as e:
        result = "FAILED"
        lines.append(as_code(f"{type(e).__name__}: {e}"))
    finally:
        seconds = time.monotonic() - start_time
        report.summary.append(f"| {name} | {result} | {seconds:.0f} |")
        report.sections.append(f"## {name}\n\n" + "\n\n".join(lines) + "\n")
        report.write()
        print(f"{name}: {result}, {seconds:.0f} s", flush=True)


def main() -> None:
    args = tyro.cli(Args, description=__doc__)
    # Refuse what cannot work before half an hour has passed.
    all_parts = PARTS | MORE_PARTS
    for name in args.only:
        require(name in all_parts, f"--only {name!r} must be one of {', '.join(all_parts)}")
    hint = "to test the report itself on the CPU: python -m bench.gpu_report --toy"
    require(args.toy or list_gpus(), f"nvidia-smi lists no GPU here; {hint}")
    if not args.toy:
        machine.refuse_unusable_gpu("cuda")

    # One part after the other, as long as there is time.
    report = Report(args, ON_A_CPU if args.toy else ON_A_GPU, time.monotonic())
    print(f"this takes up to {args.seconds / 60:.0f} minutes; the report grows in {report.path}", flush=True)
    for name in args.only or PARTS:
        with part_of(report, name) as lines:
            if report.seconds_left() <= 0:
                raise PartFailed("not run: no time was left")
            lines.append(all_parts[name](report))
    print(f"done; to share it, paste this file into an issue: {report.path}")


if __name__ == "__main__":
    cli.run_cli(main)
