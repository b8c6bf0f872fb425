"""The loop: it learns, resumes bit for bit, does not care about ranks, stops cleanly and refuses bad updates."""

import argparse
import dataclasses
import json
import math
import re
import shlex
import shutil
import subprocess
import sys
import time
from functools import partial
from pathlib import Path

import pytest
import test_hellaswag
import torch
from conftest import ROOT, TINY

import checkpoint
import evals
import shards
import train_gpt2
from cli import UserError
from config import PRESETS, parse
from loader import Loader
from model import GPT, GPTConfig
from runtime import Runtime

CPU = Runtime(torch.device("cpu"), torch.float32)


def fit(args, out, *more):
    """Train in this process; returns the run folder."""
    torch.set_num_threads(1)
    train_gpt2.train(parse(["quickstart", *args, "--out-dir", str(out), *more], None), CPU, {"signal": None})
    return Path(out)


def curve(run):
    lines = [json.loads(line) for line in (Path(run) / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == sorted({line["step"] for line in lines}), "a step appears twice"
    return {line["step"]: (line.get("train_loss"), line.get("val_loss"), line.get("grad_norm")) for line in lines}


def weights(run, step=12):
    return checkpoint.load_model(checkpoint.model_path(run, step)).state_dict()


def same_bits(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def assert_close(a, b, rel=2e-4):
    assert a.keys() == b.keys()
    for step in a:
        for x, y in zip(a[step], b[step], strict=True):
            assert (x is None) == (y is None) and (x is None or x == pytest.approx(y, rel=rel)), (
                step,
                a[step],
                b[step],
            )


def keep_steps(run, upto):
    """Make a run look as if it had been lost after its checkpoint of step `upto`."""
    for step in checkpoint.complete_steps(run):
        if step > upto:
            checkpoint.model_path(run, step).unlink()
            (run / f"optim_{step:05d}.pt").unlink()


def test_it_learns_and_records(tiny_args, tmp_path, capsys):
    run = fit(
        tiny_args, tmp_path / "run", "--max-steps", "150", "--save-every", "50", "--keep", "1", "--max-lr", "0.01"
    )
    found = curve(run)
    assert "warning: no manifest.json" in capsys.readouterr().out  # shards of others are taken, but not silently
    assert list(found) == list(range(151))
    assert found[0][0] > 5.4 and found[150][1] < 2.0  # the walk has three next tokens: log 3 = 1.10 nats is the floor
    assert json.loads((run / "config.json").read_text())["preset"] == "quickstart"
    assert checkpoint.latest_step(run) == 150 and len(checkpoint.complete_steps(run)) <= 2


@pytest.mark.parametrize("flags", ["--optimizer adamw", "--optimizer muon", "--optimizer muon --weights bfloat16"])
def test_interrupted_and_resumed_equals_undisturbed_bit_for_bit(tiny_args, tmp_path, flags):
    flags = [*flags.split(), "--max-steps", "20", "--shuffle"]
    whole = fit(tiny_args, tmp_path / "whole", *flags)
    parts = tmp_path / "parts"
    stop = {"signal": None}
    cfg = parse(["quickstart", *tiny_args, "--out-dir", str(parts), "--resume", "auto", *flags], None)

    class After:  # a signal that the loop meets when it looks for the nth time, in an evaluation or after a step
        def __init__(self, n):
            self.n = n

        def __getitem__(self, key):
            self.n -= 1
            return "SIGTERM" if self.n < 0 else None

    for n in (5, 18, 1, 8, 16, 3):
        train_gpt2.train(cfg, CPU, After(n))
    train_gpt2.train(cfg, CPU, stop)
    assert curve(parts) == curve(whole)
    assert same_bits(weights(parts, 20), weights(whole, 20))


@pytest.mark.parametrize("clip", ["0.2", "0"])
def test_its_steps_are_those_of_a_plain_loop(tiny_args, tiny_data, tmp_path, clip):
    """Front to back, whole batches, torch's own AdamW: loss, norm, clipping, decay, betas and rates are all right."""
    flags = ["--no-shuffle", "--max-steps", "4", "--grad-clip", clip, "--weight-decay", "0.5"]
    run, cfg = fit(tiny_args, tmp_path / "run", *flags), parse(["quickstart", *tiny_args, *flags], None)
    torch.manual_seed(cfg.seed)
    model = GPT(cfg.model)
    groups = [{"params": [p for p in model.parameters() if (p.dim() < 2) == flat]} for flat in (True, False)]
    groups = [g | {"weight_decay": decay} for g, decay in zip(groups, (0.0, 0.5), strict=True)]
    adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), eps=1e-8)
    tokens = torch.from_numpy(shards.read_shard(tiny_data / "tiny_train_000001.npy").astype(int))
    rates = [0.5, 1.0, 1.0, 0.1 + 0.9 * 0.5]  # two steps up, then half a cosine from 3e-3 to 3e-4
    for step, rate in enumerate(rates):
        part = tokens[256 * step :][:257]
        logits = model(part[:-1].view(8, 32))[0]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), part[1:])
        model.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), float(clip) or math.inf)
        for group in adamw.param_groups:
            group["lr"] = 3e-3 * rate
        adamw.step()
        assert curve(run)[step][::2] == pytest.approx((loss.item(), norm.item()), rel=1e-4), step
    for name, p in model.state_dict().items():
        torch.testing.assert_close(weights(run, 4)[name], p, atol=1e-5, rtol=1e-4)


def test_val_loss_is_the_mean_over_the_first_tokens_of_the_val_split(tiny_args, tiny_data):
    """Whatever the ranks and the micro-batch: here neither divides 43 windows, nor is the last one of the split."""
    cfg = parse(["quickstart", *tiny_args, "--val-tokens", str(43 * 32 + 31)], None)
    model, data, checks = GPT(cfg.model), Loader(tiny_data, "val", 32, 256), []
    tokens = torch.from_numpy(shards.read_shard(tiny_data / "tiny_val_000000.npy")[: 43 * 32 + 1].astype(int))
    with torch.no_grad():
        logits = model(tokens[:-1].view(43, 32))[0]
    wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[1:]).item()
    for ranks, B in ((1, 4), (3, 2), (2, 64)):
        worlds = [dataclasses.replace(CPU, rank=r, world_size=ranks) for r in range(ranks)]
        with pytest.MonkeyPatch.context() as m:
            m.setattr(Runtime, "all_reduce", lambda rt, tensor, op="sum": tensor)
            parts = [evals.validate(model, data, cfg, rt, B, partial(checks.append, rt.rank)) for rt in worlds]
        assert sum(parts) == pytest.approx(wanted, rel=1e-5)
        assert len({checks.count(r) for r in range(ranks)}) == 1 <= checks.count(0)  # as often on every rank
        checks.clear()


