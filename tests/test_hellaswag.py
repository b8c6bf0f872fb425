"""hellaswag.py and its scorer, training/hellaswag_eval.py: the scores are those of a plain scorer that reads one ending
at a time, and those of the LM Evaluation Harness, on one rank or several."""

import json
import os
import shlex
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from helpers import make_hellaswag_rows, write_jsonl

import hellaswag
from model import GPT, GPTConfig
from system import machine
from system.cli import UserError
from system.distributed import Runtime
from tokens import tokenizer
from training import checkpoint, hellaswag_eval
from training.convert import save_hf
from training.hellaswag_eval import Example

CPU = torch.device("cpu")
SIZES = {"block_size": 256, "vocab_size": 50304, "n_layer": 2, "n_head": 2, "n_embd": 32}


@pytest.fixture
def run_main(monkeypatch, capsys):
    """run_main("--model", path, ...) -> what hellaswag.py prints, run in this process."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["hellaswag.py", *map(str, args)])
        hellaswag.main()
        return capsys.readouterr().out

    return run


def make_model(**options) -> GPT:
    """A tiny model with random weights, so large that its choices are not close calls, which rounding could flip."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(**{**SIZES, **options})).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


@pytest.fixture(scope="module")
def model():
    return make_model()


# ------------------------------------------------------------------------- the scores


@torch.no_grad()
def score_plainly(model, rows) -> tuple[torch.Tensor, torch.Tensor]:
    """Loss of each ending, summed and mean over its tokens, each (n, 4): one ending at a time, from the raw text."""
    encode = tokenizer.encoding().encode_ordinary
    sums, means = [], []
    for row in rows:
        context = encode(row["ctx"])
        for text in row["endings"]:
            ending = encode(" " + text)
            ids = torch.tensor([context + ending])  # (1, T)
            logits, _ = model(ids[:, :-1])
            token_losses = F.cross_entropy(logits[0], ids[0, 1:], reduction="none")  # (T - 1,)
            ending_losses = token_losses[-len(ending) :]
            sums.append(ending_losses.sum())
            means.append(ending_losses.mean())
    return torch.tensor(sums).view(-1, 4), torch.tensor(means).view(-1, 4)


@pytest.mark.parametrize("options", [{}, {"tied_head": False, "positions": "rope", "norm": "rmsnorm", "qk_norm": True}])
def test_scores_equal_the_plain_scorer(options, tmp_path, request):
    rows = make_hellaswag_rows(24)
    real_rows = Path(__file__).parents[2] / "shared/data/hellaswag_val_1k.jsonl"
    if real_rows.exists():  # where a checkout has them beside it
        rows += [json.loads(line) for line in real_rows.read_text().splitlines()[:16]]
    examples = hellaswag_eval.load_examples(write_jsonl(tmp_path / "rows.jsonl", rows))
    model = make_model(**options)
    sums, means = score_plainly(model, rows)

    losses = hellaswag_eval.score(model, examples, CPU)
    result = hellaswag_eval.evaluate(model, examples, CPU)

    # Losses to rounding; predictions row for row.
    torch.testing.assert_close(losses, sums, atol=1e-3, rtol=1e-5)
    assert torch.equal(losses.argmin(1), sums.argmin(1))
    assert torch.equal(hellaswag_eval.normalize(losses, examples).argmin(1), means.argmin(1))
    labels = torch.tensor([int(row["label"]) for row in rows])
    acc_norm = (means.argmin(1) == labels).double().mean().item()
    assert result["acc"] == (sums.argmin(1) == labels).double().mean().item()
    assert result["acc_norm"] == acc_norm
    assert result["stderr"] == pytest.approx((acc_norm * (1 - acc_norm) / (len(rows) - 1)) ** 0.5)
    assert result["n"] == len(rows)


def test_ranks_share_the_work_exactly(model, tmp_path):
    examples = hellaswag_eval.load_examples(write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(37)))
    one_rank = hellaswag_eval.score(model, examples, CPU)
    contributions: list[torch.Tensor] = []

    class LoneRank(Runtime):
        """A rank whose collectives return at once; what it contributes is kept."""

        def all_reduce(self, tensor, op="sum"):
            contributions.append(tensor.clone())
            return tensor

    for world_size in (2, 3, 50):  # of 50 ranks some have nothing to score, and still reduce
        contributions.clear()
        for rank in range(world_size):
            hellaswag_eval.score(model, examples, CPU, LoneRank(CPU, torch.float32, rank=rank, world_size=world_size))
        assert len(contributions) == world_size
        assert torch.equal(sum(contributions), one_rank)


