"""Running tasks: on a Dask cluster, or in this process.

One task is one unit of blame. When a worker dies (RDKit can segfault, a giant assembly can exhaust memory,
a task can exceed its time), Dask accuses every task that the worker held. Each accused one is run again
alone, with nothing else in flight: whoever takes its worker down again did it, and is recorded; the
neighbours just finish.
"""

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import resource_tracker
from types import TracebackType
from typing import Any, Final, Protocol

import dask
import distributed
from distributed.scheduler import KilledWorker

from megafold.pipeline.builder.config import Resources
from megafold.pipeline.builder.tasks import Outcome, Problem, Task, WorkerConfig, run_task
from megafold.pipeline.errors import InputError

#: Exit status of a worker that ended itself because its task exceeded the time budget.
_TIMEOUT_STATUS: Final = 75
_TASKS_PER_SLOT: Final = 2
_ASK_FOR_WORKERS_EVERY_S: Final = 5.0
_FIRST_WORKER_WITHIN_S: Final = 120.0

#: Called with each finished task; returns the tasks that its outcome makes possible.
Settle = Callable[[Task, Outcome], Iterable[Task]]


class Runner(Protocol):
    """Runs tasks until none is left.

    What an outcome makes possible goes before what is waiting: a queue that had the further tasks of a whole
    corpus in it, with the files that they name, would not fit into memory.
    """

    def run(self, tasks: Iterable[Task], settle: Settle) -> None:
        """Run ``tasks`` and whatever ``settle`` returns; ``settle`` is called in this process."""

    def __enter__(self) -> "Runner": ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def _put_first(queue: deque[Task], tasks: Iterable[Task]) -> None:
    queue.extendleft(reversed(list(tasks)))


class LocalRunner:
    """Runs tasks one after the other in this process: for debugging. There is no time budget."""

    def __init__(self, config: WorkerConfig) -> None:
        self._config = config

    def run(self, tasks: Iterable[Task], settle: Settle) -> None:
        """See :class:`Runner`."""
        queue = deque(tasks)
        while queue:
            task = queue.popleft()
            _put_first(queue, settle(task, run_task(self._config, task)))

    def __enter__(self) -> "LocalRunner":
        return self

    def __exit__(self, *_: object) -> None:
        return None


def run_within(config: WorkerConfig, task: Task, timeout_s: float) -> Outcome:
    """Run a task on a worker; end the worker when it takes too long.

    Nothing gentler stops a computation that is stuck in C++. The nanny starts another worker.
    """
    timer = threading.Timer(timeout_s, os._exit, (_TIMEOUT_STATUS,))
    timer.daemon = True
    timer.start()
    try:
        return run_task(config, task)
    finally:
        timer.cancel()


@contextmanager
def _interrupts_deferred() -> Iterator[None]:
    """Hold Ctrl-C back from this thread for a while; threads and processes started within never get it.

    A terminal sends it to the whole process group. Workers leave when we close the cluster; until then they
    finish what they have.
    """
    resource_tracker.ensure_running()  # started later, it would unblock the signal in whatever thread it is
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


