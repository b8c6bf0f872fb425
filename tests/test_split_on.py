"""Plain text files with a separator between their documents, as TinyStories' files have <|endoftext|>."""

import io

import pytest
from test_fineweb import encode_with_tiktoken, read_bytes, read_folder, read_tokens, run_fineweb

from system.cli import UserError
from tokens import documents as readers
from tokens import shards, tokenizer

SEPARATOR = "<|endoftext|>"
STORIES = ["Once upon a time.\n\nThe end.", "A word <|endof", "text|> is not one", "", "x " * 40 + "end", "日本 <|end"]


@pytest.fixture
def stories(tmp_path):
    """A file laid out like TinyStories': each separator on a line of its own, the last one at the end."""
    path = tmp_path / "TinyStories.txt"
    path.write_text("".join(f"{story}\n{SEPARATOR}\n" for story in STORIES))
    return path


@pytest.mark.parametrize("block", [1, 2, 7, 13, 40, 1 << 20])
@pytest.mark.parametrize("piece", [1, 10])
def test_the_text_between_two_separators_is_one_document(stories, monkeypatch, block, piece):
    """However small the blocks are in which the file is read: a separator may lie in two, a document in many."""
    monkeypatch.setattr(readers, "CHUNK_BYTES", block)
    monkeypatch.setattr(readers, "PIECE_CHARACTERS", piece)

    found = []
    for chunk in readers.read_separated_text(SEPARATOR, io.BytesIO(stories.read_bytes())):
        found += [[text] for text in chunk.texts[: chunk.documents]]
        for text in chunk.texts[chunk.documents :]:
            found[-1].append(text)

    assert ["".join(pieces) for pieces in found] == [story for story in STORIES if story]


def test_split_on_makes_documents_of_a_text_file(stories, tmp_path, capsys):
    size = ("--shard-size", 30)
    run_fineweb("--source", stories, "--out", tmp_path / "out", "--split-on", SEPARATOR, *size)

    assert "warning" not in capsys.readouterr().out
    assert read_tokens(tmp_path / "out") == encode_with_tiktoken(story for story in STORIES if story)
    assert sum(shard.documents for shard in read_folder(tmp_path / "out")[1].shards) == 5

    # A removed shard comes back as it was, and the folder is not continued in another way.
    before = read_bytes(tmp_path / "out")
    (tmp_path / "out" / "TinyStories_train_000002.npy").unlink()
    run_fineweb("--source", stories, "--out", tmp_path / "out", "--split-on", SEPARATOR, *size)
    assert read_bytes(tmp_path / "out") == before
    with pytest.raises(UserError, match=r"made with split_on <\|endoftext\|>, not None"):
        run_fineweb("--source", stories, "--out", tmp_path / "out", *size)


def test_without_split_on_the_separator_is_text_and_one_warning_is_printed(stories, tmp_path, capsys):
    run_fineweb("--source", stories, "--out", tmp_path / "out", "--shard-size", 30)

    output = capsys.readouterr().out
    assert output.count("warning: ") == 1 and f"add --split-on '{SEPARATOR}' and choose another --out" in output
    assert str(stories) in output
    assert read_tokens(tmp_path / "out").count(tokenizer.EOT) == 1
    assert "split_on" not in shards.read_manifest(tmp_path / "out").source


def test_text_without_the_separator_is_not_warned_of(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("endoftext, <|end|> and so on " * 20)
    run_fineweb("--source", tmp_path / "a.txt", "--out", tmp_path / "out", "--shard-size", 30)

    assert "warning" not in capsys.readouterr().out


@pytest.mark.parametrize("name, text, value, message", [
    ("a.jsonl", '{"text": "a b c"}\n', SEPARATOR, "is for plain text files, and a has none"),
    ("a.txt", "a b c", "", "give the text between documents"),
])  # fmt: skip
def test_a_separator_that_cannot_work_is_refused(tmp_path, name, text, value, message):
    (tmp_path / name).write_text(text)

    with pytest.raises(UserError, match=message):
        run_fineweb("--source", tmp_path / name, "--out", tmp_path / "out", "--split-on", value)
    assert not (tmp_path / "out").exists()