def test_a_run_like_the_public_ones_says_whether_it_is_on_track(tiny_args, monkeypatch, capsys):
    monkeypatch.setattr(evals, "validate", lambda *args: 9.0)
    cfg, edu = parse(["quickstart", *tiny_args], None), "fineweb-edu_train_000001.npy"
    for preset, name in (("gpt2-124m", "tiny_train_000001.npy"), ("quickstart", edu), ("gpt2-124m", edu)):
        data = argparse.Namespace(paths=[Path(name)])
        e = evals.Evals(dataclasses.replace(cfg, preset=preset), CPU, None, None, data, None, 4, 1000)
        assert e.measure(500, lambda: None) == {"val_loss": 9.0}
        assert ("off track" in capsys.readouterr().out) == ((preset, name) == ("gpt2-124m", edu))


def test_world_size_and_micro_batch_are_invisible(tiny_args, tmp_path, torchrun):
    one = curve(fit(tiny_args, tmp_path / "one"))
    assert_close(curve(fit(tiny_args, tmp_path / "micro", "--micro-batch-size", "2")), one)
    torchrun(2, "train_gpt2.py", "quickstart", *tiny_args, "--out-dir", tmp_path / "two")
    assert_close(curve(tmp_path / "two"), one)


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.slow)])
def test_a_run_moves_between_world_sizes_and_zero_stages(tiny_args, tmp_path, torchrun, dtype):
    """From 1 rank to 2, 4 and 2 again, ZeRO-1 on, off and on; a time limit ends all but the last after a step."""
    tiny_args = [*tiny_args, "--weights", dtype]
    one, moved = fit(tiny_args, tmp_path / "one"), tmp_path / "moved"
    shutil.copytree(one, moved)
    keep_steps(moved, 3)
    flags = ["quickstart", *tiny_args, "--micro-batch-size", "2", "--out-dir", moved, "--resume", "auto"]
    for ranks, stage, limit, step in ((2, 1, "0.001", 4), (4, 0, "0.001", 5), (2, 1, "1h", 12)):
        done = torchrun(ranks, "train_gpt2.py", *flags, "--zero-stage", stage, "--time-limit", limit)
        assert checkpoint.latest_step(moved) == step and ("stopped by the time limit" in done.stdout) == (step < 12)
    assert_close(curve(moved), curve(one), *([3e-2] if dtype == "bfloat16" else []))  # gradients are rounded, too


def test_a_trapezoid_is_extended_as_if_it_had_been_planned_so(tiny_args, tmp_path):
    flags = "--schedule trapezoid --cooldown 0.25 --warmup-steps 2".split()
    planned = fit(tiny_args, tmp_path / "planned", *flags, "--max-steps", "20")
    extended = fit(tiny_args, tmp_path / "extended", *flags, "--max-steps", "12")
    keep_steps(extended, 6)  # before the rate began to fall
    fit(tiny_args, extended, *flags, "--max-steps", "20", "--resume", "auto")
    assert curve(extended) == curve(planned)
    assert same_bits(weights(extended, 20), weights(planned, 20))


SHARE = """
import json, sys, torch
sys.path.insert(0, sys.argv[1])
import cli, optim, runtime
from config import parse
from model import GPT, GPTConfig
def main():
    with runtime.session("cpu") as rt:
        for name in ("adamw", "muon"):
            cfg = parse(["quickstart", *sys.argv[2:], "--optimizer", name, "--zero-stage", "1"], None)
            model = GPT(cfg.model)
            optimizers = optim.build(optim.Weights(model, cfg), cfg, rt)
            for p in model.parameters():
                p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(p.numel()))
            for o in optimizers:
                o.step()
            moments = {o: 1 if type(o.optim) is torch.optim.Muon else 2 for o in optimizers}
            sizes = [[n * p.numel() for g in o.param_groups for p in g["params"]] for o, n in moments.items()]
            held = [t for o in optimizers for s in o.optim.state.values() for t in s.values()]
            shares = rt.gather(torch.tensor([sum(t.numel() for t in held if t.dim()) / sum(map(sum, sizes))]))
            for o, found in zip(optimizers, optim.full_state(optimizers, rt) or [None] * 2):
                o.consolidate_state_dict()  # torch's own way says what must be in it
                if rt.is_main:
                    wanted = o.state_dict()
                    assert found["param_groups"] == wanted["param_groups"]
                    assert found["state"].keys() == wanted["state"].keys()
                    for i, state in wanted["state"].items():
                        assert state.keys() == found["state"][i].keys()
                        assert all(torch.equal(t, found["state"][i][k]) for k, t in state.items())
            bound = 1 / rt.world_size + sum(map(max, sizes)) / sum(map(sum, sizes))
            cli.print0(json.dumps({"optimizer": name, "shares": [s.item() for s in shares], "bound": bound}))
cli.run_cli(main)
"""


@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_zero_divides_the_optimizer_state(tiny_args, tmp_path, torchrun, ranks):
    """Together the ranks keep each element of state once. Whole parameters are dealt out, the largest first: so a rank
    has 1/N, or more where a parameter is itself a large part, as Adam's embedding is of what Muon leaves to Adam."""
    (tmp_path / "share.py").write_text(SHARE)
    size = ["--model.n-layer", "8", "--model.vocab-size", "512"]
    said = torchrun(ranks, tmp_path / "share.py", ROOT, *tiny_args, *size).stdout
    adamw, muon = (json.loads(line) for line in said.splitlines() if line.startswith("{"))
    for found in (adamw, muon):
        assert len(found["shares"]) == ranks and sum(found["shares"]) == pytest.approx(1)
        assert max(found["shares"]) <= found["bound"], found
    assert adamw["shares"] == pytest.approx([1 / ranks] * ranks, rel=0.05)


def test_time_limit(tiny_args, tmp_path, capsys):
    run = fit(tiny_args, tmp_path / "run", "--time-limit", "0.0001")
    assert checkpoint.latest_step(run) == 1 and "resume with" in capsys.readouterr().out


