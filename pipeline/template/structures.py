"""Template structures: finds the structure of an entry and reads what templates need of its protein chains.

gemmi's objects stay in this module; what leaves it are arrays and strings.
"""

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import gemmi
import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.chemistry.binary_cif import read_blocks
from megafold.pipeline.errors import AlignmentError, ComponentError, TemplateError
from megafold.pipeline.msa.text import AlignmentText, read_text
from megafold.pipeline.structure.cif import column_texts
from megafold.pipeline.template.entry import ATOM_NAMES, TemplateChain, TemplateEntry
from megafold.pipeline.template.stored import StoredStructures, is_cache

_SUFFIXES: Final = (
    *(f"{cif}{packed}" for cif in (".cif", ".mmcif") for packed in ("", ".gz", ".zst")),
    ".bcif",
    ".bcif.gz",
)
#: What of a BinaryCIF file tells of its chains and of its date.
_CATEGORIES: Final = (
    "atom_site",
    "entity",
    "entity_poly",
    "entity_poly_seq",
    "struct_asym",
    "pdbx_audit_revision_history",
    "database_PDB_rev",
)


class TemplateStructures:
    """The structures templates may come from, by entry id: mmCIF files, and caches that were built before.

    Files are named ``<entry>.cif`` (or ``.mmcif``, ``.bcif``), plain, gzip or, as text, Zstandard, in the
    folders or one level below (the PDB's divided layout); an earlier folder wins. A file in place of a folder
    stands for itself. A folder that is a cache gives the structures of its current snapshot; a file goes
    before them. Folders are listed once, on construction. The ``capacity`` entries used last are kept in
    memory.

    Raises:
        TemplateError: a folder cannot be listed (``no-such-folder``), or is a cache that cannot be read
            (``unreadable-cache``).
    """

    def __init__(self, folders: Sequence[Path], capacity: int = 16) -> None:
        self._paths: dict[str, Path] = {}
        self._capacity = capacity
        self._loaded: OrderedDict[str, TemplateEntry] = OrderedDict()
        #: Of every entry that was loaded, also of those that are no longer kept.
        self._read_digests: dict[str, str] = {}
        self._stored = [StoredStructures(Path(folder)) for folder in folders if is_cache(Path(folder))]
        for folder in folders:
            for path in _cif_files(Path(folder)) if not is_cache(Path(folder)) else ():
                self._paths.setdefault(_entry_of(path.name), path)

    def __contains__(self, entry: object) -> bool:
        return isinstance(entry, str) and (entry.lower() in self._paths or self._stored_in(entry) is not None)

    def __len__(self) -> int:
        return len(self._paths.keys() | {entry for stored in self._stored for entry in stored.entries})

    def _stored_in(self, entry: str) -> StoredStructures | None:
        return next((stored for stored in self._stored if entry.lower() in stored.entries), None)

    def path(self, entry: str) -> Path | None:
        """The mmCIF file of an entry, None where there is none."""
        return self._paths.get(entry.lower())

    def digest(self, entry: str) -> str | None:
        """What an entry's structure is told by: its file's SHA-256, or its object's digest; None for none."""
        key = entry.lower()
        if key in self._loaded:
            return self._loaded[key].digest
        path = self._paths.get(key)
        if path is not None:
            return _read(path).digest
        stored = self._stored_in(key)
        return None if stored is None else stored.entries[key]

    def agrees_with(self, digests: Mapping[str, str]) -> bool:
        """Whether what is known here may be what another process found: ``""`` for an entry without one.

        Files that were not read yet are taken to be those that were meant.
        """
        for entry, digest in digests.items():
            key = entry.lower()
            if (key in self) != bool(digest):
                return False
            if key not in self._paths and digest and self.digest(key) != digest:
                return False
        return not self.changed(digests)

    def changed(self, digests: Mapping[str, str]) -> list[str]:
        """The entries whose structures, as they were read here last, are not those of ``digests``."""
        return [
            entry
            for entry, digest in digests.items()
            if self._read_digests.get(entry.lower(), digest) != digest
        ]

    def load(self, entry: str) -> TemplateEntry | None:
        """The chains and release date of an entry, None where there is no structure of it.

        Raises:
            TemplateError: the structure cannot be read now (``unreadable``), or at all
                (``unreadable-structure``).
        """
        key = entry.lower()
        loaded = self._loaded.get(key)
        if loaded is not None:
            self._loaded.move_to_end(key)
            return loaded
        path = self._paths.get(key)
        stored = self._stored_in(key)
        if path is not None:
            loaded = _load(key, path)
        elif stored is not None:
            loaded = stored.load(key)
        else:
            return None
        self._loaded[key] = loaded
        self._read_digests[key] = loaded.digest
        while len(self._loaded) > self._capacity:
            self._loaded.popitem(last=False)
        return loaded


def _cif_files(folder: Path) -> Iterator[Path]:
    """mmCIF files of a folder and of its folders, sorted by name at each level; a file stands for itself."""
    if folder.is_file():
        if folder.name.endswith(_SUFFIXES):
            yield folder
        return
    below = []
    for item in _listed(folder):
        if item.name.endswith(_SUFFIXES):
            yield Path(item.path)
        elif item.is_dir():
            below.append(Path(item.path))
    for path in below:
        yield from (Path(item.path) for item in _listed(path) if item.name.endswith(_SUFFIXES))


