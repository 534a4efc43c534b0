"""Removing objects that no manifest names."""

from collections.abc import Callable, Iterable, Set
from dataclasses import dataclass

from megafold.cache_store.digest import Digest
from megafold.cache_store.errors import MissingObject
from megafold.cache_store.locks import BuildLock
from megafold.cache_store.manifest import Manifest
from megafold.cache_store.store import Store

DAY_S = 86400.0


@dataclass(frozen=True)
class Collected:
    """What was removed, the bytes that freed, and how many unreferenced objects were too young."""

    removed: tuple[Digest, ...]
    freed_bytes: int
    too_young: int


def reachable(
    manifests: Iterable[Manifest], named: Callable[[Manifest], Iterable[Digest]]
) -> frozenset[Digest]:
    """Every object that manifests name. ``named`` lists those of one, rows and attributes."""
    return frozenset(digest for manifest in manifests for digest in named(manifest))


def collect(
    store: Store,
    keep: Set[Digest],
    *,
    older_than_s: float = DAY_S,
    lock: BuildLock | None = None,
    dry_run: bool = False,
) -> Collected:
    """Remove the objects that are not in ``keep`` and were not put for ``older_than_s`` seconds.

    Never while anybody builds: ``lock`` is the build lock where the caller has it, else it is taken for the
    while. What the journal of an interrupted build names is not in any manifest yet: either add it to
    ``keep`` or give the grace period. ``dry_run`` removes nothing and tells what would be.

    Raises:
        LockHeld: another process builds.
        ReadOnlyCache: the store cannot be written.
    """
    removed: list[Digest] = []
    freed = young = 0
    with lock or store.build_lock():
        for digest in store.digests():
            if digest in keep:
                continue
            try:
                if store.age_s(digest) < older_than_s:
                    young += 1
                    continue
                freed += store.size(digest)
            except MissingObject:  # removed by hand meanwhile
                continue
            if not dry_run:
                store.delete(digest)
            removed.append(digest)
    return Collected(tuple(removed), freed, young)
