"""Models in other layouts (training/convert.py), and opening any model (training/open_model.py).

Equal bits, equal logits, a clear refusal of what no network here computes, and no pickled code ever runs. What other
runtimes make of an export is in test_runtimes.py.
"""

import dataclasses
import json
import os
import pickle
import sys

import pytest
import torch
from helpers import ROOT, TRICKY_TEXTS, choices, fields_with_choices, same_bits

from model import GPT, GPTConfig
from system.cli import UserError
from tokens import tokenizer
from training import checkpoint, convert
from training.open_model import open_model
from training.presets import PRESETS

TINY = GPTConfig(block_size=32, n_layer=2, n_head=2, n_embd=32)

# The networks of the presets in a tiny size: the class by which transformers runs each, and its GPTConfig.
RECORD8, SPEEDRUN = PRESETS["record8-124m"].model, PRESETS["speedrun-124m"].model
NETWORKS = {
    "gpt2": ("GPT2LMHeadModel", GPTConfig(vocab_size=50304)),
    "untied": ("GPT2LMHeadModel", PRESETS["untied-124m"].model),
    "nanogpt": ("GPT2LMHeadModel", GPTConfig(vocab_size=50304, bias=False, activation="gelu_erf")),
    "record8": ("GPTForCausalLM", RECORD8),
    "speedrun": ("GPTForCausalLM", SPEEDRUN),
    "speedrun tied": ("GPTForCausalLM", dataclasses.replace(SPEEDRUN, tied_head=True)),
}


def make_network(config) -> GPT:
    """A tiny network of this kind. Its weights are all random, biases and gains included, and large enough that greedy
    choices are no close calls."""
    torch.manual_seed(0)
    model = GPT(dataclasses.replace(config, block_size=32, n_layer=2, n_head=2, n_embd=32)).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * 0.1)
    return model


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


