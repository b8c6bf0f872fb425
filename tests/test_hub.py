"""hub.py against a stand-in Hub on loopback (faults/hub_server.py), so no test needs the network.

What is pushed comes back identical, an interrupted transfer continues, and a file with a wrong hash is never accepted.
Most tests call run("push-data", ...), which is hub.py's main in this process.
"""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from faults import hub_server
from faults.hub_server import Fault
from helpers import make_shards, same_bits

import hub as hub_script
from model import GPT, GPTConfig
from system.cli import UserError
from system.hub_client import open_hub
from tokens import shards
from training import checkpoint
from training.open_model import open_model


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


def contents(folder: Path) -> dict[str, bytes]:
    """The bytes of every file below a folder, by relative path, without huggingface_hub's own notes on a download."""
    files = {p.relative_to(folder).as_posix(): p.read_bytes() for p in folder.rglob("*") if p.is_file()}
    return {name: data for name, data in files.items() if not name.startswith(".cache/")}


@pytest.fixture
def published(hub, tmp_path) -> Path:
    """The repository tester/toy, whose shards are those of tmp_path/data."""
    repo = hub.root / "datasets/tester/toy"
    repo.mkdir(parents=True)
    for name, data in contents(make_shards(tmp_path / "data")).items():
        (repo / name).write_bytes(data)
    return repo


# ------------------------------------------------------------------------- token shards


def test_data_is_pushed_and_pulled_from_the_command_line(run_script, run_in_fork, hub, tmp_path):
    data = make_shards(tmp_path / "data")

    push = run_script("hub.py", "push-data", data, "toy", env=hub.env())
    pull = run_in_fork("hub.py", "pull-data", "tester/toy", tmp_path / "out", env=hub.env())
    unknown = run_in_fork("hub.py", "pull-data", "tester/none", tmp_path / "out", env=hub.env(), check=False)

    assert "datasets/tester/toy" in hub.private
    assert contents(tmp_path / "out") == contents(data)
    assert unknown.returncode == 1 and unknown.stderr.splitlines()[-1].startswith("error: ")
    for done in (push, pull, unknown):
        assert hub.token not in done.stdout + done.stderr
        assert "Traceback" not in done.stderr


