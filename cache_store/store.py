"""What every store promises. The local one is :class:`megafold.cache_store.local.LocalStore`."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from pathlib import Path

from megafold.cache_store.content import Content
from megafold.cache_store.digest import Digest
from megafold.cache_store.journal import Journal
from megafold.cache_store.ledger import Failure
from megafold.cache_store.locks import BuildLock
from megafold.cache_store.manifest import Manifest
from megafold.cache_store.reader import ObjectReader

#: The ref that names the current snapshot of the data set.
MAIN_REF = "main"


class Store(ABC):
    """A content-addressed store: immutable objects, manifests and ledgers, and refs that move.

    Whatever has a digest for a name never changes. Everything appears whole or not at all, whenever its
    writer dies. A store pickles: processes may each have their own copy of one.
    """

    # Objects ------------------------------------------------------------------------------------------

    @abstractmethod
    def put(self, content: Content) -> Digest:
        """Store an object under the digest of its content; once it returns, the object is durable.

        Storing what is there already does nothing, so two writers of one object never harm each other.
        An object that is there but cut short is replaced.

        Raises:
            ReadOnlyCache: the store cannot be written.
        """

    @abstractmethod
    def object_path(self, digest: Digest) -> Path | str:
        """Where an object is, or would be, a path or a URL: for messages."""

    @abstractmethod
    def has(self, digest: Digest) -> bool:
        """Whether there is an object of this name. Says nothing about its being intact."""

    @abstractmethod
    def open(self, digest: Digest) -> ObjectReader:
        """Open an object for reading, to be closed by the caller.

        Raises:
            MissingObject: there is none. Damage shows when it is read, as CorruptObject.
        """

    @abstractmethod
    def digests(self) -> Iterator[Digest]:
        """Names of the objects, in order."""

    @abstractmethod
    def size(self, digest: Digest) -> int:
        """Stored bytes of an object.

        Raises:
            MissingObject: there is none.
        """

    def sizes(self) -> Iterator[tuple[Digest, int]]:
        """Names and stored bytes of the objects, in order of name."""
        for digest in self.digests():
            yield digest, self.size(digest)

    @abstractmethod
    def age_s(self, digest: Digest) -> float:
        """Seconds since the object was last put.

        Raises:
            MissingObject: there is none.
        """

    @abstractmethod
    def delete(self, digest: Digest) -> None:
        """Remove an object; removing what is not there does nothing. For :func:`collect` alone.

        Raises:
            ReadOnlyCache: the store cannot be written.
        """

    @abstractmethod
    def check(self, digest: Digest) -> None:
        """Make sure that an object is, to the last bit, what was put, and has the right name.

        Raises:
            MissingObject: there is none.
            SwappedObject: it is intact, and another object's.
            CorruptObject: anything else is wrong with it.
        """

    @abstractmethod
    def quick_check(self, digest: Digest) -> None:
        """As :meth:`check`, taking the object's own word for the digest of its content: decodes nothing."""

    # Manifests and ledgers ----------------------------------------------------------------------------

    @abstractmethod
    def put_manifest(self, manifest: Manifest) -> Digest:
        """Store a manifest. Raises ReadOnlyCache."""

    @abstractmethod
    def manifest(self, digest: Digest | None = None) -> Manifest:
        """The manifest of this name; without one, the manifest that ref ``main`` names.

        Raises:
            MissingManifest: there is none, or the ref was never set.
            CorruptManifest: it does not hold what its name says.
        """

    @abstractmethod
    def manifests(self) -> Iterator[Digest]:
        """Names of the manifests, in order."""

    @abstractmethod
    def put_ledger(self, failures: Sequence[Failure]) -> Digest:
        """Store a ledger of failures. Raises ReadOnlyCache."""

    @abstractmethod
    def ledger(self, digest: Digest) -> list[Failure]:
        """The failures of a ledger, by entry and stage. Raises as :meth:`manifest` does."""

    @abstractmethod
    def check_manifest(self, digest: Digest) -> None:
        """Make sure that a manifest is, to the last bit, what was put, taking its digest again.

        Raises as :meth:`manifest` does.
        """

    @abstractmethod
    def check_ledger(self, digest: Digest) -> None:
        """As :meth:`check_manifest`, of a ledger."""

    @abstractmethod
    def ledgers(self) -> Iterator[Digest]:
        """Names of the ledgers, in order."""

    # Refs ---------------------------------------------------------------------------------------------

    @abstractmethod
    def ref(self, name: str = MAIN_REF) -> Digest | None:
        """The manifest a ref names; None for a ref that was never set.

        Raises:
            CorruptRef: the ref holds no digest.
        """

    @abstractmethod
    def ref_path(self, name: str) -> Path | str:
        """Where a ref is, or would be, a path or a URL: for messages."""

    @abstractmethod
    def refs(self) -> Iterator[str]:
        """Names of the refs, in order."""

    @abstractmethod
    def move_ref(self, name: str, expected: Digest | None, new: Digest) -> None:
        """Let a ref name another manifest, provided it names ``expected`` now (None: was never set).

        Of several processes that move a ref from the same place, one succeeds.

        Raises:
            RefMoved: it names something else.
            MissingManifest: there is no manifest ``new``.
            ReadOnlyCache: the store cannot be written.
        """

    # Builds -------------------------------------------------------------------------------------------

    @abstractmethod
    def build_lock(self, wait: float = 0.0) -> BuildLock:
        """The lock to build under, not yet taken. ``wait``: seconds to wait for another build."""

    @abstractmethod
    def journal(self, build: str, *, sync_every_s: float = 0.0) -> Journal:
        """The journal of a build, by the build's id. ``sync_every_s``: see :class:`Journal`."""

    @abstractmethod
    def journals(self) -> Iterator[str]:
        """Ids of the builds that have a journal, in order."""

    # Housekeeping -------------------------------------------------------------------------------------

    @abstractmethod
    def temporary_files(self) -> Iterator[Path | str]:
        """Files that are being written, or that a killed writer left, in order."""

    @abstractmethod
    def foreign_files(self) -> Iterator[Path | str]:
        """Files among the objects, manifests and ledgers that are none of them, in order."""

    @abstractmethod
    def sweep(self, older_than_s: float = 3600.0, lock: BuildLock | None = None) -> list[Path]:
        """Remove temporary files that killed writers left; returns them.

        ``older_than_s``: younger ones may belong to a writer that lives. ``lock``: the build lock, where the
        caller has it; else it is taken for the while.

        Raises:
            LockHeld: another process builds.
            ReadOnlyCache: the store cannot be written.
        """
