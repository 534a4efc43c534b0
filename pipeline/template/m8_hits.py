"""Template hits as M8: one line a hit with tabs between columns (BLAST's tabular format, MMseqs2's own).

Columns: query, target (a chain, ``1abc_A``), identity, columns of the alignment, mismatches, gaps opened,
first and last residue of the query and of the target (1-based), E-value, score. MMseqs2 and ColabFold may
add the alignment itself as a CIGAR string, where ``M`` is a pair, ``I`` a residue of the query alone and
``D`` one of the target alone. There are no letters: the template's own sequence gives them, and decides
(:mod:`megafold.pipeline.template.placing`).
"""

import re
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.errors import TemplateError
from megafold.pipeline.template.hit import HitList, NumberedHit, Skipped, chain_of, query_mismatch

_NUMBER: Final = rb"[-+0-9.eE]+"
_COLUMNS: Final = rb"[^\t\n]+\t[^\t\n]+\t" + _NUMBER + rb"(?:\t *\d+){7}\t *" + _NUMBER + rb"\t *" + _NUMBER
#: A hit list's first bytes: comments, then a line of 12 columns of which 10 are numbers, or nothing.
M8_LINE: Final = re.compile(rb"(?:#[^\n]*(?:\n\s*|\Z))*(?:" + _COLUMNS + rb"|\Z)")
_LINE: Final = re.compile(_COLUMNS + rb"(?:\t[^\n]*)?")
_CIGAR: Final = re.compile(r"(?:\d*[MIDX=])+")
_LONGEST: Final = 1_000_000  #: residues; no chain has more
_OPERATION: Final = re.compile(r"(\d*)([MIDX=])")


def read_m8_hits(data: bytes, sequence: str, name: str) -> HitList:
    """Read a hit list.

    Raises:
        TemplateError: a line that is no hit (``bad-line``), or residues that the query has not
            (``query-mismatch``).
    """
    lines = list(_lines(data))
    for number, line in lines:
        if not _LINE.fullmatch(line):
            raise TemplateError(
                f"{name}: line {number} does not have the 12 columns of BLAST's tabular format; "
                "the file is cut off, make it again",
                reason="bad-line",
            )
    rows = [line.decode("utf-8", "replace").split("\t") for _, line in lines]
    queries = sorted({row[0] for row in rows})
    warnings: tuple[str, ...] = ()
    if len(queries) > 1:
        warnings = (
            f"{name}: lists hits of {len(queries)} queries; those that the chain's letters agree with are "
            "its own, the others count as other-query",
        )
    return HitList(
        items=tuple(_hit(row, sequence, name, is_certain=len(queries) == 1) for row in rows),
        warnings=warnings,
    )


def m8_names(data: bytes) -> list[bytes]:
    """The targets."""
    return [line.split(b"\t", 2)[1].strip() for _, line in _lines(data) if line.count(b"\t")]


def _lines(data: bytes) -> list[tuple[int, bytes]]:
    """Number (1-based) and text of each line that is no comment."""
    lines = enumerate(data.splitlines(), 1)
    return [(number, line) for number, line in lines if line.strip() and not line.startswith(b"#")]


def _hit(row: list[str], sequence: str, name: str, *, is_certain: bool) -> NumberedHit | Skipped:
    chain = chain_of(row[1].strip())
    n_column, n_mismatch, _, first, last, target_first, target_last = (int(word) for word in row[3:10])
    if last > len(sequence):
        if not is_certain:
            return Skipped(reason="other-query")
        raise query_mismatch(
            name, f"a hit aligns residue {last} of its query, the chain has {len(sequence)} residues"
        )
    if isinstance(chain, Skipped):
        return chain
    if not 0 < first <= last or not 0 < target_first <= target_last <= _LONGEST:
        return Skipped(reason="bad-range")
    n_query, n_target = last - first + 1, target_last - target_first + 1
    n_aligned = n_query + n_target - n_column
    pairs = _pairs(row[12].strip(), n_query, n_target) if len(row) > 12 else None
    if pairs is None and not 0 < n_aligned <= min(n_query, n_target):
        return Skipped(reason="bad-range")
    return NumberedHit(
        entry=chain[0],
        chain=chain[1],
        query_start=first - 1,
        query_stop=last,
        target_start=target_first - 1,
        target_stop=target_last,
        n_aligned=len(pairs[0]) if pairs else n_aligned,
        n_identical=max((len(pairs[0]) if pairs else n_aligned) - n_mismatch, 0),
        query_index=pairs[0] + np.int32(first - 1) if pairs else None,
        target_index=pairs[1] + np.int32(target_first - 1) if pairs else None,
        is_certain=is_certain,
    )


def _pairs(cigar: str, n_query: int, n_target: int) -> tuple[NDArray[np.int32], NDArray[np.int32]] | None:
    """The pairs that a CIGAR string states, from the alignment's first residues; None for no such string.

    None, too, where it does not come out at the line's own last residues: then it is not believed.
    """
    if not _CIGAR.fullmatch(cigar):
        return None
    operations = [(int(count or 1), operation) for count, operation in _OPERATION.findall(cigar)]
    n_alone = {kind: sum(count for count, operation in operations if operation == kind) for kind in "ID"}
    n_pair = sum(count for count, _ in operations) - n_alone["I"] - n_alone["D"]
    if (n_pair + n_alone["I"], n_pair + n_alone["D"]) != (n_query, n_target):
        return None
    query, target = [np.empty(0, np.int32)], [np.empty(0, np.int32)]
    at_query = at_target = 0
    for count, operation in operations:
        if operation in "M=X":
            query.append(np.arange(at_query, at_query + count, dtype=np.int32))
            target.append(np.arange(at_target, at_target + count, dtype=np.int32))
        at_query += count * (operation != "D")
        at_target += count * (operation != "I")
    return np.concatenate(query), np.concatenate(target)