def test_complete_files_are_not_transferred_twice(run, hub, tmp_path):
    data = make_shards(tmp_path / "data")
    run("push-data", data, "tester/toy")
    uploads = hub.count("PUT", "/lfs/")
    run("push-data", data, "tester/toy")
    assert hub.count("PUT", "/lfs/") == uploads

    # the second file cannot be had, and the first one has arrived
    hub.faults.append(Fault("status", "train_000002.npy", times=10**6, code=404))
    run("pull-data", "tester/toy", tmp_path / "out", fails_with="locate the file")
    assert not (tmp_path / "out/manifest.json").exists()
    hub.faults.clear()
    hub.log.clear()
    run("pull-data", "tester/toy", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(data)
    assert hub.count("GET", "train_000002.npy") == 1 and not hub.count("GET", "train_000001.npy")


def test_a_push_refuses_what_does_not_match_its_manifest(run, hub, tmp_path):
    data = make_shards(tmp_path / "data")
    shard = data / "toy_train_000001.npy"
    shard.write_bytes(shard.read_bytes()[:-1] + b"\0")
    run("push-data", data, "tester/toy", fails_with=r"toy_train_000001\.npy")

    assert not hub.count("POST", "")  # nothing was sent


def test_a_push_that_fails_half_way_leaves_no_manifest(run, hub, tmp_path):
    data = make_shards(tmp_path / "data")
    hub.faults.append(Fault("status", "/commit/", code=400))
    run("push-data", data, "tester/toy", fails_with="planted fault")
    assert not contents(hub.root / "datasets/tester/toy")

    run("push-data", data, "tester/toy")
    assert contents(hub.root / "datasets/tester/toy") == contents(data)


def test_a_push_never_publishes_by_accident(run, hub, tmp_path):
    data = make_shards(tmp_path / "data")
    (hub.root / "datasets/tester/toy").mkdir(parents=True)  # exists, and is public
    run("push-data", data, "tester/toy", fails_with="--public")
    assert not contents(hub.root)

    run("push-data", data, "tester/toy", "--public")
    assert contents(hub.root)


@pytest.mark.parametrize("name", ["toy_train_000002.npy", "manifest.json"])
def test_what_arrives_corrupted_is_never_taken(run, hub, published, tmp_path, name):
    hub.faults.append(Fault("corrupt", name))
    run("pull-data", "tester/toy", tmp_path / "out", fails_with=name)
    # the file is missing, and so is the manifest, without which the folder does not count as complete
    assert not (tmp_path / "out" / name).exists() and not (tmp_path / "out/manifest.json").exists()

    run("pull-data", "tester/toy", tmp_path / "out")
    assert contents(tmp_path / "out") == contents(tmp_path / "data")


def test_a_file_that_differs_is_named_and_kept(run, published, tmp_path):
    out = tmp_path / "out"
    run("pull-data", "tester/toy", out)
    shard = out / "toy_train_000001.npy"
    shard.write_bytes(shard.read_bytes()[:-2] + b"\1\1")
    damaged = contents(out)

    run("pull-data", "tester/toy", out, fails_with=r"different toy_train_000001\.npy")
    assert contents(out) == damaged

    # moved away, it is fetched again
    shard.unlink()
    run("pull-data", "tester/toy", out)
    assert contents(out) == contents(tmp_path / "data")


def test_a_pull_never_mixes_two_sets_of_shards(run, published, tmp_path):
    other = make_shards(tmp_path / "other", seed=1)  # other tokens
    for path in other.glob("*.npy"):
        path.rename(path.with_name(path.name.replace("toy", "own")))
    text = (other / "manifest.json").read_text()
    (other / "manifest.json").write_text(text.replace("toy_", "own_"))
    before = contents(other)

    run("pull-data", "tester/toy", other, fails_with="empty folder")
    assert contents(other) == before


@pytest.mark.parametrize("name", ["../toy_train_000009.npy", "/tmp/toy_train_000009.npy", "..\\toy_train_000009.npy"])
def test_paths_that_lead_out_of_the_folder_are_refused(run, hub, published, tmp_path, name):
    manifest = json.loads((published / "manifest.json").read_text())
    manifest["shards"][1]["file"] = name
    (published / "manifest.json").write_text(json.dumps(manifest))
    hub.extra_tree.append({"type": "file", "path": name, "rfilename": name, "size": 1, "oid": "0" * 40})
    run("pull-data", "tester/toy", tmp_path / "deep/out", fails_with=r"manifest\.json")

    # Without a manifest, the listing decides: what is not named like a shard is not taken.
    (published / "manifest.json").unlink()
    run("pull-data", "tester/toy", tmp_path / "deep/out")
    assert {p.name for p in (tmp_path / "deep").iterdir()} == {"out"}
    assert contents(tmp_path / "deep/out").keys() == contents(tmp_path / "data").keys() - {"manifest.json"}


def test_a_set_without_a_manifest_is_pushed_and_pulled(run, hub, tmp_path):
    """As build-nanogpt and llm.c write them; anybody pulls a public repository."""
    data = tmp_path / "fineweb10B"
    data.mkdir()
    for name in ("fineweb_val_000000.bin", *(f"fineweb_train_{i:06d}.bin" for i in range(1, 5))):
        shards.write_shard(data / name, np.arange(500) % 50257)
    run("push-data", data, "tester/fineweb10B", "--public")
    (hub.root / "datasets/tester/fineweb10B/README.md").write_text("tokens")

    run("pull-data", "tester/fineweb10B", tmp_path / "out", "--limit-shards", "2", token="")

    names = ["fineweb_train_000001.bin", "fineweb_train_000002.bin", "fineweb_val_000000.bin"]
    assert sorted(contents(tmp_path / "out")) == names


def test_the_manifest_of_a_limited_pull_lists_what_is_there(run, published, tmp_path):
    run("pull-data", "tester/toy", tmp_path / "few", "--limit-shards", "1")
    assert len(shards.find_shards(tmp_path / "few", "train")) == 1
    assert not list(shards.verify(tmp_path / "few"))

    run("pull-data", "tester/toy", tmp_path / "few")
    assert contents(tmp_path / "few") == contents(tmp_path / "data")


def test_every_failure_is_one_clear_message(run, hub, published, tmp_path):
    data, out = tmp_path / "data", tmp_path / "out"
    hub.private.add("datasets/tester/toy")

    # the token: none, a wrong one (which is not printed), one of another user
    run("push-data", data, "tester/toy", token="", fails_with="hf auth login")
    run("pull-data", "tester/toy", out, token="", fails_with="401")
    message = run("push-data", data, "tester/toy", token="hf_wrongPlantedToken", fails_with="401")
    assert "hf_wrong" not in message
    run("push-data", data, "somebody/toy", fails_with="403")

    # the name, the network, the Hub itself, an answer that quotes the token
    run("pull-data", "tester/none", out, fails_with="404")
    run("pull-data", "a/b/c", out, fails_with="namespace/repo_name")
    run("pull-data", "tester/toy", out, endpoint="http://127.0.0.1:9", fails_with="http://127.0.0.1:9")
    hub.faults.append(Fault("status", "/api/datasets", code=500, message=f"no: {hub.token}"))
    run("pull-data", "tester/toy", out, fails_with=r"500.*\*\*\*")
    assert not out.exists()  # no empty folder is left behind


# ------------------------------------------------------------------------- models


@pytest.fixture(scope="module")
def tiny() -> GPT:
    """A tiny model of GPT-2's padded vocabulary."""
    torch.manual_seed(0)
    return GPT(GPTConfig(block_size=32, vocab_size=50304, n_layer=2, n_head=4, n_embd=32)).eval()


def save_checkpoint(out: Path, model: GPT, step: int, with_optimizer: bool = True) -> None:
    """Write the files of a step, of weights that no other step has."""
    with torch.no_grad():
        next(model.parameters()).mul_(1.001)
    checkpoint.write(checkpoint.model_path(out, step), checkpoint.model_file(model, step))
    if with_optimizer:
        state = torch.randn(1000)
        checkpoint.write(checkpoint.optim_path(out, step), {"format": checkpoint.FORMAT, "step": step, "x": state})


@pytest.fixture
def run_folder(tiny, tmp_path) -> Path:
    """A run folder with a checkpoint of step 10, metrics up to step 20 and a torn line, and the config."""
    out = tmp_path / "run"
    out.mkdir()
    save_checkpoint(out, tiny, 10)
    rows = [{"step": 10, "val_loss": 3.25}, {"step": 20, "val_loss": 3.125}]
    (out / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows) + '{"step": 3')
    (out / "config.json").write_text(json.dumps({"total_batch_size": 4096}))
    return out


