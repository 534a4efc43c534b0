"""Tile sizes of layer normalisation, by channels: bound by memory alone, they differ little between GPUs."""

from dataclasses import dataclass
from typing import Final

#: Elements of a tile that keep enough loads in flight and still leave registers for the backward's sums.
_ELEMENTS: Final = 4096
#: The most rows of a tile, for few channels.
_ROWS: Final = 64
#: Programs of the backward on a multiprocessor. Each holds its sums of the parameters' gradients.
BACKWARD_PROGRAMS: Final = 4


@dataclass(frozen=True)
class Tile:
    """``rows`` at a time, and the warps of a program."""

    rows: int
    warps: int


def tile(channels: int) -> Tile:
    """The tile for rows of ``channels``."""
    padded = 1 << (channels - 1).bit_length()
    return Tile(max(1, min(_ROWS, _ELEMENTS // padded)), 4 if padded <= 2 * _ELEMENTS // 4 else 8)
