"""What a structure file says, as plain arrays and records: the parser's output."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.chemistry import Component


@dataclass(frozen=True, kw_only=True)
class AtomSites:
    """Atoms of the first model without hydrogens and waters, in the file's order. ``N`` atoms.

    Texts are indices into a list of names. Numbers that are missing are :data:`.cif.MISSING`.

    Attributes:
        asym, asym_names: [N] ``label_asym_id``; derived from the author's chain where the file has none.
        auth_asym, auth_asym_names: [N] ``auth_asym_id``.
        entity, entity_names: [N] ``label_entity_id``, '' for none.
        comp, comp_names: [N] ``label_comp_id``.
        atom, atom_names: [N] ``label_atom_id``.
        alt, alt_names: [N] ``label_alt_id``; names sorted, so that indices order like letters; '' is index 0.
        element: [N] atomic number, 0 where unknown.
        label_seq, auth_seq: [N] residue numbers.
        ins_code: [N] insertion code as ord(), 0 for none.
        is_hetatm: [N] record type HETATM.
        coords: [N, 3] Å, NaN where missing.
        occupancy: [N] 1 where the file has none.
        b_factor: [N] Å², NaN where the file has none.
    """

    asym: NDArray[np.int32]
    asym_names: list[str]
    auth_asym: NDArray[np.int32]
    auth_asym_names: list[str]
    entity: NDArray[np.int32]
    entity_names: list[str]
    comp: NDArray[np.int32]
    comp_names: list[str]
    atom: NDArray[np.int32]
    atom_names: list[str]
    alt: NDArray[np.int32]
    alt_names: list[str]
    element: NDArray[np.int16]
    label_seq: NDArray[np.int32]
    auth_seq: NDArray[np.int32]
    ins_code: NDArray[np.int32]
    is_hetatm: NDArray[np.bool_]
    coords: NDArray[np.float64]
    occupancy: NDArray[np.float64]
    b_factor: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.asym)

    def select(self, rows: NDArray[Any]) -> "AtomSites":
        """The same table with some rows (mask or indices)."""
        columns = {
            name: value[rows] if isinstance(value, np.ndarray) else value
            for name, value in self.__dict__.items()
        }
        return AtomSites(**columns)

    @property
    def has_coords(self) -> NDArray[np.bool_]:
        """[N] True where the atom has coordinates."""
        return np.asarray(np.isfinite(self.coords).all(axis=1), bool)


@dataclass(frozen=True, kw_only=True)
class SchemePosition:
    """One position of a chain's sequence: the components that occur there, and the author's number."""

    codes: tuple[str, ...]
    auth_seq: int
    ins_code: int


@dataclass(frozen=True, kw_only=True)
class Entity:
    """An entity of the file. ``type`` is polymer, branched, non-polymer, water or ''.

    ``polymer_type`` as in ``_entity_poly.type``; ``sequence`` the codes at each position (several where the
    entity is heterogeneous); ``canonical`` the file's one-letter sequence, '' for none; ``links`` the bonds
    of a branched entity as (number, atom, number, atom, order).
    """

    type: str = ""
    polymer_type: str = ""
    sequence: tuple[tuple[str, ...], ...] = ()
    canonical: str = ""
    links: tuple[tuple[int, str, int, str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Partner:
    """One end of a ``struct_conn`` row."""

    asym: str
    comp: str
    label_seq: str
    auth_asym: str
    auth_seq: str
    ins_code: str
    atom: str
    alt: str
    symmetry: str


@dataclass(frozen=True, kw_only=True)
class Connection:
    """One covalent, disulfide or metal-coordination row of ``struct_conn``.

    ``distance`` in Å, NaN for none.
    """

    type: str
    first: Partner
    second: Partner
    distance: float
    order: str


@dataclass(frozen=True, kw_only=True)
class Generator:
    """One row of ``pdbx_struct_assembly_gen``."""

    assembly: str
    expression: str
    asym_ids: tuple[str, ...]


@dataclass(kw_only=True)
class Report:
    """What was removed and what was changed, by reason, and what the user should know."""

    filtered: Counter[str] = field(default_factory=Counter)
    changed: Counter[str] = field(default_factory=Counter)
    warnings: list[str] = field(default_factory=list)

    def remove(self, reason: str, count: int) -> None:
        """Count ``count`` things removed for ``reason``; nothing for none."""
        if count:
            self.filtered[reason] += int(count)

    def change(self, reason: str, count: int) -> None:
        """Count ``count`` things changed or added for ``reason``; nothing for none."""
        if count:
            self.changed[reason] += int(count)

    def warn(self, message: str) -> None:
        """Add a warning, once."""
        if message not in self.warnings:
            self.warnings.append(message)


class Definitions(Protocol):
    """Component definitions, by code."""

    def get(self, code: str) -> Component | None:
        """The definition of ``code``, or None."""
        ...


@dataclass(frozen=True, kw_only=True)
class ParsedEntry:
    """A structure file, read.

    Attributes:
        title, method, resolution (Å), release_date, deposition_date (ISO): None where the file has none.
        sites: its atoms.
        entities: by entity id.
        asym_entity: entity id by ``label_asym_id``.
        schemes: the sequence of a chain as ``pdbx_poly_seq_scheme`` has it, by ``label_asym_id``.
        branch_numbers: (``label_asym_id``, author's number) → number in the branched entity.
        asym_order: the file's order of chains, those of ``_struct_asym`` first.
        connections: bonds between residues.
        tells_connections: the file has ``struct_conn`` rows, of whatever type.
        generators, operators: assemblies; operators are [3, 4] matrices by id.
        is_expanded: the file says that its coordinates are an assembly already.
        definitions: components that the file defines itself.
    """

    title: str | None
    method: str | None
    resolution: float | None
    release_date: str | None
    deposition_date: str | None
    sites: AtomSites
    entities: dict[str, Entity]
    asym_entity: dict[str, str]
    schemes: dict[str, tuple[SchemePosition, ...]]
    branch_numbers: dict[tuple[str, int], int]
    asym_order: list[str]
    connections: list[Connection]
    tells_connections: bool
    generators: list[Generator]
    operators: dict[str, NDArray[np.float64]]
    is_expanded: bool
    definitions: Definitions