def pushed_names(hub, repo="tester/run") -> set[str]:
    """The checkpoints in a repository of the stand-in."""
    folder = hub.root / "models" / repo
    return {path.name for path in folder.glob("*.pt")}


def used_bytes(hub) -> int:
    """What all stored objects take."""
    return sum(path.stat().st_size for path in (hub.root / ".lfs").iterdir())


def test_a_pushed_model_comes_back_and_loads(run, hub, tiny, run_folder, tmp_path):
    from transformers import AutoModelForCausalLM

    run("push-model", run_folder, "tester/run", "--with-optimizer")

    # transformers and open_model load the repository; the card says what it is
    repo = hub.root / "models/tester/run"
    idx = torch.arange(20)[None]
    expected = tiny(idx)[0][..., :50257]
    torch.testing.assert_close(AutoModelForCausalLM.from_pretrained(repo)(idx).logits, expected, atol=1e-4, rtol=0)
    assert torch.equal(open_model("tester/run")(idx)[0], expected)
    card = (repo / "README.md").read_text()
    assert f"{tiny.num_params():,} parameters" in card and "3.2500" in card and 'model="tester/run")' in card

    # a pull brings the run's files alone
    for _ in range(2):
        run("pull-model", "tester/run", tmp_path / "copy")
    pulled = contents(tmp_path / "copy")
    assert pulled.pop("train_config.json") == pulled["config.json"] and pulled == contents(run_folder)

    # a run that was continued keeps its settings; another run is never mixed in
    (tmp_path / "copy/config.json").write_text("{}")
    run("pull-model", "tester/run", tmp_path / "copy")
    assert (tmp_path / "copy/config.json").read_text() == "{}"
    (tmp_path / "copy/model_00010.pt").write_bytes(b"mine")
    run("pull-model", "tester/run", tmp_path / "copy", fails_with="different model_00010.pt")
    assert (tmp_path / "copy/model_00010.pt").read_bytes() == b"mine"


