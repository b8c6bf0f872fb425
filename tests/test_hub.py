"""hub.py against a stand-in Hub on loopback (faults/hub_server.py), so no test needs the network.

What is pushed comes back identical, an interrupted transfer continues, and a file with a wrong hash is never accepted.
Most tests call run("push-data", ...), which is hub.py's main in this process.
"""

import re
import shutil
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from corpora import read_bytes
from faults import hub_server
from faults.hub_server import Fault
from helpers import load_metrics, load_weights, make_shards, read_table, run_main, same_bits, write_jsonl

from checkpoints.open_model import open_model
from system.files import lock_folder
from system.huggingface import open_hub
from tokens import shards


@pytest.fixture
def hub(tmp_path):
    """An empty stand-in for the Hub; its repositories are folders below tmp_path/hub."""
    with hub_server.start(tmp_path / "hub") as server:
        yield server


@pytest.fixture
def run(hub, tmp_path, monkeypatch, capsys):
    """run("pull-data", ...) -> what a command of hub.py prints, in this process.

    With fails_with=REGEX the command must fail with that message. `token` replaces the right one, which no command
    prints.
    """
    hub.connect(monkeypatch)
    monkeypatch.chdir(tmp_path)

    def run_command(*args, fails_with="", token=hub.token):
        monkeypatch.setenv("HF_TOKEN", token)
        exit_code = run_main("hub.py", *args)
        printed = "".join(capsys.readouterr())
        assert exit_code == bool(fails_with) and hub.token not in printed, printed
        assert not fails_with or re.search(f"error: .*{fails_with}", printed), printed
        return printed

    return run_command


# ------------------------------------------------------------------------- token shards


@pytest.fixture
def data(tmp_path):
    """A folder of shards with their manifest."""
    return make_shards(tmp_path / "data", size=2000)


@pytest.fixture
def published(hub, data):
    """The repository tester/toy, whose shards are those of `data`."""
    return shutil.copytree(data, hub.root / "datasets/tester/toy")


def test_a_pull_that_fails_is_completed_by_another(run, hub, published, data, tmp_path):
    out = tmp_path / "out"
    for fault in (Fault("train_000002.npy", 404), Fault("toy_train_000002.npy")):  # refused; corrupted
        hub.faults = [fault]
        run("pull-data", "tester/toy", out, fails_with=hub.url if fault.code else "train_000002.npy")
        # Without a manifest the folder does not count as complete.
        assert not {"manifest.json", "toy_train_000002.npy"} & read_bytes(out).keys()

    hub.log.clear()
    run("pull-data", "tester/toy", out)
    assert read_bytes(out) == read_bytes(data)
    assert not any("train_000001.npy" in path for method, path in hub.log if method == "GET")


def test_two_sets_of_shards_are_never_mixed(run, published, tmp_path):
    """The repository has another shard than its manifest says, or none; the folder has another than the repository."""
    run("pull-data", "tester/toy", "out")
    shard = published / "toy_train_000002.npy"
    shards.write_shard(shard, np.arange(2000))
    run("pull-data", "tester/toy", "out", fails_with="out has a different toy_train_000002")
    for folder in ("new", "newer"):
        run("pull-data", "tester/toy", folder, fails_with=f"{folder}/toy_train_000002.npy")
        assert not (tmp_path / folder / "manifest.json").exists()
        shard.unlink(missing_ok=True)


def test_a_set_without_a_manifest_is_pushed_and_pulled(run, hub, tmp_path):
    """As build-nanogpt and llm.c write them, with a name that is a pattern, too; anybody pulls a public repository."""
    (tmp_path / "tokens").mkdir()
    for name in ("web[10B]_val_000000.bin", *(f"web[10B]_train_{i:06d}.bin" for i in range(1, 5))):
        shards.write_shard(tmp_path / "tokens" / name, np.arange(500))
    run("push-data", tmp_path / "tokens", "tester/fineweb10B", "--public")

    # Of what else is there, nothing is taken.
    (hub.root / "datasets/tester/fineweb10B/README.md").write_text("tokens")
    hub.add_hostile_file("../fineweb_train_000000.bin")
    run("pull-data", "tester/fineweb10B", tmp_path / "out", "--limit-shards 2", token="")

    names = ["web[10B]_train_000001.bin", "web[10B]_train_000002.bin", "web[10B]_val_000000.bin"]
    assert sorted(read_bytes(tmp_path / "out")) == names


