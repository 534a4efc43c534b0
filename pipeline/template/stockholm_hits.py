"""Template hits as hmmsearch lists them: Stockholm, rows over the columns of a profile."""

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.errors import AlignmentError, TemplateError
from megafold.pipeline.msa.stockholm import StockholmBlock, read_blocks
from megafold.pipeline.template.hit import (
    GAPS,
    Hit,
    HitList,
    HitRow,
    NumberedHit,
    Skipped,
    chain_of,
    query_mismatch,
)


def read_stockholm_hits(data: bytes, sequence: str, name: str) -> HitList:
    """Read a hit list; one without a block names no hits, as hmmsearch writes where it found nothing.

    Raises:
        TemplateError: the file is broken, or was searched with another query (``query-mismatch``).
    """
    try:
        lists = [_block_hits(block, sequence, name) for block in read_blocks(data, name)]
    except AlignmentError as error:
        if error.reason == "no-records":
            return HitList(items=())
        raise TemplateError(str(error), reason=error.reason) from None
    return HitList(
        items=tuple(item for found in lists for item in found.items),
        warnings=tuple(warning for found in lists for warning in found.warnings),
    )


def stockholm_names(data: bytes) -> list[bytes]:
    """The rows' names as the file has them, ranges included."""
    lines = data.split(b"\n")
    return [line.split(None, 1)[0] for line in lines if line.strip() and not line.startswith((b"#", b"//"))]


def _block_hits(block: StockholmBlock, sequence: str, name: str) -> HitList:
    names, text_rows = block.take_rows(name)
    text = np.frombuffer(b"".join(text_rows), np.uint8).reshape(len(names), -1)
    is_gap = np.isin(text, np.frombuffer(GAPS, np.uint8))
    rows = [
        HitRow.of(label.decode("utf-8", "replace"), row[~gap])
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
            raise query_mismatch(
                name, f"its profile has {n_match} columns, the chain has {len(sequence)} residues"
            )
        residue = np.where(match_column & ~is_gap[own], rows[own].start + np.cumsum(~is_gap[own]) - 1, -1)
        warnings.append(
            f"{name}: its profile has {n_match} columns, the chain has {len(sequence)} residues: aligned "
            f"through the chain's own hit {names[own].decode('utf-8', 'replace')} ({length} residues)"
        )
    items: list[Hit | NumberedHit | Skipped] = []
    for row, gap in zip(rows, is_gap, strict=True):
        chain = chain_of(row.name)
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
    return ~np.isin(np.frombuffer(block.reference, np.uint8), np.frombuffer(GAPS, np.uint8))
