"""The device mesh: DP groups of samples times SP groups that share one sample's pair representation."""

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from megafold.trainer.errors import ConfigError


@dataclass(frozen=True)
class Peers:
    """The ranks that share one sample, as one of them sees them.

    Attributes:
        rank: 0 to ``size`` - 1.
        size: P.
        group: their process group; None where there is one rank alone, which needs none.
    """

    rank: int = 0
    size: int = 1
    group: dist.ProcessGroup | None = None


@dataclass(frozen=True)
class ParallelMesh:
    """DP × SP ranks. Consecutive ranks form an SP group, so that it lies within a machine if it can.

    Attributes:
        dp_rank: which sample of a step this rank works on.
        dp: samples that are worked on at once.
        sp: the ranks that share this rank's sample.
        devices: torch's mesh of all ranks, with the dimensions ``dp`` and ``sp``; None for one rank.
    """

    dp_rank: int = 0
    dp: int = 1
    sp: Peers = Peers()
    devices: DeviceMesh | None = None

    @classmethod
    def create(cls, device: torch.device, sp: int) -> "ParallelMesh":
        """The mesh of all ranks of the default process group. Every rank calls this alike.

        Raises:
            ConfigError: the number of ranks is not a multiple of ``sp``.
        """
        if not dist.is_initialized():
            require_divisible(1, sp)
            return cls()
        world = dist.get_world_size()
        require_divisible(world, sp)
        devices = init_device_mesh(device.type, (world // sp, sp), mesh_dim_names=("dp", "sp"))
        peers = Peers(devices.get_local_rank("sp"), sp, devices.get_group("sp") if sp > 1 else None)
        return cls(devices.get_local_rank("dp"), world // sp, peers, devices)


def require_divisible(world: int, sp: int) -> None:
    """Refuse a number of ranks that SP groups of ``sp`` do not fill.

    Raises:
        ConfigError: with what to do.
    """
    if sp < 1 or world % sp:
        raise ConfigError(
            f"sp is {sp} and there are {world} ranks: start a multiple of {max(1, sp)} ranks "
            f"(torchrun --nproc-per-node), or choose an sp that divides {world}"
        )
