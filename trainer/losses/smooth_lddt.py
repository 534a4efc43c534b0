"""Smooth lDDT loss (AF3 SI algorithm 27)."""

import torch
from torch import Tensor

from megafold.trainer import ops
from megafold.trainer.ops.precision import wide

#: Pairs closer than this in the ground truth count, Å; the first for atoms of nucleotides.
NUCLEOTIDE_RADIUS = 30.0
RADIUS = 15.0


def smooth_lddt_loss(
    predicted: Tensor, truth: Tensor, mask: Tensor, is_nucleotide: Tensor, copies_at_once: int = 1
) -> Tensor:
    """1 - smooth lDDT, which needs no superposition.

    A perfect prediction scores 0.196, not 0: the sigmoids are not yet saturated there.

    Args:
        predicted: denoised positions [B, S, N, 3], Å.
        truth: ground truth [B, N, 3], Å; distances are the same in every copy of it.
        mask: resolved atoms, bool [B, N].
        is_nucleotide: atoms of DNA and RNA, bool [B, N].
        copies_at_once: copies whose pairs are in memory together, where a back end keeps any there.

    Returns:
        [B, S]; 0 for a sample without a pair that counts.
    """
    radius = torch.where(is_nucleotide, NUCLEOTIDE_RADIUS, RADIUS)
    radius = torch.where(mask, radius, 0.0).to(wide(predicted).dtype)
    return 1.0 - ops.smooth_lddt(wide(predicted), wide(truth), radius, copies_at_once)
