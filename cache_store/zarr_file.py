"""An object file as a Zarr store, and the codec pipeline that reads its chunks without a thread.

Any Zarr reader opens an object file with ``zarr.storage.ZipStore``. This module is the quicker way the
stream uses. zarr-python moves every chunk through several asyncio tasks, a lock and a thread for each
compressed buffer: about 0.1 ms a chunk, more than decoding a small one takes. A stored zip member
needs one positioned read, and zstd and crc32c have synchronous entry points (zarr 3.1.6 and newer), so
a chunk needs no task at all, and no thread means nothing that a fork could break.
"""

import asyncio
import contextlib
import copy
import io
import json
import os
import struct
import zipfile
import zlib
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from zarr import AsyncArray
from zarr.abc.codec import Codec
from zarr.abc.store import ByteRequest, OffsetByteRequest, RangeByteRequest, Store, SuffixByteRequest
from zarr.core.buffer import Buffer, BufferPrototype, NDBuffer
from zarr.core.chunk_grids import ChunkGrid
from zarr.core.codec_pipeline import BatchedCodecPipeline
from zarr.core.common import parse_shapelike
from zarr.core.metadata.v3 import ArrayV3Metadata
from zarr.storage import StorePath

_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
_LOCAL_MAGIC = b"PK\x03\x04"


class BadFile(Exception):
    """The file is not the zip of stored members that it should be. The message says where."""


class ZippedGroup(Store):
    """A read-only Zarr store over one uncompressed zip file. Reads are positioned: no lock, no seek.

    A key that is asked for and absent is an error (:class:`BadFile`), not a chunk of fill values: objects
    hold all their chunks, so an absent one was lost.
    """

    supports_writes = False
    supports_deletes = False
    supports_partial_writes = False  # asked for by older versions of zarr
    supports_listing = True

    def __init__(self, path: Path | str, data: bytes | None = None) -> None:
        """``data``: the file's bytes, for one in memory; ``path`` is then its name in messages."""
        super().__init__(read_only=True)
        self.path = path
        self._data = data
        self._fd = os.open(path, os.O_RDONLY) if data is None else -1
        self._is_open = True
        try:
            with (
                open(self._fd, "rb", closefd=False) if data is None else io.BytesIO(data) as file,
                zipfile.ZipFile(file) as archive,
            ):
                members = archive.infolist()
        except (zipfile.BadZipFile, EOFError, struct.error, ValueError, OSError) as error:
            self.close()
            raise BadFile(f"not a zip file: {error}") from error
        except BaseException:
            self.close()
            raise
        self._members = {
            member.filename: (member.header_offset, member.file_size, member.CRC) for member in members
        }

    def close(self) -> None:
        """Close the file. Closing twice is allowed."""
        super().close()
        self._data = None
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def __del__(self) -> None:
        # A process that drops a reader without closing it must not leak its descriptor.
        if getattr(self, "_fd", -1) >= 0:
            with contextlib.suppress(OSError):
                self.close()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, ZippedGroup) and self.path == other.path

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        return f"zip://{self.path}"

    def read_checked(self, key: str) -> memoryview:
        """Bytes of one member, compared with its zip checksum: for metadata, which no crc32c guards.

        Raises:
            BadFile: as :meth:`read`, and where the checksum differs.
        """
        data = self.read(key)
        if zlib.crc32(data) != self._members[key][2]:
            raise BadFile(f"the checksum of {key} differs")
        return data

    def read(self, key: str) -> memoryview:
        """Bytes of one member.

        Raises:
            BadFile: the member is absent, cut short, or its header says something else than the directory.
        """
        try:
            offset, size, _ = self._members[key]
        except KeyError:
            raise BadFile(f"{key} is missing from the file") from None
        name = key.encode()
        start = _LOCAL_HEADER.size + len(name)
        data = self._read_at(offset, start + size)
        if len(data) < start + size:
            raise BadFile(f"{key} is cut short")
        magic, _, flags, method, *_, name_length, extra_length = _LOCAL_HEADER.unpack_from(data)
        if magic != _LOCAL_MAGIC or name_length != len(name) or data[_LOCAL_HEADER.size : start] != name:
            raise BadFile(f"the header of {key} is damaged")
        if method != zipfile.ZIP_STORED or flags & 0x1:
            raise BadFile(f"{key} is compressed or encrypted by the zip file: objects are only stored")
        if extra_length:  # only members over 4 GiB have extra fields
            return self._read_at(offset + start + extra_length, size)
        return data[start:]

    def _read_at(self, offset: int, size: int) -> memoryview:
        if self._data is not None:
            return memoryview(self._data)[offset : offset + size]
        return memoryview(_read_at(self._fd, offset, size))

    async def get(
        self, key: str, prototype: BufferPrototype, byte_range: ByteRequest | None = None
    ) -> Buffer | None:
        """Bytes of a member, or a part of them. Never suspends."""
        data = self.read(key)
        if isinstance(byte_range, RangeByteRequest):
            data = data[byte_range.start : byte_range.end]
        elif isinstance(byte_range, OffsetByteRequest):
            data = data[byte_range.offset :]
        elif isinstance(byte_range, SuffixByteRequest):
            data = data[max(0, len(data) - byte_range.suffix) :]
        return prototype.buffer.from_array_like(np.frombuffer(data, np.uint8))

    async def get_partial_values(
        self, prototype: BufferPrototype, key_ranges: Iterable[tuple[str, ByteRequest | None]]
    ) -> list[Buffer | None]:
        """Several parts at once."""
        return [await self.get(key, prototype, byte_range) for key, byte_range in key_ranges]

    async def exists(self, key: str) -> bool:
        """Whether the file has this member."""
        return key in self._members

    async def set(self, key: str, value: Buffer) -> None:
        """Refused: objects are immutable."""
        self._check_writable()

    async def set_partial_values(self, key_start_values: Iterable[tuple[str, int, bytes]]) -> None:
        """Refused: objects are immutable. Asked for by older versions of zarr."""
        self._check_writable()

    async def delete(self, key: str) -> None:
        """Refused: objects are immutable."""
        self._check_writable()

    async def list(self) -> AsyncIterator[str]:
        """Every key."""
        for key in self._members:
            yield key

    async def list_prefix(self, prefix: str) -> AsyncIterator[str]:
        """Keys that start with ``prefix``."""
        for key in self._members:
            if key.startswith(prefix):
                yield key

    async def list_dir(self, prefix: str) -> AsyncIterator[str]:
        """Names directly under ``prefix``."""
        start = prefix.rstrip("/") + "/" if prefix.strip("/") else ""
        names = {key[len(start) :].split("/")[0] for key in self._members if key.startswith(start)}
        for name in sorted(names):
            yield name


