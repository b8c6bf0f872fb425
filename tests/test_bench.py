"""The benchmarks still run, and print their tables. At their smallest: the figures in them mean nothing."""

import shlex
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import make_documents, make_hellaswag_rows, make_shards, write_jsonl, write_parquet

from bench import generate, gpu_report
from system import machine
from system.cli import UserError

# A network and a step that take a fraction of a second.
SMALL = (
    "--optimizer=adamw --micro-batch-size=4 --sequence-length=32 --total-batch-size=256 --model.vocab-size=50304 "
    "--model.n-layer=1 --model.n-head=2 --model.n-embd=32 --model.block-size=32"
)
# Each module of bench/ with its arguments, and what its output then has: the row or the word of a result.
BENCHES = {
    "attention": ("--device cpu --batch 1 --sequence-length 64 --width 64 --rounds 1 --repeats 1", "| math |"),
    "checkpoint": ("overfit --rounds 1 --dir {tmp}", "the stall"),
    "generate": ("--device cpu --dtype float32 --rounds 1 --new-tokens 2 --samples 1 --only ours", "| ours |"),
    "hellaswag": ("--device cpu --dtype float32 --data {tmp}/rows.jsonl --limit 2 --rounds 1", "| one at a time |"),
    "head": ("--rows 64 --columns 256 --width 32 --rounds 1 --repeats 1", "| ours compiled |"),
    "loader": ("--shards 1 --shard-tokens 600000 --steps 1", "|"),
    "recipes": (
        "--data-dir {tmp}/data --steps 2 --seeds 1 --recipes adamw --out {tmp} --report {tmp}/r",
        "| adamw |",
    ),
    "resume": ("quickstart --data-dir {tmp}/data --steps 4 --ways dtype=float32 -- " + SMALL, "float32"),
    "tokens": ("{tmp}/a.parquet --rounds 1 --enlarge 2 --only fineweb.py loop", "fineweb.py"),
    "train": ("quickstart --data-dir {tmp}/data --steps 1 --rounds 1 --only ours -- " + SMALL, "| ours |"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHES)
def test_a_benchmark_runs(name, run_in_fork, tmp_path):
    arguments, expected = BENCHES[name]
    make_shards(tmp_path / "data", size=200_000)
    write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(4))
    write_parquet(tmp_path / "a.parquet", make_documents(1))
    output = run_in_fork(f"bench.{name}", *shlex.split(arguments.format(tmp=tmp_path)), timeout=600).stdout
    assert expected in output, output


def test_generate_takes_the_precision_that_infer_would_take(monkeypatch, capsys):
    monkeypatch.setattr(generate, "fastest_dtype", lambda device, num_samples: torch.float16)
    monkeypatch.setattr(generate, "make_generator", lambda args, rt, folder: lambda n: None)
    generate.measure_one_way(generate.Args(child="ours", device="cpu"))
    assert "float16" in capsys.readouterr().out


# ------------------------------------------------------------------------- the report of a GPU


def test_a_part_that_fails_is_in_the_report_and_the_next_one_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["gpu_report", "--toy", "--out-dir", str(tmp_path)])
    failing = [sys.executable, "-c", "import sys; print('half done'); sys.exit('out of memory')"]
    endless = [sys.executable, "-c", "import time; time.sleep(60)"]
    parts = {
        "fails": lambda report: report.run(*failing),
        "hangs": lambda report: report.run(*endless, limit=1),
        "has a bug": lambda report: 1 // 0,
        "works": lambda report: f"as it should, in {Path.home()}",
    }
    monkeypatch.setattr(gpu_report, "PARTS", parts)

    gpu_report.main()

    text = (tmp_path / "gpu-report.md").read_text()
    assert [line.split(" | ")[:2] for line in text.splitlines()[4:8]] == [
        ["| fails", "FAILED"],
        ["| hangs", "FAILED"],
        ["| has a bug", "FAILED"],
        ["| works", "done"],
    ]
    for words in ("exit code 1", "half done\nout of memory", "stopped after 1 s", "ZeroDivisionError", "in ~"):
        assert words in text, text


def test_no_part_starts_when_the_time_is_used_up(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_report", "--toy", "--seconds", "0", "--out-dir", str(tmp_path)])
    monkeypatch.setattr(gpu_report, "PARTS", {"late": lambda report: "too late"})

    gpu_report.main()

    assert "no time was left" in (tmp_path / "gpu-report.md").read_text()


def test_a_machine_without_a_gpu_is_told_how_to_try_the_report(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_report", "--out-dir", str(tmp_path)])
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UserError, match=r"no GPU here; .* --toy"):
        gpu_report.main()


def test_a_torch_that_cannot_use_the_gpu_ends_the_report_before_its_first_part(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["gpu_report", "--out-dir", str(tmp_path / "out")])
    monkeypatch.setattr(gpu_report, "list_gpus", lambda: ["NVIDIA H100"])
    monkeypatch.setattr(machine, "GPU_FILES", (str(tmp_path),))  # a file that is there
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(UserError, match=r"built without CUDA; .* make clean install"):
        gpu_report.main()
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("card, is_known", [("NVIDIA H100 80GB HBM3", True), ("Gaudi 3", False)])
def test_a_card_without_a_data_sheet_is_measured_too(tmp_path, monkeypatch, card, is_known):
    measured = {"tokens": 1, "ms": 1, "flops_per_token": 1, "peak_flops": 0, "B": 1, "peak_gb": 1, "times": [[1]]}
    monkeypatch.setattr(gpu_report, "measure_step", lambda *_: measured | {"first_s": 1, "loss": 1.0})
    sizes = replace(gpu_report.ON_A_CPU, card=card)
    report = gpu_report.Report(gpu_report.Args(out_dir=tmp_path), sizes, 0.0)

    table = gpu_report.steps_table(report, ("gpt2-124m",), limit=1)

    assert "→ 1 |" in table and ("? →" in table) != is_known


@pytest.mark.slow
def test_the_report_of_a_toy_on_the_cpu_has_every_part(run_in_fork, tmp_path):
    make_shards(tmp_path / "data", size=200_000)
    folders = ["--data-dir", tmp_path / "data", "--out-dir", tmp_path / "out"]
    run_in_fork("bench.gpu_report", "--toy", *folders, timeout=1700)
    text = (tmp_path / "out" / "gpu-report.md").read_text()
    assert [line.split(" | ")[1] for line in text.splitlines()[4 : 4 + len(gpu_report.PARTS)]] == (
        ["done"] * len(gpu_report.PARTS)
    ), text
    assert "failed" not in text, text
    # -vv: the name of each test.
    for words in (
        "| same bits | same bits |",
        "are_those_of_the_cpu PASSED",
        "2 passed",
        "Largest difference in loss: 0.0e+00",
        "| ours |",
    ):
        assert words in text, text
