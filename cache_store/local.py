"""A store in a directory of a local or shared file system."""

import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from megafold.cache_store import files, objects
from megafold.cache_store.content import Content
from megafold.cache_store.digest import ALGORITHM, Digest
from megafold.cache_store.errors import (
    ContentError,
    CorruptManifest,
    CorruptObject,
    CorruptRef,
    MissingManifest,
    MissingObject,
    NotACache,
    RefMoved,
    SwappedObject,
)
from megafold.cache_store.journal import Journal
from megafold.cache_store.ledger import Failure, ledger_failures, ledger_table
from megafold.cache_store.locks import BuildLock, KernelLock
from megafold.cache_store.manifest import Manifest
from megafold.cache_store.reader import ObjectReader
from megafold.cache_store.store import MAIN_REF, Store

FORMAT_FILE = "megafold-cache.json"
FORMAT = 1

_OBJECT_SUFFIX = ".zarr.zip"
_TABLE_SUFFIX = ".parquet"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
_REF_LOCK_WAIT_S = 60.0


class LocalStore(Store):
    """A store in a directory. Make one with :meth:`create`, open one with :meth:`at`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __repr__(self) -> str:
        return f"LocalStore({str(self.path)!r})"

    @classmethod
    def create(cls, path: Path | str, *, exist_ok: bool = True) -> "LocalStore":
        """Make a cache of a new or empty folder; or open the cache that is there.

        Raises:
            NotACache: the folder holds other things, or a cache this version cannot read.
            FileExistsError: it is a cache, and ``exist_ok`` is false.
            ReadOnlyCache: the folder cannot be written.
        """
        path = Path(path).absolute()
        if (path / FORMAT_FILE).exists():
            if not exist_ok:
                raise FileExistsError(f"{path} is a cache already")
            return cls.at(path)
        if path.exists():
            if not path.is_dir():
                raise NotACache(f"{path} is not a folder: name a new or empty folder for the cache")
            others = [item.name for item in path.iterdir() if not item.name.startswith(".")]
            if others:
                raise NotACache(
                    f"{path} is not a cache, and not empty ({min(others)} is in it): "
                    "name a new or empty folder"
                )
        text = json.dumps({"digest": ALGORITHM, "format": FORMAT}, indent=2) + "\n"
        files.publish(path / FORMAT_FILE, text.encode())
        return cls(path)

    @classmethod
    def at(cls, path: Path | str) -> "LocalStore":
        """Open the cache in a folder. Reading needs no right to write.

        Raises:
            NotACache: the folder is none, or one of a newer format.
        """
        path = Path(path).absolute()
        try:
            header = json.loads((path / FORMAT_FILE).read_bytes())
            version, algorithm = header["format"], header["digest"]
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotACache(f"{path} is not a cache: it has no {FORMAT_FILE}") from error
        except (ValueError, KeyError, TypeError) as error:
            raise NotACache(
                f"{path / FORMAT_FILE} is damaged ({error!r}): restore it from another cache"
            ) from error
        if version != FORMAT or algorithm != ALGORITHM:
            raise NotACache(
                f"{path} is a cache of format {version} with {algorithm} digests, and this version of "
                f"megafold reads format {FORMAT} with {ALGORITHM}: use the version that wrote it"
            )
        return cls(path)

    # Objects ------------------------------------------------------------------------------------------

    def object_path(self, digest: Digest) -> Path:
        """See :meth:`Store.object_path`."""
        return self.path / "objects" / digest.hex[:2] / f"{digest}{_OBJECT_SUFFIX}"

    def put(self, content: Content) -> Digest:
        """See :meth:`Store.put`."""
        digest = content.digest()
        path = self.object_path(digest)
        try:
            if objects.claimed_digest(path) == digest:
                with contextlib.suppress(PermissionError):
                    os.utime(path)  # wanted again: not to be collected now
                return digest
        except FileNotFoundError:
            pass
        files.publish(path, objects.encode(content, digest))
        return digest

    def has(self, digest: Digest) -> bool:
        """See :meth:`Store.has`."""
        return self.object_path(digest).is_file()

    def open(self, digest: Digest) -> ObjectReader:
        """See :meth:`Store.open`."""
        self._stat(digest)
        return ObjectReader(self.object_path(digest), digest)

    def digests(self) -> Iterator[Digest]:
        """See :meth:`Store.digests`."""
        for path in self._object_files():
            if (digest := _named(path, _OBJECT_SUFFIX)) and path == self.object_path(digest):
                yield digest

    def size(self, digest: Digest) -> int:
        """See :meth:`Store.size`."""
        return self._stat(digest).st_size

    def age_s(self, digest: Digest) -> float:
        """See :meth:`Store.age_s`."""
        return time.time() - self._stat(digest).st_mtime

    def delete(self, digest: Digest) -> None:
        """See :meth:`Store.delete`."""
        path = self.object_path(digest)
        with files.explain_read_only(path):
            path.unlink(missing_ok=True)

    def check(self, digest: Digest) -> None:
        """See :meth:`Store.check`."""
        self.quick_check(digest)
        path = self.object_path(digest)
        try:
            with ObjectReader(path, digest) as reader:
                found = reader.read_all().digest()
        except ContentError as error:
            raise CorruptObject(digest, path, f"it holds what no object can: {error}") from error
        if found != digest:
            raise SwappedObject(digest, path, f"the file holds the object {found}")

    def quick_check(self, digest: Digest) -> None:
        """See :meth:`Store.quick_check`."""
        self._stat(digest)
        path = self.object_path(digest)
        try:
            claimed, reason = objects.damage(path)
        except OSError as error:
            raise CorruptObject(digest, path, f"the file cannot be read: {error}") from error
        if reason:
            raise CorruptObject(digest, path, reason)
        if claimed != digest:
            raise SwappedObject(digest, path, f"the file holds the object {claimed}")

    def _stat(self, digest: Digest) -> os.stat_result:
        path = self.object_path(digest)
        try:
            return path.stat()
        except FileNotFoundError as error:
            raise MissingObject(digest, path, "no such object") from error

    def _object_files(self) -> Iterator[Path]:
        for folder in _children(self.path / "objects"):
            yield from _children(folder)

    # Manifests and ledgers ----------------------------------------------------------------------------

    def manifest_path(self, digest: Digest) -> Path:
        """Where a manifest's file is, or would be."""
        return self.path / "manifests" / f"{digest}{_TABLE_SUFFIX}"

    def ledger_path(self, digest: Digest) -> Path:
        """Where a ledger's file is, or would be."""
        return self.path / "failures" / f"{digest}{_TABLE_SUFFIX}"

    def put_manifest(self, manifest: Manifest) -> Digest:
        """See :meth:`Store.put_manifest`."""
        return _publish_table(manifest, self.manifest_path)

    def manifest(self, digest: Digest | None = None) -> Manifest:
        """See :meth:`Store.manifest`."""
        if digest is None:
            digest = self.ref(MAIN_REF)
            if digest is None:
                raise MissingManifest(
                    f"of ref {MAIN_REF}", self.ref_path(MAIN_REF), "nothing was published here yet"
                )
        return _read_table(digest, self.manifest_path(digest))

    def manifests(self) -> Iterator[Digest]:
        """See :meth:`Store.manifests`."""
        yield from _names(self.path / "manifests", _TABLE_SUFFIX)

    def put_ledger(self, failures: Sequence[Failure]) -> Digest:
        """See :meth:`Store.put_ledger`."""
        return _publish_table(ledger_table(failures), self.ledger_path)

    def ledger(self, digest: Digest) -> list[Failure]:
        """See :meth:`Store.ledger`."""
        path = self.ledger_path(digest)
        try:
            return ledger_failures(_read_table(digest, path))
        except ValueError as error:
            raise CorruptManifest(digest, path, str(error)) from error

    def check_manifest(self, digest: Digest) -> None:
        """See :meth:`Store.check_manifest`."""
        _check_table(digest, self.manifest_path(digest))

    def check_ledger(self, digest: Digest) -> None:
        """See :meth:`Store.check_ledger`."""
        _check_table(digest, self.ledger_path(digest))
        self.ledger(digest)

    def ledgers(self) -> Iterator[Digest]:
        """See :meth:`Store.ledgers`."""
        yield from _names(self.path / "failures", _TABLE_SUFFIX)

    # Refs ---------------------------------------------------------------------------------------------

    def ref(self, name: str = MAIN_REF) -> Digest | None:
        """See :meth:`Store.ref`."""
        path = self.ref_path(name)
        try:
            text = path.read_text("ascii")
        except FileNotFoundError:
            return None
        except UnicodeDecodeError as error:
            raise CorruptRef(f"ref {name} ({path}) holds no digest: write the name of a manifest") from error
        try:
            digest = Digest(text.removesuffix("\n"))
        except ValueError as error:
            raise CorruptRef(f"ref {name} ({path}) holds no digest: write the name of a manifest") from error
        return digest

    def refs(self) -> Iterator[str]:
        """See :meth:`Store.refs`."""
        for path in _children(self.path / "refs"):
            if _NAME.fullmatch(path.name):
                yield path.name

    def move_ref(self, name: str, expected: Digest | None, new: Digest) -> None:
        """See :meth:`Store.move_ref`."""
        path = self.ref_path(name)
        with KernelLock(self.path / "locks" / "refs", wait=_REF_LOCK_WAIT_S):
            found = self.ref(name)
            if found != expected:
                raise RefMoved(name, expected, found)
            if not self.manifest_path(new).is_file():
                raise MissingManifest(new, self.manifest_path(new), f"ref {name} was not moved to it")
            files.publish(path, f"{new}\n".encode(), 0o644)

    def ref_path(self, name: str) -> Path:
        """See :meth:`Store.ref_path`."""
        return self.path / "refs" / _checked_name(name, "ref")

    # Builds -------------------------------------------------------------------------------------------

    def build_lock(self, wait: float = 0.0) -> BuildLock:
        """See :meth:`Store.build_lock`."""
        return BuildLock(self.path / "locks" / "build", wait)

    def journal(self, build: str, *, sync_every: int = 1) -> Journal:
        """See :meth:`Store.journal`."""
        return Journal(
            self.path / "journal" / f"{_checked_name(build, 'build id')}.jsonl", sync_every=sync_every
        )

    def journals(self) -> Iterator[str]:
        """See :meth:`Store.journals`."""
        for path in _children(self.path / "journal"):
            if path.suffix == ".jsonl" and _NAME.fullmatch(path.stem):
                yield path.stem

    # Housekeeping -------------------------------------------------------------------------------------

    def temporary_files(self) -> Iterator[Path]:
        """See :meth:`Store.temporary_files`."""
        yield from files.temporary_files(self.path)

    def foreign_files(self) -> Iterator[Path]:
        """See :meth:`Store.foreign_files`."""
        for path in self._object_files():
            digest = _named(path, _OBJECT_SUFFIX)
            if (digest is None or path != self.object_path(digest)) and not files.is_temporary(path):
                yield path
        for folder in ("manifests", "failures"):
            for path in _children(self.path / folder):
                if _named(path, _TABLE_SUFFIX) is None and not files.is_temporary(path):
                    yield path

    def sweep(self, older_than_s: float = 3600.0, lock: BuildLock | None = None) -> list[Path]:
        """See :meth:`Store.sweep`."""
        with lock or self.build_lock():
            removed = []
            for path in files.temporary_files(self.path):
                with contextlib.suppress(FileNotFoundError), files.explain_read_only(path):
                    if time.time() - path.stat().st_mtime >= older_than_s:
                        path.unlink()
                        removed.append(path)
            return removed