@pytest.fixture
def make_hf(tmp_path):
    """make_hf(name, **config) -> (a tiny GPT2LMHeadModel, the folder in which transformers saved it)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    def make(name="from-transformers", shard_size="5GB", **config):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(**{"n_positions": 32, "n_layer": 2, "n_head": 2, "n_embd": 32} | config))
        model.save_pretrained(tmp_path / name, max_shard_size=shard_size)
        return model.eval(), tmp_path / name

    return make


def load_tensors(folder):
    """The weights of a folder as they are in the file, without transformers."""
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


# ------------------------------------------------------------------------- Hugging Face folders


@pytest.mark.parametrize("tied", [True, False])
def test_a_round_trip_is_equal_bit_for_bit(make_hf, tmp_path, tied):
    from transformers import AutoModelForCausalLM

    hf_model, folder = make_hf(tie_word_embeddings=tied)
    idx = torch.randint(50257, (2, 32))

    # in: the same network, the same logits to rounding
    model = convert.load_hf(folder)
    assert model.config == dataclasses.replace(TINY, tied_head=tied)
    torch.testing.assert_close(model(idx)[0], hf_model(idx).logits, atol=1e-4, rtol=0)

    # and out again: the same bits in the file, the same logits in transformers
    convert.save_hf(model, tmp_path / "again")
    assert same_bits(load_tensors(tmp_path / "again"), load_tensors(folder))
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "again")(idx).logits, hf_model(idx).logits)


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_runs_in_transformers(tmp_path, name, no_tokenizer, modules_cache):
    from transformers import AutoModelForCausalLM

    class_name, config = NETWORKS[name]
    model = make_network(config)
    needs_code = convert.save_hf(model, tmp_path / "out")
    hf_model, report = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", trust_remote_code=needs_code, output_loading_info=True
    )

    # the class, with every weight from the file; the rows that pad the vocabulary are dropped
    assert type(hf_model).__name__ == class_name
    assert not any(report.values()), report
    assert hf_model.config.vocab_size == 50257
    assert hf_model.config.tie_word_embeddings == config.tied_head
    assert hf_model.generation_config.eos_token_id == tokenizer.EOT

    # the same logits
    idx = torch.randint(50257, (2, 32))
    with torch.no_grad():
        expected = model(idx)[0][..., :50257]
        torch.testing.assert_close(hf_model(idx).logits, expected, atol=1e-4, rtol=0)

        # the loss is that of predicting each id from those before it
        loss = torch.nn.functional.cross_entropy(expected[:, :-1].flatten(0, 1), idx[:, 1:].flatten())
        torch.testing.assert_close(hf_model(idx, labels=idx).loss, loss, atol=1e-4, rtol=0)

    # greedy generation: the same ids
    prompt = torch.arange(100, 110)[None]
    generated = hf_model.generate(
        prompt, max_new_tokens=12, do_sample=False, eos_token_id=None, pad_token_id=0, use_cache=True
    )
    assert torch.equal(generated, model.generate(prompt, 12, temperature=0))

    # back to our layout and out again: the same logits and the same bits, also after transformers has saved it
    again = convert.load_hf(tmp_path / "out")
    assert torch.equal(again(idx)[0], expected)
    convert.save_hf(again, tmp_path / "again")
    assert same_bits(load_tensors(tmp_path / "again"), load_tensors(tmp_path / "out"))
    hf_model.save_pretrained(tmp_path / "by transformers")
    assert same_bits(convert.load_hf(tmp_path / "by transformers").state_dict(), again.state_dict())

    # no temporary folder is left
    assert {p.name for p in tmp_path.iterdir()} == {"out", "again", "by transformers"}


@pytest.mark.parametrize("name", [pytest.param("gpt2", marks=pytest.mark.slow), "speedrun"])
def test_the_pipeline_continues_text(tmp_path, name, modules_cache):
    """As the model card says it. GPT-2's tokenizer is in the folder."""
    from transformers import pipeline

    needs_code = convert.save_hf(make_network(NETWORKS[name][1]), tmp_path / "out")
    pipe = pipeline("text-generation", model=str(tmp_path / "out"), trust_remote_code=needs_code)
    text = pipe("Hello, world", max_new_tokens=20)[0]["generated_text"]
    assert text.startswith("Hello, world") and len(text) > 20

    # a batch of texts of several lengths is padded on the left: refused, not computed wrongly
    if needs_code:
        pipe.tokenizer.pad_token = pipe.tokenizer.eos_token
        with pytest.raises(ValueError, match="padded"):
            pipe(["Hello", "Hello, world"], batch_size=2, max_new_tokens=3)


def test_the_folder_says_what_the_converters_of_other_runtimes_read(tmp_path, no_tokenizer):
    """llama.cpp's converter and CTranslate2's read these keys from the file, without transformers' defaults."""
    convert.save_hf(GPT(TINY), tmp_path / "out")
    config = json.loads((tmp_path / "out/config.json").read_text())
    names = ("n_ctx", "n_positions", "n_embd", "n_head", "n_layer", "layer_norm_epsilon", "activation_function")
    assert [config[name] for name in names] == [32, 32, 32, 2, 2, 1e-5, "gelu_new"]
    assert config["architectures"] == ["GPT2LMHeadModel"]


def test_a_vocabulary_of_another_tokenizer_gets_none(tmp_path):
    """nanoGPT's models of characters: GPT-2's tokenizer would make nonsense of them."""
    convert.save_hf(GPT(dataclasses.replace(TINY, vocab_size=65)), tmp_path / "out")
    assert not list((tmp_path / "out").glob("tokenizer*"))


def test_weights_in_several_files_are_read(make_hf):
    _, folder = make_hf()
    _, in_parts = make_hf("in parts", shard_size="1MB")
    assert (in_parts / "model.safetensors.index.json").is_file()

    assert same_bits(convert.load_hf(in_parts).state_dict(), convert.load_hf(folder).state_dict())


