"""infer.py as people call it: samples, streams, prompts from anywhere."""

import io
import json
import os
import shlex
import sys

import pytest
import torch
from helpers import write_tiny_model
from networks import make_network

import infer
from system import cli, machine
from system.cli import UserError
from tokens import tokenizer
from training.presets import PRESETS
from weights import checkpoint, convert
from weights.open_model import open_model


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
        capsys.readouterr()  # what the test has printed before
        infer.main()
        return capsys.readouterr()

    return run


# ------------------------------------------------------------------------- samples


def test_greedy_tokens_are_those_of_transformers(run_main, run_dir, tmp_path):
    from transformers import AutoModelForCausalLM

    prompt = "Hello, I'm a language model,"
    convert.save_hf(open_model(run_dir), tmp_path / "hf")
    idx = torch.tensor([tokenizer.encoding().encode(prompt)])
    reference = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    expected = reference.generate(idx, max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)

    flags = ("--temperature", 0, "--max-new-tokens", 20, "--dtype", "float32", "--json")
    out = json.loads(run_main(tmp_path / "hf", prompt, *flags).out)

    assert out["tokens"] == expected[0, idx.size(1) :].tolist()
    assert (out["prompt"], out["text"]) == (prompt, tokenizer.encoding().decode(out["tokens"]))


def test_a_seed_gives_the_same_samples(run_in_fork, run_main, run_dir):
    # More tokens than the context of 32.
    flags = ("--num-samples", 3, "--max-new-tokens", 40, "--json", "--dtype", "float32")

    from_argument = run_main(run_dir, " Hello there\n", *flags).out
    from_stdin = run_in_fork("infer.py", run_dir / "model_00007.pt", "-", *flags, input=" Hello there\n\n").stdout
    another_seed = run_main(run_dir, " Hello there\n", *flags, "--seed", 43).out

    samples = [json.loads(line) for line in from_argument.splitlines()]
    assert [len(sample["tokens"]) for sample in samples] == [40] * 3
    assert len({sample["text"] for sample in samples}) == 3
    assert from_stdin == from_argument != another_seed


def test_prompts_are_text(run_main, run_dir):
    """A prompt cannot drive the terminal. An empty one starts a document."""
    flags = ("--max-new-tokens", 4, "--dtype", "float32")
    out = run_main(run_dir, "\x1b[2JHi", "--num-samples", 2, *flags).out
    assert out.startswith("--- sample 1\n\ufffd[2JHi") and "\n--- sample 2\n" in out and "\x1b" not in out
    assert run_main(run_dir, "<|endoftext|>", *flags).out.startswith("<|endoftext|>")
    assert run_main(run_dir, *flags, "--top-p", 1e-6).out == run_main(run_dir, *flags, "--temperature", 0).out != "\n"
    assert run_main(run_dir, " word" * 32, *flags).out.startswith(" word" * 32)  # fills the context


# "Once upon a time", as in the token ids 7454 2402 257 640, and the token between documents.
@pytest.mark.parametrize("written, prompt", [
    (b"Once upon a time\n", "Once upon a time"), (b"Once upon\r\na time\r\n", "Once upon\na time"),
    (b"\xef\xbb\xbfOnce upon a time", "Once upon a time"), (b"\xef\xbb\xbf\r\n", ""),
])  # fmt: skip
def test_a_prompt_from_windows_is_the_same_text(monkeypatch, written, prompt):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(written)))
    assert infer.read_prompt("-") == prompt


@pytest.mark.parametrize("written", ["Füße".encode("latin-1"), "text".encode("utf-16"), "text".encode("utf-16-be")])
def test_a_prompt_in_another_encoding_is_refused(monkeypatch, written):
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(written)))
    with pytest.raises(UserError, match="iconv"):
        infer.read_prompt("-")


def test_a_closed_standard_input_is_named(monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UserError, match="closed"):
        infer.read_prompt("-")


def test_a_prompt_may_name_the_end_of_a_text(run_main, run_dir):
    """50256 is as far away as any token: a prompt of 32 of them fits a context of 32."""
    out = run_main(run_dir, "<|endoftext|>" * 32, "--max-new-tokens", 1, "--json").out
    assert json.loads(out)["prompt"] == "<|endoftext|>" * 32


