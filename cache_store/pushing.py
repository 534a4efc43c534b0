"""Copying a snapshot behind a URL: what is missing there, objects first, the ref last."""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final

from megafold.cache_store import checks, layout
from megafold.cache_store.digest import Digest
from megafold.cache_store.errors import CorruptObject, MissingObject, NotACache, RefMoved
from megafold.cache_store.local import LocalStore
from megafold.cache_store.store import MAIN_REF
from megafold.cache_store.transport import RetryPolicy, Transport

_THREADS: Final = 8


@dataclass(frozen=True)
class Snapshot:
    """What is copied: a manifest, the objects that it names, and the ledgers of failures."""

    manifest: Digest
    objects: frozenset[Digest]
    ledgers: frozenset[Digest] = frozenset()


@dataclass(frozen=True)
class Pushed:
    """What a push has done.

    ``uploaded`` and ``present``: numbers of objects. ``uploaded_bytes``: of the former. ``ref_moved``: ref
    ``main`` named another manifest before, or none.
    """

    uploaded: int
    uploaded_bytes: int
    present: int
    ref_moved: bool


def push(
    source: LocalStore,
    url: str,
    snapshot: Snapshot,
    *,
    recheck: bool = False,
    progress: Callable[[int, int], None] | None = None,
    options: Mapping[str, Any] | None = None,
    retries: RetryPolicy | None = None,
) -> Pushed:
    """Copy a snapshot behind a URL and let ref ``main`` there name it.

    What is there already, by name and length, stays: an interrupted push goes on where it was, and a
    repeated one does nothing. Every object is compared with its seal before it leaves. URLs know no
    compare-and-swap, so let one process at a time push to one URL.

    Args:
        source: the cache to copy from.
        url: of the folder to copy to, which may be absent or empty.
        snapshot: what to copy.
        recheck: read what is there already, and replace what is damaged.
        progress: called with how many objects are there and how many will be.
        options: as of :meth:`RemoteStore.at`.
        retries: how often a request is tried.

    Raises:
        NotACache: the URL holds a cache of another format.
        MissingObject: the source lacks an object.
        CorruptObject: the source's is damaged; nothing names it at the URL yet.
        RefMoved: another push has moved the ref meanwhile.
        RemoteError: the URL cannot be written.
    """
    transport = Transport(url, options, retries)
    _make_cache(transport)
    before = _ref(transport)
    missing = _missing(source, transport, snapshot.objects, recheck)
    total = len(snapshot.objects)
    done, uploaded_bytes = total - len(missing), 0
    if progress is not None:
        progress(done, total)
    for size in _uploads(source, transport, missing):
        uploaded_bytes += size
        done += 1
        if progress is not None:
            progress(done, total)
    for ledger in snapshot.ledgers:
        source.check_ledger(ledger)
        transport.write(layout.ledger_name(ledger), source.ledger_path(ledger).read_bytes())
    manifest = snapshot.manifest
    source.check_manifest(manifest)
    transport.write(layout.manifest_name(manifest), source.manifest_path(manifest).read_bytes())
    now = _ref(transport)
    if now != before:
        raise RefMoved(MAIN_REF, before, now)
    if now != manifest:
        transport.write(layout.ref_name(MAIN_REF), f"{manifest}\n".encode())
    return Pushed(len(missing), uploaded_bytes, total - len(missing), now != manifest)


def _missing(
    source: LocalStore, transport: Transport, objects: frozenset[Digest], recheck: bool
) -> list[Digest]:
    """The objects that are not behind the URL, or not as long as here, or (``recheck``) damaged."""
    there = {file.name: file.size for file in transport.files(layout.OBJECTS)}

    def is_present(digest: Digest) -> bool:
        name = layout.object_name(digest)
        if name not in there or there[name] != source.size(digest):
            return False
        if recheck:
            try:
                checks.quick_check_object(digest, transport.place(name), transport.read(name))
            except CorruptObject:
                return False
        return True

    wanted = sorted(objects)
    with ThreadPoolExecutor(_THREADS) as pool:
        return [digest for digest, here in zip(wanted, pool.map(is_present, wanted), strict=True) if not here]


def _make_cache(transport: Transport) -> None:
    try:
        layout.check_header(transport.read(layout.FORMAT_FILE), transport.url)
    except FileNotFoundError:
        others = transport.names()
        if others:
            raise NotACache(
                f"{transport.url} is not a cache, and not empty ({others[0]} is in it): "
                "name a new or empty folder"
            ) from None
        transport.write(layout.FORMAT_FILE, layout.header())


def _ref(transport: Transport) -> Digest | None:
    name = layout.ref_name(MAIN_REF)
    try:
        return layout.ref_digest(transport.read(name), MAIN_REF, transport.place(name))
    except FileNotFoundError:
        return None


def _uploads(source: LocalStore, transport: Transport, digests: list[Digest]) -> Iterator[int]:
    """Upload objects, a few at a time; their lengths, as they arrive."""

    def upload(digest: Digest) -> int:
        path: Path = source.object_path(digest)
        try:
            data = path.read_bytes()
        except FileNotFoundError as error:
            raise MissingObject(digest, path, "no such object") from error
        checks.quick_check_object(digest, path, data)
        transport.write(layout.object_name(digest), data)
        return len(data)

    if not digests:
        return
    left = iter(digests)
    with ThreadPoolExecutor(_THREADS) as pool:
        # As many as there are threads: with an error, what waits behind it would only delay the message.
        running: set[Future[int]] = {pool.submit(upload, digest) for digest in islice(left, _THREADS)}
        while running:
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                yield future.result()
                if (digest := next(left, None)) is not None:
                    running.add(pool.submit(upload, digest))
