"""Distogram loss (AF3 SI 4.4; AlphaFold 2 SI 1.9.8)."""

from collections.abc import Mapping

import torch
from torch import Tensor

from megafold.trainer.losses.diffusion import resolved_atoms
from megafold.trainer.losses.term import LossTerm, cross_entropy
from megafold.trainer.model.primitives import at_atoms
from megafold.trainer.ops.precision import wide
from megafold.trainer.ops.smooth_lddt import pair_distance

#: Bins of equal width from 2 to 22 Å; the first and the last also take what lies beyond.
FIRST_EDGE = 2.0
LAST_EDGE = 22.0


def distogram_bins(distance: Tensor, n_bins: int = 64) -> Tensor:
    """Bin of each distance (Å), int64 of the same shape; a distance on an edge falls into the lower bin."""
    width = (LAST_EDGE - FIRST_EDGE) / n_bins
    edges = FIRST_EDGE + width * torch.arange(1, n_bins, device=distance.device, dtype=distance.dtype)
    return torch.bucketize(distance, edges)


def distogram_loss(batch: Mapping[str, Tensor], logits: Tensor, rows: slice = slice(None)) -> LossTerm:
    """Cross-entropy of the binned distances between the tokens' representative atoms.

    The mean runs over all ordered pairs of tokens whose representative atoms are resolved, a token with
    itself included, as in AlphaFold 2.

    Args:
        batch: features as in the sample schema, with a leading batch axis.
        logits: [B, N_token, N_token, n_bins]; 64 bins in AF3.
        rows: with these rows of the logits alone: their part of the loss. The parts of all rows add up.
    """
    atom = batch["rep_atom"].long()
    mask = batch["token_mask"] & torch.gather(resolved_atoms(batch), 1, atom)
    positions = at_atoms(wide(batch["coords"]), atom)
    distance = pair_distance(torch.where(mask.unsqueeze(-1), positions, 0.0), rows)
    bins = distogram_bins(distance, logits.shape[-1])
    entropy = cross_entropy(logits, bins)
    kept = torch.where(mask[:, rows, None] & mask[:, None, :], entropy, 0.0)
    count = mask.sum(dim=-1).square().clamp(min=1)
    return LossTerm(kept.sum(dim=(-1, -2)) / count, mask.any(dim=-1))
