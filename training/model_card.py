"""The README.md of a model: what it is, its figures, the command that trained it, and what a user types to run it.

    run = read_run(Path("log/gpt2-124m/model_19073.pt"))
    text = make_card(run, "my-gpt2", layout, license="mit", has_checkpoint=False, has_curves=True)

Called by hub.py for an export and for a model's page on the Hub. The Hub reads the YAML header between the two lines of
---: license, dataset, an example prompt for the widget, and the figures, which it calls model-index. The parts:

    ---
    license: mit                                      make_header
    ...
    ---
    # my-gpt2
    A GPT of 124,439,808 parameters: 12 layers, ...   make_card
    | val_loss | 3.07 |
    Trained by
        python train_gpt2.py gpt2-124m                training_command
    transformers runs it as `GPT2LMHeadModel`, ...    describe_use
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from system.cli import UserError
from tokens import shards, tokenizer
from training import gguf, metrics

if TYPE_CHECKING:
    from model import GPT, GPTConfig
    from training.config import TrainConfig
    from training.hf_layouts import Layout

# The figures of a run that the card shows, in this order.
FIGURES = ("step", "tokens", "train_loss", "val_loss", "val_bpb", "hellaswag_acc", "hellaswag_acc_norm")

# {figure: (type, name)} of those that go into the Hub's model-index, with the type and name of the metric there.
INDEXED = {
    "val_loss": ("loss", "validation loss (nats per token)"),
    "val_bpb": ("bits_per_byte", "validation bits per byte"),
    "hellaswag_acc": ("accuracy", "acc"),
    "hellaswag_acc_norm": ("accuracy", "acc_norm"),
}

# Settings that say where and when a run ran, not what it computed; the command leaves them out.
NOT_IN_COMMAND = ("preset", "model", "out_dir", "resume", "gpu_hour_usd", "dry_run", "card", "eval_only", "tracker",
                  "time_limit", "allow_drift")  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A model, and what is known about the run that made it."""

    model: GPT
    figures: dict[str, Any]
    measured_at: dict[str, int]  # the step of each figure of metrics.jsonl; an evaluation may be older than the model
    command: str  # "" if unknown
    dataset: str  # the source of the tokens; "" if unknown
    is_hub_dataset: bool  # whether `dataset` is a dataset of the Hub
    prompt: str  # for the examples


def read_run(weights: Path) -> Run:
    """The model in a .pt file, and what the files beside it say about its run at that step. Files that are missing or
    were edited leave gaps in the card. Raises UserError if the .pt file holds no model."""
    from training import checkpoint

    # Begin with the facts that the file itself has, such as its step.
    model, figures = checkpoint.load(weights)
    step = figures["step"]

    # Add the run's measurements up to this step, the latest of each kind.
    measured_at: dict[str, int] = {}
    for row in metrics.read_metrics(weights.with_name("metrics.jsonl")):
        if row["step"] <= step:
            figures |= row
            measured_at |= dict.fromkeys(row, row["step"])
    figures["step"] = step

    # How many tokens the model has seen, if the run's config.json is there.
    saved = metrics.read_config(weights.parent)
    tokens_per_step = metrics.tokens_per_step(weights.parent)
    if tokens_per_step:
        figures["tokens"] = step * tokens_per_step

    # The dataset.
    dataset, is_hub_dataset = "", False
    if isinstance(saved.get("data_dir"), str):
        dataset, is_hub_dataset = find_dataset(saved["data_dir"])

    # The prompt for the examples: that of the run's samples.
    prompt = saved.get("sample_prompt")
    if not isinstance(prompt, str) or not prompt.strip():
        prompt = "Hello, I'm a language model,"
    return Run(model, figures, measured_at, training_command(saved), dataset, is_hub_dataset, prompt)


