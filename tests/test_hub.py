"""hub.py against a stand-in Hub on loopback: what is pushed comes back identical, and nothing wrong ever counts."""

import hashlib
import json
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from faults import hub_server
from faults.hub_server import Fault
from helpers import make_shards, same_bits

import fineweb
import hub as hub_script
from model import GPT, GPTConfig
from system.cli import UserError
from tokens import shards, tokenizer
from training import checkpoint, metrics_file
from training.open_model import open_model


@pytest.fixture
def hub(tmp_path):
    with hub_server.start(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def run(hub, tmp_path, monkeypatch, capsys):
    """run("pull-data", ...) -> what a command prints, in this process; with says=..., it must fail with that message.
    The token is never printed."""
    from huggingface_hub import constants

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hf-home"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "hf-home/token"))
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)

    def go(*args, says=None, token=hub.token, endpoint=hub.url):
        monkeypatch.setenv("HF_TOKEN", token)
        monkeypatch.setattr(constants, "ENDPOINT", endpoint)
        template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(sys, "argv", ["hub.py", *map(str, args)])
        if says is None:
            hub_script.main()
            text = capsys.readouterr().out
        else:
            with pytest.raises(UserError, match=says) as e:
                hub_script.main()
            text = str(e.value)
        assert hub.token not in text + "".join(capsys.readouterr())
        return text

    return go


def contents(folder: Path) -> dict[str, bytes]:
    found = {p.relative_to(folder).as_posix(): p for p in folder.rglob("*") if p.is_file()}
    return {name: path.read_bytes() for name, path in found.items() if name != ".lock"}


def publish(hub, data: Path, name: str = "datasets/tester/toy") -> Path:
    """Put a folder on the stand-in without going through hub.py."""
    remote = hub.root / name
    remote.mkdir(parents=True)
    for path, data_bytes in contents(data).items():
        (remote / path).write_bytes(data_bytes)
    return remote


# -- data --------------------------------------------------------------------------------------------------------------


def test_data_is_pushed_and_pulled_from_the_command_line(run_script, hub, tmp_path):
    data = make_shards(tmp_path / "data")
    done = [run_script("hub.py", "push-data", data, "toy", env=hub.env())]
    done.append(run_script("hub.py", "pull-data", "tester/toy", tmp_path / "out", env=hub.env()))
    assert contents(tmp_path / "out") == contents(data)
    done.append(run_script("hub.py", "pull-data", "tester/none", tmp_path / "out", env=hub.env(), check=False))
    assert done[-1].returncode == 1 and done[-1].stderr.splitlines()[-1].startswith("error: ")
    assert not any(hub.token in d.stdout + d.stderr or "Traceback" in d.stderr for d in done)


