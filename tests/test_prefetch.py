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

    fetched = prefetch(items(), depth)
    for i in range(2):
        assert next(fetched) == i
        time.sleep(0.05)  # the thread comes to rest
        assert len(produced) == i + 1 + depth

    # The others come in order, and then the error of the thread.
    assert [next(fetched) for _ in range(7)] == [2, 3, 4, 5, 6, 7, 8]
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
