"""Losses of the confidence head (AF3 SI 4.3): what it says of a structure against how far that is off.

Shapes: B samples, A atoms, N tokens, R of them a rank's rows. Lengths in Å. Targets carry no gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import reduce
from operator import add
from typing import Final

import torch
from torch import Tensor

from megafold.trainer.losses.diffusion import resolved_atoms
from megafold.trainer.losses.smooth_lddt import NUCLEOTIDE_RADIUS, RADIUS
from megafold.trainer.losses.term import LossTerm, cross_entropy, masked_mean
from megafold.trainer.model.outputs import ConfidenceLogits
from megafold.trainer.model.primitives import at_atoms
from megafold.trainer.ops.precision import wide
from megafold.trainer.ops.smooth_lddt import THRESHOLDS, distances, pair_distance

#: Key of a batch that has each sample's resolution, float32 [B], Å; NaN for an entry without one.
RESOLUTION: Final = "resolution"
#: Confidence is learned on entries of such resolutions alone, Å: the truth of others is too rough.
RESOLUTIONS: Final = (0.1, 4.0)
#: Upper end of the bins of errors (PAE, PDE), Å; the last bin also takes what lies beyond.
LAST_EDGE: Final = 32.0

#: Added to squared errors of positions, Å² (algorithm 30).
_EPSILON: Final = 1e-8
#: Atoms whose distances to all tokens are in memory together.
_ATOMS_AT_ONCE: Final = 4096


# ----------------------------------------------------------------------------------------------------------
# Targets


@torch.no_grad()
def atom_lddt(
    predicted: Tensor, batch: Mapping[str, Tensor], atoms_at_once: int = _ATOMS_AT_ONCE
) -> tuple[Tensor, Tensor]:
    """lDDT of each atom with the polymers around it (SI 4.3.1).

    An atom's partners are the Cα of amino acids that in the truth are within 15 Å of it and the C1' of
    nucleotides within 30 Å, itself left out. Residues that are tokens atom by atom are no partners.

    Args:
        predicted: the judged structure [B, A, 3].
        batch: features as in the sample schema, with a leading batch axis.
        atoms_at_once: rows of the matrix of distances that are in memory together.

    Returns:
        Shares of the distances kept [B, A], over errors below 0.5, 1, 2 and 4 Å; and which atoms have a
        value, bool [B, A]: they are resolved and have a partner.
    """
    resolved = resolved_atoms(batch)
    center = batch["center_atom"].long()
    is_nucleotide = batch["is_dna"] | batch["is_rna"]
    # A whole residue has more than one atom, resolved or not.
    is_partner = batch["token_mask"] & (batch["is_protein"] | is_nucleotide) & (batch["token_atom_count"] > 1)
    is_partner &= torch.gather(resolved, 1, center)
    radius = torch.where(is_nucleotide, NUCLEOTIDE_RADIUS, RADIUS).to(wide(predicted).dtype)
    radius = torch.where(is_partner, radius, 0.0).unsqueeze(1)
    x, truth = _present(predicted, resolved), _present(batch["coords"], resolved)
    x_center, true_center = at_atoms(x, center), at_atoms(truth, center)
    kept, pairs = [], []
    for first in range(0, x.shape[1], atoms_at_once):
        rows = slice(first, first + atoms_at_once)
        true_distance = distances(truth[:, rows], true_center)
        counted = (true_distance < radius) & resolved[:, rows, None]
        atoms = torch.arange(x.shape[1], device=x.device)[rows]
        counted &= center.unsqueeze(1) != atoms.unsqueeze(-1)
        error = (distances(x[:, rows], x_center) - true_distance).abs_()
        kept.append(reduce(add, (((error < limit) & counted).sum(dim=-1) for limit in THRESHOLDS)))
        pairs.append(counted.sum(dim=-1))
    count = torch.cat(pairs, dim=1)
    share = torch.cat(kept, dim=1).to(x.dtype) / (len(THRESHOLDS) * count.clamp(min=1))
    return share, count > 0


@dataclass(frozen=True, kw_only=True)
class Frames:
    """Rigid frames of tokens (algorithm 29): ``origin`` [B, N, 3], ``axes`` [B, N, 3, 3], one a row."""

    origin: Tensor
    axes: Tensor

    @classmethod
    def of(cls, positions: Tensor, frame_atoms: Tensor) -> "Frames":
        """Those of three atoms each, [B, N, 3], the second being the origin.

        Axes that the atoms do not determine, as they coincide or lie on a line, are 0.
        """
        a, origin, c = (at_atoms(positions, frame_atoms[..., place].long()) for place in range(3))
        first, second = _unit(a - origin), _unit(c - origin)
        middle, across = _unit(first + second), _unit(second - first)
        axes = torch.stack([middle, across, torch.linalg.cross(middle, across)], dim=-2)
        return cls(origin=origin, axes=axes)

    def express(self, points: Tensor, rows: slice) -> list[Tensor]:
        """Coordinates along the three axes of these rows' frames, each [B, R, N], of points [B, N, 3]."""
        # Coordinate by coordinate: a matrix product would round as autocast or TF32 has it.
        offsets = [
            p[:, None, :] - o[:, rows, None]
            for p, o in zip(points.unbind(-1), self.origin.unbind(-1), strict=True)
        ]
        return [
            reduce(add, (a[:, rows, None] * d for a, d in zip(axis.unbind(-1), offsets, strict=True)))
            for axis in self.axes.unbind(-2)
        ]


