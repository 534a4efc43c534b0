"""Tile sizes of the projections and their gradients, by architecture, dtype and channels."""

from dataclasses import dataclass
from typing import Final

import torch

from megafold.trainer.kernels.gated_output.tiles import Tile, safe_tile
from megafold.trainer.kernels.tables import Family


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """One tile for each kernel."""

    project: Tile
    input_gradient: Tile
    weight_gradient: Tile


def _safe(itemsize: int, padded: int) -> Tiles:
    tile = safe_tile(itemsize, padded)
    return Tiles(project=tile, input_gradient=tile, weight_gradient=tile)


#: By z's padded channels.
FAMILY: Final = Family("triangle_attention", Tile, Tiles, _safe)


def tiles(target: str, dtype: torch.dtype, padded: int) -> Tiles:
    """The tiles for inputs of ``dtype`` with ``padded`` channels."""
    return FAMILY.find(target, dtype.itemsize, padded)
