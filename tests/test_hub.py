"""hub.py against a stand-in Hub on loopback: what is pushed comes back identical, and nothing wrong ever counts."""

import hashlib
import json
import os
import pickle
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import hub_server
import numpy as np
import pytest
from hub_server import Fault

import convert
import hub as hub_script
import shards
from cli import UserError

SHARDS = 3


@pytest.fixture
def hub(tmp_path):
    with hub_server.start(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def run(run_script, hub, tmp_path):
    """run("pull-data", ...): hub.py as a user runs it; its output never holds the token."""

    def go(*args, check=True, env=None, **kwargs):
        done = run_script("hub.py", *args, check=False, env={**hub.env(), **(env or {})}, cwd=tmp_path, **kwargs)
        text = done.stdout + done.stderr
        assert hub.token not in text
        assert "Traceback" not in text, text
        assert not check or done.returncode == 0, text
        return done

    return go


def make_shards(folder: Path, seed: int = 0) -> Path:
    """A folder of SHARDS shards with the manifest that fineweb.py would write."""
    folder.mkdir()
    rng, made = np.random.default_rng(seed), []
    for i in range(SHARDS):
        tokens = rng.integers(0, 50256, 20_000).astype(np.uint16)
        tokens[0] = 50256
        name = f"toy_{'train' if i else 'val'}_{i:06d}.npy"
        sha256 = shards.write_shard(folder / name, tokens)
        end = {"file": 0, "token": i}
        made.append(shards.Shard(name, len(tokens), int((tokens == 50256).sum()), sha256, end))
    source = {
        "name": "toy",
        "subset": "",
        "column": "text",
        "revision": "1",
        "files": [{"path": "toy.txt", "bytes": 1}],
    }
    shards.write_manifest(folder, shards.Manifest(source, "npy", 20_000, complete=True, shards=made))
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def publish(hub, data: Path, name: str = "datasets/tester/toy") -> Path:
    """Put a folder on the stand-in without going through hub.py."""
    remote = hub.root / name
    remote.mkdir(parents=True)
    for path, data_bytes in contents(data).items():
        (remote / path).write_bytes(data_bytes)
    return remote


# -- data --------------------------------------------------------------------------------------------------------------


def test_pushed_data_comes_back_identical(run, hub, tmp_path):
    data = make_shards(tmp_path / "data")
    hub.faults.append(Fault("status", "/lfs/", code=500, method="PUT"))  # one upload has to be repeated
    done = run("push-data", data, "toy")  # the owner is the token's
    assert "python hub.py pull-data tester/toy" in done.stdout
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
    done = run("push-data", data, "tester/toy", check=False)
    assert done.returncode == 1 and "toy_train_000001.npy" in done.stderr
    assert not hub.count("POST", "")
    (tmp_path / "empty").mkdir()
    assert "manifest" in run("push-data", tmp_path / "empty", "tester/toy", check=False).stderr


def test_push_never_turns_public_by_accident(run, hub, tmp_path):
    data = make_shards(tmp_path / "data")
    (hub.root / "datasets/tester/toy").mkdir(parents=True)  # there, and public
    done = run("push-data", data, "tester/toy", check=False)
    assert done.returncode == 1 and "--public" in done.stderr
    assert not contents(hub.root)
    run("push-data", data, "tester/toy", "--public")


def test_corrupted_once_is_fetched_again_and_twice_is_named(run, hub, tmp_path):
    data = make_shards(tmp_path / "data")
    publish(hub, data)
    hub.faults.append(Fault("corrupt", "train_000002.npy", times=1))
    run("pull-data", "tester/toy", tmp_path / "once")
    assert contents(tmp_path / "once") == contents(data)
    hub.faults.append(Fault("corrupt", "train_000002.npy", times=2))
    done = run("pull-data", "tester/toy", tmp_path / "twice", check=False)
    assert done.returncode == 1 and "toy_train_000002.npy" in done.stderr
    there = {p.name for p in (tmp_path / "twice").glob("*.npy")}
    assert there == {"toy_val_000000.npy", "toy_train_000001.npy"}  # the good ones, none under a wrong name
    assert not (tmp_path / "twice/manifest.json").exists()
    run("pull-data", "tester/toy", tmp_path / "twice")  # the same command goes on
    assert contents(tmp_path / "twice") == contents(data)


def test_killed_pull_leaves_no_half_file_and_goes_on(run, hub, tmp_path):
    data = make_shards(tmp_path / "data")
    publish(hub, data)
    hub.faults.append(Fault("drop", "train_000002.npy", times=1000))
    out = tmp_path / "out"
    command = [sys.executable, str(Path(shards.__file__).with_name("hub.py")), "pull-data", "tester/toy", str(out)]
    process = subprocess.Popen(command, env={**os.environ, **hub.env()}, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 20
    while hub.count("GET", "train_000002.npy") < 2 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.kill()
    process.wait()
    assert all(contents(data)[p.name] == p.read_bytes() for p in out.glob("*.*") if p.is_file())
    hub.faults.clear()
    before = hub.count("GET", "resolve")
    run("pull-data", "tester/toy", out)
    assert contents(out) == contents(data)
    fetched = [path for method, path, _, _ in hub.log[before:] if method == "GET" and "resolve" in path]
    assert any("train_000002" in path for path in fetched)


def test_damaged_copy_is_mended_but_a_strange_file_is_kept(run, hub, tmp_path):
    data = make_shards(tmp_path / "data")
    publish(hub, data)
    run("pull-data", "tester/toy", tmp_path / "out")
    shard = tmp_path / "out/toy_train_000001.npy"
    shard.write_bytes(shard.read_bytes()[:-2] + b"\1\1")
    run("pull-data", "tester/toy", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(data)
    other = make_shards(tmp_path / "other", seed=1)  # other tokens under the same names
    mine = contents(other)
    assert run("pull-data", "tester/toy", other, check=False).returncode == 1
    (other / "manifest.json").unlink()
    done = run("pull-data", "tester/toy", other, check=False)
    assert done.returncode == 1 and "empty folder" in done.stderr
    assert {k: v for k, v in contents(other).items() if ".incoming" not in k} == {
        k: v for k, v in mine.items() if k != "manifest.json"
    }


@pytest.mark.parametrize("name", ["../toy_train_000009.npy", "/tmp/toy_train_000009.npy", "..\\toy_train_000009.npy"])
def test_hostile_paths_stay_outside(run, hub, tmp_path, name):
    remote = publish(hub, make_shards(tmp_path / "data"))
    manifest = json.loads((remote / "manifest.json").read_text())
    manifest["shards"][1]["file"] = name
    (remote / "manifest.json").write_text(json.dumps(manifest))
    hub.extra_tree.append({"type": "file", "path": name, "size": 1, "oid": "0" * 40})
    before = contents(tmp_path / "data")
    done = run("pull-data", "tester/toy", tmp_path / "deep/out", check=False)
    assert done.returncode == 1 and "manifest.json" in done.stderr
    (remote / "manifest.json").unlink()  # now as a set without a manifest: what is not named like a shard is not taken
    run("pull-data", "tester/toy", tmp_path / "deep/out")
    assert {p.name for p in (tmp_path / "deep").iterdir()} == {"out"}
    assert {p.name for p in (tmp_path / "deep/out").iterdir()} == {k for k in before if k != "manifest.json"}


def test_set_without_a_manifest_and_a_limit(run, hub, tmp_path):
    remote = hub.root / "datasets/kjj0/fineweb10B-gpt2"
    remote.mkdir(parents=True)
    for name in ("fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, 5))):
        shards.write_shard(remote / name, np.arange(500) % 50257)
    (remote / "README.md").write_text("tokens")
    run("pull-data", "kjj0/fineweb10B-gpt2", tmp_path / "out", "--limit-shards", "2", env={"HF_TOKEN": ""})
    names = sorted(p.name for p in (tmp_path / "out").iterdir())
    assert names == ["fineweb_train_000001.bin", "fineweb_train_000002.bin", "fineweb_val_000000.bin"]
    publish(hub, make_shards(tmp_path / "data"))
    run("pull-data", "tester/toy", tmp_path / "few", "--limit-shards", "1")
    assert len(shards.find_shards(tmp_path / "few", "train")) == 1
    assert not list(shards.verify(tmp_path / "few"))  # the manifest tells of what is there
    run("pull-data", "tester/toy", tmp_path / "few")  # and grows with it
    assert contents(tmp_path / "few") == contents(tmp_path / "data")


# -- what goes wrong ---------------------------------------------------------------------------------------------------


def test_errors_are_one_clear_message(run, hub, tmp_path):
    data = make_shards(tmp_path / "data")
    publish(hub, data)
    hub.private.add("datasets/tester/toy")

    def says(*args, env=None):
        start = time.monotonic()
        done = run(*args, check=False, env=env)
        assert done.returncode == 1 and time.monotonic() - start < 10
        return done.stderr[done.stderr.index("error: ") :]

    no_token = {"HF_TOKEN": ""}
    wrong = {"HF_TOKEN": "hf_wrongPlantedToken"}
    gone = {"HF_ENDPOINT": "http://127.0.0.1:9"}
    text = says("push-data", data, "tester/toy", env=no_token)
    assert "hf auth login" in text and "HF_TOKEN" in text
    text = says("pull-data", "tester/toy", "out", env=no_token)
    assert "hf auth login" in text and "401" in text
    assert "hf_wrong" not in (text := says("push-data", data, "tester/toy", env=wrong)) and "401" in text
    assert "403" in says("push-data", data, "somebody/toy")
    assert "404" in says("pull-data", "tester/none", "out")
    assert "404" in says("pull-data", "tester/toy", "out", "--revision", "v0")
    assert "OWNER/NAME" in says("pull-data", "a/b/c", "out")
    for command in (["push-data", data, "tester/toy"], ["pull-data", "tester/toy", "out"]):
        assert "cannot reach http://127.0.0.1:9" in says(*command, env=gone)
    assert "HF_HUB_OFFLINE" in says("pull-data", "tester/toy", "out", env={"HF_HUB_OFFLINE": "1"})
    hub.faults.append(Fault("html", "/api/datasets"))
    assert "log-in page" in says("pull-data", "tester/toy", "out")
    hub.faults.append(Fault("status", "/api/datasets", code=503))
    assert "503" in says("pull-data", "tester/toy", "out")


# -- models ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tiny():
    import torch

    from model import GPT, GPTConfig

    torch.manual_seed(0)
    return GPT(GPTConfig(block_size=32, vocab_size=50304, n_layer=2, n_head=4, n_embd=32))


@pytest.fixture
def make_run(tiny, tmp_path):
    """A run folder: one checkpoint, metrics beyond it, the config."""

    def make(name: str = "run") -> Path:
        checkpoint = pytest.importorskip("checkpoint")
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
    import torch

    return model.eval()(torch.arange(20)[None])[0]


def test_pushed_model_comes_back_and_loads(run, hub, tiny, make_run, tmp_path):
    import torch

    from checkpoint import load_model

    out = make_run()
    run("push-model", out, "tester/model", "--with-optimizer")
    remote = hub.root / "models/tester/model"
    assert {p.name for p in remote.iterdir()} == {p.name for p in out.iterdir()} | {"README.md"}
    card = (remote / "README.md").read_text()
    assert "3.25" in card and "0.29" in card and "40,960" in card and "3.125" not in card
    assert f"{tiny.num_params():,} parameters" in card
    run("pull-model", "tester/model", tmp_path / "copy")
    assert (tmp_path / "copy/optim_00010.pt").read_bytes() == (out / "optim_00010.pt").read_bytes()
    assert torch.equal(logits_of(load_model(tmp_path / "copy", "cpu")), logits_of(tiny))
    run("push-model", out / "model_00010.pt", "tester/bare")
    run("pull-model", "tester/bare", tmp_path / "bare")
    assert not list((tmp_path / "bare").glob("optim_*"))
    assert load_model(tmp_path / "bare", "cpu").config == tiny.config  # weights alone are a run folder too


def test_a_run_is_pushed_as_it_grows_and_pulled_where_it_is(run, tiny, make_run, tmp_path):
    import checkpoint
    import metrics

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
    run("push-model", out, "tester/grows", "--with-optimizer", timeout=30)
    done.set()
    run_on.join()
    run("pull-model", "tester/grows", tmp_path / "new")
    assert {p.name for p in (tmp_path / "new").glob("*.pt")} == {"model_00030.pt", "optim_00030.pt"}
    assert checkpoint.latest_step(tmp_path / "new") == 30
    assert {row["step"] for row in metrics.read_lines(tmp_path / "new" / "metrics.jsonl")} >= {10, 20}
    run("pull-model", "tester/grows", tmp_path / "all", "--every-step")
    assert checkpoint.complete_steps(tmp_path / "all") == [10, 30]


def test_export_loads_in_transformers(run, tiny, make_run, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import tokenizer

    run("export", make_run(), tmp_path / "hf")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    idx = torch.arange(20)[None]
    ours = logits_of(tiny)[..., :50257]
    assert torch.allclose(theirs(idx).logits, ours, atol=1e-4, rtol=0)
    text = "Hello, world"
    assert AutoTokenizer.from_pretrained(tmp_path / "hf")(text)["input_ids"] == tokenizer.encoding().encode_ordinary(
        text
    )
    assert "3.25" in (tmp_path / "hf/README.md").read_text()
    with pytest.raises(UserError, match="empty folder"):
        hub_script.export(tmp_path / "run", tmp_path / "hf")
    run("push-model", tmp_path / "hf", "tester/hf")
    run("pull-model", "tester/hf", tmp_path / "hf2")
    assert contents(tmp_path / "hf2") == contents(tmp_path / "hf")


# -- old checkpoints ---------------------------------------------------------------------------------------------------


@dataclass
class GPTConfig:
    """As build-nanogpt has it: a class of the script that trained, pickled by name."""

    block_size: int = 32
    vocab_size: int = 50304
    n_layer: int = 2
    n_head: int = 4
    n_embd: int = 32


def test_import_build_nanogpt(run, tiny, tmp_path, monkeypatch):
    import torch

    checkpoint = pytest.importorskip("checkpoint")
    monkeypatch.setattr(GPTConfig, "__module__", "__main__")
    monkeypatch.setattr(sys.modules["__main__"], "GPTConfig", GPTConfig, raising=False)
    saved = {"model": tiny.state_dict(), "config": GPTConfig(), "step": 19072, "val_loss": 3.07}
    torch.save(saved, tmp_path / "old.pt")
    assert b"__main__\nGPTConfig" in (tmp_path / "old.pt").read_bytes()
    run("import", "old.pt", "out")
    assert torch.equal(logits_of(checkpoint.load_model(tmp_path / "out/model_19072.pt", "cpu")), logits_of(tiny))
    first = hashlib.sha256((tmp_path / "out/model_19072.pt").read_bytes()).digest()
    with pytest.raises(UserError, match="already"):
        convert.import_old(tmp_path / "old.pt", tmp_path / "out")
    assert hashlib.sha256((tmp_path / "out/model_19072.pt").read_bytes()).digest() == first


@pytest.mark.parametrize("bias", [True, False])
def test_import_nanogpt(tmp_path, bias):
    import torch

    from model import GPT, GPTConfig

    checkpoint = pytest.importorskip("checkpoint")
    torch.manual_seed(1)
    model = GPT(GPTConfig(block_size=32, vocab_size=65, n_layer=3, n_head=2, n_embd=32, bias=bias))
    weights = {f"_orig_mod.{k}": v for k, v in model.state_dict().items()}
    weights["_orig_mod.transformer.h.0.attn.bias"] = torch.ones(1, 1, 32, 32).tril()  # old torch: the mask is a buffer
    args = {"n_layer": 3, "n_head": 2, "n_embd": 32, "block_size": 32, "bias": bias, "vocab_size": 65, "dropout": 0.0}
    saved = {
        "model": weights,
        "optimizer": {"state": {}},
        "model_args": args,
        "iter_num": 250,
        "config": {"device": "x"},
    }
    torch.save({**saved, "best_val_loss": torch.tensor(1.5)}, tmp_path / "ckpt.pt")
    convert.import_old(tmp_path / "ckpt.pt", tmp_path / "out")
    assert torch.equal(logits_of(checkpoint.load_model(tmp_path / "out", "cpu")), logits_of(model))


class Evil:
    def __init__(self, mark):
        self.mark = mark

    def __reduce__(self):
        return os.system, (f"touch {self.mark}",)


class EvilConfig(Evil):
    def __reduce__(self):
        return eval, (f"open({str(self.mark)!r}, 'w')",)


@pytest.mark.parametrize("evil", [Evil, EvilConfig])
def test_import_runs_no_pickled_code(tiny, tmp_path, evil):
    import torch

    mark = tmp_path / "owned"
    torch.save({"model": tiny.state_dict(), "config": evil(mark), "step": 1}, tmp_path / "evil.pt")
    pickle.loads(pickle.dumps(Evil(tmp_path / "proof")))
    assert (tmp_path / "proof").exists()  # the attack itself works
    with pytest.raises(UserError, match="could run code"):
        convert.import_old(tmp_path / "evil.pt", tmp_path / "out")
    assert not mark.exists() and not (tmp_path / "out").exists()


def test_import_refuses_other_things(tmp_path):
    import torch

    torch.save({"model": {"a.weight": torch.ones(2)}}, tmp_path / "other.pt")
    torch.save([1, 2], tmp_path / "list.pt")
    (tmp_path / "text.pt").write_text("hello")
    for name, says in (("other.pt", "it has no 'transformer.wte.weight'"), ("list.pt", ""), ("text.pt", "")):
        with pytest.raises(UserError, match=f"build-nanogpt or nanoGPT.*{says}"):
            convert.import_old(tmp_path / name, tmp_path / "out")
    assert not (tmp_path / "out").exists()
