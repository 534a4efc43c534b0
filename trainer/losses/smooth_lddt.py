"""Smooth lDDT loss (AF3 SI algorithm 27).

Distances are taken coordinate by coordinate: `torch.cdist` gives each pair a block of threads on a GPU, which
makes it fifty times slower than the memory.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megafold.trainer.ops.precision import wide

#: Distance errors at which the four sigmoids stand, Å.
THRESHOLDS = (0.5, 1.0, 2.0, 4.0)
#: Pairs closer than this in the ground truth count, Å; the first for atoms of nucleotides.
NUCLEOTIDE_RADIUS = 30.0
RADIUS = 15.0


def pair_distance(positions: Tensor, rows: slice = slice(None)) -> Tensor:
    """Distances [..., N, N] of positions [..., N, 3], for which no gradient is wanted.

    Only those rows of the matrix, if given.
    """
    return _length(_offsets(positions, rows))


def _offsets(positions: Tensor, rows: slice = slice(None)) -> list[Tensor]:
    """Differences [..., N, N] along x, y and z."""
    return [x[..., rows, None] - x[..., None, :] for x in positions.unbind(-1)]


def _length(offsets: list[Tensor]) -> Tensor:
    x, y, z = offsets
    return x.square().addcmul_(y, y).addcmul_(z, z).sqrt_()


class _Closeness(torch.autograd.Function):
    """Σ c·ε over the pairs, [B, S], of copies [B, S, N, 3], and its gradient, which is all that is kept."""

    @staticmethod
    def forward(
        ctx: Any, predicted: Tensor, true_distance: Tensor, counted: Tensor, copies_at_once: int
    ) -> Tensor:
        # Both orders of a pair have one distance: what either counts for goes to the other's gradient, too.
        weight = (counted | counted.mT).to(predicted.dtype).add_(counted & counted.mT).div_(2)
        parts = [
            _closeness(copies, true_distance.unsqueeze(1), weight.unsqueeze(1), ctx.needs_input_grad[0])
            for copies in predicted.split(copies_at_once, dim=1)
        ]
        if ctx.needs_input_grad[0]:
            ctx.save_for_backward(torch.cat([gradient for _, gradient in parts], dim=1))
        return torch.cat([score for score, _ in parts], dim=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (gradient,) = ctx.saved_tensors
        return grad[..., None, None] * gradient, None, None, None


def _closeness(
    predicted: Tensor, true_distance: Tensor, weight: Tensor, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Σ w·ε [B, s] of copies [B, s, N, 3], and its gradient; w [B, 1, N, N] is symmetric."""
    offsets = _offsets(predicted)
    distance = _length(offsets)
    difference = distance - true_distance
    error = difference.abs()
    near = torch.zeros_like(error)
    squares = torch.zeros_like(error)
    for threshold in THRESHOLDS:
        sigmoid = (threshold - error).sigmoid_()
        near += sigmoid
        if with_gradient:
            squares.addcmul_(sigmoid, sigmoid)
    score = (near * weight).sum(dim=(-1, -2)) / len(THRESHOLDS)
    if not with_gradient:
        return score, predicted
    # Of a sigmoid f the slope is f - f²; where two atoms coincide no direction is better than another.
    slope = squares.sub_(near).mul_(difference.sign_()).mul_(weight)
    slope = torch.where(distance > 0, slope.div_(distance), 0.0)
    along = [(slope * offset).sum(dim=-1) for offset in offsets]
    return score, torch.stack(along, dim=-1) * (2 / len(THRESHOLDS))


def smooth_lddt_loss(
    predicted: Tensor, truth: Tensor, mask: Tensor, is_nucleotide: Tensor, copies_at_once: int = 1
) -> Tensor:
    """1 - smooth lDDT, which needs no superposition.

    A perfect prediction scores 0.196, not 0: the sigmoids are not yet saturated there.
    Pairs of ``copies_at_once`` copies are in memory at a time, so memory is O(copies_at_once · N²) rather
    than O(S · N²).

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
    score: Tensor = _Closeness.apply(predicted, true_distance, counted, copies_at_once)
    return torch.where(count > 0, 1.0 - score / count.clamp(min=1), 0.0)
