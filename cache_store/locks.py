"""Locks that the kernel releases when their process dies, however it dies."""

import datetime
import json
import os
import socket
from pathlib import Path

from filelock import FileLock, Timeout

from megafold.cache_store import files
from megafold.cache_store.errors import LockHeld


class KernelLock:
    """An exclusive lock between processes, by ``flock`` on a file. A context manager.

    The file stays when the lock is released and means nothing: a process that is killed leaves no lock.
    Taking a held lock again, in the same object, nests.
    """

    def __init__(self, path: Path, wait: float = 0.0) -> None:
        """``wait``: seconds to wait for whoever holds the lock; negative: for ever."""
        self.path = path
        self.wait = wait
        self._lock: FileLock | None = None

    @property
    def held(self) -> bool:
        """Whether this object holds the lock."""
        return self._lock is not None and self._lock.is_locked

    def acquire(self) -> None:
        """Take the lock.

        Raises:
            LockHeld: another process, or another object of this one, still has it after ``wait`` seconds.
            ReadOnlyCache: the lock's directory cannot be written.
        """
        with files.explain_refusal(self.path):
            files.make_directory(self.path.parent)
            # Not thread-local: whoever holds the object may release it.
            self._lock = self._lock or FileLock(self.path, thread_local=False)
            try:
                self._lock.acquire(timeout=self.wait, poll_interval=0.02)
            except Timeout:
                raise LockHeld(self._held_message()) from None

    def release(self) -> None:
        """Give the lock back; no-op for a lock not held."""
        if self._lock is not None:
            self._lock.release()

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
        # Beside the lock file, which some versions of filelock empty when they try for the lock. A note
        # that a killed process left is never read: the next holder replaces it.
        files.publish(self._note, json.dumps(holder).encode(), 0o644)

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
