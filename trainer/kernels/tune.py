"""Finding tiles by measuring: every candidate of every kernel, on the GPU at hand.

A kernel is timed alone, as a step of a training run calls it. What does not compile, fit or launch is passed
over. Compiling takes much longer than measuring, so other processes compile a kernel's candidates first, into
Triton's cache.
"""

import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import astuple, dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Final

import torch
import triton

from megafold.trainer.kernels.evoattention.tiles import architecture
from megafold.trainer.kernels.tables import Entry, Table, fields, read_table, table, use_table
from megafold.trainer.kernels.tune_problems import BY_LENGTH, PROBLEMS, Problem, forget, gpu

DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: A tile that needs more than this of the fastest so far is not measured any longer.
_HOPELESS: Final = 1.5
#: A tile has to be so much faster than the stored one to take its place: less is chance.
_BETTER: Final = 0.98
#: What a candidate may fail with: it needs more than there is, or the compiler does not know it.
_FAILURES: Final = (RuntimeError, ValueError, AssertionError, triton.TritonError)

Report = Callable[[str], None]


@dataclass(frozen=True)
class Subject:
    """A problem by name: what other processes and the journal are told."""

    family: str
    dtype: str
    channels: int
    length: int

    def problem(self) -> Problem:
        """On this GPU."""
        return PROBLEMS[self.family][0](DTYPES[self.dtype], self.channels, self.length)


def subjects(families: Sequence[str], dtypes: Sequence[str], lengths: Sequence[int]) -> list[Subject]:
    """All problems; a family whose tiles do not depend on the length takes the longest alone."""
    return [
        Subject(family, dtype, channels, length)
        for family in families
        for dtype, channels in product(dtypes, PROBLEMS[family][1])
        for length in (sorted(lengths) if family in BY_LENGTH else [max(lengths)])
    ]


@contextmanager
def _tile_in_use(problem: Problem, tiles: Mapping[str, Any]) -> Iterator[None]:
    entry = Entry(
        bytes=problem.dtype.itemsize,
        channels=problem.channels,
        length=1,
        tiles={role: fields(tile) for role, tile in tiles.items()},
    )
    target = architecture(gpu())
    with use_table(Table(target=target, kernels={problem.family.name: [entry]})):
        forget()
        try:
            yield
        finally:
            forget()


@cache
def _problem(subject: Subject) -> Problem:
    return subject.problem()


def _compile(subject: Subject, role: str, tile: Any) -> None:
    """In another process: launch once, so that the compiled kernel lies in Triton's cache."""
    problem = _problem(subject)
    with _tile_in_use(problem, current(problem) | {role: tile}):
        try:
            problem.runs[role]()()
            torch.cuda.synchronize()
        except _FAILURES:
            return


def current(problem: Problem) -> dict[str, Any]:
    """The tiles in use, by role."""
    channels, length = problem.channels, problem.length
    found = problem.family.find(architecture(gpu()), problem.dtype.itemsize, channels, length)
    return {role: getattr(found, role) for role in problem.family.roles}


class Tuner:
    """Measures candidates.

    Args:
        seconds: how long to compile and how long to measure for each kernel.
        workers: processes that compile; 0: each candidate is compiled when it is measured.
        report: is given a line for each kernel.
    """

    def __init__(self, seconds: float, workers: int, report: Report) -> None:
        self._seconds = seconds
        self._workers = workers
        self._report = report
        self._pool = _processes(workers)

    def __enter__(self) -> "Tuner":
        return self

    def __exit__(self, *error: object) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=not any(error), cancel_futures=True)

    def tune(self, subject: Subject) -> Entry:
        """The fastest tiles of a problem's kernels."""
        problem = subject.problem()
        chosen = current(problem)
        for role, candidates in problem.candidates.items():
            ordered = nearest_first(chosen[role], candidates)
            ready = self._compiled(subject, role, ordered)
            before = timed(problem, chosen, role, chosen[role])
            best, tile, tried = before, chosen[role], 0
            for candidate in _within(self._seconds, ready):
                taken = timed(problem, chosen, role, candidate, give_up=_HOPELESS * best)
                tried += 1
                if taken < min(best, _BETTER * before):
                    best, tile = taken, candidate
            if tile != chosen[role]:
                # Measured again beside each other: the fastest of many is fast by chance too.
                before, best = (timed(problem, chosen, role, t) for t in (chosen[role], tile))
                if best > _BETTER * before:
                    best, tile = before, chosen[role]
            chosen[role] = tile
            self._report(
                f"{problem.family.name} {role}, {problem.channels} channels, {problem.length} long: "
                f"{before:.4f} ms, now {best:.4f} ms ({best / before:.3f}), {tried} of {len(candidates)} "
                f"tried: {tile}"
            )
        return Entry(
            bytes=problem.dtype.itemsize,
            channels=problem.channels,
            length=_bucket(problem.length) if subject.family in BY_LENGTH else 1,
            tiles={role: fields(tile) for role, tile in chosen.items()},
            tuned=measured_on(problem.length),
        )

    def _compiled(self, subject: Subject, role: str, candidates: Sequence[Any]) -> Sequence[Any]:
        """Those candidates that were compiled in time."""
        if self._pool is None:
            return candidates
        pending = [self._pool.submit(_compile, subject, role, tile) for tile in candidates]
        wait(pending, timeout=self._seconds)
        # What has begun ends before anything is measured.
        wait([future for future in pending if not future.cancel()])
        errors = [CancelledError() if future.cancelled() else future.exception() for future in pending]
        if any(isinstance(error, BrokenProcessPool) for error in errors):
            # A candidate took its process along: the compiler's crash is not the tuner's.
            self._report(f"{subject.family} {role}: a process that compiled ended; others go on")
            self._pool = _processes(self._workers)
        return [candidate for candidate, error in zip(candidates, errors, strict=True) if error is None]


