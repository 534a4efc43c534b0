"""A sample's MSA: the query, then paired rows, then unpaired rows chain by chain (AF3 SI 2.3).

Rows paired by species fill all chains that have one. Unpaired rows are block-diagonal: each fills the
chains of its own sequence (all copies of it) and is a gap everywhere else. A row that the pairing uses
anywhere is never repeated unpaired. Where there are more rows than asked for, a random subset of each
part is taken, in the stored order; the paired part gets at most half as long as unpaired rows can fill
the other half.

Tokens of ligands, and of chains without an MSA, hold their own restype in the query row and the gap below.
The atoms of a modified residue share its column.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.schema import GAP, N_RESTYPE

Rows = NDArray[np.int64]

#: The features that differ between recycles where rows are drawn for each.
RESAMPLED: Final = ("msa", "has_deletion", "deletion_value", "msa_mask")


@dataclass(frozen=True, kw_only=True)
class MsaBlock:
    """One distinct MSA and where it goes.

    ``tokens`` [n]: positions in the crop; ``columns`` [n]: their rows in the arrays below, which hold the
    residues that were read. ``msa``, ``deletion`` [N_read, N_row]; ``profile`` [N_read, 32];
    ``deletion_mean`` [N_read].
    """

    tokens: Rows
    columns: Rows
    msa: NDArray[np.int8]
    deletion: NDArray[np.uint8]
    profile: NDArray[Any]
    deletion_mean: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class RowPlan:
    """Which stored row each row of the sample holds.

    ``paired`` [n_paired, N_block]: row indices, -1 for none. ``unpaired``: for each block its row indices.
    The query comes before both.
    """

    paired: Rows
    unpaired: tuple[Rows, ...]

    @property
    def n_row(self) -> int:
        """Rows of the sample, the query's included."""
        return 1 + len(self.paired) + sum(len(rows) for rows in self.unpaired)


def plan_rows(
    depths: Sequence[int],
    pairing: NDArray[np.int32] | None,
    limit: int,
    rng: np.random.Generator,
    *,
    random_size: bool = False,
) -> RowPlan:
    """Choose at most ``limit`` rows.

    Args:
        depths: stored rows of each block, the query's included.
        pairing: [N_paired_row, N_block] row indices for these blocks, -1 for none; None without pairing.
        limit: rows of the sample, at least 1.
        rng: chooses subsets.
        random_size: hold a uniform random number of rows from 1 to as many as there would be.
    """
    if pairing is None:
        pairing = np.empty((0, len(depths)), np.int32)
    # Row 0 is the query, which every sample has anyway.
    paired = np.where(pairing > 0, pairing, -1)[(pairing > 0).any(axis=1)].astype(np.int64)
    unpaired = []
    for block, depth in enumerate(depths):
        is_free = np.ones(depth, bool)
        is_free[0] = False
        is_free[paired[paired[:, block] > 0, block]] = False
        unpaired.append(np.flatnonzero(is_free))
    ends = np.cumsum([0, *(len(rows) for rows in unpaired)])
    total = int(ends[-1])
    room = min(limit - 1, len(paired) + total)
    if random_size:
        room = int(rng.integers(0, room + 1))
    n_paired = min(len(paired), max(room // 2, room - total))
    paired = paired[_subset(len(paired), n_paired, rng)]
    chosen = _subset(total, min(total, room - n_paired), rng)
    cuts = np.searchsorted(chosen, ends)
    kept = tuple(
        rows[chosen[cuts[block] : cuts[block + 1]] - ends[block]] for block, rows in enumerate(unpaired)
    )
    return RowPlan(paired=paired, unpaired=kept)


def _subset(total: int, size: int, rng: np.random.Generator) -> Rows:
    if size >= total:
        return np.arange(total)
    return np.sort(rng.choice(total, size, replace=False, shuffle=False))


def msa_features(
    restype: NDArray[np.int32], blocks: Sequence[MsaBlock], plan: RowPlan
) -> Mapping[str, NDArray[Any]]:
    """The MSA features of a crop.

    Args:
        restype: [N_token] the tokens' own classes.
        blocks: the distinct MSAs; no token is in two.
        plan: the rows, as :func:`plan_rows` gives them for these blocks.

    Returns:
        ``msa``, ``has_deletion``, ``deletion_value``, ``msa_mask`` [N_msa, N_token]; ``profile``
        [N_token, 32]; ``deletion_mean`` [N_token], of counts, which alone are not squashed (AF3 SI table 5).
    """
    n_token = len(restype)
    # Built token by token, as the objects store it: runs of rows are then runs of memory.
    msa = np.full((n_token, plan.n_row), GAP, np.int8)
    msa[:, 0] = restype
    deletion = np.zeros((n_token, plan.n_row), np.uint8)
    profile = np.zeros((n_token, N_RESTYPE), np.float32)
    profile[np.arange(n_token), restype] = 1
    deletion_mean = np.zeros(n_token, np.float32)

    first = 1 + len(plan.paired)
    for index, block in enumerate(blocks):
        paired, own = plan.paired[:, index], plan.unpaired[index]
        head = np.concatenate([[0], np.maximum(paired, 0)])
        absent = 1 + np.flatnonzero(paired < 0)
        for stored, rows, empty in ((block.msa, msa, GAP), (block.deletion, deletion, 0)):
            taken = stored.take(head, axis=1)
            taken[:, absent] = empty
            rows[block.tokens, : len(head)] = taken[block.columns]
            rows[block.tokens, first : first + len(own)] = stored.take(own, axis=1)[block.columns]
        first += len(own)
        profile[block.tokens] = block.profile[block.columns]
        deletion_mean[block.tokens] = block.deletion_mean[block.columns]
    deletion = np.ascontiguousarray(deletion.T)
    deletion_value = np.zeros(deletion.shape, np.float32)
    some = np.flatnonzero(deletion)  # few
    deletion_value.ravel()[some] = squashed(deletion.ravel()[some])
    return {
        "msa": msa.T.astype(np.int32, order="C"),
        "has_deletion": (deletion > 0).astype(np.float32),
        "deletion_value": deletion_value,
        "msa_mask": np.ones(deletion.shape, bool),
        "profile": profile,
        "deletion_mean": deletion_mean,
    }


def squashed(deletions: NDArray[Any]) -> NDArray[np.float32]:
    """2/π·arctan(d/3) of deletion counts (AF3 SI table 5)."""
    return (2 / np.pi * np.arctan(deletions.astype(np.float32) / 3)).astype(np.float32)
