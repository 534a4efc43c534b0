"""Digests: SHA-256 values, and the one canonical form of JSON that they are taken over."""

import hashlib
import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from megafold.cache_store.errors import ContentError

JSON: TypeAlias = "bool | int | float | str | Sequence[JSON] | Mapping[str, JSON] | None"

ALGORITHM = "sha256"
_HEX = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True, order=True, slots=True)
class Digest:
    """A SHA-256 value. ``str()`` gives its 64 lower-case hexadecimal digits."""

    hex: str

    def __post_init__(self) -> None:
        if not isinstance(self.hex, str) or not _HEX.fullmatch(self.hex):
            raise ValueError(f"not a SHA-256 digest of 64 lower-case hexadecimal digits: {self.hex!r}")

    def __str__(self) -> str:
        return self.hex

    @classmethod
    def of_bytes(cls, data: bytes | bytearray | memoryview) -> "Digest":
        """Digest of bytes in memory."""
        return cls(hashlib.sha256(data).hexdigest())

    @classmethod
    def of_file(cls, path: Path | str) -> "Digest":
        """Digest of a file's bytes, streamed."""
        with open(path, "rb") as file:
            return cls(hashlib.file_digest(file, ALGORITHM).hexdigest())

    @classmethod
    def parse(cls, text: str) -> "Digest":
        """Digest written as hexadecimal digits; surrounding white space and upper case are forgiven.

        Raises:
            ValueError: ``text`` is something else.
        """
        return cls(text.strip().lower())


def canonical_json(value: JSON) -> bytes:
    """The one way a JSON value is written: sorted keys, no spaces, UTF-8, shortest exact floats.

    An int and a float are different values (``1`` and ``1.0``), as Python's JSON keeps them apart.
    Tuples are written as lists.

    Raises:
        ContentError: a value JSON cannot hold exactly (NaN, infinities, NumPy scalars, keys that are no
            strings, lone surrogates). The message says where it is.
    """
    _require_json(value, "$")
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return text.encode("utf-8")


def mapping_digest(value: Mapping[str, JSON]) -> Digest:
    """Digest of a mapping's canonical JSON, as recipes use it."""
    return Digest.of_bytes(canonical_json(value))


def _require_json(value: object, where: str) -> None:
    kind = type(value)
    if value is None or kind is bool or kind is int:
        return
    if kind is float:
        if not math.isfinite(value):  # type: ignore[arg-type]
            raise ContentError(f"{where} is {value}: JSON has no such number, use null")
        return
    if kind is str:
        _require_text(value, where)  # type: ignore[arg-type]
    elif isinstance(value, dict):
        for key, item in value.items():
            if type(key) is not str:
                raise ContentError(f"{where} has the key {key!r}: keys are strings")
            _require_text(key, where)
            _require_json(item, f"{where}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            _require_json(item, f"{where}[{index}]")
    else:
        raise ContentError(
            f"{where} is a {kind.__module__}.{kind.__qualname__}: "
            "only None, bool, int, float, str, list and dict can be stored"
        )


def _require_text(text: str, where: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ContentError(f"{where}: {text!r} holds a lone surrogate: not text") from error
