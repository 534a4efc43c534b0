"""A3M and A2M: the query first, lower-case letters are insertions (HH-suite user guide, section 6).

The same reader serves both: A2M writes ``.`` opposite insertions, which stand for nothing. Several
alignments in one file, separated by NUL (ColabFold), come back one by one; so do ColabFold's joined
alignments, whose first line ``#len,len<TAB>copies,copies`` gives the lengths of the chains.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.errors import AlignmentError
from megafold.pipeline.msa.alignment import (
    Alignment,
    Insertions,
    TextSlices,
    keep_columns,
    positions_of,
)
from megafold.pipeline.msa.alphabet import IGNORED, INSERTION, INVALID, SEPARATOR, Alphabet
from megafold.pipeline.schema import GAP

#: Text decoded at a time: bounds the index arrays of files with many insertions.
_CHUNK_BYTES: Final = 1 << 17
_SHOWN_BYTES: Final = 30
_ANNOTATION = re.compile(rb"(ss_pred|ss_conf|ss_dssp|sa_dssp|aa_pred|aa_dssp|\S*_?[Cc]onsensus)\b")
_JOINED = re.compile(rb"#(\d+(?:,\d+)+)\t\d")


def parse_a3m(data: bytes, alphabet: Alphabet, name: str) -> list[Alignment]:
    """Parse all alignments of an A3M or A2M text.

    Args:
        data: the whole text; CRLF line ends, empty lines and a missing last line end are fine.
        alphabet: which classes letters mean.
        name: the file's name, for messages.

    Returns:
        One alignment for each NUL-separated block, in order.

    Raises:
        AlignmentError: no records (``no-records``), a row of another length (``row-length``) or a
            character that no row holds (``bad-character``).
    """
    if b"\r" in data and data.count(b"\r") != data.count(b"\r\n"):
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    alignments = []
    start = 0
    while start < len(data):
        stop = data.find(b"\0", start)
        stop = len(data) if stop < 0 else stop
        if not _is_blank(data, start, stop):
            records, preamble = _find_records(data, start, stop, name)
            alignments.append(read_records(records, alphabet, preamble=preamble))
        start = stop + 1
    if not alignments:
        raise AlignmentError(f"{name}: no alignment in it, the file is empty", reason="no-records")
    return alignments


def _is_blank(data: bytes, start: int, stop: int) -> bool:
    """Whether there are blanks alone in a stretch; looks at it piece by piece, which are no copy of it."""
    return all(
        not data[first : min(first + _CHUNK_BYTES, stop)].strip()
        for first in range(start, stop, _CHUNK_BYTES)
    )


@dataclass(frozen=True, kw_only=True)
class Records:
    """Where the records of one alignment lie in a file's text.

    The body of record k is ``text[body[k]:stop[k]]``: residues, gaps and blanks, insertions in lower case.
    ``body`` and ``stop`` are int64 [N_record]. ``headers`` are names and descriptions.
    """

    name: str
    text: bytes
    headers: TextSlices
    body: NDArray[np.int64]
    stop: NDArray[np.int64]

    def row(self, index: int) -> bytes:
        """The characters of one row without blanks."""
        return self.text[self.body[index] : self.stop[index]].translate(None, IGNORED)

    def label(self, index: int) -> str:
        """Names a row in a message."""
        words = self.headers[index].split(None, 1)
        return f"row {index} ({words[0].decode('utf-8', 'replace') if words else 'unnamed'})"


def _find_records(text: bytes, start: int, stop: int, name: str) -> tuple[Records, bytes]:
    """Find the records in a stretch of the text, and what stands before the first one."""
    buffer = np.frombuffer(text, np.uint8, stop - start, start)
    marks = positions_of(buffer, ord(">"))
    marks = marks[(marks == 0) | (buffer[marks - 1] == ord("\n"))]
    preamble = text[start : start + int(marks[0])] if len(marks) else text[start : start + _SHOWN_BYTES]
    if not len(marks) or any(line.strip() and line[:1] not in b"#;" for line in preamble.split(b"\n")):
        raise AlignmentError(
            f"{name}: not an A3M file, it begins with {preamble[:_SHOWN_BYTES]!r} and not with '>'",
            reason="no-records",
        )
    line_ends = np.append(positions_of(buffer, ord("\n")), stop - start)
    body = line_ends[np.searchsorted(line_ends, marks)]
    is_crlf = buffer[np.maximum(body - 1, 0)] == ord("\r")
    headers = TextSlices(text, marks + (start + 1), body - is_crlf + start)
    # HH-suite puts predicted structure and a consensus before the query: they are no sequences.
    first = 0
    while first < len(headers) and _ANNOTATION.match(headers[first]):
        first += 1
    if first == len(headers):
        raise AlignmentError(f"{name}: holds annotation rows and no sequence", reason="no-records")
    ends = np.append(marks[1:], stop - start)
    return Records(
        name=name, text=text, headers=headers[first:], body=body[first:] + start, stop=ends[first:] + start
    ), preamble


def read_records(
    records: Records, alphabet: Alphabet, *, preamble: bytes = b"", keys: Sequence[bytes] = ()
) -> Alignment:
    """The alignment that records spell; the first one is the query.

    Args:
        records: the rows as text.
        alphabet: which classes letters mean.
        preamble: what stands before the first record.
        keys: as in the alignment.

    Raises:
        AlignmentError: as :func:`parse_a3m`.
    """
    query_row = records.row(0)
    width, residue = _query_columns(query_row, records, alphabet)
    codes = np.empty((len(records.headers), width), np.uint8)
    parts: list[Insertions] = []
    first = 1
    while first < len(records.headers):
        limit = records.body[first] + _CHUNK_BYTES
        last = max(first + 1, int(np.searchsorted(records.stop, limit)))
        parts.append(_decode_rows(records, first, last, alphabet, codes))
        first = last
    insertions = Insertions(
        row=np.concatenate([np.empty(0, np.int32), *(part.row for part in parts)]),
        column=np.concatenate([np.empty(0, np.int32), *(part.column for part in parts)]),
        count=np.concatenate([np.empty(0, np.int32), *(part.count for part in parts)]),
    )
    query = query_row.replace(b"-", b"").replace(b"_", b"").upper().decode("ascii")
    codes, insertions = _project(codes, insertions, residue)
    codes[0] = alphabet.encode(query)
    return Alignment(
        query=query,
        headers=records.headers,
        codes=codes,
        insertions=insertions,
        segments=_segments(preamble, len(query)),
        keys=keys,
    )


def _query_columns(row: bytes, records: Records, alphabet: Alphabet) -> tuple[int, NDArray[np.int32] | None]:
    """How the query's residues lie in the columns.

    Lower-case letters in a query are either masked residues (the other rows have a column for them) or
    residues without a column (the other rows have none); the second row tells which.

    Returns:
        The number of columns, and the column of each residue, -1 for a residue without one. None
        where residues and columns are the same.
    """
    letters = np.frombuffer(row.translate(alphabet.a3m), np.uint8)
    if not len(letters) or (letters == GAP).all() or letters.max() > INSERTION:
        raise AlignmentError(
            f"{records.name}: the query, {records.label(0)}, is empty or holds a character that is no "
            "residue; put the chain's sequence there",
            reason="bad-query",
        )
    lower = letters == INSERTION
    if lower.any() and len(records.headers) > 1:
        second = np.frombuffer(records.row(1).translate(alphabet.a3m), np.uint8)
        n_second = int((second < INSERTION).sum())
        if n_second != len(letters) and n_second == len(letters) - int(lower.sum()):
            column = np.cumsum(~lower, dtype=np.int32) - 1
            residue = letters != GAP
            return n_second, np.where(lower, np.int32(-1), column)[residue]
    if (letters == GAP).any():
        return len(letters), np.flatnonzero(letters != GAP).astype(np.int32)
    return len(letters), None


def _decode_rows(
    records: Records, first: int, last: int, alphabet: Alphabet, codes: NDArray[np.uint8]
) -> Insertions:
    """Decode the rows ``first`` to ``last`` into ``codes``, and return their insertions."""
    n_row, width = last - first, codes.shape[1]
    spans = zip(records.body[first:last].tolist(), records.stop[first:last].tolist(), strict=True)
    bodies = [records.text[start:stop] for start, stop in spans]
    bodies.append(b"")  # so that a separator ends the last row, too
    text = np.frombuffer(b">".join(bodies).translate(alphabet.a3m, IGNORED), np.uint8)
    ends = np.flatnonzero(text == SEPARATOR)
    if len(ends) != n_row or text.max() == INVALID:
        _raise_bad_character(records, first, last, alphabet)
    starts = np.concatenate(([0], ends[:-1] + 1))
    inserted = np.flatnonzero(text == INSERTION)
    n_inserted = np.diff(np.searchsorted(inserted, ends), prepend=0)
    row = np.repeat(np.arange(n_row), n_inserted)
    n_aligned = ends - starts - n_inserted
    if (n_aligned != width).any():
        bad = int(np.flatnonzero(n_aligned != width)[0])
        raise AlignmentError(
            f"{records.name}: {records.label(first + bad)} has {n_aligned[bad]} columns where the query has "
            f"{width}; the file is cut off or not an A3M file, make it again",
            reason="row-length",
        )
    codes[first:last] = text[text < INSERTION].reshape(n_row, width)
    # An insertion lies left of the column that as many aligned characters of its row precede.
    earlier = np.arange(len(inserted)) - (np.cumsum(n_inserted) - n_inserted)[row]
    column = inserted - starts[row] - earlier
    inside = column < width
    return Insertions.of(row[inside] + first, column[inside])


def _raise_bad_character(records: Records, first: int, last: int, alphabet: Alphabet) -> None:
    for index in range(first, last):
        row = records.row(index)
        for position, code in enumerate(row.translate(alphabet.a3m)):
            if code > INSERTION:
                raise AlignmentError(
                    f"{records.name}: {records.label(index)} holds {chr(row[position])!r}, "
                    "which is no residue; make the file again",
                    reason="bad-character",
                )


def _project(
    codes: NDArray[np.uint8], insertions: Insertions, residue: NDArray[np.int32] | None
) -> tuple[NDArray[np.uint8], Insertions]:
    """From the file's columns to the query's residues; ``residue`` as in :func:`_query_columns`."""
    if residue is None:
        return codes, insertions
    keep = np.zeros(codes.shape[1], bool)
    keep[residue[residue >= 0]] = True
    codes[0] = GAP  # not decoded yet: what lies there must not count as residues
    kept, insertions = keep_columns(codes, keep, insertions)
    if (residue >= 0).all():
        return kept, insertions
    spread = np.full((len(codes), len(residue)), GAP, np.uint8)
    placed = np.flatnonzero(residue >= 0)
    spread[:, placed] = kept
    column = placed[insertions.column].astype(np.int32)
    return spread, Insertions(row=insertions.row, column=column, count=insertions.count)


def _segments(preamble: bytes, length: int) -> tuple[tuple[int, int], ...]:
    match = _JOINED.match(preamble.lstrip())
    if match is None:
        return ()
    stops = np.cumsum([int(item) for item in match[1].split(b",")]).tolist()
    return tuple(zip([0, *stops[:-1]], stops, strict=True)) if stops[-1] == length else ()
