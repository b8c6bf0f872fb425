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
from system import cli, machine
from system.cli import UserError
from tokens import tokenizer
from training import checkpoint
from training.presets import PRESETS


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    """A run folder with a tiny model whose context is 32 tokens."""
    return write_tiny_model(tmp_path_factory.mktemp("infer") / "run", block_size=32, n_embd=32)


@pytest.fixture
def run_main(monkeypatch, capsys):
    """run_main(model, "Hi", ...) -> (stdout, stderr) of infer.py. It runs in this process, because a new one takes
    seconds to import torch."""

    def run(*args):
        monkeypatch.setattr(sys, "argv", ["infer.py", *map(str, args)])
        monkeypatch.setattr(sys.stdout, "reconfigure", lambda **_: None, raising=False)  # pytest's stdout has none
        infer.main()
        return capsys.readouterr()

    return run


# ------------------------------------------------------------------------- samples


def test_greedy_tokens_are_those_of_transformers(run_main, tmp_path):
    from transformers import GPT2Config, GPT2LMHeadModel

    prompt = "Hello, I'm a language model,"
    torch.manual_seed(0)
    config = GPT2Config(n_positions=64, n_layer=2, n_head=2, n_embd=32, initializer_range=0.2)
    reference = GPT2LMHeadModel(config).eval()
    reference.save_pretrained(tmp_path / "hf")
    idx = torch.tensor([tokenizer.encoding().encode(prompt)])
    expected = reference.generate(idx, max_new_tokens=30, do_sample=False, eos_token_id=None, pad_token_id=0)

    flags = ("--temperature", 0, "--max-new-tokens", 30, "--dtype", "float32", "--json")
    out = json.loads(run_main(tmp_path / "hf", prompt, *flags).out)

    assert out["tokens"] == expected[0, idx.size(1) :].tolist()
    assert out["text"] == tokenizer.encoding().decode(out["tokens"])
    assert out["prompt"] == prompt


def test_the_same_seed_gives_the_same_samples_wherever_the_prompt_comes_from(run_in_fork, run_main, run_dir, tmp_path):
    (tmp_path / "prompt.txt").write_text("Hello there")
    # More tokens than the context of 32. A precision of its own: `auto` times one, and a busy machine may time another.
    flags = ("--num-samples", 3, "--max-new-tokens", 40, "--json", "--dtype", "float32")

    from_argument = run_main(run_dir, "Hello there", *flags).out
    from_file = run_main(run_dir, "--file", tmp_path / "prompt.txt", *flags).out
    from_stdin = run_in_fork("infer.py", run_dir / "model_00007.pt", "-", *flags, input="Hello there\n").stdout
    another_seed = run_main(run_dir, "Hello there", *flags, "--seed", 43).out

    samples = [json.loads(line) for line in from_argument.splitlines()]
    assert [len(sample["tokens"]) for sample in samples] == [40] * 3
    assert len({sample["text"] for sample in samples}) == 3
    assert from_file == from_argument
    assert from_stdin == from_argument
    assert another_seed != from_argument


def test_several_samples_are_numbered(run_main, run_dir):
    out = run_main(run_dir, "Hi", "--num-samples", 2, "--max-new-tokens", 4).out
    assert out.startswith("--- sample 1\nHi")
    assert "\n--- sample 2\nHi" in out


def test_a_prompt_cannot_drive_the_terminal(run_main, run_dir):
    out = run_main(run_dir, "\x1b[2JHi", "--max-new-tokens", 4).out
    assert out.startswith("\ufffd[2JHi")
    assert "\x1b" not in out


def test_an_empty_prompt_starts_a_document(run_main, run_dir):
    assert infer.encode_prompt("", False) == [tokenizer.EOT]
    assert run_main(run_dir, "--max-new-tokens", 4, "--top-p", 0.9).out.strip()


def test_special_tokens_in_a_prompt_are_text_unless_allowed():
    assert infer.encode_prompt("<|endoftext|>", True) == [tokenizer.EOT]
    assert tokenizer.EOT not in infer.encode_prompt("<|endoftext|>", False)


