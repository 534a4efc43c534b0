"""Progress of a build: done, rate, time left, failures so far."""

import sys
import time
from types import TracebackType
from typing import Final

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

_LINE_EVERY_S: Final = 10.0


class BuildProgress:
    """A live bar on a terminal; a line every ten seconds anywhere else."""

    def __init__(self, *, quiet: bool = False) -> None:
        # What is said names files and entries, which may look like Rich's own marks: [a], :b:.
        self._console = Console(stderr=True, markup=False, emoji=False, highlight=False)
        self._quiet = quiet
        self._live = self._console.is_terminal and not quiet
        self._started = time.monotonic()
        self._printed = self._started
        self.done = 0
        self.total = 0
        self.failures = 0
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description:<11}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[note]}"),
            TimeElapsedColumn(),
            console=self._console,
        )
        self._task: TaskID | None = None

    def __enter__(self) -> "BuildProgress":
        if self._live:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live:
            self._bar.stop()

    def say(self, text: str) -> None:
        """A line above the bar."""
        if not self._quiet:
            self._console.print(text, soft_wrap=True)

    def update(self, *, done: int, total: int, failures: int) -> None:
        """Show where the build stands. ``total`` grows while structures reveal further work."""
        self.done, self.total, self.failures = done, total, failures
        if self._live:
            if self._task is None:
                self._task = self._bar.add_task("featurizing", total=total, note="")
            self._bar.update(self._task, completed=done, total=total, note=self._note())
        elif not self._quiet and time.monotonic() - self._printed >= _LINE_EVERY_S:
            self._printed = time.monotonic()
            print(f"{done}/{total} tasks, {self._note()}", file=sys.stderr, flush=True)

    def _note(self) -> str:
        elapsed = time.monotonic() - self._started
        rate = self.done / elapsed if elapsed > 0 else 0.0
        left = (self.total - self.done) / rate if rate else float("inf")
        eta = f"{left:.0f} s left" if left < 120 else f"{left / 60:.0f} min left" if left < 1e6 else "…"
        return f"{rate:.1f}/s, {eta}, {self.failures} failed"
