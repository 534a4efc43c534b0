"""Bonds between residues, as the file tells of them and as geometry shows them, in the deposited
coordinates."""

import math
from collections import Counter, defaultdict
from dataclasses import dataclass
from typing import Final

import numpy as np

from megafold.pipeline.schema import BondKind
from megafold.pipeline.structure.atom_sites import WATERS
from megafold.pipeline.structure.chains import BACKBONE_LINKS
from megafold.pipeline.structure.cif import MISSING
from megafold.pipeline.structure.elements import NON_METALS
from megafold.pipeline.structure.entry import Connection, Partner, Report
from megafold.pipeline.structure.inferred import infer_bonds
from megafold.pipeline.structure.layout import Layout

_ORDERS: Final = {"sing": 1, "doub": 2, "trip": 3}
_SULFUR: Final = 16

#: Å; a head and a tail that are closer are bonded (a peptide bond is 1.33, a phosphodiester bond 1.6).
_RING_DISTANCE: Final = 1.75
#: Å; longest bond between light atoms of residues that are neighbours in a polymer.
_NEIGHBOUR_DISTANCE: Final = 1.9
#: Å; a row about an alternate that was not taken still holds if the atoms taken are this close to its
#: distance.
_ALTERNATE_TOLERANCE: Final = 0.5
_USUAL_DISTANCE: Final = {BondKind.METAL: 2.5, BondKind.DISULFIDE: 2.05}


@dataclass(frozen=True, kw_only=True)
class Link:
    """A bond between two residues: atoms of the :class:`Layout`, ``order`` 0 where unknown.

    ``across``: the ends are of different copies of the deposited coordinates, ``distance`` Å apart (NaN where
    the file does not say).
    """

    first: int
    second: int
    order: int
    kind: BondKind
    across: bool = False
    distance: float = math.nan


