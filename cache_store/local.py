"""A store in a directory of a local or shared file system."""

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from megafold.cache_store import checks, files, layout, objects
from megafold.cache_store.content import Content
from megafold.cache_store.digest import Digest
from megafold.cache_store.errors import (
    CorruptManifest,
    MissingManifest,
    MissingObject,
    NotACache,
    RefMoved,
)
from megafold.cache_store.journal import Journal
from megafold.cache_store.layout import FORMAT_FILE
from megafold.cache_store.ledger import Failure, ledger_table
from megafold.cache_store.locks import BuildLock, KernelLock
from megafold.cache_store.manifest import Manifest
from megafold.cache_store.reader import ObjectReader
from megafold.cache_store.store import MAIN_REF, Store

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
        if path.exists() or path.is_symlink():
            if not path.is_dir():
                kind = "a file" if path.exists() else "a link to nothing"
                raise NotACache(f"{path} is {kind}: name a new or empty folder for the cache")
            others = [item.name for item in path.iterdir() if not item.name.startswith(".")]
            if others:
                raise NotACache(
                    f"{path} is not a cache, and not empty ({min(others)} is in it): "
                    "name a new or empty folder"
                )
        files.publish(path / FORMAT_FILE, layout.header())
        return cls(path)

    @classmethod
    def at(cls, path: Path | str) -> "LocalStore":
        """Open the cache in a folder. Reading needs no right to write.

        Raises:
            NotACache: the folder is none, or one of a newer format.
        """
        path = Path(path).absolute()
        try:
            data = (path / FORMAT_FILE).read_bytes()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise NotACache(
                f"{path} is not a cache: it has no {FORMAT_FILE}; "
                "check the path, or `megafold cache build` makes one"
            ) from error
        layout.check_header(data, path)
        return cls(path)

    # Objects ------------------------------------------------------------------------------------------

    def object_path(self, digest: Digest) -> Path:
        """See :meth:`Store.object_path`."""
        return self.path / layout.object_name(digest)

    def put(self, content: Content) -> Digest:
        """See :meth:`Store.put`."""
        digest = content.digest()
        path = self.object_path(digest)
        try:
            if objects.claimed_digest(path) == digest:
                _touch(path)
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
            if digest := layout.named_digest(self._name(path)):
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
        with files.explain_refusal(path):
            path.unlink(missing_ok=True)

    def check(self, digest: Digest) -> None:
        """See :meth:`Store.check`."""
        with self._explain_missing(digest) as path:
            checks.check_object(digest, path)

    def quick_check(self, digest: Digest) -> None:
        """See :meth:`Store.quick_check`."""
        with self._explain_missing(digest) as path:
            checks.quick_check_object(digest, path)

    @contextlib.contextmanager
    def _explain_missing(self, digest: Digest) -> Iterator[Path]:
        path = self.object_path(digest)
        try:
            yield path
        except FileNotFoundError as error:
            raise MissingObject(digest, path, "no such object") from error

    def _stat(self, digest: Digest) -> os.stat_result:
        with self._explain_missing(digest) as path:
            return path.stat()

    def _object_files(self) -> Iterator[Path]:
        for folder in _children(self.path / layout.OBJECTS):
            yield from _children(folder)

    def _table_digests(self, folder: str) -> Iterator[Digest]:
        for path in _children(self.path / folder):
            if digest := layout.named_digest(self._name(path)):
                yield digest

    def _name(self, path: Path) -> str:
        return path.relative_to(self.path).as_posix()

    # Manifests and ledgers ----------------------------------------------------------------------------

    def manifest_path(self, digest: Digest) -> Path:
        """Where a manifest's file is, or would be."""
        return self.path / layout.manifest_name(digest)

    def ledger_path(self, digest: Digest) -> Path:
        """Where a ledger's file is, or would be."""
        return self.path / layout.ledger_name(digest)

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
        return checks.read_table(digest, self.manifest_path(digest))

    def manifests(self) -> Iterator[Digest]:
        """See :meth:`Store.manifests`."""
        yield from self._table_digests(layout.MANIFESTS)

    def put_ledger(self, failures: Sequence[Failure]) -> Digest:
        """See :meth:`Store.put_ledger`."""
        return _publish_table(ledger_table(failures), self.ledger_path)

    def ledger(self, digest: Digest) -> list[Failure]:
        """See :meth:`Store.ledger`."""
        path = self.ledger_path(digest)
        return checks.failures_of(digest, path, checks.read_table(digest, path))

    def check_manifest(self, digest: Digest) -> None:
        """See :meth:`Store.check_manifest`."""
        path = self.manifest_path(digest)
        checks.check_table(digest, path, checks.read_table(digest, path))

    def check_ledger(self, digest: Digest) -> None:
        """See :meth:`Store.check_ledger`."""
        path = self.ledger_path(digest)
        table = checks.read_table(digest, path)
        checks.check_table(digest, path, table)
        checks.failures_of(digest, path, table)

    def ledgers(self) -> Iterator[Digest]:
        """See :meth:`Store.ledgers`."""
        yield from self._table_digests(layout.LEDGERS)

    # Refs ---------------------------------------------------------------------------------------------

    def ref(self, name: str = MAIN_REF) -> Digest | None:
        """See :meth:`Store.ref`."""
        path = self.ref_path(name)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            return None
        return layout.ref_digest(data, name, path)

    def refs(self) -> Iterator[str]:
        """See :meth:`Store.refs`."""
        for path in _children(self.path / layout.REFS):
            if layout.is_name(path.name):
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
        return self.path / layout.ref_name(name)

    # Builds -------------------------------------------------------------------------------------------

    def build_lock(self, wait: float = 0.0) -> BuildLock:
        """See :meth:`Store.build_lock`."""
        return BuildLock(self.path / "locks" / "build", wait)

    def journal(self, build: str, *, sync_every_s: float = 0.0) -> Journal:
        """See :meth:`Store.journal`."""
        return Journal(
            self.path / layout.JOURNALS / f"{layout.checked(build, 'build id')}.jsonl",
            sync_every_s=sync_every_s,
        )

    def journals(self) -> Iterator[str]:
        """See :meth:`Store.journals`."""
        for path in _children(self.path / layout.JOURNALS):
            if path.suffix == ".jsonl" and layout.is_name(path.stem):
                yield path.stem

    # Housekeeping -------------------------------------------------------------------------------------

    def temporary_files(self) -> Iterator[Path]:
        """See :meth:`Store.temporary_files`."""
        yield from files.temporary_files(self.path)

    def foreign_files(self) -> Iterator[Path]:
        """See :meth:`Store.foreign_files`."""
        for path in self._object_files():
            if layout.named_digest(self._name(path)) is None and not files.is_temporary(path):
                yield path
        for folder in (layout.MANIFESTS, layout.LEDGERS):
            for path in _children(self.path / folder):
                if layout.named_digest(self._name(path)) is None and not files.is_temporary(path):
                    yield path

    def sweep(self, older_than_s: float = 3600.0, lock: BuildLock | None = None) -> list[Path]:
        """See :meth:`Store.sweep`."""
        with lock or self.build_lock():
            removed = []
            for path in files.temporary_files(self.path):
                with contextlib.suppress(FileNotFoundError), files.explain_refusal(path):
                    if time.time() - path.stat().st_mtime >= older_than_s:
                        path.unlink()
                        removed.append(path)
            return removed


def _publish_table(table: Manifest, path_of: Callable[[Digest], Path]) -> Digest:
    digest = table.digest()
    path = path_of(digest)
    try:
        checks.read_table(digest, path)
    except (MissingManifest, CorruptManifest):
        files.publish(path, table.to_parquet(digest))
    return digest


def _touch(path: Path) -> None:
    """Note that an object is wanted again, so that it is not collected now; where that can be noted."""
    try:
        os.utime(path)
    except OSError as error:
        if not files.is_read_only(error):
            raise


def _children(folder: Path) -> Iterable[Path]:
    """What a folder holds, in order; nothing for a folder that is not there."""
    try:
        return sorted(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
