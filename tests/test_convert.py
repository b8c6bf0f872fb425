"""Hugging Face folders in and out: equal bits, equal logits, and a clear refusal of what is not GPT-2."""

import dataclasses
import json
import os
import pickle
import subprocess
import sys

import pytest
import torch
from helpers import ROOT, same_bits

from model import GPT, GPTConfig
from system.cli import UserError
from tokens import tokenizer
from training import checkpoint, convert
from training.open_model import open_model

TINY = GPTConfig(block_size=32, n_layer=2, n_head=2, n_embd=32)


@pytest.fixture
def hf(tmp_path):
    """hf(**config) -> (a tiny GPT2LMHeadModel, the folder in which transformers saved it)."""
    from transformers import GPT2Config, GPT2LMHeadModel

    def make(name="theirs", shard_size="5GB", **config):
        torch.manual_seed(0)
        model = GPT2LMHeadModel(GPT2Config(**{"n_positions": 32, "n_layer": 2, "n_head": 2, "n_embd": 32} | config))
        model.save_pretrained(tmp_path / name, max_shard_size=shard_size)
        return model.eval(), tmp_path / name

    return make


def tensors(folder):
    from safetensors.torch import load_file

    return load_file(folder / "model.safetensors")


def test_light_to_import():
    heavy = "{'torch', 'transformers', 'safetensors', 'huggingface_hub'} & set(sys.modules)"
    script = f"import sys, training.convert\nassert not {heavy}, {heavy}"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


@pytest.mark.parametrize("tied", [True, False])
def test_round_trip_is_equal_bit_for_bit(hf, tmp_path, tied):
    from transformers import AutoModelForCausalLM

    theirs, folder = hf(tie_word_embeddings=tied)
    ours = convert.load_hf(folder)
    assert ours.config == dataclasses.replace(TINY, tied_head=tied)
    idx = torch.randint(50257, (2, 32))
    torch.testing.assert_close(ours(idx)[0], theirs(idx).logits, atol=1e-4, rtol=0)
    convert.save_hf(ours, tmp_path / "again")
    before, after = tensors(folder), tensors(tmp_path / "again")
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "again")(idx).logits, theirs(idx).logits)


@pytest.mark.parametrize(
    "options", [{"bias": False}, {"tied_head": False, "vocab_size": 50304}, {"activation": "gelu_erf"}]
)
def test_export_runs_in_transformers(tmp_path, options):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    ours = GPT(dataclasses.replace(TINY, **options)).eval()
    convert.save_hf(ours, tmp_path / "out")
    theirs, tok = (kind.from_pretrained(tmp_path / "out") for kind in (AutoModelForCausalLM, AutoTokenizer))
    idx = torch.randint(50257, (2, 32))
    assert theirs.config.vocab_size == 50257
    assert convert.load_hf(tmp_path / "out").config.activation == ours.config.activation
    torch.testing.assert_close(theirs(idx).logits, ours(idx)[0][..., :50257], atol=1e-4, rtol=0)
    text = "Hello, world!  naïve \n\n 你好 🙂 don't"
    assert tok(text)["input_ids"] == tokenizer.encoding().encode_ordinary(text)
    assert tok.decode(tok(text)["input_ids"]) == text and tok("<|endoftext|>")["input_ids"] == [tok.eos_token_id]
    assert theirs.generation_config.eos_token_id == tokenizer.EOT
    assert sorted(p.name for p in tmp_path.iterdir()) == ["out"]  # no temporary folder is left


def test_shards_bin_files_and_old_names_are_read(hf, tmp_path):
    theirs, folder = hf()
    whole = convert.load_hf(folder).state_dict()
    _, sharded = hf("sharded", shard_size="1MB")
    assert (sharded / "model.safetensors.index.json").is_file()
    old = tmp_path / "old"  # as the first GPT-2 files: no prefix, causal masks among the weights
    old.mkdir()
    state = {k.removeprefix("transformer."): v for k, v in theirs.state_dict().items() if k != "lm_head.weight"}
    state |= {"h.0.attn.bias": torch.ones(1, 1, 32, 32).tril(), "h.1.attn.masked_bias": torch.tensor(-1e4)}
    torch.save(state, old / "pytorch_model.bin")
    (old / "config.json").write_text((folder / "config.json").read_text())
    for other in (sharded, old):
        again = convert.load_hf(other).state_dict()
        assert again.keys() == whole.keys() and all(torch.equal(again[k], whole[k]) for k in whole)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"activation_function": "relu"}, ["activation_function", "'relu'", "gelu_new"]),
        ({"layer_norm_epsilon": 1e-6}, ["layer_norm_epsilon"]),
        ({"n_inner": 65}, ["n_inner", "65"]),
        ({"model_type": "llama"}, ["model_type", "'llama'"]),
        ({"n_head": 3}, ["n_head"]),
        ({"n_layer": 0}, ["n_layer"]),
        ({"n_layer": 3}, ["do not match", "transformer.h.2"]),
        ({"n_layer": 1}, ["do not match", "transformer.h.1"]),
        ({"n_embd": 64}, ["cannot read the weights"]),
        ({"tie_word_embeddings": False}, ["do not match", "lm_head.weight"]),
        ({"n_embd": None}, ["n_embd"]),
    ],
)
def test_what_is_not_gpt2_is_refused(hf, change, says):
    _, folder = hf()
    config = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as e:
        convert.load_hf(folder)
    assert all(s in str(e.value) for s in says), str(e.value)