def test_pushed_data_comes_back_identical(run, hub, tmp_path):
    data = make_shards(tmp_path / "data")
    hub.faults.append(Fault("status", "/lfs/", code=500, method="PUT"))  # one upload has to be repeated
    assert "python hub.py pull-data tester/toy" in run("push-data", data, "toy")  # the owner is the token's
    assert "datasets/tester/toy" in hub.private
    before = hub.count("PUT", "/lfs/")
    run("push-data", data, "tester/toy")  # again: nothing to send
    assert hub.count("PUT", "/lfs/") == before
    hub.faults.append(Fault("drop", "train_000001.npy"))
    run("pull-data", "hf://tester/toy", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(data)  # and nothing else: no half file, no bookkeeping
    gets = hub.count("GET", "resolve")
    run("pull-data", "tester/toy", tmp_path / "out")
    assert hub.count("GET", "resolve") <= gets + 1  # the manifest at most


def test_push_refuses_what_does_not_match_its_manifest(run, hub, tmp_path):
    data = make_shards(tmp_path / "data")
    shard = data / "toy_train_000001.npy"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    run("push-data", data, "tester/toy", says=r"toy_train_000001\.npy")
    assert not hub.count("POST", "")
    (tmp_path / "empty").mkdir()
    run("push-data", tmp_path / "empty", "tester/toy", says="manifest")


def test_a_half_push_has_no_manifest(run, hub, tmp_path):
    data = make_shards(tmp_path / "data")
    hub.faults.append(Fault("status", "/commit/", code=400, times=1))
    run("push-data", data, "tester/toy", says="answered 400")
    assert not contents(hub.root / "datasets/tester/toy")
    run("push-data", data, "tester/toy")
    commits = [path for method, path, status, _ in hub.log if "/commit/" in path and status == 200]
    assert len(commits) == 2  # shards, then the manifest
    assert contents(data).items() < contents(hub.root / "datasets/tester/toy").items()


def test_push_never_turns_public_by_accident(run, hub, tmp_path):
    data = make_shards(tmp_path / "data")
    (hub.root / "datasets/tester/toy").mkdir(parents=True)  # there, and public
    run("push-data", data, "tester/toy", says="--public")
    assert not contents(hub.root)
    run("push-data", data, "tester/toy", "--public")


def test_what_arrives_corrupted_is_named_and_fetched_by_the_same_command(run, hub, tmp_path):
    data = make_shards(tmp_path / "data")
    publish(hub, data)
    for name in ("toy_train_000002.npy", "manifest.json"):
        out = tmp_path / f"without {name}"
        hub.faults.append(Fault("corrupt", name))
        run("pull-data", "tester/toy", out, says=f"{name} came from tester/toy with a wrong hash")
        assert not (out / name).exists() and not (out / "manifest.json").exists()
        assert all(contents(data)[name] == found for name, found in contents(out).items())
        run("pull-data", "tester/toy", out)
        assert contents(out) == contents(data)


def test_a_file_that_differs_is_named_and_kept(run, hub, tmp_path):
    data, out = make_shards(tmp_path / "data"), tmp_path / "out"
    publish(hub, data)
    run("pull-data", "tester/toy", out)
    shard = out / "toy_train_000001.npy"
    shard.write_bytes(shard.read_bytes()[:-2] + b"\1\1")
    damaged = contents(out)
    run("pull-data", "tester/toy", out, says=r"different toy_train_000001\.npy.*move the file away")
    assert contents(out) == damaged
    shard.unlink()
    run("pull-data", "tester/toy", out)
    assert contents(out) == contents(data)
    other = make_shards(tmp_path / "other", seed=1)  # other tokens under the same names
    mine = contents(other)
    run("pull-data", "tester/toy", other, says="empty folder")
    assert contents(other) == mine
    (other / "manifest.json").unlink()
    run("pull-data", "tester/toy", other, says="empty folder")
    assert contents(other).items() < mine.items()


@pytest.mark.parametrize("name", ["../toy_train_000009.npy", "/tmp/toy_train_000009.npy", "..\\toy_train_000009.npy"])
def test_hostile_paths_stay_outside(run, hub, tmp_path, name):
    remote = publish(hub, make_shards(tmp_path / "data"))
    manifest = json.loads((remote / "manifest.json").read_text())
    manifest["shards"][1]["file"] = name
    (remote / "manifest.json").write_text(json.dumps(manifest))
    hub.extra_tree.append({"type": "file", "path": name, "size": 1, "oid": "0" * 40})
    before = contents(tmp_path / "data")
    run("pull-data", "tester/toy", tmp_path / "deep/out", says=r"manifest\.json")
    (remote / "manifest.json").unlink()  # now as a set without a manifest: what is not named like a shard is not taken
    run("pull-data", "tester/toy", tmp_path / "deep/out")
    assert {p.name for p in (tmp_path / "deep").iterdir()} == {"out"}
    assert contents(tmp_path / "deep/out").keys() == before.keys() - {"manifest.json"}


def test_set_without_a_manifest_and_a_limit(run, hub, tmp_path):
    remote = hub.root / "datasets/kjj0/fineweb10B-gpt2"
    remote.mkdir(parents=True)
    for name in ("fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, 5))):
        shards.write_shard(remote / name, np.arange(500) % 50257)
    (remote / "README.md").write_text("tokens")
    run("pull-data", "kjj0/fineweb10B-gpt2", tmp_path / "out", "--limit-shards", "2", token="")
    names = ["fineweb_train_000001.bin", "fineweb_train_000002.bin", "fineweb_val_000000.bin"]
    assert sorted(contents(tmp_path / "out")) == names
    publish(hub, make_shards(tmp_path / "data"))
    run("pull-data", "tester/toy", tmp_path / "few", "--limit-shards", "1")
    assert len(shards.find_shards(tmp_path / "few", "train")) == 1
    assert not list(shards.verify(tmp_path / "few"))  # the manifest tells of what is there
    run("pull-data", "tester/toy", tmp_path / "few")  # and grows with it
    assert contents(tmp_path / "few") == contents(tmp_path / "data")


@pytest.mark.parametrize("kind", ["npy", "bin"])
def test_shards_of_another_program_are_adopted_pushed_pulled_and_verified(run, hub, tmp_path, monkeypatch, kind):
    """As build-nanogpt and llm.c write them, with a last shard that is shorter. Until then each command says which."""
    data = tmp_path / "edu_fineweb10B"
    data.mkdir()
    for name, size in {
        "edufineweb_val_000000": 900,
        "edufineweb_train_000001": 900,
        "edufineweb_train_000002": 70,
    }.items():
        shards.write_shard(data / f"{name}.{kind}", np.array([50256, *range(size - 3), 50256, 7]))

    def fineweb_script(*args):
        monkeypatch.setattr(sys, "argv", ["fineweb.py", *map(str, args)])
        fineweb.main()

    run("push-data", data, "tester/old", says=f"python fineweb.py --adopt {data}")
    with pytest.raises(UserError, match=f"python fineweb.py --adopt {data}"):
        fineweb_script("--source", "stdlib", "--out", data)
    before = contents(data)
    fineweb_script("--adopt", data)
    fineweb_script("--verify", data)
    assert contents(data).items() > before.items()
    assert [(s.tokens, s.documents) for s in shards.read_manifest(data).shards] == [(900, 2), (900, 2), (70, 2)]
    run("push-data", data, "tester/old")
    assert "1,870 GPT-2 tokens from an unknown source" in (hub.root / "datasets/tester/old/README.md").read_text()
    run("pull-data", "tester/old", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(data)
    for words, says in {
        ("--adopt",): "has a manifest.json already",
        ("--source", "stdlib", "--out"): "unknown source",
    }.items():
        with pytest.raises(UserError, match=says):
            fineweb_script(*words, data)


def test_what_is_no_set_of_shards_is_not_adopted(tmp_path):
    with pytest.raises(UserError, match="no shard"):
        shards.adopt(tmp_path)
    for wrong, says in {(50256, 50257): "token 1 is id 50257", (1, 50256): "begins with id 1"}.items():
        shards.write_shard(tmp_path / "x_train_000001.npy", np.array(wrong))
        with pytest.raises(UserError, match=says):
            shards.adopt(tmp_path)
    shards.write_shard(tmp_path / "x_val_000000.bin", np.array(wrong))
    with pytest.raises(UserError, match="one kind"):
        shards.adopt(tmp_path)
    assert not (tmp_path / "manifest.json").exists()


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_errors_are_one_clear_message(run, hub, tmp_path):
    data = make_shards(tmp_path / "data")
    publish(hub, data)
    hub.private.add("datasets/tester/toy")

    out, start = tmp_path / "out", time.monotonic()
    run("push-data", data, "tester/toy", token="", says="(?s)hf auth login.*HF_TOKEN")
    run("pull-data", "tester/toy", out, token="", says="(?s)401.*hf auth login")
    assert "hf_wrong" not in run("push-data", data, "tester/toy", token="hf_wrongPlantedToken", says="401")
    run("push-data", data, "somebody/toy", says="403")
    run("pull-data", "tester/none", out, says="404")
    run("pull-data", "tester/toy", out, "--revision", "v0", says="404")
    run("pull-data", "a/b/c", out, says="OWNER/NAME")
    for command in (["push-data", data, "tester/toy"], ["pull-data", "tester/toy", out]):
        run(*command, endpoint="http://127.0.0.1:9", says="cannot reach http://127.0.0.1:9")
    hub.faults.append(Fault("html", "/api/datasets"))
    run("pull-data", "tester/toy", out, says="log-in page")
    hub.faults.append(Fault("status", "/api/datasets", code=503))
    run("pull-data", "tester/toy", out, says="503")
    assert not out.exists() and time.monotonic() - start < 30


def test_an_error_that_quotes_the_token_is_cleaned(monkeypatch):
    from system.hub_client import open_hub

    monkeypatch.setenv("HF_TOKEN", "hf_planted")
    for error in (RuntimeError("no: hf_planted"), KeyError("hf_planted")):
        with pytest.raises(UserError, match=r"\*\*\*") as e, open_hub("tester/toy"):
            raise error
        assert "hf_planted" not in str(e.value)


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    torch.manual_seed(0)
    return GPT(GPTConfig(block_size=32, vocab_size=50304, n_layer=2, n_head=4, n_embd=32))


@pytest.fixture
def make_run(tiny, tmp_path):
    """A run folder: one checkpoint, metrics beyond it, the config."""

    def make(name: str = "run") -> Path:
        out = tmp_path / name
        out.mkdir()
        checkpoint.write(out / "model_00010.pt", checkpoint.model_file(tiny, 10))
        checkpoint.write(out / "optim_00010.pt", {"format": checkpoint.FORMAT, "step": 10})
        rows = [{"step": 10, "val_loss": 3.25, "hellaswag_acc_norm": 0.29}, {"step": 20, "val_loss": 3.125}]
        (out / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows) + '{"step": 3')
        (out / "config.json").write_text(json.dumps({"total_batch_size": 4096}))
        return out

    return make


def logits_of(model):
    return model.eval()(torch.arange(20)[None])[0]


def test_pushed_model_comes_back_and_loads(run, hub, tiny, make_run, tmp_path):
    out = make_run()
    run("push-model", out, "tester/model", "--with-optimizer")
    remote = hub.root / "models/tester/model"
    assert {p.name for p in remote.iterdir()} == {p.name for p in out.iterdir()} | {"README.md"}
    card = (remote / "README.md").read_text()
    assert "3.25" in card and "0.29" in card and "40,960" in card and "3.125" not in card
    assert f"{tiny.num_params():,} parameters" in card
    run("pull-model", "tester/model", tmp_path / "copy")
    assert (tmp_path / "copy/optim_00010.pt").read_bytes() == (out / "optim_00010.pt").read_bytes()
    assert torch.equal(logits_of(open_model(tmp_path / "copy")), logits_of(tiny))
    run("push-model", out / "model_00010.pt", "tester/bare")
    run("pull-model", "tester/bare", tmp_path / "bare")
    assert not list((tmp_path / "bare").glob("optim_*"))
    assert open_model(tmp_path / "bare").config == tiny.config  # weights alone are a run folder too


@pytest.mark.parametrize(
    "words, names",
    [
        ("--steps best", "model_00010"),
        ("--steps best --with-optimizer", "model_00010 model_00030 optim_00030"),
        ("--steps all", "model_00010 model_00020 model_00030"),
    ],
)
def test_the_best_step_or_all_are_pushed(run, hub, tiny, make_run, words, names):
    """Step 20 has the lowest val loss, but its weights are not there any more; of step 30 nothing is known."""
    out = make_run()
    for step in (20, 30):
        checkpoint.write(out / f"model_000{step}.pt", checkpoint.model_file(tiny, step))
    checkpoint.write(out / "optim_00030.pt", {"format": checkpoint.FORMAT, "step": 30})
    if "best" in words:
        (out / "model_00020.pt").unlink()
    run("push-model", out, "tester/best", *words.split())
    remote = hub.root / "models/tester/best"
    assert sorted(p.stem for p in remote.glob("*.pt")) == names.split()
    assert ("3.25" in (remote / "README.md").read_text()) == ("best" in words)
    (out / "metrics.jsonl").unlink()
    assert "taken for the best" in run("push-model", out, "tester/unknown", "--steps", "best")
    assert [p.stem for p in (hub.root / "models/tester/unknown").glob("*.pt")] == ["model_00030"]


def test_a_token_that_only_reads_is_found_out_before_a_run(run, hub):
    assert "may push" in run("check", "mine")
    assert "models/tester/mine" in hub.private
    hub.read_only = True
    for name in ("tester/mine", "tester/new"):  # where the repository exists, asking for it to be made succeeds
        run("check", name, says="403.*write, to push")
    assert not (hub.root / "models/tester/new").exists()


def test_a_run_is_pushed_as_it_grows_and_pulled_where_it_is(run, tiny, make_run, tmp_path):
    out = make_run()
    run("push-model", out, "tester/grows", "--with-optimizer")
    checkpoint.write(out / "model_00030.pt", checkpoint.model_file(tiny, 30))
    checkpoint.write(out / "optim_00030.pt", {"format": checkpoint.FORMAT, "step": 30})
    done = threading.Event()

    def grow():  # the run goes on meanwhile
        while not done.wait(0.001):
            with open(out / "metrics.jsonl", "a") as f:
                f.write('\n{"step": 31, "train_loss": 3.0}')

    run_on = threading.Thread(target=grow, daemon=True)
    run_on.start()
    run("push-model", out, "tester/grows", "--with-optimizer")
    done.set()
    run_on.join()
    run("pull-model", "tester/grows", tmp_path / "new")
    assert {p.name for p in (tmp_path / "new").glob("*.pt")} == {"model_00030.pt", "optim_00030.pt"}
    assert checkpoint.latest_step(tmp_path / "new") == 30
    assert {row["step"] for row in metrics_file.read_metrics(tmp_path / "new" / "metrics.jsonl")} >= {10, 20}
    run("pull-model", "tester/grows", tmp_path / "all", "--every-step")
    assert checkpoint.complete_steps(tmp_path / "all") == [10, 30]


def test_export_loads_in_transformers(run, tiny, make_run, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    run("export", make_run(), tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    idx = torch.arange(20)[None]
    ours = logits_of(tiny)[..., :50257]
    assert torch.allclose(theirs(idx).logits, ours, atol=1e-4, rtol=0)
    text = "Hello, world"
    expected = tokenizer.encoding().encode_ordinary(text)
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")(text)["input_ids"] == expected
    assert "3.25" in (tmp_path / "hf/README.md").read_text()
    with pytest.raises(UserError, match="empty folder"):
        hub_script.export(tmp_path / "run", tmp_path / "hf")
    run("push-model", tmp_path / "hf", "tester/hf")
    run("pull-model", "tester/hf", tmp_path / "hf2")
    assert contents(tmp_path / "hf2") == contents(tmp_path / "hf")


def test_an_import_never_joins_another_run(run, tiny, tmp_path):
    torch.save({"model": tiny.state_dict(), "config": {"n_head": 4}, "step": 19072}, tmp_path / "old.pt")
    assert "python infer.py" in run("import", "old.pt", tmp_path / "out")
    path = tmp_path / "out/model_19072.pt"
    assert same_bits(open_model(path).state_dict(), tiny.state_dict())
    first = hashlib.sha256(path.read_bytes()).digest()
    run("import", "old.pt", tmp_path / "out", says="already has a model")
    assert hashlib.sha256(path.read_bytes()).digest() == first
    run("import", "none.pt", tmp_path / "new", says="no checkpoint none.pt")
    assert not (tmp_path / "new").exists()