def test_samples_stop_where_the_document_ends():
    batches = [torch.tensor(ids) for ids in ([1, 2], [tokenizer.EOT, 3], [4, tokenizer.EOT], [5, 6])]
    assert list(infer.stop_at_end_of_text(iter(batches), True)) == [[1, 2], [None, 3]]
    assert len(list(infer.stop_at_end_of_text(iter(batches), False))) == 4


def test_samples_of_different_lengths_are_written(capsys):
    a, b, c = tokenizer.encoding().encode("one two three")
    infer.write_samples("zero ", iter([[a, a], [None, b], [None, c]]), 2, as_json=True)
    samples = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [sample["text"] for sample in samples] == ["one", "one two three"]
    assert [sample["tokens"] for sample in samples] == [[a], [a, b, c]]


# ------------------------------------------------------------------------- streams


def test_a_character_that_spans_tokens_is_written_when_it_is_complete(capsys):
    text = "naïve 🙂 你好"
    ids = tokenizer.encoding().encode(text)
    assert any("\ufffd" in tokenizer.encoding().decode([i]) for i in ids), "no token ends inside a character"

    infer.write_stream("> ", iter(ids))
    assert capsys.readouterr().out == f"> {text}\n"

    infer.write_stream("", iter(ids[:-1]))  # ends inside a character, if its last token is half of one
    assert capsys.readouterr().out.endswith("\n")


def test_text_is_written_as_it_is_generated(capsys):
    printed: list[str] = []

    def generate_slowly():
        """Yields a token; what has been printed is noted when the next token is asked for."""
        for token in tokenizer.encoding().encode("one two three"):
            yield token
            printed.append(capsys.readouterr().out)

    infer.write_stream("zero ", generate_slowly())
    assert printed == ["zero one", " two", " three"]


# ------------------------------------------------------------------------- precision and speed


def test_help_answers_within_a_second(run_script):
    seconds = []
    for _ in range(3):  # the best of three, because tests run side by side
        start = time.monotonic()
        assert "--max-new-tokens" in run_script("infer.py", "--help").stdout
        seconds.append(time.monotonic() - start)
    assert min(seconds) < 1


def test_bfloat16_samples_and_stderr_says_so(run_main, run_dir):
    flags = ("--device", "cpu", "--dtype", "bfloat16", "--max-new-tokens", 8, "--json")
    printed = run_main(run_dir, "Hi", *flags)
    assert len(json.loads(printed.out)["tokens"]) == 8
    assert printed.err == f"infer.py: cpu ({torch.get_num_threads()} threads), bfloat16\n"


@pytest.mark.parametrize("speedup, chosen", [(0.5, "float32"), (0.9, "bfloat16"), (1.5, "bfloat16")])
def test_a_cpu_samples_in_bfloat16_unless_float32_clearly_wins(run_main, run_dir, monkeypatch, speedup, chosen):
    measured = []

    def measure(product):
        measured.append((product.rows, product.make_linear))
        return speedup

    monkeypatch.setattr(machine, "supported_dtypes", lambda device: [torch.bfloat16, torch.float32])
    monkeypatch.setattr(machine, "bfloat16_speedup", measure)

    printed = run_main(run_dir, "Hi", "--num-samples", 3, "--max-new-tokens", 2)

    # Measured for as many rows as there are samples, with the weights packed as they are for sampling.
    assert printed.err.endswith(f", {chosen}\n")
    assert measured == [(3, infer.pack_linear_weight)]


def test_a_given_precision_and_a_gpu_are_not_measured(run_main, run_dir, monkeypatch):
    def measure(*args):
        pytest.fail("measured")

    monkeypatch.setattr(machine, "bfloat16_speedup", measure)
    monkeypatch.setattr(machine, "supported_dtypes", lambda device: [torch.bfloat16, torch.float32])
    printed = run_main(run_dir, "Hi", "--max-new-tokens", 2, "--dtype", "float32")
    assert printed.err.endswith(", float32\n")

    monkeypatch.setattr(machine, "supported_dtypes", lambda device: [torch.float16, torch.float32])
    assert infer.fastest_dtype(torch.device("cuda"), 1) == torch.float16


