"""What the ranks of a pool run: sharded against serial."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megafold.trainer.parallel.mesh import Peers


@cache
def peers_of(size: int) -> Peers | None:
    """The first ``size`` ranks as an SP group; None on the others."""
    rank = dist.get_rank()
    group = dist.new_group(list(range(size))) if size > 1 else None
    return Peers(rank, size, group) if rank < size else None


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def error(value: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected number where that is above 1."""
    assert value.shape == expected.shape
    if not value.numel():
        return 0.0
    value, expected = value.detach(), expected.detach()
    difference = (value - expected).abs().max()
    return float(difference / expected.abs().max().clamp(min=1))


def summed(x: Tensor, peers: Peers) -> Tensor:
    total = x.clone()
    if peers.size > 1:
        dist.all_reduce(total, group=peers.group)
    return total


def all_summed(tensors: Mapping[str, Tensor], peers: Peers) -> dict[str, Tensor]:
    """Each tensor's sum over the ranks, in one exchange."""
    total = summed(torch.cat([x.detach().flatten() for x in tensors.values()]), peers)
    parts = total.split([x.numel() for x in tensors.values()])
    return {name: part.view(x.shape) for (name, x), part in zip(tensors.items(), parts, strict=True)}


# --------------------------------------------------------------------------------------------------
# Collectives


class SumOverRanks(torch.autograd.Function):
    """Sum of every rank's tensor, which every rank differentiates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class Same(torch.autograd.Function):
    """One tensor that all ranks have; its gradient is the sum of theirs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        total = gradients[0].clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def gradcheck_over_ranks(function: Callable[[Tensor], Tensor], inputs: Tensor, peers: Peers) -> bool:
    """gradcheck of what the ranks compute together.

    The map is from all ranks' inputs [P, ...] to numbers that each depend on what every rank gets: random
    projections of ``function(inputs[rank])``, another on each rank, summed over the ranks.
    """

    def together(x: Tensor) -> Tensor:
        out = function(Same.apply(x, peers.group)[peers.rank].sin())
        weight = rand(3, *out.shape, seed=peers.rank)
        projected = (weight * (out + out**2)).flatten(1).sum(1)
        summed: Tensor = SumOverRanks.apply(projected, peers.group)
        return summed

    return bool(torch.autograd.gradcheck(together, inputs.requires_grad_()))
