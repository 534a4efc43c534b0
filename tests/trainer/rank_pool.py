"""Four processes with gloo that run functions together, for as long as a test module needs them.

Importing torch takes longer than most checks, so the processes are forked from one that has imported it,
and are used again: a check names a function, all ranks call it, and the caller gets their results.
"""

import os
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from importlib import import_module
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
#: Seconds within which every call must be over.
TIMEOUT = 400


class RankPool:
    """``world`` ranks; a context manager."""

    def __init__(self, world: int = 4) -> None:
        self.world = world
        self._folder = tempfile.TemporaryDirectory()
        self._process: subprocess.Popen[bytes] | None = None
        self._ranks: list[Connection] = []

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *error: object) -> None:
        self._stop()
        self._folder.cleanup()

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Call a module's function with the same arguments on every rank; their results, by rank.

        An exception on a rank is raised here. The ranks are then started anew at the next call: the others
        may be waiting for it in a collective.
        """
        if self._process is None:
            self._start()
        for connection in self._ranks:
            connection.send((function.__module__, function.__qualname__, arguments))
        results: list[Any] = []
        failures: list[str] = []
        for rank, connection in enumerate(self._ranks):
            if failures and not connection.poll(1):
                continue
            if not connection.poll(TIMEOUT):
                failures.append(f"rank {rank} did not answer for {TIMEOUT} s")
                continue
            value, failure = connection.recv()
            results.append(value)
            if failure:
                failures.append(f"rank {rank}:\n{failure}")
        if failures:
            self._stop()
            raise AssertionError("\n".join(failures))
        return results

    def _start(self) -> None:
        address = f"{self._folder.name}/socket{len(os.listdir(self._folder.name))}"
        with Listener(address, "AF_UNIX") as listener:
            command = f"from tests.trainer.rank_pool import serve; serve({address!r}, {self.world})"
            environment = {**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0"}
            self._process = subprocess.Popen([sys.executable, "-c", command], cwd=ROOT, env=environment)
            accepted = [listener.accept() for _ in range(self.world)]
        by_rank = {connection.recv(): connection for connection in accepted}
        self._ranks = [by_rank[rank] for rank in range(self.world)]

    def _stop(self) -> None:
        for connection in self._ranks:
            connection.close()
        if self._process is not None:
            # Closed connections end the ranks that are idle, and the launcher ends those that are not.
            self._process.terminate()
            self._process.wait()
        self._process, self._ranks = None, []


def serve(address: str, world: int) -> None:
    """The launcher: import once, fork the ranks, wait for them."""
    import signal

    import torch  # noqa: F401

    import megafold.trainer.model.model  # noqa: F401

    store = f"{address}.store"
    children = []
    for rank in range(world):
        child = os.fork()
        if child == 0:
            _rank(address, store, rank, world)
        children.append(child)

    def end(*_: object) -> None:
        for child in children:
            os.kill(child, signal.SIGKILL)
        os._exit(0)

    signal.signal(signal.SIGTERM, end)
    for child in children:
        os.waitpid(child, 0)


def _rank(address: str, store: str, rank: int, world: int) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    connection = Client(address, "AF_UNIX")
    connection.send(rank)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, world),
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=TIMEOUT / 2),
    )
    while True:
        try:
            module, name, arguments = connection.recv()
        except EOFError:
            os._exit(0)
        try:
            connection.send((getattr(import_module(module), name)(*arguments), None))
        except BaseException:
            connection.send((None, traceback.format_exc()))