def _processes(count: int) -> ProcessPoolExecutor | None:
    if count == 0:
        return None
    return ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn"))


def timed(
    problem: Problem, chosen: Mapping[str, Any], role: str, tile: Any, give_up: float = float("inf")
) -> float:
    """Median milliseconds of a role's kernel with ``tile``; infinite where it fails.

    A quick first look is all that is taken where it shows more than ``give_up``.
    """
    with _tile_in_use(problem, {**chosen, role: tile}):
        try:
            run = problem.runs[role]()
            run()
            once: float = triton.testing.do_bench(run, warmup=1, rep=3)
            if once > give_up:
                return once
            median: float = triton.testing.do_bench(run, warmup=5, rep=60, return_mode="median")
            return median
        except _FAILURES:
            return float("inf")


def _bucket(length: int) -> int:
    """Where the bucket of a measured length begins: halfway down to the half of it."""
    return max(17, length * 3 // 4)


def nearest_first(tile: Any, candidates: Sequence[Any]) -> list[Any]:
    """The candidates in the order of how many numbers differ from ``tile``'s; equals in a spread order."""
    step = next((s for s in (37, 41, 43, 47, 53) if len(candidates) % s), 1)
    spread = [candidates[i * step % len(candidates)] for i in range(len(candidates))]
    own = astuple(tile)
    return sorted(
        (each for each in spread if each != tile),
        key=lambda each: sum(a != b for a, b in zip(astuple(each), own, strict=True)),
    )


def _within(seconds: float, candidates: Sequence[Any]) -> Iterator[Any]:
    end = time.monotonic() + seconds
    for candidate in candidates:
        if time.monotonic() > end:
            return
        yield candidate


def with_entry(old: Table, family: str, entry: Entry) -> Table:
    """``old`` with ``entry`` in the place of the one for the same bytes, channels and length."""
    key = (entry.bytes, entry.channels, entry.length)
    kept = [e for e in old.kernels.get(family, []) if (e.bytes, e.channels, e.length) != key]
    entries = sorted([*kept, entry], key=lambda e: (e.bytes, e.channels, e.length))
    return replace(old, kernels={**old.kernels, family: entries})


def measured_on(length: int) -> dict[str, str]:
    """What an entry says of where and at what length it was measured."""
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "length": str(length),
    }


class Journal:
    """Which problems an interrupted run had finished: beside the table, and gone when all are."""

    def __init__(self, path: Path, settings: Mapping[str, Any]) -> None:
        self._path = path.with_name(f"{path.name}.journal")
        self._settings = json.loads(json.dumps(settings))
        self.done: list[Subject] = []
        if self._path.exists() and path.exists():
            try:
                stored = json.loads(self._path.read_text(encoding="utf-8"))
                if stored["settings"] == self._settings:
                    self.done = [Subject(*each) for each in stored["done"]]
            except (OSError, ValueError, KeyError, TypeError):
                self.done = []

    def add(self, subject: Subject) -> None:
        """Note a finished problem."""
        self.done.append(subject)
        text = json.dumps({"settings": self._settings, "done": [astuple(each) for each in self.done]})
        part = self._path.with_name(f"{self._path.name}.part")
        part.write_text(text, encoding="utf-8")
        part.replace(self._path)

    def remove(self) -> None:
        """All is done."""
        self._path.unlink(missing_ok=True)


def tune(todo: Sequence[Subject], path: Path, seconds: float, workers: int, report: Report) -> Table:
    """New tiles for ``todo`` in the table at ``path``, written after each; finished ones are not done again.

    Raises:
        ConfigError: no GPU; ``path`` holds no table, or one of another architecture.
    """
    target = architecture(gpu())
    result = read_table(path, target) if path.exists() else table(target)
    settings = {"seconds": seconds, "device": torch.cuda.get_device_name(), "triton": triton.__version__}
    journal = Journal(path, settings)
    left = [subject for subject in todo if subject not in journal.done]
    if len(left) < len(todo):
        report(f"{len(todo) - len(left)} of {len(todo)} were done before")
    start = time.monotonic()
    with Tuner(seconds, workers, report) as tuner:
        for done, subject in enumerate(left, 1):
            # What this run has chosen is what the next of its family is compared with.
            with use_table(result):
                entry = tuner.tune(subject)
            result = with_entry(result, subject.family, entry)
            result.write(path)
            journal.add(subject)
            torch.cuda.empty_cache()
            remaining = (time.monotonic() - start) / done * (len(left) - done)
            report(f"{done} of {len(left)} done, about {remaining / 60:.1f} min left")
    journal.remove()
    return result
