"""Models in other layouts (weights/convert.py), and opening any model (weights/open_model.py).

Equal bits, equal logits, and a clear refusal of what no network here computes. That no code in a stranger's file runs
is in test_hostile.py, and what other runtimes make of an export in test_runtimes.py.
"""

import argparse
import json
import re
import sys

import numpy as np
import pytest
import torch
from helpers import TRICKY_TEXTS, same_bits
from networks import GPT2, NETWORKS, make_network
from safetensors.torch import load_file, save_file

import model as model_module
from system.cli import UserError
from tokens import tokenizer
from weights import checkpoint, convert
from weights.open_model import open_model

# The class by which transformers runs each network of the presets and of an import.
CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "untied": "GPT2LMHeadModel",
    "nanogpt": "GPT2LMHeadModel",
    "record8": "GPTForCausalLM",
    "record8 tied": "GPTForCausalLM",
}

OTHER_SIZES = {"block_size": 24, "vocab_size": 100_352, "n_layer": 3, "n_head": 4, "n_embd": 48}


@pytest.fixture(scope="module")
def modules_cache(tmp_path_factory):
    """transformers copies the code of a folder to a place of its own before it imports it: here, one for these tests,
    because what is imported stays so."""
    from transformers import dynamic_module_utils

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path_factory.mktemp("modules")))
        patch.setattr(sys, "path", list(sys.path))
        yield


@pytest.fixture(scope="module")
def export(tmp_path_factory):
    """The export of a network with code, with its tokenizer; not to be changed."""
    folder = tmp_path_factory.mktemp("export") / "out"
    assert convert.save_hf(make_network(NETWORKS["record8"]), folder)
    return folder


@pytest.fixture
def small_export(tmp_path):
    """The export of a GPT-2 of 256 tokens."""
    convert.save_hf(make_network(vocab_size=256), tmp_path / "small")
    return tmp_path / "small"


# ------------------------------------------------------------------------- exports


@pytest.mark.parametrize("name", CLASSES)
def test_every_network_runs_in_transformers(tmp_path, name, monkeypatch, modules_cache):
    from transformers import AutoModelForCausalLM

    monkeypatch.setattr(convert, "save_hf_tokenizer", lambda *_: None)  # it takes longer than everything else
    class_name, config = CLASSES[name], NETWORKS[name]
    model = make_network(config)
    needs_code = convert.save_hf(model, tmp_path / "out")
    hf_model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", trust_remote_code=needs_code, output_loading_info=True
    )

    # The class, with every weight from the file; the rows that pad the vocabulary are dropped.
    assert type(hf_model).__name__ == class_name
    assert not any(report.values()), report
    assert hf_model.config.vocab_size == 50257
    assert hf_model.config.tie_word_embeddings == config.tied_head
    assert hf_model.generation_config.eos_token_id == tokenizer.EOT

    # The same logits.
    idx = torch.randint(50257, (2, 32))
    with torch.no_grad():
        expected = model(idx)[0][..., :50257]
        torch.testing.assert_close(hf_model(idx).logits, expected, atol=1e-4, rtol=0)

        # The loss is that of predicting each id from those before it.
        loss = torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), idx[:, 1:].flatten())
        torch.testing.assert_close(hf_model(idx, labels=idx).loss, loss, atol=1e-4, rtol=0)

    # Greedy generation: the same ids.
    prompt = torch.arange(100, 110)[None]
    flags = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0, "use_cache": True}
    generated = hf_model.generate(prompt, max_new_tokens=12, **flags)
    assert torch.equal(generated, model.generate(prompt, 12, temperature=0))

    # Back to our layout and out again: the same logits and the same bits, also after transformers has saved it.
    again = convert.load_hf(tmp_path / "out")
    assert torch.equal(again(idx)[0], expected) and not again.training
    convert.save_hf(again, tmp_path / "again")
    weights = [load_file(tmp_path / folder / "model.safetensors") for folder in ("again", "out")]
    assert same_bits(*weights)
    hf_model.save_pretrained(tmp_path / "by transformers")
    assert same_bits(convert.load_hf(tmp_path / "by transformers").state_dict(), again.state_dict())

    # Code only where transformers has no class.
    assert any((tmp_path / "out").glob("*.py")) == needs_code == (class_name == "GPTForCausalLM")


