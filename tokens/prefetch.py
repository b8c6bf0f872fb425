"""Prefetching: a thread produces items before they are needed.

fineweb.py downloads, reads and tokenizes with it, tokens/loader.py reads batches.

    for batch in prefetch(read_batches(), depth=16):
        train(batch)  # the next batches are read in the meantime

    the thread     item 3, item 4, ... waits for a slot        at most `depth` items that the caller has not taken
    the queue      [item 1, item 2]
    the caller     works on item 0
"""

import queue
import threading
from collections.abc import Iterable, Iterator


def prefetch(items: Iterable, depth: int) -> Iterator:
    """Yield the same items in the same order, produced by a thread that is at most `depth` items before the caller. An
    error in the thread is raised here, after the items before it. Closing the iterator does not wait for the thread,
    which may be in the middle of a long download: it ends after its item."""
    # What the two threads share: how far the producer may run, what it has produced, and whether the caller still wants
    # more.
    free_slots = threading.Semaphore(depth - 1)
    produced: queue.SimpleQueue = queue.SimpleQueue()  # of (item, error)
    closed = threading.Event()
    end = object()

    # The thread: produce an item, then wait until the caller has taken enough of the earlier ones.
    def work() -> None:
        try:
            for item in items:
                produced.put((item, None))
                free_slots.acquire()
                if closed.is_set():
                    return
            produced.put((end, None))
        # Even KeyboardInterrupt belongs to the caller, who would otherwise wait forever for an item.
        except BaseException as e:
            produced.put((end, e))

    threading.Thread(target=work, daemon=True).start()  # daemon: a download must not outlive Ctrl-C

    # The caller: take items in order until the end or an error; then let a thread that waits for a slot see `closed`.
    try:
        while True:
            item, error = produced.get()
            if error is not None:
                raise error
            if item is end:
                return
            free_slots.release()
            yield item
    # Also reached when the caller stops early and closes the iterator.
    finally:
        closed.set()
        free_slots.release()
