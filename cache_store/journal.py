"""Journals: what a build has finished, line by line, so that an interrupted one goes on.

A line is ``{"crc32":"…","record":{…}}``. A line that was torn when its writer died, or damaged later, does
not match its checksum and is left out, and counted.
"""

import json
import os
import zlib
from collections.abc import Mapping
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

    def __init__(self, path: Path, *, sync_every: int = 1) -> None:
        """``sync_every``: bring records to the disk when that many are new.

        With 1, a record is durable when :meth:`append` returns. With more, a power failure can take up
        to that many; a process that is killed loses none, as the kernel has them.
        """
        if sync_every < 1:
            raise ValueError(f"sync_every is {sync_every}: at least 1")
        self.path = path
        self._sync_every = sync_every
        self._unsynced = 0
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
            self._unsynced += 1
            if self._unsynced >= self._sync_every:
                self.sync()

    def sync(self) -> None:
        """Bring every record to the disk."""
        if self._fd >= 0 and self._unsynced:
            os.fsync(self._fd)
        self._unsynced = 0

    def close(self) -> None:
        """Bring every record to the disk and close the file. Appending opens it again."""
        self.sync()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def remove(self) -> None:
        """Delete the journal, whose build is published."""
        self.close()
        self.path.unlink(missing_ok=True)

    def replay(self) -> list[dict[str, Any]]:
        """The intact records, in order; none where there is no journal."""
        return self.scan().records

    def scan(self) -> Replay:
        """The intact records, and how many lines are not."""
        try:
            data = self.path.read_bytes()
        except FileNotFoundError:
            return Replay([], False, 0)
        *lines, rest = data.split(b"\n")
        records = [_parse(line) for line in lines if line]
        # A complete last record whose newline alone was lost is as good as any.
        last = _parse(rest) if rest else None
        intact = [record for record in (*records, last) if record is not None]
        return Replay(intact, bool(rest) and last is None, sum(record is None for record in records))

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
