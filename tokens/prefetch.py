"""Prefetching: a thread produces items before they are needed.

for batch in prefetch(read_batches(), depth=16):
    train(batch)  # the next batches are read in the meantime

the thread     item 3, item 4, ...
produced       [item 1, item 2]         at most `depth` items that the caller has not taken
the caller     works on item 0
"""

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor


def prefetch(items: Iterable, depth: int) -> Iterator:
    """Yield the same items in the same order, produced by a thread that is at most `depth` items before the caller. An
    error in the thread is raised here, after the items before it. Closing the iterator does not wait for the thread,
    which may be in the middle of a long download: it ends after its item."""
    iterator, end = iter(items), object()
    pool = ThreadPoolExecutor(1)
    produced = deque(pool.submit(next, iterator, end) for _ in range(depth))
    try:
        while True:
            item = produced.popleft().result()
            if item is end:
                return
            produced.append(pool.submit(next, iterator, end))
            yield item
    # Also reached when the caller stops early and closes the iterator.
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
