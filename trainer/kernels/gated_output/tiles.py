"""Tile sizes of the kernels that take runs of positions, by architecture, dtype and channels."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from megafold.trainer.kernels.tables import table


@dataclass(frozen=True)
class Tile:
    """``rows`` positions by ``columns`` channels at a time, and how a program runs.

    ``programs``: how many there are, of kernels that keep sums over many tiles.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    programs: int

    def options(self) -> dict[str, int]:
        """What a launch takes of it beside the kernel's own parameters."""
        return {"num_warps": self.warps, "num_stages": self.stages}


#: Fits the smallest shared memory (64 KiB on CDNA) for 256 channels of float32.
_SAFE: Final = Tile(16, 32, 4, 1, 64)
#: The same for 2 bytes and up to 128 channels.
_SAFE_HALF: Final = Tile(32, 32, 4, 1, 64)
_HALF_CHANNELS: Final = 128


@cache
def tiles_of(family: str, target: str, dtype: torch.dtype, padded: int) -> Mapping[str, Tile]:
    """A family's tiles by role, for inputs of ``dtype`` whose widest side has ``padded`` channels.

    A role that the table does not have gets one that fits everywhere.
    """
    found = table(target).find(family, dtype.itemsize, padded, 1) or {}
    return {role: Tile(**tile) for role, tile in found.items()}


def tile_of(family: str, role: str, target: str, dtype: torch.dtype, padded: int) -> Tile:
    """One role's tile of :func:`tiles_of`."""
    safe = _SAFE_HALF if dtype.itemsize == 2 and padded <= _HALF_CHANNELS else _SAFE
    return tiles_of(family, target, dtype, padded).get(role, safe)
