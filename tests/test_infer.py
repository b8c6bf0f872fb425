"""infer.py as people call it: samples, streams, prompts."""

import io
import json
import shutil
from unittest.mock import Mock

import helpers
import pytest
import torch
from helpers import write_model, write_tiny_model
from networks import make_network

import infer
from checkpoints.open_model import open_model
from model import KVCache
from tokens import tokenizer

EOT = tokenizer.EOT


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run folder with a tiny model whose context is 32 tokens."""
    return write_tiny_model(tmp_path_factory.mktemp("infer") / "run", block_size=32, n_embd=32)


@pytest.fixture
def run_main(capsys):
    """run_main(model, "Hi", ...) -> (stdout, stderr) of infer.py, run in this process."""

    def run(*args, exit_code=0):
        assert helpers.run_main("infer.py", *args) == exit_code
        return capsys.readouterr()

    return run


# ------------------------------------------------------------------------- samples


def test_greedy_tokens_are_those_of_the_model(run_main, run_dir):
    """Which test_convert.py compares with those of transformers."""
    prompt, encoding = "Hello, I'm a language model,", tokenizer.encoding()
    ids = encoding.encode(prompt)
    expected = open_model(run_dir).generate(torch.tensor([ids]), 20, temperature=0)[0, len(ids) :].tolist()
    flags = "--temperature 0 --max-new-tokens 20 --dtype float32 --json"
    out = run_main(run_dir, prompt, flags).out
    assert json.loads(out) == {"prompt": prompt, "text": encoding.decode(expected), "tokens": expected}


def test_a_seed_gives_the_same_samples(monkeypatch, run_main, run_dir):
    """Also of a prompt from standard input, as Windows writes it."""
    # More tokens than the context of 32.
    flags = "--num-samples 3 --max-new-tokens 40 --json --dtype float32"
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbf Hello\r\nthere\r\n\r\n")))
    from_argument = run_main(run_dir, flags, " Hello\nthere\n").out
    from_stdin = run_main(run_dir / "model_00007.pt", "-", flags).out
    another_seed = run_main(run_dir, " Hello\nthere\n", flags, "--seed 43").out

    samples = [json.loads(line) for line in from_argument.splitlines()]
    assert [len(sample["tokens"]) for sample in samples] == [40] * 3
    assert len({sample["text"] for sample in samples}) == 3
    assert from_stdin == from_argument != another_seed


def test_a_checkpoint_with_a_lower_val_loss_is_named(run_main, run_dir, tmp_path):
    """By its path, beside the newest one, which is opened; not one that is gone, and not for a single file."""
    run = shutil.copytree(run_dir, tmp_path / "run")
    shutil.copy(run / "model_00007.pt", run / "model_00005.pt")
    (run / "metrics.jsonl").write_text("""\
{"step": 3, "val_loss": 3}
{"step": 5, "val_loss": 4}
{"step": 7, "val_loss": 5}
""")
    for path, is_named in ((run, True), (run / "model_00007.pt", False), (run_dir, False)):
        err = run_main(path, "Hi", "--max-new-tokens 1").err
        assert "step 7" in err and (str(run / "model_00005.pt") in err) == is_named


def test_prompts_are_text(run_main, run_dir):
    """A prompt cannot drive the terminal. An empty one starts a document."""
    flags = "--max-new-tokens 4 --dtype float32"
    for number, start in ((1, "\ufffd[2JHi"), (2, "--- sample 1\n\ufffd[2JHi")):
        out = run_main(run_dir, "\x1b[2JHi", "--num-samples", number, flags).out
        assert out.startswith(start) and "\x1b" not in out and out.count("--- sample") == number // 2 * 2
    assert run_main(run_dir, flags, "--", "-Hello").out.startswith("-Hello")
    # The token between documents is one token: a prompt of 32 of them fills the context.
    assert run_main(run_dir, "<|endoftext|>" * 32, flags).out.startswith("<|endoftext|>")
    for prompt, is_named in ((r"Q: a\nA:", True), ("Q: a\nA:", False)):
        printed = run_main(run_dir, prompt, flags)
        assert printed.out.startswith(prompt) and (r"$'...\n...'" in printed.err) == is_named
    assert run_main(run_dir, flags, "--top-p 1e-6").out == run_main(run_dir, flags, "--temperature 0").out != "\n"


# ------------------------------------------------------------------------- streams


def test_samples_end_each_where_they_end(capsys):
    """Or, after Ctrl-C, as far as they are."""

    def interrupt(steps):
        yield from steps
        raise KeyboardInterrupt

    steps = [[15496, 17250], [995, EOT]]
    infer.write_samples("> ", [*steps, [EOT, EOT]], as_json=False)
    with pytest.raises(KeyboardInterrupt):
        infer.write_samples("> ", interrupt([*steps, [0, EOT]]), as_json=False)
    infer.write_stream("> ", iter([15496, EOT, 612]))
    samples = "--- sample 1\n> Hello world{}\n--- sample 2\n> Hi\n"
    assert capsys.readouterr().out == samples.format("") + samples.format("!") + "> Hello\n"


def test_text_is_written_as_it_is_generated(capsys):
    """A character of several tokens at its end."""
    ids, printed = tokenizer.encoding().encode("one two 🦙 three"), []

    def generate_slowly():
        """Yields a token; what has been printed is noted when the next token is asked for."""
        for token in ids:
            yield token
            printed.append(capsys.readouterr().out)

    infer.write_stream("zero ", generate_slowly())
    pieces = [piece for piece in printed if piece]
    assert pieces == ["zero one", " two", " ", "🦙", " three"] and len(printed) > len(pieces)
    capsys.readouterr()
    infer.write_stream("", ids[:-2])  # ends inside a character
    assert capsys.readouterr().out == "one two \ufffd\n"


# ------------------------------------------------------------------------- memory, precision and speed


def test_a_lack_of_memory_is_one_line(run_main, run_dir, monkeypatch):
    error = RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 73728000000 bytes")
    monkeypatch.setattr(KVCache, "append", Mock(side_effect=error))
    message = run_main(run_dir, "Hi", "--num-samples 500", exit_code=1).err
    assert "73728000000" in message and "--num-samples" in message and "--max-new-tokens" in message
    assert "Traceback" not in message


def test_a_network_beyond_float16_is_named(run_main, tmp_path):
    model = make_network()
    with torch.no_grad():
        model.transformer.ln_f.weight.fill_(60_000)  # finite in float16, but not the logits
    write_model(tmp_path, model)
    message = run_main(tmp_path, "Hi", "--dtype float16 --device cpu", exit_code=1).err
    assert "in float16: " in message and "--dtype float32" in message


@torch.no_grad()
@pytest.mark.parametrize("is_tied", [True, False])
def test_bfloat16_samples_ignore_what_logits_share(is_tied):
    """As in test_head.py: the differences between logits stay when all lie near -100, where bfloat16 steps by 0.5. A
    tied embedding stays as it is."""
    model = make_network(vocab_size=512, n_layer=1, n_head=2, n_embd=64, tied_head=is_tied)
    idx = torch.arange(80).view(4, 20)
    model.transformer.ln_f.bias.fill_(1.0)
    model.lm_head.weight.normal_(std=0.2).sub_(0 if is_tied else 100 / 64)
    embedding, (exact, _) = model.transformer.wte.weight.bfloat16(), model(idx)
    prepared = infer.prepare(model, torch.device("cpu"), torch.bfloat16)
    assert torch.equal(prepared.transformer.wte.weight, embedding)
    # bfloat16 rounds by 2**-9: weights, activations and products, several times.
    found, expected = (logits - logits.mean(-1, keepdim=True) for logits in (prepared(idx)[0], exact))
    assert (found - expected).abs().max() < 8 * 2**-9 * expected.abs().max()
