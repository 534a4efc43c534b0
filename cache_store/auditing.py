"""Auditing a store: everything that is wrong with it, each with what to do."""

from collections.abc import Callable, Iterable, Iterator, Set
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, TypeAlias

from megafold.cache_store.digest import Digest
from megafold.cache_store.errors import (
    CorruptManifest,
    CorruptObject,
    CorruptRef,
    MissingManifest,
    MissingObject,
    SwappedObject,
)
from megafold.cache_store.store import Store

FindingKind: TypeAlias = Literal[
    "corrupt-object",
    "missing-object",
    "swapped-object",
    "unreferenced-object",
    "corrupt-manifest",
    "corrupt-ledger",
    "corrupt-ref",
    "dangling-ref",
    "temporary-file",
    "foreign-file",
]
_HARMLESS: frozenset[str] = frozenset({"unreferenced-object", "temporary-file", "foreign-file"})


@dataclass(frozen=True)
class StoreFinding:
    """One thing that is not as it should be.

    ``subject``: the digest or name of what it is about. ``path``: the file or its URL.
    ``message``: what is wrong. ``action``: what to do.
    """

    kind: FindingKind
    subject: str
    path: Path | str
    message: str
    action: str

    @property
    def level(self) -> Literal["error", "info"]:
        """How bad it is: ``error`` where something of the data set is lost or cannot be trusted."""
        return "info" if self.kind in _HARMLESS else "error"


#: ``map``, or an executor's: how the caller spreads the checks over processes.
Mapper: TypeAlias = Callable[
    [Callable[[Digest], StoreFinding | None], list[Digest]], Iterable[StoreFinding | None]
]


def audit(
    store: Store,
    expected: Iterable[Digest],
    *,
    quick: bool = False,
    progress: Callable[[int, int], None] | None = None,
    mapper: Mapper = map,
) -> list[StoreFinding]:
    """Check every object, manifest, ledger and ref of a store, and that the expected objects are there.

    ``expected``: the objects that manifests name. ``quick``: hash files, decode no object. ``progress``:
    called with how many objects are checked and how many there are. ``mapper``: as ``map``; a process pool's
    ``map`` spreads the work, as stores and findings pickle.
    """
    wanted = frozenset(expected)
    present = list(store.digests())
    findings: list[StoreFinding] = []
    check = partial(check_object, store, quick)
    for number, finding in enumerate(mapper(check, present), start=1):
        if finding is not None:
            findings.append(finding)
        if progress is not None:
            progress(number, len(present))
    findings.extend(_absent(store, wanted, present))
    findings.extend(_tables(store))
    findings.extend(_refs(store))
    findings.extend(_files(store))
    return findings


def check_object(store: Store, quick: bool, digest: Digest) -> StoreFinding | None:
    """What is wrong with one object; None for an intact one, or one that was removed meanwhile."""
    try:
        (store.quick_check if quick else store.check)(digest)
    except MissingObject:
        return None
    except SwappedObject as error:
        return StoreFinding("swapped-object", str(digest), error.path, error.reason, error.action)
    except CorruptObject as error:
        return StoreFinding("corrupt-object", str(digest), error.path, error.reason, error.action)
    return None


def _absent(store: Store, wanted: Set[Digest], present: list[Digest]) -> Iterator[StoreFinding]:
    for digest in sorted(wanted):
        try:
            store.size(digest)
        except MissingObject as error:
            message = "a manifest names it, and it is not there"
            yield StoreFinding("missing-object", str(digest), error.path, message, error.action)
    for digest in present:
        if digest not in wanted:
            yield StoreFinding(
                "unreferenced-object",
                str(digest),
                store.object_path(digest),
                "no manifest names it",
                "Nothing, or `megafold cache gc` to free its space.",
            )


def _tables(store: Store) -> Iterator[StoreFinding]:
    for digest in store.manifests():
        try:
            store.check_manifest(digest)
        except (CorruptManifest, MissingManifest) as error:
            yield StoreFinding("corrupt-manifest", str(digest), error.path, error.reason, error.action)
    for digest in store.ledgers():
        try:
            store.check_ledger(digest)
        except (CorruptManifest, MissingManifest) as error:
            yield StoreFinding("corrupt-ledger", str(digest), error.path, error.reason, error.action)


def _refs(store: Store) -> Iterator[StoreFinding]:
    for name in store.refs():
        path = store.ref_path(name)
        try:
            digest = store.ref(name)
        except CorruptRef as error:
            yield StoreFinding(
                "corrupt-ref",
                name,
                path,
                str(error),
                "Write a manifest's name into it, or remove it and build again.",
            )
            continue
        # Listed after the ref is read: a build may publish another snapshot meanwhile.
        if digest is not None and digest not in set(store.manifests()):
            message = f"it names the manifest {digest}, which is not there"
            yield StoreFinding("dangling-ref", name, path, message, "Build again, or name another manifest.")


def _files(store: Store) -> Iterator[StoreFinding]:
    for path in store.temporary_files():
        message = "being written, or left by a writer that was killed"
        yield StoreFinding("temporary-file", _last(path), path, message, "The next build sweeps it.")
    for path in store.foreign_files():
        yield StoreFinding("foreign-file", _last(path), path, "no file of the cache's", "Move it elsewhere.")


def _last(path: Path | str) -> str:
    return str(path).rsplit("/", 1)[-1]
