"""The next item of an iterator, fetched while the last one is in use."""

import threading
import weakref
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class FetchAhead(Iterator[T], Generic[T]):
    """Goes through ``items`` in a thread, one item ahead of what has been taken.

    Items, the end and errors come in the order of ``items``. The thread ends with them, with :meth:`close`,
    with the last reference to this object, or with the interpreter. What ends it waits until an item that is
    being fetched has come, calls ``stop``, and lets go of ``items``. An error's traceback refers to ``items``
    for as long as the error is handled: what must end by then is for ``stop`` to end.
    """

    def __init__(self, items: Iterator[T], stop: Callable[[], None] | None = None) -> None:
        self._state = state = _State()
        self._thread = threading.Thread(target=_fetch, args=(items, state), name="fetch-ahead", daemon=True)
        # The thread knows nothing of this object, or it would keep it alive. `items` is the finalizer's to
        # drop last: a loader that is dropped by its own thread would stop its workers from there.
        self._finalizer = weakref.finalize(self, _end, self._thread, state, items, stop)
        self._thread.start()

    def __next__(self) -> T:
        if self._state.over:
            raise StopIteration
        item, error = self._state.fetched.get()
        if error is not None:
            self._state.over = True
            raise error
        self._state.room.release()
        taken: T = item
        return taken

    def close(self) -> None:
        """End the thread; there are no more items."""
        self._finalizer()


class _State:
    """What the thread shares with who takes."""

    def __init__(self) -> None:
        #: Items that may be fetched before one is taken.
        self.room = threading.Semaphore(1)
        #: (item, None), or at the end (None, error).
        self.fetched: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self.over = False


def _fetch(items: Iterator[Any], state: _State) -> None:
    while True:
        state.room.acquire()
        if state.over:
            return
        try:
            fetched = next(items)
        except BaseException as error:  # the end, too: all of it is raised where items are taken
            state.fetched.put((None, error))
            return
        state.fetched.put((fetched, None))
        del fetched  # or its memory would be held until the next one is there


def _end(
    thread: threading.Thread, state: _State, items: Iterator[Any], stop: Callable[[], None] | None
) -> None:
    state.over = True
    state.room.release()
    thread.join()
    if stop is not None:
        stop()
    del items
