"""Tile sizes of the kernels, by architecture, dtype, channels and length: a table's, or safe ones."""

from dataclasses import dataclass
from functools import cache
from typing import Final

import torch

from megafold.trainer.kernels.tables import Family, launch_options, table


@dataclass(frozen=True)
class Tile:
    """BQ queries by BK keys of ``rows`` rows at a time, and how a program runs.

    ``registers`` and ``instruction``: see :func:`~megafold.trainer.kernels.tables.launch_options`.
    """

    bq: int
    bk: int
    rows: int
    warps: int
    stages: int
    registers: int | None = None
    instruction: int | None = None

    def options(self) -> dict[str, int]:
        """What a launch takes of it beside the kernel's own parameters."""
        return launch_options(self.warps, self.stages, self.registers, self.instruction)


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """One tile for each kernel; ``query_bias``: of the query's where it also sums the bias gradient."""

    forward: Tile
    query: Tile
    query_bias: Tile
    key: Tile
    bias: Tile


def _alike(tile: Tile) -> Tiles:
    return Tiles(forward=tile, query=tile, query_bias=tile, key=tile, bias=tile)


#: Fits the smallest shared memory (64 KiB on CDNA) for 128 channels of float32.
_SAFE: Final = _alike(Tile(32, 32, 1, 4, 1))
#: The same for 2 bytes and up to 64 channels.
_SAFE_HALF: Final = _alike(Tile(64, 32, 1, 4, 2))
_SMALL: Final = _alike(Tile(16, 16, 1, 4, 1))
#: Up to this length the small tiles: larger ones would mostly hold padding.
_SHORT: Final = 16
_HALF_CHANNELS: Final = 64


def _safe(itemsize: int, padded: int) -> Tiles:
    return _SAFE_HALF if itemsize == 2 and padded <= _HALF_CHANNELS else _SAFE


#: By padded channels of a head.
FAMILY: Final = Family("evoattention", Tile, Tiles, _safe)


@cache
def architecture(device: torch.device) -> str:
    """``cuda:90``, ``hip:gfx942``; ``cpu`` for the interpreter."""
    if device.type != "cuda":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return "hip:" + str(properties.gcnArchName).split(":")[0]
    return f"cuda:{properties.major}{properties.minor}"


def bucket(target: str, length: int) -> int:
    """From which length on the tiles are those of ``length``, of whatever dtype and channels."""
    begins = {entry.length for entry in table(target).kernels.get(FAMILY.name, ())} | {_SHORT + 1}
    return max((begin for begin in begins if begin <= length), default=1)


def tiles(target: str, dtype: torch.dtype, padded: int, length: int) -> Tiles:
    """Tiles for inputs of ``dtype`` with ``padded`` channels; ``length`` is the larger of I and J."""
    return _SMALL if length <= _SHORT else FAMILY.find(target, dtype.itemsize, padded, length)