def test_pytorch_model_bin_with_old_names_is_read(make_hf, tmp_path):
    # As the first GPT-2 files: without the prefix, and with causal masks among the weights.
    hf_model, folder = make_hf()
    old = tmp_path / "old"
    old.mkdir()
    weights = {k.removeprefix("transformer."): v for k, v in hf_model.state_dict().items() if k != "lm_head.weight"}
    weights |= {"h.0.attn.bias": torch.ones(1, 1, 32, 32).tril(), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    torch.save(weights, old / "pytorch_model.bin")
    (old / "config.json").write_text((folder / "config.json").read_text())

    assert same_bits(convert.load_hf(old).state_dict(), convert.load_hf(folder).state_dict())


def test_a_config_that_spells_out_the_defaults_is_read(make_hf):
    _, folder = make_hf()
    config = json.loads((folder / "config.json").read_text())
    config |= {"n_inner": 4 * 32, "activation_function": "gelu"}  # GPT-2's MLP width; nanoGPT's activation
    (folder / "config.json").write_text(json.dumps(config))

    assert convert.load_hf(folder).config == dataclasses.replace(TINY, activation="gelu_erf")


@pytest.mark.parametrize(
    "change, words",
    [
        ({"activation_function": "relu"}, ["activation_function", "'relu'", "gelu_new"]),
        ({"layer_norm_epsilon": 1e-6}, ["layer_norm_epsilon"]),
        ({"model_type": "llama"}, ["model_type", "'llama'"]),
        ({"n_head": 3}, ["n_head"]),
        ({"n_layer": 0}, ["n_layer"]),
        ({"n_layer": 3}, ["transformer.h.2"]),
        ({"n_layer": 1}, ["transformer.h.1"]),
        ({"n_embd": 64}, ["transformer.wte.weight"]),
        ({"tie_word_embeddings": False}, ["lm_head.weight"]),
        ({"n_embd": None}, []),
        ({"n_embd": "32"}, []),
    ],
)
def test_what_is_not_gpt2_is_refused(make_hf, change, words):
    _, folder = make_hf()
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))

    with pytest.raises(UserError) as error:
        convert.load_hf(folder)

    assert all(word in str(error.value) for word in words), str(error.value)
    assert str(error.value).startswith(str(folder)) and len(str(error.value)) < 1000


def test_damaged_and_missing_files_are_named(make_hf, tmp_path):
    _, folder = make_hf()
    weights = folder / "model.safetensors"

    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"from-transformers .*SafetensorError"):
        convert.load_hf(folder)
    weights.unlink()
    with pytest.raises(UserError, match=r"from-transformers .*no weights"):
        convert.load_hf(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"from-transformers .*JSON"):
        convert.load_hf(folder)
    with pytest.raises(UserError, match="nothing/there"):
        convert.load_hf(tmp_path / "nothing" / "there")


def test_without_a_network_the_error_comes_quickly(expect_failure, tmp_path):
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}  # nobody listens on port 9
    expect_failure("infer.py", "gpt2", "Hi", mentions=["127.0.0.1:9", "internet"], env=env, timeout=60)


# Of every field, a value that TINY does not have. Fields with named choices are tested with all of them.
ANOTHER_VALUE = {
    "block_size": 24,
    "vocab_size": 50304,
    "n_layer": 3,
    "n_head": 4,
    "n_embd": 48,
    "bias": False,
    "tied_head": False,
    "zero_init_projections": True,
    "qk_norm": True,
    "softcap": 15.0,
    "attention_scale": 0.12,
    "head_bias": True,
}


def values_to_export() -> list[tuple[str, object]]:
    """(field, value): every choice of a field with choices, and the value of ANOTHER_VALUE of each other field."""
    pairs = []
    for field in dataclasses.fields(GPTConfig):
        if field.name in fields_with_choices(GPTConfig):
            pairs += [(field.name, choice) for choice in choices(GPTConfig, field.name)]
        else:
            pairs.append((field.name, ANOTHER_VALUE.get(field.name)))
    return pairs


@pytest.mark.parametrize("name, value", values_to_export())
def test_every_field_of_the_config_survives_an_export(tmp_path, no_tokenizer, name, value):
    """Fails for a new field of GPTConfig until it has a value in ANOTHER_VALUE, and if is_gpt2 takes a network
    for one that it is not."""
    assert value is not None, f"give {name} a value in ANOTHER_VALUE"
    default = getattr(GPTConfig(), name)
    for base in (TINY, dataclasses.replace(RECORD8, block_size=32, n_layer=2, n_head=2, n_embd=32)):
        # A value that the base has already is replaced by the default, unless it is one of several choices.
        has_choices = name in fields_with_choices(GPTConfig)
        another = default if getattr(base, name) == value and not has_choices else value
        torch.manual_seed(0)
        model = GPT(dataclasses.replace(base, **{name: another})).eval()
        with torch.no_grad():
            for p in model.parameters():
                p.add_(torch.randn_like(p) * 0.1)
        out = tmp_path / f"from {base.norm}"
        convert.save_hf(model, out)
        idx = torch.arange(20)[None]
        assert torch.equal(convert.load_hf(out)(idx)[0], model(idx)[0][..., :50257])


