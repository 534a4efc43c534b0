"""A cache behind a URL, read through verified local copies; and how a cache is opened, wherever it is."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NoReturn

from megafold.cache_store import checks, layout
from megafold.cache_store.content import Content
from megafold.cache_store.digest import Digest
from megafold.cache_store.errors import (
    CorruptManifest,
    CorruptObject,
    MissingManifest,
    MissingObject,
    NotACache,
    ReadOnlyCache,
    RemoteError,
)
from megafold.cache_store.journal import Journal
from megafold.cache_store.ledger import Failure
from megafold.cache_store.local import LocalStore
from megafold.cache_store.locks import BuildLock
from megafold.cache_store.manifest import Manifest
from megafold.cache_store.read_through import ReadThrough
from megafold.cache_store.reader import ObjectReader, OpenObject
from megafold.cache_store.store import MAIN_REF, Store
from megafold.cache_store.transport import RemoteFile, RetryPolicy, Transport

_ACTION: Final = "Copy it there again from a cache that has it: `megafold cache push CACHE URL --recheck`."
_URL = re.compile(r"[A-Za-z][A-Za-z0-9+.:-]*://")
_SQUEEZED_URL = re.compile(r"(s3a?|gs|gcs|https?|memory|file):/[^/]")


def is_url(where: object) -> bool:
    """Whether a cache's name is a URL."""
    return isinstance(where, str) and _URL.match(where) is not None


def open_store(where: Path | str | Store) -> Store:
    """Open a cache: a folder, a URL that fsspec understands, or a store, which is open already.

    Raises:
        NotACache: there is none.
        RemoteError: the URL cannot be read.
    """
    if isinstance(where, Store):
        return where
    if isinstance(where, str) and is_url(where):
        return RemoteStore.at(where)
    if _SQUEEZED_URL.match(str(where)):
        raise NotACache(
            f"{where} looks like a URL that was made a Path, which loses a slash: give it as text"
        )
    return LocalStore.at(where)


@dataclass(frozen=True)
class RemoteCounts:
    """What a process has done with a remote cache so far.

    ``downloads`` and ``downloaded_bytes``: files fetched whole. ``copies_used``: files that were here
    already. ``retries``: requests made again. ``refetched``: files whose local copy was damaged.
    ``from_memory``: files of which no local copy could be kept.
    """

    downloads: int = 0
    downloaded_bytes: int = 0
    copies_used: int = 0
    retries: int = 0
    refetched: int = 0
    from_memory: int = 0


