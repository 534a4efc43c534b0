"""The atoms that the components' definitions say are there, with the coordinates that the file has of
them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.chemistry import Component
from megafold.pipeline.structure.chains import Chain, Residue
from megafold.pipeline.structure.components import ComponentResolver
from megafold.pipeline.structure.entry import AtomSites, Report

#: The pair of an arginine's atoms whose names may be exchanged.
ARGININE_PAIR: Final = ("NH1", "NH2")


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All heavy atoms of all residues of the deposited chains: ``R`` residues, ``N`` atoms.

    Atoms come by residue, in the order of the component's definition. Leaving atoms are all still there.

    Attributes:
        chains, residues: what the rows stand for.
        chain_of_residue: [R].
        components: the distinct components, sorted by key.
        component_of_residue: [R] index into them.
        first_atom: [R + 1] first atom of each residue; the last item is N.
        atom_residue: [N].
        component_atom: [N] index into all atoms of the component.
        element: [N] atomic number.
        coords: [N, 3] Å, rounded to 1e-3, NaN where unresolved.
        occupancy_b: [N, 2] occupancy and B factor, NaN where unresolved.
        slots, file_slots: for each component, places of its heavy atoms by the definition's and the file's
            names.
        exchanged: arginines whose NH1 and NH2 are the other way round in the file.
    """

    chains: list[Chain]
    residues: list[Residue]
    chain_of_residue: NDArray[np.int64]
    components: list[Component]
    component_of_residue: NDArray[np.int64]
    first_atom: NDArray[np.int64]
    atom_residue: NDArray[np.int64]
    component_atom: NDArray[np.int64]
    element: NDArray[np.int64]
    coords: NDArray[np.float64]
    occupancy_b: NDArray[np.float64]
    slots: list[dict[str, int]]
    file_slots: list[dict[str, int]]
    exchanged: frozenset[int] = frozenset()

    @property
    def resolved(self) -> NDArray[np.bool_]:
        """[N] True where the atom has coordinates."""
        return np.isfinite(self.coords[:, 0])

    def component(self, residue: int) -> Component:
        """The component of a residue."""
        return self.components[int(self.component_of_residue[residue])]

    def atom(self, residue: int, name: str) -> int:
        """Index of a residue's heavy atom by its name in the file, -1 where its component has none."""
        if residue in self.exchanged and name in ARGININE_PAIR:
            name = ARGININE_PAIR[name == ARGININE_PAIR[0]]
        slot = self.file_slots[int(self.component_of_residue[residue])].get(name, -1)
        return -1 if slot < 0 else int(self.first_atom[residue]) + slot

    def atom_name(self, atom: int) -> str:
        """Name of an atom."""
        return self.component(int(self.atom_residue[atom])).atom_names[int(self.component_atom[atom])]

    def named_atoms(self, names: Sequence[str]) -> NDArray[np.int64]:
        """[R] index of the first of ``names`` that each residue's component has, -1 for none."""
        slot = np.array(
            [next((slots[name] for name in names if name in slots), -1) for slots in self.slots], np.int64
        ).reshape(-1)
        slot = slot[self.component_of_residue]
        return np.where(slot < 0, -1, self.first_atom[:-1] + slot)


def lay_out(chains: list[Chain], sites: AtomSites, resolver: ComponentResolver, report: Report) -> Layout:
    """Put the file's atoms into the definitions' places; atoms outside the definitions are counted and
    left."""
    residues = [residue for chain in chains for residue in chain.residues]
    chain_of_residue = np.repeat(np.arange(len(chains)), [len(chain.residues) for chain in chains])
    by_code = {code: resolver.get(code) for code in dict.fromkeys(residue.code for residue in residues)}
    components = sorted(by_code.values(), key=lambda component: component.key)
    index = {id(component): position for position, component in enumerate(components)}
    component_of = np.array([index[id(by_code[residue.code])] for residue in residues], np.int64).reshape(-1)

    heavy = [np.flatnonzero(component.heavy) for component in components]
    counts = np.array([len(atoms) for atoms in heavy], np.int64).reshape(-1)
    starts = np.concatenate([[0], np.cumsum(counts)])
    first_atom = np.concatenate([[0], np.cumsum(counts[component_of])])
    atom_residue = np.repeat(np.arange(len(residues)), counts[component_of])
    slot = np.arange(len(atom_residue)) - first_atom[atom_residue]
    flat = starts[component_of[atom_residue]] + slot
    slots = [
        {component.atom_names[atom]: position for position, atom in enumerate(atoms.tolist())}
        for component, atoms in zip(components, heavy, strict=True)
    ]
    file_slots = [
        _file_slots(found, resolver.aliases(c.code)) for c, found in zip(components, slots, strict=True)
    ]
    coords = np.full((len(atom_residue), 3), np.nan)
    occupancy_b = np.full((len(atom_residue), 2), np.nan)
    rows = np.concatenate([np.empty(0, np.int64), *(residue.rows for residue in residues)])
    row_residue = np.repeat(np.arange(len(residues)), [len(residue.rows) for residue in residues])
    row_slot = _slots(sites, rows, component_of[row_residue], file_slots)
    report.remove("atoms_outside_definition", int((row_slot < 0).sum()))
    used = (row_slot >= 0) & sites.has_coords[rows]
    target = first_atom[row_residue[used]] + row_slot[used]
    coords[target] = np.round(sites.coords[rows[used]], 3) + 0.0  # no negative zeros
    occupancy_b[target, 0] = sites.occupancy[rows[used]]
    occupancy_b[target, 1] = sites.b_factor[rows[used]]
    elements = [component.elements[atoms] for component, atoms in zip(components, heavy, strict=True)]
    return Layout(
        chains=chains,
        residues=residues,
        chain_of_residue=chain_of_residue,
        components=components,
        component_of_residue=component_of,
        first_atom=first_atom,
        atom_residue=atom_residue,
        component_atom=np.concatenate([np.empty(0, np.int64), *heavy])[flat],
        element=np.concatenate([np.empty(0, np.int64), *elements])[flat],
        coords=coords,
        occupancy_b=occupancy_b,
        slots=slots,
        file_slots=file_slots,
    )


def _file_slots(slots: dict[str, int], aliases: dict[str, str]) -> dict[str, int]:
    return {name: slots[target] for name, target in aliases.items() if target in slots} if aliases else slots


def _slots(
    sites: AtomSites, rows: NDArray[np.int64], component: NDArray[np.int64], slots: list[dict[str, int]]
) -> NDArray[np.int64]:
    """Place of each row's atom among its component's heavy atoms, -1 for none.

    Few distinct pairs, many rows.
    """
    pairs = component * max(1, len(sites.atom_names)) + sites.atom[rows]
    distinct, inverse = np.unique(pairs, return_inverse=True)
    places = [
        slots[pair // len(sites.atom_names)].get(sites.atom_names[pair % len(sites.atom_names)], -1)
        for pair in distinct.tolist()
    ]
    return np.array(places, np.int64).reshape(-1)[inverse]
