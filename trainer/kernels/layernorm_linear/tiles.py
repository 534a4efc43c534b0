"""Tile sizes of the linear layer of normalised rows, by architecture, dtype, channels and outputs.

Few outputs (a pair bias, say) are a family of their own: one block holds them all.
"""

from dataclasses import dataclass
from typing import Final

from megafold.trainer.kernels.tables import Family, launch_options


@dataclass(frozen=True)
class Tile:
    """``rows`` by ``outputs`` at a time.

    ``programs``: of the weight's kernel, on a multiprocessor.
    ``instruction``: see :func:`~megafold.trainer.kernels.tables.launch_options`.
    """

    rows: int
    outputs: int
    warps: int
    stages: int
    programs: int = 2
    instruction: int | None = None

    def options(self) -> dict[str, int]:
        """What a launch takes of it beside the kernel's own parameters."""
        return launch_options(self.warps, self.stages, instruction=self.instruction)


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """One tile for each kernel."""

    forward: Tile
    input: Tile
    weight: Tile


#: Up to so many outputs there is one block of them.
NARROW: Final = 16
#: Fits the smallest shared memory (64 KiB on CDNA) in 2 bytes.
_SAFE: Final = Tiles(forward=Tile(64, 64, 4, 2), input=Tile(64, 64, 4, 1), weight=Tile(64, 64, 4, 1))
_SAFE_NARROW: Final = Tiles(forward=Tile(64, 16, 4, 1), input=Tile(64, 16, 4, 1), weight=Tile(64, 16, 4, 1))

#: By channels of the rows.
FAMILY: Final = Family("layernorm_linear", Tile, Tiles, lambda _itemsize, _channels: _SAFE)
FAMILY_NARROW: Final = Family(
    "layernorm_linear_narrow", Tile, Tiles, lambda _itemsize, _channels: _SAFE_NARROW
)


def tiles(target: str, itemsize: int, channels: int, outputs: int) -> Tiles:
    """The tiles for rows of ``channels`` and ``outputs`` in a dtype of ``itemsize`` bytes."""
    family = FAMILY_NARROW if outputs <= NARROW else FAMILY
    return family.find(target, itemsize, channels)