def _publish_table(table: Manifest, path_of: Callable[[Digest], Path]) -> Digest:
    digest = table.digest()
    path = path_of(digest)
    try:
        _read_table(digest, path)
    except (MissingManifest, CorruptManifest):
        files.publish(path, table.to_parquet(digest))
    return digest


def _read_table(digest: Digest, path: Path) -> Manifest:
    try:
        table, claimed = Manifest.from_parquet(path.read_bytes())
    except FileNotFoundError as error:
        raise MissingManifest(digest, path, "no such file") from error
    except (ValueError, OSError) as error:
        raise CorruptManifest(digest, path, f"it cannot be read: {error}") from error
    if claimed != digest:
        raise CorruptManifest(digest, path, f"the file holds the manifest {claimed}")
    return table


def _check_table(digest: Digest, path: Path) -> None:
    found = _read_table(digest, path).digest()
    if found != digest:
        raise CorruptManifest(digest, path, f"its rows have the digest {found}")


def _children(folder: Path) -> Iterable[Path]:
    """What a folder holds, in order; nothing for a folder that is not there."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []


def _names(folder: Path, suffix: str) -> Iterator[Digest]:
    for path in _children(folder):
        if digest := _named(path, suffix):
            yield digest


def _named(path: Path, suffix: str) -> Digest | None:
    """The digest a file is named after, None where its name is something else."""
    if not path.name.endswith(suffix):
        return None
    try:
        return Digest(path.name.removesuffix(suffix))
    except ValueError:
        return None


def _checked_name(name: str, what: str) -> str:
    if not _NAME.fullmatch(name):
        raise ValueError(
            f"{what} {name!r}: use up to 100 letters, digits, dots, dashes and underscores, "
            "the first of them a letter or digit"
        )
    return name
