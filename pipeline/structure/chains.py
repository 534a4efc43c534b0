"""Chains: the sequence of every polymer with its unresolved residues, glycans, and each ligand on its own."""

from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.schema import MolType
from megafold.pipeline.structure.cif import MISSING
from megafold.pipeline.structure.components import ComponentResolver
from megafold.pipeline.structure.entry import (
    AtomSites,
    Entity,
    ParsedEntry,
    Report,
    SchemePosition,
)
from megafold.pipeline.structure.polymer_types import (
    UNKNOWN_RESIDUE,
    declared_mol_type,
    letter,
    majority_kind,
    polymer_mol_type,
    residue_kind,
)
from megafold.pipeline.structure.residues import SiteResidue, choose_conformers, group_residues

#: Backbone atoms that link a residue to the next: (of this one, of the next).
BACKBONE_LINKS: Final = {MolType.PROTEIN: ("C", "N"), MolType.RNA: ("O3'", "P"), MolType.DNA: ("O3'", "P")}

#: Å; two backbone atoms that are closer are bonded, where the file lets nothing but geometry tell.
_LINK_DISTANCE: Final = 2.0
#: Residues; no chain is as long (titin has 35 000): numbers that jump farther are no positions.
_LONGEST_BREAK: Final = 100_000


@dataclass(kw_only=True)
class Residue:
    """One residue of a chain; ``rows`` of the atom table, none where unresolved.

    ``seq`` is its 1-based position; ``letter`` the alternate taken, 0 for none.
    """

    code: str
    seq: int
    auth_seq: int
    ins_code: int
    rows: NDArray[np.int64]
    label_seq: int = MISSING
    letter: int = 0


@dataclass(kw_only=True)
class Chain:
    """One chain of the deposited coordinates.

    ``source_asym``: the file's ``label_asym_id``, which differs from ``label_asym_id`` for ligands that the
    file keeps in one chain. ``sequence`` one-letter, '' for ligands. ``is_derived``: the file has no sequence
    of it, so that neighbours need not be neighbours in sequence.
    """

    label_asym_id: str
    auth_asym_id: str
    source_asym: str
    entity: str
    mol_type: MolType
    residues: list[Residue]
    is_branched: bool = False
    is_derived: bool = False
    sequence: str = ""
    links: tuple[tuple[int, str, int, str, str], ...] = field(default=())

    @property
    def is_polymer(self) -> bool:
        """Protein, RNA or DNA."""
        return self.mol_type != MolType.LIGAND


def build_chains(parsed: ParsedEntry, resolver: ComponentResolver, report: Report) -> list[Chain]:
    """The chains of the deposited coordinates, in the file's order.

    Raises:
        StructureError: a component that nobody defines.
    """
    by_asym = group_residues(parsed.sites)
    chains: list[Chain] = []
    for asym in parsed.asym_order:
        if asym in by_asym:
            chains.extend(_AsymReader(parsed, resolver, report, asym).chains(by_asym[asym]))
    return chains


