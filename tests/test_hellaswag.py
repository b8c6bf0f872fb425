"""Scores equal a plain scorer that takes one ending at a time; ranks, crops and broken files are handled."""

import json
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
from system.cli import UserError
from system.distributed import Runtime
from tokens import tokenizer
from training import checkpoint

CPU = torch.device("cpu")


@pytest.fixture
def main(monkeypatch, capsys):
    """main("--model", path, ...): hellaswag.py in this process; returns what it printed."""

    def call(*args):
        monkeypatch.setattr(sys, "argv", ["hellaswag.py", *map(str, args)])
        hellaswag.main()
        return capsys.readouterr().out

    return call


@pytest.fixture
def refuses(main):
    """refuses("--model", path, ..., says=["part", "of the message"])"""

    def call(*args, says=()):
        with pytest.raises(UserError) as e:
            main(*args)
        for s in says:
            assert s in str(e.value), f"{s!r} not in: {e.value}"
        return str(e.value)

    return call


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=256, vocab_size=50304, n_layer=2, n_head=2, n_embd=32))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


@torch.no_grad()
def oracle(model, rows) -> torch.Tensor:
    """Loss of every token of every ending, one row at a time, float32, from the raw text: (n, 4) sums and means."""
    enc, out = tokenizer.encoding(), []
    for row in rows:
        ctx = enc.encode_ordinary(row["ctx"])
        for ending in row["endings"]:
            tail = enc.encode_ordinary(" " + ending)
            idx = torch.tensor([ctx + tail])
            loss = F.cross_entropy(model(idx[:, :-1])[0][0], idx[0, 1:], reduction="none")[-len(tail) :]
            out.append([loss.sum(), loss.mean()])
    return torch.tensor(out).view(-1, 4, 2)


def compare(model, path, limit=0):
    rows = [json.loads(line) for line in path.read_text().splitlines()][: limit or None]
    examples = hellaswag_eval.load_examples(path, limit)
    losses, truth = hellaswag_eval.score(model, examples, CPU), oracle(model, rows)
    torch.testing.assert_close(losses, truth[..., 0], atol=1e-3, rtol=1e-5)
    units = torch.tensor([e.units for e in examples])
    assert torch.equal(losses.argmin(1), truth[..., 0].argmin(1))  # row for row
    assert torch.equal((losses / units).argmin(1), truth[..., 1].argmin(1))
    label = torch.tensor([int(r["label"]) for r in rows])
    result = hellaswag.evaluate(model, examples, CPU)
    assert result["n"] == len(rows)
    assert result["acc"] == pytest.approx((truth[..., 0].argmin(1) == label).float().mean().item())
    p = (truth[..., 1].argmin(1) == label).double().mean().item()
    assert result["acc_norm"] == pytest.approx(p)
    assert result["stderr"] == pytest.approx((p * (1 - p) / (len(rows) - 1)) ** 0.5)


def test_predictions_equal_the_plain_scorer(model, tmp_path):
    compare(model, write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(40)))


def test_predictions_equal_the_plain_scorer_on_real_rows(model, shared_data):
    compare(model, shared_data / "hellaswag_val_1k.jsonl", limit=40)


def test_modern_options_and_bfloat16(model, tmp_path):
    path = write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(24))
    examples = hellaswag_eval.load_examples(path)
    sizes = {"block_size": 256, "vocab_size": 50304, "n_layer": 2, "n_head": 2, "n_embd": 32}
    rope = GPT(GPTConfig(**sizes, tied_head=False, positions="rope", norm="rmsnorm", qk_norm=True))
    truth = oracle(rope, make_hellaswag_rows(24))[..., 0]
    torch.testing.assert_close(hellaswag_eval.score(rope, examples, CPU), truth, atol=1e-3, rtol=1e-5)
    half = hellaswag_eval.score(model, examples, CPU, Runtime(CPU, torch.bfloat16))
    torch.testing.assert_close(half, hellaswag_eval.score(model, examples, CPU), atol=0.3, rtol=0.02)


def test_ranks_share_the_work_exactly(model, tmp_path):
    examples = hellaswag_eval.load_examples(write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(37)))

    class Rank(Runtime):
        def all_reduce(self, tensor, op="sum"):
            parts.append(tensor.clone())
            return tensor

    whole = hellaswag_eval.score(model, examples, CPU)
    for world_size in (2, 3, 50):  # 50: some ranks have nothing to do, and still reduce
        parts: list[torch.Tensor] = []
        for rank in range(world_size):
            hellaswag_eval.score(model, examples, CPU, Rank(CPU, torch.float32, rank, rank, world_size))
        assert len(parts) == world_size
        assert torch.equal(sum(parts), whole)