@pytest.mark.parametrize("flags, names", [
    ("", "model_00030"),
    ("--steps best", "model_00010"),
    ("--steps best --with-optimizer", "model_00010 model_00030 optim_00030"),
    ("--steps all", "model_00010 model_00020 model_00030"),
])  # fmt: skip
def test_the_chosen_steps_are_pushed(run, hub, tiny, run_folder, flags, names):
    # Step 20 has the lowest val loss, but with `best` its weights are gone; step 30 was never evaluated.
    save_checkpoint(run_folder, tiny, 20, with_optimizer=False)
    save_checkpoint(run_folder, tiny, 30)
    if "best" in flags:
        (run_folder / "model_00020.pt").unlink()

    output = run("push-model", run_folder, "tester/run", *flags.split())

    # without its optimizer state, the run cannot be resumed from the Hub: the push says so
    assert ("cannot be resumed" in output) == ("--with-optimizer" not in flags)
    assert pushed_names(hub) == {f"{name}.pt" for name in names.split()}


def test_a_pull_brings_the_newest_step_or_every_one(run, tiny, run_folder, tmp_path):
    run("push-model", run_folder, "tester/run", "--with-optimizer")
    save_checkpoint(run_folder, tiny, 30)
    run("push-model", run_folder, "tester/run", "--with-optimizer")

    run("pull-model", "tester/run", tmp_path / "new")
    assert {p.name for p in (tmp_path / "new").glob("*.pt")} == {"model_00030.pt", "optim_00030.pt"}
    run("pull-model", "tester/run", tmp_path / "all", "--every-step")
    assert checkpoint.complete_steps(tmp_path / "all") == [10, 30]


def test_a_temporary_push_keeps_only_the_newest(run, hub, tiny, run_folder, tmp_path):
    run("push-model", run_folder, "tester/run")  # stays, whatever comes later
    page = contents(hub.root / "models/tester/run")
    save_checkpoint(run_folder, tiny, 20)
    run("push-model", run_folder, "tester/run", "--with-optimizer", "--temporary")
    stored = used_bytes(hub)
    save_checkpoint(run_folder, tiny, 30)
    run("push-model", run_folder, "tester/run", "--with-optimizer", "--temporary")

    # the branch has the newest step alone, in the storage, too; the page of the repository stays as it is
    assert pushed_names(hub, "tester/run@unfinished") == {"model_00030.pt", "optim_00030.pt"}
    assert contents(hub.root / "models/tester/run") == page
    assert used_bytes(hub) < 1.01 * stored

    # the newest step can be resumed elsewhere
    run("pull-model", "tester/run", tmp_path / "moved")
    assert checkpoint.complete_steps(tmp_path / "moved") == [30]

    # a push that fails removes nothing; the last push of the run does
    save_checkpoint(run_folder, tiny, 40)
    hub.faults.append(Fault("status", "/commit/", code=400))
    run("push-model", run_folder, "tester/run", "--with-optimizer", fails_with="planted fault")
    assert "optim_00030.pt" in pushed_names(hub, "tester/run@unfinished")
    run("push-model", run_folder, "tester/run", "--with-optimizer")
    assert pushed_names(hub) == {"model_00010.pt", "model_00040.pt", "optim_00040.pt"}
    assert not pushed_names(hub, "tester/run@unfinished")