def test_an_export_has_the_code_only_if_transformers_has_no_class(tmp_path, no_tokenizer):
    convert.save_hf(make_network(SPEEDRUN), tmp_path / "out")
    assert (tmp_path / "out/model.py").read_bytes() == (ROOT / "model.py").read_bytes()
    convert.save_hf(make_network(TINY), tmp_path / "other")
    assert not list((tmp_path / "other").glob("*.py"))


@pytest.mark.parametrize(
    "change",
    [
        {"unheard_of": True},
        {"positions": "spiral"},
        {"n_layer": 10**6},
        {"n_layer": 2.0},
        {"softcap": "15"},
        {"n_embd": 64},
        {"block_size": [32]},
    ],
)
def test_changed_settings_of_a_network_are_refused(tmp_path, no_tokenizer, change):
    convert.save_hf(make_network(SPEEDRUN), tmp_path / "out")
    path = tmp_path / "out/config.json"
    config = json.loads(path.read_text())
    config["network"] |= change
    path.write_text(json.dumps(config))

    with pytest.raises(UserError, match=r"holds no network of model\.py"):
        convert.load_hf(tmp_path / "out")


def test_a_weight_that_gpt2_does_not_have_is_not_lost(tmp_path):
    model = GPT(TINY)
    model.transformer.h[0].scale = torch.nn.Parameter(torch.full((), 2.0))

    with pytest.raises(RuntimeError, match=r"transformer\.h\.0\.scale"):
        convert.save_hf(model, tmp_path / "out")

    assert not list(tmp_path.iterdir())


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "mine").write_text("work")

    for target in (tmp_path, tmp_path / "mine"):
        with pytest.raises(UserError, match="nothing is overwritten"):
            convert.save_hf(GPT(TINY), target)

    assert (tmp_path / "mine").read_text() == "work"


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    def raise_disk_full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(convert, "save_hf_tokenizer", raise_disk_full)
    with pytest.raises(OSError, match="disk full"):
        convert.save_hf(GPT(TINY), tmp_path / "out")

    assert not list(tmp_path.iterdir())


def test_the_tokenizer_is_that_of_openai(tmp_path):
    from transformers import AutoTokenizer

    convert.save_hf(GPT(TINY), tmp_path / "out")
    hf_tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    assert hf_tokenizer.model_max_length == 32
    for text in TRICKY_TEXTS:
        if "<|endoftext|>" not in text:
            tokens = hf_tokenizer(text)["input_ids"]
            assert tokens == tokenizer.encoding().encode_ordinary(text)
            assert hf_tokenizer.decode(tokens, clean_up_tokenization_spaces=False) == text
    assert hf_tokenizer("<|endoftext|>")["input_ids"] == [tokenizer.EOT] == [hf_tokenizer.eos_token_id]


# ------------------------------------------------------------------------- any kind of model


def test_open_model_opens_files_run_folders_and_hugging_face_folders(make_hf, tmp_path):
    run = tmp_path / "mine" / "run"
    run.mkdir(parents=True)
    path = run / "model_00001.pt"
    config = dataclasses.replace(TINY, vocab_size=256)
    checkpoint.write(path, checkpoint.model_file(GPT(config), 1))

    assert open_model(path).config == config
    assert open_model(run).config == config
    assert open_model(make_hf()[1]).config == TINY


def test_a_mistyped_path_is_not_looked_for_on_the_hub(tmp_path):
    (tmp_path / "mine").mkdir()
    with pytest.raises(UserError, match=r"no model at .*mine/rum"):
        open_model(tmp_path / "mine" / "rum")