def test_damaged_and_missing_files(hf, tmp_path):
    _, folder = hf()
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(UserError, match=r"cannot read the weights in .*theirs"):
        convert.load_hf(folder)
    path.unlink()
    with pytest.raises(UserError, match="has no weights"):
        convert.load_hf(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json"):
        convert.load_hf(folder)
    with pytest.raises(UserError, match="neither a folder here nor a name"):
        convert.load_hf(tmp_path / "nothing" / "there")


def test_one_door_for_every_kind_of_model(hf, tmp_path):
    (tmp_path / "mine" / "run").mkdir(parents=True)
    path = tmp_path / "mine" / "run" / "model_00001.pt"
    checkpoint.write(path, checkpoint.model_file(GPT(dataclasses.replace(TINY, vocab_size=256)), 1))
    assert open_model(path).config == open_model(path.parent).config
    assert open_model(hf()[1]).config == TINY
    with pytest.raises(UserError, match=r"no model at .*mine/rum; .*mine has run\."):
        open_model(tmp_path / "mine" / "rum")


def test_no_network_is_said_quickly(expect_failure, tmp_path):
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    expect_failure("infer.py", "gpt2", "Hi", mentions=["gpt2", "Hub", "network"], env=env, timeout=60)


def test_what_the_layout_cannot_hold_is_refused(tmp_path):
    options = {"positions": "rope", "norm": "rmsnorm", "activation": "relu2", "qk_norm": True, "softcap": 15.0}
    for name, value in {**options, "attention_scale": 0.12, "head_bias": True, "value_tables": 1}.items():
        with pytest.raises(UserError, match=f"{name}={value!r}"):
            convert.save_hf(GPT(dataclasses.replace(TINY, **{name: value})), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_weight_of_ones_own_is_not_exported(tmp_path):
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
    from transformers import GPT2Tokenizer

    def full(*_):
        raise OSError("disk full")

    monkeypatch.setattr(GPT2Tokenizer, "save_pretrained", full)
    with pytest.raises(OSError, match="disk full"):
        convert.save_hf(GPT(TINY), tmp_path / "out")
    assert not list(tmp_path.iterdir())


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
    monkeypatch.setattr(OldConfig, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "OldConfig", OldConfig, raising=False)
    model = GPT(dataclasses.replace(TINY, vocab_size=50304, n_head=4))
    saved = {"model": model.state_dict(), "config": OldConfig(), "step": 19072, "val_loss": 3.07}
    torch.save(saved, tmp_path / "old.pt")
    assert b"__main__\nOldConfig" in (tmp_path / "old.pt").read_bytes()
    read, step = convert.load_old(tmp_path / "old.pt")
    assert step == 19072 and read.config == model.config and not read.training
    assert same_bits(read.state_dict(), model.state_dict())


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tied", [True, False])
def test_a_nanogpt_file_is_read(tmp_path, bias, tied):
    shape = {"block_size": 32, "vocab_size": 65, "n_layer": 3, "n_head": 2, "n_embd": 32}
    model = GPT(GPTConfig(**shape, bias=bias, tied_head=tied, activation="gelu_erf"))
    weights = {f"_orig_mod.{k}": v for k, v in model.state_dict().items()}
    weights["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, 32, 32).tril()  # old torch: the mask is a buffer
    args = {"n_layer": 3, "n_head": 2, "n_embd": 32, "block_size": 32, "bias": bias, "vocab_size": 65, "dropout": 0.0}
    saved = {"model": weights, "optimizer": {"state": {}}, "model_args": args, "iter_num": 250}
    torch.save({**saved, "config": {"device": "x"}, "best_val_loss": torch.tensor(1.5)}, tmp_path / "ckpt.pt")
    read, step = convert.load_old(tmp_path / "ckpt.pt")
    assert step == 250 and read.config == model.config
    assert same_bits(read.state_dict(), model.state_dict())


class Evil:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


class EvilConfig(Evil):
    def __reduce__(self):
        return eval, (f"open({str(self.mark)!r}, 'w')",)


@pytest.mark.parametrize("evil", [Evil, EvilConfig])
def test_an_old_file_runs_no_pickled_code(tmp_path, evil):
    mark = tmp_path / "owned"
    torch.save({"model": GPT(TINY).state_dict(), "config": evil(mark), "step": 1}, tmp_path / "evil.pt")
    pickle.loads(pickle.dumps(Evil(tmp_path / "proof")))
    assert (tmp_path / "proof").exists()  # the attack itself works
    with pytest.raises(UserError, match="nothing in it was run"):
        convert.load_old(tmp_path / "evil.pt")
    assert not mark.exists()


def test_a_class_called_config_is_never_imported(tmp_path, monkeypatch):
    """Even one that can be: reading its attributes into an inert object is all that happens."""
    (tmp_path / "trap.py").write_text(f"open({str(tmp_path / 'owned')!r}, 'w')\nclass MyConfig: pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    from trap import MyConfig

    config = MyConfig()
    config.n_head = 2
    torch.save({"model": GPT(TINY).state_dict(), "config": config, "step": 1}, tmp_path / "old.pt")
    (tmp_path / "owned").unlink()
    del sys.modules["trap"]
    assert convert.load_old(tmp_path / "old.pt")[0].config == TINY
    assert "trap" not in sys.modules and not (tmp_path / "owned").exists()


def test_other_files_are_refused(tmp_path):
    torch.save({"model": {"a.weight": torch.ones(2)}}, tmp_path / "other.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "text.pt").write_text("hello")
    for name, says in (("other.pt", "it has no 'transformer.wte.weight'"), ("list.pt", ""), ("text.pt", "")):
        with pytest.raises(UserError, match=f"build-nanogpt or nanoGPT.*{says}"):
            convert.load_old(tmp_path / name)