def find_dataset(data_dir: str) -> tuple[str, bool]:
    """The source of the tokens in a run's data_dir, and whether it is a dataset of the Hub. ("", False) if unknown."""
    # The run pulled its shards from the Hub.
    if data_dir.startswith("hf://"):
        return data_dir.removeprefix("hf://").removeprefix("datasets/"), True

    # Otherwise the manifest beside the shards names the source. The shards may no longer be on this machine.
    try:
        manifest = shards.read_manifest(data_dir)
    except UserError:
        return "", False
    if manifest is None:
        return "", False

    # A dataset of the Hub is called OWNER/NAME, and its revision is a git commit; that of local files is shorter.
    name = str(manifest.source.get("name", ""))
    revision = str(manifest.source.get("revision", ""))
    has_hub_name = re.fullmatch(r"[\w.-]+/[\w.-]+", name)
    has_commit = re.fullmatch(r"[0-9a-f]{40}", revision)
    return name, bool(has_hub_name and has_commit)


def training_command(saved: dict[str, Any]) -> str:
    """The command line of the run whose config.json this is: the preset, and every setting in which the run differs
    from it. "" if the config is of another version or was edited."""
    from training.config import TrainConfig
    from training.presets import PRESETS

    # The settings of the run and those of its preset.
    try:
        cfg = TrainConfig.from_dict(saved)
        preset = PRESETS[cfg.preset]
    except (UserError, KeyError, TypeError):
        return ""

    # The flags that differ from the preset. A run that started from weights may have the network of these weights.
    flags = different_flags(cfg, preset, "")
    if cfg.init_from == "scratch" or cfg.model != preset.model:
        flags += different_flags(cfg.model, preset.model, "model.")

    # What started the ranks: torchrun, if there were several.
    ranks = saved.get("world_size")
    program = "python" if ranks in (None, 1) else f"torchrun --standalone --nproc_per_node={ranks}"
    return shlex.join([*program.split(), "train_gpt2.py", cfg.preset, *flags])


def different_flags(config: TrainConfig | GPTConfig, default: TrainConfig | GPTConfig, prefix: str) -> list[str]:
    """The flags that turn `default` into `config`, such as ["--max-steps", "50", "--no-compile"]. `prefix` is "model."
    for those of the network."""
    flags = []
    for field in fields(config):
        value = getattr(config, field.name)
        if field.name in NOT_IN_COMMAND or value == getattr(default, field.name):
            continue

        # A switch takes no value: it is turned on by its name, and off by "no-" before it.
        name = field.name.replace("_", "-")
        if value is True:
            flags.append(f"--{prefix}{name}")
        elif value is False:
            flags.append(f"--{prefix}no-{name}")
        else:
            flags += [f"--{prefix}{name}", str(value)]
    return flags


# ------------------------------------------------------------------------- the text


def make_card(run: Run, name: str, layout: Layout | None, license: str, has_checkpoint: bool, has_curves: bool) -> str:
    """The text of README.md. `name` is what a user passes to from_pretrained: a folder, or REPO for the repository that
    is pushed to. layout: that of the export beside the card; None if there is no export. has_checkpoint: whether a
    model_*.pt is beside the card. has_curves: whether curves.png is."""
    config = run.model.config
    lines = ["---", make_header(run, name, layout, license).rstrip(), "---", f"# {name}", ""]

    # The network and its figures.
    shape = f"{config.n_layer} layers, {config.n_head} heads, width {config.n_embd}, context {config.block_size}"
    lines += [f"A GPT of {run.model.num_params():,} parameters: {shape}.", ""]
    lines += ["| | |", "|-|-|"]
    for key in FIGURES:
        value = run.figures.get(key)
        if isinstance(value, int | float):
            text = f"{value:.4f}" if isinstance(value, float) else f"{value:,}"
            if not is_of_this_step(run, key):
                text += f" (of step {run.measured_at[key]:,})"
            lines.append(f"| {key} | {text} |")
    lines.append("")

    # How it was trained.
    if has_curves:
        lines += ["![Loss over tokens](curves.png)", ""]
    if run.dataset:
        lines += [f"Trained on {run.dataset}.", ""]
    if run.command:
        lines += ["Trained by", "", f"    {run.command}", ""]

    # How to run it.
    if layout:
        lines += describe_use(run, name, layout)
    if has_checkpoint:
        lines += ["With the project that trained it:", ""]
        lines += [f"    python hub.py pull-model {name} DIR", "    python infer.py DIR 'Hello,'", ""]
    return "\n".join(lines)


