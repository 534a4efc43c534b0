"""Tile sizes of the linear layer of normalised rows, by architecture, dtype and outputs; measured."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True)
class Tile:
    """``rows`` by ``outputs`` at a time."""

    rows: int
    outputs: int
    warps: int
    stages: int

    def options(self) -> dict[str, int]:
        """What a launch takes of it beside the kernel's own parameters."""
        return {"num_warps": self.warps, "num_stages": self.stages}


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """One tile for each kernel; ``programs``: of the weight's kernel, on a multiprocessor."""

    forward: Tile
    input: Tile
    weight: Tile
    programs: int = 2


#: Up to so many outputs there is one block of them.
_NARROW: Final = 16
#: Fits the smallest shared memory (64 KiB on CDNA) in 2 bytes.
_SAFE: Final = Tiles(forward=Tile(64, 64, 4, 2), input=Tile(64, 64, 4, 1), weight=Tile(64, 64, 4, 1))
_SAFE_NARROW: Final = Tiles(forward=Tile(64, 16, 4, 1), input=Tile(64, 16, 4, 1), weight=Tile(64, 16, 4, 1))
#: (architecture, bytes of the dtype, narrow) → tiles.
_TABLE: Final[dict[tuple[str, int, bool], Tiles]] = {
    ("cuda:90", 2, False): Tiles(
        forward=Tile(64, 64, 4, 3), input=Tile(64, 32, 4, 4), weight=Tile(32, 256, 8, 3)
    ),
    ("cuda:90", 2, True): Tiles(
        forward=Tile(64, 16, 4, 1), input=Tile(32, 16, 1, 1), weight=Tile(64, 16, 4, 2), programs=4
    ),
}


def tiles(target: str, item_size: int, outputs: int) -> Tiles:
    """The tiles for a layer of ``outputs`` in a dtype of ``item_size`` bytes."""
    narrow = outputs <= _NARROW
    return _TABLE.get((target, item_size, narrow)) or (_SAFE_NARROW if narrow else _SAFE)


def known_tiles(target: str) -> Mapping[tuple[str, int, bool], Tiles]:
    """All that :func:`tiles` may give on an architecture, with what it is for."""
    fallback = {("any", 2, False): _SAFE, ("any", 2, True): _SAFE_NARROW}
    return fallback | {key: found for key, found in _TABLE.items() if key[0] == target}
