"""HellaSwag: the scores are those of a plain scorer that reads one ending at a time, on one rank or several.
test_runtimes.py compares them with the LM Evaluation Harness."""

import math
from dataclasses import replace
from unittest.mock import Mock

import pytest
import torch
import torch.nn.functional as F
from helpers import CPU, make_hellaswag_rows, read_jsonl, refused, run_main, write_jsonl, write_model
from networks import NETWORKS, make_network

import hellaswag as script
from evaluation.evaluations import HellaSwag, open_list
from evaluation.multiple_choice import (
    describe_score,
    load_examples,
    make_batch,
    normalize,
    plan_batches,
    render,
    score,
    summarize,
)
from model import GPT, GPTConfig
from system.distributed import Runtime
from system.facts import compare
from tokens import tokenizer
from training.config import TrainConfig

ROW = {"ctx": "a", "endings": ["b"] * 4, "label": 0}


@pytest.fixture
def run(capsys):
    """run("--model", path, ...) -> what hellaswag.py prints, run in this process."""

    def run(*args, exit_code=0):
        assert run_main("hellaswag.py", *args) == exit_code
        return "".join(capsys.readouterr())

    return run


@pytest.fixture(scope="module")
def model():
    return make_network(block_size=256)


@pytest.fixture(scope="module")
def examples():
    return [render(row) for row in make_hellaswag_rows(6)]


@pytest.fixture
def rows(tmp_path):
    """A file of eight rows."""
    return write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(8))


# ------------------------------------------------------------------------- the scores


@torch.no_grad()
def score_plainly(model, rows):
    """Loss of each ending, summed and mean over its tokens, (2, n, 4): one ending at a time, from the raw text."""
    encode = tokenizer.encoding().encode_ordinary
    losses = []
    for row in rows:
        for text in row["endings"]:
            ending = encode(" " + text)
            ids = torch.tensor([encode(row["ctx"]) + ending])  # (1, T)
            logits, _ = model(ids[:, :-1])
            ending_losses = F.cross_entropy(logits[0].double(), ids[0, 1:], reduction="none")[-len(ending) :]
            losses.append((ending_losses.sum(), ending_losses.mean()))
    return torch.tensor(losses).T.view(2, -1, 4).float()


@pytest.mark.parametrize("name", NETWORKS)
def test_scores_equal_the_plain_scorer(name, tmp_path):
    rows = [row | {"label": str(row["label"])} for row in make_hellaswag_rows(4)]  # text, as in the Hub's copy
    examples = script.load_examples(write_jsonl(tmp_path / "rows.jsonl", rows))
    model = make_network(NETWORKS[name], block_size=256)
    expected = score_plainly(model, rows)

    losses = score(model, examples, CPU)
    result = script.evaluate(model, examples, "cpu")

    found = torch.stack([losses, normalize(losses, examples)])
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-5)
    acc, acc_norm = (expected.argmin(2) == torch.arange(4)).double().mean(1).tolist()
    stderr = (acc_norm * (1 - acc_norm) / 3) ** 0.5
    assert result == pytest.approx({"acc": acc, "acc_norm": acc_norm, "stderr": stderr, "n": 4})


def test_ranks_share_the_work_exactly(model, examples, monkeypatch):
    """Of 20 ranks some have nothing to score."""
    one_rank = score(model, examples, CPU)
    monkeypatch.setattr(Runtime, "all_reduce", lambda self, tensor: tensor)
    parts = [score(model, examples, replace(CPU, rank=rank, world_size=20)) for rank in range(20)]
    assert torch.equal(sum(parts), one_rank)


@pytest.mark.parametrize("block_size", [32, 30])  # 30 is no multiple of what rows are padded to
def test_a_long_context_loses_its_beginning(block_size):
    """The same of it for all four endings."""
    small = make_network(block_size=block_size)
    row = ROW | {"ctx": " dog" * 60, "endings": [" cat" * n for n in (2, 4, 6, 8)]}
    # Each word is one token, with another space before an ending. The last token of the longest is not read.
    expected = score_plainly(small, [row | {"ctx": " dog" * (block_size + 1 - 9)}])[0]
    losses = score(small, [render(row)], CPU)
    torch.testing.assert_close(losses, expected, atol=1e-3, rtol=1e-5)


def test_shapes_are_few_and_batches_within_bounds():
    """A GPU plans each length anew. Texts of one length stand side by side, so that little is padding."""
    texts = [([1] * (2 + i * 37 % 300), 1) for i in range(400)]
    batches = [[texts[i] for i in plan] for plan in plan_batches(texts, max_positions=256)]
    shapes = [make_batch(batch, 1024)[0].shape for batch in batches]
    assert all(n * T <= 256 or n == 1 for n, T in shapes) and len({T for _, T in shapes}) < 300 / 7
    assert sum(shape.numel() for shape in shapes) < 1.1 * sum(len(tokens) for tokens, _ in texts)


