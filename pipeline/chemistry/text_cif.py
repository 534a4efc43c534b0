"""Reading component definitions from mmCIF text, block by block.

The whole CCD is 400 MB of text: its blocks are found by searching, and only those that are asked for are
parsed. gemmi's objects stay in this module.
"""

import gzip
import mmap
import re
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import gemmi
import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.chemistry.component import Component
from megafold.pipeline.chemistry.definition_rows import component_from_rows
from megafold.pipeline.errors import ComponentError

_BLOCK: Final = re.compile(rb"^data_", re.MULTILINE)
_CODE: Final = re.compile(rb"^_chem_comp\.id\s+(\S+)", re.MULTILINE)
_NAME: Final = re.compile(rb"data_(?:comp_)?(\S*)")
_READ_BYTES: Final = 16 << 20


class BlockIndex:
    """The blocks of a dictionary file by component code, parsed when asked for.

    A plain file stays on disk (memory-mapped); of a gzip file every block is kept compressed on its own, a
    fifth of the text.

    Raises:
        ComponentError: the file cannot be read, or defines no component.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._packed: dict[str, bytes] = {}
        self._spans: dict[str, slice] = {}
        self._text: mmap.mmap | None = None
        try:
            if path.suffix == ".gz":
                self._packed = {_code(block): zlib.compress(block, 1) for block in _stream_blocks(path)}
            elif path.stat().st_size:
                with path.open("rb") as file:
                    self._text = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._spans = {_code(self._text[span]): span for span in _spans(self._text)}
        except (OSError, EOFError, zlib.error) as error:
            raise ComponentError(
                f"component dictionary {path} cannot be read: {error}", reason="unreadable-dictionary"
            ) from error
        if not self.codes():
            raise ComponentError(
                f"component dictionary {path} has no data_ block; give a components.cif as of the wwPDB",
                reason="unreadable-dictionary",
            )

    def codes(self) -> list[str]:
        """Codes in the file's order."""
        return list(self._packed or self._spans)

    def component(self, code: str) -> Component | None:
        """The component called ``code``, or None.

        Raises:
            ComponentError: its block cannot be parsed.
        """
        if code in self._packed:
            block = zlib.decompress(self._packed[code])
        elif code in self._spans and self._text is not None:
            block = self._text[self._spans[code]]
        else:
            return None
        return next((found for found in _parse(block, self._path) if found.code == code), None)


def read_components(path: Path) -> list[Component]:
    """All components that a text file defines, one a block or several in one block.

    Raises:
        ComponentError: the file cannot be parsed, or defines none.
    """
    try:
        data = path.read_bytes()
        found = list(_parse(gzip.decompress(data) if path.suffix == ".gz" else data, path))
    except (OSError, EOFError, zlib.error) as error:
        raise ComponentError(
            f"component definitions {path} cannot be read: {error}", reason="unreadable-dictionary"
        ) from error
    if not found:
        raise ComponentError(
            f"{path} defines no component: it has no _chem_comp_atom rows", reason="unreadable-dictionary"
        )
    return found


class _TableRows:
    """Some rows of a gemmi table."""

    def __init__(self, columns: dict[str, list[str]], rows: list[int]) -> None:
        self._columns, self._rows = columns, rows

    def __len__(self) -> int:
        return len(self._rows)

    def text(self, column: str) -> list[str]:
        values = self._columns.get(column)
        return [""] * len(self._rows) if values is None else [values[row] for row in self._rows]

    def numbers(self, column: str) -> NDArray[np.float64]:
        return np.array([float(text) if text else np.nan for text in self.text(column)], np.float64)


def _parse(data: bytes, path: Path) -> Iterator[Component]:
    try:
        document = gemmi.cif.read_string(data)
        for block in document:
            yield from _block_components(block)
    except ComponentError as error:
        raise ComponentError(f"{path}: {error}", reason=error.reason) from error
    except (ValueError, RuntimeError, UnicodeDecodeError) as error:
        raise ComponentError(
            f"component definitions in {path} cannot be parsed: {error}", reason="bad-definition"
        ) from error


def _block_components(block: gemmi.cif.Block) -> Iterator[Component]:
    header, atoms, bonds = (_columns(block, f"_chem_comp{suffix}.") for suffix in ("", "_atom", "_bond"))
    of_atom = atoms.get("comp_id", [])
    codes = header.get("id", []) if not of_atom else list(dict.fromkeys(of_atom))
    by_code = [_by_value(values) for values in (header.get("id", []), of_atom, bonds.get("comp_id", []))]
    for code in codes:
        rows = [
            _TableRows(columns, groups.get(code, []))
            for columns, groups in zip((header, atoms, bonds), by_code, strict=True)
        ]
        yield component_from_rows(code, *rows)


def _columns(block: gemmi.cif.Block, category: str) -> dict[str, list[str]]:
    """Columns by name without the category, unquoted, '' for ``?`` and ``.``."""
    table = block.find_mmcif_category(category)
    if not len(table):
        return {}
    return {
        tag[len(category) :]: [
            "" if gemmi.cif.is_null(value) else gemmi.cif.as_string(value) for value in table.column(index)
        ]
        for index, tag in enumerate(table.tags)
    }


def _by_value(values: list[str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = {}
    for row, value in enumerate(values):
        groups.setdefault(value, []).append(row)
    return groups


def _spans(text: bytes | mmap.mmap) -> Iterator[slice]:
    """Where the blocks lie.

    A ``data_`` at a line's start inside a text field starts none: there, an odd number of lines that begin
    with a semicolon lies before it.
    """
    starts = [match.start() for match in _BLOCK.finditer(text)]
    first = starts[0] if starts else 0
    for end in [*starts[1:], len(text)] if starts else []:
        if end == len(text) or text[first:end].count(b"\n;") % 2 == 0:
            yield slice(first, end)
            first = end


def _stream_blocks(path: Path) -> Iterator[bytes]:
    """The blocks of a gzip file, without ever holding its whole text."""
    rest = b""
    with gzip.open(path) as file:
        while chunk := file.read(_READ_BYTES):
            text = rest + chunk
            spans = list(_spans(text))
            yield from (text[span] for span in spans[:-1])
            rest = text[spans[-1]] if spans else text
    yield from (rest[span] for span in _spans(rest))


def _code(block: bytes) -> str:
    """The code of a block: its ``_chem_comp.id``, else its name without a monomer library's ``comp_``."""
    match = _CODE.search(block) or _NAME.match(block)
    return match.group(1).decode("utf-8", "replace").strip("'\"") if match else ""
