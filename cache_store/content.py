"""What an object holds, and the digest of exactly that."""

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megafold.cache_store.digest import JSON, Digest, canonical_json
from megafold.cache_store.errors import ContentError

#: Dtypes an object may hold, by the names Zarr v3's specification and NumPy share.
DTYPES = frozenset("bool int8 int16 int32 int64 uint8 uint16 uint32 uint64 float16 float32 float64".split())

_MAGIC = b"megafold content 1\n"
_ARRAY_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


def canonical_array(name: str, value: ArrayLike) -> NDArray[Any]:
    """``value`` as a native little-endian C-contiguous array whose NaNs are all the same NaN
    and whose bools are 0 or 1.

    Copies only where something has to change. NaNs differ in sign and payload between machines (0/0 is
    negative on x86, positive on ARM), and would make digests differ where no value does.

    Raises:
        ContentError: the dtype cannot be stored.
    """
    array = np.asarray(value)
    if array.dtype.name not in DTYPES:
        raise ContentError(
            f"array {name}: dtype {array.dtype} cannot be stored, only {', '.join(sorted(DTYPES))}"
        )
    array = np.asarray(array, dtype=array.dtype.newbyteorder("<"), order="C")
    if array.dtype.kind == "f":
        # The pattern of the canonical quiet NaN, compared as integers to leave clean arrays uncopied.
        bits = array.view(f"<u{array.dtype.itemsize}")
        canonical = np.array(np.nan, array.dtype).view(bits.dtype)
        odd = np.isnan(array) & (bits != canonical)
        if odd.any():
            array = np.where(odd, array.dtype.type(np.nan), array)
    elif array.dtype.kind == "b" and (array.view(np.uint8) > 1).any():
        array = array.view(np.uint8) != 0  # a view of other bytes: every non-zero byte is True
    return array


@dataclass(frozen=True, eq=False)
class Content:
    """Arrays by name and a JSON mapping of attributes.

    ``arrays``: bool, int8 to int64, uint8 to uint64 and float16 to float64 of any shape, 0-d and empty
    ones included; brought into canonical form on construction (:func:`canonical_array`), else not copied:
    do not change them afterwards. ``chunks``: chunk shapes by array name, for arrays that are not one
    chunk; how the object is stored, not what it is, so no part of the digest.

    Two contents are the same exactly when their digests are.

    Raises:
        ContentError: a name, dtype, chunk shape or attribute cannot be stored.
    """

    arrays: Mapping[str, NDArray[Any]]
    attributes: Mapping[str, JSON] = field(default_factory=dict)
    chunks: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        arrays = {}
        for name in sorted(self.arrays):
            if not _ARRAY_NAME.fullmatch(name):
                raise ContentError(f"array name {name!r}: use ASCII letters, digits and underscores")
            arrays[name] = canonical_array(name, self.arrays[name])
        canonical_json(dict(self.attributes))
        for name, chunk in self.chunks.items():
            if name not in arrays:
                raise ContentError(f"chunks for {name!r}, which is no array of this object")
            if len(chunk) != arrays[name].ndim or any(length < 1 for length in chunk):
                raise ContentError(f"array {name}: chunks {chunk} do not fit shape {arrays[name].shape}")
        object.__setattr__(self, "arrays", MappingProxyType(arrays))
        object.__setattr__(self, "attributes", MappingProxyType(dict(self.attributes)))
        object.__setattr__(self, "chunks", MappingProxyType(dict(self.chunks)))

    def __reduce__(self) -> tuple[object, ...]:
        return (Content, (dict(self.arrays), dict(self.attributes), dict(self.chunks)))

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, uncompressed."""
        return sum(array.nbytes for array in self.arrays.values())

    def digest(self) -> Digest:
        """SHA-256 over the canonical content.

        The bytes hashed are: ``megafold content 1`` and a newline; for every array in name order the
        canonical JSON of ``{"dtype", "name", "shape"}``, a newline, and the array's C-order
        little-endian bytes (bool: one byte, 0 or 1); then ``attributes``, a newline, and the canonical
        JSON of the attributes. Lengths follow from dtype and shape, so no two contents share a stream.
        """
        state = hashlib.sha256(_MAGIC)
        for name, array in self.arrays.items():
            header: dict[str, JSON] = {"dtype": array.dtype.name, "name": name, "shape": list(array.shape)}
            state.update(canonical_json(header) + b"\n")
            state.update(array.tobytes() if array.ndim == 0 or array.size == 0 else array.data)
        state.update(b"attributes\n" + canonical_json(dict(self.attributes)))
        return Digest(state.hexdigest())
