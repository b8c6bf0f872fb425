"""infer.py as people call it: samples, streams, prompts from anywhere, and messages for what cannot be."""

import json
import os
import sys
import time
from dataclasses import replace

import pytest
import torch
from helpers import write_tiny_model

import infer
from model import GPT, GPTConfig
from system import cli, precision
from system.cli import UserError
from tokens import tokenizer
from training import checkpoint
from training.presets import PRESETS


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return write_tiny_model(tmp_path_factory.mktemp("infer") / "run", block_size=32, n_embd=32)


@pytest.fixture
def call(monkeypatch, capsys):
    """call(model, "Hi", ...) -> what infer.py prints, without the seconds that a new process takes to import torch."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["infer.py", *map(str, args)])
        monkeypatch.setattr(sys.stdout, "reconfigure", lambda **_: None, raising=False)
        infer.main()
        return capsys.readouterr().out

    return run


def test_help_is_quick(run_script):
    best = 9.0
    for _ in range(3):
        start = time.monotonic()
        assert "--max-new-tokens" in run_script("infer.py", "--help").stdout
        best = min(best, time.monotonic() - start)
    assert best < 1


def test_greedy_tokens_are_those_of_transformers(call, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(n_positions=64, n_layer=2, n_head=2, n_embd=32, initializer_range=0.2)
    theirs = GPT2LMHeadModel(config).eval()
    theirs.save_pretrained(tmp_path / "hf")
    idx = torch.tensor([tokenizer.encoding().encode("Hello, I'm a language model,")])
    expected = theirs.generate(idx, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)
    how = ("--temperature", 0, "--max-new-tokens", 30, "--dtype", "float32", "--json")
    out = json.loads(call(tmp_path / "hf", "Hello, I'm a language model,", *how))
    assert out["tokens"] == expected[0, idx.size(1) :].tolist()
    assert out["text"] == tokenizer.encoding().decode(out["tokens"])


def test_samples_seeds_and_sources_of_the_prompt(run_script, call, run_dir, tmp_path):
    (tmp_path / "prompt.txt").write_text("Hello there")
    how = ("--num-samples", 3, "--max-new-tokens", 40, "--json")  # outgrows the context of 32
    first = call(run_dir, "Hello there", *how)
    rows = [json.loads(line) for line in first.splitlines()]
    assert [len(r["tokens"]) for r in rows] == [40] * 3
    assert len({r["text"] for r in rows}) == 3
    assert run_script("infer.py", run_dir / "model_00007.pt", "-", *how, input="Hello there\n").stdout == first
    assert call(run_dir, "--file", tmp_path / "prompt.txt", *how) == first
    assert call(run_dir, "Hello there", *how, "--seed", 43) != first


def test_plain_output(call, run_dir):
    out = call(run_dir, "Hi", "--num-samples", 2, "--max-new-tokens", 4)
    assert out.startswith("--- sample 1\nHi") and "\n--- sample 2\nHi" in out
    one = call(run_dir, "\x1b[2JHi", "--max-new-tokens", 4)
    assert one.startswith("\ufffd[2JHi") and "\x1b" not in one
    assert call(run_dir, "--max-new-tokens", 4, "--top-p", 0.9).strip()  # an empty prompt


def test_a_character_that_spans_tokens_is_written_whole(capsys):
    text = "naïve 🙂 你好"
    ids = tokenizer.encoding().encode(text)
    assert any("\ufffd" in tokenizer.encoding().decode([i]) for i in ids)
    infer.write_stream("> ", iter(ids))
    assert capsys.readouterr().out == f"> {text}\n"
    infer.write_stream("", iter(ids[:-1]))  # ends inside a character, if its last token is half of one
    assert capsys.readouterr().out.endswith("\n")


def test_streams_as_it_goes(capsys):
    def ids():
        for i in tokenizer.encoding().encode("one two three"):
            yield i
            seen.append(capsys.readouterr().out)

    seen: list[str] = []
    infer.write_stream("zero ", ids())
    assert seen == ["zero one", " two", " three"]


def test_stops_where_the_document_ends():
    steps = [torch.tensor(s) for s in ([1, 2], [tokenizer.EOT, 3], [4, tokenizer.EOT], [5, 6])]
    assert list(infer.until_eot(iter(steps), True)) == [[1, 2], [None, 3]]
    assert len(list(infer.until_eot(iter(steps), False))) == 4


def test_special_tokens_in_a_prompt_are_text_unless_allowed():
    assert infer.encode("<|endoftext|>", True) == [tokenizer.EOT]
    assert tokenizer.EOT not in infer.encode("<|endoftext|>", False)
    assert infer.encode("", False) == [tokenizer.EOT]


def test_bfloat16_runs(call, run_dir):
    assert len(json.loads(call(run_dir, "Hi", "--dtype", "bfloat16", "--max-new-tokens", 8, "--json"))["tokens"]) == 8


@pytest.mark.parametrize("gain, chosen", [(0.5, "float32"), (0.9, "bfloat16"), (1.5, "bfloat16")])
def test_a_cpu_samples_in_bfloat16_unless_float32_clearly_wins(call, run_dir, monkeypatch, gain, chosen):
    """Measured for as many rows as there are samples, packed as they are for sampling."""
    asked, seen, prepare = [], [], infer.prepare
    monkeypatch.setattr(precision, "supported_dtypes", lambda device: [torch.bfloat16, torch.float32])
    monkeypatch.setattr(precision, "bfloat16_speedup", lambda *how: asked.append((how[0], how[-1])) or gain)
    monkeypatch.setattr(infer, "prepare", lambda m, device, dtype: seen.append(dtype) or prepare(m, device, dtype))
    call(run_dir, "Hi", "--num-samples", 3, "--max-new-tokens", 2)
    call(run_dir, "Hi", "--max-new-tokens", 2, "--dtype", "float32")
    assert seen == [getattr(torch, chosen), torch.float32] and asked == [(3, infer.packed)]
    monkeypatch.setattr(precision, "supported_dtypes", lambda device: [torch.float16, torch.float32])
    assert infer.fastest_dtype(torch.device("cuda"), 1) == torch.float16 and len(asked) == 1  # a GPU is not timed


def test_bad_input(call, run_dir, tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    other = GPT(GPTConfig(block_size=16, vocab_size=256, n_layer=1, n_head=1, n_embd=8))
    checkpoint.write(tmp_path / "model_00001.pt", checkpoint.model_file(other, 1))
    (tmp_path / "empty").mkdir()
    for args, says in [
        ((run_dir, "word " * 40), "41 tokens, but the context of .* is 32"),
        ((run_dir, "Hi", "--top-p", 0), "--top-p 0.*: must be above 0, at most 1"),
        ((tmp_path / "model_00001.pt", "Hi"), "a vocabulary of 256 tokens, fewer than GPT-2's"),
        ((run_dir, "Hi", "--temperature", -1), "--temperature -1"),
        ((run_dir, "Hi", "--max-new-tokens", 0), "--max-new-tokens 0"),
        ((run_dir, "Hi", "--top-k", -1), "--top-k -1"),
        ((tmp_path / "none.pt", "Hi"), "none.pt"),
        ((tmp_path / "empty", "Hi"), "checkpoint"),
        ((run_dir, "Hi", "--file", tmp_path / "x"), "--file"),
        ((run_dir, "--file", tmp_path / "x"), "cannot read"),
        ((run_dir, "--file", tmp_path / "latin"), "UTF-8"),
    ]:
        with pytest.raises(UserError, match=says):
            call(*args)


@pytest.mark.parametrize("running, spins", [(1, True), (os.cpu_count() + 1, False)])
def test_threads_spin_only_on_an_idle_machine(running, spins, monkeypatch, tmp_path):
    monkeypatch.setattr(os, "environ", {})
    (tmp_path / "loadavg").write_text(f"0.50 0.60 0.70 {running}/345 6789\n")
    cli.set_omp_wait_policy(load=str(tmp_path / "loadavg"))
    assert os.environ == {"OMP_WAIT_POLICY": "PASSIVE"}  # training sleeps
    os.environ.clear()
    cli.set_omp_wait_policy(brief=True, load=str(tmp_path / "loadavg"))
    assert ("GOMP_SPINCOUNT" in os.environ) == spins
    monkeypatch.setattr(os, "environ", {"OMP_WAIT_POLICY": "ACTIVE"})
    cli.set_omp_wait_policy(brief=True)
    assert os.environ == {"OMP_WAIT_POLICY": "ACTIVE"}  # what a user has set stays


def test_bfloat16_weights_leave_positions_exact():
    """Angles of rope reach a thousand radians, where bfloat16 has steps of 4."""
    torch.manual_seed(0)
    config = replace(PRESETS["speedrun-124m"].model, vocab_size=97, n_layer=2, n_head=2, n_embd=128)
    model, idx = GPT(config).eval(), torch.randint(97, (2, 1000))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
        exact = model(idx)[0]
        error = (infer.prepare(model, torch.device("cpu"), torch.bfloat16)(idx)[0].float() - exact).abs().mean()
    assert error < 0.03 * exact.std()
