"""Side chains onto a backbone: rotamers that fit, smaller residues where none does."""

from dataclasses import dataclass
from typing import Final

import numpy as np

from megafold.pipeline.sample_corpus.backbone import ANGLE_CA_C_O, C_O, CA, C, N, O, neighbour_counts
from megafold.pipeline.sample_corpus.family import Member
from megafold.pipeline.sample_corpus.geometry import Coords, local_frame, place_atom, squared_distances
from megafold.pipeline.sample_corpus.model import Residue
from megafold.pipeline.sample_corpus.monomers import LETTER, ONE_TO_THREE, SideChain, monomer, side_chain

#: Least distance between atoms of residues that are not neighbours, and of those that are.
_CONTACT: Final = 2.95
_CONTACT_NEXT: Final = 2.7
_CONTACT_PROLINE: Final = 2.35
_SOFT: Final = 3.6
_REACH: Final = 12.0
#: What takes the place of a residue that does not fit, in this order; alanine always fits.
_SMALLER: Final = {
    "W": "FLV", "Y": "FTS", "F": "LV", "R": "KQS", "K": "QS", "E": "QDS", "Q": "ES", "D": "NS", "H": "NS",
    "M": "LV", "L": "VT", "I": "V", "N": "DS", "T": "S", "V": "S", "C": "S", "P": "S",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class PlacedSideChain:
    """A conformation chosen for one residue: ``pos`` [N_atom, 3], CB first."""

    code: str
    names: tuple[str, ...]
    elements: tuple[str, ...]
    pos: Coords


class ChainPacking:
    """A protein chain under construction: its backbone, and the side chains placed so far.

    Other molecules (``obstacles``, [N, 3]) keep their distance too.
    """

    def __init__(self, member: Member, obstacles: Coords | None = None) -> None:
        self.member = member
        self.letters = list(member.sequence)
        self.resolved = [i for i, resolved in enumerate(member.resolved) if resolved]
        self.placed: dict[int, PlacedSideChain] = {}
        self.alternates: dict[int, PlacedSideChain] = {}
        backbone = member.backbone
        self._frames = local_frame(backbone[:, CA], backbone[:, N], backbone[:, C])
        glycine = np.array([letter == "G" for letter in self.letters])
        self._has_beta = ~glycine
        self._obstacles = np.zeros((0, 3)) if obstacles is None else obstacles
        self.burial = np.zeros(len(self.letters), int)
        self.burial[self.resolved] = neighbour_counts(backbone[self.resolved])
        self._rebuild()

    def _rebuild(self) -> None:
        """Collect all atoms there are, and which residue each belongs to (-1: an obstacle)."""
        points, owners = [self._obstacles], [np.full(len(self._obstacles), -1)]
        for i in self.resolved:
            count = 5 if self._has_beta[i] else 4
            points.append(self.member.backbone[i, :count])
            owners.append(np.full(count, i))
            if i == len(self.letters) - 1:
                points.append(self._terminal_oxygen()[None])
                owners.append(np.array([i]))
            for side in (self.placed.get(i), self.alternates.get(i)):
                if side is not None:
                    points.append(side.pos)
                    owners.append(np.full(len(side.pos), i))
        self._points, self._owners = np.concatenate(points), np.concatenate(owners)

    def in_space(self, i: int, side: SideChain) -> Coords:
        """All conformations of a side chain at residue ``i``: [N_rotamer, N_atom, 3]."""
        return np.asarray(side.rotamers @ self._frames[i].T + self.member.backbone[i, CA])

    def add_obstacles(self, points: Coords) -> None:
        """More atoms that side chains must keep away from."""
        self._obstacles = np.concatenate([self._obstacles, points])
        self._rebuild()

    def scores(self, i: int, conformations: Coords, is_proline: bool = False) -> Coords:
        """Penalties [N_rotamer] of conformations at residue ``i``; infinite where one collides."""
        owner_gap = np.where(self._owners >= 0, np.abs(self._owners - i), 99)
        near = (owner_gap > 0) & (((self._points - self.member.backbone[i, CA]) ** 2).sum(-1) < _REACH**2)
        limits = np.where(owner_gap > 1, _CONTACT, _CONTACT_NEXT)
        if is_proline:
            # CD is bonded to N: C of the residue before is at the distance that one angle spans.
            limits[self._owners == i - 1] = _CONTACT_PROLINE
        limits = limits[near]
        squares = squared_distances(conformations[:, 1:], self._points[near])
        penalty = np.maximum(_SOFT**2 - squares, 0).sum(axis=(1, 2)) - 0.1 * (squares < 25).sum(axis=(1, 2))
        collides = (squares < limits**2).any(axis=(1, 2))
        return np.where(collides, np.inf, penalty)

    def place(self, i: int, code: str) -> bool:
        """Put the best conformation of ``code`` at residue ``i``; False where none fits."""
        side = side_chain(code)
        if len(side.names) <= 1:
            return self._settle(
                i, code, PlacedSideChain(code, side.names, side.elements, self.in_space(i, side)[0])
            )
        conformations = self.in_space(i, side)
        scores = self.scores(i, conformations, code == "PRO")
        best = int(np.argmin(scores))
        if not np.isfinite(scores[best]):
            return False
        return self._settle(i, code, PlacedSideChain(code, side.names, side.elements, conformations[best]))

    def _settle(self, i: int, code: str, side: PlacedSideChain) -> bool:
        replaced = i in self.placed
        self.placed[i] = side
        self.letters[i] = LETTER[code]
        if replaced or self._has_beta[i] != (code != "GLY"):
            self._has_beta[i] = code != "GLY"
            self._rebuild()
        else:
            self._points = np.concatenate([self._points, side.pos])
            self._owners = np.concatenate([self._owners, np.full(len(side.pos), i)])
        return True

    def fix(self, i: int, code: str, pos: Coords) -> None:
        """Set a side chain whose coordinates [N_atom, 3] are known."""
        side = side_chain(code)
        self._settle(i, code, PlacedSideChain(code, side.names, side.elements, pos))

    def pack(self) -> None:
        """Place all side chains that are missing, the most buried first."""
        for i in sorted(self.resolved, key=lambda i: (-self.burial[i], i)):
            if i in self.placed:
                continue
            letter = self.letters[i]
            options = [*letter, *_SMALLER.get(letter, ""), "A"]
            next(option for option in options if self.place(i, ONE_TO_THREE[option]))

    def add_alternate(self, i: int) -> bool:
        """Give residue ``i`` a second conformation that differs by 1.5 Å or more; False if none fits."""
        first = self.placed[i]
        if len(first.names) <= 1 or i in self.alternates:
            return False
        conformations = self.in_space(i, side_chain(first.code))
        scores = self.scores(i, conformations, first.code == "PRO")
        apart = ((conformations - first.pos) ** 2).sum(-1).max(-1) > 1.5**2
        scores = np.where(apart, scores, np.inf)
        best = int(np.argmin(scores))
        if not np.isfinite(scores[best]):
            return False
        self.alternates[i] = PlacedSideChain(first.code, first.names, first.elements, conformations[best])
        self._rebuild()
        return True

    def atoms(self) -> Coords:
        """The chain's atoms [N, 3] there are so far."""
        return np.asarray(self._points[self._owners >= 0])

    def atoms_and_obstacles(self) -> Coords:
        """The chain's atoms so far, and those that it keeps away from, [N, 3]."""
        return self._points.copy()

    def residues(self) -> list[Residue]:
        """The chain's residues, atoms in the dictionary's order; unresolved ones have no atoms."""
        return [self._residue(i) for i in range(len(self.letters))]

    def _terminal_oxygen(self) -> Coords:
        """The second oxygen of the C-terminal carboxylate, opposite to the first."""
        ca, c, oxygen = self.member.backbone[-1, [CA, C, O]]
        return place_atom(oxygen, ca, c, length=C_O, angle=ANGLE_CA_C_O, torsion=180.0)

    def _residue(self, i: int) -> Residue:
        if i not in self.placed:
            return Residue(code=ONE_TO_THREE[self.letters[i]])
        side = self.placed[i]
        backbone = self.member.backbone[i]
        known = dict(zip(("N", "CA", "C", "O"), backbone[:4], strict=True))
        known.update(zip(side.names, side.pos, strict=True))
        if i == len(self.letters) - 1:
            known["OXT"] = self._terminal_oxygen()
        block = monomer(side.code)
        other = self.alternates.get(i)
        second = {} if other is None else dict(zip(other.names, other.pos, strict=True))
        rows = []
        for name, element in zip(block.names, block.elements, strict=True):
            if name not in known:
                continue
            if name in second and name != "CB":
                rows += [(name, element, known[name], "A", 0.6), (name, element, second[name], "B", 0.4)]
            else:
                rows.append((name, element, known[name], "", 1.0))
        names, elements, pos, alternates, occupancies = zip(*rows, strict=True)
        return Residue(side.code, names, elements, np.stack(pos), alternates, occupancies)
