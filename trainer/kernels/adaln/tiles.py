"""Tile sizes of adaptive layer norm, by architecture, dtype and channels: a table's, or a rule's."""

from dataclasses import dataclass
from typing import Final

from megafold.trainer.kernels.layernorm.tiles import padded
from megafold.trainer.kernels.tables import Family


@dataclass(frozen=True)
class Tile:
    """``rows`` at a time, and the warps of a program."""

    rows: int
    warps: int

    def options(self) -> dict[str, int]:
        """What a launch takes of it beside the kernel's own parameters."""
        return {"num_warps": self.warps}


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """One tile for each kernel."""

    forward: Tile
    backward: Tile


#: Elements of a tile: the backward holds five of them.
_ELEMENTS: Final = 2048
_ROWS: Final = 32
_WARPS: Final = 4


def _safe(itemsize: int, padded_channels: int) -> Tiles:
    """Bound by memory alone, they differ little between GPUs."""
    tile = Tile(max(1, min(_ROWS, _ELEMENTS // padded_channels)), _WARPS)
    return Tiles(forward=tile, backward=tile)


#: By padded channels.
FAMILY: Final = Family("adaln", Tile, Tiles, _safe)


def tiles(target: str, itemsize: int, channels: int) -> Tiles:
    """The tiles for rows of ``channels`` in a dtype of ``itemsize`` bytes."""
    return FAMILY.find(target, itemsize, padded(channels))
