"""Ranks watch each other, so that a job whose rank is gone ends soon and says which.

A collective waits for a rank that has died or hangs, for minutes or for ever, and says nothing of whom it
waits for. So every rank has a thread that counts in the job's store, and looks at the count of one other.
"""

import os
import socket
import sys
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Final

import torch.distributed as dist

from megafold.trainer.errors import TrainerError

#: Seconds between counts.
BEAT_S: Final = 2.0
#: Exit status of a rank that ends because of another.
EXIT_STATUS: Final = 3


class PeerError(TrainerError):
    """A rank has died, hangs, or has failed."""


class PeerWatch:
    """A context within which this rank counts and watches; alone it does nothing.

    Rank r watches rank r + 1. It tells all others through the store of a process of this machine that is
    dead, or of a count that has stood still for ``timeout_s``, and each ends its process, whatever its main
    thread is waiting for. So does a rank that leaves the context with an exception, which the others would
    otherwise wait for.
    """

    def __init__(self, rank: int, world: int, timeout_s: float) -> None:
        self._rank, self._world, self._timeout = rank, world, timeout_s
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._store: Any = None

    def __enter__(self) -> "PeerWatch":
        if self._world > 1:
            self._store = _connect()
            self._set(f"who/{self._rank}", f"{socket.gethostname()}, process {os.getpid()}")
            self._set(f"process/{self._rank}", f"{_process_space()} {os.getpid()}")
            self._set(f"beat/{self._rank}", "0")
            self._thread = threading.Thread(target=self._run, name="peer watch", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._thread is None:
            return
        self._stop.set()
        self._thread.join()
        try:
            if error is not None and not isinstance(error, PeerError):
                self._set("failed", f"{self._name(self._rank)} failed: {type(error).__name__}: {error}")
            self._set(f"beat/{self._rank}", "done")
        except dist.DistError:
            pass  # the store went with the rank that kept it

    def missing(self) -> list[str]:
        """The ranks that are gone, which an error of a collective may come from.

        On this machine a dead process shows at once; else by a count that stands still for a while.
        """
        if self._thread is None:
            return []
        others = [rank for rank in range(self._world) if rank != self._rank]
        try:
            dead = [rank for rank in others if self._is_dead(rank)]
            if not dead:
                before = {rank: self._get(f"beat/{rank}") for rank in others}
                time.sleep(3 * BEAT_S)
                dead = [rank for rank in others if before[rank] == self._get(f"beat/{rank}") != "done"]
            return [self._name(rank) for rank in dead]
        except dist.DistError:
            return ["rank 0 or the process that kept the job's store"]

    def _run(self) -> None:
        watched = (self._rank + 1) % self._world
        count, seen, since = 0, "", time.monotonic()
        while not self._stop.wait(BEAT_S):
            count += 1
            try:
                self._set(f"beat/{self._rank}", str(count))
                beat = self._get(f"beat/{watched}")
                if beat != seen or beat == "done":
                    seen, since = beat, time.monotonic()
                elif self._is_dead(watched):
                    self._set("failed", f"{self._name(watched)} died")
                elif time.monotonic() - since > self._timeout:
                    still = f"has not answered for {self._timeout:.0f} s"
                    self._set("failed", f"{self._name(watched)} {still}")
                failure = self._get("failed")
            except dist.DistError as error:
                failure = f"the job's store is gone, and so the rank that kept it: {error}"
            if failure:
                self._end(failure)

    def _end(self, failure: str) -> None:
        # A rank that fails with the others has a message of its own, and a moment to tell it.
        if self._stop.wait(2 * BEAT_S):
            return
        text = f"Error: {failure}. Rank {self._rank} ends, too: start again with --resume"
        print(text, file=sys.stderr, flush=True)
        os._exit(EXIT_STATUS)

    def _is_dead(self, rank: int) -> bool:
        space, _, process = self._get(f"process/{rank}").rpartition(" ")
        return space == _process_space() and _is_dead(int(process))

    def _name(self, rank: int) -> str:
        return f"rank {rank} ({self._get(f'who/{rank}')})"

    def _set(self, key: str, value: str) -> None:
        self._store.set(key, value)

    def _get(self, key: str) -> str:
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""


def _process_space() -> str:
    """What processes with different numbers share: a machine, or a container on it."""
    link = Path("/proc/self/ns/pid")
    return f"{socket.gethostname()} {os.readlink(link) if link.exists() else 'unknown'}"


def _is_dead(process: int) -> bool:
    """Whether a process of this space has ended; its parent may not have noticed yet."""
    stat = Path(f"/proc/{process}/stat")
    if not Path("/proc/self/stat").exists():
        return False  # no such file system: its count will tell
    try:
        return stat.read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def _connect() -> Any:
    """A connection of its own to the store that the process group met at: threads must not share one."""
    store = dist.TCPStore(
        os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False, wait_for_workers=False
    )
    # torchrun keeps its store when it starts the ranks anew.
    return dist.PrefixStore(f"megafold/watch/{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
