"""Tile sizes of the fused transition, by architecture, bytes of the dtype and channels; measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Tile:
    """``rows`` by ``hidden`` channels at a time.

    ``held``: the rows stay in registers, in the matrix units' layout, and not in shared memory.
    ``registers`` caps those of a thread, so that more programs share a multiprocessor; None: no cap.
    """

    rows: int
    hidden: int
    warps: int
    stages: int
    held: bool = False
    registers: int | None = None

    def options(self) -> dict[str, int]:
        """What a launch takes of it beside the kernel's own parameters."""
        options = {"num_warps": self.warps, "num_stages": self.stages}
        return options if self.registers is None else options | {"maxnreg": self.registers}


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """One tile for each kernel.

    ``resident``: programs of the input's kernel that a multiprocessor runs at once.
    """

    forward: Tile
    input: Tile
    weights: Tile
    resident: int = 2

    def divide(self, hidden: int) -> bool:
        """Whether ``hidden`` channels are whole numbers of every tile's."""
        return all(hidden % tile.hidden == 0 for tile in (self.forward, self.input, self.weights))


#: Fits the smallest shared memory (64 KiB on CDNA).
_SAFE: Final = Tiles(forward=Tile(64, 32, 4, 1), input=Tile(64, 32, 4, 1), weights=Tile(64, 64, 4, 2))
#: Of float32, which is fused in the interpreter alone.
_SAFE_WIDE: Final = Tiles(forward=Tile(64, 64, 4, 1), input=Tile(64, 64, 4, 1), weights=Tile(64, 64, 4, 1))
#: (architecture, bytes of the dtype, channels) → tiles.
_TABLE: Final[dict[tuple[str, int, int], Tiles]] = {
    ("cuda:90", 2, 128): Tiles(
        forward=Tile(64, 32, 4, 3, held=True, registers=168),
        input=Tile(64, 32, 4, 3, held=True),
        weights=Tile(64, 128, 4, 4),
    ),
    ("cuda:90", 2, 64): Tiles(
        forward=Tile(64, 32, 4, 3, held=True),
        input=Tile(64, 32, 4, 3, held=True),
        weights=Tile(64, 128, 4, 4),
    ),
    ("cuda:80", 2, 128): Tiles(
        forward=Tile(64, 32, 4, 3), input=Tile(64, 32, 4, 2), weights=Tile(64, 128, 4, 3)
    ),
    ("cuda:80", 2, 64): Tiles(
        forward=Tile(64, 32, 4, 3), input=Tile(64, 32, 4, 2), weights=Tile(64, 128, 4, 3)
    ),
}
#: Every number of rows a strip may have is a multiple of every tile's.
ROW_MULTIPLE: Final = 128


def tiles(target: str, item_size: int, channels: int) -> Tiles:
    """The tiles for rows of ``channels`` in a dtype of ``item_size`` bytes."""
    return _TABLE.get((target, item_size, channels)) or (_SAFE if item_size == 2 else _SAFE_WIDE)


def known_tiles(target: str) -> Mapping[tuple[str, int, int], Tiles]:
    """All that :func:`tiles` may give on an architecture, with what it is for."""
    return {("any", 2, 128): _SAFE} | {key: found for key, found in _TABLE.items() if key[0] == target}