def test_a_run_is_never_overwritten(tiny_args, tmp_path, capsys):
    run = fit(tiny_args, tmp_path / "run")
    with pytest.raises(UserError, match="--resume auto"):
        fit(tiny_args, run)
    with pytest.raises(UserError, match=r"never overwritten; continue it with --resume .*model_00012.pt"):
        fit(tiny_args, run, "--resume", str(run / "model_00006.pt"))
    before = curve(run)
    fit(tiny_args, run, "--resume", "auto")
    assert "is complete" in capsys.readouterr().out and curve(run) == before
    fork = fit(tiny_args, tmp_path / "fork", "--resume", str(run / "model_00006.pt"))
    assert same_bits(weights(fork), weights(run))


def test_code_that_differs_from_its_commit_is_kept_with_the_run(tiny_args, tmp_path, monkeypatch):
    """The code's own folder alone, though it lies in a larger clone; and not what an earlier start differed in."""
    clone, run = tmp_path / "clone", tmp_path / "run"
    git = ["git", "-C", clone, "-c", "user.name=x", "-c", "user.email=x"]
    (code := clone / "gpt2" / "model.py").parent.mkdir(parents=True)
    for path in (code, clone / "private.txt"):
        path.write_text("as it was\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "x"]):
        subprocess.run([*git, *words], check=True)
    for path in (code, clone / "private.txt"):
        path.write_text("an idea\n")
    train_gpt2.runtime.versions()  # of the real code: it is asked once per process
    monkeypatch.setattr(train_gpt2.runtime, "__file__", str(code))
    fit(tiny_args, run, "--max-steps", "1", "--save-every", "0")
    found = (run / "code_00000.diff").read_text()
    assert "+an idea\n" in found and "private" not in found
    for path in run.glob("*.pt"):
        path.unlink()
    code.write_text("as it was\n")
    fit(tiny_args, run, "--max-steps", "1")
    assert not (run / "code_00000.diff").exists()


@pytest.mark.parametrize("there", [True, False])
def test_bfloat16_weights_warn_where_they_are_emulated(there, tiny_args, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(train_gpt2.runtime, "cpu_has_bfloat16", lambda: there)
    fit(tiny_args, tmp_path / "run", "--max-steps", "1", "--weights", "bfloat16")
    assert ("many times slower than --weights float32" in capsys.readouterr().out) == (not there)


def test_weights_without_their_optimizer_are_never_overwritten(tiny_args, tmp_path):
    """A folder pulled without --with-optimizer, or whose only optimizer was cut: the preset's own run folder."""
    run = fit(tiny_args, tmp_path / "run", "--max-steps", "3")
    for left in (b"cut", b""):
        (run / "optim_00003.pt").write_bytes(left) if left else (run / "optim_00003.pt").unlink()
        before = {p: p.read_bytes() for p in run.iterdir() if p.name != ".lock"}
        for flags in ([], ["--resume", "auto"]):
            with pytest.raises(UserError, match=r"model_00003.pt has no whole optim_.*--init-from .*model_00003.pt"):
                fit(tiny_args, run, *flags)
        assert {p: p.read_bytes() for p in run.iterdir() if p.name != ".lock"} == before
    fit(tiny_args, tmp_path / "on", "--init-from", str(run / "model_00003.pt"), "--max-steps", "1")


def test_drift_is_refused_by_name_or_accepted(tiny_args, tiny_data, tmp_path, capsys):
    run = fit(tiny_args, tmp_path / "run")
    with pytest.raises(UserError, match=r"seed: 1337 -> 1.*--allow-drift"):
        fit(tiny_args, run, "--resume", "auto", "--max-steps", "13", "--seed", "1")
    flags = ["--resume", str(run / "model_00012.pt"), "--max-steps", "13", "--seed", "1", "--allow-drift"]
    fit(tiny_args, tmp_path / "fork", *flags)
    assert "by --allow-drift: seed: 1337 -> 1" in capsys.readouterr().out
    fit(tiny_args, run, "--resume", "auto", "--max-steps", "13", "--val-every", "5")
    out = capsys.readouterr().out
    assert "val_every: 4 -> 5" in out and "learning rate at step 12 moves from" in out
    with pytest.raises(UserError, match=r"model.n_head: 2 -> 4. Restore them; its network cannot change"):
        fit(tiny_args, run, "--resume", "auto", "--max-steps", "14", "--model.n-head", "4", "--allow-drift")
    (tiny_data / "tiny_train_000003.npy").unlink()
    with pytest.raises(UserError, match=r"data: the shards in .* are not those"):
        fit(tiny_args, run, "--resume", "auto", "--max-steps", "14")


def test_an_older_run_over_small_shards_is_told_that_their_order_is_another(tiny_args, tmp_path, monkeypatch):
    def before(data):
        return shards.fingerprint(data.data_dir)

    with monkeypatch.context() as older:
        older.setattr(Loader, "fingerprint", before)
        run = fit(tiny_args, tmp_path / "run")
    with pytest.raises(UserError, match=r"data: the shards in .* would now be mixed in another way.*--allow-drift"):
        fit(tiny_args, run, "--resume", "auto", "--max-steps", "14")
    fit(tiny_args, run, "--resume", "auto", "--max-steps", "14", "--allow-drift")


def test_fine_tuning_starts_from_a_hugging_face_folder_and_resumes(tiny_args, tmp_path):
    import convert

    convert.save_hf(GPT(GPTConfig(block_size=32, vocab_size=50257, n_layer=2, n_head=2, n_embd=32)), tmp_path / "hf")
    flags = ["--init-from", str(tmp_path / "hf"), "--model.vocab-size", "50304"]  # as the presets have it
    run = fit(tiny_args, tmp_path / "run", *flags, "--max-steps", "3")
    assert checkpoint.load_model(run).config.vocab_size == 50257
    fit(tiny_args, run, *flags, "--max-steps", "5", "--resume", "auto")
    assert list(curve(run)) == list(range(6))
    with pytest.raises(UserError, match="n_layer is 2, not 3; drop the --model flags"):
        fit(tiny_args, tmp_path / "other", *flags, "--model.n-layer", "3")


def test_fine_tuning_takes_the_network_as_it_is(tiny_data, tmp_path):
    """Without --model flags, whatever the preset's: here another shape, and options of the speedrun."""
    config = GPTConfig(block_size=32, vocab_size=320, n_layer=3, n_head=2, n_embd=32, positions="rope", norm="rmsnorm")
    checkpoint.write(tmp_path / "model_00007.pt", checkpoint.model_file(GPT(config), 7))

    def tune(*flags, run="run", init=("--init-from", tmp_path, "--data-dir", tiny_data)):
        words = [*(["finetune", *init] if init else []), "--total-batch-size", 256, "--sample-every", 0, *flags]
        cfg = parse(
            [*map(str, words), "--out-dir", str(tmp_path / run)], lambda p: checkpoint.read_train_state(p)["config"]
        )
        train_gpt2.train(cfg, CPU, {"signal": None})

    short = ("--sequence-length", 32, "--no-compile")
    tune(*short, "--max-steps", 2)
    assert checkpoint.load_model(tmp_path / "run").config == config
    tune(*short, "--max-steps", 4, "--resume", "auto")
    tune("--max-steps", 5, "--resume", tmp_path / "run" / "model_00004.pt", init=())
    assert list(curve(tmp_path / "run")) == list(range(6))
    with pytest.raises(UserError, match=r"sequence-length 128 is too long for .*use --sequence-length 32"):
        tune("--sequence-length", 128, run="long")


def test_what_a_model_cannot_read_does_not_end_its_run(tiny_args, tmp_path, capsys):
    """Samples and HellaSwag are GPT-2's tokens, of which a model of another vocabulary or a short context has too few;
    a prompt that is longer than the context loses its beginning."""
    row = {"ctx": "a", "endings": [" word" * 40, "b", "c", "d"], "label": 0}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    text = ["--sample-every", "2", "--hellaswag-every", "2", "--hellaswag-data", str(tmp_path / "rows.jsonl")]
    text += ["--max-steps", "2", "--warmup-steps", "2", "--sample-prompt", "long " * 50]
    fit(tiny_args, tmp_path / "few", *text)
    said = capsys.readouterr().out
    assert "HellaSwag is off: the model has 256 tokens" in said and "samples are off: the model has 256" in said
    assert "warning: --warmup-steps 2 of 2 steps" in said
    fit(tiny_args, tmp_path / "short", *text, "--model.vocab-size", "50304", "--warmup-steps", "1")
    said = capsys.readouterr().out
    assert "HellaSwag is off: an ending has 41 tokens, but the model reads 32" in said and "sample 3: " in said
    assert "warm" not in said


def test_a_stop_is_saved_under_its_own_step(tiny_args, tmp_path, monkeypatch):
    """The signal comes while step 5 trains: that update is made, step 6 is saved, and nothing is done twice."""
    whole, out, stop, steps = fit(tiny_args, tmp_path / "whole"), tmp_path / "out", {"signal": None}, []

    def accumulate(*args, real=train_gpt2.accumulate):
        steps.append(len(steps))
        stop["signal"] = "SIGTERM" if len(steps) == 6 else None
        return real(*args)

    monkeypatch.setattr(train_gpt2, "accumulate", accumulate)
    train_gpt2.train(parse(["quickstart", *tiny_args, "--out-dir", str(out)], None), CPU, stop)
    assert steps == list(range(6)) == list(curve(out)) and checkpoint.latest_step(out) == 6
    fit(tiny_args, out, "--resume", "auto")
    assert len(steps) == 12 and curve(out) == curve(whole) and same_bits(weights(out), weights(whole))


def poisoned(tmp_path):
    cfg = parse(["quickstart", *TINY], None)
    torch.manual_seed(cfg.seed)
    model = GPT(cfg.model)
    with torch.no_grad():
        model.transformer.h[0].mlp.c_fc.weight[0, 0] = float("nan")
    checkpoint.write(tmp_path / "model_00000.pt", checkpoint.model_file(model, 0))
    return tmp_path / "model_00000.pt"


def test_non_finite_updates_are_refused(tiny_args, tmp_path, torchrun, capsys):
    bad = ["--init-from", str(poisoned(tmp_path))]
    with pytest.raises(UserError, match=r"step 0: loss nan.*rank 0.*tiny_train_0.*window.*refused"):
        fit(tiny_args, tmp_path / "a", *bad)
    with pytest.raises(UserError, match="step 2"):
        fit(tiny_args, tmp_path / "b", *bad, "--skip-bad-steps", "2")
    assert not list((tmp_path / "b").glob("*.pt"))
    bad += ["--skip-bad-steps", "1", "--out-dir", tmp_path / "c"]
    done = torchrun(2, "train_gpt2.py", "quickstart", *tiny_args, *bad, check=False)
    assert "step 0: loss nan" in done.stdout and "(1 of --skip-bad-steps 1)" in done.stdout
    assert done.returncode != 0 and "step 1: loss nan" in done.stderr and "the update was refused" in done.stderr
    report = done.stderr.split("Root Cause")[-1]  # torchrun's, which is the last that a user sees
    assert "traceback : error: step 1: loss nan" in report and "To enable traceback" not in report


def test_a_refused_update_loses_no_step(tiny_args, tmp_path, monkeypatch):
    """All before it is saved, though no save is due; and the run goes on from there to the same bits."""
    whole, run, real = fit(tiny_args, tmp_path / "whole"), tmp_path / "run", train_gpt2.accumulate
    calls = []

    def poisoned_once(forward, batch, rt, scaler):
        calls.append(1)
        return real(forward, batch, rt, scaler) * (math.nan if len(calls) == 8 else 1)

    monkeypatch.setattr(train_gpt2, "accumulate", poisoned_once)
    data = Loader(tiny_args[-1], "train", 32, 256, seed=1337, shuffle=True)
    shard, window = data.step_windows(7, 8, 4)[0, 0]
    named = rf"starts at {data.paths[shard].name} window {window};"
    saved = "all before it is saved.*model_00007.pt --skip-bad-steps"
    with pytest.raises(UserError, match=f"step 7: loss nan.*{named}.*{saved}"):
        fit(tiny_args, run, "--save-every", "100")
    assert checkpoint.complete_steps(run) == [7]
    fit(tiny_args, run, "--save-every", "100", "--resume", "auto", "--skip-bad-steps", "5")
    assert same_bits(weights(run), weights(whole)) and curve(run) == curve(whole)


def test_ranks_that_see_different_runs_are_told_so():
    def differ(change):
        other = torch.tensor([3, 12, 0xABC])
        return dataclasses.make_dataclass("Two", ["device", "gather"])(CPU.device, lambda t: [t, other + change])

    check = partial(train_gpt2.resume.check_ranks, saved={"step": 3}, data_id="abc", max_steps=12)
    check(differ(torch.tensor([0, 0, 0])))
    for i, what in enumerate(("checkpoint", "max-steps", "data")):
        with pytest.raises(UserError, match=f"rank 1 and rank 0 differ in {what}.*same --out-dir"):
            check(differ(torch.eye(3, dtype=torch.int64)[i]))


def test_a_run_compares_its_ranks_before_it_trains(tiny_args, tmp_path, monkeypatch):
    def differ(rt, saved, data_id, max_steps):
        raise UserError(f"{max_steps} steps, {saved}, {data_id == shards.fingerprint(tiny_args[-1]) + '-3'}")

    monkeypatch.setattr(train_gpt2.resume, "check_ranks", differ)
    with pytest.raises(UserError, match="12 steps, None, True"):
        fit(tiny_args, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_gradients_are_reduced_once_a_step():
    class Forward:
        def __call__(self, x, y):
            seen.append(self.require_backward_grad_sync)
            return None, torch.ones((), requires_grad=True) * len(seen)

    seen, batch = [], torch.zeros(3, 2, 33, dtype=torch.uint16)
    loss = train_gpt2.accumulate(Forward(), batch, CPU, torch.amp.GradScaler("cpu", enabled=False))
    assert seen == [False, False, True] and loss.item() == pytest.approx(2)


def test_the_rank_at_fault_is_named(tiny_args, tiny_data, capsys):
    """By its loss or, if all are finite, by its norm: one bad loss makes the norm bad on all."""
    cfg = parse(["quickstart", *tiny_args, "--total-batch-size", "384", "--skip-bad-steps", "1"], None)
    three = dataclasses.make_dataclass("Three", ["device", "world_size", "gather"])
    data = Loader(tiny_data, "train", 32, 256)
    for losses, norms in (([5, 5, 5], [1, 1, math.inf]), ([5, 5, math.nan], [math.nan] * 3)):
        told = partial(lambda told, _: list(torch.tensor(told).T), [losses, norms])
        train_gpt2.resume.refuse(cfg, three(CPU.device, 3, told), 7, 5.0, 1.0, 1, data, 4, None, None)
        assert "on rank 2, whose data starts" in capsys.readouterr().out


def test_an_error_leaves_no_empty_run_folder(tiny_args, tmp_path, run_script):
    out = tmp_path / "a" / "run"
    args = ["train_gpt2.py", "quickstart", *tiny_args, "--out-dir", out]
    assert run_script(*args, "--data-dir", tmp_path / "nope", check=False).returncode == 1 and not out.exists()
    out.mkdir()
    (out / "notes").write_text("mine")
    assert run_script(*args, "--data-dir", tmp_path / "nope", check=False).returncode == 1
    assert (out / "notes").read_text() == "mine"


def scaled(monkeypatch, init_scale):
    """A loss scale that starts high and soon tries to grow; float16 on this CPU."""
    monkeypatch.setattr(
        torch.amp, "GradScaler", partial(torch.amp.GradScaler, init_scale=init_scale, growth_interval=4)
    )
    monkeypatch.setattr("test_train.CPU", dataclasses.replace(CPU, dtype=torch.float16))


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_float16_skips_overflows_and_resumes_with_its_scale(tiny_args, tmp_path, monkeypatch, capsys, optimizer):
    scaled(monkeypatch, 2.0**30)
    flags = [*tiny_args, "--optimizer", optimizer, "--max-steps", "40", "--save-every", "1"]
    whole = fit(flags, tmp_path / "whole")
    scales = [float(x) for x in re.findall(r"overflow at loss scale (\S+);", capsys.readouterr().out)]
    found = curve(whole)
    skipped = [step for step, (loss, _, norm) in found.items() if loss is not None and norm is None]
    assert (
        len(scales) == len(skipped) < 30 and skipped[:3] == [0, 1, 2] and skipped[-1] > 10
    )  # it grows and is cut again
    assert scales[:3] == pytest.approx([2.0**30, 2.0**29, 2.0**28], rel=1e-5)
    before, after = (checkpoint.load_model(checkpoint.model_path(whole, s)).state_dict() for s in (1, 2))
    assert same_bits(before, after)  # a skipped step moved nothing
    assert found[39][0] < found[0][0] - 0.05
    for upto in (skipped[-1], skipped[-1] - 2):
        parts = tmp_path / f"from {upto}"
        shutil.copytree(whole, parts)
        keep_steps(parts, upto)
        fit(flags, parts, "--resume", "auto")
        assert curve(parts) == found and same_bits(weights(parts, 40), weights(whole, 40))
        assert checkpoint.read_train_state(parts)["scaler"] == checkpoint.read_train_state(whole)["scaler"]


def test_float16_tells_overflow_from_nan(tiny_args, tmp_path, monkeypatch, capsys):
    scaled(monkeypatch, 8.0)
    with pytest.raises(UserError, match="step 0: loss nan"):
        fit(tiny_args, tmp_path / "loss", "--init-from", str(poisoned(tmp_path)))
    real = train_gpt2.make_model

    def nan_gradients(*args):
        model = real(*args)
        model.lm_head.weight.register_hook(lambda g: g * math.nan)
        return model

    monkeypatch.setattr(train_gpt2, "make_model", nan_gradients)
    with pytest.raises(UserError, match=r"step 4: loss 5\.\d+, gradient norm nan"):  # one more, as one is tolerated
        fit(tiny_args, tmp_path / "gradient", "--skip-bad-steps", "1")
    said = capsys.readouterr().out
    assert said.count("overflow at loss scale") == 3 and "step 3: loss 5." in said


def test_micro_batch_auto_halves_until_it_fits_on_every_rank(tiny_args):
    cfg = parse(["quickstart", *tiny_args], None)
    model, tried = GPT(cfg.model), []

    def forward(x, y, room=5):
        tried.append(len(x))
        out = model(x, y)
        if len(x) > room:  # part of the backward's work is done by then
            out[1].backward()
            raise torch.OutOfMemoryError("CUDA out of memory")
        return out

    class Smaller(Runtime):  # another rank has less room
        def all_reduce(self, tensor, op="sum"):
            assert op == "min"
            return tensor.clamp(max=2)

    rng = torch.get_rng_state()
    choices = [60, 30, 20, 15, 12, 10, 6, 5, 4, 3, 2, 1]
    assert train_gpt2.plan.probe(model, forward, cfg, CPU, choices) == 3
    assert tried == [60, 30, 15, 6, 3, 3]  # a second micro-step, for which the gradients of the first are in memory
    assert all(p.grad is None for p in model.parameters()) and torch.equal(rng, torch.get_rng_state())
    assert train_gpt2.plan.probe(model, forward, cfg, Smaller(CPU.device, CPU.dtype), choices) == 2
    with pytest.raises(UserError, match="--recompute"):
        train_gpt2.plan.probe(model, partial(forward, room=0), cfg, CPU, choices)

    def raises(error):
        def forward(x, y):
            raise error

        return forward

    for text in (
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling",
        "No valid triton configs. OutOfMemoryError: ...",
    ):
        assert not train_gpt2.plan.fits_in_memory(model, raises(RuntimeError(text)), cfg, CPU, 1)
    with pytest.raises(RuntimeError, match="device-side assert"):  # what is no lack of memory is not hidden
        train_gpt2.plan.fits_in_memory(model, raises(RuntimeError("device-side assert triggered")), cfg, CPU, 1)
    moments = []
    with pytest.MonkeyPatch.context() as m:  # what the first step will allocate is there while it is tried out
        m.setattr(torch, "empty", lambda n, device: moments.append(n))
        train_gpt2.plan.fits_in_memory(model, model, cfg, CPU, 2)
    optimizers = train_gpt2.optim.build(train_gpt2.optim.Weights(model, cfg), cfg, CPU)
    model(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64))[1].backward()
    optimizers[0].step()
    state = sum(t.numel() for s in optimizers[0].state.values() for t in s.values() if t.dim())
    assert moments == [state]


def test_overfit_preset_collapses(tiny_args, tmp_path):
    at = tiny_args.index("--max-steps")
    tiny = tiny_args[:at] + tiny_args[at + 2 :]
    cfg = parse(["overfit", *tiny, "--val-every", "0", "--save-every", "0", "--out-dir", str(tmp_path / "run")], None)
    assert cfg.max_steps == 200 and cfg.overfit_single_batch
    train_gpt2.train(cfg, CPU, {"signal": None})
    assert curve(tmp_path / "run")[199][0] < 0.1


def test_compiled_bfloat16_run_equals_eager_and_repeats_bit_for_bit(tiny_args, tmp_path, run_script):
    """As users run it: compiled, autocast to bfloat16, all threads, in processes of their own."""
    eager = fit(tiny_args, tmp_path / "eager", "--max-steps", "6")
    flags = [a for a in tiny_args if a not in ("--no-compile", "--dtype", "float32")]
    flags += ["--dtype", "bfloat16", "--max-steps", "6", "--total-batch-size", "2048", "--micro-batch-size", "32"]
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run_script("train_gpt2.py", "quickstart", *flags, "--out-dir", whole)
    run_script("train_gpt2.py", "quickstart", *flags, "--out-dir", parts)
    keep_steps(parts, 3)
    run_script("train_gpt2.py", "quickstart", *flags, "--out-dir", parts, "--resume", "auto")
    assert curve(parts) == curve(whole)
    assert same_bits(weights(parts, 6), weights(whole, 6))
    assert curve(whole)[0][1] == pytest.approx(curve(eager)[0][1], rel=1e-3)


def test_hellaswag_and_samples_compile_nothing(tiny_args, tmp_path, monkeypatch):
    """Their shapes vary: a compiled run traces the same frames with them as without."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))  # Dynamo alone: no C++
    flags = [a for a in tiny_args if a != "--no-compile"] + ["--max-steps", "4", "--model.vocab-size", "50304"]
    rows = test_hellaswag.write(tmp_path / "rows.jsonl", test_hellaswag.make_rows(7))
    evals = ["--hellaswag-every", "2", "--hellaswag-data", str(rows), "--sample-every", "2"]
    traced = []
    for name, more in {"without": [], "with": evals}.items():
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        fit(flags, tmp_path / name, *more)
        traced.append(torch._dynamo.utils.counters["frames"]["total"])
    assert traced[0] == traced[1] > 0
    lines = [json.loads(line) for line in (tmp_path / "with" / "metrics.jsonl").read_text().splitlines()]
    assert sum("hellaswag_acc" in line for line in lines) == 3


@pytest.mark.parametrize("preset", list(PRESETS))
def test_every_preset_trains_saves_resumes_and_samples(preset, tiny_data, tmp_path, capsys):
    """At a tiny size, with all else as the preset has it; a vocabulary that sampling's prompt fits."""
    size = "--model.n-layer 2 --model.n-head 2 --model.n-embd 32 --model.block-size 64 --model.vocab-size 50304 "
    size += (
        "--sequence-length 32 --total-batch-size 128 --micro-batch-size 2 --val-tokens 64 --no-compile --dtype float32"
    )
    args = [preset, *size.split(), "--data-dir", str(tiny_data), "--out-dir", str(tmp_path / "run")]
    args += ["--init-from", "scratch"] if preset == "finetune" else []  # not what the Hub has
    short = [*args, "--save-every", "3", "--sample-every", "5", "--val-every", "5", "--hellaswag-every", "0"]
    for steps in ("3", "5"):
        train_gpt2.train(parse([*short, "--max-steps", steps, "--resume", "auto"], None), CPU, {"signal": None})
    assert "sample 3:" in capsys.readouterr().out
    found = curve(tmp_path / "run")
    assert list(found) == list(range(6)) and found[5][1] < 11
    assert checkpoint.load_model(tmp_path / "run").generate(torch.tensor([[1]]), 4).shape == (1, 5)


@pytest.mark.parametrize("there", [True, False])
def test_dry_run_plans_and_leaves_nothing(tiny_args, tmp_path, capsys, there):
    args = ["quickstart", *tiny_args, "--out-dir", str(tmp_path / "run"), "--dry-run", "--gpu-hour-usd", "2.5"]
    train_gpt2.dry_run(parse(args + ([] if there else ["--data-dir", "nowhere"]), None), CPU)
    out = capsys.readouterr().out
    assert "tokens/s" in out and "$" in out and "12 steps take" in out
    assert not (tmp_path / "run").exists()


def test_a_plan_says_what_would_be_in_vain(tiny_args, capsys):
    cfg = parse(["quickstart", *tiny_args], None)
    data, model = train_gpt2.train_loader(cfg, cfg.data_dir), GPT(cfg.model)
    for steps, many in ((12, False), (200, True)):  # of 8 sequences each; an epoch has 267
        train_gpt2.plan.describe(cfg, CPU, model, data, steps, 0, 4)
        said = capsys.readouterr().out
        assert f"{steps * 8 / 267:.2f} epochs of this data" in said and ("6 passes over the same data" in said) == many
    train_gpt2.plan.describe(dataclasses.replace(cfg, overfit_single_batch=True), CPU, model, data, 200, 0, 4)
    assert "passes" not in capsys.readouterr().out
    with pytest.raises(UserError, match=r"8 sequences of 32, which do not split evenly over 3 ranks; use .* 288"):
        train_gpt2.plan.micro_batch_size(cfg, dataclasses.replace(CPU, world_size=3), model, model)


def test_time_to_go_follows_recent_steps_after_the_first(tiny_args):
    cfg = parse(["quickstart", *tiny_args], None)
    pace, eta = train_gpt2.plan.Pace(cfg, CPU, GPT(cfg.model)), []
    for seconds in (60.0, 2.0, 2.0, 3.0):
        assert pace.step(seconds)["tokens_per_second"] == 256 / seconds
        eta.append(pace.eta_s(100))
    assert math.isnan(eta[0]) and eta[1:] == pytest.approx([200, 200, 210])


def test_dry_run_counts_the_reduction_of_gradients(tiny_args, monkeypatch, capsys):
    monkeypatch.setattr(Runtime, "all_reduce", lambda rt, tensor, op="sum": time.sleep(0.2))
    two = dataclasses.replace(CPU, world_size=2)
    train_gpt2.dry_run(parse(["quickstart", *tiny_args, "--dry-run"], None), two)
    said = capsys.readouterr().out
    step, reduced = re.search(r"step (\d+) ms .* and (\d+) ms to reduce gradients, less what overlaps", said).groups()
    assert 200 <= int(reduced) < int(step)


def test_data_that_is_not_finished_is_not_trained_on_in_silence(tiny_args, tiny_data, tmp_path, capsys):
    source = {"name": "x", "subset": "", "column": "text", "revision": "1", "files": []}
    for complete in (True, False):
        shards.write_manifest(tiny_data, shards.Manifest(source, "npy", 100, complete=complete))
        train_gpt2.dry_run(parse(["quickstart", *tiny_args, "--dry-run"], None), CPU)
        assert ("tiny is unfinished" in capsys.readouterr().out) != complete


def test_the_best_of_the_saved_steps_is_kept(tiny_args, tmp_path, monkeypatch, capsys):
    """As in fine-tuning: val loss falls, then rises; its lowest point has no checkpoint, the next lowest has."""
    said = iter([5.0, 1.0, 2.0, 3.0, 4.0, 3.0, 3.5])
    monkeypatch.setattr(evals, "validate", lambda *args: next(said))
    run = fit(tiny_args, tmp_path / "run", "--val-every", "2", "--save-every", "4", "--keep", "1")
    assert checkpoint.complete_steps(run) == [4, 12]
    monkeypatch.setattr(evals, "validate", lambda *args: 9.0)  # never better than step 4, which the fork does not have
    fork = fit(tiny_args, tmp_path / "fork", "--resume", str(run / "model_00012.pt"), "--max-steps", "14")
    assert "fork/model_00004" not in capsys.readouterr().out and checkpoint.complete_steps(fork) == [14]


def test_the_command_that_goes_on_can_be_typed(tmp_path, monkeypatch):
    cfg = parse(["quickstart", "--out-dir", str(tmp_path / "a run")], None)
    monkeypatch.setattr(sys, "argv", ["x", "quickstart", "--resume", "auto", "--resume=none", "--resume", "old.pt"])
    words = ["train_gpt2.py", "quickstart", "--resume", str(tmp_path / "a run" / "model_00003.pt")]
    assert shlex.split(train_gpt2.resume.command(cfg, 3)) == ["python", *words]
    said = train_gpt2.resume.nothing_left(dataclasses.replace(cfg, resume="other/model_00003.pt"), 3)
    assert said.endswith("python train_gpt2.py quickstart --resume other/model_00003.pt --max-steps 6")
    for name, value in {"TORCHELASTIC_RUN_ID": "1", "LOCAL_WORLD_SIZE": "8", "WORLD_SIZE": "16"}.items():
        monkeypatch.setenv(name, value)
    assert train_gpt2.resume.command(cfg, 3).startswith("torchrun [as on each node] --nproc_per_node=8 train_gpt2.py")


def test_eval_only_says_what_the_run_said_and_leaves_nothing(tiny_args, tmp_path, torchrun, fails):
    run = fit(tiny_args, tmp_path / "run", "--val-tokens", "1376")  # 43 windows: even neither by 2 ranks nor by 4
    flags = ["quickstart", *tiny_args, "--val-tokens", "1376", "--init-from", run, "--eval-only"]
    before = sorted(tmp_path.rglob("*"))
    done = torchrun(2, "train_gpt2.py", *flags, "--out-dir", tmp_path / "other")
    assert f"{run} on 1,376 tokens" in done.stdout and f"val loss: {curve(run)[12][1]:.4f}" in done.stdout, done.stdout
    assert sorted(tmp_path.rglob("*")) == before
    fails("train_gpt2.py", "quickstart", *tiny_args, "--eval-only", says=["--init-from gpt2"])


def test_a_run_smaller_than_its_preset_is_evaluated_as_it_is_and_fine_tuned_after_a_hint(
    tiny_args, tmp_path, run_script
):
    run, data = fit(tiny_args, tmp_path / "run"), tiny_args[tiny_args.index("--data-dir") + 1]
    flags = ["--init-from", run, "--data-dir", data, "--device", "cpu", "--dtype", "float32"]
    said = run_script("train_gpt2.py", "--eval-only", *flags, "--val-tokens", "1024").stdout
    assert f"on 1,024 tokens of {data}" in said and f"val loss: {curve(run)[12][1]:.4f}" in said

    def refused(says, *more):
        words = ["finetune", *flags, "--out-dir", tmp_path / "tuned", *more]
        with pytest.raises(UserError, match=says):
            train_gpt2.train(parse([str(word) for word in words], None), CPU, {"signal": None})

    refused("use --sequence-length 32", "--max-steps", "2")
    few = ["--sequence-length", "32"]
    refused("--epochs 2 of this data.* less than one step of --total-batch-size 32768", *few)
    refused("n_layer is 2, not 3,.* drop the --model flags", *few, "--max-steps", "2", "--model.n-layer", "3")
    assert not (tmp_path / "tuned").exists()


def test_config_json_names_the_code(tiny_args, tmp_path):
    made = json.loads((fit(tiny_args, tmp_path / "run", "--max-steps", "1") / "config.json").read_text())["versions"]
    assert made["torch"] == str(torch.__version__)
    head = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True)
    assert head.returncode or made["commit"].removesuffix("-dirty") == head.stdout.strip()


def test_recompute_gives_the_same_bits(tiny_args, tmp_path):
    plain = fit(tiny_args, tmp_path / "plain", "--max-steps", "3")
    again = fit(tiny_args, tmp_path / "again", "--max-steps", "3", "--recompute")
    assert same_bits(weights(plain, 3), weights(again, 3))


def test_tensorboard_has_every_curve_and_resumes_without_doubled_points(tiny_args, tmp_path, monkeypatch):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    monkeypatch.setattr(train_gpt2.runtime, "peak_flops", lambda device: 1e12)  # as on a card in the table
    rows = test_hellaswag.write(tmp_path / "rows.jsonl", test_hellaswag.make_rows(2))
    flags = ["--tracker", "tensorboard", "--sample-every", "4", "--model.vocab-size", "50304", "--hellaswag-every", "6"]
    flags += ["--hellaswag-data", str(rows), "--total-batch-size", "64", "--micro-batch-size", "2"]
    run = fit(tiny_args, tmp_path / "run", *flags, "--max-steps", "8")
    keep_steps(run, 3)  # as if killed at step 8: 3 to 7 come again
    fit(tiny_args, run, *flags, "--resume", "auto")
    events = EventAccumulator(str(run / "tensorboard")).Reload()
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for (
        key
    ) in "train_loss grad_norm lr tokens_per_second step_ms mfu val_loss hellaswag_acc hellaswag_acc_norm".split():
        drawn = [(e.step, pytest.approx(e.value)) for e in events.Scalars(key)]
        assert drawn == [(line["step"], line[key]) for line in lines if key in line] and drawn, key
    samples = events.Tensors("samples/text_summary")
    assert [e.step for e in samples] == [4, 8, 12] and b"sample 3: def " in samples[0].tensor_proto.string_val[0]
    parameters = events.SummaryMetadata("_hparams_/session_start_info").plugin_data.content
    assert b"max_lr" in parameters and b"model.n_layer" in parameters
    assert [p.is_dir() for p in (run / "tensorboard").iterdir()] == [False, False]  # one run to TensorBoard, not four


@pytest.mark.parametrize(
    "flags, says",
    [
        (["--micro-batch-size", "3"], ["--micro-batch-size 3", "use --micro-batch-size"]),
        (["--data-dir", "nowhere"], ["nowhere", "python fineweb.py"]),
        (["--resume", "log/none/model_00001.pt"], ["no checkpoint log/none/model_00001.pt"]),
        (["--init-from", "nowhere.pt"], ["nowhere.pt"]),
        (["--device", "cuda"], ["cuda", "--device auto"]),
        (["--hellaswag-every", "5", "--hellaswag-data", "none.jsonl"], ["none.jsonl", "python hellaswag.py"]),
        (["--model.vocab-size", "100"], ["vocabulary size, 100"]),
    ],
)
def test_bad_input_is_one_message(tiny_args, tmp_path, flags, says):
    with pytest.raises(UserError) as e:
        cfg = parse(["quickstart", *tiny_args, "--out-dir", str(tmp_path / "x"), *flags], None)
        rt = dataclasses.replace(CPU, device=train_gpt2.runtime.pick_device(cfg.device))
        train_gpt2.train(cfg, rt, {"signal": None})
    for s in says:
        assert s in str(e.value)


def test_a_gpu_that_torch_cannot_use_is_not_paid_for_in_vain(tmp_path, monkeypatch):
    """A pod whose driver is older than the torch there: it must not train on its CPU at the price of its GPUs."""

    def init():
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 12040).\nMore words")

    (tmp_path / "nvidia0").touch()
    there = str(tmp_path / "nvidia[0-9]*")
    unusable = train_gpt2.runtime.unusable_gpu
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "init", init)
    monkeypatch.setattr(train_gpt2.runtime, "unusable_gpu", lambda: unusable(there))
    assert train_gpt2.runtime.pick_device("auto").type == "cpu"  # the tests hide GPUs, as a user may
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    for name in ("auto", "cuda"):
        with pytest.raises(UserError, match=r"too old \(found version 12040\)\.\).*export CUDA_VISIBLE_DEVICES="):
            train_gpt2.runtime.pick_device(name)
    assert train_gpt2.runtime.pick_device("cpu").type == "cpu"
    (tmp_path / "nvidia0").unlink()
    assert train_gpt2.runtime.pick_device("auto").type == "cpu"


