"""Read-ahead: work that a thread does while its result is not yet needed."""

import queue
import threading
from collections.abc import Iterable, Iterator


def ahead(items: Iterable, steps: int, join: bool = False) -> Iterator:
    """The same items, produced by a separate thread at most `steps` ahead of the caller. join: closing the iterator
    waits for the thread (one still reading when the process exits may abort it)."""
    room, made, closed = threading.Semaphore(steps - 1), queue.SimpleQueue(), threading.Event()
    end = object()

    def work() -> None:
        try:
            for item in items:
                made.put((item, None))
                room.acquire()
                if closed.is_set():
                    return
            made.put((end, None))
        except BaseException as e:
            made.put((end, e))

    thread = threading.Thread(target=work, daemon=True)  # daemon: a download must not outlive Ctrl-C
    thread.start()
    try:
        while True:
            item, error = made.get()
            if error is not None:
                raise error
            if item is end:
                return
            room.release()
            yield item
    finally:
        closed.set()
        room.release()
        if join:
            thread.join()
