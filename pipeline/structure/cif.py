"""The columns of an mmCIF file, text or binary, by tag. gemmi's objects stay in this module."""

import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

import gemmi
import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.chemistry.binary_cif import Block as BinaryBlock
from megafold.pipeline.chemistry.binary_cif import Category, read_blocks
from megafold.pipeline.compression import unzipped
from megafold.pipeline.errors import ComponentError, StructureError

#: What an integer column holds where the file has no value.
MISSING: Final = np.iinfo(np.int32).min


class Block:
    """One data block: columns by tag (``_atom_site.id``). A value that is missing (``.``, ``?``) is ''.

    ``fetch`` gives a column's values as they are in the file, or None; ``clean`` makes one of them plain
    text. Columns of a million atoms hold few distinct texts, so only those are cleaned.
    """

    def __init__(self, fetch: Callable[[str], list[str] | None], clean: Callable[[str], str]) -> None:
        self._fetch = fetch
        self._clean = clean
        self._coded: dict[str, tuple[NDArray[np.int32], list[str]]] = {}

    def text(self, tag: str) -> list[str]:
        """The column as text, [] where the block has none."""
        return [self._clean(value) for value in self._fetch(tag) or ()]

    def first(self, *tags: str) -> str:
        """The first value that is there among these columns, '' for none."""
        for tag in tags:
            for value in self.text(tag):
                if value:
                    return value
        return ""

    def records(self, category: str, *items: str) -> list[tuple[str, ...]]:
        """The rows of a category (``_struct_conn``), each with the given items; a missing item is ''."""
        columns = [self.text(f"{category}.{item}") for item in items]
        count = max((len(column) for column in columns), default=0)
        filled = [column if column else [""] * count for column in columns]
        return list(zip(*filled, strict=True))

    def codes(self, tag: str) -> tuple[NDArray[np.int32], list[str]] | None:
        """The column as indices into its distinct texts, which come in the order they first occur."""
        if tag in self._coded:
            return self._coded[tag]
        values = self._fetch(tag)
        if values is None:
            return None
        raw = {value: index for index, value in enumerate(dict.fromkeys(values))}
        indices = np.fromiter(map(raw.__getitem__, values), np.int32, len(values))
        texts: dict[str, int] = {}
        merged = np.array(
            [texts.setdefault(self._clean(value), len(texts)) for value in raw], np.int32
        ).reshape(-1)
        self._coded[tag] = merged[indices], list(texts)
        return self._coded[tag]

    def numbers(self, tag: str) -> NDArray[np.float64] | None:
        """The column as float64, NaN where missing.

        Raises:
            ValueError: a value that is no number.
        """
        values = self._fetch(tag)
        if values is None:
            return None
        try:
            numbers = np.array(values, np.float64).reshape(-1)
        except ValueError:
            # Missing values, or standard uncertainties in parentheses.
            texts = (self._clean(value).partition("(")[0] for value in values)
            numbers = np.array([float(text) if text else np.nan for text in texts], np.float64).reshape(-1)
        if np.isinf(numbers).any():
            raise ValueError(f"{tag} is infinite")
        return numbers

    def integers(self, tag: str) -> NDArray[np.int32] | None:
        """The column as int32, :data:`MISSING` where missing.

        Raises:
            ValueError: a value that is no integer.
        """
        coded = self.codes(tag)
        if coded is None:
            return None
        indices, texts = coded
        return np.array([int(text) if text else MISSING for text in texts], np.int32).reshape(-1)[indices]


def read_cif(path: Path) -> list[Block]:
    """The data blocks of a structure file: ``.cif``, ``.mmcif`` or ``.bcif``, plain or gzip.

    Raises:
        StructureError: the file is missing (``unreadable-file``) or not valid (``invalid-cif``).
    """
    try:
        if ".bcif" in path.name.lower():
            return [_binary_block(block) for block in read_blocks(path)]
        data = path.read_bytes()
    except OSError as error:
        raise StructureError(f"{path} cannot be read: {error}", reason="unreadable-file") from error
    except (ValueError, RuntimeError, ComponentError) as error:
        raise _invalid(path, error) from error
    try:
        # gemmi's own reader looks at no check sum where a damaged file gives more text than it should.
        text = unzipped(data)
        # Titles are all that is not ASCII, and no reason to refuse a file, whatever encoding they are in.
        document = gemmi.cif.read_string(text if text.isascii() else text.decode("utf-8-sig", "replace"))
        return [_text_block(block) for block in document]
    except (OSError, EOFError, zlib.error, ValueError, RuntimeError) as error:
        raise _invalid(path, error) from error


def _invalid(path: Path, error: Exception) -> StructureError:
    return StructureError(
        f"{path} is no valid mmCIF file: {error}; repair it or take it out of the corpus",
        reason="invalid-cif",
    )


def _text_block(block: "gemmi.cif.Block") -> Block:
    def fetch(tag: str) -> list[str] | None:
        column = block.find_values(tag)
        return list(column) if len(column) else None

    return Block(fetch, gemmi.cif.as_string)


def _binary_block(block: BinaryBlock) -> Block:
    def fetch(tag: str) -> list[str] | None:
        name, _, item = tag.lstrip("_").partition(".")
        category = block.categories.get(name)
        return column_texts(category, item) if category is not None and category.row_count else None

    return Block(fetch, _unmasked)


def column_texts(category: Category, item: str) -> list[str] | None:
    """A column of a BinaryCIF file as text, '' where missing; None where the category has none."""
    column = category.column(item)
    if column is None:
        return None
    rows = slice(None)
    return column.text(rows) if column.strings is not None else _number_texts(column.numbers(rows))


def _unmasked(value: str) -> str:
    """Some writers keep the marks for missing values as text instead of masking them."""
    return "" if value in (".", "?") else value


def _number_texts(numbers: NDArray[np.float64]) -> list[str]:
    """Numbers as text that gives the same numbers again, '' for NaN."""
    return [
        "" if value != value else str(int(value)) if value.is_integer() else repr(value)
        for value in numbers.tolist()
    ]


class DefinitionRows:
    """Rows of a ``chem_comp`` category that belong to one component, as the chemistry package reads them."""

    def __init__(self, columns: dict[str, list[str]], rows: Sequence[int]) -> None:
        self._columns = columns
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def text(self, column: str) -> list[str]:
        """The column as text, '' where missing or where there is no such column."""
        values = self._columns.get(column)
        return [values[row] for row in self._rows] if values else [""] * len(self._rows)

    def numbers(self, column: str) -> NDArray[np.float64]:
        """The column as float64, NaN where missing or where there is no such column."""
        return np.array([float(text) if text else np.nan for text in self.text(column)], np.float64)
