"""What a process keeps between samples, within bounds: the things used last, and counts of how that went."""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class MemoryStats:
    """A :class:`Recent` keeps ``kept`` things of ``bytes`` now, after so many hits, misses and drops."""

    kept: int
    bytes: int
    hits: int
    misses: int
    dropped: int


class Recent(Generic[T]):
    """The things used last: at most ``limit`` of them, and at most ``limit_bytes`` by what ``size`` says.

    ``discard`` is told of those that have to go. A thing that is larger than the limit by itself is made each
    time it is asked for.
    """

    def __init__(
        self,
        limit: int,
        *,
        discard: Callable[[T], None] = lambda _: None,
        limit_bytes: int | None = None,
        size: Callable[[T], int] = lambda _: 0,
    ) -> None:
        self._limit = limit
        self._limit_bytes = limit_bytes
        self._discard = discard
        self._size = size
        self._items: OrderedDict[str, tuple[T, int]] = OrderedDict()
        self._bytes = self._hits = self._misses = self._dropped = 0

    def __len__(self) -> int:
        return len(self._items)

    @property
    def stats(self) -> MemoryStats:
        """Counts up to now."""
        return MemoryStats(
            kept=len(self._items),
            bytes=self._bytes,
            hits=self._hits,
            misses=self._misses,
            dropped=self._dropped,
        )

    def get(self, key: str, make: Callable[[], T]) -> T:
        """What is known as ``key``, made if it has to be."""
        if key in self._items:
            self._hits += 1
            self._items.move_to_end(key)
            return self._items[key][0]
        self._misses += 1
        item = make()
        size = self._size(item)
        if self._limit_bytes is not None and size > self._limit_bytes:
            return item
        self._items[key] = item, size
        self._bytes += size
        while len(self._items) > self._limit or self._bytes > (self._limit_bytes or self._bytes):
            self._drop_oldest()
            self._dropped += 1
        return item

    def clear(self) -> None:
        """Discard everything."""
        while self._items:
            self._drop_oldest()

    def _drop_oldest(self) -> None:
        _, (item, size) = self._items.popitem(last=False)
        self._bytes -= size
        self._discard(item)
