"""Tile sizes of layer normalisation, by channels: bound by memory alone, they differ little between GPUs."""

from dataclasses import dataclass
from typing import Final

#: Elements of a tile, and of a warp's share: few, so that many programs have loads in flight.
_ELEMENTS: Final = 2048
_WARP_ELEMENTS: Final = 1024
#: The most rows of a tile, for few channels.
_ROWS: Final = 64
#: Programs of the backward on a multiprocessor. Each holds its sums of the parameters' gradients.
BACKWARD_PROGRAMS: Final = 12


@dataclass(frozen=True)
class Tile:
    """``rows`` at a time, and the warps of a program."""

    rows: int
    warps: int


def tile(channels: int) -> Tile:
    """The tile for rows of ``channels``."""
    padded = 1 << (channels - 1).bit_length()
    rows = max(1, min(_ROWS, _ELEMENTS // padded))
    return Tile(rows, max(1, rows * padded // _WARP_ELEMENTS))
