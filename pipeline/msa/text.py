"""Reads alignment and hit files: plain, gzip or Zstandard, told apart by their first bytes.

A file is read from disk once; the digest is taken from the same bytes that are parsed.
"""

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import zstandard

from megafold.cache_store import Digest
from megafold.pipeline.errors import AlignmentError

COMPRESSION_SUFFIXES: Final = (".gz", ".zst")
_GZIP_MAGIC: Final = b"\x1f\x8b"
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"


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
    if raw.startswith(_GZIP_MAGIC):
        return gzip.decompress(raw)
    if raw.startswith(_ZSTD_MAGIC):
        # A stream may hold several frames (pzstd, appended files) and need not state its size. An
        # object that is fed chunk by chunk tells a cut frame from a finished one; a reader does not.
        parts = []
        rest = raw
        while rest:
            frame = zstandard.ZstdDecompressor().decompressobj()
            parts.append(frame.decompress(rest))
            if not frame.eof:
                raise EOFError("the last Zstandard frame is cut off")
            rest = frame.unused_data
        return b"".join(parts)
    return raw
