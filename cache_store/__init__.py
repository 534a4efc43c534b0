"""The content-addressed store: digests, immutable Zarr objects, manifests, refs. It knows no biology."""

from megafold.cache_store.auditing import StoreFinding, audit
from megafold.cache_store.content import Content
from megafold.cache_store.digest import JSON, Digest, canonical_json, mapping_digest
from megafold.cache_store.errors import (
    CacheError,
    ContentError,
    CorruptManifest,
    CorruptObject,
    CorruptRef,
    LockHeld,
    MissingArray,
    MissingManifest,
    MissingObject,
    NotACache,
    ReadOnlyCache,
    RefMoved,
    RemoteCacheWarning,
    RemoteError,
    SwappedObject,
    WriteFailed,
)
from megafold.cache_store.garbage import Collected, collect, reachable
from megafold.cache_store.journal import Journal, Replay
from megafold.cache_store.ledger import Failure
from megafold.cache_store.local import LocalStore
from megafold.cache_store.locks import BuildLock
from megafold.cache_store.manifest import Manifest
from megafold.cache_store.pushing import Pushed, Snapshot, push
from megafold.cache_store.read_through import ReadThrough
from megafold.cache_store.reader import ObjectReader, Selection, read_many
from megafold.cache_store.remote import RemoteCounts, RemoteStore, is_url, open_store
from megafold.cache_store.store import MAIN_REF, Store
from megafold.cache_store.transport import RetryPolicy

__all__ = [
    "JSON",
    "MAIN_REF",
    "BuildLock",
    "CacheError",
    "Collected",
    "Content",
    "ContentError",
    "CorruptManifest",
    "CorruptObject",
    "CorruptRef",
    "Digest",
    "Failure",
    "Journal",
    "LocalStore",
    "LockHeld",
    "Manifest",
    "MissingArray",
    "MissingManifest",
    "MissingObject",
    "NotACache",
    "ObjectReader",
    "Pushed",
    "ReadOnlyCache",
    "ReadThrough",
    "RefMoved",
    "RemoteCacheWarning",
    "RemoteCounts",
    "RemoteError",
    "RemoteStore",
    "Replay",
    "RetryPolicy",
    "Selection",
    "Snapshot",
    "Store",
    "StoreFinding",
    "SwappedObject",
    "WriteFailed",
    "audit",
    "canonical_json",
    "collect",
    "is_url",
    "mapping_digest",
    "open_store",
    "push",
    "reachable",
    "read_many",
]