@torch.no_grad()
def aligned_error(
    predicted: Tensor, batch: Mapping[str, Tensor], rows: slice = slice(None)
) -> tuple[Tensor, Tensor, Tensor]:
    """How far token j's centre is off when token i's frames are superposed (SI 4.3.2, algorithm 30).

    Args:
        predicted: the judged structure [B, A, 3].
        batch: features as in the sample schema.
        rows: tokens i.

    Returns:
        Errors [B, R, N]; tokens that have a frame [B, N], and those whose centre is resolved [B, N].
    """
    resolved = resolved_atoms(batch)
    frame_atoms, center = batch["frame_atoms"], batch["center_atom"].long()
    # Once more: an exchange of chains may have taken a resolved atom away.
    has_frame = batch["frame_mask"] & batch["token_mask"]
    for place in range(3):
        has_frame = has_frame & torch.gather(resolved, 1, frame_atoms[..., place].long())
    has_center = batch["token_mask"] & torch.gather(resolved, 1, center)
    x, truth = _present(predicted, resolved), _present(batch["coords"], resolved)
    local = Frames.of(x, frame_atoms).express(at_atoms(x, center), rows)
    true_local = Frames.of(truth, frame_atoms).express(at_atoms(truth, center), rows)
    squared = reduce(add, ((own - true).square() for own, true in zip(local, true_local, strict=True)))
    return torch.sqrt(squared + _EPSILON), has_frame, has_center


@torch.no_grad()
def distance_error(
    predicted: Tensor, batch: Mapping[str, Tensor], rows: slice = slice(None)
) -> tuple[Tensor, Tensor]:
    """By how much the distances between representative atoms are off (SI 4.3.3).

    Returns:
        Errors [B, R, N], and the tokens whose representative atom is resolved, bool [B, N].
    """
    resolved = resolved_atoms(batch)
    atom = batch["rep_atom"].long()
    mask = batch["token_mask"] & torch.gather(resolved, 1, atom)
    x, truth = _present(predicted, resolved), _present(batch["coords"], resolved)
    error = pair_distance(at_atoms(x, atom), rows) - pair_distance(at_atoms(truth, atom), rows)
    return error.abs_(), mask


