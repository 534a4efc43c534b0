"""Where things are in a cache, and how its header and refs read: the same in a folder and behind a URL."""

import json
import re
from pathlib import Path, PurePosixPath
from typing import Final

from megafold.cache_store.digest import ALGORITHM, Digest
from megafold.cache_store.errors import CorruptRef, NotACache

FORMAT_FILE: Final = "megafold-cache.json"
FORMAT: Final = 1
OBJECTS: Final = "objects"
MANIFESTS: Final = "manifests"
LEDGERS: Final = "failures"
REFS: Final = "refs"
JOURNALS: Final = "journal"

_OBJECT_SUFFIX = ".zarr.zip"
_TABLE_SUFFIX = ".parquet"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")


def object_name(digest: Digest) -> str:
    """An object's file, relative to the cache."""
    return f"{OBJECTS}/{digest.hex[:2]}/{digest}{_OBJECT_SUFFIX}"


def manifest_name(digest: Digest) -> str:
    """A manifest's file, relative to the cache."""
    return f"{MANIFESTS}/{digest}{_TABLE_SUFFIX}"


def ledger_name(digest: Digest) -> str:
    """The file of a ledger of failures, relative to the cache."""
    return f"{LEDGERS}/{digest}{_TABLE_SUFFIX}"


def ref_name(name: str) -> str:
    """A ref's file, relative to the cache. Raises ValueError for what cannot name a ref."""
    return f"{REFS}/{checked(name, 'ref')}"


def named_digest(name: str) -> Digest | None:
    """The digest that a file (``name`` relative to the cache) is named after; None for one out of place."""
    last = PurePosixPath(name).name
    for suffix, place in (
        (_OBJECT_SUFFIX, object_name),
        (_TABLE_SUFFIX, manifest_name),
        (_TABLE_SUFFIX, ledger_name),
    ):
        if last.endswith(suffix):
            try:
                digest = Digest(last.removesuffix(suffix))
            except ValueError:
                return None
            if place(digest) == name:
                return digest
    return None


def is_name(text: str) -> bool:
    """Whether a ref or a build may be called so."""
    return _NAME.fullmatch(text) is not None


def checked(name: str, what: str) -> str:
    """``name`` itself, which goes into a path. Raises ValueError for one that may not."""
    if not is_name(name):
        raise ValueError(
            f"{what} {name!r}: use up to 100 letters, digits, dots, dashes and underscores, "
            "the first of them a letter or digit"
        )
    return name


def header() -> bytes:
    """What the file that makes a folder a cache holds."""
    return (json.dumps({"digest": ALGORITHM, "format": FORMAT}, indent=2) + "\n").encode()


def check_header(data: bytes, cache: Path | str) -> None:
    """Make sure that this version reads a cache with this header.

    Raises:
        NotACache: it is damaged, or of another format.
    """
    try:
        fields = json.loads(data)
        version, algorithm = fields["format"], fields["digest"]
    except (ValueError, KeyError, TypeError) as error:
        raise NotACache(
            f"{cache}/{FORMAT_FILE} is damaged ({error!r}): restore it from another cache"
        ) from error
    if version != FORMAT or algorithm != ALGORITHM:
        raise NotACache(
            f"{cache} is a cache of format {version} with {algorithm} digests, and this version of "
            f"megafold reads format {FORMAT} with {ALGORITHM}: use the version that wrote it"
        )


def ref_digest(data: bytes, name: str, place: Path | str) -> Digest:
    """The digest in a ref's file.

    Raises:
        CorruptRef: it holds none.
    """
    try:
        return Digest(data.decode("ascii").removesuffix("\n"))
    except ValueError as error:
        raise CorruptRef(
            f"ref {name} ({place}) holds no digest: write the name of a manifest into it, or remove it and "
            "build again"
        ) from error
