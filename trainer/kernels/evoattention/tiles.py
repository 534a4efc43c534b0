"""Tile sizes of the kernels, by architecture, dtype, channels and length: found by measuring, kept as data.

Lengths fall into buckets, so that no length of its own is ever compiled for. An architecture that is not in
the table gets tiles that fit everywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Final

import torch


@dataclass(frozen=True)
class Tile:
    """BQ queries by BK keys of ``rows`` rows at a time, and how a program runs.

    ``registers`` caps those of a thread, so that more programs share a multiprocessor; None: no cap.
    """

    bq: int
    bk: int
    rows: int
    warps: int
    stages: int
    registers: int | None = None

    def options(self) -> dict[str, int]:
        """What a launch takes of it beside the kernel's own parameters."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options if self.registers is None else options | {"maxnreg": self.registers}


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
#: (architecture, bytes of the dtype, padded channels) → tiles.
_TABLE: Final = {
    ("cuda:90", 2, 32): Tiles(
        forward=Tile(64, 64, 2, 4, 3),
        query=Tile(64, 64, 1, 4, 3),
        query_bias=Tile(64, 32, 2, 4, 3, 152),
        key=Tile(64, 64, 1, 4, 3, 152),
        bias=Tile(64, 64, 1, 4, 3),
    ),
    ("cuda:90", 2, 64): Tiles(
        forward=Tile(64, 64, 1, 4, 3),
        query=Tile(64, 64, 1, 4, 2),
        query_bias=Tile(64, 32, 1, 4, 3, 168),
        key=Tile(64, 64, 1, 4, 2),
        bias=Tile(64, 64, 1, 4, 2),
    ),
}
#: Up to this length the small tiles, below the other the safe ones: larger ones would mostly hold padding.
_SHORT: Final = 16
_MEDIUM: Final = 64
_HALF_CHANNELS: Final = 64


@cache
def architecture(device: torch.device) -> str:
    """``cuda:90``, ``hip:gfx942``; ``cpu`` for the interpreter."""
    if device.type != "cuda":
        return "cpu"
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        return "hip:" + str(properties.gcnArchName).split(":")[0]
    return f"cuda:{properties.major}{properties.minor}"


def tiles(target: str, dtype: torch.dtype, padded: int, length: int) -> Tiles:
    """Tiles for inputs of ``dtype`` with ``padded`` channels; ``length`` is the larger of I and J."""
    if length <= _SHORT:
        return _SMALL
    found = _TABLE.get((target, dtype.itemsize, padded)) if length >= _MEDIUM else None
    return found or (_SAFE_HALF if dtype.itemsize == 2 and padded <= _HALF_CHANNELS else _SAFE)


def known_tiles(target: str) -> Mapping[tuple[str, int, int], Tiles]:
    """All that :func:`tiles` may give on an architecture, with what it is for."""
    fallback = {("any", 2, _HALF_CHANNELS): _SAFE_HALF, ("any", 2, 128): _SAFE, ("any", 4, 128): _SAFE}
    return fallback | {key: found for key, found in _TABLE.items() if key[0] == target}