def is_of_this_step(run: Run, key: str) -> bool:
    """Whether a figure describes these weights. A run that was stopped between two evaluations ends with weights that
    were not evaluated; the figures are then those of an earlier step."""
    is_evaluation = key in INDEXED
    return not is_evaluation or run.measured_at.get(key, run.figures["step"]) == run.figures["step"]


def make_header(run: Run, name: str, layout: Layout | None, license: str) -> str:
    """The YAML that the Hub reads, without the lines of ---. The arguments are those of make_card."""
    from huggingface_hub import EvalResult, ModelCardData

    # What the model can be found by. custom_code: transformers runs it only with trust_remote_code=True.
    tags = ["gpt2"] if layout is None or layout.model_type == "gpt2" else ["gpt"]
    if layout and layout.needs_code:
        tags.append("custom_code")

    # The validation loss belongs to the run's own dataset, the HellaSwag figures to HellaSwag. Those of an earlier step
    # would be wrong for these weights.
    results = []
    for key, (metric_type, metric_name) in INDEXED.items():
        value = run.figures.get(key)
        if not isinstance(value, int | float) or not is_of_this_step(run, key):
            continue
        is_hellaswag = key.startswith("hellaswag")
        dataset = run.dataset or "the run's validation tokens"
        results.append(
            EvalResult(
                task_type="text-generation",
                dataset_type="Rowan/hellaswag" if is_hellaswag else dataset,
                dataset_name="HellaSwag" if is_hellaswag else dataset,
                dataset_split="validation",
                metric_type=metric_type,
                metric_name=metric_name,
                metric_value=value,
            )
        )

    # The Hub shows the figures only with the model's name. The widget is the box on the page to try the model in.
    data = ModelCardData(
        license=license,
        library_name="transformers" if layout else None,
        pipeline_tag="text-generation",
        tags=tags,
        datasets=[run.dataset] if run.is_hub_dataset else None,
        model_name=name if results else None,
        eval_results=results or None,
        widget=[{"text": run.prompt}],
    )
    return data.to_yaml()


def describe_use(run: Run, name: str, layout: Layout) -> list[str]:
    """The lines that say which class of transformers runs the export, and what a user types."""
    # Which class it is. The user must allow code from the folder, even for the tokenizer alone, because that reads the
    # model's config.
    trust = ", trust_remote_code=True" if layout.needs_code else ""
    if layout.needs_code:
        code = "`model.py` behind `modeling_gpt.py`, both in this folder"
        lines = [f"transformers has no class for this network: it runs {code}, if you allow it to."]
    else:
        lines = [f"transformers runs it as `{layout.class_name}`, without code from this folder."]

    # What to type. A model with another vocabulary comes without a tokenizer, which a pipeline needs.
    has_tokenizer = run.model.config.vocab_size > tokenizer.EOT
    if has_tokenizer:
        lines += ["", "    from transformers import pipeline", ""]
        lines += [f'    pipe = pipeline("text-generation", model="{name}"{trust})']
        lines += [f"    print(pipe({run.prompt!r})[0]['generated_text'])", ""]
    else:
        lines += ["", "    from transformers import AutoModelForCausalLM", ""]
        lines += [f'    model = AutoModelForCausalLM.from_pretrained("{name}"{trust})', ""]
        lines += [f"The {run.model.config.vocab_size} tokens are not GPT-2's, so this folder has no tokenizer.", ""]

    # transformers has the exact GELU, but llama.cpp has not.
    if run.model.config.activation == "gelu_erf" and layout.model_type == "gpt2" and has_tokenizer:
        lines += [f"Note: {gguf.gelu_note(run.model)}.", ""]
    return lines
