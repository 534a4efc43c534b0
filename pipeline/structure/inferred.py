"""Bonds between residues that geometry shows and the file does not tell of.

Prediction programs, viewers and the wwPDB's assembly files leave ``struct_conn`` out, others write a part of
it; the disulfides, glycosidic bonds, covalent ligands and coordinated metals are there all the same.

Two atoms of different residues are taken to be bonded where they are a bond's length apart and could react:
both have a bond free, and one of them has lost a leaving atom, has a multiple bond to give up, or is boron;
or both are thiols. Atoms that are merely too close are not bonded by that.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from megafold.pipeline.chemistry import Component
from megafold.pipeline.chemistry.elements import HYDROGEN
from megafold.pipeline.schema import RESTYPES
from megafold.pipeline.structure.elements import COVALENT_RADII, IS_METAL, LEAVING_ELEMENTS
from megafold.pipeline.structure.layout import Layout

#: Å, by which a covalent bond may be longer and shorter than the sum of the radii.
_COVALENT_RANGE: Final = (0.30, 0.35)
#: The same for metals, whose bonds are less alike.
_METAL_RANGE: Final = (0.50, 0.60)
#: Å; longest bonds that these ranges allow for (S-S, and caesium): how far to search.
_COVALENT_SEARCH: Final = 2.8
_METAL_SEARCH: Final = 4.2
#: Residues with more contacts at a bond's length than this lie on each other: none of them is a bond.
_MOST_BONDS: Final = 2
_GRID: Final = 1e-3  # Å; coordinates are whole multiples of it

_BORON, _CARBON, _NITROGEN, _OXYGEN = 5, 6, 7, 8
_THIOLS: Final = (16, 34)  # S, Se
_HETERO: Final = (7, 8, 16, 34)
#: Elements that hold metals: N, O, F, S, Cl, Se, Br, I.
_DONORS: Final = (7, 8, 9, 16, 17, 34, 35, 53)


@dataclass(frozen=True)
class InferredBond:
    """Two atoms of the layout that geometry shows to be bonded."""

    first: int
    second: int
    is_metal: bool


class _Chemistry:
    """What each atom of the layout can do, [N] each.

    ``free``: how many more covalent bonds it can form. ``reactive``: whether it can form one with an atom
    that has nothing but a hydrogen to lose. ``donor``: whether it can hold a metal.
    """

    def __init__(self, layout: Layout, taken: Mapping[int, int]) -> None:
        columns = [_component_columns(component) for component in layout.components]
        counts = np.array([len(column) for column in columns], np.int64)
        starts = np.cumsum(counts) - counts
        slot = np.arange(len(layout.atom_residue)) - layout.first_atom[layout.atom_residue]
        rows = starts[layout.component_of_residue[layout.atom_residue]] + slot
        hydrogens, gives_up, is_donor = np.concatenate(columns)[rows].T
        lost = _lost_neighbours(layout)
        # A double bond to an atom that has left is one bond free, not two.
        self.free = hydrogens + np.maximum(gives_up, lost)
        bonded = np.fromiter(taken, np.int64)
        np.subtract.at(self.free, bonded, np.fromiter(taken.values(), np.int64))
        self.reactive = (self.free > 0) & ((gives_up > 0) | (lost > 0))
        self.donor = is_donor > 0
        # Nor has the nitrogen of a peptide bond electrons to spare.
        self.donor[bonded[layout.element[bonded] == _NITROGEN]] = False


def infer_bonds(layout: Layout, taken: Mapping[int, int], metals: bool) -> list[InferredBond]:
    """Bonds between residues of the deposited coordinates: covalent ones, then metals, the shortest first.

    ``taken``: how many bonds to other residues each atom has already, those along the backbones included.
    ``metals``: whether metal coordination is inferred too.
    """
    if not len(layout.atom_residue):
        return []
    chemistry = _Chemistry(layout, taken)
    bonds = _covalent_bonds(layout, chemistry)
    return bonds + _metal_bonds(layout, chemistry.donor) if metals else bonds


def _covalent_bonds(layout: Layout, chemistry: _Chemistry) -> list[InferredBond]:
    free = (chemistry.free > 0) & layout.resolved
    thiol = free & np.isin(layout.element, _THIOLS)
    acts = np.flatnonzero((free & chemistry.reactive) | thiol)
    takes = np.flatnonzero(free & (np.isin(layout.element, _HETERO) | chemistry.reactive))
    first, second, squared = _pairs(layout, acts, takes, _COVALENT_SEARCH, _COVALENT_RANGE)
    fits = chemistry.reactive[first] | chemistry.reactive[second] | (thiol[first] & thiol[second])
    first, second, squared = first[fits], second[fits], squared[fits]
    residues = np.sort(layout.atom_residue[np.stack([first, second])], axis=0)
    key = (residues[0] * len(layout.residues) + residues[1]).tolist()
    contacts = Counter(key)
    left = {atom: int(chemistry.free[atom]) for atom in (*first.tolist(), *second.tolist())}
    bonds = []
    for row in np.lexsort((second, first, squared)).tolist():
        a, b = int(first[row]), int(second[row])
        # An atom that has no bond left takes no further one.
        if contacts[key[row]] <= _MOST_BONDS and left[a] > 0 and left[b] > 0:
            left[a], left[b] = left[a] - 1, left[b] - 1
            bonds.append(InferredBond(a, b, is_metal=False))
    return bonds


def _metal_bonds(layout: Layout, donor: NDArray[np.bool_]) -> list[InferredBond]:
    metals = np.flatnonzero(layout.resolved & IS_METAL[layout.element])
    donors = np.flatnonzero(layout.resolved & donor)
    first, second, squared = _pairs(layout, metals, donors, _METAL_SEARCH, _METAL_RANGE)
    order = np.lexsort((second, first, squared))
    pairs = zip(first[order].tolist(), second[order].tolist(), strict=True)
    return [InferredBond(a, b, is_metal=True) for a, b in pairs]


def _pairs(
    layout: Layout,
    those: NDArray[np.int64],
    others: NDArray[np.int64],
    search: float,
    within: tuple[float, float],
) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """Atoms of ``those`` and of ``others`` that are a bond's length apart, and their squared distance, whole.

    ``within``: by how much a bond may be longer and shorter than the sum of the radii, Å. The first atom of
    each pair is the lower one, and no pair comes twice.
    """
    empty = np.empty(0, np.int64)
    if not len(those) or not len(others):
        return empty, empty, empty
    near = cKDTree(layout.coords[others]).query_ball_point(layout.coords[those], search)
    counts = np.array([len(found) for found in near])
    pairs = np.stack(
        [np.repeat(those, counts), others[np.concatenate([*near, empty]).astype(np.int64)]], axis=1
    )
    pairs = pairs[layout.atom_residue[pairs[:, 0]] != layout.atom_residue[pairs[:, 1]]]
    first, second = np.unique(np.sort(pairs, axis=1), axis=0).T
    grid = np.round(layout.coords[first] / _GRID) - np.round(layout.coords[second] / _GRID)
    squared = (grid * grid).sum(axis=1).astype(np.int64)
    excess = np.sqrt(squared) * _GRID - COVALENT_RADII[layout.element[first]]
    excess -= COVALENT_RADII[layout.element[second]]
    fits = (excess <= within[0]) & (excess >= -within[1])
    return first[fits], second[fits], squared[fits]


@lru_cache(maxsize=4096)
def _component_columns(component: Component) -> NDArray[np.int64]:
    """[N_heavy, 3] of each heavy atom: hydrogens it can lose, bonds it can give up, whether it holds metals.

    Carbon keeps its hydrogens.
    """
    elements, count = component.elements.tolist(), len(component)
    hydrogens, gives_up, carbonyl = (np.zeros(count, np.int64) for _ in range(3))
    hetero = Counter(
        atom for i, j in component.bonds.tolist() for atom, k in ((i, j), (j, i)) if elements[k] in _HETERO
    )
    for i, j, order, _ in component.bond_rows():
        for atom, other in ((i, j), (j, i)):
            hydrogens[atom] += elements[other] == HYDROGEN
            if order > 1 and elements[atom] == _CARBON:
                # Amides, esters and acids keep their double bond.
                stable = elements[other] in _HETERO and hetero[atom] > 1
                gives_up[atom] += component.code not in RESTYPES and not stable
                carbonyl[atom] |= elements[other] == _OXYGEN
    gives_up[component.elements == _BORON] += 1
    is_donor = np.isin(component.elements, _DONORS)
    for i, j in component.bonds.tolist():
        for atom, other in ((i, j), (j, i)):
            # The nitrogen of an amide has no electrons to spare.
            if elements[atom] == _NITROGEN and hydrogens[atom] and carbonyl[other]:
                is_donor[atom] = False
    hydrogens[component.elements == _CARBON] = 0
    return np.stack([hydrogens, gives_up, is_donor.astype(np.int64)], axis=1)[component.heavy]


def _lost_neighbours(layout: Layout) -> NDArray[np.int64]:
    """[N] how many atoms without coordinates may have left each atom."""
    total = np.zeros(len(layout.atom_residue), np.int64)
    resolved = layout.resolved
    for index, component in enumerate(layout.components):
        starts = layout.first_atom[:-1][layout.component_of_residue == index]
        for atom, other in _leaving_pairs(component):
            total[starts + atom] += ~resolved[starts + other]
    return total


@lru_cache(maxsize=4096)
def _leaving_pairs(component: Component) -> list[tuple[int, int]]:
    """(heavy atom, heavy neighbour that may leave it), both as places among the heavy atoms.

    Marked atoms may leave, and so may terminal O, N, S and halogens; in standard residues only those at a
    carbonyl, since their side chains are often modelled in part.
    """
    place = np.cumsum(component.heavy) - 1
    heavy = [(i, j) for i, j in component.bonds.tolist() if component.heavy[i] and component.heavy[j]]
    degree = Counter(atom for pair in heavy for atom in pair)
    carbonyl = {
        atom
        for i, j, order, _ in component.bond_rows()
        for atom, other in ((i, j), (j, i))
        if order == 2 and component.elements[other] == _OXYGEN
    }
    is_standard = component.code in RESTYPES
    return [
        (int(place[atom]), int(place[other]))
        for pair in heavy
        for atom, other in (pair, pair[::-1])
        if component.leaving[other]
        or (
            degree[other] == 1
            and int(component.elements[other]) in LEAVING_ELEMENTS
            and (atom in carbonyl or not is_standard)
        )
    ]