class DaskRunner:
    """Runs tasks on a local cluster of processes, or on a cluster that already runs."""

    def __init__(self, config: WorkerConfig, resources: Resources) -> None:
        self._config = config
        self._resources = resources
        self._cluster: distributed.LocalCluster | None = None
        self._client: distributed.Client | None = None
        self._slots_known = 1
        self._slots_known_until = 0.0

    def __enter__(self) -> "DaskRunner":
        return self

    def __exit__(self, *_: object) -> None:
        if self._client is not None:
            self._client.close()
        if self._cluster is not None:
            self._cluster.close()

    def _connect(self) -> distributed.Client:
        """The client; the cluster is started by the first task, so that a build without work starts none."""
        if self._client is not None:
            return self._client
        dask.config.set(
            {
                # A task that kills its worker is retried by us, alone, not by Dask among neighbours.
                "distributed.scheduler.allowed-failures": 0,
                "distributed.scheduler.work-stealing": False,
                # A worker that waits for a lock or sits in C++ is busy, not lost.
                "distributed.admin.tick.limit": "1h",
                "distributed.worker.daemon": True,
            }
        )
        if self._resources.scheduler:
            self._client = _client_of(self._resources.scheduler)
            try:
                self._client.wait_for_workers(1, timeout=_FIRST_WORKER_WITHIN_S)
            except OSError as error:
                raise InputError(
                    f"--scheduler {self._resources.scheduler}: no worker joined it ({error}); start some "
                    f"(`dask worker {self._resources.scheduler}`)",
                    reason="no-scheduler",
                ) from error
        else:
            with _interrupts_deferred():
                self._cluster = distributed.LocalCluster(
                    n_workers=self._resources.workers,
                    threads_per_worker=1,
                    processes=True,
                    memory_limit=self._resources.memory_limit,
                    dashboard_address=None,
                    # Else the scheduler asks for port 8787, and warns where another build has it.
                    scheduler_kwargs={"dashboard_address": ":0"},
                    silence_logs=50,
                )
                self._client = distributed.Client(self._cluster)
        return self._client

    def run(self, tasks: Iterable[Task], settle: Settle) -> None:
        """See :class:`Runner`."""
        queue = deque(tasks)
        if not queue:
            return
        self._connect()
        suspects: list[Task] = []
        running: dict[Any, Task] = {}
        finished = distributed.as_completed(raise_errors=False)
        while queue or running:
            # Few in flight: a task held back here cannot be accused of its neighbour's crash.
            room = max(0, _TASKS_PER_SLOT * self._slots() - len(running))
            started = self._start([queue.popleft() for _ in range(min(room, len(queue)))])
            running |= started
            finished.update(started)
            for future, outcome in self._outcomes(finished.next_batch()):
                task = running.pop(future)
                future.release()
                if outcome is None:
                    suspects.append(task)
                else:
                    _put_first(queue, settle(task, outcome))
            if not queue and not running and suspects:
                for suspect in suspects:
                    queue.extend(settle(suspect, self._run_alone(suspect)))
                suspects = []

    def _start(self, tasks: Sequence[Task]) -> dict[Any, Task]:
        """Tasks by future, sent off all at once: each message costs the scheduler as much as a task."""
        run = partial(run_within, self._config, timeout_s=self._resources.task_timeout_s)
        futures = self._connect().map(run, tasks, pure=False) if tasks else ()
        return dict(zip(futures, tasks, strict=True))

    def _slots(self) -> int:
        """Threads of all workers, asked for now and then: a cluster may grow and shrink."""
        if time.monotonic() >= self._slots_known_until:
            self._slots_known = max(1, sum(self._connect().nthreads().values()))
            self._slots_known_until = time.monotonic() + _ASK_FOR_WORKERS_EVERY_S
        return self._slots_known

    def _outcomes(self, futures: Sequence[Any]) -> list[tuple[Any, Outcome | None]]:
        """Outcomes of tasks that have ended; None where a task's worker died.

        Fetched all at once: a worker that computes takes its time to answer, and one after the other, all
        workers of a large cluster would wait for the slowest.

        Raises:
            InputError: the scheduler went away.
        """
        try:
            fetched = self._connect().gather({future.key: future for future in futures}, errors="skip")
            errors = {future.key: future.exception() for future in futures if future.key not in fetched}
            for future in futures:
                if future.key not in fetched and errors[future.key] is None:
                    # Its worker died, or the scheduler, after it had ended: this asks again, or says so.
                    with suppress(KilledWorker):
                        fetched[future.key] = future.result()
        except (distributed.CancelledError, OSError) as lost:
            raise InputError(
                f"the Dask scheduler went away ({lost}); nothing is lost, run the same command again",
                reason="no-scheduler",
            ) from lost
        for error in errors.values():
            if error is not None and not isinstance(error, KilledWorker):
                raise error
        return [(future, fetched.get(future.key)) for future in futures]

    def _run_alone(self, task: Task) -> Outcome:
        started = time.monotonic()
        (future,) = self._start([task])
        distributed.wait(future)
        ((_, outcome),) = self._outcomes([future])
        if outcome is not None:
            return outcome
        limit = self._resources.task_timeout_s
        if time.monotonic() - started >= limit:
            problem = Problem(
                "timeout", f"{task.label}: took longer than {limit:g} s; raise --task-timeout to allow more"
            )
        else:
            problem = Problem(
                "worker-died",
                f"{task.label}: its worker died twice, the second time with nothing else running: "
                "a crash in a library, or more memory than --memory-limit allows",
            )
        return Outcome(result=None, problems=(problem,))


def _client_of(scheduler: str) -> distributed.Client:
    try:
        return distributed.Client(scheduler, timeout=20)
    except (OSError, ValueError) as error:
        raise InputError(
            f"--scheduler {scheduler}: no Dask scheduler answers there ({error}); give the address that "
            "`dask scheduler` prints, such as tcp://10.0.0.1:8786",
            reason="no-scheduler",
        ) from error


def require_scheduler(resources: Resources) -> None:
    """Ask for the scheduler before anything is read: of a large corpus that takes an hour.

    Raises:
        InputError: no scheduler answers (``no-scheduler``).
    """
    if resources.scheduler:
        _client_of(resources.scheduler).close()


def make_runner(config: WorkerConfig, resources: Resources) -> Runner:
    """The runner that ``resources`` ask for: 0 workers and no scheduler means this process."""
    if resources.workers == 0 and resources.scheduler is None:
        return LocalRunner(config)
    return DaskRunner(config, resources)
