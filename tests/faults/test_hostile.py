"""Hostile files: no code in them runs, and no text in them controls the terminal.

Every kind of file that a user can pass comes here with a pickled Bomb in it, which would make a folder if it ran. The
same scripts that users run must refuse it, or never look at it.
"""

import json
import os
import pickle
import sys
import warnings
from dataclasses import replace

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
from training.evaluator import Evaluator
from training.open_model import open_model
from training.presets import PRESETS
from training.step import TrainStep


class Bomb:
    """Pickled, it makes a folder when it is loaded."""

    def __init__(self, mark):
        self.mark = str(mark)

    def __reduce__(self):
        return os.mkdir, (self.mark,)


@pytest.fixture
def bomb(tmp_path):
    """A Bomb that is shown to work. The test fails at its end if the bomb has gone off."""
    mark = tmp_path / "it ran"
    pickle.loads(pickle.dumps(Bomb(mark)))
    mark.rmdir()
    yield Bomb(mark)
    assert not mark.exists(), "pickled code was run"


@pytest.fixture
def run_main(monkeypatch):
    """run_main(infer, "x.pt", "Hi"): the script's main in this process."""

    def run(script, *args):
        monkeypatch.setattr(sys, "argv", [script.__name__, *map(str, args)])
        monkeypatch.setattr(sys.stdout, "reconfigure", lambda **_: None, raising=False)  # pytest's has none
        script.main()

    return run


# ------------------------------------------------------------------------- pickled code, in every file a user can pass


@pytest.mark.parametrize("name", fuzz.CASES)
def test_a_pickle_in_place_of_any_file_is_not_run(bomb, tmp_path, name):
    case, folder = fuzz.CASES[name], tmp_path / "good"
    folder.mkdir()
    case.make(folder)
    for protocol in (2, 5):  # torch's files have 2, Python's own default is newer
        (folder / case.file).write_bytes(pickle.dumps(bomb, protocol))

        try:
            case.read(folder)  # a text file of pickled bytes may well be read, as text
        except UserError as e:
            assert len(str(e)) < fuzz.MAX_MESSAGE


@pytest.mark.parametrize("where", ["config", "model", "weight", "step", "format"])
def test_a_pickle_inside_a_checkpoint_is_refused_by_every_script(bomb, run_main, tiny_args, tmp_path, where):
    # a good checkpoint, with the bomb in one place
    content = checkpoint.model_file(GPT(fuzz.SMALL), 1)
    if where == "weight":
        content["model"] = {**content["model"], "transformer.wte.weight": bomb}
    else:
        content[where] = bomb
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    path = run_dir / "model_00001.pt"
    torch.save(content, path)
    torch.save({"format": 1, "step": 1, "config": bomb}, run_dir / "optim_00001.pt")
    fuzz.make_rows(tmp_path)

    commands = [
        (infer, path, "Hi"),
        (infer, run_dir, "Hi"),
        (hellaswag, "--model", path, "--data", tmp_path / "rows.jsonl"),
        (hub, "export", path, tmp_path / "hf"),
        (hub, "push-model", path, "tester/model"),
        (hub, "import", path, tmp_path / "out"),
        (train_gpt2, "quickstart", *tiny_args, "--out-dir", tmp_path / "new", "--init-from", path),
        (train_gpt2, "quickstart", *tiny_args, "--out-dir", run_dir, "--resume", "auto"),
        (train_gpt2, "--resume", path),
    ]
    for command in commands:
        with pytest.raises(UserError, match=r"pickled objects, which are never run|nothing in it was run"):
            run_main(*command)

    assert not (tmp_path / "hf").exists() and not (tmp_path / "out").exists()


def test_a_pickle_inside_shards_is_refused(bomb, run_main, tiny_args, tiny_data):
    # numpy pickles the elements of an array of objects
    np.save(tiny_data / "tiny_train_000001.npy", np.array([bomb] * 9, dtype=object), allow_pickle=True)

    with pytest.raises(UserError, match=r"tiny_train_000001\.npy is not a usable shard.*object"):
        run_main(train_gpt2, "quickstart", *tiny_args, "--out-dir", tiny_data / "run")
    with pytest.raises(UserError, match="object"):
        run_main(fineweb, "--verify", tiny_data)


