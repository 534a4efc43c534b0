"""Local copies of files named by digests: bounded, shared by processes, and only ever a convenience.

Whatever goes wrong with the disk that holds them (full, read-only, damaged), the caller gets its bytes from
memory, and a warning with a count.
"""

import contextlib
import json
import os
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from megafold.cache_store import files
from megafold.cache_store.errors import LockHeld, NotACache, RemoteCacheWarning, RemoteError, WriteFailed
from megafold.cache_store.locks import KernelLock

FOLDER_VARIABLE: Final = "MEGAFOLD_REMOTE_CACHE"
LIMIT_VARIABLE: Final = "MEGAFOLD_REMOTE_CACHE_BYTES"
DEFAULT_LIMIT: Final = 50 * 10**9

_MARKER = "megafold-read-through.json"
_LOCK_WAIT_S = 120.0
_STALE_S = 3600.0
_SPARE = 0.1


class ReadThrough:
    """A folder of copies. Those used longest ago go when all together pass ``limit_bytes``.

    Processes may share the folder. Each looks after it when what it has added since it last looked
    passes a 64th of the limit, so that many of them may be over the limit by that much each.

    Raises:
        NotACache: the folder holds other things, which making room would delete.
    """

    def __init__(self, path: Path | str, limit_bytes: int = DEFAULT_LIMIT) -> None:
        if limit_bytes < 1:
            raise RemoteError(f"local copies of remote caches: {limit_bytes} bytes is no limit, at least 1")
        self.path = Path(path).absolute()
        self.limit_bytes = limit_bytes
        #: Copies that could not be kept, in this process: their bytes were handed out from memory.
        self.not_kept = 0
        self._added = limit_bytes  # look after the folder at the first addition
        items = self.path.iterdir() if self.path.is_dir() else ()
        others = [item.name for item in items if not item.name.startswith(".")]  # no file being written
        if others and _MARKER not in others:
            raise NotACache(
                f"{self.path} holds other things ({min(others)}): name a new or empty folder for the copies "
                f"of remote caches ({FOLDER_VARIABLE})"
            )

    def __repr__(self) -> str:
        return f"ReadThrough({str(self.path)!r}, {self.limit_bytes})"

    @classmethod
    def from_environment(cls) -> "ReadThrough":
        """As the variables ``MEGAFOLD_REMOTE_CACHE`` and ``MEGAFOLD_REMOTE_CACHE_BYTES`` say.

        Defaults: ``megafold/remote`` in ``$XDG_CACHE_HOME`` (or ``~/.cache``), and 50 GB.

        Raises:
            RemoteError: the limit is no number.
        """
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = os.environ.get(FOLDER_VARIABLE) or home / "megafold" / "remote"
        text = os.environ.get(LIMIT_VARIABLE) or str(DEFAULT_LIMIT)
        try:
            return cls(folder, int(float(text)))
        except (ValueError, OverflowError) as error:
            raise RemoteError(f"{LIMIT_VARIABLE} is {text!r}: give a number of bytes") from error

    def find(self, name: str) -> Path | None:
        """The copy called ``name``, marked as used now; None where there is none."""
        path = self.path / name
        try:
            os.utime(path)
        except FileNotFoundError:
            return None
        except OSError:  # a read-only folder still serves
            return path if path.is_file() else None
        return path

    def keep(self, name: str, data: bytes) -> Path | None:
        """Publish a copy: whole or not at all. None, with a warning, where the disk does not take it.

        ``data`` is what the name says: the caller has checked it.
        """
        path = self.path / name
        if len(data) > self.limit_bytes:
            self._warn(name, f"its {len(data)} bytes are over the limit of {self.limit_bytes} for all copies")
            return None
        try:
            self._mark()
            files.publish(path, data)
        except (OSError, WriteFailed) as error:
            self._warn(name, str(error))
            return None
        self._added += len(data)
        if self._added > self.limit_bytes // 64:
            self._make_room()
        return path

    def drop(self, name: str) -> None:
        """Remove a copy, for one that is damaged."""
        with contextlib.suppress(OSError):
            (self.path / name).unlink()

    @contextlib.contextmanager
    def fetching(self, name: str) -> Iterator[None]:
        """Hold the lock under which one process fetches what the others wait for.

        A lock saves double work and nothing else, so where it cannot be had this goes on without.
        """
        stripe = Path(name).name[:3]
        lock = KernelLock(self.path / "locks" / stripe, wait=_LOCK_WAIT_S)
        with contextlib.suppress(OSError, WriteFailed, LockHeld):
            self._mark()
            lock.acquire()
        try:
            yield
        finally:
            lock.release()

    def _mark(self) -> None:
        if not (self.path / _MARKER).exists():
            files.publish(self.path / _MARKER, (json.dumps({"format": 1}) + "\n").encode(), 0o644)

    def _make_room(self) -> None:
        with contextlib.suppress(LockHeld, WriteFailed, OSError), KernelLock(self.path / "locks" / "room"):
            self._added = 0
            copies = sorted(self._copies())
            total = sum(size for _, size, _ in copies)
            if total <= self.limit_bytes:
                return
            for _, size, path in copies:
                if total <= (1 - _SPARE) * self.limit_bytes:
                    break
                with contextlib.suppress(FileNotFoundError):
                    path.unlink()  # whoever has it open keeps it until closed
                total -= size

    def _copies(self) -> Iterator[tuple[int, int, Path]]:
        """(time of last use in ns, bytes, path) of each copy; what killed processes left is removed."""
        for folder, _, names in os.walk(self.path):
            for name in names:
                path = Path(folder, name)
                if name == _MARKER or path.parent == self.path / "locks":
                    continue
                try:
                    stat = path.stat()
                    if files.is_temporary(path):
                        if time.time() - stat.st_mtime > _STALE_S:
                            path.unlink()
                        continue
                except FileNotFoundError:
                    continue
                yield stat.st_mtime_ns, stat.st_size, path

    def _warn(self, name: str, reason: str) -> None:
        self.not_kept += 1
        if self.not_kept & (self.not_kept - 1) == 0:  # 1, 2, 4, 8, …: told, and not a flood
            warnings.warn(
                f"{self.path} takes no local copy of {name}: {reason}. It is read from memory, and fetched "
                f"again the next time ({self.not_kept} so far in this process). Free space there, lower "
                f"{LIMIT_VARIABLE}, or name another folder with {FOLDER_VARIABLE}.",
                RemoteCacheWarning,
                stacklevel=2,
            )
