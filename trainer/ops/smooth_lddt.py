"""Smooth lDDT: how well distances between atoms are met (AF3 SI algorithm 27).

Distances are taken coordinate by coordinate: `torch.cdist` gives each pair a block of threads on a GPU, which
makes it fifty times slower than the memory.
"""

from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megafold.trainer.ops.registry import operator

#: Distance errors at which the four sigmoids stand, Å.
THRESHOLDS: Final = (0.5, 1.0, 2.0, 4.0)


@operator
def smooth_lddt(predicted: Tensor, truth: Tensor, radius: Tensor, copies_at_once: int = 1) -> Tensor:
    """The mean over pairs of atoms of ε = Σ sigmoid(t - error of their distance) / 4, t of 0.5, 1, 2 and 4 Å.

    A pair (i, j) counts if both atoms are present and their true distance is below i's radius.

    Args:
        predicted: positions [B, S, N, 3] of S copies, Å.
        truth: [B, N, 3], Å.
        radius: [B, N], Å; 0 for an absent atom, whose positions do not matter.
        copies_at_once: whose pairs are in memory together; 48 copies of a long crop would not fit.

    Returns:
        [B, S]; 1 where no pair counts. Its gradient is found with its value: nothing of N² numbers is kept.
    """
    present = radius > 0
    predicted = torch.where(present[:, None, :, None], predicted, 0.0)
    with torch.no_grad():
        true_distance = pair_distance(torch.where(present.unsqueeze(-1), truth, 0.0))
        counted = (true_distance < radius.unsqueeze(-1)) & present.unsqueeze(-2)
        counted &= ~torch.eye(radius.shape[-1], dtype=torch.bool, device=radius.device)
        count = counted.sum(dim=(-1, -2)).unsqueeze(-1)
    return mean_of_pairs(_closeness(predicted, true_distance, counted, copies_at_once), count)


def mean_of_pairs(total: Tensor, count: Tensor) -> Tensor:
    """``total`` by ``count``; 1 where there are none."""
    return torch.where(count > 0, total / count.clamp(min=1), 1.0)


def pair_distance(positions: Tensor, rows: slice = slice(None)) -> Tensor:
    """Distances [..., N, N] of positions [..., N, 3], for which no gradient is wanted.

    Only those rows of the matrix, if given.
    """
    return distances(positions[..., rows, :], positions)


def distances(first: Tensor, second: Tensor) -> Tensor:
    """Distances [..., I, J] of positions [..., I, 3] and [..., J, 3], for which no gradient is wanted."""
    return _length(_offsets(first, second))


def _offsets(first: Tensor, second: Tensor) -> list[Tensor]:
    """Differences [..., I, J] along x, y and z."""
    pairs = zip(first.unbind(-1), second.unbind(-1), strict=True)
    return [x[..., :, None] - y[..., None, :] for x, y in pairs]


def _length(offsets: list[Tensor]) -> Tensor:
    x, y, z = offsets
    return x.square().addcmul_(y, y).addcmul_(z, z).sqrt_()


@torch.compiler.disable  # a compiler would have to see through the function, for which it has no use
def _closeness(predicted: Tensor, true_distance: Tensor, counted: Tensor, copies_at_once: int) -> Tensor:
    result: Tensor = _Closeness.apply(predicted, true_distance, counted, copies_at_once)
    return result


class _Closeness(torch.autograd.Function):
    """Σ c·ε over the pairs, [B, S], of copies [B, S, N, 3], and its gradient, which is all that is kept."""

    @staticmethod
    def forward(
        ctx: Any, predicted: Tensor, true_distance: Tensor, counted: Tensor, copies_at_once: int
    ) -> Tensor:
        # Both orders of a pair have one distance: what either counts for goes to the other's gradient, too.
        weight = (counted | counted.mT).to(predicted.dtype).add_(counted & counted.mT).div_(2)
        parts = [
            _of_copies(copies, true_distance.unsqueeze(1), weight.unsqueeze(1), ctx.needs_input_grad[0])
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


def _of_copies(
    predicted: Tensor, true_distance: Tensor, weight: Tensor, with_gradient: bool
) -> tuple[Tensor, Tensor]:
    """Σ w·ε [B, s] of copies [B, s, N, 3], and its gradient; w [B, 1, N, N] is symmetric."""
    offsets = _offsets(predicted, predicted)
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