@pytest.mark.parametrize("flags", [[], ["--temporary"]])
def test_a_damaged_checkpoint_is_not_pushed(run, hub, tiny, run_folder, flags):
    save_checkpoint(run_folder, tiny, 20)
    data = bytearray((run_folder / "model_00020.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (run_folder / "model_00020.pt").write_bytes(data)

    run("push-model", run_folder, "tester/run", *flags, fails_with=r"model_00020\.pt.* damaged")
    assert not hub.count("POST", "")


def test_a_token_that_only_reads_is_found_out_before_a_run(run, hub):
    assert "may push" in run("check", "mine")
    assert "models/tester/mine" in hub.private

    # where the repository exists, huggingface_hub's create_repo succeeds even with a token that only reads
    hub.faults.append(Fault("status", "/auth-check/write", code=403, message="no write permission"))
    run("check", "tester/mine", fails_with="403")


@pytest.mark.parametrize("can_link", [True, False])
def test_a_checkpoint_deleted_during_its_upload_arrives(run, hub, run_folder, monkeypatch, can_link):
    """--keep of a run that is training deletes old checkpoints at any time; a hard link holds them."""
    from huggingface_hub import HfApi

    def refuse(*_):
        raise PermissionError("no hard links here")

    content = (run_folder / "model_00010.pt").read_bytes()
    upload = HfApi.upload_folder

    def delete_and_upload(*args, **kwargs):
        if can_link:
            (run_folder / "model_00010.pt").unlink()
        return upload(*args, **kwargs)

    if not can_link:
        monkeypatch.setattr("os.link", refuse)
    monkeypatch.setattr(HfApi, "upload_folder", delete_and_upload)
    (run_folder / ".push").mkdir()  # of a push that was killed
    run("push-model", run_folder, "tester/run", "--with-optimizer")

    assert (hub.root / "models/tester/run/model_00010.pt").read_bytes() == content
    assert not (run_folder / ".push").exists()


def test_an_export_says_how_to_load_it(run, tiny, run_folder, tmp_path):
    run("export", run_folder, tmp_path / "hf")
    assert torch.equal(
        open_model(tmp_path / "hf")(torch.arange(20)[None])[0], tiny(torch.arange(20)[None])[0][..., :50257]
    )
    assert "from transformers import pipeline" in (tmp_path / "hf/README.md").read_text()

    # nothing is overwritten
    run("export", run_folder, tmp_path / "hf", fails_with="new folder")


def test_an_import_never_joins_another_run(run, tiny, tmp_path):
    torch.save({"model": tiny.state_dict(), "config": {"n_head": 4}, "step": 19072}, tmp_path / "old.pt")

    assert "infer.py 'my out'" in run("import", "old.pt", "my out")
    path = tmp_path / "my out/model_19072.pt"
    assert same_bits(open_model(path).state_dict(), tiny.state_dict())

    first = path.read_bytes()
    run("import", "old.pt", "my out", fails_with="already has a model")
    assert path.read_bytes() == first

    # a missing file leaves no folder
    run("import", "none.pt", "new", fails_with=r"none\.pt")
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("endpoint, chosen, is_disabled", [
    ("https://huggingface.co", {}, False),
    ("https://mirror.example", {}, True),
    ("https://mirror.example", {"HF_HUB_DISABLE_XET": "0"}, False),
])  # fmt: skip
def test_xet_storage_is_not_asked_of_a_mirror(monkeypatch, endpoint, chosen, is_disabled):
    """A mirror passes on the address of the storage, which is another host that its user may not reach."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    monkeypatch.setattr("os.environ", chosen)
    with open_hub():
        assert constants.HF_HUB_DISABLE_XET == is_disabled
