"""The content-addressed store: digests, immutable Zarr objects, manifests, refs. It knows no biology."""

from megafold.cache_store.content import Content
from megafold.cache_store.digest import JSON, Digest, canonical_json, mapping_digest
from megafold.cache_store.errors import (
    CacheError,
    ContentError,
    CorruptManifest,
    CorruptObject,
    CorruptRef,
    LockHeld,
    MissingManifest,
    MissingObject,
    NotACache,
    ReadOnlyCache,
    RefMoved,
)

__all__ = [
    "JSON",
    "CacheError",
    "Content",
    "ContentError",
    "CorruptManifest",
    "CorruptObject",
    "CorruptRef",
    "Digest",
    "LockHeld",
    "MissingManifest",
    "MissingObject",
    "NotACache",
    "ReadOnlyCache",
    "RefMoved",
    "canonical_json",
    "mapping_digest",
]
