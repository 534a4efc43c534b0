"""Samples that fail while a model is trained: replaced, counted, and too many of them end the run.

The sample in a failed one's place is a function of (seed, epoch, index, attempt): another draw from the same
weights, with random numbers of its own. So every rank and every resumed run puts the same one there. (Not so
after a time budget has run out: that depends on the machine. The batch's ``meta`` says what was replaced.)

Each failure is kept with its entry and reason in a file of the run's own, to which all processes of a rank
append: nothing is lost when a worker ends, or is killed.
"""

import json
import os
import shutil
import signal
import tempfile
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from megafold.cache_store.errors import (
    CorruptObject,
    MissingArray,
    MissingObject,
    RemoteError,
    SwappedObject,
)
from megafold.pipeline.errors import InputError
from megafold.pipeline.stream.check import SampleError
from megafold.pipeline.stream.config import FailureConfig

T = TypeVar("T")

_LISTED = 20


class SampleTimeout(SampleError):
    """A sample took longer than its time budget."""


class TooManyFailures(SampleError):
    """More than the allowed share of samples failed, or no attempt for one index succeeded."""


class Replaceable(Protocol):
    """What gives a sample, or another in its place."""

    def sample(self, index: int, *, epoch: int = 0, seed: int | None = None, attempt: int = 0) -> Any:
        """A sample."""

    def entry_name(self, index: int, *, epoch: int = 0, seed: int | None = None, attempt: int = 0) -> str:
        """The entry that the sample is of."""

    def prepare(self) -> None:
        """Read what all samples need."""

    def forget(self) -> None:
        """Drop what is kept between samples."""


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One sample that failed: of which entry, why (a short slug, and in words), and which it was."""

    entry: str
    reason: str
    message: str
    epoch: int
    index: int
    attempt: int


def reason_of(error: Exception) -> str:
    """The class under which a failure is counted."""
    if isinstance(error, InputError):
        return error.reason
    named = (
        (SampleTimeout, "time-budget"),
        (SwappedObject, "swapped-object"),
        (CorruptObject, "corrupt-object"),
        (MissingObject, "missing-object"),
        (MissingArray, "other-version"),
        (SampleError, "unfitting-objects"),
    )
    return next((reason for kind, reason in named if isinstance(error, kind)), type(error).__name__)


class FailureLog:
    """Samples tried, and those that failed, of all processes that share this log (by fork or by pickle).

    What it keeps lies in a temporary folder, which goes when the process that made the log ends.
    """

    def __init__(self, config: FailureConfig) -> None:
        self.config = config
        self._folder = Path(tempfile.mkdtemp(prefix="megafold-failures-"))
        # A forked worker that ends has its own copy of this object: the folder is not the worker's to remove.
        self._finalizer: Any = weakref.finalize(self, _remove, self._folder, os.getpid())

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_finalizer": None}

    @property
    def tried(self) -> int:
        """Samples tried, those in the place of failed ones included."""
        try:
            return (self._folder / "tried").stat().st_size
        except FileNotFoundError:
            return 0

    @property
    def failures(self) -> list[Failure]:
        """All failures, in the order in which they were noted."""
        try:
            text = (self._folder / "failed.jsonl").read_text(encoding="utf-8")
        except FileNotFoundError:
            return []
        return [Failure(**json.loads(line)) for line in text.splitlines()]

    @property
    def counts(self) -> dict[tuple[str, str], int]:
        """Failures by (entry, reason), most first."""
        counter = Counter((failure.entry, failure.reason) for failure in self.failures)
        return dict(counter.most_common())

    def report(self) -> str:
        """The failures in words; ``""`` if there are none."""
        failures = self.failures
        if not failures:
            return ""
        message = {(failure.entry, failure.reason): failure.message for failure in failures}
        lines = [f"{len(failures)} of {self.tried} samples failed and were replaced:"]
        for place, (key, count) in enumerate(self.counts.items()):
            if place == _LISTED:
                lines.append(f"  and {len(message) - _LISTED} more entries or reasons")
                break
            lines.append(f"  {key[0]}: {key[1]}, {count} times: {message[key]}")
        return "\n".join(lines)

    def sample(self, source: Replaceable, index: int, epoch: int) -> tuple[Any, tuple[Failure, ...]]:
        """A sample, or the first that succeeds in its place; and what failed before it.

        Raises:
            TooManyFailures: the settings allow no more; the message lists what failed.
            megafold.cache_store.RemoteError: the cache's server cannot be reached.
        """
        source.prepare()  # what is wrong with this is wrong with every sample
        failed: list[Failure] = []
        for attempt in range(self.config.attempts):
            self._append("tried", b".")
            try:
                made = within_budget(
                    lambda: source.sample(index, epoch=epoch, attempt=attempt), self.config.time_budget_s
                )
            except RemoteError:
                # No fault of the sample's. With another in its place, the run would depend on the network;
                # ended here and resumed when the server is back, it does not.
                raise
            except Exception as error:
                # What was open or half read when it failed is not trusted.
                source.forget()
                failed.append(
                    Failure(
                        entry=source.entry_name(index, epoch=epoch, attempt=attempt),
                        reason=reason_of(error),
                        message=f"{error}"[:2000],
                        epoch=epoch,
                        index=index,
                        attempt=attempt,
                    )
                )
                self._append("failed.jsonl", json.dumps(asdict(failed[-1])).encode() + b"\n")
                self._check_share(error)
                last = error
            else:
                return made, tuple(failed)
        raise TooManyFailures(
            f"sample {index} of epoch {epoch}: {len(failed)} attempts in a row failed. {self.report()}"
        ) from last

    def _check_share(self, error: Exception) -> None:
        failed, tried = len(self.failures), self.tried
        if failed >= self.config.min_failures and failed > self.config.max_share * tried:
            raise TooManyFailures(
                f"more than {self.config.max_share:.2%} of the samples fail. {self.report()}\n"
                "Repair the cache (`megafold cache verify`), leave these entries out, or allow more with "
                "failures.max_share"
            ) from error

    def _append(self, name: str, data: bytes) -> None:
        # One write at the end of the file: those of several processes do not mix.
        descriptor = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            os.write(descriptor, data)
        finally:
            os.close(descriptor)


def _remove(folder: Path, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(folder, ignore_errors=True)


class _Expired(BaseException):
    """The alarm. Not an Exception, so that nothing on its way takes it for an error of its own."""


def within_budget(work: Callable[[], T], seconds: float | None) -> T:
    """What ``work`` returns, if it does so in time.

    In the main thread, as in a loader's worker, it is interrupted when time is up. In other threads, where
    there is no such signal, or where something else uses it, it ends first and is refused then.

    Raises:
        SampleTimeout: it took longer.
    """
    if seconds is None:
        return work()
    started = time.monotonic()
    try:
        result = _interruptible(work, seconds) if _has_alarm() else work()
    except _Expired:
        raise SampleTimeout(f"it took more than the time budget of {seconds:g} s") from None
    taken = time.monotonic() - started
    if taken > seconds:
        raise SampleTimeout(f"it took {taken:.3g} s, its time budget is {seconds:g} s")
    return result


def _has_alarm() -> bool:
    return (
        hasattr(signal, "setitimer")
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGALRM) == signal.SIG_DFL
    )


def _interruptible(work: Callable[[], T], seconds: float) -> T:
    def expire(*_: object) -> None:
        raise _Expired

    try:
        try:
            signal.signal(signal.SIGALRM, expire)
            signal.setitimer(signal.ITIMER_REAL, seconds)
            return work()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    finally:  # of its own: the alarm may have gone off on the way out
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