def _listed(folder: Path) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as found:
            return sorted(found, key=lambda item: item.name)
    except OSError as error:
        raise TemplateError(
            f"{folder}: no folder of template structures ({error.strerror}); give one that holds mmCIF files",
            reason="no-such-folder",
        ) from error


def _entry_of(name: str) -> str:
    for suffix in (".zst", ".gz", ".mmcif", ".bcif", ".cif"):
        name = name.removesuffix(suffix)
    return name.lower()


def _read(path: Path) -> AlignmentText:
    try:
        return read_text(path)
    except AlignmentError as error:
        # What cannot be read just now says nothing of the structure; broken compression does.
        away = error.reason == "unreadable"
        raise TemplateError(str(error), reason="unreadable" if away else "unreadable-structure") from None


def _load(entry: str, path: Path) -> TemplateEntry:
    text = _read(path)
    try:
        if ".bcif" in path.suffixes:
            block = _binary_block(path)
        else:
            block = gemmi.cif.read_string(text.data.decode("utf-8", "replace"))[0]
        structure = gemmi.make_structure_from_block(block)
        structure.setup_entities()
        structure.assign_label_seq_id()
    except (ValueError, RuntimeError, IndexError, ComponentError) as error:
        raise TemplateError(
            f"{path}: not a readable mmCIF file ({error}); fetch it again", reason="unreadable-structure"
        ) from None
    canonical = _canonical_sequences(block)
    chains = list(_protein_chains(structure, canonical)) if len(structure) else []
    return TemplateEntry(
        entry=entry, digest=text.digest, release_date=_release_date(block), chains=tuple(chains)
    )


def _binary_block(path: Path) -> gemmi.cif.Block:
    """The categories of a BinaryCIF file that a template is read from, as gemmi has those of a text file."""
    binary = read_blocks(path)[0]
    block = gemmi.cif.Block(binary.name)
    for name in _CATEGORIES:
        category = binary.categories.get(name)
        if category is not None and category.row_count:
            columns = {item: column_texts(category, item) for item in category.names}
            block.set_mmcif_category(
                f"_{name}.", {item: [text or None for text in texts or ()] for item, texts in columns.items()}
            )
    return block


def _canonical_sequences(block: gemmi.cif.Block) -> dict[str, str]:
    """``pdbx_seq_one_letter_code_can`` by entity id."""
    table = block.find("_entity_poly.", ["entity_id", "pdbx_seq_one_letter_code_can"])
    return {row.str(0): "".join(row.str(1).split()).upper() for row in table}


def _release_date(block: gemmi.cif.Block) -> str | None:
    """The first revision's date; old files have it in ``_database_PDB_rev``."""
    for tag in ("_pdbx_audit_revision_history.revision_date", "_database_PDB_rev.date"):
        dates = [gemmi.cif.as_string(value) for value in block.find_values(tag)]
        dates = [date for date in dates if len(date) == 10 and date[0].isdigit()]
        if dates:
            return min(dates)
    return None


def _protein_chains(structure: gemmi.Structure, canonical: dict[str, str]) -> Iterator[TemplateChain]:
    for chain in structure[0]:
        for subchain in chain.subchains():
            entity = structure.get_entity_of(subchain)
            if entity is None or entity.entity_type != gemmi.EntityType.Polymer:
                continue
            if entity.polymer_type not in (gemmi.PolymerType.PeptideL, gemmi.PolymerType.PeptideD):
                continue
            names = [gemmi.Entity.first_mon(item) for item in entity.full_sequence]
            if not names:
                names = [residue.name for residue in subchain.first_conformer()]
            sequence = canonical.get(entity.name, "")
            if len(sequence) != len(names):
                sequence = "".join(_letter(name) for name in names)
            yield TemplateChain(
                label_asym_id=subchain.subchain_id(),
                auth_asym_id=chain.name,
                sequence=sequence,
                atom_pos=_atom_positions(subchain, names),
            )


def _letter(component: str) -> str:
    info = gemmi.find_tabulated_residue(component)
    letter = info.one_letter_code.strip().upper() if info.is_amino_acid() else ""
    return letter or "X"


def _atom_positions(residues: Iterable[gemmi.Residue], names: list[str]) -> NDArray[np.float32]:
    positions = np.full((len(names), len(ATOM_NAMES), 3), np.nan)
    for residue in residues:
        index = (residue.label_seq or 0) - 1
        # Microheterogeneity: the residue that the sequence names counts, the other ones do not.
        if 0 <= index < len(names) and residue.name == names[index]:
            _fill_residue(positions[index], residue)
    return np.round(positions, 3).astype(np.float32)


def _fill_residue(positions: NDArray[np.float64], residue: gemmi.Residue) -> None:
    """Set the atoms of one residue, all from the conformer of the highest occupancy, ties to the first."""
    atoms = [atom for atom in residue if atom.name in ATOM_NAMES and atom.element.atomic_number in (6, 7)]
    occupancy: dict[str, float] = {}
    for atom in atoms:
        if atom.has_altloc():
            occupancy[atom.altloc] = occupancy.get(atom.altloc, 0.0) + atom.occ
    best = min(occupancy, key=lambda altloc: (-occupancy[altloc], altloc), default="")
    for atom in atoms:
        if not atom.has_altloc() or atom.altloc == best:
            position = atom.pos.tolist()
            positions[ATOM_NAMES.index(atom.name)] = position
            if residue.name == "GLY" and atom.name == "CA":
                positions[ATOM_NAMES.index("CB")] = position
