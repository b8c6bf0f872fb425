"""The README.md of a model: what it is, its figures, and what a user types to run it. Called by hub.py.

text = make_card(model, facts, "OWNER/NAME", needs_code=False)
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from model import GPT

HEADER = """---
license: mit
pipeline_tag: text-generation
tags: [gpt2]
---
# {name}

A GPT of {parameters:,} parameters: {config.n_layer} layers, {config.n_head} heads, width {config.n_embd}, context
{config.block_size}.

| preset | step | validation loss |
|---|---|---|
| {preset} | {step:,} | {val_loss} |

    python hub.py pull-model {name} DIR && python infer.py DIR "Hello,"
"""

USE = """
In transformers:

    from transformers import pipeline

    pipe = pipeline("text-generation", model="{name}"{trust})
    print(pipe("Hello, I'm a language model,")[0]["generated_text"])
"""

NOTE_ON_CODE = """
transformers has no class for this network: it runs `model.py` behind `modeling_gpt.py`, both in this folder, if you
allow it to.
"""


def make_card(model: GPT, facts: dict[str, Any], name: str, needs_code: bool | None) -> str:
    """The text of README.md. facts: what the checkpoint has beside the weights. name: a folder, or OWNER/NAME.
    needs_code: whether transformers runs the export with its code; None: there is no export."""
    val_loss = facts.get("val_loss")
    card = HEADER.format(
        name=name,
        config=model.config,
        parameters=model.num_params(),
        preset=facts.get("preset", "-"),
        step=facts["step"],
        val_loss=f"{val_loss:.4f}" if isinstance(val_loss, float) else "-",
    )
    if needs_code is not None:
        card += USE.format(name=name, trust=", trust_remote_code=True" if needs_code else "")
    if needs_code:
        card += NOTE_ON_CODE
    return card
