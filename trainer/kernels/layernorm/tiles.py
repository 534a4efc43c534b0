"""Tile sizes of layer normalisation, by architecture, dtype and channels: a table's, or a rule's."""

from dataclasses import dataclass
from typing import Final

from megafold.trainer.kernels.tables import Family


@dataclass(frozen=True)
class Tile:
    """``rows`` at a time, and the warps of a program.

    ``programs``: of the backward on a multiprocessor. Each holds its sums of the parameters' gradients.
    """

    rows: int
    warps: int
    programs: int = 12

    def options(self) -> dict[str, int]:
        """What a launch takes of it beside the kernel's own parameters."""
        return {"num_warps": self.warps}


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """One tile for each kernel."""

    forward: Tile
    backward: Tile


#: Elements of a tile, and of a warp's share: few, so that many programs have loads in flight.
_ELEMENTS: Final = 2048
_WARP_ELEMENTS: Final = 1024
#: The most rows of a tile, for few channels.
_ROWS: Final = 64


def padded(channels: int) -> int:
    """The power of two that holds ``channels``."""
    return 1 << (channels - 1).bit_length()


def _safe(itemsize: int, padded_channels: int) -> Tiles:
    """Bound by memory alone, they differ little between GPUs."""
    rows = max(1, min(_ROWS, _ELEMENTS // padded_channels))
    tile = Tile(rows, max(1, rows * padded_channels // _WARP_ELEMENTS))
    return Tiles(forward=tile, backward=tile)


#: By padded channels.
FAMILY: Final = Family("layernorm", Tile, Tiles, _safe)


def tiles(target: str, itemsize: int, channels: int) -> Tiles:
    """The tiles for rows of ``channels`` in a dtype of ``itemsize`` bytes."""
    return FAMILY.find(target, itemsize, padded(channels))
