"""Where in its structure a hit lies: the letters decide, for programs number and name chains differently."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.errors import TemplateError
from megafold.pipeline.template.hit import Hit, NumberedHit, same_letters
from megafold.pipeline.template.realign import align_pair
from megafold.pipeline.template.structures import TemplateChain, TemplateEntry

#: A stated alignment may have this share of its pairs less identical than stated: databases hold other
#: letters at modified residues and conflicts. One made again may differ by more, and lose some pairs.
_STATED_SLACK: Final = 0.02
_REALIGNED_SLACK: Final = 0.1
_REALIGNED_PAIRS: Final = 0.8


@dataclass(frozen=True, kw_only=True)
class Placed:
    """A hit in a chain of its structure.

    ``query_index`` (residues of the query) and ``chain_index`` (residues of the chain) are int32
    [N_aligned], ascending. ``is_realigned``: the alignment is not the file's.
    """

    chain: TemplateChain
    query_index: NDArray[np.int32]
    chain_index: NDArray[np.int32]
    is_realigned: bool = False


def place(hit: Hit | NumberedHit, sequence: str, entry: TemplateEntry) -> Placed:
    """Find the residues that a hit aligns to the query.

    Raises:
        TemplateError: the entry has no such protein chain (``chain-not-found``), or not with the hit's
            residues (``sequence-mismatch``; ``other-query`` where the hit may be one of another query), or
            its residues cannot be aligned again (``too-long-to-align``).
    """
    candidates = entry.candidates(hit.chain)
    if not candidates:
        raise TemplateError(f"{hit.entry} has no protein chain {hit.chain}", reason="chain-not-found")
    if isinstance(hit, Hit):
        chain, start = _locate(hit, candidates)
        chain_index = (start + hit.hit_index).astype(np.int32)
        return Placed(chain=chain, query_index=hit.query_index, chain_index=chain_index)
    return _place_numbers(hit, sequence, candidates)


def _locate(hit: Hit, candidates: list[TemplateChain]) -> tuple[TemplateChain, int]:
    """The chain a hit means and where in it the hit begins.

    Programs differ in whether they name chains by author or label id: the first candidate whose sequence has
    the hit's residues where the hit says is meant, else the first one that has them anywhere.
    """
    for chain in candidates:
        if hit.start >= 0 and _matches(hit.sequence, chain.sequence, hit.start):
            return chain, hit.start
    for chain in candidates:
        start = chain.sequence.find(hit.sequence)
        if start < 0 and "X" in hit.sequence + chain.sequence:
            offsets = range(len(chain.sequence) - len(hit.sequence) + 1)
            start = next((at for at in offsets if _matches(hit.sequence, chain.sequence, at)), -1)
        if start >= 0:
            return chain, start
    raise TemplateError(
        f"{hit.entry}_{hit.chain}: the hit's residues are not in the chain's sequence",
        reason="sequence-mismatch",
    )


def _matches(letters: str, sequence: str, start: int) -> bool:
    """Whether the sequence has these letters at ``start``; X matches any."""
    stretch = sequence[start : start + len(letters)]
    return len(stretch) == len(letters) and same_letters(letters, stretch)


def _place_numbers(hit: NumberedHit, sequence: str, candidates: list[TemplateChain]) -> Placed:
    """As stated where the letters agree; else aligned again, between the stated ends, then anywhere."""
    for chain in candidates:
        if hit.query_index is None or hit.target_index is None or hit.target_stop > len(chain.sequence):
            continue
        if _agrees(hit, sequence, chain, (hit.query_index, hit.target_index), _STATED_SLACK):
            return Placed(chain=chain, query_index=hit.query_index, chain_index=hit.target_index)
    stretch = sequence[hit.query_start : hit.query_stop]
    for whole in (True, False):
        for chain in candidates:
            first, last = (hit.target_start, hit.target_stop) if whole else (0, len(chain.sequence))
            if last > len(chain.sequence):
                continue
            query_index, chain_index = align_pair(stretch, chain.sequence[first:last], whole=whole)
            pairs = query_index + np.int32(hit.query_start), chain_index + np.int32(first)
            if len(query_index) >= _REALIGNED_PAIRS * hit.n_aligned and _agrees(
                hit, sequence, chain, pairs, _REALIGNED_SLACK
            ):
                return Placed(chain=chain, query_index=pairs[0], chain_index=pairs[1], is_realigned=True)
    raise TemplateError(
        f"{hit.entry}_{hit.chain}: the query and the chain's sequence are not as alike as the hit says",
        reason="sequence-mismatch" if hit.is_certain else "other-query",
    )


def _agrees(
    hit: NumberedHit,
    sequence: str,
    chain: TemplateChain,
    pairs: tuple[NDArray[np.int32], NDArray[np.int32]],
    slack: float,
) -> bool:
    """Whether as many pairs are identical as the hit says, but for a share; X may be any letter."""
    query = np.frombuffer(sequence.encode("ascii", "replace"), np.uint8)[pairs[0]]
    target = np.frombuffer(chain.sequence.encode("ascii", "replace"), np.uint8)[pairs[1]]
    n_alike = int(((query == target) | (query == ord("X")) | (target == ord("X"))).sum())
    return n_alike + int(slack * hit.n_aligned) >= hit.n_identical
