"""Models in other layouts (checkpoints/convert.py), and opening any model (checkpoints/open_model.py).

Equal bits, equal logits, and a clear refusal of what no network here computes. That no code in a stranger's file runs
is in test_hostile.py, and what other runtimes make of an export in test_runtimes.py.
"""

import json
import re
import sys
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from helpers import TRICKY_TEXTS, limit_file_size, read_json, read_table, refused, same_bits
from networks import NETWORKS, make_network
from safetensors.torch import load_file, save_file

import model as model_module
from checkpoints import checkpoint, convert
from checkpoints.open_model import open_model
from tokens import tokenizer

# transformers' own class runs these; any other network is exported with its code.
GPT2S = {
    "gpt2", "untied", "nanogpt", "gpt2 bias=False", "gpt2 tied_head=False", "gpt2 activation=gelu_erf",
    "gpt2 zero_init_projections=True", "gpt2 init_std=0.1",
}  # fmt: skip


@pytest.fixture(scope="module")
def modules_cache(tmp_path_factory):
    """transformers copies the code of a folder to a place of its own before it imports it: here, one for these tests,
    because what is imported stays so."""
    from transformers import dynamic_module_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.setattr(sys, "path", list(sys.path))
        yield


@pytest.fixture
def small_export(tmp_path):
    """The export of a GPT-2 of 256 tokens."""
    convert.save_hf(make_network(vocab_size=256), tmp_path / "small")
    return tmp_path / "small"


# ------------------------------------------------------------------------- exports


@pytest.mark.parametrize("network", ["gpt2", "record8"])
def test_a_full_disk_is_one_message_and_leaves_nothing(tmp_path, network):
    """Whether transformers writes the weights, or this project."""
    with limit_file_size(10_000), refused(f"{tmp_path}/out cannot be written.*room"):
        convert.save_hf(make_network(NETWORKS[network], vocab_size=256), tmp_path / "out")
    assert not (tmp_path / "out").exists()


@torch.no_grad()
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_runs_in_transformers(tmp_path, name, monkeypatch, modules_cache):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(convert, "save_hf_tokenizer", lambda *_: None)  # it takes longer than everything else
    # Rows that pad the vocabulary take most of the time.
    is_typical = name in ("gpt2", "record8", "record8 tied")
    V = 50257 if is_typical else 256
    model, idx = make_network(NETWORKS[name], **({} if is_typical else {"vocab_size": V})), torch.randint(V, (2, 32))
    needs_code = convert.save_hf(model, tmp_path / "out")
    how = {"trust_remote_code": needs_code, "output_loading_info": True}
    hf_model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", **how)

    # Every weight is from the file; the rows that pad the vocabulary are dropped.
    assert not any(report.values()), report
    (tmp_path / "plain").touch()  # with the permissions that the umask leaves
    assert {file.stat().st_mode for file in (tmp_path / "out").iterdir()} == {(tmp_path / "plain").stat().st_mode}
    assert needs_code == any((tmp_path / "out").glob("*.py")) == (name not in GPT2S)
    expected = model(idx)[0][..., :V]
    torch.testing.assert_close(hf_model(idx).logits, expected, atol=1e-4, rtol=0)
    loss = torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1).double(), idx[:, 1:].flatten())
    torch.testing.assert_close(hf_model(idx, labels=idx).loss, loss.float(), atol=1e-4, rtol=0)

    # transformers' Trainer passes the number of targets of all micro-steps, or else divides by the number of them.
    if needs_code:
        total = {"num_items_in_batch": 62} if hf_model.accepts_loss_kwargs else {}
        steps = [hf_model(row, labels=row, **total).loss / (1 if total else 2) for row in idx.split(1)]
        torch.testing.assert_close(sum(steps), loss.float(), atol=1e-4, rtol=0)

    # Back to our layout: the same bits, but of a head with fewer rows, whose product may be rounded otherwise.
    again = convert.load_hf(tmp_path / "out")
    torch.testing.assert_close(again(idx)[0], expected, atol=1e-4 if is_typical else 0, rtol=0)
    assert not again.training
    assert hf_model.generation_config.eos_token_id == (tokenizer.EOT if is_typical else None)
    if not is_typical:
        return

    # Also after transformers has saved it.
    hf_model.save_pretrained(tmp_path / "by transformers")
    assert same_bits(convert.load_hf(tmp_path / "by transformers").state_dict(), again.state_dict())

    # A text that is padded on the left is refused, not computed wrongly.
    flags = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    generated = hf_model.generate(idx[:1, :10], max_new_tokens=12, **flags)
    assert torch.equal(generated, model.generate(idx[:1, :10], 12, temperature=0))
    if needs_code:
        with pytest.raises(ValueError, match="padded"):
            hf_model.generate(idx[:, :2], attention_mask=torch.tensor([[0, 1], [1, 1]]), max_new_tokens=1, **flags)


