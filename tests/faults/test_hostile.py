"""Files from strangers: nothing in them runs, and nothing they say drives the terminal."""

import json
import os
import pickle
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers import CPU

import fineweb
import hellaswag
import hub
import infer
import plots
import train_gpt2
from faults import fuzz, hub_server
from model import GPT, GPTConfig
from system import cli
from system.cli import UserError
from tokens import shards, tokenizer
from training import checkpoint, convert
from training.evaluator import Evals
from training.open_model import open_model
from training.presets import PRESETS
from training.step import Step


class Bomb:
    """Pickled, it makes a folder when it is loaded."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


@pytest.fixture
def bomb(tmp_path):
    """A Bomb that is shown to work, and must not have gone off when the test ends."""
    mark = tmp_path / "it ran"
    pickle.loads(pickle.dumps(Bomb(mark)))
    mark.rmdir()
    yield Bomb(mark)
    assert not mark.exists(), "pickled code was run"


@pytest.fixture
def call(monkeypatch):
    """call(infer, "x.pt", "Hi"): the script's main in this process."""

    def run(script, *args):
        monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, args)])
        monkeypatch.setattr(sys.stdout, "reconfigure", lambda **_: None, raising=False)
        script.main()

    return run


# ------------------------------------------------------------------------- pickled code, in every file a user can pass


@pytest.mark.parametrize("name", fuzz.READERS)
def test_a_pickle_in_place_of_any_file(bomb, tmp_path, name):
    reader, folder = fuzz.READERS[name], tmp_path / "good"
    folder.mkdir()
    reader.make(folder)
    for protocol in (2, 5):
        (folder / reader.file).write_bytes(pickle.dumps(bomb, protocol))
        try:
            reader.read(folder)
        except UserError as e:
            assert len(str(e)) < 2000


@pytest.mark.parametrize("where", ["config", "model", "weight", "step", "format"])
def test_a_pickle_inside_a_checkpoint(bomb, call, tiny_args, tmp_path, where):
    saved = checkpoint.model_file(GPT(fuzz.SMALL), 1)
    saved |= {"weight": {"model": {**saved["model"], "transformer.wte.weight": bomb}}}.get(where, {where: bomb})
    path = tmp_path / "run" / "model_00001.pt"
    path.parent.mkdir()
    torch.save(saved, path)
    torch.save({"format": 1, "step": 1, "config": bomb}, path.with_name("optim_00001.pt"))
    rows = tmp_path / "rows.jsonl"
    fuzz.make_rows(tmp_path)
    for args in (
        (infer, path, "Hi"),
        (infer, path.parent, "Hi"),
        (hellaswag, "--model", path, "--data", rows),
        (hub, "export", path, tmp_path / "hf"),
        (hub, "push-model", path, "tester/model"),
        (hub, "import", path, tmp_path / "out"),
        (train_gpt2, "quickstart", *tiny_args, "--out-dir", tmp_path / "new", "--init-from", path),
        (train_gpt2, "quickstart", *tiny_args, "--out-dir", path.parent, "--resume", "auto"),
        (train_gpt2, "--resume", path),
    ):
        with pytest.raises(UserError, match=r"pickled objects, which are never run|nothing in it was run"):
            call(*args)
    assert not (tmp_path / "hf").exists() and not (tmp_path / "out").exists()


