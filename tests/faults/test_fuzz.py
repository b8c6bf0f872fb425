"""Mutated files through every reader (fuzz.py): success or UserError, in time."""

import pytest


def fuzz(run_script, count, seed, timeout):
    done = run_script("tests/faults/fuzz.py", "--count", count, "--seed", seed, check=False, timeout=timeout)
    print(done.stdout)
    assert done.returncode == 0, done.stdout[-9000:] + done.stderr[-3000:]
    assert f"{count} mutated inputs" in done.stdout and " 0 bad" in done.stdout.splitlines()[-1]


def test_mutated_files_end_in_success_or_one_message(run_script):
    fuzz(run_script, 300, 0, 120)


@pytest.mark.slow
def test_many_mutated_files(run_script):
    fuzz(run_script, 30_000, 1, 1800)
