"""Journals: what a build has finished, line by line, so that an interrupted one goes on.

A line is ``{"crc32":"…","record":{…}}``. A line that was torn when its writer died, or damaged later, does
not match its checksum and is left out, and counted.
"""

import json
import math
import os
import time
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megafold.cache_store import files
from megafold.cache_store.digest import JSON, canonical_json


@dataclass(frozen=True)
class Replay:
    """What a journal holds.

    ``torn``: the last line was cut short. ``damaged``: how many lines before it are left out.
    """

    records: list[dict[str, Any]]
    torn: bool
    damaged: int


class Journal:
    """An append-only file of JSON records. A context manager; one writer at a time (the build lock)."""

    def __init__(self, path: Path, *, sync_every_s: float = 0.0) -> None:
        """``sync_every_s``: bring records to the disk when the last time was that many seconds ago.

        With 0, a record is durable when :meth:`append` returns. With more, a power failure can take those
        since the last time; a process that is killed loses none, as the kernel has them.
        """
        if not sync_every_s >= 0:
            raise ValueError(f"sync_every_s is {sync_every_s}: at least 0")
        self.path = path
        self._sync_every_s = sync_every_s
        self._synced = -math.inf
        self._has_unsynced = False
        self._fd = -1

    def __enter__(self) -> "Journal":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def append(self, record: Mapping[str, JSON]) -> None:
        """Add a record.

        Raises:
            ContentError: JSON cannot hold it exactly.
            ReadOnlyCache: the journal cannot be written.
        """
        line = _line(record)
        with files.explain_refusal(self.path):
            if self._fd < 0:
                self._fd = self._open()
            _write(self._fd, line)
            self._has_unsynced = True
            if time.monotonic() - self._synced >= self._sync_every_s:
                self.sync()

    def sync(self) -> None:
        """Bring every record to the disk."""
        if self._fd >= 0 and self._has_unsynced:
            with files.explain_refusal(self.path):
                os.fsync(self._fd)
            self._synced = time.monotonic()
        self._has_unsynced = False

    def close(self) -> None:
        """Bring every record to the disk and close the file. Appending opens it again."""
        try:
            self.sync()
        finally:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                os.close(fd)

    def remove(self) -> None:
        """Delete the journal, whose build is published."""
        self.close()
        self.path.unlink(missing_ok=True)

    def replay(self) -> Iterator[dict[str, Any]]:
        """The intact records, in order, read as they are asked for; none where there is no journal."""
        return (record for _, record in self._lines() if record is not None)

    def scan(self) -> Replay:
        """The intact records, and how many lines are not."""
        lines = list(self._lines())
        return Replay(
            records=[record for _, record in lines if record is not None],
            # A complete last record whose newline alone was lost is as good as any.
            torn=any(record is None and not ended for ended, record in lines),
            damaged=sum(record is None and ended for ended, record in lines),
        )

    def _lines(self) -> Iterator[tuple[bool, dict[str, Any] | None]]:
        """Of each line that is not empty: whether it ends in a newline, and its record if it is intact."""
        try:
            file = self.path.open("rb")
        except FileNotFoundError:
            return
        with file:
            for line in file:
                text = line.removesuffix(b"\n")
                if text:
                    yield text != line, _parse(text)

    def _open(self) -> int:
        files.make_directory(self.path.parent)
        new = not self.path.exists()
        fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            size = os.fstat(fd).st_size
            if size and os.pread(fd, 1, size - 1) != b"\n":
                _write(fd, b"\n")  # the torn line of a killed writer must not swallow the next record
            if new:
                files.sync_directory(self.path.parent)
        except BaseException:
            os.close(fd)
            raise
        return fd


def _line(record: Mapping[str, JSON]) -> bytes:
    body = canonical_json(dict(record))
    return b'{"crc32":"%08x","record":%s}\n' % (zlib.crc32(body), body)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)["record"]
        # Compared whole, so that a flipped bit anywhere in the line is noticed.
        return record if isinstance(record, dict) and _line(record) == line + b"\n" else None
    except (ValueError, KeyError, TypeError):
        return None


def _write(fd: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