class LinkReader:
    """Collects the links of one entry; an earlier source wins over a later one."""

    def __init__(
        self, layout: Layout, connections: list[Connection], alt_names: list[str], report: Report
    ) -> None:
        self._layout = layout
        self._connections = connections
        self._alt_names = alt_names
        self._report = report
        self._links: dict[tuple[int, int, bool], Link] = {}
        self._by_label: dict[tuple[str, int], int] = {}
        self._by_auth: dict[tuple[str, int, int], list[int]] = defaultdict(list)
        self._by_author: dict[tuple[str, int, int], list[int]] = defaultdict(list)
        for index, residue in enumerate(layout.residues):
            chain = layout.chains[int(layout.chain_of_residue[index])]
            if residue.label_seq != MISSING and len(residue.rows):
                self._by_label.setdefault((chain.source_asym, residue.label_seq), index)
            self._by_auth[chain.source_asym, residue.auth_seq, residue.ins_code].append(index)
            self._by_author[chain.auth_asym_id, residue.auth_seq, residue.ins_code].append(index)

    def read(self, *, infer: bool, infer_metals: bool) -> list[Link]:
        """All links, sorted by atoms; those that only geometry shows where they are to be inferred.

        The backbone bonds of polymers, which are implied, are not among them.
        """
        self._add_file_rows()
        self._add_branches()
        self._add_odd_backbones()
        self._close_rings()
        if infer:
            self._add_inferred(infer_metals)
        return [self._links[key] for key in sorted(self._links)]

    def _add(self, link: Link) -> None:
        first, second = sorted((link.first, link.second))
        if link.across or not (self._is_implied(first, second) or self._is_internal(first, second)):
            self._links.setdefault((first, second, link.across), link)

    def _add_file_rows(self) -> None:
        lost = metal_free = 0
        for row in self._connections:
            ends = self._end(row.first), self._end(row.second)
            if WATERS.intersection((row.first.comp, row.second.comp)):
                continue
            if ends[0] is None or ends[1] is None:
                lost += not (self._is_other_alternate(row.first) or self._is_other_alternate(row.second))
                continue
            (first, first_taken), (second, second_taken) = ends[0], ends[1]
            if row.type == "metalc" and NON_METALS.issuperset(self._layout.element[[first, second]].tolist()):
                metal_free += 1
                continue
            across = row.first.symmetry != row.second.symmetry
            kind = self._kind(row.type, first, second)
            if not (first_taken and second_taken) and not self._is_close(first, second, row, kind):
                continue
            order = 1 if kind == BondKind.DISULFIDE else _ORDERS.get(row.order, 0)
            self._add(
                Link(first=first, second=second, order=order, kind=kind, across=across, distance=row.distance)
            )
        if lost:
            self._report.warn(f"{lost} struct_conn rows name atoms that are not there")
        if metal_free:
            self._report.warn(f"{metal_free} struct_conn rows of metal coordination have no metal: no bonds")

    def _end(self, partner: Partner) -> tuple[int, bool] | None:
        """The atom that a partner names, and whether it is of the alternate that was taken."""
        for residue in self._residues(partner):
            taken = self._layout.residues[residue]
            if partner.comp in ("", taken.code):
                atom = self._layout.atom(residue, partner.atom)
                if atom < 0:
                    continue
                is_taken = not partner.alt or not taken.letter or self._alt_names[taken.letter] == partner.alt
                return atom, is_taken
        return None

    def _is_other_alternate(self, partner: Partner) -> bool:
        """Whether a partner is of a component that shares its position with the one taken."""
        codes = {self._layout.residues[residue].code for residue in self._residues(partner)}
        return bool(partner.alt and codes and partner.comp not in codes)

    def _residues(self, partner: Partner) -> list[int]:
        if partner.asym and partner.label_seq.isdigit():
            index = self._by_label.get((partner.asym, int(partner.label_seq)))
            if index is not None:
                return [index]
        try:
            number = int(partner.auth_seq or partner.label_seq)
        except ValueError:
            return []
        ins_code = ord(partner.ins_code[0]) if partner.ins_code else 0
        by_asym = self._by_auth.get((partner.asym, number, ins_code), [])
        return by_asym or self._by_author.get((partner.auth_asym, number, ins_code), [])

    def _is_close(self, first: int, second: int, row: Connection, kind: BondKind) -> bool:
        expected = row.distance if math.isfinite(row.distance) else _USUAL_DISTANCE.get(kind, 1.5)
        return abs(self._distance(first, second) - expected) <= _ALTERNATE_TOLERANCE

    def _distance(self, first: int, second: int) -> float:
        return float(np.linalg.norm(self._layout.coords[first] - self._layout.coords[second]))

    def _kind(self, type_: str, first: int, second: int) -> BondKind:
        if type_ == "metalc":
            return BondKind.METAL
        both_sulfur = self._layout.element[first] == self._layout.element[second] == _SULFUR
        if type_ == "disulf" or both_sulfur:
            return BondKind.DISULFIDE
        if self._is_head_to_tail(first, second):
            return BondKind.CYCLISATION
        residues = (int(self._layout.atom_residue[atom]) for atom in (first, second))
        is_sugar = any("SACCHARIDE" in self._layout.component(residue).type.upper() for residue in residues)
        return BondKind.GLYCOSIDIC if is_sugar else BondKind.COVALENT

    def _backbone_pair(self, first: int, second: int) -> tuple[int, int] | None:
        """The residues of (tail, head) where the atoms are a polymer's linking atoms of the same chain."""
        layout = self._layout
        residues = int(layout.atom_residue[first]), int(layout.atom_residue[second])
        chains = {int(layout.chain_of_residue[residue]) for residue in residues}
        if len(chains) != 1:
            return None
        names = BACKBONE_LINKS.get(layout.chains[chains.pop()].mol_type)
        if names == (layout.atom_name(first), layout.atom_name(second)):
            return residues
        if names == (layout.atom_name(second), layout.atom_name(first)):
            return residues[1], residues[0]
        return None

    def _is_implied(self, first: int, second: int) -> bool:
        pair = self._backbone_pair(first, second)
        return pair is not None and pair[1] == pair[0] + 1

    def _is_internal(self, first: int, second: int) -> bool:
        return bool(self._layout.atom_residue[first] == self._layout.atom_residue[second])

    def _is_head_to_tail(self, first: int, second: int) -> bool:
        pair = self._backbone_pair(first, second)
        return pair is not None and pair[1] < pair[0]

    def _add_branches(self) -> None:
        start = 0
        for chain in self._layout.chains:
            for first, atom, second, other, order in chain.links:
                ends = self._layout.atom(start + first, atom), self._layout.atom(start + second, other)
                if min(ends) >= 0:
                    self._add(
                        Link(
                            first=ends[0],
                            second=ends[1],
                            order=_ORDERS.get(order.lower(), 0),
                            kind=BondKind.GLYCOSIDIC,
                        )
                    )
            start += len(chain.residues)

    def _add_odd_backbones(self) -> None:
        """Neighbours in a polymer whose definitions lack the usual linking atoms: the closest pair is the
        bond."""
        layout = self._layout
        forward = {kind: layout.named_atoms([names[0]]) for kind, names in BACKBONE_LINKS.items()}
        backward = {kind: layout.named_atoms([names[1]]) for kind, names in BACKBONE_LINKS.items()}
        for residue in range(len(layout.residues) - 1):
            chain = layout.chains[int(layout.chain_of_residue[residue])]
            if chain.is_branched or layout.chain_of_residue[residue] != layout.chain_of_residue[residue + 1]:
                continue
            kind = chain.mol_type
            if kind in forward and forward[kind][residue] >= 0 and backward[kind][residue + 1] >= 0:
                continue
            pair = self._closest(residue, residue + 1)
            if pair is not None and not self._joined(residue, residue + 1):
                self._add(Link(first=pair[0], second=pair[1], order=0, kind=BondKind.COVALENT))

    def _joined(self, first: int, second: int) -> bool:
        residues = self._layout.atom_residue
        return any(
            (residues[a], residues[b]) == (first, second) for a, b, across in self._links if not across
        )

    def _closest(self, first: int, second: int) -> tuple[int, int] | None:
        layout = self._layout
        a = np.arange(layout.first_atom[first], layout.first_atom[first + 1])
        b = np.arange(layout.first_atom[second], layout.first_atom[second + 1])
        a, b = a[layout.resolved[a]], b[layout.resolved[b]]
        if not len(a) or not len(b):
            return None
        distances = np.linalg.norm(layout.coords[a][:, None] - layout.coords[b][None], axis=-1)
        i, j = np.unravel_index(int(np.argmin(distances)), distances.shape)
        return (int(a[i]), int(b[j])) if distances[i, j] < _NEIGHBOUR_DISTANCE else None

    def _close_rings(self) -> None:
        """Head-to-tail rings that no row tells of."""
        layout = self._layout
        start = 0
        for chain in layout.chains:
            end = start + len(chain.residues)
            names = BACKBONE_LINKS.get(chain.mol_type)
            if names is not None and len(chain.residues) > 2:
                tail, head = layout.atom(end - 1, names[0]), layout.atom(start, names[1])
                if min(tail, head) >= 0 and self._distance(tail, head) < _RING_DISTANCE:
                    first, second = sorted((head, tail))
                    if (first, second, False) not in self._links:
                        self._report.warn(
                            f"chain {chain.label_asym_id} is a ring: its last residue is bonded "
                            "to its first, though no struct_conn row says so"
                        )
                    self._add(Link(first=head, second=tail, order=1, kind=BondKind.CYCLISATION))
            start = end

    def _add_inferred(self, metals: bool) -> None:
        """Bonds that the file does not tell of."""
        before = len(self._links)
        for bond in infer_bonds(self._layout, self._bonds_taken(), metals):
            kind = self._kind("metalc" if bond.is_metal else "covale", bond.first, bond.second)
            order = 1 if kind in (BondKind.DISULFIDE, BondKind.GLYCOSIDIC) else 0
            self._add(Link(first=bond.first, second=bond.second, order=order, kind=kind))
        found = len(self._links) - before
        self._report.change("bonds_inferred", found)
        if found:
            self._report.warn(f"{found} bonds between residues are told by geometry, not by the file")

    def _bonds_taken(self) -> Counter[int]:
        """How many bonds to other residues each atom has, those along the backbones included."""
        layout = self._layout
        taken = Counter(atom for first, second, _ in self._links for atom in (first, second))
        mol_types = np.array([chain.mol_type for chain in layout.chains], np.int64).reshape(-1)
        mol_type = mol_types[layout.chain_of_residue]
        same_chain = np.diff(layout.chain_of_residue) == 0
        for kind, (tail, head) in BACKBONE_LINKS.items():
            tails, heads = layout.named_atoms([tail])[:-1], layout.named_atoms([head])[1:]
            linked = same_chain & (mol_type[1:] == kind) & (tails >= 0) & (heads >= 0)
            taken.update(tails[linked].tolist() + heads[linked].tolist())
        return taken


def is_chemical(link: Link) -> bool:
    """Whether a link costs its groups their leaving atoms: metal coordination does not."""
    return link.kind != BondKind.METAL