def test_shapes_are_few_and_batches_keep_to_their_budget():
    g, rows = torch.Generator().manual_seed(0), []
    for _ in range(2000):
        n = torch.randint(1, 60, (5,), generator=g).tolist()
        rows.append(hellaswag_eval.Example([1] * n[0], [[2] * k for k in n[1:]], n[1:], 0))
    batches = hellaswag.plan_batches(rows, 256, 4096)
    assert sorted(row.index for batch in batches for row in batch) == list(range(2000))
    tokens, _, targets = zip(*(hellaswag.make_batch(batch, rows) for batch in batches), strict=True)
    assert all(t[0].numel() <= 4096 for t in tokens)
    assert len({t.shape for t in tokens}) < 50
    assert sum(t.numel() for t in targets) == sum(len(e) for r in rows for e in r.endings)


def test_a_long_context_loses_its_beginning(tmp_path):
    torch.manual_seed(0)
    small = GPT(GPTConfig(block_size=32, vocab_size=50304, n_layer=1, n_head=2, n_embd=32))
    row = make_hellaswag_rows(1)[0] | {"ctx": " dog" * 60}
    row["endings"] = [" ".join(["cat"] * n) for n in (3, 5, 7, 9)]
    examples = hellaswag_eval.load_examples(write_jsonl(tmp_path / "rows.jsonl", [row]))
    longest = max(len(e) for e in examples[0].endings)
    kept = row | {"ctx": " dog" * (33 - longest)}
    torch.testing.assert_close(hellaswag_eval.score(small, examples, CPU), oracle(small, [kept])[..., 0], atol=1e-3, rtol=0)
    long = hellaswag_eval.load_examples(write_jsonl(tmp_path / "rows.jsonl", [row | {"endings": ["cat " * 50] * 4}]))
    with pytest.raises(UserError, match="the model reads 32"):
        hellaswag_eval.score(small, long, CPU)


def test_lm_eval_style(tmp_path):
    row = {"activity_label": "Cooking", "ctx_a": "Heat the pan. [title] Add [step] oil.", "ctx_b": "a man"}
    row |= {"endings": ["stirs [substeps] it.", "naïve runs.", "sits.", "goes  home."], "label": "2"}
    (e,) = hellaswag_eval.load_examples(write_jsonl(tmp_path / "rows.jsonl", [row]), style="lm-eval")
    decode = tokenizer.encoding().decode
    assert decode(e.ctx) == "Cooking: Heat the pan.. Add oil. A man"
    assert [decode(t) for t in e.endings] == [" stirs it.", " naïve runs.", " sits.", " goes home."]
    assert e.units == [9, 11, 5, 10] and e.label == 2
    del row["ctx_a"]
    with pytest.raises(UserError, match="ctx_a"):
        hellaswag_eval.load_examples(write_jsonl(tmp_path / "rows.jsonl", [row]), style="lm-eval")


def test_the_lm_evaluation_harness_agrees_on_every_row(shared_data, tmp_path, monkeypatch):
    """The exported folder under lm-eval (pip install "lm-eval[hf]") and our scorer on the same real rows."""
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.tasks import TaskManager

    from training.convert import save_hf

    monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
    real = [json.loads(line) for line in (shared_data / "hellaswag_val_1k.jsonl").read_text().splitlines()[:100]]
    halves = [row["ctx"].rpartition(". ") for row in real]  # these rows carry the context in one piece only
    for row, (a, dot, b) in zip(real, halves, strict=True):
        row |= {"ctx_a": a + dot.strip() or b, "ctx_b": b if a else ""}
    rows = write_jsonl(tmp_path / "rows.jsonl", real)
    task = tmp_path / "task"
    task.mkdir()
    shipped = Path(lm_eval.__file__).parent / "tasks/hellaswag/hellaswag.yaml"
    local = {"dataset_path": "json", "dataset_name": None, "dataset_kwargs": {"data_files": {"validation": str(rows)}}}
    local |= {"task": "hellaswag_local", "training_split": None, "include": str(shipped)}
    (task / "hellaswag_local.yaml").write_text(json.dumps(local))  # JSON is YAML
    torch.manual_seed(0)
    model = GPT(GPTConfig(block_size=256, n_layer=2, n_head=2, n_embd=32)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    save_hf(model, tmp_path / "hf")
    found = lm_eval.simple_evaluate(
        "hf", f"pretrained={tmp_path / 'hf'},dtype=float32", tasks=["hellaswag_local"], device="cpu", batch_size=8,
        task_manager=TaskManager(include_path=str(task)), bootstrap_iters=0,
    )  # fmt: skip
    examples = hellaswag_eval.load_examples(rows, style="lm-eval")
    losses = hellaswag_eval.score(model, examples, CPU)
    for sample in found["samples"]["hellaswag_local"]:
        theirs = torch.tensor([-float(r[0][0]) for r in sample["resps"]])
        torch.testing.assert_close(losses[sample["doc_id"]].float(), theirs, atol=2e-3, rtol=1e-4)
    result, theirs = hellaswag.evaluate(model, examples, CPU), found["results"]["hellaswag_local"]
    assert (result["acc"], result["acc_norm"], result["n"]) == (theirs["acc,none"], theirs["acc_norm,none"], 100)


def test_command_line(run_script, refuses, model, tmp_path):
    data = write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(20))
    run = tmp_path / "run"
    run.mkdir()
    checkpoint.write(run / "model_00001.pt", checkpoint.model_file(model, 1))
    how = ("-m", run, "-d", "cpu", "--data", data, "--limit", 16, "--dtype", "float32")  # as in build-nanogpt
    last = run_script("hellaswag.py", *how, "--per-example", tmp_path / "out.jsonl").stdout.splitlines()[-1]
    r = hellaswag.evaluate(model, hellaswag_eval.load_examples(data, 16), CPU)
    assert last == f"hellaswag acc {r['acc']:.4f} acc_norm {r['acc_norm']:.4f} n 16"
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert len(rows) == 16 and sum(r["pred"] == r["label"] for r in rows) == round(r["acc"] * 16)
    assert all(r["losses"].index(min(r["losses"])) == r["pred"] for r in rows)
    refuses("--model", run, "--data", tmp_path / "none", says=["none", "python hellaswag.py"])
    few = GPT(GPTConfig(block_size=256, vocab_size=50256, n_layer=1, n_head=2, n_embd=16))
    checkpoint.write(tmp_path / "few.pt", checkpoint.model_file(few, 1))
    refuses("--model", tmp_path / "few.pt", "--data", data, says=["50256 tokens, fewer than GPT-2's"])
    data.write_text(data.read_text() + "{")
    refuses("--model", run, "--data", data, says=["line 21", "JSON"])