def test_a_long_context_loses_its_beginning(tmp_path):
    small = make_model(block_size=32)
    row = make_hellaswag_rows(1)[0] | {"ctx": " dog" * 60, "endings": ["cat " * n for n in (3, 5, 7, 9)]}
    examples = hellaswag_eval.load_examples(write_jsonl(tmp_path / "rows.jsonl", [row]))

    losses = hellaswag_eval.score(small, examples, CPU)

    # Each " dog" is one token. With the longest ending, whose last token is not read, they fill the 32 positions.
    longest = max(len(ending) for ending in examples[0].endings)
    sums, _ = score_plainly(small, [row | {"ctx": " dog" * (33 - longest)}])
    torch.testing.assert_close(losses, sums, atol=1e-3, rtol=1e-5)


def harness_example(requests: list[list[str]], label: int) -> Example:
    """An Example with the tokens that the LM Evaluation Harness scores, from its four [context, ending] texts. It
    tokenizes both as one text, and takes what follows the context's tokens as the ending."""
    encode = tokenizer.encoding().encode_ordinary
    endings = []
    for text, ending in requests:
        context = encode(text.rstrip())
        endings.append(encode(text + ending)[len(context) :])
    return Example(context, endings, label)


def test_the_lm_evaluation_harness_agrees_on_an_exported_model(shared_data, tmp_path, monkeypatch):
    """The real harness (pip install "lm-eval[hf]") evaluates the exported folder, as a user would for a score that is
    comparable with published ones. It cleans the texts of a row first, so it scores other tokens than hellaswag.py; our
    scorer finds the same losses and the same accuracy for those tokens."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    model = make_model(vocab_size=50257)
    save_hf(model, tmp_path / "hf")

    # Real rows. The harness reads a context in two pieces, ctx_a and ctx_b, and these rows have it in one: split it.
    rows = [json.loads(line) for line in (shared_data / "hellaswag_val_1k.jsonl").read_text().splitlines()[:100]]
    for row in rows:
        sentences, dot, rest = row["ctx"].rpartition(". ")
        row["ctx_a"] = sentences + "." if dot else rest
        row["ctx_b"] = rest if dot else ""
    data = write_jsonl(tmp_path / "rows.jsonl", rows)

    # The task is the harness's own; only its data come from this file instead of the Hub.
    shipped_task = Path(lm_eval.__file__).parent / "tasks/hellaswag/hellaswag.yaml"
    local_task = {
        "task": "hellaswag_local",
        "include": str(shipped_task),
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": {"validation": str(data)}},
        "training_split": None,
    }
    (tmp_path / "task").mkdir()
    (tmp_path / "task" / "hellaswag_local.yaml").write_text(json.dumps(local_task))  # JSON is YAML

    found = lm_eval.simple_evaluate(
        "hf",
        f"pretrained={tmp_path / 'hf'},dtype=float32",
        tasks=["hellaswag_local"],
        device="cpu",
        batch_size=8,
        task_manager=TaskManager(include_path=str(tmp_path / "task")),
        bootstrap_iters=0,
    )

    # The same tokens in our scorer: `arguments` are the texts that the harness scored, `resps` its log-likelihoods.
    samples = found["samples"]["hellaswag_local"]
    assert len(samples) == 100
    examples = [harness_example(sample["arguments"], int(sample["target"])) for sample in samples]
    losses = hellaswag_eval.score(model, examples, CPU)
    harness_losses = torch.tensor([[-float(response[0][0]) for response in sample["resps"]] for sample in samples])
    torch.testing.assert_close(losses, harness_losses, atol=2e-3, rtol=1e-4)
    result = hellaswag_eval.summarize(losses, examples)
    assert result["acc"] == found["results"]["hellaswag_local"]["acc,none"]


# ------------------------------------------------------------------------- batches


def test_an_example_becomes_the_prefix_tree_of_the_picture():
    """The picture is in the docstring of training/hellaswag_eval.py; here its words are numbers."""
    A, man, sits, down, now, on, a, chair, up, to, sing = range(101, 112)
    examples = [Example([A, man, sits], [[down, now], [on, a, chair], [up], [to, sing]], 0)]

    ((tree,),) = hellaswag_eval.plan_batches(examples, block_size=16, max_positions=512)
    batch = hellaswag_eval.make_batch([tree], examples)

    assert batch.ids.tolist() == [[A, man, sits, down, on, a, to, 0]]
    assert batch.positions.tolist() == [[0, 1, 2, 3, 3, 4, 3, 0]]
    assert batch.parts.tolist() == [[0, 0, 0, 1, 2, 2, 4, 5]]
    assert batch.rows.tolist() == [0] * 8
    predicted_by = [sits, down, sits, on, a, sits, sits, to]
    assert batch.ids[0, batch.columns].tolist() == predicted_by
    assert batch.targets.tolist() == [down, now, on, a, chair, up, to, sing]
    assert batch.ending_numbers.tolist() == [0, 0, 1, 1, 1, 2, 3, 3]
    assert hellaswag_eval.tree_mask(batch.parts)[0, 0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0],
        [1, 1, 1, 0, 1, 0, 0, 0],
        [1, 1, 1, 0, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0, 1, 0],
        [1, 1, 1, 0, 0, 0, 0, 1],
    ]


def test_shapes_are_few_and_batches_keep_to_their_budget():
    generator = torch.Generator().manual_seed(0)
    examples = []
    for _ in range(2000):
        context_length, *ending_lengths = torch.randint(1, 60, (5,), generator=generator).tolist()
        examples.append(Example([1] * context_length, [[2] * n for n in ending_lengths], 0))

    plan = hellaswag_eval.plan_batches(examples, block_size=256, max_positions=4096)
    batches = [hellaswag_eval.make_batch(trees, examples) for trees in plan]

    assert sorted(tree.index for trees in plan for tree in trees) == list(range(2000))
    assert all(batch.ids.numel() <= 4096 for batch in batches)
    assert len({batch.ids.shape for batch in batches}) < 50
    ending_tokens = sum(len(ending) for example in examples for ending in example.endings)
    assert sum(batch.targets.numel() for batch in batches) == ending_tokens


# ------------------------------------------------------------------------- files of rows


def test_a_run_without_readable_rows_trains_without_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)  # where nothing has been downloaded
    data = str(write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(3)))

    assert hellaswag_eval.available_examples("", GPTConfig()) == []
    assert "HellaSwag is off: no data/hellaswag" in capsys.readouterr().out

    assert len(hellaswag_eval.available_examples(data, GPTConfig())) == 3
    assert capsys.readouterr().out == ""

    assert hellaswag_eval.available_examples(data, GPTConfig(vocab_size=256)) == []
    assert "HellaSwag is off: the model has 256 tokens" in capsys.readouterr().out

    assert hellaswag_eval.available_examples(data, GPTConfig(block_size=2)) == []
    assert "but the model reads 2" in capsys.readouterr().out


@pytest.mark.parametrize("change", [
    {"ctx": None}, {"ctx": " "}, {"endings": ["a", "b", "c"]}, {"endings": ["a", "b", "c", ""]}, {"endings": "abcd"},
    {"endings": 4}, {"label": 4},
])  # fmt: skip
def test_a_bad_row_is_refused(change, tmp_path):
    good, row, _ = make_hellaswag_rows(3)
    (field,) = change
    without_field = {name: value for name, value in row.items() if name != field}
    for bad in (row | change, without_field, [row]):
        path = write_jsonl(tmp_path / "rows.jsonl", [good, bad])
        with pytest.raises(UserError, match="line 2 "):
            hellaswag_eval.load_examples(path)


# ------------------------------------------------------------------------- the command line


def test_command_line_reports_the_score_and_writes_each_row(run_in_fork, model, tmp_path):
    data = write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(20))
    run = tmp_path / "run"
    run.mkdir()
    checkpoint.write(run / "model_00001.pt", checkpoint.model_file(model, 1))
    expected = hellaswag_eval.evaluate(model, hellaswag_eval.load_examples(data, 16), CPU)

    # -m and -d are the short flags of build-nanogpt's hellaswag.py.
    flags = ("-m", run, "-d", "cpu", "--data", data, "--limit", 16, "--dtype", "float32")
    done = run_in_fork("hellaswag.py", *flags, "--per-example", tmp_path / "out.jsonl")

    last_line = done.stdout.splitlines()[-1]
    assert last_line == f"hellaswag acc {expected['acc']:.4f} acc_norm {expected['acc_norm']:.4f} n 16"
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["index"] for row in rows] == list(range(16))
    assert sum(row["pred"] == row["label"] for row in rows) == round(expected["acc"] * 16)
    assert sum(row["pred_norm"] == row["label"] for row in rows) == round(expected["acc_norm"] * 16)
    assert all(row["losses"].index(min(row["losses"])) == row["pred"] for row in rows)
    assert all(row["losses_norm"].index(min(row["losses_norm"])) == row["pred_norm"] for row in rows)


def only_rank_1_lacks_bfloat16():
    """Runs in each rank's process before the script."""
    both = [torch.bfloat16, torch.float32]
    machine.supported_dtypes = lambda device: [torch.float32] if os.environ["RANK"] == "1" else both
    machine.bfloat16_speedup = lambda *shape: 4.0


