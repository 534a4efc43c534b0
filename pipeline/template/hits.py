"""Template hits as search programs list them: hmmsearch Stockholm and HHR (hhsearch, hhblits).

A hit is read as text alone: which residues of the query align to which residues of the hit, and the hit's
letters. Whether these letters are in the structure is for
:mod:`megafold.pipeline.template.features` to say.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.errors import AlignmentError, TemplateError
from megafold.pipeline.msa.stockholm import MAGIC, StockholmBlock, read_blocks
from megafold.pipeline.msa.text import AlignmentText, read_text

#: ``1abc_A``, ``pdb_00001abc_A``; the chain may have several letters.
_CHAIN_NAME: Final = re.compile(r"([0-9][0-9A-Za-z]{3}|pdb_[0-9a-zA-Z]{8})_([0-9A-Za-z.-]+)")
_RANGE: Final = re.compile(r"(.+)/(\d+)-(\d+)")
_GAPS: Final = b"-._~"


@dataclass(frozen=True, kw_only=True)
class Hit:
    """One hit: a stretch of a template chain's sequence, and which residues of it align.

    ``entry`` is lower case; ``chain`` as the file writes it (most often the author's id). ``sequence`` holds
    the hit's residues without gaps (upper case), the first of which the file places at ``start`` (0-based) in
    the chain's sequence, -1 where it does not say. ``query_index`` (0-based residues of the query) and
    ``hit_index`` (into ``sequence``) are int32 [N_aligned], ascending.
    """

    entry: str
    chain: str
    start: int
    sequence: str
    query_index: NDArray[np.int32]
    hit_index: NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A hit that is not used, and why: a slug such as ``no-chain-id``."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class HitList:
    """The hits of one file, in the order of its rows, and what to tell a user about how they were read."""

    items: tuple[Hit | Skipped, ...]
    warnings: tuple[str, ...] = ()


def parse_hits(text: AlignmentText, sequence: str) -> HitList:
    """Parse a hit file.

    A format that is told apart but not read gives one ``unsupported-hit-format``.

    Args:
        text: the file.
        sequence: the query's canonical one-letter sequence.

    Raises:
        TemplateError: the file is broken, or was searched with another query (``query-mismatch``).
    """
    data = text.data.lstrip()
    if data.startswith(MAGIC):
        try:
            lists = [
                _stockholm_hits(block, sequence, text.name) for block in read_blocks(text.data, text.name)
            ]
        except AlignmentError as error:
            if error.reason == "no-records":  # hmmsearch writes no block where it found nothing
                return HitList(items=())
            raise TemplateError(str(error), reason=error.reason) from None
        return HitList(
            items=tuple(item for found in lists for item in found.items),
            warnings=tuple(warning for found in lists for warning in found.warnings),
        )
    if data.startswith(b"Query "):
        return HitList(items=tuple(_hhr_hits(data.decode("utf-8", "replace"), sequence, text.name)))
    return HitList(
        items=(Skipped(reason="unsupported-hit-format"),),
        warnings=(f"{text.name}: neither hmmsearch Stockholm nor HHR, not read",),
    )


def hit_entries(path: Path) -> frozenset[str]:
    """The entries a hit file names, lower case: whose structures its template object is made from.

    Raises:
        TemplateError: the file cannot be read.
    """
    try:
        data = read_text(path).data.lstrip()
    except AlignmentError as error:
        raise TemplateError(str(error), reason=error.reason) from None
    lines = data.split(b"\n")
    if data.startswith(MAGIC):
        names = [
            line.split(None, 1)[0] for line in lines if line.strip() and not line.startswith((b"#", b"//"))
        ]
    elif data.startswith(b"Query "):
        names = [line[1:].split(None, 1)[0] for line in lines if line.startswith(b">") and line[1:].strip()]
    else:
        return frozenset()
    matches = [
        _CHAIN_NAME.fullmatch(name.decode("utf-8", "replace").partition("/")[0]) for name in set(names)
    ]
    return frozenset(match[1].lower() for match in matches if match)


def _query_mismatch(name: str, why: str) -> TemplateError:
    return TemplateError(
        f"{name}: {why}; search again with the chain's sequence, or remove the file", reason="query-mismatch"
    )


def _chain(name: str) -> tuple[str, str] | Skipped:
    match = _CHAIN_NAME.fullmatch(name)
    return (match[1].lower(), match[2]) if match else Skipped(reason="no-chain-id")


def _stockholm_hits(block: StockholmBlock, sequence: str, name: str) -> HitList:
    names, text_rows = block.take_rows(name)
    text = np.frombuffer(b"".join(text_rows), np.uint8).reshape(len(names), -1)
    is_gap = np.isin(text, np.frombuffer(_GAPS, np.uint8))
    rows = [
        _Row.of(label.decode("utf-8", "replace"), row[~gap])
        for label, row, gap in zip(names, text, is_gap, strict=True)
    ]
    match_column = _match_columns(block, text, name)
    n_match = int(match_column.sum())
    warnings = []
    if n_match == len(sequence):
        residue = np.where(match_column, np.cumsum(match_column) - 1, -1)
    else:
        own = max(range(len(rows)), key=lambda index: rows[index].length_in(sequence))
        length = rows[own].length_in(sequence)
        if not length:
            raise _query_mismatch(
                name, f"its profile has {n_match} columns, the chain has {len(sequence)} residues"
            )
        residue = np.where(match_column & ~is_gap[own], rows[own].start + np.cumsum(~is_gap[own]) - 1, -1)
        warnings.append(
            f"{name}: its profile has {n_match} columns, the chain has {len(sequence)} residues: aligned "
            f"through the chain's own hit {names[own].decode('utf-8', 'replace')} ({length} residues)"
        )
    items: list[Hit | Skipped] = []
    for row, gap in zip(rows, is_gap, strict=True):
        chain = _chain(row.name)
        if isinstance(chain, Skipped):
            items.append(chain)
            continue
        aligned = (residue >= 0) & ~gap
        items.append(
            Hit(
                entry=chain[0],
                chain=chain[1],
                start=row.start,
                sequence=row.sequence,
                query_index=residue[aligned].astype(np.int32),
                hit_index=(np.cumsum(~gap) - 1)[aligned].astype(np.int32),
            )
        )
    return HitList(items=tuple(items), warnings=tuple(warnings))


@dataclass(frozen=True, kw_only=True)
class _Row:
    """One row of a Stockholm hit list: name without range, 0-based start (-1 for none), residues."""

    name: str
    start: int
    sequence: str

    @classmethod
    def of(cls, label: str, residues: NDArray[np.uint8]) -> "_Row":
        ranged = _RANGE.fullmatch(label)
        return cls(
            name=ranged[1] if ranged else label,
            start=int(ranged[2]) - 1 if ranged else -1,
            sequence=residues.tobytes().decode("ascii", "replace").upper(),
        )

    def length_in(self, sequence: str) -> int:
        """How many residues it has if they are, where the row says, the query's own; else 0."""
        here = sequence[self.start : self.start + len(self.sequence)] if self.start >= 0 else ""
        same = len(here) == len(self.sequence) and same_letters(self.sequence, here)
        return len(self.sequence) if same else 0


def same_letters(first: str, second: str) -> bool:
    """Whether two sequences of equal length agree; X matches any letter."""
    a = np.frombuffer(first.encode("ascii", "replace"), np.uint8)
    b = np.frombuffer(second.encode("ascii", "replace"), np.uint8)
    return bool(((a == b) | (a == ord("X")) | (b == ord("X"))).all())


def _match_columns(block: StockholmBlock, text: NDArray[np.uint8], name: str) -> NDArray[np.bool_]:
    """Which columns are match states of the profile, and so residues of the query; bool [N_column].

    Without an RF line, match columns are those where rows have capitals or ``-``.
    """
    if not block.reference:
        return ((text == ord("-")) | ((text >= ord("A")) & (text <= ord("Z")))).any(axis=0)
    if len(block.reference) != text.shape[1]:
        raise TemplateError(
            f"{name}: its RF line has {len(block.reference)} columns, its rows have {text.shape[1]}; "
            "the file is cut off, make it again",
            reason="row-length",
        )
    return ~np.isin(np.frombuffer(block.reference, np.uint8), np.frombuffer(_GAPS, np.uint8))


@dataclass(kw_only=True)
class _HhrHit:
    """The lines of one HHR hit, joined over its blocks. Starts are 1-based as in the file, 0 for none."""

    title: str
    query_start: int = 0
    query: str = ""
    template_start: int = 0
    template: str = ""


def _hhr_hits(text: str, sequence: str, name: str) -> Iterator[Hit | Skipped]:
    lines = text.splitlines()
    for line in lines:
        if line.startswith("Match_columns"):
            length = int(line.split()[1])
            if length != len(sequence):
                raise _query_mismatch(
                    name, f"its query has {length} columns, the chain has {len(sequence)} residues"
                )
            break
    for item in _collect_hhr(lines, name):
        yield _finish_hhr(item, sequence, name)


def _collect_hhr(lines: list[str], name: str) -> Iterator[_HhrHit]:
    """Join the alignment lines of each hit. Consensus, secondary structure and confidence are skipped."""
    current: _HhrHit | None = None
    for number, line in enumerate(lines, 1):
        if line.startswith(">"):
            if current is not None:
                yield current
            current = _HhrHit(title=line[1:].strip())
        elif current is not None and line.startswith(("Q ", "T ")):
            words = line.split()
            if len(words) < 5 or words[1] == "Consensus" or words[1].startswith("ss_"):
                continue
            if not (words[2].isdigit() and words[4].isdigit()):
                raise TemplateError(
                    f"{name}: line {number} is not an alignment line of an HHR file", reason="bad-line"
                )
            if words[0] == "Q":
                current.query_start = current.query_start or int(words[2])
                current.query += words[3]
            else:
                current.template_start = current.template_start or int(words[2])
                current.template += words[3]
    if current is not None:
        yield current


def _finish_hhr(item: _HhrHit, sequence: str, name: str) -> Hit | Skipped:
    if not item.query or len(item.query) != len(item.template):
        raise TemplateError(
            f"{name}: hit {item.title[:20]!r} aligns {len(item.query)} columns of the query with "
            f"{len(item.template)} of the template; the file is cut off, make it again",
            reason="row-length",
        )
    query = np.frombuffer(item.query.encode("ascii", "replace"), np.uint8)
    template = np.frombuffer(item.template.encode("ascii", "replace"), np.uint8)
    gaps = np.frombuffer(_GAPS, np.uint8)
    in_query, in_template = ~np.isin(query, gaps), ~np.isin(template, gaps)
    letters = query[in_query].tobytes().decode("ascii").upper()
    stretch = sequence[item.query_start - 1 :][: len(letters)].ljust(len(letters), "?")
    if not same_letters(letters, stretch):
        theirs, ours, at = next(
            (a, b, at)
            for at, (a, b) in enumerate(zip(letters, stretch, strict=True), item.query_start)
            if a != b and "X" not in (a, b)
        )
        raise _query_mismatch(name, f"its query has {theirs} at residue {at}, the chain has {ours}")
    chain = _chain(item.title.split(None, 1)[0] if item.title else "")
    if isinstance(chain, Skipped):
        return chain
    aligned = in_query & in_template
    query_index = np.cumsum(in_query, dtype=np.int32) - 1 + (item.query_start - 1)
    hit_index = np.cumsum(in_template, dtype=np.int32) - 1
    return Hit(
        entry=chain[0],
        chain=chain[1],
        start=item.template_start - 1,
        sequence=template[in_template].tobytes().decode("ascii", "replace").upper(),
        query_index=query_index[aligned].astype(np.int32),
        hit_index=hit_index[aligned],
    )
