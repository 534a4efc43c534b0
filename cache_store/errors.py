"""Errors of the store. Each names the object or file, and what to do."""

from pathlib import Path


class CacheError(Exception):
    """Base of everything a cache can refuse or be found guilty of."""


class ContentError(CacheError, ValueError):
    """Arrays, attributes or rows that cannot be stored: a defect of whoever made them."""


class NotACache(CacheError):
    """A folder that is not a cache of ours, or is one of a format this version cannot read."""


class RemoteError(CacheError):
    """A cache behind a URL that cannot be reached or read. Names the URL, and what to do."""


class RemoteCacheWarning(UserWarning):
    """Something that makes reading a cache behind a URL slow, and no sample wrong."""


class WriteFailed(CacheError):
    """The disk did not take a change: it is full, over its quota or failing. No input is to blame."""


class ReadOnlyCache(WriteFailed):
    """A change was asked of a cache that cannot be written."""


class _NamedFileError(CacheError):
    """An error about one named file. Survives pickling, so that it can travel between processes.

    ``path``: the file, or its URL as text. ``action``: what to do, where it is not what the class says.
    """

    def __init__(self, digest: object, path: Path | str, reason: str, action: str = "") -> None:
        self.digest = digest
        self.path = path
        self.reason = reason
        self.action = action or self.action
        super().__init__(digest, path, reason, action)

    def __str__(self) -> str:
        return f"{self.what} {self.digest}: {self.reason} ({self.path}). {self.action}"

    what = "file"
    action = "Verify the cache."


class CorruptObject(_NamedFileError):
    """An object whose file does not hold what its name says. Has ``digest``, ``path`` and ``reason``."""

    what = "corrupt object"
    action = "Move the file away and build again: the object is computed anew."


class SwappedObject(CorruptObject):
    """An intact object under another object's name."""

    what = "swapped object"


class MissingObject(_NamedFileError):
    """An object that is not in the store. Has ``digest``, ``path`` and ``reason``."""

    what = "missing object"
    action = "Build again: the object is computed anew."


class MissingArray(_NamedFileError, KeyError):
    """An array that an object has not: it was asked for what another version stores."""

    what = "object"
    action = "Build the cache again with this version, or read it with the one that wrote it."


class CorruptManifest(_NamedFileError):
    """A manifest or ledger file that does not hold what its name says."""

    what = "corrupt manifest"
    action = "Move the file away and build again, or point the ref at an intact manifest."


class MissingManifest(_NamedFileError):
    """A manifest or ledger that is not in the store, or a ref that has never been set."""

    what = "missing manifest"
    action = "Build the cache, or name a manifest that exists."


class CorruptRef(CacheError):
    """A ref whose file does not hold a digest."""


class RefMoved(CacheError):
    """A ref was not where the caller believed. Has ``name``, ``expected`` and ``found``."""

    def __init__(self, name: str, expected: object, found: object) -> None:
        self.name = name
        self.expected = expected
        self.found = found
        super().__init__(name, expected, found)

    def __str__(self) -> str:
        return (
            f"ref {self.name} is at {self.found or 'nothing'}, not at {self.expected or 'nothing'}: "
            "another build published meanwhile. Run again, on top of what it published."
        )


class LockHeld(CacheError):
    """Another process holds the lock."""
