"""Mutated files through every reader (fuzz.py): each ends in success or UserError, in time."""

import pytest
from helpers import ROOT

from faults import fuzz
from tokens import documents

INPUTS_PER_CASE = 8  # in `make test`


def run_fuzz(capsys, count, seed):
    """Read `count` inputs over all cases; none may end badly."""
    with pytest.raises(SystemExit) as ended:
        fuzz.main(count=count, seed=seed)

    output = capsys.readouterr().out
    assert not ended.value.code, output[-9000:]
    assert f"{count} mutated inputs" in output
    assert " 0 bad" in output.splitlines()[-1]


def test_mutated_files_end_in_success_or_one_message(capsys):
    run_fuzz(capsys, INPUTS_PER_CASE * len(fuzz.CASES), 0)


@pytest.mark.slow
def test_none_of_many_mutated_files_ends_badly(capsys):
    run_fuzz(capsys, 30_000, 1)


def test_promises_state_how_many_readers_are_fuzzed():
    stated = f"{len(fuzz.CASES)} readers, {INPUTS_PER_CASE * len(fuzz.CASES)} inputs in `make test`"
    assert stated in (ROOT / "docs" / "promises.md").read_text(), f"docs/promises.md must say: {stated}"


def test_every_format_has_a_writer_here_and_no_other_suffix_does():
    suffixes = {*documents.READERS, ".txt"}
    missing = suffixes - fuzz.DOCUMENT_WRITERS.keys()
    assert not missing, f"add a writer for {missing} to DOCUMENT_WRITERS in tests/faults/fuzz.py"
    unread = fuzz.DOCUMENT_WRITERS.keys() - suffixes
    assert not unread, f"nothing reads {unread}: remove it from DOCUMENT_WRITERS in tests/faults/fuzz.py"


def test_a_format_without_a_writer_is_named():
    with pytest.raises(ValueError, match=r"add a writer for \.new to DOCUMENT_WRITERS in tests/faults/fuzz\.py"):
        fuzz.document_case(".new")


@pytest.mark.parametrize("suffix", documents.READERS)
def test_every_reader_of_documents_is_fuzzed(tmp_path, suffix):
    case = fuzz.CASES[f"documents{suffix}"]
    case.make(tmp_path)

    # the file is one that this reader reads, with the texts that were written
    texts = [text for chunk in documents.read_files([tmp_path / case.file], 0, "text") for text in chunk.texts]
    assert texts == fuzz.DOCUMENTS
