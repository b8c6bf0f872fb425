"""Exchange token shards and checkpoints through the Hugging Face Hub, and convert models to and from other layouts.

    python hub.py push-data data/edufineweb OWNER/NAME       # tokenize once, ...
    python hub.py pull-data OWNER/NAME data/edufineweb       # ... train anywhere (also: --data-dir hf://OWNER/NAME)
    python hub.py push-model log/gpt2-124m OWNER/NAME        # and: pull-model OWNER/NAME DIR
    python hub.py check OWNER/NAME                           # could this token push a model there?
    python hub.py export log/gpt2-124m gpt2-mine             # a folder for transformers' AutoModelForCausalLM
    python hub.py import old/model_19072.pt log/old          # a build-nanogpt or nanoGPT checkpoint

An interrupted transfer continues when the same command is run again; it is complete only once all hashes match.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from system.cli import print0, require, run_cli
from system.hub_client import open_to_write, pull, push
from tokens.hub_data import pull_data, push_data
from training import convert, metrics_file

if TYPE_CHECKING:
    from model import GPT

MODEL_FILE = re.compile(r"(model|optim)_\d+\.pt|[\w-]+\.(safetensors|json|jsonl|txt|png|md|jinja)")
CARD_FACTS = ("step", "tokens", "train_loss", "val_loss", "hellaswag_acc", "hellaswag_acc_norm")


def check(repo: str, public: bool = False) -> None:
    """Make the model repository REPO (private unless --public) if it is missing, and check that this token may write
    to it: better now than when a run is over."""
    with open_to_write(repo, "model", public) as (_, repo):
        print0(f"{repo} is there, and this token may push to it")


def load(weights: Path) -> tuple[GPT, str]:
    """The model in a .pt file, and a model card with the run's figures at that step."""
    from training import checkpoint

    model, facts = checkpoint.load(weights)
    c, step = model.config, facts["step"]
    for row in metrics_file.read_metrics(weights.with_name("metrics.jsonl")):
        if row["step"] <= step:
            facts |= row
    facts["step"] = step
    if batch := metrics_file.tokens_per_step(weights.parent):
        facts["tokens"] = step * batch
    figures = [f"| {k} | {facts[k]:,} |" for k in CARD_FACTS if isinstance(facts.get(k), int | float)]
    shape = f"{c.n_layer} layers, {c.n_head} heads, width {c.n_embd}, context {c.block_size}."
    card = ["---", "pipeline_tag: text-generation", "tags: [gpt2]", "---", "# GPT-2", ""]
    card += [f"{model.num_params():,} parameters: {shape}", "", "| | |", "|-|-|", *figures, "", ""]
    return model, "\n".join(card)


def best_model(run_dir: Path) -> Path | None:
    """The saved step of a run with the lowest val loss; None if none was both saved and evaluated."""
    from training import checkpoint

    saved, losses = checkpoint.complete_steps(run_dir, ["model"]), {}
    for row in metrics_file.read_metrics(run_dir / "metrics.jsonl"):
        if row["step"] in saved and isinstance(row.get("val_loss"), float):
            losses[row["step"]] = row["val_loss"]
    if losses:
        return checkpoint.model_path(run_dir, min(losses, key=losses.get))
    print0(f"no step saved in {run_dir} has a val loss: its newest is taken for the best")
    return None


def push_model(
    path: Path,
    repo: str,
    public: bool = False,
    with_optimizer: bool = False,
    steps: Literal["newest", "best", "all"] = "newest",
) -> None:
    """Upload a .pt file, checkpoints of a run, or an export.

    Args:
        path: the file, or the folder of the run or the export.
        repo: OWNER/NAME, made if missing; private unless --public.
        public: push where all can read.
        with_optimizer: also what --resume needs: a run's newest step with its optimizer.
        steps: which of a run's: the newest, the one with the lowest val loss, or all.
    """
    from training import checkpoint

    if (path / "model.safetensors").is_file():
        return push(repo, "model", [p for p in path.iterdir() if MODEL_FILE.fullmatch(p.name)], "", public)
    newest = checkpoint.newest_model(path) if path.is_dir() else path
    shown = newest
    if steps == "best" and path.is_dir():
        shown = best_model(path) or newest
    _, card = load(shown)
    files = {shown, *(shown.with_name(n) for n in ("metrics.jsonl", "curves.png", "config.json"))}
    if steps == "all" and path.is_dir():
        files |= {checkpoint.model_path(path, step) for step in checkpoint.complete_steps(path, ["model"])}
    if with_optimizer:
        optim = newest.with_name(newest.name.replace("model_", "optim_"))
        require(optim.is_file(), f"{optim} does not exist; push without --with-optimizer")
        files |= {newest, optim}
    card += "    python hub.py pull-model REPO DIR\n    python infer.py DIR 'Hello,'\n"
    push(repo, "model", sorted(p for p in files if p.is_file()), card, public)


def pull_model(repo: str, out_dir: Path, revision: str | None = None, every_step: bool = False) -> None:
    """Download a pushed model, its newest step or all of them, for infer.py and, if its optimizer was pushed too, for
    `train_gpt2.py --resume`."""
    with pull(repo, "model", out_dir, revision) as (remote, fetch):
        names = [name for name in remote if MODEL_FILE.fullmatch(name)]
        steps = {name: int(name[6:-3]) for name in names if name.endswith(".pt")}
        newest = max((step for name, step in steps.items() if name.startswith("model")), default=-1)
        if not every_step:
            names = [name for name in names if steps.get(name, newest) == newest]
        found = any(name.endswith((".pt", ".safetensors")) for name in names)
        require(found, f"{repo} has no model (model_00000.pt or model.safetensors); is the name right?")
        fetch(dict.fromkeys(names))
    print0(f"{repo} is in {out_dir}; try: python infer.py {out_dir} 'Hello,'")


def export(path: Path, out_dir: Path) -> None:
    """Write a folder that transformers' AutoModelForCausalLM and AutoTokenizer can load, with a model card."""
    from training import checkpoint

    model, card = load(checkpoint.newest_model(path) if path.is_dir() else path)
    convert.save_hf(model, out_dir)
    (out_dir / "README.md").write_text(f'{card}    AutoModelForCausalLM.from_pretrained("{out_dir.name}")\n')
    print0(f"{out_dir} is ready; try: python infer.py {out_dir} 'Hello,'")


def import_old(old: Path, out_dir: Path) -> None:
    """Convert a build-nanogpt or nanoGPT checkpoint to OUT_DIR/model_STEP.pt. No pickled code in it is run."""
    from training import checkpoint

    there = sorted(out_dir.glob("model_*.pt"))
    require(not there, f"{out_dir} already has a model, and an import never joins another run; choose another folder")
    model, step = convert.load_old(old)
    out_dir.mkdir(parents=True, exist_ok=True)
    checkpoint.write(target := checkpoint.model_path(out_dir, step), checkpoint.model_file(model, step))
    print0(f"{model.num_params():,} parameters are in {target}; try: python infer.py {out_dir} 'Hello,'")


def main() -> None:
    import tyro

    commands = {f.__name__.replace("_", "-"): f for f in (push_data, pull_data, push_model, pull_model, check, export)}
    commands["import"] = import_old
    tyro.extras.subcommand_cli_from_dict(commands, description=__doc__, config=(tyro.conf.PositionalRequiredArgs,))


if __name__ == "__main__":
    run_cli(main)
