"""Object files: a Zarr v3 group in a zip file that can tell whether a single bit of it has changed.

The file is a zip of uncompressed members, sorted, with one fixed timestamp, written from a Zarr
``MemoryStore``: the same libraries write the same bytes. The zip's comment ends it::

    megafold object <content digest> sha256 <digest of every byte of the file before this one>

so a file says which object it is and whether it is intact, by itself and without decoding.
"""

import hashlib
import io
import zipfile
from pathlib import Path
from typing import Final

import zarr
from zarr.codecs import Crc32cCodec, ZstdCodec
from zarr.core.buffer import default_buffer_prototype
from zarr.core.sync import sync
from zarr.storage import MemoryStore

from megafold.cache_store.content import Content
from megafold.cache_store.digest import Digest

#: See docs/design/002-cache.md for the measurement.
ZSTD_LEVEL: Final = 7

_TIMESTAMP: Final = (1980, 1, 1, 0, 0, 0)  # the earliest a zip file can hold
_COMMENT: Final = b"megafold object %s sha256 %s"
_HEX: Final = 64
_COMMENT_LENGTH: Final = len(_COMMENT % (b"0" * _HEX, b"0" * _HEX))


def encode(content: Content, digest: Digest | None = None) -> bytes:
    """The object file of ``content``, whose digest is taken unless it is given."""
    digest = digest or content.digest()
    members = _zarr_members(content)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_STORED) as archive:
        for key in sorted(members):
            archive.writestr(_member(key), members[key])
        archive.comment = _COMMENT % (str(digest).encode(), b"0" * _HEX)
    data = buffer.getbuffer()
    data[-_HEX:] = hashlib.sha256(data[:-_HEX]).hexdigest().encode()
    return bytes(data)


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
        size = file.seek(0, io.SEEK_END)
        if size <= _COMMENT_LENGTH:
            return None
        file.seek(-_COMMENT_LENGTH, io.SEEK_END)
        return _parse_comment(file.read())[0]


def _parse_comment(comment: bytes) -> tuple[Digest | None, Digest | None]:
    words = comment.split(b" ")
    try:
        content, whole = Digest(words[2].decode()), Digest(words[4].decode())
    except (ValueError, IndexError):
        return None, None
    if comment != _COMMENT % (str(content).encode(), str(whole).encode()):
        return None, None
    return content, whole


def damage(path: Path) -> tuple[Digest | None, str]:
    """Hash a whole object file, decoding nothing.

    Returns:
        The object that the file says it is, and what is wrong with the file (empty: every bit of it is as
        it was written).
    """
    with open(path, "rb") as file:
        size = file.seek(0, io.SEEK_END)
        if size <= _COMMENT_LENGTH:
            return None, f"the file has {size} bytes: it was cut short"
        file.seek(-_COMMENT_LENGTH, io.SEEK_END)
        content, whole = _parse_comment(file.read())
        if content is None:
            return None, "the file does not end as an object does: it was cut short, extended or changed"
        file.seek(0)
        state = hashlib.sha256()
        left = size - _HEX
        while left and (block := file.read(min(left, 1 << 20))):
            state.update(block)
            left -= len(block)
    if left or state.hexdigest() != str(whole):
        return content, "the bytes of the file have changed since it was written"
    return content, ""
