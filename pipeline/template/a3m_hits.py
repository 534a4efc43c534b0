"""Template hits as A3M: rows over the columns of the query, insertions in lower case, chains in the headers.

hhsearch, ColabFold and ``reformat.pl`` write such lists with the query first or without it. The residue of
each column is told, in this order, by the query's own row where it comes first, by the number of columns
where that is the query's length, and by the chain's own hit. Where rows have as many characters but not as
many columns, the list is aligned FASTA, and each character is a column. A list whose rows hold no gap at
all is one of sequences: each of them is aligned here.
"""

import re
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.errors import TemplateError
from megafold.pipeline.template.hit import (
    Hit,
    HitList,
    HitRow,
    NumberedHit,
    Skipped,
    chain_of,
    query_mismatch,
    same_letters,
)
from megafold.pipeline.template.realign import align_pair

_BLANKS: Final = b" \t\n\v\f\r.\0"
_ROW: Final = re.compile(rb"[A-Za-z*_-]*")
_ANNOTATION: Final = re.compile(r"ss_pred|ss_conf|ss_dssp|sa_dssp|aa_pred|aa_dssp|\S*_?[Cc]onsensus")


@dataclass(frozen=True, kw_only=True)
class _A3mRow:
    """A row: its label and letters without gaps, and the column of each letter, -1 for an insertion.

    ``place`` is where each letter stands among the row's ``n_place`` characters, gaps included.
    """

    row: HitRow
    column: NDArray[np.int64]
    n_column: int
    place: NDArray[np.int64]
    n_place: int


def read_a3m_hits(data: bytes, sequence: str, name: str) -> HitList:
    """Read a hit list.

    Raises:
        TemplateError: a row of another length (``row-length``), a character that no row holds
            (``bad-character``), or columns that are not the query's residues (``query-mismatch``).
    """
    rows = [_row(label, body, name) for label, body in _records(data)]
    if not rows:
        return HitList(items=())
    is_query = _is_query(rows[0], sequence)
    hits = rows[1:] if is_query and isinstance(chain_of(rows[0].row.name), Skipped) else rows
    is_aligned = len({row.n_column for row in rows}) == 1 and (is_query or rows[0].n_column == len(sequence))
    if not is_aligned and all(len(row.place) == row.n_place for row in rows):
        warning = f"{name}: its rows hold sequences and no alignment, aligned to the query here"
        return HitList(items=tuple(_realigned(row.row, sequence) for row in hits), warnings=(warning,))
    if len({row.n_column for row in rows}) > 1 and len({row.n_place for row in rows}) == 1:
        hits, rows = (
            [replace(row, column=row.place, n_column=row.n_place) for row in of] for of in (hits, rows)
        )
    _check_widths(rows, name)
    residue, warnings = _residues_of_columns(rows, is_query, sequence, name)
    return HitList(items=tuple(_hit(row, residue) for row in hits), warnings=warnings)


def a3m_names(data: bytes) -> list[bytes]:
    """The rows' names as the file has them, ranges included."""
    return [label.encode() for label, _ in _records(data)]


def _records(data: bytes) -> list[tuple[str, bytes]]:
    """Name and characters of each row; annotation rows before the first sequence are none."""
    records: list[tuple[str, bytes]] = []
    for part in re.split(rb"^>", data, flags=re.M)[1:]:
        head, _, body = part.partition(b"\n")
        words = head.split(None, 1)
        label = words[0].decode("utf-8", "replace") if words else ""
        if records or not _ANNOTATION.match(label):
            records.append((label, body.translate(None, _BLANKS)))
    return records


def _row(label: str, body: bytes, name: str) -> _A3mRow:
    if not _ROW.fullmatch(body):
        odd = body.translate(None, b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz*_-")
        raise TemplateError(
            f"{name}: row {label} holds {chr(odd[0])!r}, which is no residue; make the file again",
            reason="bad-character",
        )
    text = np.frombuffer(body, np.uint8)
    is_gap = (text == ord("-")) | (text == ord("_"))
    is_insertion = (text >= ord("a")) & (text <= ord("z"))
    column = np.where(is_insertion, -1, np.cumsum(~is_insertion) - 1)
    return _A3mRow(
        row=HitRow.of(label, text[~is_gap]),
        column=column[~is_gap],
        n_column=int((~is_insertion).sum()),
        place=np.flatnonzero(~is_gap),
        n_place=len(text),
    )


def _is_query(row: _A3mRow, sequence: str) -> bool:
    letters = row.row.sequence
    return len(letters) == len(sequence) and same_letters(letters, sequence)


def _check_widths(rows: list[_A3mRow], name: str) -> None:
    for row in rows:
        if row.n_column != rows[0].n_column:
            raise TemplateError(
                f"{name}: row {row.row.name} has {row.n_column} columns where the first row has "
                f"{rows[0].n_column}; the file is cut off, make it again",
                reason="row-length",
            )


def _residues_of_columns(
    rows: list[_A3mRow], is_query: bool, sequence: str, name: str
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """The query's residue of each column, -1 for none, and what to tell a user about it."""
    n_column = rows[0].n_column
    residue = np.full(n_column, -1, np.int64)
    warnings: tuple[str, ...] = ()
    if is_query:
        own, start = rows[0], 0
    elif n_column == len(sequence):
        return np.arange(n_column), ()
    else:
        own = max(rows, key=lambda row: row.row.length_in(sequence))
        start, length = own.row.start, own.row.length_in(sequence)
        why = f"{name}: it has {n_column} columns, the chain has {len(sequence)} residues"
        if not length:
            raise query_mismatch(name, why.removeprefix(f"{name}: "))
        warnings = (f"{why}: aligned through the chain's own hit {own.row.name} ({length} residues)",)
    placed = np.flatnonzero(own.column >= 0)
    residue[own.column[placed]] = start + placed
    return residue, warnings


def _hit(row: _A3mRow, residue: NDArray[np.int64]) -> Hit | NumberedHit | Skipped:
    chain = chain_of(row.row.name)
    if isinstance(chain, Skipped):
        return chain
    query_index = np.where(row.column >= 0, residue[row.column], -1)
    aligned = query_index >= 0
    return Hit(
        entry=chain[0],
        chain=chain[1],
        start=row.row.start,
        sequence=row.row.sequence,
        query_index=query_index[aligned].astype(np.int32),
        hit_index=np.flatnonzero(aligned).astype(np.int32),
    )


def _realigned(row: HitRow, sequence: str) -> Hit | NumberedHit | Skipped:
    chain = chain_of(row.name)
    if isinstance(chain, Skipped):
        return chain
    try:
        query_index, hit_index = align_pair(sequence, row.sequence, whole=False)
    except TemplateError as error:
        return Skipped(reason=error.reason)
    return Hit(
        entry=chain[0],
        chain=chain[1],
        start=row.start,
        sequence=row.sequence,
        query_index=query_index,
        hit_index=hit_index,
    )
