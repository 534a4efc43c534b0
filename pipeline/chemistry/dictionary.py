"""Dictionaries of chemical components: the bundled CCD, a CCD file, and definitions of the user's own."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.chemistry.binary_cif import Category, read_blocks
from megafold.pipeline.chemistry.component import Component
from megafold.pipeline.chemistry.definition_rows import component_from_rows
from megafold.pipeline.chemistry.text_cif import BlockIndex, read_components
from megafold.pipeline.errors import ComponentError

_CATEGORIES: Final = {"chem_comp": "id", "chem_comp_atom": "comp_id", "chem_comp_bond": "comp_id"}


class ComponentDictionary(Protocol):
    """Components by code."""

    def get(self, code: str) -> Component | None:
        """The component called ``code``, or None; the same object every time.

        A code without atoms (``UNL`` in the CCD) gives a component of no atoms.
        """
        ...

    def digest(self, code: str) -> str:
        """Digest of the definition of ``code``.

        Raises:
            ComponentError: no such component.
        """
        ...

    def codes(self) -> list[str]:
        """All codes, sorted."""
        ...


def load_dictionary(ccd: Path | None = None, extra: Sequence[Path] = ()) -> ComponentDictionary:
    """Open a dictionary: about half a second for the bundled one, so once for each process.

    ``ccd``: the CCD as ``.cif`` or ``.bcif``, plain or ``.gz``; None is the one that comes with biotite.
    ``extra``: mmCIF text files whose definitions add to the dictionary and win over it, later files over
    earlier ones.

    Raises:
        ComponentError: a file is missing, cannot be read or defines nothing.
    """
    own: dict[str, Component] = {}
    for path in extra:
        own.update({component.code: component for component in read_components(path)})
    source = _bundled() if ccd is None else Path(ccd)
    base = _BinarySource(source) if ".bcif" in source.suffixes else BlockIndex(source)
    return _Dictionary(base, own)


def _bundled() -> Path:
    """The CCD that biotite brings, found without importing biotite (a third of a second)."""
    spec = importlib.util.find_spec("biotite")
    places = spec.submodule_search_locations if spec else None
    path = Path(next(iter(places)), "structure", "info", "components.bcif") if places else None
    if path is None or not path.is_file():
        raise ComponentError(
            "biotite brings no component dictionary; install its wheel, or give a file with --ccd",
            reason="unreadable-dictionary",
        )
    return path


class _Source(Protocol):
    def codes(self) -> list[str]: ...

    def component(self, code: str) -> Component | None: ...


class _Dictionary:
    """A source, the user's definitions before it, and what was asked for already."""

    def __init__(self, source: _Source, own: dict[str, Component]) -> None:
        self._source = source
        self._own = own
        self._known: dict[str, Component | None] = dict(own)

    def get(self, code: str) -> Component | None:
        if code not in self._known:
            self._known[code] = self._source.component(code)
        return self._known[code]

    def digest(self, code: str) -> str:
        component = self.get(code)
        if component is None:
            raise ComponentError(
                f"component {code!r} is in no dictionary; define it in a file given with --ccd-extra",
                reason="unknown-component",
            )
        return component.digest

    def codes(self) -> list[str]:
        return sorted({*self._source.codes(), *self._own})


class _CategoryRows:
    """One component's rows of a category."""

    def __init__(self, category: Category | None, rows: slice) -> None:
        self._category, self._rows = category, rows

    def __len__(self) -> int:
        return self._rows.stop - self._rows.start

    def text(self, column: str) -> list[str]:
        found = self._category.column(column) if self._category else None
        return found.text(self._rows) if found else [""] * len(self)

    def numbers(self, column: str) -> NDArray[np.float64]:
        found = self._category.column(column) if self._category else None
        return found.numbers(self._rows) if found else np.full(len(self), np.nan)


class _BinarySource:
    """A BinaryCIF dictionary: all components in the tables of one block, or a block for each."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._blocks = [block.categories for block in read_blocks(path)]
        except OSError as error:
            raise ComponentError(
                f"component dictionary {path} cannot be read: {error}", reason="unreadable-dictionary"
            ) from error
        self._rows = [
            {name: block[name].runs(key) for name, key in _CATEGORIES.items() if name in block}
            for block in self._blocks
        ]
        self._block_of = {
            code: index for index, rows in enumerate(self._rows) for runs in rows.values() for code in runs
        }
        if not self._block_of:
            raise ComponentError(
                f"component dictionary {path} defines no component: it has no chem_comp categories",
                reason="unreadable-dictionary",
            )

    def codes(self) -> list[str]:
        return list(self._block_of)

    def component(self, code: str) -> Component | None:
        index = self._block_of.get(code)
        if index is None:
            return None
        block, runs = self._blocks[index], self._rows[index]
        rows = [
            _CategoryRows(block.get(name), runs.get(name, {}).get(code, slice(0, 0))) for name in _CATEGORIES
        ]
        try:
            return component_from_rows(code, *rows)
        except ComponentError as error:
            raise ComponentError(f"{self._path}: {error}", reason=error.reason) from error