def test_a_machine_that_cannot_compile_is_told_what_is_missing(monkeypatch, tmp_path):
    """Debian has the compiler and Python's headers in different packages, and torch's C++ includes Python.h, too."""
    runtime = train_gpt2.runtime
    monkeypatch.setattr(runtime.sysconfig, "get_paths", lambda: {"include": str(tmp_path)})
    for there, header, says in ((False, False, "compiler"), (True, False, "Python.h"), (True, True, "")):
        monkeypatch.setattr(runtime.shutil, "which", lambda name, there=there: name if there else None)
        if header:
            (tmp_path / "Python.h").touch()
        for kind in ("cpu", "cuda"):
            missing = runtime.missing_compiler(torch.device(kind))
            assert says in missing and bool(missing) == bool(says)


def test_a_mac_gpu_needs_a_torch_that_computes_its_gradients_rightly(monkeypatch):
    from torch.torch_version import TorchVersion

    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    for version, device in {"2.13.1": "cpu", "2.14.0": "mps", "2.15.0+cpu": "mps"}.items():
        monkeypatch.setattr(torch, "__version__", TorchVersion(version))
        assert train_gpt2.runtime.pick_device("auto").type == device
    monkeypatch.setattr(torch, "__version__", TorchVersion("2.13.0"))
    with pytest.raises(UserError, match="'mps' is not available here"):
        train_gpt2.runtime.pick_device("mps")


def test_command_line_end_to_end(tiny_args, tmp_path, run_script, fails):
    done = run_script("train_gpt2.py", "quickstart", *tiny_args, "--out-dir", tmp_path / "run")
    assert "val loss" in done.stdout and "eta" in done.stdout
    fails("train_gpt2.py", "quickstart", *tiny_args, "--out-dir", tmp_path / "run", says=["already holds a run"])
