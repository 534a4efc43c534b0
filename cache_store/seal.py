"""The seal in every file named by a digest: what the file is, and the SHA-256 of all its other bytes.

A content digest does not depend on how a file was written, so it cannot notice a changed bit that decodes
to the same content (in a zip header, in unused metadata). The seal does, without decoding anything::

    megafold <kind> <digest of the content> sha256 <digest of every other byte of the file>
"""

import hashlib
from typing import Final, Literal

from megafold.cache_store.digest import Digest

Kind = Literal["object", "manifest"]
HEX: Final = 64


def blank(kind: Kind, content: Digest) -> bytes:
    """A seal whose last :data:`HEX` bytes are still to be filled in."""
    return b"megafold %s %s sha256 %s" % (kind.encode(), str(content).encode(), b"0" * HEX)


def length(kind: Kind) -> int:
    """Bytes of a seal."""
    return len(blank(kind, Digest("0" * HEX)))


def parse(seal: bytes, kind: Kind) -> tuple[Digest, Digest] | None:
    """The digests of the content and of the other bytes; None for bytes that are no seal of this kind."""
    try:
        content, others = Digest(seal[-HEX - 8 - HEX : -HEX - 8].decode()), Digest(seal[-HEX:].decode())
    except ValueError:
        return None
    return (content, others) if seal[:-HEX] == blank(kind, content)[:-HEX] else None


def fill(data: bytearray | memoryview, end: int) -> None:
    """Fill in the seal that ends at ``end`` of the file ``data``."""
    data[end - HEX : end] = others_digest(data, end).encode()


def others_digest(data: bytes | bytearray | memoryview, end: int) -> str:
    """SHA-256 of all bytes but the last :data:`HEX` of the seal that ends at ``end``."""
    view = memoryview(data)
    state = hashlib.sha256(view[: end - HEX])
    state.update(view[end:])
    return state.hexdigest()