# ------------------------------------------------------------------------- Hugging Face folders


@pytest.fixture
def hf_folder_with_code(bomb, tmp_path):
    """A folder with sound weights, modules that its config.json names for import, and a pickled tokenizer."""
    folder = tmp_path / "hostile"
    folder.mkdir()
    fuzz.make_hf(folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": {"AutoModelForCausalLM": "modeling_x.X", "AutoConfig": "modeling_x.C"}}
    (folder / "config.json").write_text(json.dumps({**config, "trust_remote_code": True, "custom_pipelines": {}}))
    for name in ("modeling_x.py", "configuration_x.py", "tokenization_x.py", "__init__.py", "conftest.py"):
        (folder / name).write_text(f"import os\nos.mkdir({bomb.mark!r})\n")
    (folder / "tokenizer.pkl").write_bytes(pickle.dumps(bomb))
    return folder


def test_modules_beside_the_weights_are_never_imported(hf_folder_with_code):
    """Whatever auto_map and trust_remote_code say: the weights are read, and nothing else."""
    assert convert.load_hf(hf_folder_with_code).config == fuzz.SMALL


def test_a_pickle_among_hugging_face_weights_is_refused(bomb, run_main, tiny_args, tmp_path, hf_folder_with_code):
    folder = hf_folder_with_code
    (folder / "model.safetensors").unlink()
    torch.save({"transformer.wte.weight": torch.ones(64, 16), "x": bomb}, folder / "pytorch_model.bin")
    fuzz.make_rows(tmp_path)

    commands = [
        (infer, folder, "Hi"),
        (hellaswag, "--model", folder, "--data", tmp_path / "rows.jsonl"),
        (train_gpt2, "quickstart", *tiny_args, "--out-dir", tmp_path / "new", "--init-from", folder),
    ]
    for command in commands:
        with pytest.raises(UserError, match=r"hostile holds no network"):
            run_main(*command)


def test_a_config_names_no_code_to_transformers(tmp_path, monkeypatch):
    """What a config.json may name, such as attention from a repository of the Hub, never reaches transformers, because
    reading a folder does not use it."""
    fuzz.make_hf(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"_attn_implementation": "evil/kernel", "attn_implementation": "evil/kernel", "transformers_weights": "x"}
    config |= {"quantization_config": {"quant_method": "evil"}, "custom_generate": "evil/generate"}
    (tmp_path / "config.json").write_text(json.dumps(config))

    monkeypatch.setitem(sys.modules, "transformers", None)  # an import would fail

    assert convert.load_hf(tmp_path).config == fuzz.SMALL


def test_the_code_of_an_export_is_for_transformers_alone(bomb, run_main, tmp_path, monkeypatch):
    """A network without a class in transformers is exported with its code. Nothing here runs it, whatever it is."""
    monkeypatch.chdir(tmp_path)
    speedrun = replace(PRESETS["speedrun-124m"].model, block_size=16, n_layer=2, n_head=2, n_embd=16)
    monkeypatch.setattr(convert, "save_hf_tokenizer", lambda *_: None)
    folder = tmp_path / "hostile"
    convert.save_hf(GPT(speedrun), folder)
    for name in ("model.py", "modeling_gpt.py", "__init__.py", "conftest.py"):
        (folder / name).write_text(f"import os\nos.mkdir({bomb.mark!r})\n")
    fuzz.make_rows(tmp_path)

    run_main(infer, folder, "Hi", "--max-new-tokens", 2)
    run_main(hellaswag, "--model", folder, "--data", tmp_path / "rows.jsonl")

    # an export of the loaded model has this project's code, and not that of the folder
    convert.save_hf(open_model(folder), tmp_path / "exported")
    assert not any("os.mkdir" in path.read_text() for path in (tmp_path / "exported").glob("*.py"))


# ------------------------------------------------------------------------- repositories of the Hub


def test_a_pull_fetches_no_code_and_what_it_fetches_is_refused(bomb, run_in_fork, tmp_path):
    remote = tmp_path / "hub/models/evil/model"
    remote.mkdir(parents=True)
    torch.save({"format": 1, "model": bomb, "config": {}}, remote / "model_00001.pt")
    for name in ("modeling_x.py", "x.pkl", ".bashrc", "sub/model_00002.pt", "a b.json"):
        (remote / name).parent.mkdir(exist_ok=True)
        (remote / name).write_bytes(pickle.dumps(bomb))

    with hub_server.start(tmp_path / "hub") as server:
        run_in_fork("hub.py", "pull-model", "evil/model", tmp_path / "out", env=server.env())

    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == [".cache", "model_00001.pt"]
    with pytest.raises(UserError, match="never run"):
        open_model(tmp_path / "out")


def test_names_of_remote_files_are_no_patterns_and_control_no_terminal(run_in_fork, tmp_path):
    remote = tmp_path / "hub/datasets/evil/tokens"
    remote.mkdir(parents=True)
    names = ["[ab]_train_000001.npy", "a_val_000000.npy"]  # the first, as a pattern, would match others
    for name in names:
        shards.write_shard(remote / name, np.arange(50))
    (remote / "x_train_000009.npy\x9b2J.npy").write_bytes(b"")

    with hub_server.start(tmp_path / "hub") as server:
        run_in_fork("hub.py", "pull-data", "evil/tokens", tmp_path / "data", env=server.env())
        assert sorted(p.name for p in (tmp_path / "data").iterdir()) == [".cache", *names]

        # an error message of the Hub with control codes in it
        fault = hub_server.Fault("status", "/api/datasets", code=400, message="\x1b[2Jno\x9b31m \x07")
        server.faults.append(fault)
        done = run_in_fork("hub.py", "pull-data", "evil/tokens", tmp_path / "more", env=server.env(), check=False)
        assert done.returncode == 1
        assert_printable(done.stdout + done.stderr)


# ------------------------------------------------------------------------- the terminal

CODES = "\x1b[2J\x1b]0;owned\x07\x9b31m\x08\x7f"  # clear the screen, set the title, ring, change the color, delete


def assert_printable(text: str) -> None:
    """There is nothing in the text that a terminal obeys."""
    assert cli.printable(text) == text


def test_names_of_files_and_presets_control_no_terminal(run_main, run_in_fork, tmp_path, capsys):
    """Prompts and samples: below and in test_infer.py."""
    # folders whose names are control codes: a run, an export, token shards
    fuzz.make_run(tmp_path)
    run_dir = tmp_path / f"run{CODES}"
    run_dir.mkdir()
    for path in tmp_path.glob("*.*"):
        path.rename(run_dir / path.name)
    text = tmp_path / f"a{CODES}.txt"
    text.write_text("some words " * 50)

    with warnings.catch_warnings(action="error"):  # matplotlib's would print a code that it cannot draw
        plots.main((run_dir,))
    run_main(hub, "export", run_dir / "model_00007.pt", tmp_path / f"hf{CODES}")
    run_main(fineweb, "--source", text, "--out", tmp_path / f"data{CODES}", "--shard-size", 20)

    output = "".join(capsys.readouterr()).replace("\r", "")  # the progress bar's
    assert "is ready" in output
    assert_printable(output)
    manifest = (tmp_path / f"data{CODES}/manifest.json").read_text()
    assert "\ufffd" not in cli.printable(manifest)

    # errors about such names
    for args in (["infer.py", f"{CODES}.pt", "Hi"], ["train_gpt2.py", f"preset{CODES}"]):
        done = run_in_fork(*args, check=False)
        assert done.returncode == 1
        assert_printable(done.stderr)


def test_samples_of_a_run_control_no_terminal():
    # a model that only ever writes the characters of ESC [ 2 J: its head gives these tokens alone a high logit
    ids = [tokenizer.encoding().encode_ordinary(c)[0] for c in "\x1b[2J\x9b"]
    config = GPTConfig(block_size=16, vocab_size=50304, n_layer=1, n_head=2, n_embd=16, tied_head=False)
    model = GPT(config).eval()
    with torch.no_grad():
        model.lm_head.weight.zero_()
        model.transformer.ln_f.bias.fill_(1.0)
        model.transformer.ln_f.weight.zero_()
        model.lm_head.weight[ids] = 9.0
    cfg = replace(PRESETS["quickstart"], compile=False, hellaswag_every=0, sequence_length=16)

    samples = Evaluator(TrainStep(cfg, CPU, model), None, None).sample_text(lambda: False)

    assert "\ufffd" in samples  # what stands for a control code
    assert_printable(samples)
