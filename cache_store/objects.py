"""Object files: a Zarr v3 group in a zip file that can tell whether a single bit of it has changed.

The file is a zip of uncompressed members, sorted, with one fixed timestamp, written from a Zarr
``MemoryStore``: the same libraries write the same bytes. The zip's comment, the end of the file, is its
seal (:mod:`megafold.cache_store.seal`).
"""

import hashlib
import io
import warnings
import zipfile
from pathlib import Path
from typing import BinaryIO, Final

import zarr
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import MemoryStore

from megafold.cache_store import seal
from megafold.cache_store.content import Content
from megafold.cache_store.digest import Digest

#: See docs/design/002-cache.md for the measurement.
ZSTD_LEVEL: Final = 7

_TIMESTAMP: Final = (1980, 1, 1, 0, 0, 0)  # the earliest a zip file can hold
_SEAL_LENGTH: Final = seal.length("object")


def encode(content: Content, digest: Digest | None = None) -> bytes:
    """The object file of ``content``, whose digest is taken unless it is given."""
    digest = digest or content.digest()
    members = _zarr_members(content)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for key in sorted(members):
            archive.writestr(_member(key), members[key])
        archive.comment = seal.blank("object", digest)
    with buffer.getbuffer() as data:
        seal.fill(data, len(data))
    return buffer.getvalue()


def _member(key: str) -> zipfile.ZipInfo:
    member = zipfile.ZipInfo(key, _TIMESTAMP)
    member.create_system = 3  # Unix, whatever this runs on
    member.external_attr = 0o444 << 16
    return member


def _zarr_members(content: Content) -> dict[str, bytes]:
    store = MemoryStore()
    group = zarr.create_group(store, zarr_format=3, attributes=dict(content.attributes))
    for name, array in content.arrays.items():
        chunks = content.chunks.get(name) or tuple(max(1, length) for length in array.shape)
        target = group.create_array(
            name,
            shape=array.shape,
            dtype=array.dtype,
            chunks=chunks,
            compressors=[ZstdCodec(level=ZSTD_LEVEL), Crc32cCodec()],
            fill_value=0,
            # Zarr would leave out chunks that hold only fill values, and a lost chunk would read as zeros.
            config={"write_empty_chunks": True},
        )
        if array.size:
            target[...] = array
    with warnings.catch_warnings():
        # Other readers may ignore consolidated metadata: every array has its own as well.
        warnings.filterwarnings("ignore", message="Consolidated metadata is currently not part")
        zarr.consolidate_metadata(store, zarr_format=3)
    return sync(_contents(store))


async def _contents(store: MemoryStore) -> dict[str, bytes]:
    members = {}
    async for key in store.list():
        value = await store.get(key, default_buffer_prototype())
        if value is not None:
            members[key] = value.to_bytes()
    return members


def claimed_digest(path: Path) -> Digest | None:
    """The object a file says it is, from its last bytes; None where those are not an object file's end.

    A cheap test for files that were cut short. It reads nothing else: :func:`damage` does.
    """
    with open(path, "rb") as file:
        digests = _read_seal(file)
    return digests[0] if digests else None


def _read_seal(file: BinaryIO) -> tuple[Digest, Digest] | None:
    size = file.seek(0, io.SEEK_END)
    if size < _SEAL_LENGTH:
        return None
    file.seek(-_SEAL_LENGTH, io.SEEK_END)
    return seal.parse(file.read(), "object")


def damage(file: BinaryIO) -> tuple[Digest | None, str]:
    """Hash a whole object file, open and seekable, decoding nothing.

    Returns:
        The object that the file says it is, and what is wrong with the file (empty: every bit of it is as
        it was written).
    """
    digests = _read_seal(file)
    if digests is None:
        return None, "the file does not end as an object does: it was cut short, extended or changed"
    left = file.seek(0, io.SEEK_END) - seal.HEX
    file.seek(0)
    state = hashlib.sha256()
    while left and (block := file.read(min(left, 1 << 20))):
        state.update(block)
        left -= len(block)
    if left or state.hexdigest() != str(digests[1]):
        return digests[0], "bytes of the file have changed since it was written"
    return digests[0], ""
