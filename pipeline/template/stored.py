"""Template structures out of a cache: the ``structure`` objects of its current snapshot.

What the featurizer left out of an entry (a clashing chain, a chain that the first assembly lacks) is no
template either. A build may name its own cache: it then takes the snapshot that its last run published.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megafold.cache_store import Content, Digest, LocalStore
from megafold.cache_store.errors import CacheError, MissingManifest, NotACache
from megafold.pipeline.chemistry.library import ComponentLibrary
from megafold.pipeline.errors import TemplateError
from megafold.pipeline.manifest import entry_rows
from megafold.pipeline.schema import STRUCTURE, MolType
from megafold.pipeline.template.entry import ATOM_NAMES, TemplateChain, TemplateEntry

_GLYCINE: Final = "GLY"


def is_cache(folder: Path) -> bool:
    """Whether a folder is a cache and not one of mmCIF files."""
    try:
        LocalStore.at(folder)
    except NotACache:
        return False
    return True


class StoredStructures:
    """The structures of a cache's current snapshot; ``entries`` maps ids to their objects' digests.

    A cache in which nothing was published yet has none.

    Raises:
        TemplateError: the snapshot cannot be read (``unreadable-cache``).
    """

    def __init__(self, folder: Path) -> None:
        self._store = LocalStore.at(folder)
        self._components = ""
        self._library: ComponentLibrary | None = None
        self.entries: dict[str, str] = {}
        try:
            manifest = self._store.manifest()
        except MissingManifest:
            return
        except CacheError as error:
            raise TemplateError(
                f"{folder}: its snapshot cannot be read ({error}); build the cache again, or leave it out",
                reason="unreadable-cache",
            ) from error
        self._components = str(manifest.attributes["components"])
        for row in entry_rows(manifest):
            self.entries.setdefault(row.entry.lower(), row.structure)

    def load(self, entry: str) -> TemplateEntry:
        """The protein chains and release date of one of ``entries``.

        Raises:
            TemplateError: its object cannot be read (``unreadable``).
        """
        digest = self.entries[entry]
        try:
            if self._library is None:
                self._library = ComponentLibrary.from_content(self._read(self._components))
            content = self._read(digest)
        except (CacheError, OSError) as error:
            raise TemplateError(
                f"{entry}: its structure in {self._store.path} cannot be read ({error}); "
                "build that cache again",
                reason="unreadable",
            ) from error
        released: Any = content.attributes["release_date"]
        return TemplateEntry(
            entry=entry,
            digest=digest,
            release_date=released,
            chains=tuple(_protein_chains(content, self._library)),
        )

    def _read(self, digest: str) -> Content:
        with self._store.open(Digest.parse(digest)) as reader:
            return reader.read_all()


def _protein_chains(content: Content, library: ComponentLibrary) -> Iterator[TemplateChain]:
    """The first copy of each protein chain."""
    attributes: Any = content.attributes
    chains = STRUCTURE.table("chains").unpack(content.arrays["chains"])
    names = attributes["chains"]
    seen: set[str] = set()
    for index in np.flatnonzero(chains["mol_type"] == MolType.PROTEIN).tolist():
        label = names["label_asym_id"][index]
        if label in seen:
            continue  # a symmetry copy has the same residues in another place
        seen.add(label)
        sequence = attributes["entities"][int(chains["entity_id"][index]) - 1]["sequence"]
        start, count = int(chains["first_atom"][index]), int(chains["atom_count"][index])
        yield TemplateChain(
            label_asym_id=label,
            auth_asym_id=names["auth_asym_id"][index],
            sequence=sequence,
            atom_pos=_atom_positions(content, library, slice(start, start + count), len(sequence)),
        )


def _atom_positions(
    content: Content, library: ComponentLibrary, atoms: slice, n_residue: int
) -> NDArray[np.float32]:
    """Backbone and pseudo-beta of a chain whose atoms are ``atoms``: float32 [N_residue, 4, 3]."""
    keys: Any = content.attributes["components"]
    residues = STRUCTURE.table("residues").unpack(content.arrays["residues"])
    tokens = STRUCTURE.table("tokens").unpack(content.arrays["tokens"])
    residue = np.repeat(tokens["residue"], tokens["atom_count"])[atoms]
    position = residues["label_seq_id"][residue] - 1
    component = residues["component"][residue]
    component_atom = STRUCTURE.table("atoms").unpack(content.arrays["atoms"])["component_atom"][atoms]
    coords = content.arrays["atom_coords"][atoms]
    positions = np.full((n_residue, len(ATOM_NAMES), 3), np.nan, np.float32)
    for used in np.unique(component).tolist():
        atom_names = library[keys[used]].atom_names
        slot_of = np.array([ATOM_NAMES.index(n) if n in ATOM_NAMES else -1 for n in atom_names])
        mine = np.flatnonzero(component == used)
        slot = slot_of[component_atom[mine]]
        mine, slot = mine[slot >= 0], slot[slot >= 0]
        positions[position[mine], slot] = coords[mine]
        if keys[used] == _GLYCINE:
            positions[position[mine], ATOM_NAMES.index("CB")] = positions[
                position[mine], ATOM_NAMES.index("CA")
            ]
    return positions
