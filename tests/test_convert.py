"""Models in other layouts (weights/convert.py), and opening any model (weights/open_model.py).

Equal bits, equal logits, and a clear refusal of what no network here computes. That no code in a stranger's file runs
is in test_hostile.py, and what other runtimes make of an export in test_runtimes.py.
"""

import argparse
import dataclasses
import json
import os
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

OTHER_SIZES = {"block_size": 24, "vocab_size": 300, "n_layer": 3, "n_head": 4, "n_embd": 48}


@pytest.fixture
def no_tokenizer(monkeypatch):
    """Exports without a tokenizer, whose writing takes longer than everything else."""
    monkeypatch.setattr(convert, "save_hf_tokenizer", lambda *_: None)


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


def change_config(folder, change) -> None:
    """Change entries of an export's config.json; those that it has not belong to its network, if it has one."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    (config["network"] if "network" in config else config).update(change)
    path.write_text(json.dumps(config))


# ------------------------------------------------------------------------- exports


@pytest.mark.parametrize("name", CLASSES)
def test_every_network_runs_in_transformers(tmp_path, name, no_tokenizer, modules_cache):
    from transformers import AutoModelForCausalLM

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

    # Code only where transformers has no class, and no temporary folder is left.
    assert any((tmp_path / "out").glob("*.py")) == needs_code == (class_name == "GPTForCausalLM")
    assert {p.name for p in tmp_path.iterdir()} == {"out", "again", "by transformers"}


@torch.no_grad()
@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_survives_an_export(tmp_path, name, no_tokenizer):
    """Fails if is_gpt2 takes a network for one that it is not, or if rows of the padding are left."""
    model, idx = make_network(NETWORKS[name]), torch.arange(20)[None]
    convert.save_hf(model, tmp_path / "out")
    assert torch.equal(convert.load_hf(tmp_path / "out")(idx)[0], model(idx)[0][..., :50257])


@pytest.mark.parametrize("name", OTHER_SIZES)
def test_every_size_survives_an_export(tmp_path, name):
    model = make_network(**{"vocab_size": 256, name: OTHER_SIZES[name]})
    convert.save_hf(model, tmp_path / "out")
    assert same_bits(convert.load_hf(tmp_path / "out").state_dict(), model.state_dict())


def test_whatever_has_a_row_for_each_token_loses_the_padding():
    """Whatever its name: a network that somebody has edited has tables of its own."""
    sizes = {"wte": (50304, 8), "h.0.attn.value_table": (50304, 24), "lm_head.bias": (50304,), "h.0.w": (24, 8)}
    trimmed = convert.trim_padding({name: torch.zeros(size) for name, size in sizes.items()}, vocab_size=50304)
    assert [len(w) for w in trimmed.values()] == [50257, 50257, 50257, 24]


@pytest.mark.parametrize("edit", ["activation", "attention"])
def test_an_edit_without_a_setting_is_not_exported_as_gpt2(tmp_path, monkeypatch, edit):
    if edit == "activation":
        monkeypatch.setitem(model_module.ACTIVATIONS, "gelu", torch.nn.functional.gelu)  # the exact one
    else:
        forward = model_module.Attention.forward

        def forget_late(self, x, shared):
            y = forward(self, x, shared)  # (B, T, C)
            return torch.cat((y[:, :30], 0 * y[:, 30:]), dim=1)

        monkeypatch.setattr(model_module.Attention, "forward", forget_late)
    model = make_network()

    with pytest.raises(UserError, match="another network"):
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


def test_an_export_suits_other_readers(small_export):
    """llama.cpp's converter and CTranslate2's read these keys from the file, without transformers' defaults. And
    GPT-2's tokenizer would make nonsense of nanoGPT's models of characters."""
    config = json.loads((small_export / "config.json").read_text())
    names = ("n_ctx", "n_positions", "n_embd", "n_head", "n_layer", "layer_norm_epsilon", "activation_function")
    assert [config[name] for name in names] == [32, 32, 32, 4, 3, 1e-5, "gelu_new"]
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert not list(small_export.glob("tokenizer*"))


def test_everyone_may_read_an_export_whom_the_umask_lets(tmp_path):
    umask = os.umask(0o022)
    try:
        for name in ("gpt2", "record8"):
            convert.save_hf(make_network(NETWORKS[name], vocab_size=256), tmp_path / name)
            assert {path.stat().st_mode & 0o777 for path in (tmp_path / name).iterdir()} == {0o644}
    finally:
        os.umask(umask)


def test_an_export_that_fails_leaves_nothing(tmp_path):
    model = make_network(vocab_size=256)
    model.transformer.h[0].scale = torch.nn.Parameter(torch.full((), 2.0))  # GPT-2 has no such weight
    with pytest.raises(RuntimeError, match=r"transformer\.h\.0\.scale"):
        convert.save_hf(model, tmp_path / "out")
    assert not list(tmp_path.iterdir())


# ------------------------------------------------------------------------- folders of others


def test_weights_in_several_files_are_read(small_export, tmp_path):
    from transformers import AutoModelForCausalLM

    hf_model = AutoModelForCausalLM.from_pretrained(small_export)
    hf_model.save_pretrained(tmp_path / "in parts", max_shard_size="50KB")
    assert (tmp_path / "in parts/model.safetensors.index.json").is_file()

    assert same_bits(open_model(tmp_path / "in parts").state_dict(), open_model(small_export).state_dict())


def test_weights_left_beside_the_model_are_not_read(small_export, tmp_path):
    """As transformers chooses: model.safetensors if it is there, otherwise what the index names."""
    expected = open_model(small_export).state_dict()
    other = {name: w + 1 for name, w in load_file(small_export / "model.safetensors").items()}
    for name in ("model_old", "model_ema", "model-00001-of-00002"):
        save_file(other, small_export / f"{name}.safetensors")
    assert same_bits(open_model(small_export).state_dict(), expected)

    (small_export / "model.safetensors").rename(small_export / "part.safetensors")
    index = {"weight_map": {name: "part.safetensors" for name in other}}
    (small_export / "model.safetensors.index.json").write_text(json.dumps(index))
    assert same_bits(open_model(small_export).state_dict(), expected)

    (small_export / "part.safetensors").unlink()
    with pytest.raises(UserError, match=r"no part\.safetensors.*pytorch_model\.bin"):
        open_model(small_export)


@pytest.mark.parametrize("prefix", ["_orig_mod.", "module.", "module._orig_mod."])
def test_prefixes_of_wrapped_models_are_taken_off(small_export, prefix):
    expected = open_model(small_export).state_dict()
    weights = load_file(small_export / "model.safetensors")
    save_file({prefix + name: weight for name, weight in weights.items()}, small_export / "model.safetensors")
    assert same_bits(open_model(small_export).state_dict(), expected)


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


def test_weights_with_old_names_are_read(small_export):
    """As the first GPT-2 files: without the prefix, and with causal masks among the weights. In half precision."""
    expected = open_model(small_export).half().float()
    weights = load_file(small_export / "model.safetensors")
    weights = {name.removeprefix("transformer."): weight.half() for name, weight in weights.items()}
    weights |= {"h.0.attn.bias": torch.ones(1, 1, 32, 32).tril(), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    save_file(weights, small_export / "model.safetensors")

    assert same_bits(open_model(small_export).state_dict(), expected.state_dict())


@pytest.mark.parametrize("config, change, named", [
    (GPT2, {"activation_function": "relu"}, "activation_function.*'relu'.*gelu_new"),
    (GPT2, {"layer_norm_epsilon": 1e-6}, "layer_norm_epsilon"),
    (GPT2, {"model_type": "llama"}, "model_type.*'llama'"),
    (GPT2, {"scale_attn_weights": False}, "scale_attn_weights"),
    (GPT2, {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx"),
    (GPT2, {"add_cross_attention": True}, "add_cross_attention"),
    (GPT2, {"n_inner": 100}, "n_inner.*100"),
    (GPT2, {"quantization_config": {"bits": 4}}, "quantized"),
    (GPT2, {"n_layer": 1}, r"transformer\.h\.1"),
    (GPT2, {"n_embd": "32"}, ""),
    (NETWORKS["record8"], {"unheard_of": True}, "unheard_of"),
    (NETWORKS["record8"], {"n_layer": 10**6}, "1000000"),
    (NETWORKS["record8"], {"n_embd": 64}, "wte"),
])  # fmt: skip
def test_what_the_network_cannot_compute_is_refused(tmp_path, config, change, named):
    convert.save_hf(make_network(config, vocab_size=256), tmp_path / "out")
    change_config(tmp_path / "out", change)
    with pytest.raises(UserError, match=f"^cannot open {tmp_path}/out.*{named}") as error:
        convert.load_hf(tmp_path / "out")
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("change, refused", [
    ({"Ġthe": 262, "the": 1169}, False), ({"<|user|>": 50257}, False), ({"Ġder": 262}, True), ({"the": 262}, True),
])  # fmt: skip
def test_a_vocabulary_that_is_not_gpt2s_is_refused(small_export, capsys, change, refused):
    """Tokens that were added to it are named."""
    layouts = {"vocab.json": change, "tokenizer.json": {"model": {"vocab": change}}}
    for name, content in layouts.items():
        (small_export / name).write_text(json.dumps(content))
        if refused:
            with pytest.raises(UserError, match="token 262 is"):
                open_model(small_export)
        else:
            open_model(small_export)
            assert ("<|user|>" in capsys.readouterr().err) == ("<|user|>" in change)
        (small_export / name).unlink()


def test_the_tokenizer_of_an_export_is_gpt2s(export):
    assert (export / "tokenizer.json").is_file()
    assert open_model(export).config.n_embd == 32


def test_weights_that_are_not_finite_are_named(tmp_path):
    model = make_network(vocab_size=256)
    with torch.no_grad():
        model.transformer.h[1].mlp.c_fc.weight[3, 3] = float("nan")
    checkpoint.write(tmp_path / "model_00001.pt", checkpoint.model_file(model, 1))
    with pytest.raises(UserError, match=r"transformer\.h\.1\.mlp\.c_fc\.weight has .* not finite"):
        open_model(tmp_path)


def test_an_adapter_is_refused_by_name(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(UserError, match="LoRA"):
        open_model(tmp_path)


# ------------------------------------------------------------------------- any kind of model


def test_open_model_opens_files_and_folders(one_run, small_export):
    config = make_network(vocab_size=256).config
    of_the_run = dataclasses.replace(config, n_layer=2, n_head=2)  # helpers.TINY_FLAGS
    assert open_model(one_run / "model_00003.pt").config == of_the_run
    assert same_bits(open_model(one_run).state_dict(), open_model(one_run / "model_00012.pt").state_dict())
    assert open_model(small_export).config == config


def test_files_of_other_programs_are_named(small_export, tmp_path):
    """Each with what opens it, whatever its suffix."""
    model = make_network(vocab_size=65)
    torch.save(model.state_dict(), tmp_path / "x.pth")
    torch.save(model.state_dict(), tmp_path / "legacy.bin", _use_new_zipfile_serialization=False)
    header = np.array([20240326, 3, 1024], np.int32)
    (tmp_path / "gpt2_124M.bin").write_bytes(header.tobytes() + bytes(1012))
    for path, named in {
        tmp_path / "x.pth": "hub.py import",
        tmp_path / "legacy.bin": "hub.py import",
        tmp_path / "gpt2_124M.bin": "llm.c",
        small_export / "model.safetensors": f"open its folder: {small_export}",
    }.items():
        with pytest.raises(UserError, match=named):
            open_model(path)


def test_pointers_of_git_lfs_are_named(tmp_path, small_export):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n"
    for path in (tmp_path / "model_00001.pt", tmp_path / "x.pth", small_export / "model.safetensors"):
        path.write_text(pointer)
        for read in (open_model, convert.load_old):
            with pytest.raises(UserError, match="git lfs pull"):
                read(small_export if path.parent == small_export and read == open_model else path)
    (small_export / "config.json").write_text(pointer)
    with pytest.raises(UserError, match="git lfs pull"):
        open_model(small_export)


def test_a_folder_named_gpt2_hides_openais_only_if_it_has_a_model(tmp_path, monkeypatch, small_export):
    monkeypatch.chdir(tmp_path)
    asked = []
    monkeypatch.setattr(convert, "download", lambda name, files: asked.append(name) or small_export)
    (tmp_path / "gpt2").mkdir()
    assert open_model("gpt2").config.n_embd == 32 and set(asked) == {"gpt2"}

    checkpoint.write(tmp_path / "gpt2/model_00001.pt", checkpoint.model_file(make_network(vocab_size=99), 1))
    assert open_model("gpt2").config.vocab_size == 99


def test_weights_are_downloaded_once_it_is_known_what_they_are(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 4096}))
    asked = []
    monkeypatch.setattr(convert, "download", lambda name, files: asked.extend(files) or tmp_path)
    with pytest.raises(UserError, match="model_type is 'llama'"):
        open_model("meta/llama")
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
    content = {"model": weights, "iter_num": 250}
    if zipped:
        content |= {"config": argparse.Namespace(n_head=4, out=tmp_path), "best_val_loss": np.float64(1.5)}
    else:
        content |= {"config": {"n_head": 4}}
    torch.save(content, tmp_path / "old.pt", _use_new_zipfile_serialization=zipped)

    loaded, step = convert.load_old(tmp_path / "old.pt")

    assert step == 250 and loaded.config == model.config
    assert same_bits(loaded.state_dict(), model.state_dict())


def test_what_is_no_checkpoint_of_nanogpt_says_so(tmp_path):
    weights = make_network(vocab_size=65).state_dict()
    torch.save(weights, tmp_path / "ckpt.pt")
    with pytest.raises(UserError, match=r"bare state dict.*pytorch_model\.bin"):
        convert.load_old(tmp_path / "ckpt.pt")
    torch.save({"model": weights, "config": argparse.Namespace(heads=4)}, tmp_path / "args.pt")
    with pytest.raises(UserError, match="n_head"):
        convert.load_old(tmp_path / "args.pt")
    content = {"model": {}, "config": argparse.Namespace(n_head=4)}
    torch.save(content, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(UserError, match=r"before 1\.6"):
        convert.load_old(tmp_path / "old.pt")
