"""What an entry consists of: entities, chains, placed residues and the bonds between them."""

from dataclasses import dataclass, field
from datetime import date
from typing import Final, Literal

import numpy as np

from megafold.pipeline.sample_corpus.geometry import Coords

EntityKind = Literal["polymer", "branched", "non-polymer", "water"]
PolymerType = Literal["polypeptide(L)", "polydeoxyribonucleotide", "polyribonucleotide"]
#: How real files call the three kinds of bonds between residues.
ConnectionKind = Literal["disulf", "covale", "metalc"]
#: How many of a bond's two sides lose an atom.
Leaving = Literal["none", "one", "both"]

IDENTITY: Final = np.hstack([np.eye(3), np.zeros((3, 1))])


@dataclass(frozen=True, eq=False)
class Residue:
    """A residue with the atoms that have coordinates: none for an unresolved one.

    ``pos`` [N_atom, 3]; ``alternates`` and ``occupancies`` are per atom, '' and 1 where there is one.
    """

    code: str
    names: tuple[str, ...] = ()
    elements: tuple[str, ...] = ()
    pos: Coords = field(default_factory=lambda: np.zeros((0, 3)))
    alternates: tuple[str, ...] = ()
    occupancies: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not self.alternates:
            object.__setattr__(self, "alternates", ("",) * len(self.names))
        if not self.occupancies:
            object.__setattr__(self, "occupancies", (1.0,) * len(self.names))

    @property
    def resolved(self) -> bool:
        """Whether any atom has coordinates."""
        return bool(self.names)

    def atom(self, name: str) -> Coords:
        """Coordinates [3] of the first atom called ``name``."""
        return np.asarray(self.pos[self.names.index(name)])

    def moved(self, rotation: Coords, shift: Coords) -> "Residue":
        """The residue rotated [3, 3] about the origin, then shifted [3]."""
        pos = self.pos @ rotation.T + shift
        return Residue(self.code, self.names, self.elements, pos, self.alternates, self.occupancies)

    def without(self, *names: str) -> "Residue":
        """The residue without the named atoms."""
        kept = [i for i, name in enumerate(self.names) if name not in names]
        return Residue(
            self.code,
            tuple(self.names[i] for i in kept),
            tuple(self.elements[i] for i in kept),
            self.pos[kept],
            tuple(self.alternates[i] for i in kept),
            tuple(self.occupancies[i] for i in kept),
        )


@dataclass(frozen=True)
class BranchLink:
    """A glycosidic bond: C1 of residue ``child`` of a branched entity to ``atom`` of ``parent`` (0-based)."""

    child: int
    parent: int
    atom: str


@dataclass(frozen=True)
class Entity:
    """A distinct molecule: ``codes`` are its components in order, ``letters`` a polymer's sequence."""

    kind: EntityKind
    description: str
    codes: tuple[str, ...]
    polymer_type: PolymerType | None = None
    letters: str = ""
    links: tuple[BranchLink, ...] = ()


@dataclass(frozen=True, eq=False)
class Chain:
    """One copy of an entity, named in two schemes; ``numbers`` are the author's."""

    entity: int
    label: str
    auth: str
    residues: tuple[Residue, ...]
    numbers: tuple[int, ...]

    @property
    def pos(self) -> Coords:
        """Coordinates [N_atom, 3] of all atoms."""
        return np.concatenate([residue.pos for residue in self.residues])


@dataclass(frozen=True)
class Connection:
    """A bond between two atoms: (label of the chain, 0-based residue, atom) each."""

    kind: ConnectionKind
    first: tuple[str, int, str]
    second: tuple[str, int, str]
    leaving: Leaving = "none"


@dataclass(frozen=True, eq=False)
class AlignedChain:
    """What alignments are made from: a polymer entity and how its residues relate to those of others.

    ``family`` names what it descends from and ``columns`` the family's residue of each residue (-1 for none);
    ``rates`` [L] say how fast residues change; ``pairs`` are an RNA's base pairs, None for proteins.
    """

    entity: int
    chain: str
    sequence: str
    family: str
    columns: tuple[int, ...]
    rates: Coords
    pairs: tuple[tuple[int, int], ...] | None = None


@dataclass(frozen=True, eq=False)
class Entry:
    """One entry of the corpus."""

    index: int
    id: str
    kind: str
    title: str
    method: str
    resolution: float | None
    deposited: date
    released: date
    entities: tuple[Entity, ...]
    chains: tuple[Chain, ...]
    connections: tuple[Connection, ...]
    operators: tuple[Coords, ...]
    aligned: tuple[AlignedChain, ...]
    tags: tuple[str, ...]

    def residue(self, label: str, index: int) -> Residue:
        """Residue ``index`` (0-based) of the chain called ``label``."""
        return next(chain for chain in self.chains if chain.label == label).residues[index]
