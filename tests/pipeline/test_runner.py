"""The order of tasks, and how outcomes are fetched from a cluster."""

from dataclasses import dataclass, field
from typing import Any

import pytest
from distributed import CancelledError
from distributed.scheduler import KilledWorker

from megafold.pipeline.builder import runner as runner_module
from megafold.pipeline.builder.config import Resources, Sources
from megafold.pipeline.builder.runner import DaskRunner, LocalRunner
from megafold.pipeline.builder.tasks import Outcome, StructureTask, WorkerConfig
from megafold.pipeline.errors import InputError
from megafold.pipeline.structure import StructureOptions


@pytest.fixture
def config(tmp_path) -> WorkerConfig:
    return WorkerConfig(cache=str(tmp_path), sources=Sources(corpus=tmp_path), dictionary="")


def task(name: str, tmp_path) -> StructureTask:
    return StructureTask(
        recipe=name, label=name, entry=name, path=tmp_path / name, options=StructureOptions()
    )


def test_what_an_outcome_makes_possible_goes_before_what_waits(config, tmp_path, monkeypatch):
    """Else the further tasks of all entries would wait in memory until the last structure is done."""
    ran = []

    def run_task(_, task):
        ran.append(task.label)
        return Outcome(result={})

    monkeypatch.setattr(runner_module, "run_task", run_task)
    further = {"a": ["a1", "a2"], "b": ["b1"], "a2": ["a2x"]}
    with LocalRunner(config) as runner:
        runner.run(
            [task("a", tmp_path), task("b", tmp_path), task("c", tmp_path)],
            lambda done, _: [task(name, tmp_path) for name in further.get(done.label, ())],
        )
    assert ran == ["a", "a1", "a2", "a2x", "b", "b1", "c"]


@dataclass(eq=False)
class EndedFuture:
    """A task that has ended, on a worker that takes its time to answer."""

    key: str
    error: Exception | None = None
    lost: Exception | None = None
    asked: int = 0

    def exception(self) -> Exception | None:
        self.asked += 1
        return self.error

    def result(self) -> Outcome:
        assert self.lost is not None, "results are fetched together"
        raise self.lost


@dataclass
class Cluster:
    """What the runner sees of a cluster whose tasks have ended."""

    gathered: list[list[str]] = field(default_factory=list)

    def gather(self, futures, errors):
        assert errors == "skip"
        self.gathered.append(sorted(futures))
        return {
            key: Outcome(result={"of": key})
            for key, future in futures.items()
            if future.error is future.lost is None
        }


def outcomes(config, futures, cluster: Any):
    runner = DaskRunner(config, Resources(workers=2))
    runner._client = cluster
    return runner._outcomes(futures)


def test_outcomes_of_tasks_that_have_ended_are_fetched_at_once(config):
    worker: Any = "tcp://worker"
    killed = KilledWorker("b", worker, 0)
    futures, cluster = [EndedFuture("a"), EndedFuture("b", killed), EndedFuture("c")], Cluster()
    found = outcomes(config, futures, cluster)
    assert [(future.key, outcome and outcome.result) for future, outcome in found] == [
        ("a", {"of": "a"}),
        ("b", None),
        ("c", {"of": "c"}),
    ]
    assert cluster.gathered == [["a", "b", "c"]]
    assert [future.asked for future in futures] == [0, 1, 0]


def test_error_of_a_task_that_is_no_outcome_ends_the_build(config):
    with pytest.raises(ZeroDivisionError):
        outcomes(config, [EndedFuture("a"), EndedFuture("b", ZeroDivisionError("b"))], Cluster())


def test_lost_scheduler_is_told(config):
    class Gone(Cluster):
        def gather(self, futures, errors):
            raise OSError("connection refused")

    with pytest.raises(InputError, match=r"scheduler went away \(connection refused\)"):
        outcomes(config, [EndedFuture("a")], Gone())


def test_cancelled_task_is_no_dead_worker(config):
    """A failure of the entry's in the ledger would be wrong: the scheduler has gone."""
    lost = EndedFuture("b", lost=CancelledError("b"))
    with pytest.raises(InputError, match="scheduler went away"):
        outcomes(config, [EndedFuture("a"), lost], Cluster())


def test_task_whose_result_went_with_its_worker_is_run_again(config):
    worker: Any = "tcp://worker"
    lost = EndedFuture("b", lost=KilledWorker("b", worker, 0))
    found = outcomes(config, [EndedFuture("a"), lost], Cluster())
    assert [outcome and outcome.result for _, outcome in found] == [{"of": "a"}, None]


@dataclass(eq=False)
class Future:
    """A task on a worker."""

    task: StructureTask

    def release(self) -> None:
        pass


class Completed:
    """Futures end one at a time, in the order they were sent off."""

    def __init__(self, *, raise_errors: bool) -> None:
        self.running: list[Future] = []

    def update(self, futures) -> None:
        self.running += futures

    def next_batch(self) -> list[Future]:
        return [self.running.pop(0)]


class ScriptedRunner(DaskRunner):
    """On a cluster with room for two tasks; ``deaths`` says how often a task's worker dies."""

    def __init__(self, config: WorkerConfig, deaths: dict[str, int]) -> None:
        super().__init__(config, Resources(workers=1))
        self.deaths = deaths
        self.in_flight = 0
        #: Labels as they were sent off, each with how many were under way then.
        self.sent: list[tuple[str, int]] = []

    def _connect(self) -> Any:
        return None

    def _slots(self) -> int:
        return 1

    def _start(self, tasks) -> dict[Any, Any]:
        for started in tasks:
            self.in_flight += 1
            self.sent.append((started.label, self.in_flight))
        return {Future(started): started for started in tasks}

    def _outcomes(self, futures) -> list[tuple[Any, Outcome | None]]:
        self.in_flight -= len(futures)
        found: list[tuple[Any, Outcome | None]] = []
        for future in futures:
            label = future.task.label
            self.deaths[label] = self.deaths.get(label, 0) - 1
            found.append((future, Outcome(result={}) if self.deaths[label] < 0 else None))
        return found


def test_who_is_accused_of_a_dead_worker_runs_again_alone_when_all_others_are_done(
    config, tmp_path, monkeypatch
):
    """``a`` ends its worker each time, ``b`` is accused with it once; ``c`` makes another task possible."""
    monkeypatch.setattr(runner_module.distributed, "as_completed", Completed)
    monkeypatch.setattr(runner_module.distributed, "wait", lambda future: None)
    settled: dict[str, list[str]] = {}

    def settle(done, outcome):
        settled[done.label] = [problem.reason for problem in outcome.problems]
        return [task("c1", tmp_path)] if done.label == "c" else []

    runner = ScriptedRunner(config, {"a": 2, "b": 1})
    runner.run([task(name, tmp_path) for name in "abcde"], settle)
    assert [label for label, _ in runner.sent] == ["a", "b", "c", "d", "c1", "e", "a", "b"]
    assert [number for _, number in runner.sent][-2:] == [1, 1]
    assert list(settled) == ["c", "d", "c1", "e", "a", "b"]
    assert settled == {"a": ["worker-died"], **{label: [] for label in ("b", "c", "d", "c1", "e")}}
