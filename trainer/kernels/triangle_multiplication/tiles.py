"""Tile sizes of the kernels, by architecture, dtype and channels: found by measuring, kept as data.

No length enters: a block is a run of positions, of which even a short sequence has thousands. An architecture
that is not in the table gets tiles that fit everywhere.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import torch


@dataclass(frozen=True)
class Tile:
    """``rows`` positions by ``channels`` at a time, and how a program runs.

    ``resident``: how many programs share a multiprocessor, of the kernels that keep sums; ``registers`` caps
    those of a thread, None: no cap.
    """

    rows: int
    channels: int
    warps: int
    stages: int
    resident: int = 1
    registers: int | None = None

    def options(self) -> dict[str, int]:
        """What a launch takes of it beside the kernel's own parameters."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options if self.registers is None else options | {"maxnreg": self.registers}


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """One tile for each kernel."""

    project: Tile
    output: Tile
    output_gradient: Tile
    input_gradient: Tile
    weight_gradient: Tile
    output_weight_gradient: Tile


def _alike(rows: int, channels: int, warps: int, stages: int, resident: int) -> Tiles:
    tile = Tile(rows, channels, warps, stages, resident)
    return Tiles(
        project=tile,
        output=tile,
        output_gradient=tile,
        input_gradient=tile,
        weight_gradient=tile,
        output_weight_gradient=tile,
    )


#: Fits the smallest shared memory (64 KiB on CDNA) for 128 channels of float32.
_SAFE: Final = _alike(16, 16, 4, 1, 1)
#: The same for 2 bytes.
_SAFE_HALF: Final = _alike(32, 32, 4, 1, 1)
#: Measured on an H200.
_HOPPER: Final = Tiles(
    project=Tile(128, 32, 8, 2),
    output=Tile(64, 32, 4, 1),
    output_gradient=Tile(64, 32, 4, 2, registers=168),
    input_gradient=Tile(64, 64, 4, 2),
    weight_gradient=Tile(64, 32, 4, 3, 3, 168),
    output_weight_gradient=Tile(64, 64, 4, 4, 2),
)
#: (architecture, bytes of the dtype, the larger of Z and C) → tiles.
_TABLE: Final = {
    ("cuda:90", 2, 128): _HOPPER,
    ("cuda:90", 2, 64): _HOPPER,
    ("cuda:80", 2, 128): _alike(64, 32, 4, 2, 2),
    ("cuda:80", 2, 64): _alike(64, 32, 4, 2, 2),
}


def tiles(target: str, dtype: torch.dtype, channels: int) -> Tiles:
    """Tiles for inputs of ``dtype``; ``channels`` is the larger of Z and C."""
    found = _TABLE.get((target, dtype.itemsize, channels))
    return found or (_SAFE_HALF if dtype.itemsize == 2 else _SAFE)


def known_tiles(target: str) -> Mapping[tuple[str, int, int], Tiles]:
    """All that :func:`tiles` may give on an architecture, with what it is for."""
    fallback = {("any", 2, 128): _SAFE_HALF, ("any", 4, 128): _SAFE}
    return fallback | {key: found for key, found in _TABLE.items() if key[0] == target}
