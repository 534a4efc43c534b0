"""What a cache still needs: objects that snapshots name, and those that an interrupted build goes on from."""

from megafold.cache_store import MAIN_REF, Digest, LocalStore
from megafold.pipeline.builder.tasks import Outcome
from megafold.pipeline.manifest import referenced_digests


def needed_objects(store: LocalStore) -> frozenset[Digest]:
    """Every object that a manifest of the store or the journal of an interrupted build names.

    Raises:
        CacheError: a manifest is damaged, or the current one is lost: nobody knows what it names.
    """
    if store.ref(MAIN_REF) is not None:
        store.manifest()
    needed: set[Digest] = set()
    for digest in store.manifests():
        needed |= referenced_digests(store.manifest(digest))
    for build in store.journals():
        for record in store.journal(build).replay():
            result = Outcome.from_json(record["outcome"]).result or {}
            named = result.get("structure", result.get("object", ""))
            needed |= {Digest.parse(named)} if named else set()
    return frozenset(needed)
