"""Leaving atoms: which atoms of the definitions are not there because their residue is bonded.

The rule, in this order:

1. Within a polymer, an atom that the definition marks as leaving is gone unless the file has coordinates of
   it or the residue is the terminus at which it stays: the first residue for atoms bonded to phosphorus
   (OP3), the last for all others (OXT).
2. At an atom with a bond to another residue (metal coordination does not count) one leaving group goes for
   each such bond: the marked neighbour and the marked atoms that hang on it, those without coordinates first,
   then in the definition's order; whether the file has coordinates of it or not (AF3 SI 2.5.4).
3. Where the definition marks none there, a terminal O, N, S or halogen without coordinates at the bonded atom
   is taken to have left: dictionaries mark incompletely.

Everywhere else all heavy atoms of the definition stay, unresolved ones masked.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.chemistry import Component
from megafold.pipeline.structure.connections import Link, is_chemical
from megafold.pipeline.structure.elements import LEAVING_ELEMENTS
from megafold.pipeline.structure.entry import Report
from megafold.pipeline.structure.layout import Layout

_PHOSPHORUS: Final = 15


def kept_atoms(layout: Layout, links: Iterable[Link], report: Report) -> NDArray[np.bool_]:
    """[N] False for the layout's atoms that have left; counts those of rule 2 that had coordinates."""
    resolved = layout.resolved
    keep = np.ones(len(resolved), bool)
    _leave_backbone(layout, resolved, keep)
    bonded = Counter(atom for link in links if is_chemical(link) for atom in (link.first, link.second))
    neighbours = {id(component): _heavy_neighbours(component) for component in layout.components}
    for atom in sorted(bonded):
        residue = int(layout.atom_residue[atom])
        component = layout.component(residue)
        first = int(layout.first_atom[residue])
        slots = layout.slots[int(layout.component_of_residue[residue])]
        index = {i: first + slots[name] for i, name in enumerate(component.atom_names) if name in slots}
        groups = _leaving_groups(component, neighbours[id(component)], int(layout.component_atom[atom]))
        present = [group for group in groups if keep[index[group[0]]]]
        gone = [group for group in groups if not keep[index[group[0]]]]
        present.sort(key=lambda group: (bool(resolved[index[group[0]]]), group[0]))
        wanted = max(0, bonded[atom] - len(gone))
        if not groups and resolved[atom]:
            present = [
                [other]
                for other in neighbours[id(component)][int(layout.component_atom[atom])]
                if component.elements[other] in LEAVING_ELEMENTS
                and len(neighbours[id(component)][other]) == 1
                and not resolved[index[other]]
            ]
        left = [index[member] for group in present[:wanted] for member in group]
        keep[left] = False
        report.remove("leaving_atoms", int(resolved[left].sum()))
    return keep


def _leave_backbone(layout: Layout, resolved: NDArray[np.bool_], keep: NDArray[np.bool_]) -> None:
    """Rule 1, for all residues of polymers at once."""
    leaving, at_phosphorus = [], []
    for component in layout.components:
        to_phosphorus = np.zeros(len(component), bool)
        for i, j in component.bonds.tolist():
            to_phosphorus[i] |= component.elements[j] == _PHOSPHORUS
            to_phosphorus[j] |= component.elements[i] == _PHOSPHORUS
        leaving.append(component.leaving)
        at_phosphorus.append(to_phosphorus)
    offsets = np.concatenate([[0], np.cumsum([len(component) for component in layout.components])])
    flat = offsets[layout.component_of_residue[layout.atom_residue]] + layout.component_atom
    is_leaving, is_at_phosphorus = np.concatenate(leaving)[flat], np.concatenate(at_phosphorus)[flat]

    lengths = np.array([len(chain.residues) for chain in layout.chains], np.int64)
    first = np.cumsum(lengths) - lengths
    is_first = np.zeros(len(layout.residues), bool)
    is_last = np.zeros(len(layout.residues), bool)
    is_first[first], is_last[first + lengths - 1] = True, True
    # A chain of one residue is a ligand, and so is everything that is no polymer: nothing leaves by position.
    links = np.array([len(chain.residues) > 1 and not chain.is_branched for chain in layout.chains], bool)
    residue = layout.atom_residue
    stays = np.where(is_at_phosphorus, is_first[residue], is_last[residue])
    keep &= ~(is_leaving & ~resolved & ~stays & links[layout.chain_of_residue][residue])


def _heavy_neighbours(component: Component) -> dict[int, list[int]]:
    neighbours: dict[int, list[int]] = defaultdict(list)
    for i, j in component.bonds.tolist():
        if component.heavy[i] and component.heavy[j]:
            neighbours[i].append(j)
            neighbours[j].append(i)
    return neighbours


def _leaving_groups(component: Component, neighbours: dict[int, list[int]], atom: int) -> list[list[int]]:
    """Groups of marked atoms at ``atom``: each starts with its neighbour."""
    groups = []
    for start in neighbours[atom]:
        if not component.leaving[start]:
            continue
        group, seen = [start], {atom, start}
        for member in group:
            for other in neighbours[member]:
                if component.leaving[other] and other not in seen:
                    seen.add(other)
                    group.append(other)
        groups.append(group)
    return groups
