"""What becomes of an error in a task: a result of its input, or the end of the build."""

import errno
from pathlib import Path

import pytest

from megafold.cache_store import CorruptObject, Digest, NotACache, ReadOnlyCache, WriteFailed
from megafold.pipeline.builder import tasks
from megafold.pipeline.builder.config import Sources
from megafold.pipeline.builder.tasks import Outcome, Task, WorkerConfig, WorkerContext, run_task
from megafold.pipeline.errors import InputError

CONFIG = WorkerConfig(cache="nowhere", sources=Sources(corpus=Path("nowhere")), dictionary="d")


class Raising(Task):
    error: BaseException

    def run(self, worker: WorkerContext) -> Outcome:
        raise self.error


def run(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> Outcome:
    monkeypatch.setattr(tasks, "context", lambda config: None)
    task = Raising(recipe="r", label="1abc")
    object.__setattr__(task, "error", error)
    return run_task(CONFIG, task)


@pytest.mark.parametrize("error", [WriteFailed("full"), ReadOnlyCache("read-only"), NotACache("elsewhere")])
def test_where_the_cache_takes_nothing_no_input_is_to_blame(error, monkeypatch):
    with pytest.raises(type(error)):
        run(error, monkeypatch)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (InputError("1abc.cif: no atoms", reason="no-atoms"), "no-atoms"),
        (CorruptObject(Digest("0" * 64), "file", "cut short"), "damaged-cache"),
        (MemoryError(), "out-of-memory"),
        (OSError(errno.EIO, "Input/output error"), "unreadable"),
        (ValueError("shapes differ"), "defect:ValueError"),
    ],
)
def test_an_error_of_an_input_costs_its_task_alone(error, reason, monkeypatch):
    outcome = run(error, monkeypatch)
    assert outcome.result is None
    (problem,) = outcome.problems
    assert problem.reason == reason
    assert "1abc" in problem.message


def test_an_interruption_is_no_result(monkeypatch):
    with pytest.raises(KeyboardInterrupt):
        run(KeyboardInterrupt(), monkeypatch)