@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_weight_multiplies_as_linear_does(bias):
    torch.manual_seed(0)
    linear = torch.nn.Linear(48, 80, bias=bias)
    x = torch.randn(2, 3, 48)
    with torch.no_grad():
        multiply = infer.pack_linear_weight(linear.weight)
        torch.testing.assert_close(multiply(x, bias=linear.bias), linear(x))


def test_bfloat16_weights_leave_positions_exact():
    """Angles of rope reach a thousand radians, where bfloat16 has steps of 4."""
    torch.manual_seed(0)
    config = replace(PRESETS["speedrun-124m"].model, vocab_size=97, n_layer=2, n_head=2, n_embd=128)
    model = GPT(config).eval()
    idx = torch.randint(97, (2, 1000))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
        exact, _ = model(idx)
        rounded, _ = infer.prepare(model, torch.device("cpu"), torch.bfloat16)(idx)
    error = (rounded.float() - exact).abs().mean()
    assert error < 0.03 * exact.std()


@pytest.mark.parametrize("running_threads, spins", [(1, True), (os.cpu_count() + 1, False)])
def test_threads_spin_only_on_an_idle_machine(running_threads, spins, monkeypatch, tmp_path):
    load = tmp_path / "loadavg"  # as /proc/loadavg
    load.write_text(f"0.50 0.60 0.70 {running_threads}/345 6789\n")

    # Training: threads sleep while they wait.
    monkeypatch.setattr(os, "environ", {})
    cli.set_omp_wait_policy(load=str(load))
    assert os.environ == {"OMP_WAIT_POLICY": "PASSIVE"}

    # Sampling: they spin for a moment first, unless other processes want the cores.
    os.environ.clear()
    cli.set_omp_wait_policy(many_short_waits=True, load=str(load))
    assert ("GOMP_SPINCOUNT" in os.environ) == spins

    # What a user has set stays.
    monkeypatch.setattr(os, "environ", {"OMP_WAIT_POLICY": "ACTIVE"})
    cli.set_omp_wait_policy(many_short_waits=True)
    assert os.environ == {"OMP_WAIT_POLICY": "ACTIVE"}


# ------------------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    "flags, message",
    [
        (("--max-new-tokens", 0), "--max-new-tokens 0: must be 1 or more"),
        (("--num-samples", 0), "--num-samples 0: must be 1 or more"),
        (("--temperature", -1), "--temperature -1"),
        (("--top-k", -1), "--top-k -1"),
        (("--top-p", 0), "--top-p 0.*: must be above 0, at most 1"),
        (("--seed", 2**63), "--seed 9223372036854775808: must be a 64-bit number"),
    ],
)
def test_a_number_out_of_range_is_a_clear_error(run_main, run_dir, flags, message):
    with pytest.raises(UserError, match=message):
        run_main(run_dir, "Hi", *flags)


def test_a_prompt_that_cannot_be_read_is_a_clear_error(run_main, run_dir, tmp_path):
    (tmp_path / "latin").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match="give either a prompt or --file"):
        run_main(run_dir, "Hi", "--file", tmp_path / "x")
    with pytest.raises(UserError, match="cannot read"):
        run_main(run_dir, "--file", tmp_path / "x")
    with pytest.raises(UserError, match="UTF-8"):
        run_main(run_dir, "--file", tmp_path / "latin")


def test_a_model_or_prompt_that_does_not_fit_is_a_clear_error(run_main, run_dir, tmp_path):
    small_vocabulary = GPT(GPTConfig(block_size=16, vocab_size=256, n_layer=1, n_head=1, n_embd=8))
    checkpoint.write(tmp_path / "model_00001.pt", checkpoint.model_file(small_vocabulary, 1))
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError, match=r"41 tokens, but the context of .* is 32"):
        run_main(run_dir, "word " * 40)
    with pytest.raises(UserError, match="a vocabulary of 256 tokens, fewer than GPT-2's"):
        run_main(tmp_path / "model_00001.pt", "Hi")
    with pytest.raises(UserError, match=r"none\.pt"):
        run_main(tmp_path / "none.pt", "Hi")
    with pytest.raises(UserError, match="checkpoint"):
        run_main(tmp_path / "empty", "Hi")