def test_a_prompt_that_names_a_file_gets_a_line(run_main, run_dir, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my prompt.txt").write_text("Hello")
    for prompt in ("my prompt.txt", "FILE:my prompt.txt", "FILE:none"):
        printed = run_main(run_dir, prompt, "--max-new-tokens", 1).err
        assert "note: " in printed and f"- < {shlex.quote(prompt.removeprefix('FILE:'))}" in printed
    assert "note: " not in run_main(run_dir, "Hello", "--max-new-tokens", 1).err


# ------------------------------------------------------------------------- streams


def test_ctrl_c_prints_the_samples_as_far_as_they_are(capsys):
    def interrupted():
        yield [15496, 17250]
        yield [995, 612]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        infer.write_samples("> ", interrupted(), as_json=False)
    assert capsys.readouterr().out == "--- sample 1\n> Hello world\n--- sample 2\n> Hi there\n"


def test_a_character_of_many_tokens_is_written_whole(capsys):
    text = "naïve 🙂 你好"
    ids = tokenizer.encoding().encode(text)
    assert any("\ufffd" in tokenizer.encoding().decode([i]) for i in ids), "no token ends inside a character"
    infer.write_stream("> ", ids)
    infer.write_stream("", ids[:-1])  # ends inside a character
    assert capsys.readouterr().out.startswith(f"> {text}\n")


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


def test_stderr_has_the_device_and_the_precision(run_main, run_dir):
    flags = ("--device", "cpu", "--dtype", "bfloat16", "--max-new-tokens", 8, "--json")
    printed = run_main(run_dir, "Hi", *flags)
    assert len(json.loads(printed.out)["tokens"]) == 8
    model = f"{run_dir}/model_00007.pt, step 7"
    assert printed.err == f"infer.py: {model}; cpu ({torch.get_num_threads()} threads), bfloat16\n"
    (run_dir / "config.json").write_text('{"resolved_max_steps": 1400}')
    assert f"{model} of 1,400; cpu" in run_main(run_dir, "Hi", *flags).err


def test_temperatures_from_the_smallest_to_the_largest(run_main, run_dir):
    flags = ("--max-new-tokens", 8, "--dtype", "float32", "--temperature")
    greedy = run_main(run_dir, "Hi", *flags, 0).out
    for temperature in (5e-324, 1e-40, 1e-7, 1e-5):
        assert run_main(run_dir, "Hi", *flags, temperature).out == greedy
    assert run_main(run_dir, "Hi", *flags, 1e9).out != greedy


def test_what_does_not_fit_is_named(run_main, run_dir, tmp_path):
    with pytest.raises(UserError, match="--num-samples 1000000000"):
        run_main(run_dir, "Hi", "--num-samples", 10**9, "--dtype", "float32")

    model = make_network()
    with torch.no_grad():
        model.transformer.ln_f.weight.fill_(60_000)  # finite in float16, but not the logits
    checkpoint.write(tmp_path / "model_00001.pt", checkpoint.model_file(model, 1))
    with pytest.raises(UserError, match=r"float16.*--dtype float32"):
        run_main(tmp_path, "Hi", "--dtype", "float16", "--device", "cpu")


@pytest.mark.parametrize("has_bfloat16, dtype", [(True, "bfloat16"), (False, "float32")])
def test_a_cpu_takes_the_dtype_of_fewest_bytes(monkeypatch, run_main, run_dir, has_bfloat16, dtype):
    monkeypatch.setattr(machine, "cpu_has_bfloat16", lambda: has_bfloat16)
    printed = run_main(run_dir, "Hi", "--device", "cpu", "--max-new-tokens", 1)
    assert printed.err.endswith(f", {dtype}\n")


def test_bfloat16_weights_leave_positions_exact():
    """Angles of rope reach a thousand radians, where bfloat16 has steps of 4."""
    config = PRESETS["record8-124m"].model
    model = make_network(config, block_size=1024, vocab_size=97, n_embd=128)
    idx = torch.randint(97, (2, 1000))
    with torch.no_grad():
        exact, _ = model(idx)
        rounded, _ = infer.prepare(model, torch.device("cpu"), torch.bfloat16)(idx)
    assert (rounded.float() - exact).abs().mean() < 0.03 * exact.std()


def test_bfloat16_samples_ignore_what_logits_share():
    """As in test_forward.py: -100 in every logit changes no choice."""
    torch.manual_seed(0)
    model = make_network(vocab_size=512, n_layer=1, n_head=2, n_embd=64, tied_head=False)
    idx = torch.randint(512, (4, 20))
    with torch.no_grad():
        model.transformer.ln_f.bias.fill_(1.0)
        model.lm_head.weight.normal_(std=0.2).sub_(100 / 64)
        exact, _ = model(idx)
        rounded, _ = infer.prepare(model, torch.device("cpu"), torch.bfloat16)(idx)
    assert torch.equal(rounded.argmax(-1), exact.argmax(-1))


def test_a_tied_embedding_stays_as_it_is():
    model = make_network()
    embedding = model.transformer.wte.weight
    with torch.no_grad():
        embedding += 1
    expected = embedding.detach().bfloat16()
    assert torch.equal(infer.prepare(model, torch.device("cpu"), torch.bfloat16).transformer.wte.weight, expected)


@pytest.mark.parametrize("before, after", [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_sleep_unless_the_user_says_otherwise(monkeypatch, before, after):
    monkeypatch.setattr(os, "environ", dict(before))
    cli.set_omp_wait_policy()
    assert os.environ == {"OMP_WAIT_POLICY": after}
