"""Tile sizes of the kernels that take runs of positions, by architecture, dtype and channels."""

from dataclasses import dataclass
from typing import Final

import torch

from megafold.trainer.kernels.tables import Family, launch_options


@dataclass(frozen=True)
class Tile:
    """``rows`` positions by ``columns`` channels at a time, and how a program runs.

    ``programs``: how many there are, of kernels that keep sums over many tiles. The gated output takes all
    columns forward; backward, columns / ``columns`` programs share the positions.
    ``fetch``: the next tile is fetched into the L2 cache, by its backward alone; NVIDIA GPUs alone.
    ``instruction``: see :func:`~megafold.trainer.kernels.tables.launch_options`.
    """

    rows: int
    columns: int
    warps: int
    stages: int
    programs: int
    fetch: bool = False
    instruction: int | None = None

    def options(self) -> dict[str, int]:
        """What a launch takes of it beside the kernel's own parameters."""
        return launch_options(self.warps, self.stages, instruction=self.instruction)


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """One tile for each kernel."""

    forward: Tile
    backward: Tile


#: Fits the smallest shared memory (64 KiB on CDNA) for 256 channels of float32.
_SAFE: Final = Tile(16, 32, 4, 1, 64)
#: The same for 2 bytes and up to 128 channels.
_SAFE_HALF: Final = Tile(32, 32, 4, 1, 64)
_HALF_CHANNELS: Final = 128


def safe_tile(itemsize: int, padded: int) -> Tile:
    """A tile that fits every GPU, for elements of ``itemsize`` bytes and ``padded`` channels."""
    return _SAFE_HALF if itemsize == 2 and padded <= _HALF_CHANNELS else _SAFE


def _safe(itemsize: int, padded: int) -> Tiles:
    tile = safe_tile(itemsize, padded)
    return Tiles(forward=tile, backward=tile)


#: By the widest side's padded channels.
FAMILY: Final = Family("gated_output", Tile, Tiles, _safe)


def tiles(target: str, dtype: torch.dtype, padded: int) -> Tiles:
    """The tiles for inputs of ``dtype`` whose widest side has ``padded`` channels."""
    return FAMILY.find(target, dtype.itemsize, padded)
