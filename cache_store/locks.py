"""Locks that the kernel releases when their process dies, however it dies."""

import contextlib
import datetime
import errno
import fcntl
import json
import os
import socket
import time
from pathlib import Path
from typing import Final

from megafold.cache_store import files
from megafold.cache_store.errors import LockHeld, WriteFailed

_POLL_S: Final = 0.02
#: What ``flock`` answers where another has the lock, and where the file system has none to give.
_HELD: Final = frozenset({errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES})
_NO_LOCKS: Final = frozenset({errno.ENOSYS, errno.ENOLCK, errno.ENOTSUP, errno.EOPNOTSUPP})


class KernelLock:
    """An exclusive lock between processes, by ``flock`` on a file. A context manager.

    The file stays when the lock is released and means nothing: a process that is killed leaves no lock.
    Taking a held lock again, in the same object, nests.
    """

    def __init__(self, path: Path, wait: float = 0.0) -> None:
        """``wait``: seconds to wait for whoever holds the lock; negative: for ever."""
        self.path = path
        self.wait = wait
        self._descriptor = -1
        self._depth = 0

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._depth > 0

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            LockHeld: another process, or another object of this one, still has it after ``wait`` seconds.
            ReadOnlyCache: the lock's directory cannot be written.
            WriteFailed: the file system has no locks.
        """
        if not self.held:
            self._descriptor = self._locked_file()
        self._depth += 1

    def release(self) -> None:
        """Give the lock back; no-op for a lock not held."""
        self._depth = max(0, self._depth - 1)
        if not self.held and self._descriptor >= 0:
            # Closing alone would leave it to children that were forked meanwhile.
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)
            os.close(self._descriptor)
            self._descriptor = -1

    def _locked_file(self) -> int:
        with files.explain_refusal(self.path):
            files.make_directory(self.path.parent)
            descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            until = time.monotonic() + self.wait
            while not self._taken(descriptor):
                if self.wait >= 0 and time.monotonic() >= until:
                    raise LockHeld(self._held_message())
                time.sleep(_POLL_S)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _taken(self, descriptor: int) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                return False
            if error.errno in _NO_LOCKS:
                raise WriteFailed(
                    f"cannot lock {self.path}: {error.strerror}. Name a folder on a file system with "
                    "locks, or mount this one with them (Lustre: flock)."
                ) from error
            raise
        return True

    def _held_message(self) -> str:
        waited = f" after {self.wait:g} s" if self.wait > 0 else ""
        return f"{self.path} is locked by another process{waited}"

    def __enter__(self) -> "KernelLock":
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class BuildLock(KernelLock):
    """The lock of whoever builds into a cache or clears it up. Says who holds it, and since when."""

    def acquire(self) -> None:
        """Take the lock and leave a note of who has it. Raises as :meth:`KernelLock.acquire`."""
        super().acquire()
        holder = {
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        }
        try:
            # A note that a killed process left is never read: the next holder replaces it.
            files.publish(self._note, json.dumps(holder).encode(), 0o644)
        except WriteFailed:
            # A full disk has no room for a note, and collecting garbage, which makes room, needs the lock.
            with contextlib.suppress(OSError):
                self._note.unlink()

    @property
    def _note(self) -> Path:
        return self.path.with_name(self.path.name + ".holder")

    def _held_message(self) -> str:
        try:
            holder = json.loads(self._note.read_bytes())
            who = f"process {holder['pid']} on {holder['host']}, since {holder['started']}"
        except (OSError, ValueError, KeyError, TypeError):  # it took the lock a moment ago
            who = "another process"
        waited = f" after waiting {self.wait:g} s" if self.wait > 0 else ""
        return (
            f"the cache is locked by {who}{waited} ({self.path}). Wait for it to end, or stop it: "
            "a process that has died holds no lock."
        )

    def __enter__(self) -> "BuildLock":
        self.acquire()
        return self
