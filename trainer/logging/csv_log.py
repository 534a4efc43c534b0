"""A CSV file with one row a step, which survives crashes and resumptions."""

import csv
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TextIO

Row = dict[str, str]


class CsvLog:
    """Appends rows whose first column is ``step``. Each row is on disk when :meth:`append` returns.

    Opening it for a resumed run removes the rows of steps that will run again, and a last line that a
    crash cut short.
    """

    def __init__(self, path: Path, last_step: int) -> None:
        """``last_step``: the step that the run resumes after; rows behind it go. 0 starts afresh."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [row for row in read_rows(path) if int(row["step"]) <= last_step] if path.exists() else []
        self._columns: list[str] = list(rows[0]) if rows else []
        self._file = self._rewrite(rows)

    def append(self, values: Mapping[str, float | int]) -> None:
        """Write a row; a column that was not there before is added to the whole file."""
        new = [name for name in values if name not in self._columns]
        if new:
            self._file.close()
            rows = list(read_rows(self.path))
            self._columns += new
            self._file = self._rewrite(rows)
        csv.DictWriter(self._file, self._columns, restval="").writerow(values)
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def _rewrite(self, rows: list[Row]) -> TextIO:
        """Put the header and rows in a new file in the old one's place; returns it, open at its end."""
        temporary = self.path.with_name(f".{self.path.name}.tmp")
        with temporary.open("w", newline="", encoding="utf-8") as file:
            if self._columns:
                writer = csv.DictWriter(file, self._columns, restval="")
                writer.writeheader()
                writer.writerows(rows)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)
        return self.path.open("a", newline="", encoding="utf-8")


def read_rows(path: Path) -> Iterator[Row]:
    """Rows of a log, without a last line that is not complete."""
    with path.open(newline="", encoding="utf-8") as file:
        whole = (line for line in file if line.endswith("\n"))
        for row in csv.DictReader(whole):
            if row["step"].isdigit():
                yield row
