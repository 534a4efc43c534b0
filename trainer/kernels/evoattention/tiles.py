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
    """BQ queries by BK keys, and how a program runs."""

    bq: int
    bk: int
    warps: int
    stages: int


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """One tile for each kernel."""

    forward: Tile
    query: Tile
    key: Tile
    bias: Tile


#: Fits the smallest shared memory (64 KiB on CDNA) for 128 channels of float32.
_SAFE: Final = Tiles(
    forward=Tile(32, 32, 4, 1), query=Tile(32, 32, 4, 1), key=Tile(32, 32, 4, 1), bias=Tile(32, 32, 4, 1)
)
_SMALL: Final = Tiles(
    forward=Tile(16, 16, 4, 1), query=Tile(16, 16, 4, 1), key=Tile(16, 16, 4, 1), bias=Tile(16, 16, 4, 1)
)
#: (architecture, bytes of the dtype, padded channels) → tiles.
_TABLE: Final = {
    ("cuda:90", 2, 32): Tiles(
        forward=Tile(128, 64, 4, 3),
        query=Tile(64, 64, 4, 3),
        key=Tile(32, 128, 4, 3),
        bias=Tile(64, 64, 4, 3),
    ),
}
#: Up to this length the small tiles, below the other the safe ones: larger ones would mostly hold padding.
_SHORT: Final = 16
_MEDIUM: Final = 64


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
    found = _TABLE.get((target, dtype.itemsize, padded))
    return found if found is not None and length >= _MEDIUM else _SAFE


def known_tiles(target: str) -> Mapping[tuple[str, int, int], Tiles]:
    """All that :func:`tiles` may give on an architecture, with what it is for."""
    fallback = {("any", size, padded): _SAFE for size, padded in ((2, 128), (4, 128))}
    return fallback | {key: found for key, found in _TABLE.items() if key[0] == target}