def _read_at(fd: int, offset: int, size: int) -> bytes:
    """``size`` bytes at ``offset``, fewer at the end of the file. One call reads at most 2 GiB."""
    data = os.pread(fd, size, offset)
    if len(data) == size or not data:
        return data
    whole = io.BytesIO(data)
    whole.seek(0, io.SEEK_END)
    while (left := size - whole.tell()) > 0 and (data := os.pread(fd, left, offset + whole.tell())):
        whole.write(data)
    return whole.getvalue()


class SerialPipeline(BatchedCodecPipeline):
    """Reads chunk after chunk in the calling thread; writes as zarr-python's own pipeline does."""

    async def read(
        self,
        batch_info: Iterable[tuple[Any, Any, Any, Any, bool]],
        out: NDBuffer,
        drop_axes: tuple[int, ...] = (),
    ) -> None:
        """Decode each chunk and place its selection in ``out``.

        Never suspends over a :class:`ZippedGroup`, where the codecs have synchronous entry points
        (zarr 3.1.6 and newer).

        Raises:
            BadFile: a chunk is missing or damaged.
            RuntimeError: the codecs have none, and no event loop is running.
        """
        if self._decoders is None:
            asyncio.get_running_loop()
            with _as_bad_file():
                await super().read(batch_info, out, drop_axes)
            return
        target = out.as_numpy_array()
        for getter, spec, chunk_selection, out_selection, _ in batch_info:
            buffer = await getter.get(spec.prototype)
            with _as_bad_file():
                for decode in self._decoders:
                    buffer = decode(buffer, spec)
                chunk = buffer.as_numpy_array()
            target[out_selection] = chunk[chunk_selection]

    @cached_property
    def _decoders(self) -> tuple[Callable[[Any, Any], Any], ...] | None:
        """Synchronous decoding of each codec, last codec first; None where one has no such thing."""
        decoders = tuple(getattr(codec, "_decode_sync", None) for codec in reversed(list(self)))
        return None if None in decoders else decoders  # type: ignore[return-value]


@contextlib.contextmanager
def _as_bad_file() -> Iterator[None]:
    try:
        yield
    except (ValueError, RuntimeError) as error:  # crc32c and reshaping; zstd
        raise BadFile(str(error)) from error


class SerialArray(AsyncArray[Any]):
    """An array whose chunks a :class:`SerialPipeline` decodes."""

    def __init__(self, metadata: Any, store_path: StorePath) -> None:
        super().__init__(parse_metadata(metadata), store_path)
        # Chosen here rather than through zarr's configuration, which other users of zarr share.
        object.__setattr__(self, "codec_pipeline", _pipeline(tuple(self.metadata.codecs)))


def parse_metadata(values: dict[str, Any]) -> ArrayV3Metadata:
    """The metadata of an array, as ``ArrayV3Metadata.from_dict`` reads them.

    That takes longer than reading a small array does, so arrays that differ in their lengths alone share what
    does not depend on these: dtype, fill value and codecs.
    """
    lengths = {name: values[name] for name in ("shape", "chunk_grid")}
    others = {name: value for name, value in values.items() if name not in lengths}
    shape = parse_shapelike(lengths["shape"])
    grid = ChunkGrid.from_dict(lengths["chunk_grid"])
    if len(getattr(grid, "chunk_shape", ())) != len(shape):
        raise ValueError(f"chunks {lengths['chunk_grid']} do not fit shape {shape}")
    metadata = copy.copy(_unit_metadata(json.dumps(others, sort_keys=True), len(shape)))
    object.__setattr__(metadata, "shape", shape)
    object.__setattr__(metadata, "chunk_grid", grid)
    return metadata


@lru_cache(maxsize=256)
def _unit_metadata(others: str, axes: int) -> ArrayV3Metadata:
    """Metadata with lengths of 1 along all axes."""
    grid: Any = {"name": "regular", "configuration": {"chunk_shape": [1] * axes}}
    return ArrayV3Metadata.from_dict({**json.loads(others), "shape": [1] * axes, "chunk_grid": grid})


@lru_cache(maxsize=64)
def _pipeline(codecs: tuple[Codec, ...]) -> SerialPipeline:
    """One pipeline for all arrays of the same codecs: making one costs as much as reading a small array."""
    return SerialPipeline.from_codecs(codecs)
