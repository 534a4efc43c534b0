"""Tile sizes of the fused transition, by architecture, dtype and channels: a table's, or safe ones."""

from dataclasses import dataclass
from typing import Final

from megafold.trainer.kernels.tables import Family, launch_options


@dataclass(frozen=True)
class Tile:
    """``rows`` by ``hidden`` channels at a time.

    ``held``: the rows stay in registers, in the matrix units' layout, and not in shared memory.
    ``resident``: programs that a multiprocessor runs at once.
    ``registers`` and ``instruction``: see :func:`~megafold.trainer.kernels.tables.launch_options`.
    """

    rows: int
    hidden: int
    warps: int
    stages: int
    held: bool = False
    registers: int | None = None
    resident: int = 2
    instruction: int | None = None

    def options(self) -> dict[str, int]:
        """What a launch takes of it beside the kernel's own parameters."""
        return launch_options(self.warps, self.stages, self.registers, self.instruction)


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """One tile for each kernel."""

    forward: Tile
    input: Tile
    weights: Tile

    @property
    def resident(self) -> int:
        """Programs of the input's kernel that a multiprocessor runs at once."""
        return self.input.resident

    def divide(self, hidden: int) -> bool:
        """Whether ``hidden`` channels are whole numbers of every tile's."""
        return all(hidden % tile.hidden == 0 for tile in (self.forward, self.input, self.weights))


#: Fits the smallest shared memory (64 KiB on CDNA).
_SAFE: Final = Tiles(forward=Tile(64, 32, 4, 1), input=Tile(64, 32, 4, 1), weights=Tile(64, 64, 4, 2))
#: Of float32, which is fused in the interpreter alone.
_SAFE_WIDE: Final = Tiles(forward=Tile(64, 64, 4, 1), input=Tile(64, 64, 4, 1), weights=Tile(64, 64, 4, 1))
#: Every number of rows a strip may have is a multiple of every tile's.
ROW_MULTIPLE: Final = 128

FAMILY: Final = Family(
    "transition", Tile, Tiles, lambda itemsize, _channels: _SAFE if itemsize == 2 else _SAFE_WIDE
)


def tiles(target: str, item_size: int, channels: int) -> Tiles:
    """The tiles for rows of ``channels`` in a dtype of ``item_size`` bytes."""
    return FAMILY.find(target, item_size, channels)
