"""Hostile and damaged files: code in them is never run, and damage is found, whoever has sent them."""

import io
import json
import os
import pickle
import shutil
import sys
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from helpers import TINY_FLAGS, make_shards, read_json, refused, run_main

from checkpoints import checkpoint, convert
from checkpoints.open_model import open_model
from model import GPT, GPTConfig
from system.errors import UserError
from training.loader import Loader


def read_data(path):
    data = Loader(path.parent, "train", T=16, vocab_size=50257)
    return data.read(data.order.span(0, data.order.sequences_per_epoch)).tobytes()


def to_bytes(content):
    out = io.BytesIO()
    torch.save(content, out)
    return out.getvalue()


# How a file of each format is read.
READERS = {
    "run/model_00012.pt": lambda path: to_bytes(open_model(path).state_dict()),
    "run/optim_00012.pt": lambda path: to_bytes(checkpoint.read_train_state(path)),
    "data/toy_train_000001.npy": read_data,
    "hf/model.safetensors": lambda path: open_model(path.parent),
    "old/ckpt.pt": convert.load_old,
}
CHECKED = ("run/model_00012.pt", "run/optim_00012.pt", "data/toy_train_000001.npy")  # by CRC or sha256


@pytest.fixture
def good(tmp_path, one_run):
    """A folder with a good file of each format."""
    (tmp_path / "old").mkdir()
    make_shards(tmp_path / "data", size=300)
    shutil.copytree(one_run, tmp_path / "run", ignore=shutil.ignore_patterns("*_0000[369].pt"))
    model = GPT(GPTConfig(block_size=16, vocab_size=50304, n_layer=1, n_head=2, n_embd=16))
    convert.save_hf(model, tmp_path / "hf")
    torch.save({"model": model.state_dict(), "model_args": vars(model.config)}, tmp_path / "old/ckpt.pt")
    return tmp_path


@pytest.mark.parametrize("name", CHECKED)
def test_damage_is_found_wherever_it_is(good, name):
    path = good / name
    data = path.read_bytes()
    content = READERS[name](path)
    for at in np.linspace(0, len(data) - 1, 15).astype(int):
        path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
        try:
            assert READERS[name](path) == content, f"byte {at}"
        except UserError as e:
            assert path.name in str(e)
    path.write_bytes(data[: len(data) // 2])
    with refused(path.name):
        READERS[name](path)


@pytest.mark.parametrize("error", [NameError, AttributeError, TypeError])
@pytest.mark.parametrize("name", ["run/model_00012.pt", "hf/model.safetensors", "old/ckpt.pt"])
def test_an_error_in_an_edited_model_is_not_the_files(good, monkeypatch, name, error):
    monkeypatch.setattr(GPT, "from_state_dict", Mock(side_effect=error))
    with pytest.raises(error):
        READERS[name](good / name)


# ------------------------------------------------------------------------- code


class Bomb:
    """Pickled, it makes the folder `mark` when it is loaded."""

    def __reduce__(self):
        return os.mkdir, (self.mark,)


@pytest.fixture
def bomb(tmp_path):
    """A Bomb that is shown to work. The test fails at its end if it has gone off."""
    bomb = Bomb()
    bomb.mark = str(tmp_path / "it ran")
    pickle.loads(pickle.dumps(bomb))
    os.rmdir(bomb.mark)
    yield bomb
    assert not os.path.exists(bomb.mark), "pickled code was run"


@pytest.mark.parametrize("name", READERS)
def test_a_pickle_in_place_of_any_file_is_not_run(good, bomb, name):
    array = io.BytesIO()
    np.save(array, np.array([bomb] * 9, dtype=object), allow_pickle=True)
    archive = to_bytes({"format": 1, "model": {"transformer.wte.weight": bomb}, "step": 2, "config": bomb})

    # torch's files have protocol 2, Python's own default is newer.
    for data in (pickle.dumps(bomb, 2), pickle.dumps(bomb, 5), array.getvalue(), archive):
        (good / name).write_bytes(data)
        with refused(str((good / name).parent)):
            READERS[name](good / name)


def test_a_pickle_in_a_checkpoint_runs_in_no_script(good, one_run, bomb, capsys):
    run, path, new = good / "run", good / "run/model_00012.pt", good / "new"
    torch.save({**torch.load(path, weights_only=True), "config": bomb}, path)

    train = ("train_gpt2.py", "quickstart", *TINY_FLAGS, "--data-dir", one_run.parent / "tiny")
    for command in (
        ("infer.py", path, "Hi"),
        ("hub.py", "export", path, new),
        ("hub.py", "import", path, new),
        (*train, "--out-dir", new, "--init-from", path),
        (*train, "--resume auto --out-dir", run),
    ):
        assert run_main(*command) == 1
        assert path.name in capsys.readouterr().err


NAMES_CODE = """{
    "auto_map": {"AutoConfig": "modeling_x.C", "AutoModelForCausalLM": "modeling_x.X"},
    "trust_remote_code": true,
    "custom_generate": "evil/generate"
}"""


def test_modules_beside_the_weights_are_never_imported(good, bomb, monkeypatch):
    """Whatever config.json names; and transformers, which follows such names, is never given it."""
    folder = good / "hf"
    config = read_json(folder / "config.json") | json.loads(NAMES_CODE)
    (folder / "config.json").write_text(json.dumps(config))
    for name in ("modeling_x.py", "model.py", "__init__.py"):
        (folder / name).write_text(f"import os\nos.mkdir({bomb.mark!r})\n")
    monkeypatch.setitem(sys.modules, "transformers", None)  # an import would fail

    assert open_model(folder).config.n_embd == 16