def bins(values: Tensor, last_edge: float, n_bins: int) -> Tensor:
    """Which of ``n_bins`` bins of equal width from 0 to ``last_edge`` each value is in, int64.

    A value on an edge is in the upper bin, one beyond the last edge in the last.
    """
    scaled = torch.nan_to_num(values * (n_bins / last_edge), nan=float(n_bins))
    return scaled.clamp(0, n_bins - 1).long()


# ----------------------------------------------------------------------------------------------------------
# Losses


def has_fair_resolution(batch: Mapping[str, Tensor]) -> Tensor:
    """Samples that confidence is learned on, bool [B]: of a resolution of 0.1 to 4 Å.

    All of them, where the batch says nothing of resolutions.
    """
    if RESOLUTION not in batch:
        return torch.ones_like(batch["token_mask"][:, 0])
    least, most = RESOLUTIONS
    return (batch[RESOLUTION] >= least) & (batch[RESOLUTION] <= most)  # False where NaN


def confidence_losses(
    batch: Mapping[str, Tensor],
    logits: ConfidenceLogits,
    *,
    with_pae: bool,
    rows: slice = slice(None),
    whole_weight: float = 1.0,
) -> dict[str, LossTerm]:
    """Cross entropies of ``plddt``, ``resolved``, ``pde`` and, if wanted, ``pae``.

    Args:
        batch: features as in the sample schema, with the ground truth that the judged structure is to be
            compared with. Under ``resolution`` [B] may be the entries' resolutions.
        logits: what the head says. Padding may hold any finite number.
        with_pae: PAE is learned, too.
        rows: those of the pair matrices that ``logits`` has.
        whole_weight: what the losses of atoms count, which every rank that shares the sample computes.

    Returns:
        Means over atoms, or over ordered pairs of tokens, those of a token with itself included.
    """
    fair = has_fair_resolution(batch)
    resolved = resolved_atoms(batch)
    lddt, has_lddt = atom_lddt(logits.coords, batch)
    plddt = _of_atoms(logits.plddt, bins(lddt, 1.0, logits.plddt.shape[-1]), has_lddt, fair, whole_weight)
    is_resolved = _of_atoms(logits.resolved, resolved.long(), batch["atom_mask"], fair, whole_weight)
    error, mask = distance_error(logits.coords, batch, rows)
    losses = {
        "plddt": plddt,
        "resolved": is_resolved,
        "pde": _of_pairs(logits.pde, error, mask, mask, fair, rows),
    }
    if with_pae:
        error, has_frame, has_center = aligned_error(logits.coords, batch, rows)
        losses["pae"] = _of_pairs(logits.pae, error, has_frame, has_center, fair, rows)
    return losses


def _of_atoms(logits: Tensor, target: Tensor, mask: Tensor, fair: Tensor, weight: float) -> LossTerm:
    mask = mask & fair.unsqueeze(-1)
    entropy = cross_entropy(torch.where(mask.unsqueeze(-1), logits, 0.0), target)
    return LossTerm(weight * masked_mean(entropy, mask, (-1,)), mask.any(dim=-1))


def _of_pairs(
    logits: Tensor, error: Tensor, first: Tensor, second: Tensor, fair: Tensor, rows: slice
) -> LossTerm:
    """These rows' part of the mean over all pairs of one of ``first`` and one of ``second`` [B, N]."""
    entropy = cross_entropy(logits, bins(error, LAST_EDGE, logits.shape[-1]))
    first = first & fair.unsqueeze(-1)
    kept = torch.where(first[:, rows, None] & second[:, None, :], entropy, 0.0)
    count = first.sum(dim=-1) * second.sum(dim=-1)
    return LossTerm(kept.sum(dim=(-1, -2)) / count.clamp(min=1), count > 0)


def _present(positions: Tensor, mask: Tensor) -> Tensor:
    """Positions [B, A, 3], 0 where masked."""
    return torch.where(mask.unsqueeze(-1), wide(positions), 0.0)


def _unit(vectors: Tensor) -> Tensor:
    return vectors / vectors.norm(dim=-1, keepdim=True).clamp(min=1e-6)
