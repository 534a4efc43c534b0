"""Is a file, to the last bit, what its name says? For files on a disk and for bytes from elsewhere."""

import io
from pathlib import Path

from megafold.cache_store import objects
from megafold.cache_store.digest import Digest
from megafold.cache_store.errors import (
    ContentError,
    CorruptManifest,
    CorruptObject,
    MissingManifest,
    SwappedObject,
)
from megafold.cache_store.ledger import Failure, ledger_failures
from megafold.cache_store.manifest import Manifest
from megafold.cache_store.reader import ObjectReader


def quick_check_object(digest: Digest, place: Path | str, data: bytes | None = None) -> None:
    """Compare an object file with its seal and its name, decoding nothing.

    ``place``: the file, which is read unless ``data`` holds its bytes.

    Raises:
        FileNotFoundError: there is no file.
        SwappedObject: it is intact, and another object's.
        CorruptObject: anything else is wrong with it.
    """
    try:
        with io.BytesIO(data) if data is not None else open(place, "rb") as file:
            claimed, reason = objects.damage(file)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise CorruptObject(digest, place, f"the file cannot be read: {error}") from error
    if reason:
        raise CorruptObject(digest, place, reason)
    if claimed != digest:
        raise SwappedObject(digest, place, f"the file holds the object {claimed}")


def check_object(digest: Digest, place: Path | str, data: bytes | None = None) -> None:
    """As :func:`quick_check_object`, and decode the object to take the digest of its content again."""
    quick_check_object(digest, place, data)
    try:
        with ObjectReader(place, digest, data) as reader:
            found = reader.read_all().digest()
    except ContentError as error:
        raise CorruptObject(digest, place, f"it holds what no object can: {error}") from error
    if found != digest:
        raise SwappedObject(digest, place, f"the file holds the object {found}")


def read_table(digest: Digest, path: Path) -> Manifest:
    """The manifest in a file.

    Raises:
        MissingManifest: there is no file.
        CorruptManifest: it is not the manifest that its name says.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise MissingManifest(digest, path, "no such file") from error
    except OSError as error:
        raise CorruptManifest(digest, path, f"it cannot be read: {error}") from error
    return parse_table(digest, path, data)


def parse_table(digest: Digest, place: Path | str, data: bytes) -> Manifest:
    """The manifest in the bytes of the file at ``place``. Raises CorruptManifest."""
    try:
        table, claimed = Manifest.from_parquet(data)
    except (ValueError, OSError) as error:
        raise CorruptManifest(digest, place, f"it cannot be read: {error}") from error
    if claimed != digest:
        raise CorruptManifest(digest, place, f"the file holds the manifest {claimed}")
    return table


def check_table(digest: Digest, place: Path | str, table: Manifest) -> None:
    """Take the digest of a manifest's rows again. Raises CorruptManifest."""
    found = table.digest()
    if found != digest:
        raise CorruptManifest(digest, place, f"its rows have the digest {found}")


def failures_of(digest: Digest, place: Path | str, table: Manifest) -> list[Failure]:
    """The failures in a ledger's table. Raises CorruptManifest."""
    try:
        return ledger_failures(table)
    except ValueError as error:
        raise CorruptManifest(digest, place, str(error)) from error
