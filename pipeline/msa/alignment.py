"""What every alignment parser returns: rows over the columns of the query."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.schema import GAP

_BLOCK_BYTES = 1 << 18
_ROW_BLOCK = 4096


@dataclass(frozen=True, kw_only=True)
class Insertions:
    """Inserted residues, sparse: ``count[k]`` residues of row ``row[k]`` left of column ``column[k]``.

    Sorted by row, then column; no pair occurs twice. All int32.
    """

    row: NDArray[np.int32]
    column: NDArray[np.int32]
    count: NDArray[np.int32]

    @classmethod
    def of(cls, row: NDArray[Any], column: NDArray[Any], count: NDArray[Any] | None = None) -> "Insertions":
        """Add up single insertions (``count`` omitted: one residue each), in any order."""
        if not len(row):
            none = np.empty(0, np.int32)
            return cls(row=none, column=none, count=none)
        key = row.astype(np.int64) << 32 | column.astype(np.int64)
        if (key[1:] < key[:-1]).any():
            order = np.argsort(key, kind="stable")
            key, count = key[order], None if count is None else count[order]
        first = np.flatnonzero(np.concatenate(([True], key[1:] != key[:-1])))
        if count is None:
            total = np.diff(np.append(first, len(key)))
        else:
            total = np.add.reduceat(count.astype(np.int64), first)
        key = key[first]
        return cls(
            row=(key >> 32).astype(np.int32),
            column=(key & 0xFFFFFFFF).astype(np.int32),
            count=total.astype(np.int32),
        )


def positions_of(text: NDArray[np.uint8], code: int) -> NDArray[np.int64]:
    """Where a byte occurs in a text: int64, ascending. A mask over all of it would be as large as it."""
    found = [
        np.flatnonzero(text[start : start + _BLOCK_BYTES] == code) + start
        for start in range(0, len(text), _BLOCK_BYTES)
    ]
    return np.concatenate([np.empty(0, np.int64), *found])


class TextSlices(Sequence[bytes]):
    """Stretches of one text, cut out when asked for: a deep alignment's headers are half its bytes.

    Keeps the whole text in memory. ``start`` and ``stop`` are int64 [N].
    """

    def __init__(self, text: bytes, start: NDArray[np.int64], stop: NDArray[np.int64]) -> None:
        self.text, self.start, self.stop = text, start, stop

    def __len__(self) -> int:
        return len(self.start)

    @overload
    def __getitem__(self, index: int) -> bytes: ...

    @overload
    def __getitem__(self, index: slice) -> "TextSlices": ...

    def __getitem__(self, index: int | slice) -> "bytes | TextSlices":
        if isinstance(index, slice):
            return TextSlices(self.text, self.start[index], self.stop[index])
        return self.text[self.start[index] : self.stop[index]]

    def __iter__(self) -> Iterator[bytes]:
        text = self.text
        for start, stop in self.spans():
            yield text[start:stop]

    def spans(self) -> Iterator[tuple[int, int]]:
        """Start and stop of each."""
        for first in range(0, len(self), _ROW_BLOCK):  # lists of all numbers would outweigh the arrays
            block = slice(first, first + _ROW_BLOCK)
            yield from zip(self.start[block].tolist(), self.stop[block].tolist(), strict=True)


@dataclass(frozen=True, kw_only=True)
class Alignment:
    """One alignment as its file states it; row 0 is the file's query.

    ``codes`` uint8 [N_row, N_column] are classes of ``restype``; every column is a residue of the query.
    ``query`` holds the query's own letters (upper case) and ``headers`` each row's name and description.
    ``segments`` are the column ranges of the chains where one alignment joins several (ColabFold).
    ``keys`` says of each row which rows of other chains it pairs with, '' for none, where a file has such
    a column; else it is empty.
    """

    query: str
    headers: Sequence[bytes]
    codes: NDArray[np.uint8]
    insertions: Insertions
    segments: tuple[tuple[int, int], ...] = ()
    keys: Sequence[bytes] = ()


def keep_columns(
    codes: NDArray[np.uint8], keep: NDArray[np.bool_], insertions: Insertions | None
) -> tuple[NDArray[np.uint8], Insertions]:
    """Drop columns; their residues become insertions left of the next column that is kept.

    Args:
        codes: uint8 [N_row, N_column].
        keep: bool [N_column].
        insertions: what was inserted left of the columns before, None for nothing.

    Returns:
        Codes over the kept columns, and the insertions left of them. What lies right of the last kept
        column is dropped: no column is there to hold it.
    """
    next_kept: NDArray[np.int64] = np.cumsum(keep) - keep
    n_kept = int(keep.sum())
    dropped = np.flatnonzero(~keep)
    row, index = _residues_in(codes, dropped)
    column: NDArray[np.int64] = next_kept[dropped[index]]
    count = np.ones(len(row), np.int32)
    if insertions is not None and len(insertions.row):
        row = np.concatenate([row, insertions.row])
        column = np.concatenate([column, next_kept[insertions.column]])
        count = np.concatenate([count, insertions.count])
    inside = column < n_kept
    kept = codes[:, keep]
    return kept, Insertions.of(row[inside], column[inside], count[inside])


def _residues_in(
    codes: NDArray[np.uint8], columns: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Row and index into ``columns`` of each residue in these columns; a block of rows at a time."""
    block = max(1, _BLOCK_BYTES // codes.shape[1])
    rows, indices = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for start in range(0, len(codes) if len(columns) else 0, block):
        row, index = np.nonzero(codes[start : start + block, columns] != GAP)
        rows.append(row + start)
        indices.append(index)
    return np.concatenate(rows), np.concatenate(indices)


def crop_columns(alignment: Alignment, start: int, stop: int) -> Alignment:
    """The columns ``start`` to ``stop`` of an alignment, with all its rows."""
    inserted = alignment.insertions
    inside = (inserted.column >= start) & (inserted.column < stop)
    return Alignment(
        query=alignment.query[start:stop],
        headers=alignment.headers,
        codes=alignment.codes[:, start:stop],
        insertions=Insertions(
            row=inserted.row[inside],
            column=inserted.column[inside] - np.int32(start),
            count=inserted.count[inside],
        ),
    )
