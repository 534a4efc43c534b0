"""The few collectives that the training loop needs, under torchrun or alone.

Every SP group draws its own samples; its ranks share the work on each. Gradients are summed over a group
and averaged over the groups. Without sequence parallelism a group is one rank. Alone, all of it is free.
"""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.rendezvous import rendezvous

_BUCKET_ELEMENTS = 2**24


@dataclass(frozen=True)
class Ranks:
    """This process among its peers.

    Attributes:
        rank: 0 to ``world`` - 1.
        world: number of processes.
        local_rank: rank among those on this machine, which is also its GPU.
        sp: consecutive ranks that share a sample; divides ``world``.
    """

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    sp: int = 1

    @classmethod
    def from_environment(cls) -> "Ranks":
        """What torchrun says in ``RANK``, ``WORLD_SIZE`` and ``LOCAL_RANK``; alone without it."""
        return cls(*(int(os.environ.get(name, default)) for name, default in _VARIABLES))

    @property
    def dp(self) -> int:
        """Groups that work on a sample each."""
        return self.world // self.sp

    @property
    def dp_rank(self) -> int:
        """This rank's group among them."""
        return self.rank // self.sp

    @property
    def is_first(self) -> bool:
        """True on the rank that writes files and talks."""
        return self.rank == 0

    def start(self, device: torch.device) -> bool:
        """Join the process group, if there are peers and none exists yet; true if this call made it."""
        if self.world == 1 or dist.is_initialized():
            return False
        # torchrun may keep its store when it starts the ranks anew, with the addresses of those that died.
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store, rank, world = next(rendezvous("env://"))
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            store=dist.PrefixStore(f"attempt-{attempt}", store),
            rank=rank,
            world_size=world,
        )
        return True

    def sum(self, values: Tensor) -> Tensor:
        """Sum over the ranks, in place."""
        if self.world > 1:
            dist.all_reduce(values)
        return values

    @torch.no_grad()
    def average_gradients(self, parameters: Iterable[nn.Parameter]) -> None:
        """Replace every gradient by its mean over the groups, summed over the ranks of each.

        Every parameter must have a gradient.
        """
        if self.world == 1:
            return
        for bucket in _buckets([p.grad for p in parameters if p.grad is not None]):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket])
            dist.all_reduce(flat)
            flat /= self.dp
            for gradient, mean in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                gradient.copy_(mean.view_as(gradient))

    def same_weights(self, model: nn.Module) -> None:
        """Give every rank the first one's parameters and buffers."""
        if self.world > 1:
            for value in model.state_dict().values():
                dist.broadcast(value, src=0)

    def gather(self, value: Any) -> list[Any]:
        """A small picklable value of every rank, in rank order, on every rank."""
        if self.world == 1:
            return [value]
        values: list[Any] = [None] * self.world
        dist.all_gather_object(values, value)
        return values


_VARIABLES = (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"))


def _buckets(gradients: list[Tensor]) -> list[list[Tensor]]:
    """Gradients in groups of one dtype with at most so many elements, or of one gradient."""
    buckets: list[list[Tensor]] = []
    filled = 0
    for gradient in gradients:
        fits = filled + gradient.numel() <= _BUCKET_ELEMENTS
        if buckets and fits and buckets[-1][0].dtype == gradient.dtype:
            buckets[-1].append(gradient)
            filled += gradient.numel()
        else:
            buckets.append([gradient])
            filled = gradient.numel()
    return buckets