def test_ranks_on_unlike_devices_score_in_one_precision(run_ranks, model, tmp_path):
    data = write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(6))
    checkpoint.write(tmp_path / "model.pt", checkpoint.model_file(model, 1))
    expected = hellaswag_eval.score(model, hellaswag_eval.load_examples(data), CPU)

    flags = ("--model", tmp_path / "model.pt", "--data", data, "--device", "cpu", "--per-example", tmp_path / "out")
    output = run_ranks(2, "hellaswag.py", *flags, prepare=only_rank_1_lacks_bfloat16)

    # bfloat16 would change the losses by about 1%.
    losses = torch.tensor([json.loads(line)["losses"] for line in (tmp_path / "out").read_text().splitlines()])
    torch.testing.assert_close(losses, expected, rtol=1e-5, atol=0)
    assert "examples/s in float32 on cpu" in output


def test_files_that_cannot_be_scored_are_refused(run_main, model, tmp_path):
    data = tmp_path / "rows.jsonl"
    for content, words in (("{", "line 1 "), ("[" * 10_000, "line 1 "), ("", "no rows"), ("\xff", "line 1 ")):
        data.write_bytes(content.encode("latin-1"))
        with pytest.raises(UserError, match=words):
            run_main("--model", "gpt2", "--data", data)

    write_jsonl(data, make_hellaswag_rows(2))
    for size, words in ({"vocab_size": 50256}, "50256 tokens"), ({"block_size": 2}, "the model reads 2"):
        checkpoint.write(tmp_path / "model.pt", checkpoint.model_file(make_model(**size), 1))
        with pytest.raises(UserError, match=words):
            run_main("--model", tmp_path / "model.pt", "--data", data)