# ------------------------------------------------------------------------- files of rows


@pytest.mark.parametrize("name, size, why_not", [
    ("rows.jsonl", {"block_size": 25}, ""), ("rows.jsonl", {"block_size": 24}, "reads 24"),
    ("rows.jsonl", {"vocab_size": 50256}, "50256"),
    ("data/hellaswag/hellaswag_val.jsonl", {}, "data/hellaswag"),
])  # fmt: skip
def test_a_run_takes_the_rows_that_it_can_read(tmp_path, monkeypatch, capsys, name, size, why_not):
    """Or trains without HellaSwag, and prints why."""
    monkeypatch.chdir(tmp_path)  # where nothing has been downloaded
    write_jsonl(tmp_path / "rows.jsonl", [ROW | {"endings": ["cat" + " cat" * 24] * 4}])  # 25 tokens

    T = size.get("block_size", 1024)
    off = {"val_every": 0, "sample_every": 0}
    found = open_list(
        TrainConfig(hellaswag_data=name, model=GPTConfig(**size), **off, sequence_length=T, total_batch_size=T)
    )

    printed = capsys.readouterr().out
    assert why_not in printed and bool(printed) == bool(why_not) == (found == [])


def test_other_rows_are_another_fact(tmp_path):
    """Which ranks must share, and a resumed run prints."""
    facts = []
    for seed in (0, 1):
        rows = write_jsonl(tmp_path / f"{seed}.jsonl", make_hellaswag_rows(3, seed))
        facts.append(HellaSwag(TrainConfig(hellaswag_data=str(rows))).facts())
    assert len(compare(*facts)) == 1


@pytest.mark.parametrize("bad", [
    ROW | {"ctx": ""}, ROW | {"endings": ["a", "b", "c"]}, ROW | {"label": 4}, ROW | {"label": 2.7}, [ROW],
])  # fmt: skip
def test_a_bad_row_is_refused(bad, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", [ROW, bad])
    with refused("line 2 "):
        load_examples(path)


# ------------------------------------------------------------------------- the command line


def test_every_row_is_written_with_its_losses(run, model, rows, tmp_path):
    """-m and -d are the short flags of build-nanogpt's hellaswag.py."""
    examples = load_examples(rows, 6)
    write_model(tmp_path, model)
    losses = score(model, examples, CPU)

    flags = ("-m", tmp_path, "-d", "cpu", "--data", rows, "--limit 6 --per-example", tmp_path / "out")
    output = run(*flags, "--dtype float32")

    assert describe_score(summarize(losses, examples)) in output
    means = normalize(losses, examples)
    assert read_jsonl(tmp_path / "out") == [
        {
            "index": i,
            "label": example.label,
            "pred": losses[i].argmin(),
            "pred_norm": means[i].argmin(),
            "losses": pytest.approx(losses[i].tolist()),
            "losses_norm": pytest.approx(means[i].tolist()),
        }
        for i, example in enumerate(examples)
    ]
    assert "in bfloat16" in run(*flags, "--dtype bfloat16")


def test_numbers_that_overflow_are_no_score(run, rows, tmp_path):
    """NaN is the lowest of no four: label 0 would win. And it is not JSON."""
    model = make_network()
    with torch.no_grad():
        model.transformer.ln_f.weight.fill_(3e38)  # finite
    write_model(tmp_path, model)
    examples = load_examples(rows)
    found = summarize(score(model, examples, CPU), examples)
    assert math.isnan(found["acc"]) and math.isnan(found["acc_norm"])
    losses = torch.ones(len(examples), 4)
    losses[-1, 3] = math.nan
    assert math.isnan(summarize(losses, examples)["acc"])  # one is enough
    flags = ["--model", tmp_path, "--data", rows, "--per-example", tmp_path / "out", "--dtype float32"]
    assert "not finite" in run(*flags, exit_code=1) and not (tmp_path / "out").exists()


def test_a_lack_of_memory_is_one_line(run, rows, model, tmp_path, monkeypatch):
    write_model(tmp_path, model)
    monkeypatch.setattr(GPT, "hidden", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB")))
    output = run("--model", tmp_path, "--data", rows, "--device cpu", exit_code=1)
    assert "Tried 2 GiB; " in output and "Traceback" not in output


def test_all_rows_are_downloaded_once_or_none(run, rows, tmp_path):
    path = tmp_path / "data" / "my rows.jsonl"
    assert "--data" in run("--model gpt2 --data", path, exit_code=1)
    download = ("--data", path, "--url", rows.as_uri())
    assert rows.as_uri() in run(*download, exit_code=1) and not path.exists()

    write_jsonl(rows, [ROW] * script.VAL_ROWS)
    assert "10042 rows" in run(*download)
    assert path.read_bytes() == rows.read_bytes()
    rows.unlink()
    assert "10042 rows" in run(*download)  # what is there is not fetched again