# ------------------------------------------------------------------------- older trainers


@dataclasses.dataclass
class OldConfig:
    """As build-nanogpt has it: a class of the script that trained, pickled by name."""

    block_size: int = 32
    vocab_size: int = 50304
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 32


def test_a_build_nanogpt_file_is_read(tmp_path, monkeypatch):
    # the class is pickled as one of the script that ran: __main__.OldConfig
    monkeypatch.setattr(OldConfig, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "OldConfig", OldConfig, raising=False)
    model = GPT(dataclasses.replace(TINY, vocab_size=50304, n_head=4))
    content = {"model": model.state_dict(), "config": OldConfig(), "step": 19072, "val_loss": 3.07}
    torch.save(content, tmp_path / "old.pt")
    assert b"__main__\nOldConfig" in (tmp_path / "old.pt").read_bytes()

    loaded, step = convert.load_old(tmp_path / "old.pt")

    assert step == 19072 and loaded.config == model.config and not loaded.training
    assert same_bits(loaded.state_dict(), model.state_dict())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_a_nanogpt_file_is_read(tmp_path, bias, tied):
    args = {"n_layer": 3, "n_head": 2, "n_embd": 32, "block_size": 32, "bias": bias, "vocab_size": 65}
    model = GPT(GPTConfig(**args, tied_head=tied, activation="gelu_erf"))
    weights = {f"_orig_mod.{name}": weight for name, weight in model.state_dict().items()}  # torch.compile's prefix
    weights["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, 32, 32).tril()  # old torch: the mask is a buffer
    content = {
        "model": weights,
        "optimizer": {"state": {}},
        "model_args": {**args, "dropout": 0.0},
        "iter_num": 250,
        "config": {"device": "x"},
        "best_val_loss": torch.tensor(1.5),
    }
    torch.save(content, tmp_path / "ckpt.pt")

    loaded, step = convert.load_old(tmp_path / "ckpt.pt")

    assert step == 250 and loaded.config == model.config
    assert same_bits(loaded.state_dict(), model.state_dict())


class Attack:
    """Pickled, it runs a shell command when it is loaded, which makes the file `mark`."""

    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


class AttackConfig(Attack):
    """The same by another function, in a class whose name ends in Config."""

    def __reduce__(self):
        return eval, (f"open({str(self.mark)!r}, 'w')",)


@pytest.mark.parametrize("attack", [Attack, AttackConfig])
def test_an_old_file_runs_no_pickled_code(tmp_path, attack):
    # the attack works where a file is unpickled without care
    pickle.loads(pickle.dumps(attack(tmp_path / "proof")))
    assert (tmp_path / "proof").exists()

    mark = tmp_path / "owned"
    torch.save({"model": GPT(TINY).state_dict(), "config": attack(mark), "step": 1}, tmp_path / "evil.pt")
    with pytest.raises(UserError, match="nothing in it was run"):
        convert.load_old(tmp_path / "evil.pt")

    assert not mark.exists()


def test_a_class_called_config_is_never_imported(tmp_path, monkeypatch):
    """Even one that can be: only its attributes are read, into an object without code."""
    # importing the module `trap` makes the file `owned`
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')\nclass MyConfig: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    from trap import MyConfig

    config = MyConfig()
    config.n_head = 2
    torch.save({"model": GPT(TINY).state_dict(), "config": config, "step": 1}, tmp_path / "old.pt")
    (tmp_path / "owned").unlink()
    del sys.modules["trap"]

    model, _ = convert.load_old(tmp_path / "old.pt")

    assert model.config == TINY
    assert "trap" not in sys.modules and not (tmp_path / "owned").exists()


def test_files_of_other_kinds_are_refused(tmp_path):
    torch.save({"model": {"a.weight": torch.ones(2)}}, tmp_path / "other.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "text.pt").write_text("hello")
    reasons = {"other.pt": "'transformer.wte.weight'", "list.pt": "", "text.pt": ""}

    for name, reason in reasons.items():
        with pytest.raises(UserError, match=f"build-nanogpt or nanoGPT.*{reason}"):
            convert.load_old(tmp_path / name)