@torch.no_grad()
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_survives_an_export(tmp_path, name, monkeypatch):
    """Fails if a network is taken for a GPT-2 that is none, or if rows of the padding are left."""
    monkeypatch.setattr(convert, "save_hf_tokenizer", lambda *_: None)
    model, idx = make_network(NETWORKS[name]), torch.arange(20)[None]
    convert.save_hf(model, tmp_path / "out")
    assert torch.equal(convert.load_hf(tmp_path / "out")(idx)[0], model(idx)[0][..., :50257])


@pytest.mark.parametrize("name", OTHER_SIZES)
def test_every_size_survives_an_export(tmp_path, name):
    """Of twice GPT-2's vocabulary no row is cut off, and there is no tokenizer."""
    model = make_network(**{"vocab_size": 256, name: OTHER_SIZES[name]})
    convert.save_hf(model, tmp_path / "out")
    assert same_bits(convert.load_hf(tmp_path / "out").state_dict(), model.state_dict())
    assert not list((tmp_path / "out").glob("tokenizer*"))


@pytest.mark.parametrize("edit", ["activation", "attention", "weight"])
def test_an_edit_without_a_setting_is_not_exported_as_gpt2(tmp_path, monkeypatch, edit):
    """Nothing is left of the export."""
    if edit == "activation":
        monkeypatch.setitem(model_module.ACTIVATIONS, "gelu", torch.nn.functional.gelu)  # the exact one
    if edit == "attention":
        forward = model_module.Attention.forward
        monkeypatch.setattr(model_module.Attention, "forward", lambda self, *args: 1.01 * forward(self, *args))
    model = make_network(vocab_size=256)
    if edit == "weight":
        model.transformer.h[0].scale = torch.nn.Parameter(torch.full((), 2.0))  # GPT-2 has no such weight

    with pytest.raises((UserError, RuntimeError), match=r"another network|transformer\.h\.0\.scale"):
        convert.save_hf(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_the_pipeline_continues_text(export, modules_cache):
    """As the model card says it."""
    from transformers import pipeline

    pipe = pipeline("text-generation", model=str(export), trust_remote_code=True)
    text = pipe("Hello, world", max_new_tokens=20)[0]["generated_text"]
    assert text.startswith("Hello, world") and len(text) > 20

    # A batch of texts of several lengths is padded on the left: refused, not computed wrongly.
    pipe.tokenizer.pad_token = pipe.tokenizer.eos_token
    with pytest.raises(ValueError, match="padded"):
        pipe(["Hello", "Hello, world"], batch_size=2, max_new_tokens=3)


def test_the_tokenizer_is_that_of_openai(export):
    from transformers import AutoTokenizer

    hf_tokenizer = AutoTokenizer.from_pretrained(export)
    assert hf_tokenizer.model_max_length == 32
    for text in TRICKY_TEXTS:
        if "<|endoftext|>" not in text:
            tokens = hf_tokenizer(text)["input_ids"]
            assert tokens == tokenizer.encoding().encode_ordinary(text)
            assert hf_tokenizer.decode(tokens, clean_up_tokenization_spaces=False) == text
    assert hf_tokenizer("<|endoftext|>")["input_ids"] == [tokenizer.EOT] == [hf_tokenizer.eos_token_id]
    assert open_model(export).config.n_embd == 32


def test_an_export_suits_other_readers(small_export):
    """llama.cpp's converter and CTranslate2's read these keys from the file, without transformers' defaults. And
    GPT-2's tokenizer would make nonsense of nanoGPT's models of characters."""
    config = json.loads((small_export / "config.json").read_text())
    names = ("n_ctx", "n_positions", "n_embd", "n_head", "n_layer", "layer_norm_epsilon", "activation_function")
    assert [config[name] for name in names] == [32, 32, 32, 4, 3, 1e-5, "gelu_new"]
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert not list(small_export.glob("tokenizer*"))


# ------------------------------------------------------------------------- folders of others


def test_weights_in_several_files_are_read(small_export, tmp_path):
    """Those that the index names; others may lie beside them."""
    from transformers import AutoModelForCausalLM

    hf_model = AutoModelForCausalLM.from_pretrained(small_export)
    hf_model.save_pretrained(tmp_path / "in parts", max_shard_size="50KB")
    save_file({"transformer.ln_f.bias": torch.ones(32)}, tmp_path / "in parts/model_old.safetensors")
    assert same_bits(open_model(tmp_path / "in parts").state_dict(), open_model(small_export).state_dict())

    parts = sorted((tmp_path / "in parts").glob("model-*.safetensors"))
    parts[1].unlink()
    with pytest.raises(UserError, match=f"no {parts[1].name}"):
        open_model(tmp_path / "in parts")


def test_an_untied_head_is_kept(small_export):
    """Whatever config.json says, as transformers keeps it."""
    from transformers import AutoModelForCausalLM

    weights = load_file(small_export / "model.safetensors")
    weights["lm_head.weight"] = weights["transformer.wte.weight"] + torch.randn(256, 32)
    save_file(weights, small_export / "model.safetensors", metadata={"format": "pt"})
    assert json.loads((small_export / "config.json").read_text())["tie_word_embeddings"]

    model, reference = open_model(small_export), AutoModelForCausalLM.from_pretrained(small_export)
    idx = torch.arange(20)[None]
    torch.testing.assert_close(model(idx)[0], reference(idx).logits, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    "prefix", ["", "_orig_mod.transformer.", "module.transformer.", "module._orig_mod.transformer."]
)
def test_weights_with_other_names_are_read(small_export, prefix):
    """As the first GPT-2 files: without the prefix, and with causal masks among the weights. As wrapped models have
    them. In half precision."""
    expected = open_model(small_export).half().float()
    weights = load_file(small_export / "model.safetensors")
    weights = {name.replace("transformer.", prefix): weight.half() for name, weight in weights.items()}
    weights[f"{prefix}h.0.attn.bias"] = torch.ones(1, 1, 32, 32).tril()
    weights[f"{prefix}h.1.attn.masked_bias"] = torch.tensor(-1e4)
    save_file(weights, small_export / "model.safetensors")
    assert same_bits(open_model(small_export).state_dict(), expected.state_dict())


@pytest.mark.parametrize("config, change, named", [
    (GPT2, {"activation_function": "relu"}, "activation_function.*'relu'.*gelu_new"),
    (GPT2, {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon"),
    (GPT2, {"model_type": "gpt_neo"}, "model_type.*'gpt_neo'"),
    (GPT2, {"model_type": None}, "model_type"),
    (GPT2, {"n_head": None}, "n_head"),
    (NETWORKS["record8"], {"n_head": None}, "n_head"),
    (GPT2, {"scale_attn_weights": False}, "scale_attn_weights"),
    (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    (GPT2, {"add_cross_attention": True}, "add_cross_attention"),
    (GPT2, {"n_inner": 100}, "n_inner.*100"),
    (GPT2, {"quantization_config": {"bits": 4}}, "quantization_config"),
    (GPT2, {"n_layer": 1}, r"transformer\.h\.1"),
    (GPT2, {"n_embd": "32"}, ""),
    (NETWORKS["record8"], {"unheard_of": True}, "unheard_of"),
    (NETWORKS["record8"], {"n_layer": 10**6}, "1000000"),
    (NETWORKS["record8"], {"n_embd": 64}, "wte"),
])  # fmt: skip
def test_what_the_network_cannot_compute_is_refused(tmp_path, config, change, named):
    """An entry that is None is left out."""
    convert.save_hf(make_network(config, vocab_size=256), tmp_path / "out")
    path = tmp_path / "out/config.json"
    hf_config = json.loads(path.read_text())
    entries = hf_config.get("network", hf_config)
    for key, value in change.items():
        entries[key] = value
        if value is None:
            del entries[key]
    path.write_text(json.dumps(hf_config))
    with pytest.raises(UserError, match=f"^cannot open {tmp_path}/out.*{named}") as error:
        convert.load_hf(tmp_path / "out")
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("token, is_refused", [("Ġgazed", False), ("Ġder", True)])
def test_a_tokenizer_that_is_not_gpt2s_is_refused(small_export, token, is_refused):
    tokens = {"!": 0, token: 50255, "<|endoftext|>": 50256, "<|user|>": 50257}
    for name, content in {"vocab.json": tokens, "tokenizer.json": {"model": {"vocab": tokens}}}.items():
        (small_export / name).write_text(json.dumps(content))
        if is_refused:
            with pytest.raises(UserError, match="not GPT-2's"):
                open_model(small_export)
        else:
            open_model(small_export)
        (small_export / name).unlink()


def test_weights_are_downloaded_once_it_is_known_what_they_are(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt_neo", "hidden_size": 4096}))
    asked = []
    monkeypatch.setattr(convert, "download", lambda name, files: asked.extend(files) or tmp_path)
    with pytest.raises(UserError, match="model_type is 'gpt_neo'"):
        open_model("EleutherAI/gpt-neo-1.3B")
    assert asked and convert.WEIGHTS not in asked


# ------------------------------------------------------------------------- older trainers


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_a_nanogpt_file_is_read(tmp_path, bias, tied):
    model = make_network(vocab_size=65, n_layer=3, bias=bias, tied_head=tied, activation="gelu_erf")
    weights = {f"_orig_mod.{name}": weight for name, weight in model.state_dict().items()}  # torch.compile's prefix
    weights["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, 32, 32).tril()  # old torch: the mask is a buffer
    content = {"model": weights, "optimizer": {"state": {}}, "model_args": {"n_head": 4, "dropout": 0.0}}
    torch.save({**content, "iter_num": 250, "best_val_loss": torch.tensor(1.5)}, tmp_path / "ckpt.pt")

    loaded, step = convert.load_old(tmp_path / "ckpt.pt")

    assert step == 250 and loaded.config == model.config
    assert same_bits(loaded.state_dict(), model.state_dict())


def test_a_build_nanogpt_file_is_read(tmp_path, monkeypatch):
    """It pickles its config by the name of a class, which is not imported, even if it can be: only its attributes are
    read, into an object without code."""
    # Importing the module `trap` makes the file `owned`.
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')\nclass MyConfig: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    from trap import MyConfig

    config = MyConfig()
    config.n_head = 4
    model = make_network(n_head=4).half()
    content = {"model": model.state_dict(), "config": config, "step": 19072, "val_loss": 3.07}
    torch.save(content, tmp_path / "old.pt")
    (tmp_path / "owned").unlink()
    del sys.modules["trap"]

    loaded, step = convert.load_old(tmp_path / "old.pt")

    assert step == 19072 and loaded.config == model.config and not loaded.training
    assert same_bits(loaded.state_dict(), model.float().state_dict())
    assert "trap" not in sys.modules and not (tmp_path / "owned").exists()


@pytest.mark.parametrize("zipped", [True, False])
def test_relatives_of_nanogpt_are_read(tmp_path, zipped):
    """Blocks that were compiled one by one, a numpy scalar, an argparse.Namespace; without pickled objects also in
    torch's format before 1.6."""
    model = make_network(vocab_size=65, n_head=4)
    weights = {re.sub(r"(h\.\d)", r"\1._orig_mod", name): weight for name, weight in model.state_dict().items()}
    content = {"model": weights, "iter_num": 250, "config": {"n_head": 4}}
    if zipped:
        content |= {"config": argparse.Namespace(n_head=4, out=tmp_path), "best_val_loss": np.float64(1.5)}
    torch.save(content, tmp_path / "old.pt", _use_new_zipfile_serialization=zipped)

    loaded, step = convert.load_old(tmp_path / "old.pt")

    assert step == 250 and loaded.config == model.config
    assert same_bits(loaded.state_dict(), model.state_dict())


def test_what_is_no_checkpoint_of_nanogpt_says_so(tmp_path):
    weights = make_network(vocab_size=65).state_dict()
    path = tmp_path / "old.pt"
    pickled = {"model": {}, "config": argparse.Namespace(n_head=4)}
    ours = checkpoint.model_file(make_network(vocab_size=65), 1)
    for content, zipped, named in (
        (weights, True, r"bare state dict.*pytorch_model\.bin"),
        ({"model": weights, "config": argparse.Namespace(heads=4)}, True, "n_head"),
        ({"model": weights}, True, "n_head"),
        (pickled, False, r"before 1\.6"),
        (ours, True, "of this project already"),
    ):
        torch.save(content, path, _use_new_zipfile_serialization=zipped)
        with pytest.raises(UserError, match=named):
            convert.load_old(path)