def test_every_size_survives_an_export(tmp_path):
    """Of another vocabulary than GPT-2's no row is cut off, and there is no tokenizer and no end of text. llama.cpp's
    converter and CTranslate2's read these keys from the file, without transformers' defaults."""
    model = make_network(vocab_size=100_352, block_size=24, n_embd=48, n_layer=2)
    convert.save_hf(model, tmp_path / "out")
    assert same_bits(convert.load_hf(tmp_path / "out").state_dict(), model.state_dict())
    assert not list((tmp_path / "out").glob("tokenizer*"))

    config = read_json(tmp_path / "out/config.json")
    expected = {"n_ctx": 24, "n_positions": 24, "n_embd": 48, "n_head": 4, "n_layer": 2, "layer_norm_epsilon": 1e-5}
    expected |= {"bos_token_id": None, "eos_token_id": None}
    assert config | expected == config
    assert (config["activation_function"], config["architectures"]) == ("gelu_new", ["GPT2LMHeadModel"])


def test_an_edit_without_a_setting_is_not_exported_as_gpt2(tmp_path, monkeypatch):
    """Neither one that computes something else nor one with a parameter more. Nothing is left of the export."""
    model = make_network(vocab_size=256)
    model.extra = torch.nn.Parameter(torch.ones(1))
    with refused("another network.*extra"):
        convert.save_hf(model, tmp_path / "out")

    monkeypatch.setitem(model_module.ACTIVATIONS, "gelu", torch.nn.functional.gelu)  # the exact one
    with refused("another network.*deviation"):
        convert.save_hf(make_network(vocab_size=256), tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("tokenizer_class, unread", [
    ("AutoTokenizer", ["vocab.json", "merges.txt"]),
    ("GPT2Tokenizer", ["tokenizer.json"]),  # in transformers 4
])  # fmt: skip
def test_the_tokenizer_is_that_of_openai(tmp_path, tokenizer_class, unread):
    import transformers

    convert.save_hf(make_network(NETWORKS["record8"]), tmp_path / "out")
    for name in unread:
        (tmp_path / "out" / name).unlink()
    hf_tokenizer = getattr(transformers, tokenizer_class).from_pretrained(tmp_path / "out")
    assert hf_tokenizer.model_max_length == 32
    for text in TRICKY_TEXTS:
        tokens = hf_tokenizer(text)["input_ids"]
        assert tokens == tokenizer.encoding().encode(text, allowed_special="all")
        assert hf_tokenizer.decode(tokens, clean_up_tokenization_spaces=False) == text
    assert hf_tokenizer.eos_token_id == tokenizer.EOT
    assert open_model(tmp_path / "out").config.n_embd == 32


# ------------------------------------------------------------------------- folders of others


@pytest.mark.parametrize("prefix", ["", "module._orig_mod.transformer."])
def test_weights_with_other_names_are_read(small_export, prefix):
    """As the first GPT-2 files: without the prefix, and with causal masks among the weights. As wrapped models have
    them. In half precision. An untied head is kept, whatever config.json says, as transformers keeps it."""
    head = {"lm_head.weight": torch.ones(256, 32)}
    expected = open_model(small_export).half().float().state_dict() | head
    weights = load_file(small_export / "model.safetensors")
    weights = {name.replace("transformer.", prefix): weight.half() for name, weight in weights.items()}
    masks = {f"{prefix}h.0.attn.bias": torch.ones(1, 1, 32, 32), f"{prefix}h.1.attn.masked_bias": torch.tensor(-1e4)}
    save_file(weights | masks | head, small_export / "model.safetensors")
    assert same_bits(open_model(small_export).state_dict(), expected)


def test_a_head_is_tied_unless_config_json_says_otherwise(small_export):
    """OpenAI's says nothing."""
    config = read_json(small_export / "config.json")
    del config["tie_word_embeddings"]
    (small_export / "config.json").write_text(json.dumps(config))
    assert open_model(small_export).config == make_network(vocab_size=256).config


# An entry of config.json, null for one that is left out | what the message names.
OTHERS = """
{"activation_function": "relu"}           | relu
{"model_type": "gpt_neo"}                 | model_type.*'gpt_neo'
{"n_head": null}                          | n_head
{"n_embd": "32"}                          | n_embd
{"layer_norm_epsilon": 7}                 | layer_norm_epsilon
{"scale_attn_weights": false}             | scale_attn_weights
{"add_cross_attention": true}             | add_cross_attention
{"scale_attn_by_inverse_layer_idx": true} | scale_attn_by_inverse_layer_idx
{"quantization_config": {"bits": 4}}      | quantization_config
{"n_layer": 1}                            | transformer.h.1
"""


@pytest.mark.parametrize("change, named", read_table(OTHERS))
def test_what_the_network_cannot_compute_is_refused(small_export, change, named):
    config = read_json(small_export / "config.json") | json.loads(change)
    known = {key: value for key, value in config.items() if value is not None}
    (small_export / "config.json").write_text(json.dumps(known))
    with refused(f"^cannot open {small_export}.*{named}"):
        convert.load_hf(small_export)


@pytest.mark.parametrize("name", ["vocab.json", "tokenizer.json"])
def test_a_tokenizer_that_is_not_gpt2s_is_refused(small_export, name):
    for token, result in (("Ġgazed", nullcontext()), ("Ġder", refused("not GPT-2's"))):
        tokens = {"!": 0, token: 50255, "<|endoftext|>": 50256, "<|user|>": 50257}
        content = tokens if name == "vocab.json" else {"model": {"vocab": tokens}}
        (small_export / name).write_text(json.dumps(content))
        with result:
            open_model(small_export)


# ------------------------------------------------------------------------- older trainers


@pytest.mark.parametrize("is_gpt2s", [True, False])
def test_a_nanogpt_file_is_read(tmp_path, is_gpt2s):
    model = make_network(vocab_size=65, bias=is_gpt2s, tied_head=is_gpt2s, activation="gelu_erf")
    weights = {f"_orig_mod.{name}": weight for name, weight in model.state_dict().items()}  # torch.compile's prefix
    weights["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, 32, 32).tril()  # old torch: the mask is a buffer
    arguments = {"n_head": 4, "dropout": 0.0}
    content = {"model": weights, "optimizer": {"state": {}}, "model_args": arguments, "iter_num": 250}
    torch.save(content, tmp_path / "ckpt.pt")

    loaded, step = convert.load_old(tmp_path / "ckpt.pt")

    assert step == 250 and loaded.config == model.config
    assert same_bits(loaded.state_dict(), model.state_dict())


def test_a_build_nanogpt_file_is_read(tmp_path, monkeypatch):
    """It pickles its config by the name of a class, which is not imported, even if it can be: only its attributes are
    read, into an object without code."""
    (tmp_path / "trap.py").write_text("class MyConfig: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    from trap import MyConfig

    config = MyConfig()
    config.n_head = 4
    model = make_network().half()
    # Blocks may have been compiled one by one, and a loss may be a numpy scalar.
    weights = {re.sub(r"(h\.\d)", r"\1._orig_mod", name): weight for name, weight in model.state_dict().items()}
    content = {"model": weights, "config": config, "step": 19072, "val_loss": np.float64(3.07)}
    torch.save(content, tmp_path / "old.pt")
    del sys.modules["trap"]

    loaded, step = convert.load_old(tmp_path / "old.pt")

    assert step == 19072 and loaded.config == model.config and not loaded.training
    assert same_bits(loaded.state_dict(), model.float().state_dict())
    assert "trap" not in sys.modules


def test_what_is_no_checkpoint_of_nanogpt_says_so(tmp_path):
    file = checkpoint.model_file(make_network(vocab_size=65), 1)
    for named, content in {
        "already": file,
        "'model'": [1],
        "n_head": {"model": file["model"], "config": {"heads": 4}},
        "lacks": {"model": {}, "config": {"n_head": 4}},
    }.items():
        torch.save(content, tmp_path / "old.pt")
        with refused(named):
            convert.load_old(tmp_path / "old.pt")
