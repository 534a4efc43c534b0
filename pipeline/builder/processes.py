"""``map`` over processes that end with the one that started them, and say nothing when it is interrupted."""

import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import active_children, get_context, parent_process
from typing import Any, Final

#: Items that a process takes at a time.
_CHUNK: Final = 8

Map = Callable[[Callable[[Any], Any], Sequence[Any]], Iterator[Any]]


@contextmanager
def process_map(workers: int) -> Iterator[Map]:
    """A ``map`` whose results come, in order, from ``workers`` processes; function and items must pickle."""
    others = set(active_children())
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_end_with_parent) as pool:

        def mapped(function: Callable[[Any], Any], items: Sequence[Any]) -> Iterator[Any]:
            # Processes that start here keep SIGINT blocked: Ctrl-C reaches them, too, and is not theirs.
            before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                chunks = [
                    pool.submit(_each, function, items[first : first + _CHUNK])
                    for first in range(0, len(items), _CHUNK)
                ]
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for chunk in chunks:
                yield from chunk.result()

        try:
            yield mapped
        except BaseException:
            # Leaving the pool would wait for all that is still to be done; and to cancel that, as the pool's
            # own `map` does, makes the pool stumble when its processes are gone.
            for process in set(active_children()) - others:
                process.kill()
            raise


def _each(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    return [function(item) for item in items]


def _end_with_parent() -> None:
    """A pool's processes wait for work, for ever if their parent is killed."""
    threading.Thread(target=_wait_for_the_end_of_the_parent, daemon=True).start()


def _wait_for_the_end_of_the_parent() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)
