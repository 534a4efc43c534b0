"""Tile sizes as data: one file for each architecture, made by ``megafold tune``.

A file lists for each family of kernels which tiles to take for a dtype's bytes, a number of channels and
lengths from some length on. What a file does not say is left to the family's own tiles, which fit
everywhere; so is all of an architecture without a file. Lengths fall into buckets, so that none is ever
compiled for.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, Final

from megafold.trainer.errors import ConfigError

#: What a tile is in a file: the fields of the family's tile.
TileFields = Mapping[str, Any]
FOLDER: Final = Path(str(resources.files(__name__)))


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Tiles by role, for inputs of ``bytes`` an element, ``channels`` and lengths from ``length`` on."""

    bytes: int
    channels: int
    length: int
    tiles: Mapping[str, TileFields]


@dataclass(frozen=True, kw_only=True)
class Table:
    """An architecture's tiles.

    Attributes:
        target: ``cuda:90``, ``hip:gfx942``.
        tuned: on what GPU and with which versions it was measured; empty: it was not.
        kernels: entries by family.
    """

    target: str
    tuned: Mapping[str, str] = field(default_factory=dict)
    kernels: Mapping[str, list[Entry]] = field(default_factory=dict)

    def find(self, family: str, itemsize: int, channels: int, length: int) -> Mapping[str, TileFields] | None:
        """The tiles of the longest length that is not beyond ``length``; None: the table has none."""
        fitting = [
            entry
            for entry in self.kernels.get(family, ())
            if (entry.bytes, entry.channels) == (itemsize, channels) and entry.length <= length
        ]
        return max(fitting, key=lambda entry: entry.length).tiles if fitting else None

    def write(self, path: Path) -> None:
        """Store as JSON."""
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")


def path_of(target: str) -> Path:
    """Where an architecture's table is kept."""
    return FOLDER / f"{target.replace(':', '-')}.json"


def read_table(path: Path) -> Table:
    """A table from its file.

    Raises:
        ConfigError: the file is not a table.
    """
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        kernels = {name: [Entry(**entry) for entry in found] for name, found in stored["kernels"].items()}
        return Table(target=stored["target"], tuned=stored["tuned"], kernels=kernels)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no table of tiles ({error}); make one with `megafold tune`") from error


@cache
def _stored(target: str) -> Table:
    path = path_of(target)
    return read_table(path) if path.exists() else Table(target=target)


_instead: dict[str, Table] = {}


def table(target: str) -> Table:
    """The tiles of an architecture; an empty table for one that is not known."""
    return _instead.get(target) or _stored(target)


@contextmanager
def use_table(other: Table) -> Iterator[None]:
    """Take ``other`` for its architecture within; launches that are remembered keep their tiles."""
    before = _instead.get(other.target)
    _instead[other.target] = other
    try:
        yield
    finally:
        if before is None:
            del _instead[other.target]
        else:
            _instead[other.target] = before


def known_targets() -> list[str]:
    """Architectures that have a table."""
    return sorted(path.stem.replace("-", ":", 1) for path in FOLDER.glob("*.json"))


def fields(tile: Any) -> TileFields:
    """A tile as a table holds it."""
    return asdict(tile)
