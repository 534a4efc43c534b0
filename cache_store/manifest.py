"""Manifests: tables that list a data set, named by the digest of their rows."""

import datetime
import io
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from types import MappingProxyType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from megafold.cache_store import seal
from megafold.cache_store.digest import JSON, Digest, canonical_json
from megafold.cache_store.errors import ContentError

_MAGIC = b"megafold manifest 1\n"
_METADATA_KEY = b"megafold"
_ROWS_PER_BATCH = 4096


@dataclass(frozen=True, eq=False)
class Manifest:
    """A table and a JSON mapping of attributes.

    ``table``: columns of bool, int, float, string, date, timestamp, and lists and structs of those; nulls
    allowed, NaN not. Schema metadata is dropped. Two manifests are the same exactly when their digests are.

    Raises:
        ContentError: a column or attribute cannot be stored.
    """

    table: pa.Table
    attributes: Mapping[str, JSON] = field(default_factory=dict)

    def __post_init__(self) -> None:
        names = self.table.column_names
        if len(set(names)) != len(names):
            raise ContentError(f"two columns of one name: {sorted(names)}")
        for column in self.table.schema:
            logical_type(column.type, column.name)
        canonical_json(dict(self.attributes))
        object.__setattr__(self, "table", self.table.replace_schema_metadata(None))
        object.__setattr__(self, "attributes", MappingProxyType(dict(self.attributes)))

    def __reduce__(self) -> tuple[object, ...]:
        return (Manifest, (self.table, dict(self.attributes)))

    def digest(self) -> Digest:
        """SHA-256 over the canonical content.

        The bytes hashed are: ``megafold manifest 1`` and a newline; the canonical JSON of the columns'
        logical types by name and a newline; the canonical JSON of each row, as a mapping from column names
        to values (dates and timestamps in ISO 8601), each with a newline; ``attributes``, a newline and
        the canonical JSON of the attributes. It depends on the order of rows; not on the order of columns,
        on integer and float widths, or on how Parquet wrote them.
        """
        columns: dict[str, JSON] = {
            column.name: logical_type(column.type, column.name) for column in self.table.schema
        }
        state = sha256(_MAGIC + canonical_json(columns) + b"\n")
        for line in self._lines():
            state.update(line)
        state.update(b"attributes\n" + canonical_json(dict(self.attributes)))
        return Digest(state.hexdigest())

    def _lines(self) -> Iterator[bytes]:
        # The types are checked, so rows need no check but that of json.dumps for NaN and surrogates.
        write = json.JSONEncoder(
            sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, default=_iso
        ).encode
        number = 0
        for batch in self.table.to_batches(max_chunksize=_ROWS_PER_BATCH):
            for row in batch.to_pylist():
                try:
                    yield write(row).encode() + b"\n"
                except ValueError as error:
                    raise ContentError(f"row {number} of the table: {error}: use null") from error
                number += 1

    def to_parquet(self, digest: Digest | None = None) -> bytes:
        """The manifest as a Parquet file, attributes in the schema's metadata.

        The seal lies between the pages and the footer, where Parquet readers never look: they find
        the footer from the end and the pages from the footer. ``digest`` is taken unless it is given.
        """
        metadata = {_METADATA_KEY: canonical_json({"attributes": dict(self.attributes), "format": 1})}
        buffer = io.BytesIO()
        pq.write_table(self.table.replace_schema_metadata(metadata), buffer, compression="zstd")
        data = bytearray(buffer.getvalue())
        footer = _footer_start(data)
        data[footer:footer] = seal.blank("manifest", digest or self.digest())
        seal.fill(data, _footer_start(data))
        return bytes(data)

    @classmethod
    def from_parquet(cls, data: bytes) -> tuple["Manifest", Digest]:
        """The manifest in the bytes of a Parquet file, and the digest its seal says it has.

        Every bit of the file is compared with the seal; the digest is not taken again.

        Raises:
            ValueError: the file is damaged or holds no manifest of ours.
        """
        end = _footer_start(data)
        digests = seal.parse(data[end - seal.length("manifest") : end], "manifest") if end else None
        if digests is None:
            raise ValueError("no seal: cut short, changed, or no file of MegaFold's")
        if seal.others_digest(data, end) != str(digests[1]):
            raise ValueError("bytes of the file have changed since it was written")
        # On this thread: Arrow's own may let go of ``data``, a Python object, while the interpreter ends, and
        # abort the process (apache/arrow#34314: one `megafold cache ls` in a hundred).
        table = pq.ParquetFile(pa.BufferReader(data), pre_buffer=False).read(use_threads=False)
        header = json.loads(table.schema.metadata[_METADATA_KEY])
        if header["format"] != 1:
            raise ValueError(f"it has format {header['format']}, and this version of megafold reads format 1")
        return cls(table, header["attributes"]), digests[0]


def _footer_start(data: bytes | bytearray) -> int:
    """Where the footer of a Parquet file starts, before its length and the magic; 0 for none."""
    return max(0, len(data) - 8 - int.from_bytes(data[-8:-4], "little"))


def logical_type(kind: pa.DataType, where: str) -> JSON:
    """What a column holds, whatever its width or encoding.

    Part of the digest, so that the string ``"2020-01-01"`` and the date are different.

    Raises:
        ContentError: a type that manifests do not hold.
    """
    simple = {
        "null": types.is_null,
        "bool": types.is_boolean,
        "int": types.is_integer,
        "float": types.is_floating,
        "date": types.is_date,
        "timestamp": types.is_timestamp,
    }
    for name, test in simple.items():
        if test(kind):
            return name
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        return "string"
    if types.is_dictionary(kind):
        return logical_type(kind.value_type, where)
    if types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind):
        return [logical_type(kind.value_type, f"{where}[]")]
    if types.is_struct(kind):
        return {item.name: logical_type(item.type, f"{where}.{item.name}") for item in kind}
    raise ContentError(f"column {where}: type {kind} cannot be stored in a manifest")


def _iso(value: Any) -> str:
    if isinstance(value, datetime.date):  # datetimes, too
        return value.isoformat()
    raise ContentError(f"a {type(value).__name__} in the table: not a value that manifests hold")