def test_a_limited_pull_lists_what_is_there(run, published, data, tmp_path):
    few = tmp_path / "few"
    run("pull-data", "tester/toy", few, "--limit-shards 1")
    assert len(shards.find_shards(few, "train")) == 1 and shards.read_manifest(few).complete

    # The limit leaves out nothing that is there already.
    for limit in ((), ("--limit-shards 1",)):
        run("pull-data", "tester/toy", few, *limit)
        assert read_bytes(few) == read_bytes(data)


# ------------------------------------------------------------------------- what is refused


def test_a_push_never_publishes_by_accident(run, published, tmp_path):
    other = make_shards(tmp_path / "other", seed=1, size=2000)
    before = read_bytes(published)
    run("push-data", other, "tester/toy", fails_with="--public")  # it exists, and is public
    assert read_bytes(published) == before
    run("push-data", other, "tester/toy", "--public")
    assert read_bytes(published) == read_bytes(other)


def test_what_is_damaged_or_unfinished_is_not_pushed(run, hub, data, trained_run):
    for path, command in ((trained_run / "model_00012.pt", "push-model"), (data / "toy_train_000001.npy", "push-data")):
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        run(command, path.parent, "tester/run", fails_with=path.name)
    shards.write_manifest(data, replace(shards.read_manifest(data), complete=False))
    run("push-data", data, "tester/run", fails_with="not finished")
    assert not hub.log


def test_a_token_that_only_reads_is_found_out(run, hub):
    assert "tester/mine" in run("check", "mine")
    assert hub.private == {"models/tester/mine"}

    # Where the repository exists, huggingface_hub's create_repo succeeds even with a token that only reads.
    hub.faults.append(Fault("/auth-check/write", code=403))
    run("check", "tester/mine", fails_with="403")


def test_what_the_hub_refuses_is_one_message(run, hub, published, data, monkeypatch):
    run("push-data", data, "tester/toy", token="", fails_with="hf auth login")
    run("push-data", data, "tester/toy", token="hf_wrong", fails_with="403")
    run("pull-data", "tester/none", "out", fails_with="404")
    monkeypatch.setattr("time.sleep", lambda seconds: None)  # huggingface_hub tries again
    hub.faults.append(Fault("train_000001.npy", 503))
    run("pull-data", "tester/toy", "out", fails_with="503")  # the cause, not that the network may be down


@pytest.mark.parametrize("endpoint, is_disabled", [("https://huggingface.co", False), ("https://mirror.example", True)])
def test_xet_storage_is_not_asked_of_a_mirror(monkeypatch, endpoint, is_disabled):
    """A mirror passes on the address of the storage, which is another host that its user may not reach."""
    from huggingface_hub import constants, get_session

    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", False)
    monkeypatch.delenv("HF_HUB_DISABLE_XET", raising=False)
    with open_hub():
        assert constants.HF_HUB_DISABLE_XET == is_disabled
        assert None not in get_session().timeout.as_dict().values()  # nothing waits for ever


# ------------------------------------------------------------------------- models


def list_checkpoints(folder):
    """The checkpoints in a folder: "model_00012 optim_00012"."""
    return " ".join(sorted(path.stem for path in folder.glob("*.pt")))


def test_a_pushed_model_comes_back_and_loads(run, hub, trained_run, tmp_path):
    *rows, last = load_metrics(trained_run)
    write_jsonl(trained_run / "metrics.jsonl", [*rows, last | {"val_bpb": 1.25, "hellaswag_acc_norm": 0.5}])
    run("push-model", trained_run, "tester/run", "--with-optimizer")

    # open_model, and transformers (test_convert.py), load the repository; the card says what it is.
    repo, model = hub.root / "models/tester/run", open_model(trained_run)
    assert hub.private == {"models/tester/run"}
    assert same_bits(open_model("tester/run").state_dict(), model.state_dict())
    card = (repo / "README.md").read_text()
    facts = (f"{model.num_params():,}", f"| {last['val_loss']:.4f} | 1.2500 | 0.5000 |", '"tester/run")')
    assert all(fact in card for fact in facts)

    # A pull brings the newest step and the run's files, without the export. What arrives corrupted is not taken.
    for path in trained_run.glob("*_0000[369].pt"):
        path.unlink()
    copy = tmp_path / "copy"
    hub.faults.append(Fault("/metrics.jsonl"))
    run("pull-model", "tester/run", copy, fails_with=r"metrics\.jsonl.*damaged")
    run("pull-model", "tester/run", copy)
    pulled = read_bytes(copy)
    assert pulled.pop("train_config.json") == pulled["config.json"] and pulled == read_bytes(trained_run)

    # A run that was continued keeps its settings; another run is never mixed in, also if its files are as long.
    (copy / "config.json").write_text("{}")
    run("pull-model", "tester/run", copy)
    assert (copy / "config.json").read_text() == "{}"
    for name in ("metrics.jsonl", "model_00012.pt"):
        (copy / name).write_bytes(pulled[name][::-1])
        run("pull-model", "tester/run", copy, fails_with=f"different {name}")
        assert (copy / name).read_bytes() == pulled[name][::-1]
        (copy / name).unlink()


