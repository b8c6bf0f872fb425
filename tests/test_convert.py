"""Hugging Face folders in and out: equal bits, equal logits, and a clear refusal of what is not GPT-2."""

import dataclasses
import json

import pytest
import torch

import checkpoint
import convert
import tokenizer
from cli import UserError
from model import GPT, GPTConfig

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


def test_light_to_import(run_script, tmp_path):
    script = tmp_path / "light.py"
    script.write_text(
        "import sys, convert\nheavy = {'torch', 'transformers', 'safetensors', 'huggingface_hub'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    run_script(script, env={"PYTHONPATH": str(convert.Path(convert.__file__).parent)})


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


@pytest.mark.parametrize("options", [{"vocab_size": 50304}, {"bias": False}, {"tied_head": False, "vocab_size": 50304}])
def test_export_runs_in_transformers(tmp_path, options):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(0)
    ours = GPT(dataclasses.replace(TINY, **options)).eval()
    convert.save_hf(ours, tmp_path / "out")
    theirs, tok = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "out"),
        AutoTokenizer.from_pretrained(tmp_path / "out"),
    )
    idx = torch.randint(50257, (2, 32))
    assert theirs.config.vocab_size == 50257
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
        ({"scale_attn_by_inverse_layer_idx": True}, ["scale_attn_by_inverse_layer_idx", "True"]),
        ({"layer_norm_epsilon": 1e-6}, ["layer_norm_epsilon"]),
        ({"n_inner": 65}, ["n_inner", "65"]),
        ({"model_type": "llama"}, ["model_type", "'llama'"]),
        ({"n_head": 3}, ["n_head"]),
        ({"n_layer": 0}, ["n_layer"]),
        ({"n_layer": 3}, ["do not match", "2 layers", "3"]),
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
    with pytest.raises(UserError, match=r"cannot read .*model\.safetensors"):
        convert.load_hf(folder)
    path.unlink()
    with pytest.raises(UserError, match="has no weights"):
        convert.load_hf(folder)
    (folder / "config.json").write_text("{")
    with pytest.raises(UserError, match=r"config\.json"):
        convert.load_hf(folder)
    (tmp_path / "mine" / "run").mkdir(parents=True)
    with pytest.raises(UserError, match=r"no model at .*mine/rum; .*mine has run\."):
        convert.open_model(tmp_path / "mine" / "rum")
    with pytest.raises(UserError, match="neither a folder here nor a name"):
        convert.load_hf(tmp_path / "nothing" / "there")


def test_a_model_of_other_tokens_is_not_taken_for_gpt2(tmp_path):
    path = tmp_path / "model_00001.pt"
    checkpoint.write(path, checkpoint.model_file(GPT(dataclasses.replace(TINY, vocab_size=256)), 1))
    assert convert.open_model(path).config.vocab_size == 256
    with pytest.raises(UserError, match="a vocabulary of 256 tokens, fewer than GPT-2's"):
        convert.open_gpt2(path)


def test_no_network_is_said_quickly(fails, tmp_path):
    env = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    fails("infer.py", "gpt2", "Hi", says=["gpt2", "Hub", "network"], env=env, timeout=60)


@pytest.mark.parametrize(
    "options, says",
    [
        ({"positions": "rope"}, "positions='rope'"),
        ({"norm": "rmsnorm"}, "norm='rmsnorm'"),
        ({"activation": "relu2"}, "activation='relu2'"),
        ({"qk_norm": True}, "qk_norm=True"),
        ({"logit_softcap": 15.0}, "logit_softcap=15.0"),
        ({"unet_skips": True, "n_layer": 2}, "unet_skips=True"),
    ],
)
def test_what_the_layout_cannot_hold_is_refused(tmp_path, options, says):
    with pytest.raises(UserError, match=says):
        convert.save_hf(GPT(dataclasses.replace(TINY, **options)), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_weight_of_ones_own_is_not_exported(tmp_path):
    model = GPT(TINY)
    model.transformer.h[0].scale = torch.nn.Parameter(torch.full((), 2.0))
    with pytest.raises(UserError, match=r"this model has transformer\.h\.0\.scale, which transformers"):
        convert.save_hf(model, tmp_path / "out")


def test_nothing_is_overwritten(tmp_path):
    (tmp_path / "mine").write_text("work")
    for target in (tmp_path, tmp_path / "mine"):
        with pytest.raises(UserError, match="nothing is overwritten"):
            convert.save_hf(GPT(TINY), target)
    assert (tmp_path / "mine").read_text() == "work"


def test_an_export_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(convert.shutil, "copyfile", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError):
        convert.save_hf(GPT(TINY), tmp_path / "out")
    assert not list(tmp_path.iterdir())