class RemoteStore(Store):
    """A read-only cache behind a URL. Open one with :meth:`at`.

    Objects, manifests and ledgers are fetched whole, checked down to the digest of their content, and then
    kept as local copies; refs are asked of the server every time.

    Raises (every method that reads):
        RemoteError: the server cannot be reached, or refuses.
    """

    def __init__(self, transport: Transport, copies: ReadThrough) -> None:
        self.url = transport.url
        self._transport = transport
        self._copies = copies
        self._counts = RemoteCounts()

    def __repr__(self) -> str:
        return f"RemoteStore({self.url!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_counts": RemoteCounts()}

    @classmethod
    def at(
        cls,
        url: str,
        *,
        options: Mapping[str, Any] | None = None,
        copies: ReadThrough | None = None,
        retries: RetryPolicy | None = None,
    ) -> "RemoteStore":
        """Open the cache at a URL.

        Args:
            url: of the folder that holds ``megafold-cache.json``.
            options: for fsspec's file system of the protocol (credentials, ``endpoint_url``); without them
                its configuration and the protocol's own environment variables count.
            copies: where local copies are kept; by default :meth:`ReadThrough.from_environment`.
            retries: how often a request is tried.

        Raises:
            NotACache: there is no cache, or one of a newer format.
            RemoteError: the URL cannot be read, or the protocol's package is missing.
        """
        transport = Transport(url, options, retries)
        try:
            data = transport.read(layout.FORMAT_FILE)
        except FileNotFoundError as error:
            raise NotACache(
                f"{transport.url} is not a cache: it has no {layout.FORMAT_FILE}; "
                "check the URL, or `megafold cache push` copies one there"
            ) from error
        layout.check_header(data, transport.url)
        return cls(transport, copies or ReadThrough.from_environment())

    @property
    def counts(self) -> RemoteCounts:
        """What this process has done so far."""
        return replace(self._counts, retries=self._transport.retried, from_memory=self._copies.not_kept)

    # Objects ------------------------------------------------------------------------------------------

    def object_path(self, digest: Digest) -> str:
        """See :meth:`Store.object_path`."""
        return self._transport.place(layout.object_name(digest))

    def has(self, digest: Digest) -> bool:
        """See :meth:`Store.has`."""
        try:
            self._object_info(digest)
        except MissingObject:
            return False
        return True

    def open(self, digest: Digest) -> ObjectReader:
        """See :meth:`Store.open`. Fetches the object if it is not here; damage on the server shows now."""
        reader = RemoteObject(self, digest)
        reader.attributes  # noqa: B018
        return reader

    def open_copy(self, digest: Digest) -> OpenObject:
        """An intact object, from its local copy or from the server.

        Raises:
            MissingObject: the server does not have it.
            CorruptObject: the server's is damaged.
        """
        name = layout.object_name(digest)
        for _ in range(2):
            copy = self._copy(name, lambda: self._fetched_object(digest))
            if isinstance(copy, bytes):
                return OpenObject(self.object_path(digest), digest, copy)
            try:
                return OpenObject(copy, digest)
            except MissingObject:  # another process has just made room
                continue
            except CorruptObject:  # this machine's disk: the server's is as good as ever
                self.drop_copy(digest)
        return OpenObject(self.object_path(digest), digest, self._fetched_object(digest))

    def drop_copy(self, digest: Digest) -> None:
        """Forget the local copy of an object, which is damaged."""
        self._copies.drop(layout.object_name(digest))
        self._count(refetched=1)

    def digests(self) -> Iterator[Digest]:
        """See :meth:`Store.digests`."""
        for digest, _ in self._listed(layout.OBJECTS):
            yield digest

    def sizes(self) -> Iterator[tuple[Digest, int]]:
        """See :meth:`Store.sizes`."""
        for digest, file in self._listed(layout.OBJECTS):
            yield digest, self.size(digest) if file.size is None else file.size

    def size(self, digest: Digest) -> int:
        """See :meth:`Store.size`."""
        found = self._object_info(digest).size
        if found is None:
            raise RemoteError(f"{self.object_path(digest)}: the server does not say how long the file is")
        return found

    def age_s(self, digest: Digest) -> float:
        """See :meth:`Store.age_s`. Zero where the server does not say."""
        return self._object_info(digest).age_s or 0.0

    def check(self, digest: Digest) -> None:
        """See :meth:`Store.check`. Looks at the server's file, not at a local copy."""
        checks.check_object(digest, self.object_path(digest), self._object_bytes(digest))

    def quick_check(self, digest: Digest) -> None:
        """See :meth:`Store.quick_check`. Looks at the server's file, not at a local copy."""
        checks.quick_check_object(digest, self.object_path(digest), self._object_bytes(digest))

    def _fetched_object(self, digest: Digest) -> bytes:
        """The bytes of an object from the server, checked. Damage may have come on the way: once more."""
        place = self.object_path(digest)
        data = self._object_bytes(digest)
        try:
            checks.check_object(digest, place, data)
        except CorruptObject:
            data = self._object_bytes(digest)
            try:
                checks.check_object(digest, place, data)
            except CorruptObject as error:
                raise type(error)(digest, place, error.reason, _ACTION) from error
        return data

    def _object_bytes(self, digest: Digest) -> bytes:
        name = layout.object_name(digest)
        try:
            return self._download(name)
        except FileNotFoundError as error:
            raise MissingObject(digest, self._transport.place(name), "no such object", _ACTION) from error

    def _object_info(self, digest: Digest) -> RemoteFile:
        name = layout.object_name(digest)
        try:
            return self._transport.info(name)
        except FileNotFoundError as error:
            raise MissingObject(digest, self._transport.place(name), "no such object", _ACTION) from error

    # Manifests and ledgers ----------------------------------------------------------------------------

    def manifest(self, digest: Digest | None = None) -> Manifest:
        """See :meth:`Store.manifest`."""
        if digest is None:
            digest = self.ref(MAIN_REF)
            if digest is None:
                place = self.ref_path(MAIN_REF)
                raise MissingManifest(f"of ref {MAIN_REF}", place, "nothing was published here yet")
        return self._table(digest, layout.manifest_name(digest))

    def manifests(self) -> Iterator[Digest]:
        """See :meth:`Store.manifests`."""
        for digest, _ in self._listed(layout.MANIFESTS):
            yield digest

    def ledger(self, digest: Digest) -> list[Failure]:
        """See :meth:`Store.ledger`."""
        name = layout.ledger_name(digest)
        return checks.failures_of(digest, self._transport.place(name), self._table(digest, name))

    def check_manifest(self, digest: Digest) -> None:
        """See :meth:`Store.check_manifest`. Looks at the server's file."""
        self._fetched_table(digest, layout.manifest_name(digest))

    def check_ledger(self, digest: Digest) -> None:
        """See :meth:`Store.check_ledger`. Looks at the server's file."""
        name = layout.ledger_name(digest)
        place = self._transport.place(name)
        checks.failures_of(
            digest, place, checks.parse_table(digest, place, self._fetched_table(digest, name))
        )

    def ledgers(self) -> Iterator[Digest]:
        """See :meth:`Store.ledgers`."""
        for digest, _ in self._listed(layout.LEDGERS):
            yield digest

    def _table(self, digest: Digest, name: str) -> Manifest:
        copy = self._copy(name, lambda: self._fetched_table(digest, name))
        if not isinstance(copy, bytes):
            try:
                return checks.read_table(digest, copy)
            except MissingManifest:  # another process has just made room
                pass
            except CorruptManifest:
                self._copies.drop(name)
                self._count(refetched=1)
            copy = self._fetched_table(digest, name)
        return checks.parse_table(digest, self._transport.place(name), copy)

    def _fetched_table(self, digest: Digest, name: str) -> bytes:
        """The bytes of a manifest or ledger from the server, down to its rows what the digest says."""
        place = self._transport.place(name)
        try:
            data = self._download(name)
        except FileNotFoundError as error:
            raise MissingManifest(digest, place, "no such file", _ACTION) from error
        try:
            checks.check_table(digest, place, checks.parse_table(digest, place, data))
        except CorruptManifest as error:
            raise CorruptManifest(digest, place, error.reason, _ACTION) from error
        return data

    # Refs ---------------------------------------------------------------------------------------------

    def ref(self, name: str = MAIN_REF) -> Digest | None:
        """See :meth:`Store.ref`."""
        try:
            data = self._transport.read(layout.ref_name(name))
        except FileNotFoundError:
            return None
        return layout.ref_digest(data, name, self.ref_path(name))

    def ref_path(self, name: str) -> str:
        """See :meth:`Store.ref_path`."""
        return self._transport.place(layout.ref_name(name))

    def refs(self) -> Iterator[str]:
        """See :meth:`Store.refs`."""
        for file in self._files(layout.REFS):
            name = file.name.removeprefix(f"{layout.REFS}/")
            if layout.is_name(name):
                yield name

    # Files --------------------------------------------------------------------------------------------

    def journals(self) -> Iterator[str]:
        """None: nobody builds behind a URL, and what was copied along is of no use."""
        return iter(())

    def temporary_files(self) -> Iterator[str]:
        """None: what is behind a URL appears whole, or is a foreign file."""
        return iter(())

    def foreign_files(self) -> Iterator[str]:
        """See :meth:`Store.foreign_files`."""
        for folder in (layout.OBJECTS, layout.MANIFESTS, layout.LEDGERS):
            for file in self._files(folder):
                if layout.named_digest(file.name) is None:
                    yield self._transport.place(file.name)

    def _listed(self, folder: str) -> Iterator[tuple[Digest, RemoteFile]]:
        for file in self._files(folder):
            if digest := layout.named_digest(file.name):
                yield digest, file

    def _files(self, folder: str) -> list[RemoteFile]:
        found = self._transport.files(folder)
        if not found and not self._transport.names():
            # The header is there, so an empty listing of what is beside it is none.
            raise RemoteError(
                f"{self.url}: the server lists no folders, which this needs. Training does not; else use a "
                "server that lists them (S3 does; python -m http.server and nginx's autoindex, too)."
            )
        return found

    def _copy(self, name: str, fetch: Callable[[], bytes]) -> Path | bytes:
        """The local copy of a file, which is made if it has to be; its bytes where none can be kept."""
        path = self._copies.find(name)
        if path is None:
            with self._copies.fetching(name):
                path = self._copies.find(name)  # another process may have fetched it meanwhile
                if path is None:
                    data = fetch()
                    return self._copies.keep(name, data) or data
        self._count(copies_used=1)
        return path

    def _download(self, name: str) -> bytes:
        data = self._transport.read(name)
        self._count(downloads=1, downloaded_bytes=len(data))
        return data

    def _count(self, **more: int) -> None:
        now = {name: getattr(self._counts, name) + number for name, number in more.items()}
        self._counts = replace(self._counts, **now)

    # Writing: refused ---------------------------------------------------------------------------------

    def _refuse(self) -> NoReturn:
        raise ReadOnlyCache(
            f"{self.url}: caches behind URLs are read-only. Build into a folder, then `megafold cache push`."
        )

    def put(self, content: Content) -> Digest:
        """Refused."""
        self._refuse()

    def delete(self, digest: Digest) -> None:
        """Refused."""
        self._refuse()

    def put_manifest(self, manifest: Manifest) -> Digest:
        """Refused."""
        self._refuse()

    def put_ledger(self, failures: Sequence[Failure]) -> Digest:
        """Refused."""
        self._refuse()

    def move_ref(self, name: str, expected: Digest | None, new: Digest) -> None:
        """Refused."""
        self._refuse()

    def build_lock(self, wait: float = 0.0) -> BuildLock:
        """Refused."""
        self._refuse()

    def journal(self, build: str, *, sync_every_s: float = 0.0) -> Journal:
        """Refused."""
        self._refuse()

    def sweep(self, older_than_s: float = 3600.0, lock: BuildLock | None = None) -> list[Path]:
        """Refused."""
        self._refuse()


class RemoteObject(ObjectReader):
    """An open object of a remote cache: opens its local copy, and fetches it again if that is gone."""

    def __init__(self, store: RemoteStore, digest: Digest) -> None:
        super().__init__(store.object_path(digest), digest)
        self._store = store

    def __reduce__(self) -> tuple[object, ...]:
        return (RemoteObject, (self._store, self.digest))

    def renew(self) -> bool:
        """See :meth:`ObjectReader.renew`."""
        state, self._state = self._state, None
        if state is not None:
            state.store.close()
        self._store.drop_copy(self.digest)
        return True

    def _opened(self) -> OpenObject:
        return self._store.open_copy(self.digest)