def test_a_push_keeps_what_people_wrote_on_the_hub(run, hub, trained_run):
    """In README.md, where it replaces the table of scores, if that is there."""
    run("push-model", trained_run, "tester/run")
    card = hub.root / "models/tester/run/README.md"
    text = "---\nlicense: mit" + card.read_text().removeprefix("---") + "Trained on wishes.\n"
    score = load_metrics(trained_run)[-1]["val_loss"]
    for before, after in ((text, text.replace(f"| 12 | {score:.4f} |", "| 6 | - |")), ("mine", "mine")):
        card.write_text(before)
        run("push-model", trained_run / "model_00006.pt", "tester/run")
        assert card.read_text() == after and "| 12 |" not in after


# Flags | the row of the newest step | what the repository then has | the step of the card, and what is said of others.
CHOSEN = """
--steps best --with-optimizer |    | model_00003 model_00006 model_00012 optim_00012 | 12 | not measured.*03.pt has 3.25
--steps best   | , "val_loss": 9 | model_00003 model_00006             | 3  |
--steps best   | , "val_loss": 3 | model_00006 model_00012             | 12 |
--steps all    |                 | model_00003 model_00006 model_00012 | 12 | not measured
--steps newest | , "val_loss": 9 | model_00006 model_00012             | 12 | 03.pt has a lower val loss
"""


@pytest.mark.parametrize("flags, newest, names, step, said", read_table(CHOSEN))
def test_the_chosen_steps_are_pushed(run, hub, trained_run, flags, newest, names, step, said):
    """Beside what was pushed before. A pull takes the newest."""
    run("push-model", trained_run / "model_00006.pt", "tester/run")
    # Step 9 has a low val loss, but its weights are gone.
    (trained_run / "metrics.jsonl").write_text(f"""\
{{"step": 3, "val_loss": 3.25}}
{{"step": 6, "val_loss": 3.5}}
{{"step": 9, "val_loss": 3.125}}
{{"step": 12{newest}}}
""")
    (trained_run / "model_00009.pt").unlink()

    printed = run("push-model", trained_run, "tester/run", flags)
    assert re.search(rf"has step {step}\b.*{said}", printed) and ("val loss" in printed) == bool(said)
    repo = hub.root / "models/tester/run"
    assert list_checkpoints(repo) == names and f"| quickstart | {step} |" in (repo / "README.md").read_text()
    run("pull-model", "tester/run", "moved")
    pulled = [name for name in names.split() if name.endswith(names[-2:])]
    assert list_checkpoints(Path("moved")).split() == pulled


@pytest.mark.parametrize("can_link", [True, False])
def test_a_checkpoint_deleted_in_its_upload_arrives(run, hub, trained_run, monkeypatch, can_link):
    """--keep of a run that is training deletes old checkpoints at any time; a hard link holds them."""
    from huggingface_hub import HfApi

    content = (trained_run / "model_00012.pt").read_bytes()
    upload = HfApi.upload_folder

    def delete_and_upload(*args, **kwargs):
        (trained_run / "model_00012.pt").unlink()
        return upload(*args, **kwargs)

    if not can_link:
        monkeypatch.setattr("os.link", Mock(side_effect=PermissionError))
    monkeypatch.setattr(HfApi, "upload_folder", delete_and_upload)
    (trained_run / ".push/files").mkdir(parents=True)  # of a push that was killed
    with lock_folder(trained_run / ".push"):  # another push is not mixed in
        run("push-model", trained_run, "tester/run", fails_with="in use")
    run("push-model", trained_run, "tester/run")

    assert (hub.root / "models/tester/run/model_00012.pt").read_bytes() == content
    assert not (trained_run / ".push/files").exists()


def test_an_export_and_an_import_keep_the_weights(run, one_run, tmp_path):
    weights = load_weights(one_run)
    run("export", one_run / "model_00012.pt", tmp_path / "hf")
    assert same_bits(open_model(tmp_path / "hf").state_dict(), weights)

    torch.save({"model": weights, "config": {"n_head": 2}, "step": 19072}, tmp_path / "old.pt")
    run("import", "old.pt", "out")
    assert same_bits(load_weights(tmp_path / "out", 19072), weights)
