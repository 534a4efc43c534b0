"""Reads alignment and hit files: plain, gzip or Zstandard, told apart by their first bytes.

A file is read from disk once; the digest is taken from the same bytes that are parsed.
"""

import io
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Protocol

import zstandard

from megafold.cache_store import Digest
from megafold.pipeline.compression import GZIP_MAGIC, ZSTD_MAGIC
from megafold.pipeline.errors import AlignmentError

COMPRESSION_SUFFIXES: Final = (".gz", ".zst")
_PIECE_BYTES: Final = 1 << 16


@dataclass(frozen=True, kw_only=True)
class AlignmentText:
    """One alignment or hit file in memory.

    ``name`` is the file's name without a compression suffix, ``digest`` the SHA-256 (64 hex digits) of the
    file as it lies on disk, ``data`` its decompressed bytes.
    """

    name: str
    digest: str
    data: bytes


def plain_name(path: Path) -> str:
    """The file's name without a compression suffix."""
    return path.name.removesuffix(path.suffix) if path.suffix in COMPRESSION_SUFFIXES else path.name


def read_text(path: Path) -> AlignmentText:
    """Read and decompress one file.

    Raises:
        AlignmentError: the file cannot be read (``unreadable``) or its compression is broken
            (``broken-compression``).
    """
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise AlignmentError(
            f"{path}: cannot be read ({error.strerror}); check the path and its permissions",
            reason="unreadable",
        ) from error
    digest = str(Digest.of_bytes(raw))
    try:
        data = _decompress(raw)
    except (EOFError, OSError, zlib.error, zstandard.ZstdError) as error:
        raise AlignmentError(
            f"{path}: broken compression ({error}); the file is probably cut off, fetch it again",
            reason="broken-compression",
        ) from error
    return AlignmentText(name=plain_name(path), digest=digest, data=data)


def _decompress(raw: bytes) -> bytes:
    if raw.startswith(GZIP_MAGIC):
        return _joined(_members(raw, lambda: zlib.decompressobj(wbits=31)))
    if raw.startswith(ZSTD_MAGIC):
        return _joined(_members(raw, lambda: zstandard.ZstdDecompressor().decompressobj()))
    return raw


def _joined(pieces: Iterable[bytes]) -> bytes:
    """The pieces as one, which grows in place: joining a list holds all twice."""
    buffer = io.BytesIO()
    for piece in pieces:
        buffer.write(piece)
    return buffer.getvalue()


class _Decompressor(Protocol):
    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


def _members(raw: bytes, start: Callable[[], _Decompressor]) -> Iterator[bytes]:
    """Decompress all members or frames of a file, piece by piece (bgzip, pzstd, appended files: many)."""
    current = start()
    for first in range(0, len(raw), _PIECE_BYTES):
        piece = raw[first : first + _PIECE_BYTES]
        while piece:
            if current.eof:
                piece = piece.lstrip(b"\0")  # padding between members
                if not piece:
                    break
                current = start()
            yield current.decompress(piece)
            piece = current.unused_data if current.eof else b""
    if not current.eof:
        raise EOFError("the last part is cut off")
