"""Reading BinaryCIF, the column-wise binary form of mmCIF.

A dictionary of 2.3 million atoms has to open in a moment in every worker, so columns are decoded when they
are first asked for, and stay in their compact form: text as indices into the distinct strings, coordinates as
the integers that the file holds. Format: BinaryCIF 0.3 (Sehnal et al., PLOS Comput Biol 2020).
"""

import itertools
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import msgpack  # type: ignore[import-untyped]
import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.compression import unzipped
from megafold.pipeline.errors import ComponentError

_DTYPES: Final = {1: "<i1", 2: "<i2", 3: "<i4", 4: "<u1", 5: "<u2", 6: "<u4", 32: "<f4", 33: "<f8"}


@dataclass(frozen=True)
class Column:
    """One decoded column: ``values`` are numbers, divided by ``factor``, or indices into ``strings``."""

    values: NDArray[Any]
    strings: tuple[str, ...] | None
    factor: float
    missing: NDArray[np.bool_] | None

    def text(self, rows: slice) -> list[str]:
        """Values as text, '' where missing."""
        values = self.values[rows].tolist()
        if self.strings is None:
            texts = [str(value) for value in values]
        else:
            texts = [self.strings[value] if value >= 0 else "" for value in values]
        if self.missing is not None:
            for index in np.flatnonzero(self.missing[rows]):
                texts[index] = ""
        return texts

    def numbers(self, rows: slice) -> NDArray[np.float64]:
        """Values as float64, NaN where missing.

        Raises:
            ValueError: text that is no number.
        """
        if self.strings is not None:
            return np.array([float(text) if text else np.nan for text in self.text(rows)], np.float64)
        numbers = self.values[rows].astype(np.float64) / self.factor
        if self.missing is not None:
            numbers[self.missing[rows]] = np.nan
        return numbers


class Category:
    """The columns of one category, decoded when asked for."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self._encoded = {column["name"]: column for column in content["columns"]}
        self._decoded: dict[str, Column] = {}
        self.row_count: int = content["rowCount"]

    @property
    def names(self) -> list[str]:
        """Names of all columns, sorted."""
        return sorted({*self._encoded, *self._decoded})

    def column(self, name: str) -> Column | None:
        """The column called ``name``, or None where the category has none."""
        if name not in self._decoded:
            if name not in self._encoded:
                return None
            self._decoded[name] = _decode_column(self._encoded.pop(name))
        return self._decoded[name]

    def runs(self, name: str) -> dict[str, slice]:
        """Where each distinct text of a column lies: the rows of its first unbroken run."""
        column = self.column(name)
        if column is None or not self.row_count:
            return {}
        starts = np.concatenate([[0], np.flatnonzero(np.diff(column.values)) + 1]).tolist()
        ends = [*starts[1:], self.row_count]
        runs: dict[str, slice] = {}
        for start, end in zip(starts, ends, strict=True):
            runs.setdefault(column.text(slice(start, start + 1))[0], slice(start, end))
        return runs


class Block:
    """The categories of one data block, without the leading underscore of their names."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.name: str = content["header"]
        self._content = content

    @cached_property
    def categories(self) -> dict[str, Category]:
        """Categories by name."""
        return {item["name"].lstrip("_"): Category(item) for item in self._content["categories"]}


def read_blocks(path: Path) -> list[Block]:
    """The data blocks of a BinaryCIF file, plain or gzip.

    Raises:
        ComponentError: not a BinaryCIF file.
    """
    data = path.read_bytes()
    try:
        content = msgpack.unpackb(unzipped(data))
        return [Block(block) for block in content["dataBlocks"]]
    except (ValueError, KeyError, TypeError, OSError, EOFError, zlib.error) as error:
        raise ComponentError(
            f"{path} is no readable BinaryCIF file ({error}); give the dictionary as .bcif or .cif",
            reason="unreadable-dictionary",
        ) from error


def _decode_column(content: Mapping[str, Any]) -> Column:
    data, encodings = content["data"]["data"], content["data"]["encoding"]
    missing = None
    if content.get("mask"):
        mask = _decode(content["mask"]["data"], content["mask"]["encoding"])
        missing = mask != 0 if mask.any() else None
    if encodings[0]["kind"] == "StringArray":
        encoding = encodings[0]
        offsets = _decode(encoding["offsets"], encoding["offsetEncoding"]).tolist()
        text = encoding["stringData"]
        strings = tuple(text[a:b] for a, b in itertools.pairwise(offsets))
        # Indices (-1: none) are repeated millions of times: the smallest integers that hold them.
        indices = _decode(data, encoding["dataEncoding"]).astype(np.min_scalar_type(-len(strings) - 1))
        return Column(indices, strings, 1.0, missing)
    if encodings[0]["kind"] == "FixedPoint":
        return Column(_decode(data, encodings[1:]), None, float(encodings[0]["factor"]), missing)
    return Column(_decode(data, encodings), None, 1.0, missing)


def _decode(data: Any, encodings: list[dict[str, Any]]) -> NDArray[Any]:
    """Undo a chain of encodings, the last one first."""
    for encoding in reversed(encodings):
        data = _DECODERS[encoding["kind"]](data, encoding)
    return np.asarray(data)


def _byte_array(data: bytes, encoding: Mapping[str, Any]) -> NDArray[Any]:
    return np.frombuffer(data, _DTYPES[encoding["type"]])


def _fixed_point(data: NDArray[Any], encoding: Mapping[str, Any]) -> NDArray[Any]:
    return data / float(encoding["factor"])


def _interval_quantization(data: NDArray[Any], encoding: Mapping[str, Any]) -> NDArray[Any]:
    step = (encoding["max"] - encoding["min"]) / (encoding["numSteps"] - 1)
    return encoding["min"] + data * step


def _run_length(data: NDArray[Any], encoding: Mapping[str, Any]) -> NDArray[Any]:
    pairs = data.reshape(-1, 2)
    return np.repeat(pairs[:, 0].astype(_DTYPES[encoding["srcType"]]), pairs[:, 1])


def _delta(data: NDArray[Any], encoding: Mapping[str, Any]) -> NDArray[Any]:
    return np.cumsum(data, dtype=_DTYPES[encoding["srcType"]]) + np.array(
        encoding["origin"], _DTYPES[encoding["srcType"]]
    )


def _integer_packing(data: NDArray[Any], encoding: Mapping[str, Any]) -> NDArray[Any]:
    """Values at the packed type's limits are continued by the next one; the sum is the value."""
    limits = np.iinfo(data.dtype)
    continued = data == limits.max
    if not encoding["isUnsigned"]:
        continued |= data == limits.min
    wide = data.astype(np.int32)
    if not continued.any():
        return wide
    ends = np.flatnonzero(~continued)
    return np.add.reduceat(wide, np.concatenate([[0], ends[:-1] + 1]), dtype=np.int32)


_DECODERS: Final[dict[str, Callable[[Any, Mapping[str, Any]], NDArray[Any]]]] = {
    "ByteArray": _byte_array,
    "FixedPoint": _fixed_point,
    "IntervalQuantization": _interval_quantization,
    "RunLength": _run_length,
    "Delta": _delta,
    "IntegerPacking": _integer_packing,
}