def test_a_pickle_inside_shards(bomb, call, tiny_args, tiny_data):
    np.save(tiny_data / "tiny_train_000001.npy", np.array([bomb] * 9, dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match=r"tiny_train_000001\.npy is not a usable shard.*object"):
        call(train_gpt2, "quickstart", *tiny_args, "--out-dir", tiny_data / "run")
    with pytest.raises(UserError, match="object"):
        call(fineweb, "--verify", tiny_data)


@pytest.mark.parametrize("weights", ["pytorch_model.bin", "model.safetensors"])
def test_a_hugging_face_folder_with_code(bomb, call, tiny_args, tmp_path, weights):
    """Its modules are never imported, whatever auto_map and trust_remote_code say; its pickles are refused."""
    folder = tmp_path / "theirs"
    folder.mkdir()
    fuzz.make_hf(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_x.X", "AutoConfig": "modeling_x.C"}}
    (folder / "config.json").write_text(json.dumps({**config, "trust_remote_code": True, "custom_pipelines": {}}))
    for name in ("modeling_x.py", "configuration_x.py", "tokenization_x.py", "__init__.py", "conftest.py"):
        (folder / name).write_text(f"import os\nos.mkdir({bomb.mark!r})\n")
    (folder / "tokenizer.pkl").write_bytes(pickle.dumps(bomb))
    if weights == "model.safetensors":  # sound weights: they are read, and nothing else
        assert convert.load_hf(folder).config == fuzz.SMALL
        return
    (folder / "model.safetensors").unlink()
    torch.save({"transformer.wte.weight": torch.ones(64, 16), "x": bomb}, folder / weights)
    for args in (
        (infer, folder, "Hi"),
        (hellaswag, "--model", folder, "--data", tmp_path / "rows.jsonl"),
        (train_gpt2, "quickstart", *tiny_args, "--out-dir", tmp_path / "new", "--init-from", folder),
    ):
        fuzz.make_rows(tmp_path)
        with pytest.raises(UserError, match=r"cannot read the weights in .*theirs"):
            call(*args)


def test_a_config_names_no_code_to_transformers(tmp_path, monkeypatch):
    """What a config.json may name (attention from a repository of the Hub, other weights) never reaches it."""
    import transformers

    model, seen = transformers.GPT2LMHeadModel, []
    read = model.from_pretrained
    monkeypatch.setattr(model, "from_pretrained", lambda *a, **k: seen.append(k) or read(*a, **k))
    fuzz.make_hf(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"_attn_implementation": "evil/kernel", "attn_implementation": "evil/kernel", "transformers_weights": "x"}
    config |= {"quantization_config": {"quant_method": "evil"}, "custom_generate": "evil/generate"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert convert.load_hf(tmp_path).config == fuzz.SMALL
    assert "evil" not in json.dumps(seen[0]["config"].to_dict()) and seen[0]["config"]._attn_implementation == "eager"


def test_a_run_folder_pulled_from_the_hub(bomb, run_script, tmp_path):
    """Code is not even fetched; a checkpoint with code in it is fetched and refused; odd names are taken as names."""
    with hub_server.start(tmp_path / "hub") as server:
        remote = tmp_path / "hub/models/evil/model"
        remote.mkdir(parents=True)
        torch.save({"format": 1, "model": bomb, "config": {}}, remote / "model_00001.pt")
        for name in ("modeling_x.py", "x.pkl", ".bashrc", "sub/model_00002.pt", "a b.json"):
            (remote / name).parent.mkdir(exist_ok=True)
            (remote / name).write_bytes(pickle.dumps(bomb))
        run_script("hub.py", "pull-model", "evil/model", tmp_path / "out", env=server.env())
        assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [".lock", "model_00001.pt"]
        with pytest.raises(UserError, match="never run"):
            open_model(tmp_path / "out")
        remote = tmp_path / "hub/datasets/evil/tokens"  # names that are patterns to whoever does not look
        remote.mkdir(parents=True)
        names = ["[ab]_train_000001.npy", "a_val_000000.npy"]
        for name in names:
            shards.write_shard(remote / name, np.arange(50))
        (remote / "x_train_000009.npy\x9b2J.npy").write_bytes(b"")
        fault = hub_server.Fault("status", "/api/datasets", code=400, message="\x1b[2Jno\x9b31m \x07")
        run_script("hub.py", "pull-data", "evil/tokens", tmp_path / "data", env=server.env())
        assert sorted(p.name for p in (tmp_path / "data").iterdir()) == [".lock", *names]
        server.faults.append(fault)
        done = run_script("hub.py", "pull-data", "evil/tokens", tmp_path / "more", env=server.env(), check=False)
        assert done.returncode == 1 and cli.printable(done.stdout + done.stderr) == done.stdout + done.stderr


# ------------------------------------------------------------------------- the terminal

CODES = "\x1b[2J\x1b]0;owned\x07\x9b31m\x08\x7f"


def test_nothing_drives_the_terminal(call, run_script, tmp_path, capsys):
    """Names of files, presets, errors; prompts and samples in test_infer.py and here."""
    fuzz.make_run(tmp_path)
    odd = tmp_path / f"run{CODES}"
    odd.mkdir()
    for path in tmp_path.glob("*.*"):
        path.rename(odd / path.name)
    with warnings.catch_warnings(action="error"):  # matplotlib's would name a code it cannot draw, as it is
        plots.main((odd,))
    call(hub, "export", odd / "model_00007.pt", tmp_path / f"hf{CODES}")
    text = tmp_path / f"a{CODES}.txt"
    text.write_text("some words " * 50)
    call(fineweb, "--source", text, "--out", tmp_path / f"data{CODES}", "--shard-size", 20)
    said = "".join(capsys.readouterr()).replace("\r", "")  # the progress bar's
    assert "is ready" in said and cli.printable(said) == said
    assert cli.printable(Path(tmp_path / f"data{CODES}/manifest.json").read_text()).count("\ufffd") == 0
    for args in (["infer.py", f"{CODES}.pt", "Hi"], ["train_gpt2.py", f"preset{CODES}"]):
        done = run_script(*args, check=False)
        assert done.returncode == 1 and cli.printable(done.stderr) == done.stderr


def test_samples_of_a_run_drive_no_terminal():
    """A model that only ever says ESC [ 2 J."""
    ids = [tokenizer.encoding().encode_ordinary(c)[0] for c in "\x1b[2J\x9b"]
    config = GPTConfig(block_size=16, vocab_size=50304, n_layer=1, n_head=2, n_embd=16, tied_head=False)
    model = GPT(config).eval()
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.transformer.ln_f.bias.fill_(1.0)
        model.transformer.ln_f.weight.zero_()
        model.lm_head.weight[ids] = 9.0
    cfg = replace(PRESETS["quickstart"], compile=False, hellaswag_every=0, sequence_length=16)
    said = Evals(Step(cfg, CPU, model), None, None).samples(lambda: False)
    assert "\ufffd" in said and cli.printable(said) == said
