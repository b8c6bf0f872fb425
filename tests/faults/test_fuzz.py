"""Mutated files through every reader (fuzz.py): each ends in success or UserError, in time."""

import pytest

from faults import fuzz

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