# ------------------------------------------------------------------------- the download


@pytest.fixture
def server():
    """A web server on loopback. server.url is where it serves server.body; its first server.broken_answers answers stop
    half-way; server.request_count counts all."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            web.request_count += 1
            is_broken = web.request_count <= web.broken_answers
            self.send_response(200)
            self.send_header("Content-Length", str(len(web.body)))
            self.end_headers()
            self.wfile.write(web.body[: len(web.body) // 2] if is_broken else web.body)

        def log_message(self, *_):
            pass  # the default prints each request

    web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    web.body, web.broken_answers, web.request_count = b"", 0, 0
    web.url = f"http://127.0.0.1:{web.server_port}/hellaswag_val.jsonl"
    threading.Thread(target=web.serve_forever, daemon=True).start()
    yield web
    web.shutdown()
    web.server_close()


ONE_ROW = json.dumps({"ctx": "a", "endings": ["b"] * 4, "label": 0}).encode() + b"\n"


def test_the_command_of_the_error_downloads_all_rows(server, run_main, tmp_path):
    path = tmp_path / "data" / "my rows.jsonl"  # a space, which the command must quote
    server.body = ONE_ROW * hellaswag.VAL_ROWS
    server.broken_answers = 1

    # The error for missing rows names a command; the first time its download breaks off, and nothing is written.
    with pytest.raises(UserError) as error:
        run_main("--model", "gpt2", "--data", path)
    flags = shlex.split(str(error.value).rpartition(": python hellaswag.py ")[2])
    with pytest.raises(UserError, match="cannot download"):
        run_main(*flags, "--url", server.url)
    assert not path.exists()

    # The same command again. What is there is not fetched again.
    for _ in range(2):
        assert "10042 rows" in run_main(*flags, "--url", server.url)
        assert path.read_bytes() == server.body and server.request_count == 2


def test_a_download_that_is_not_the_data_set_is_refused(server, run_main, tmp_path):
    server.body = ONE_ROW * 5
    for url, words in ((server.url, "5 rows"), ("http://127.0.0.1:9/x", "download"), ("no url", "download")):
        with pytest.raises(UserError, match=words):
            run_main("--data", tmp_path / "few", "--url", url)
    assert not (tmp_path / "few").exists()