class _AsymReader:
    """The chains that one ``label_asym_id`` holds: one as a rule, several in files without entities."""

    def __init__(self, parsed: ParsedEntry, resolver: ComponentResolver, report: Report, asym: str) -> None:
        self._parsed = parsed
        self._sites: AtomSites = parsed.sites
        self._resolver = resolver
        self._report = report
        self._asym = asym
        self._entity_id = parsed.asym_entity.get(asym, "")
        self._entity = parsed.entities.get(self._entity_id, Entity())

    def chains(self, residues: list[SiteResidue]) -> list[Chain]:
        positions = self._positions()
        if positions and any(residue.label_seq != MISSING for residue in residues):
            return self._with_sequence(residues, positions)
        if self._entity.type == "branched":
            return [self._branched(residues)]
        if self._entity.type in ("non-polymer", "water"):
            return self._ligands(residues, shares=len(residues) > 1)
        return self._derived(residues)

    def _positions(self) -> tuple[SchemePosition, ...]:
        """The sequence: the entity's, with the author's numbers of the chain's own scheme."""
        scheme = self._parsed.schemes.get(self._asym, ())
        sequence = self._entity.sequence
        if not sequence or len(sequence) == len(scheme):
            return scheme
        return tuple(
            SchemePosition(codes=codes, auth_seq=index + 1, ins_code=0)
            for index, codes in enumerate(sequence)
        )

    def _with_sequence(
        self, residues: list[SiteResidue], positions: tuple[SchemePosition, ...]
    ) -> list[Chain]:
        inside: list[SiteResidue] = []
        outside: list[SiteResidue] = []
        for residue in residues:
            fits = 1 <= residue.label_seq <= len(positions) and (
                residue.code in positions[residue.label_seq - 1].codes
                or self._kind(residue.code) is not None
                # A residue that the sequence calls unknown may be anything.
                or {"UNK", "N", "DN"}.intersection(positions[residue.label_seq - 1].codes)
            )
            (inside if fits else outside).append(residue)
        if not inside:
            return self._derived(residues)
        inside = self._once_each(inside)
        letters = choose_conformers(self._sites, inside, True, self._report)
        found = {
            residue.label_seq: (residue, int(letter)) for residue, letter in zip(inside, letters, strict=True)
        }
        placed = [
            self._placed(seq, position, *found.get(seq, (None, 0)))
            for seq, position in enumerate(positions, 1)
        ]
        if outside:
            self._report.warn(
                f"chain {self._asym}: {len(outside)} residues are not of its sequence and count as ligands"
            )
        return [self._polymer(placed), *self._ligands(outside, shares=True)]

    def _once_each(self, residues: list[SiteResidue]) -> list[SiteResidue]:
        """In the order of the sequence; of two at one position (author's numbers differ) the first stays."""
        unique = {residue.label_seq: residue for residue in reversed(residues)}
        if len(unique) < len(residues):
            lost = sum(len(r.rows) for r in residues) - sum(len(r.rows) for r in unique.values())
            self._report.remove("repeated_atoms", lost)
            self._report.warn(f"chain {self._asym}: several residues share a label_seq_id; the first is used")
        return [unique[seq] for seq in sorted(unique)]

    def _placed(
        self, seq: int, position: SchemePosition, residue: SiteResidue | None, letter: int
    ) -> Residue:
        if residue is None:
            return Residue(
                code=position.codes[0],
                seq=seq,
                auth_seq=position.auth_seq,
                ins_code=position.ins_code,
                rows=np.empty(0, np.int64),
                label_seq=seq,
            )
        if residue.code not in position.codes:
            self._report.warn(
                f"chain {self._asym}, position {seq}: the atoms are {residue.code}, the sequence says "
                f"{'/'.join(position.codes)}; the atoms are believed"
            )
        return _residue(residue, seq, letter)

    def _polymer(self, residues: list[Residue]) -> Chain:
        components = [self._resolver.get(residue.code) for residue in residues]
        declared = self._entity.polymer_type
        mol_type = polymer_mol_type(declared, components)
        if declared_mol_type(declared) not in (None, mol_type):
            self._report.warn(
                f"chain {self._asym}: the file calls it {declared}, its residues are {mol_type.name.lower()}"
            )
        sequence = ""
        if mol_type != MolType.LIGAND:
            letters = {component.key: letter(component, mol_type) for component in set(components)}
            sequence = "".join(letters[component.key] for component in components)
            # The depositors' own sequence knows more than the dictionary where a residue stands for one
            # letter.
            if len(self._entity.canonical) == len(sequence) and self._entity.sequence:
                sequence = self._entity.canonical.upper()
        return self._chain(residues, mol_type=mol_type, sequence=sequence)

    def _branched(self, residues: list[SiteResidue]) -> Chain:
        residues = sorted(residues, key=lambda residue: self._branch_number(residue))
        letters = choose_conformers(self._sites, residues, True, self._report)
        placed = [_residue(residue, index + 1, int(letters[index])) for index, residue in enumerate(residues)]
        numbers = [self._branch_number(residue) for residue in residues]
        places = {number: index for index, number in enumerate(numbers)}
        # Links name numbers of the entity; here they become positions of this chain.
        links = tuple(
            (places[first], atom, places[second], other, order)
            for first, atom, second, other, order in self._entity.links
            if first in places and second in places
        )
        chain = self._chain(placed, mol_type=MolType.LIGAND)
        chain.is_branched, chain.links = True, links
        return chain

    def _branch_number(self, residue: SiteResidue) -> int:
        return self._parsed.branch_numbers.get((self._asym, residue.auth_seq), residue.auth_seq)

    def _ligands(self, residues: list[SiteResidue], shares: bool) -> list[Chain]:
        """Every residue a chain of its own; ``shares``: the file keeps it in a chain with others."""
        choose_letters_of = choose_conformers(self._sites, residues, False, self._report)
        return [
            self._chain(
                [_residue(residue, 1, int(choose_letters_of[index]))],
                mol_type=MolType.LIGAND,
                name=f"{self._asym}.{index + 1}" if shares else self._asym,
            )
            for index, residue in enumerate(residues)
        ]

    def _derived(self, residues: list[SiteResidue]) -> list[Chain]:
        """Without an entity: linking residues of ATOM records and all bonded ones are its polymer."""
        kinds = [self._kind(residue.code) for residue in residues]
        bonded = [False] * len(residues)
        for index in range(1, len(residues)):
            # One of the two may be a cap (ACE, NH2), which no type of polymer claims.
            if kinds[index - 1 : index + 1] != [None, None]:
                joined = self._are_bonded(residues[index - 1], residues[index])
                bonded[index] = joined
                bonded[index - 1] |= joined
        is_polymer = [
            joined or (kind is not None and not residue.is_hetatm)
            for kind, residue, joined in zip(kinds, residues, bonded, strict=True)
        ]
        polymer = [residue for residue, inside in zip(residues, is_polymer, strict=True) if inside]
        if len(polymer) < 2:
            return self._ligands(residues, shares=len(residues) > 1)
        self._report.warn(
            f"chain {self._asym}: the file has no sequence; it is read off the residues with atoms"
        )
        ligands = [residue for residue, inside in zip(residues, is_polymer, strict=True) if not inside]
        letters = choose_conformers(self._sites, polymer, True, self._report)
        placed = self._numbered(polymer, [int(letter) for letter in letters])
        chain = self._polymer(placed)
        chain.is_derived = True
        return [chain, *self._ligands(ligands, shares=True)]

    def _numbered(self, residues: list[SiteResidue], letters: list[int]) -> list[Residue]:
        """Positions 1..n; where ``label_seq_id`` jumps over a break of the chain, unknown residues fill it.

        The first number is no position (it may be the author's), and a jump over a bond is none either.
        """
        numbers = [residue.label_seq for residue in residues]
        kind = majority_kind(self._resolver.get(residue.code) for residue in residues)
        steps = np.diff(np.array(numbers, np.int64))
        counts = MISSING not in numbers and bool(((steps > 0) & (steps <= _LONGEST_BREAK)).all())
        placed: list[Residue] = []
        for index, residue in enumerate(residues):
            gap = numbers[index] - numbers[index - 1] - 1 if index and counts else 0
            if gap and kind is not None and not self._are_bonded(residues[index - 1], residue):
                for offset in range(gap):
                    placed.append(
                        Residue(
                            code=UNKNOWN_RESIDUE[kind],
                            seq=len(placed) + 1,
                            auth_seq=residues[index - 1].auth_seq + 1 + offset,
                            ins_code=0,
                            rows=np.empty(0, np.int64),
                        )
                    )
            placed.append(_residue(residue, len(placed) + 1, letters[index]))
        return placed

    def _kind(self, code: str) -> MolType | None:
        return residue_kind(self._resolver.get(code))

    def _are_bonded(self, first: SiteResidue, second: SiteResidue) -> bool:
        for before, after in set(BACKBONE_LINKS.values()):
            a, b = self._atom(first, before), self._atom(second, after)
            if a is not None and b is not None and np.linalg.norm(a - b) < _LINK_DISTANCE:
                return True
        return False

    def _atom(self, residue: SiteResidue, name: str) -> NDArray[np.float64] | None:
        sites = self._sites
        for row in residue.rows.tolist():
            if sites.atom_names[int(sites.atom[row])] == name:
                return sites.coords[row]
        return None

    def _chain(
        self, residues: list[Residue], *, mol_type: MolType, sequence: str = "", name: str = ""
    ) -> Chain:
        rows = next((residue.rows for residue in residues if len(residue.rows)), np.empty(0, np.int64))
        auth = self._sites.auth_asym_names[int(self._sites.auth_asym[rows[0]])] if len(rows) else ""
        return Chain(
            label_asym_id=name or self._asym,
            auth_asym_id=auth or self._asym,
            source_asym=self._asym,
            entity=self._entity_id,
            mol_type=mol_type,
            residues=residues,
            sequence=sequence,
        )


def _residue(residue: SiteResidue, seq: int, letter: int) -> Residue:
    return Residue(
        code=residue.code,
        seq=seq,
        auth_seq=residue.auth_seq if residue.auth_seq != MISSING else seq,
        ins_code=residue.ins_code,
        rows=residue.rows,
        label_seq=residue.label_seq,
        letter=letter,
    )
