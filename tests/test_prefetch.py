"""A thread that runs ahead: by its depth and no more, in order, with the errors of the items."""

import threading
import time

import pytest
from processes import wait_for

from tokens.prefetch import prefetch


@pytest.mark.parametrize("depth", [1, 3])
def test_prefetch_runs_ahead_by_its_depth(depth):
    produced = []

    def items():
        for i in range(9):
            produced.append(i)
            yield i
        raise OSError("the end")

    def produced_after_a_while():
        time.sleep(0.05)  # the thread has come to rest
        return len(produced)

    fetched = prefetch(items(), depth)
    assert next(fetched) == 0 and produced_after_a_while() == 1 + depth
    assert next(fetched) == 1 and produced_after_a_while() == 2 + depth

    # The others come in order, and then the error of the thread.
    for i in range(2, 9):
        assert next(fetched) == i
    with pytest.raises(OSError, match="the end"):
        next(fetched)


def test_closing_ends_the_thread_and_does_not_wait_for_it():
    working, may_end = threading.Event(), threading.Event()
    produced = []

    def items():
        for i in range(9):
            produced.append(i)
            yield i
            working.set()
            may_end.wait(5)

    fetched = prefetch(items(), 1)
    next(fetched)
    working.wait()
    before = threading.active_count()
    fetched.close()

    assert produced == [0]
    may_end.set()
    wait_for(lambda: threading.active_count() < before)
    assert produced == [0, 1]
