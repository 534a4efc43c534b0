"""Tile sizes as data: one file for each architecture, made by ``megafold tune``.

A file lists for each family of kernels which tiles to take for a dtype's bytes, a number of channels and
lengths from some length on. What a file does not say is left to the family's own tiles, which fit
everywhere; so is all of an architecture without a file. Lengths fall into buckets, so that none is ever
compiled for. A :class:`Family` looks its tiles up.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from dataclasses import fields as fields_of
from functools import cache, lru_cache
from importlib import resources
from pathlib import Path
from typing import Any, Final, Generic, TypeVar

from megafold.trainer.errors import ConfigError

#: What a tile is in a file: the fields of the family's tile.
TileFields = Mapping[str, Any]
FOLDER: Final = Path(str(resources.files(__name__)))
#: Looked-up tiles that are remembered, far beyond what a model meets.
_REMEMBERED: Final = 8192

#: A family's tiles: a dataclass with a tile for each of its kernels.
Tiles = TypeVar("Tiles")


def launch_options(
    warps: int, stages: int, registers: int | None = None, instruction: int | None = None
) -> dict[str, int]:
    """What a launch takes of a tile beside the kernel's own parameters.

    registers: caps those of a thread, so that more programs share a multiprocessor: NVIDIA GPUs alone.
    instruction: rows of the matrix instructions, 16 or 32: AMD GPUs alone. None: the compiler's choice.
    """
    options = {
        "num_warps": warps, "num_stages": stages, "maxnreg": registers, "matrix_instr_nonkdim": instruction
    }  # fmt: skip
    return {name: value for name, value in options.items() if value is not None}


@dataclass(frozen=True, kw_only=True)
class Entry:
    """Tiles by role, for inputs of ``bytes`` an element, ``channels`` and lengths from ``length`` on.

    ``tuned``: on what GPU, with which versions and at what length they were measured, or by what else
    they were chosen; empty: they fit everywhere.
    """

    bytes: int
    channels: int
    length: int
    tiles: Mapping[str, TileFields]
    tuned: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Table:
    """An architecture's tiles.

    Attributes:
        target: ``cuda:90``, ``hip:gfx942``.
        kernels: entries by family.
    """

    target: str
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
        """Store as JSON, a tile a line; a reader sees the old file or the new one, never a part."""
        text = re.sub(
            r"\{[^{}]*\}", lambda tile: " ".join(tile[0].split()), json.dumps(asdict(self), indent=1)
        )
        part = path.with_name(f"{path.name}.part")
        part.write_text(text + "\n", encoding="utf-8")
        part.replace(path)


def path_of(target: str) -> Path:
    """Where an architecture's table is kept."""
    return FOLDER / f"{target.replace(':', '-')}.json"


def read_table(path: Path, target: str | None = None) -> Table:
    """A table from its file.

    Raises:
        ConfigError: the file is not a table, or not one of ``target``.
    """
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        kernels = {name: [Entry(**entry) for entry in found] for name, found in stored["kernels"].items()}
        found = Table(target=stored["target"], kernels=kernels)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} is no table of tiles ({error}); make one with `megafold tune`") from error
    if target not in (None, found.target):
        raise ConfigError(f"{path} is the table of {found.target}, not of {target}; give another file")
    return found


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
    _tiles.cache_clear()
    try:
        yield
    finally:
        if before is None:
            del _instead[other.target]
        else:
            _instead[other.target] = before
        _tiles.cache_clear()


def known_targets() -> list[str]:
    """Architectures that have a table."""
    return sorted(path.stem.replace("-", ":", 1) for path in FOLDER.glob("*.json"))


def fields(tile: Any) -> TileFields:
    """A tile as a table holds it."""
    return asdict(tile)


@dataclass(frozen=True, eq=False)
class Family(Generic[Tiles]):
    """Kernels whose tiles stand together in a table, and how they are looked up.

    Attributes:
        name: in the tables.
        tile: the class of one tile, whose fields a table holds.
        tiles: the class of all of them, a field for each role.
        safe: tiles that fit every GPU, for bytes of an element and channels.
    """

    name: str
    tile: Callable[..., Any]
    tiles: type[Tiles]
    safe: Callable[[int, int], Tiles]

    @property
    def roles(self) -> tuple[str, ...]:
        """The names of the kernels."""
        return tuple(each.name for each in fields_of(self.tiles))  # type: ignore[arg-type]

    def find(self, target: str, itemsize: int, channels: int, length: int = 1) -> Tiles:
        """Tiles on an architecture; roles that its table does not have get the safe ones.

        Raises:
            ConfigError: the table holds what is no tile of this family.
        """
        found: Tiles = _tiles(self, target, itemsize, channels, length)
        return found

    def known(self, target: str) -> list[tuple[int, int, Tiles]]:
        """All that the table of an architecture has: bytes of an element, channels, tiles."""
        return [
            (entry.bytes, entry.channels, self.find(target, entry.bytes, entry.channels, entry.length))
            for entry in table(target).kernels.get(self.name, [])
        ]


@lru_cache(_REMEMBERED)
def _tiles(family: Family[Any], target: str, itemsize: int, channels: int, length: int) -> Any:
    safe = family.safe(itemsize, channels)
    found = table(target).find(family.name, itemsize, channels, length)
    if found is None:
        return safe
    try:
        made = {role: family.tile(**found[role]) if role in found else getattr(safe, role)
                for role in family.roles}  # fmt: skip
    except TypeError as error:
        raise ConfigError(
            f"{path_of(target)}, {family.name} of {channels} channels: {error}; "
            "make it anew with `megafold tune`"
        ) from error
    return family.tiles(**made)
