"""A sample's templates: which hits may be used for an entry, and a random few of them (AF3 SI 2.4).

The cache holds every hit that could be read. What is allowed depends on the entry (its release date, its
own id) and on the settings, so the choice is made here. Chains of one sequence share their templates.
Slot ``s`` of all chains is row ``s`` of the features: templates say nothing about pairs of chains.
"""

import datetime
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline import schema
from megafold.pipeline.stream.config import TemplateConfig
from megafold.pipeline.stream.entry import Columns, present


def allowed_hits(
    hits: Columns,
    names: Mapping[str, Sequence[Any]],
    config: TemplateConfig,
    entry: str,
    release_date: str | None,
) -> tuple[NDArray[np.int64], dict[str, int]]:
    """Hits that a sample of ``entry`` may use, and how many may not be by reason.

    Args:
        hits: the ``hits`` table of a template object.
        names: its ``hits`` attribute: ``entry``, ``chain`` and ``release_date`` of each hit.
        config: limits.
        entry: the entry's id; its own structure is no template for it.
        release_date: the entry's ISO date. A template must have been released at least
            ``days_before_release`` days before.

    Returns:
        Hit indices, ascending, at most ``candidates`` of them; counts of the rest: ``own-entry``,
        ``no-date``, ``entry-no-date``, ``too-recent``, ``too-short``, ``duplicate``, ``over-limit``.
    """
    own_date = release_date or config.entry_missing_date
    latest = None
    if own_date is not None:
        latest = datetime.date.fromisoformat(own_date) - datetime.timedelta(days=config.days_before_release)
    rejected: Counter[str] = Counter()
    allowed: list[int] = []
    for index in range(len(hits["aligned"])):
        date = names["release_date"][index] or config.missing_date
        if names["entry"][index].lower() == entry.lower():
            reason = "own-entry"
        elif date is None:
            reason = "no-date"
        elif latest is None:
            reason = "entry-no-date"
        elif datetime.date.fromisoformat(date) > latest:
            reason = "too-recent"
        else:
            reason = _quality_reason({name: int(column[index]) for name, column in hits.items()}, config)
        if not reason and len(allowed) == config.candidates:
            reason = "over-limit"
        if reason:
            rejected[reason] += 1
        else:
            allowed.append(index)
    return np.array(allowed, np.int64), dict(rejected)


def _quality_reason(hit: Mapping[str, int], config: TemplateConfig) -> str:
    if hit["aligned"] < config.min_aligned or hit["coverage"] < 1000 * config.min_coverage:
        return "too-short"
    if hit["identity"] == 1000 and hit["coverage"] > 1000 * config.duplicate_coverage:
        return "duplicate"
    return ""


def choose_hits(allowed: NDArray[np.int64], count: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """A random ``min(Uniform{0..n}, count)`` of ``n`` allowed hits, in random order."""
    drawn = int(rng.integers(0, len(allowed) + 1))
    return rng.permutation(allowed)[: min(drawn, count)]


@dataclass(frozen=True, kw_only=True)
class TemplateBlock:
    """The chosen hits of one sequence and where they go.

    ``tokens`` [n]: positions in the crop; ``columns`` [n]: their residues in the arrays.
    ``restype`` [N_chosen, N_residue]; ``atom_pos`` [N_chosen, N_residue, 4, 3] in Å, NaN where missing.
    """

    tokens: NDArray[np.int64]
    columns: NDArray[np.int64]
    restype: NDArray[np.int8]
    atom_pos: NDArray[np.float32]


def template_features(n_token: int, blocks: Sequence[TemplateBlock]) -> Mapping[str, NDArray[Any]]:
    """The template features of a crop; as many slots as the block with the most hits has.

    Atomised residues get none: a template knows a residue's backbone, not which of its atoms a token is.
    """
    n_slot = max((len(block.restype) for block in blocks), default=0)
    restype = np.full((n_slot, n_token), schema.GAP, np.int32)
    atom_pos = np.full((n_slot, n_token, 4, 3), np.nan, np.float32)
    for block in blocks:
        slots = np.arange(len(block.restype))
        restype[np.ix_(slots, block.tokens)] = block.restype[:, block.columns]
        atom_pos[np.ix_(slots, block.tokens)] = block.atom_pos[:, block.columns]
    frame_mask = present(atom_pos[:, :, 0]) & present(atom_pos[:, :, 1]) & present(atom_pos[:, :, 2])
    beta_mask = present(atom_pos[:, :, 3])
    return {
        "template_restype": restype,
        "template_pseudo_beta_mask": beta_mask,
        "template_backbone_frame_mask": frame_mask,
        "template_pseudo_beta": np.where(beta_mask[:, :, None], atom_pos[:, :, 3], np.float32(0)),
        "template_backbone_frame": np.where(frame_mask[:, :, None, None], atom_pos[:, :, :3], np.float32(0)),
    }
