"""Smooth lDDT loss (AF3 SI algorithm 27)."""

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megafold.trainer.ops.precision import wide

#: Distance errors at which the four sigmoids stand, Å.
THRESHOLDS = (0.5, 1.0, 2.0, 4.0)
#: Pairs closer than this in the ground truth count, Å; the first for atoms of nucleotides.
NUCLEOTIDE_RADIUS = 30.0
RADIUS = 15.0


def pair_distance(positions: Tensor, rows: slice = slice(None)) -> Tensor:
    """Distances [..., N, N] of positions [..., N, 3]: exact, with a zero gradient where two coincide.

    Only those rows of the matrix, if given.
    """
    own = positions[..., rows, :]
    return torch.cdist(own, positions, compute_mode="donot_use_mm_for_euclid_dist")


def _score(predicted: Tensor, true_distance: Tensor, counted: Tensor) -> Tensor:
    """Σ c·ε over the pairs, [B, s], of copies [B, s, N, 3]."""
    error = (pair_distance(predicted) - true_distance.unsqueeze(1)).abs()
    closeness = torch.sigmoid(THRESHOLDS[0] - error)
    for threshold in THRESHOLDS[1:]:
        closeness = closeness + torch.sigmoid(threshold - error)
    return (closeness * counted.unsqueeze(1)).sum(dim=(-1, -2)) / len(THRESHOLDS)


def smooth_lddt_loss(
    predicted: Tensor, truth: Tensor, mask: Tensor, is_nucleotide: Tensor, copies_at_once: int = 1
) -> Tensor:
    """1 - smooth lDDT, which needs no superposition.

    A perfect prediction scores 0.196, not 0: the sigmoids are not yet saturated there.
    Pairs of ``copies_at_once`` copies are held in memory at a time and are computed anew in the backward
    pass, so memory is O(copies_at_once · N²) rather than O(S · N²).

    Args:
        predicted: denoised positions [B, S, N, 3], Å.
        truth: ground truth [B, N, 3], Å; distances are the same in every copy of it.
        mask: resolved atoms, bool [B, N].
        is_nucleotide: atoms of DNA and RNA, bool [B, N].
        copies_at_once: copies in memory together.

    Returns:
        [B, S]; 0 for a sample without a pair that counts.
    """
    predicted = torch.where(mask[:, None, :, None], wide(predicted), 0.0)
    with torch.no_grad():
        true_distance = pair_distance(torch.where(mask.unsqueeze(-1), wide(truth), 0.0))
        radius = torch.where(is_nucleotide, NUCLEOTIDE_RADIUS, RADIUS).unsqueeze(-1)
        counted = (true_distance < radius) & mask.unsqueeze(-1) & mask.unsqueeze(-2)
        counted &= ~torch.eye(mask.shape[-1], dtype=torch.bool, device=mask.device)
        count = counted.sum(dim=(-1, -2)).unsqueeze(-1)
    scores = [
        checkpoint(_score, copies, true_distance, counted, use_reentrant=False)
        for copies in predicted.split(copies_at_once, dim=1)
    ]
    lddt = torch.cat(scores, dim=1) / count.clamp(min=1)
    return torch.where(count > 0, 1.0 - lddt, 0.0)
