"""Compressed files, told by their first bytes: names do not always say."""

import gzip
from typing import Final

GZIP_MAGIC: Final = b"\x1f\x8b"
ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"


def unzipped(data: bytes) -> bytes:
    """What a file of these bytes holds, plain or gzip.

    Raises:
        OSError, EOFError, zlib.error: it is damaged or cut off; the check sums are looked at.
    """
    return gzip.decompress(data) if data.startswith(GZIP_MAGIC) else data