def test_a_run_without_readable_rows_trains_without_them(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert hellaswag.examples_at_hand("", GPTConfig()) == []
    assert "HellaSwag is off: no data/hellaswag" in capsys.readouterr().out
    data = str(write_jsonl(tmp_path / "rows.jsonl", make_hellaswag_rows(3)))
    assert len(hellaswag.examples_at_hand(data, GPTConfig())) == 3
    assert hellaswag.examples_at_hand(data, GPTConfig(vocab_size=256)) == []
    assert hellaswag.examples_at_hand(data, GPTConfig(block_size=2)) == []
    said = capsys.readouterr().out
    assert "the model has 256 tokens" in said and "but the model reads 2" in said


@pytest.fixture
def server():
    """A web server on loopback: server.body is what it gives, server.breaks how many answers stop half-way."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            web.asked += 1
            self.send_response(200)
            self.send_header("Content-Length", str(len(web.body)))
            self.end_headers()
            self.wfile.write(web.body[: len(web.body) // (2 if web.asked <= web.breaks else 1)])

        def log_message(self, *_):
            pass

    web = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    web.body, web.breaks, web.asked = b"", 0, 0
    web.url = f"http://127.0.0.1:{web.server_port}/hellaswag_val.jsonl"
    threading.Thread(target=web.serve_forever, daemon=True).start()
    yield web
    web.shutdown()
    web.server_close()


def test_download_is_whole_and_counts_the_rows(server, main, refuses, tmp_path):
    row = json.dumps({"ctx": "a", "endings": ["b"] * 4, "label": 0}) + "\n"
    server.body, server.breaks, path = row.encode() * hellaswag.VAL_ROWS, 1, tmp_path / "data" / "my rows.jsonl"
    command = shlex.split(refuses("--model", "gpt2", "--data", path).rpartition(": python hellaswag.py ")[2])
    refuses(*command, "--url", server.url, says=["cannot download", "same command"])
    assert not path.exists()
    assert "10042 rows" in main(*command, "--url", server.url)
    assert path.read_bytes() == server.body and server.asked == 2
    main("--data", path, "--url", server.url)
    assert server.asked == 2  # what is there is not fetched again
    server.body = row.encode() * 5
    refuses("--data", tmp_path / "few", "--url", server.url, says=["5 rows", "10042"])
    refuses("--data", tmp_path / "few", "--url", "http://127.0.0.1:9/x", says=["download", "network"])
    path.write_text("")
    assert "remove it and run: python hellaswag.py" in refuses("--model", "gpt2", "--data", path)


@pytest.mark.parametrize(
    "change",
    [{"ctx": None}, {"ctx": " "}, {"endings": ["a", "b", "c"]}, {"endings": ["a", "b", "c", ""]}, {"label": 4}],
)
def test_rows_with_missing_fields_name_line_and_field(tmp_path, change):
    rows = make_hellaswag_rows(3)
    for second in (rows[1] | change, {k: v for k, v in rows[1].items() if k not in change}):
        with pytest.raises(UserError, match=f"line 2: field '{min(change)}'"):
            hellaswag_eval.load_examples(write_jsonl(tmp_path / "rows.jsonl", [rows[0], second]))
