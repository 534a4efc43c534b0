"""From placed molecules to an entry: entities, chain names, numbering and bonds."""

from dataclasses import dataclass, field
from datetime import date, timedelta
from string import ascii_uppercase
from typing import Final

import numpy as np
from numpy.random import Generator

from megafold.pipeline.errors import InputError
from megafold.pipeline.sample_corpus.geometry import Coords
from megafold.pipeline.sample_corpus.model import (
    IDENTITY,
    AlignedChain,
    BranchLink,
    Chain,
    Connection,
    ConnectionKind,
    Entity,
    EntityKind,
    Entry,
    Leaving,
    PolymerType,
    Residue,
)
from megafold.pipeline.sample_corpus.monomers import MODIFIED, monomer

BLOCK: Final = 24
_ORDER: Final[tuple[EntityKind, ...]] = ("polymer", "branched", "non-polymer", "water")
_FIRST_DATE: Final = date(2000, 1, 5)
#: The PDB has never issued an id that begins with 0. The second character is a letter other than E, so that
#: no id reads as a number.
_LETTERS: Final = "abcdfghijklmnopqrstuvwxyz"
_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
MOST_ENTRIES: Final = len(_LETTERS) * len(_DIGITS) ** 2


def entry_id(index: int) -> str:
    """The id of entry ``index``: four characters, lower case.

    Raises:
        InputError: more entries than there are ids.
    """
    if not 0 <= index < MOST_ENTRIES:
        raise InputError(
            f"the sample corpus has no entry {index}: ask for at most {MOST_ENTRIES} entries",
            reason="too-many-entries",
        )
    # Neighbours get ids that look unrelated: the multiplier has no factor in common with the count.
    number = (index * 12289 + 3571) % MOST_ENTRIES
    first, rest = divmod(number, len(_DIGITS) ** 2)
    return "0" + _LETTERS[first] + _DIGITS[rest // len(_DIGITS)] + _DIGITS[rest % len(_DIGITS)]


def release_date(index: int, rng: Generator) -> date:
    """A Wednesday; within a block every entry is released at least 60 days after the one before it."""
    weeks = (index % BLOCK) * 40 + int(rng.integers(0, 30))
    return _FIRST_DATE + timedelta(weeks=weeks)


@dataclass(eq=False)
class _Unit:
    """A molecule that was added: becomes one chain."""

    entity: Entity
    residues: list[Residue]
    aligned: AlignedChain | None = None
    first_number: int = 1


@dataclass(frozen=True)
class Atom:
    """An atom of a molecule that was added: (the handle it got, 0-based residue, atom name)."""

    unit: int
    residue: int
    name: str


@dataclass(eq=False)
class EntryBuilder:
    """Collects molecules and bonds; :meth:`finish` names the chains in the order real files have."""

    index: int
    kind: str
    rng: Generator
    tags: set[str] = field(default_factory=set)
    operators: list[Coords] = field(default_factory=lambda: [IDENTITY])
    _units: list[_Unit] = field(default_factory=list)
    _bonds: list[tuple[ConnectionKind, Atom, Atom, Leaving]] = field(default_factory=list)

    def _add(self, unit: _Unit) -> int:
        self._units.append(unit)
        return len(self._units) - 1

    def add_polymer(
        self,
        description: str,
        kind: PolymerType,
        residues: list[Residue],
        letters: str,
        aligned: AlignedChain | None = None,
    ) -> int:
        """Add a chain; :meth:`finish` sets the entity and chain of ``aligned``. Returns its handle."""
        codes = tuple(residue.code for residue in residues)
        entity = Entity("polymer", description, codes, kind, letters)
        handle = self._add(_Unit(entity, residues, aligned, int(self.rng.choice([1, 1, 1, 5, 24, -2, 101]))))
        for i, code in enumerate(codes):
            if code in MODIFIED:
                self.tags.add(f"modified:{code}")
                for j, k in ((i - 1, i), (i, i + 1)):
                    if j >= 0 and k < len(codes) and residues[j].resolved and residues[k].resolved:
                        self.bond("covale", Atom(handle, j, "C"), Atom(handle, k, "N"), "both")
        return handle

    def add_glycan(self, residues: list[Residue], links: list[BranchLink]) -> int:
        """Add a glycan: a branched entity, or a lone sugar as a non-polymer. Returns its handle."""
        codes = tuple(residue.code for residue in residues)
        if len(residues) == 1:
            return self.add_ligand(residues[0])
        return self._add(_Unit(Entity("branched", "-".join(codes), codes, links=tuple(links)), residues))

    def add_ligand(self, residue: Residue) -> int:
        """Add a ligand or ion. Returns its handle."""
        name = monomer(residue.code).component.name or residue.code
        return self._add(_Unit(Entity("non-polymer", name, (residue.code,)), [residue]))

    def add_waters(self, residues: list[Residue]) -> int | None:
        """Add waters, as one chain. Returns its handle, None for no waters."""
        if not residues:
            return None
        return self._add(_Unit(Entity("water", "water", ("HOH",)), residues))

    def bond(
        self,
        kind: ConnectionKind,
        first: Atom,
        second: Atom,
        leaving: Leaving = "none",
    ) -> None:
        """Add a bond between atoms of molecules that were added."""
        self._bonds.append((kind, first, second, leaving))

    def atoms(self) -> Coords:
        """Coordinates [N, 3] of all atoms so far."""
        parts = [residue.pos for unit in self._units for residue in unit.residues]
        return np.concatenate(parts) if parts else np.zeros((0, 3))

    def polar_atoms(self) -> Coords:
        """Coordinates [N, 3] of all N and O atoms so far."""
        parts = [
            residue.pos[np.isin(residue.elements, ("N", "O"))]
            for unit in self._units
            for residue in unit.residues
            if residue.resolved
        ]
        return np.concatenate(parts)

    def finish(self, title: str, method: str, resolution: float | None) -> Entry:
        """Name chains and entities, number residues, and make the entry."""
        order = sorted(range(len(self._units)), key=lambda i: (_ORDER.index(self._units[i].entity.kind), i))
        entities: list[Entity] = []
        labels: dict[int, str] = {}
        chains: list[Chain] = []
        aligned: list[AlignedChain] = []
        next_number: dict[str, int] = {}
        polymers = [i for i in order if self._units[i].entity.kind == "polymer"]
        for position, i in enumerate(order):
            unit = self._units[i]
            if unit.entity not in entities:
                entities.append(unit.entity)
                if unit.aligned is not None:
                    aligned.append(self._aligned(unit, len(entities) - 1, ascii_uppercase[position]))
            labels[i] = ascii_uppercase[position]
            auth, numbers = self._numbering(unit, labels, polymers, next_number, labels[i])
            chains.append(Chain(entities.index(unit.entity), labels[i], auth, tuple(unit.residues), numbers))
        released = release_date(self.index, self.rng)
        return Entry(
            index=self.index,
            id=entry_id(self.index),
            kind=self.kind,
            title=title,
            method=method,
            resolution=resolution,
            deposited=released - timedelta(days=int(self.rng.integers(60, 500))),
            released=released,
            entities=tuple(entities),
            chains=tuple(chains),
            connections=tuple(
                Connection(
                    kind, (labels[a.unit], a.residue, a.name), (labels[b.unit], b.residue, b.name), leaving
                )
                for kind, a, b, leaving in self._bonds
            ),
            operators=tuple(self.operators),
            aligned=tuple(aligned),
            tags=tuple(sorted(self.tags)),
        )

    @staticmethod
    def _aligned(unit: _Unit, entity: int, label: str) -> AlignedChain:
        known = unit.aligned
        assert known is not None
        return AlignedChain(
            entity, label, known.sequence, known.family, known.columns, known.rates, known.pairs
        )

    def _numbering(
        self,
        unit: _Unit,
        labels: dict[int, str],
        polymers: list[int],
        next_number: dict[str, int],
        label: str,
    ) -> tuple[str, tuple[int, ...]]:
        """The author's chain name and residue numbers: ligands and waters have the nearest polymer's name."""
        count = len(unit.residues)
        if unit.entity.kind in ("polymer", "branched"):
            first = unit.first_number
            if unit.entity.kind == "polymer":
                # Ligands are numbered from the next full hundred on.
                next_number[label] = ((first + count) // 100 + 1) * 100 + 1
            return label, tuple(range(first, first + count))
        centre = np.concatenate([residue.pos for residue in unit.residues]).mean(axis=0)

        def away(i: int) -> float:
            parts = [residue.pos for residue in self._units[i].residues if residue.resolved]
            return float(((np.concatenate(parts) - centre) ** 2).sum(-1).min())

        auth = labels[min(polymers, key=away)]
        first = next_number[auth]
        next_number[auth] += count
        return auth, tuple(range(first, first + count))
