"""Mutated files through every reader (fuzz.py): each ends in success or UserError, in time."""

import pytest
from helpers import ROOT

from faults import fuzz
from tokens import documents

INPUTS_PER_CASE = 20  # in `make test`


def run_fuzz(run_script, count, seed, timeout):
    """Read `count` inputs over all cases, in a process of its own; none may end badly."""
    done = run_script("tests/faults/fuzz.py", "--count", count, "--seed", seed, check=False, timeout=timeout)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-9000:] + done.stderr[-3000:]
    assert f"{count} mutated inputs" in done.stdout
    assert " 0 bad" in done.stdout.splitlines()[-1]


def test_mutated_files_end_in_success_or_one_message(run_script):
    run_fuzz(run_script, INPUTS_PER_CASE * len(fuzz.CASES), 0, 120)


@pytest.mark.slow
def test_many_mutated_files(run_script):
    run_fuzz(run_script, 30_000, 1, 1800)


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
