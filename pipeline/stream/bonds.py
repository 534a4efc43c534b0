"""``token_bonds``: which tokens a bond joins (AF3 SI table 5).

The supplement restricts the feature to bonds of polymers with ligands and within and between ligands, and
in training to bonds shorter than 2.4 Å. Here a bond counts if at least one of its two tokens is an
atomised one: atoms of ligands, ions and glycans, and of modified residues, which are tokens just like a
ligand's. That gives

- the bonds of a component's definition, for atomised residues;
- the structure's own bonds (``bonds`` table): ligand to polymer, glycosidic, cyclisation;
- the backbone bond between neighbours in a polymer where one of the two is atomised. Without it nothing
  would say that a modified residue's atoms belong in the chain.

Bonds between two standard residues (disulfides, ring closures) and metal coordination are left out, as in
AlphaFold 3's published code: they would tell the model what it has to predict. The 2.4 Å limit applies to
bonds between residues whose atoms are both resolved; a definition's bonds hold whatever the model built.
"""

from typing import Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.chemistry.library import ComponentLibrary
from megafold.pipeline.schema import BondKind, MolType
from megafold.pipeline.stream.crop_view import CropView
from megafold.pipeline.stream.entry import ranges
from megafold.pipeline.stream.reference import name_code, name_codes

#: Å; longer bonds between residues are not features (AF3 SI table 5).
MAX_BOND_LENGTH: Final = 2.4

_BACKBONE: Final = {
    MolType.PROTEIN: ("C", "N"),
    MolType.RNA: ("O3'", "P"),
    MolType.DNA: ("O3'", "P"),
}

Pairs = NDArray[np.int64]


def token_bonds(
    view: CropView,
    library: ComponentLibrary,
    library_atom: NDArray[np.int64],
    coords: NDArray[np.float32],
) -> NDArray[np.bool_]:
    """[N_token, N_token] True: a bond joins the two tokens. Symmetric, false on the diagonal.

    Args:
        view: the crop.
        library: the component library.
        library_atom: [N_atom] index of each atom in the library's atoms.
        coords: [N_atom, 3] in Å, NaN where unresolved.
    """
    n_token = len(view.tokens)
    bonds = np.zeros((n_token, n_token), bool)
    atomised = view.atomised
    if not atomised.any():
        return bonds
    between = np.concatenate([_structure_bonds(view), _backbone_bonds(view, library, library_atom)], axis=1)
    length = np.linalg.norm(coords[between[0]] - coords[between[1]], axis=1)
    between = between[:, ~(length >= MAX_BOND_LENGTH)]  # NaN: unresolved, kept
    pairs = np.concatenate([_component_bonds(view, library, library_atom), between], axis=1)
    i, j = view.atom_to_token[pairs]
    kept = (i != j) & (atomised[i] | atomised[j])
    bonds[i[kept], j[kept]] = True
    return bonds | bonds.T


def _component_bonds(view: CropView, library: ComponentLibrary, library_atom: NDArray[np.int64]) -> Pairs:
    """[2, n] crop atoms that the definition of an atomised residue's component joins."""
    atoms = np.flatnonzero(view.atomised[view.atom_to_token])
    residue = view.residue[view.atom_to_token[atoms]]
    residues, first = np.unique(residue, return_index=True)
    # An atom is found by (residue, index in the library): the library index alone repeats with copies.
    stride = len(library.ref_pos)
    keys = residue * stride + library_atom[atoms]
    order = np.argsort(keys, kind="stable")
    keys = keys[order]

    offsets = library.first_atom.astype(np.int64)
    component = np.searchsorted(offsets, library_atom[atoms[first]], side="right") - 1
    count = library.bond_count[component]
    bond = ranges(library.first_bond[component], count)
    base = np.repeat(residues * stride + offsets[component], count)
    ends = []
    for end in library.bonds[bond].T:
        wanted = base + end
        place = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        ends.append(np.where(keys[place] == wanted, atoms[order[place]], -1))
    pairs = np.stack(ends)
    return pairs[:, (pairs >= 0).all(axis=0)]  # hydrogens, leaving atoms and cropped atoms are not there


def _structure_bonds(view: CropView) -> Pairs:
    """[2, n] crop atoms that the structure's own bonds join; metal coordination does not."""
    bonds = view.entry.bonds
    pairs = view.crop_atom(np.stack([bonds["atom_i"], bonds["atom_j"]])[:, bonds["kind"] != BondKind.METAL])
    return pairs[:, (pairs >= 0).all(axis=0)]


def _backbone_bonds(view: CropView, library: ComponentLibrary, library_atom: NDArray[np.int64]) -> Pairs:
    """[2, n] crop atoms of the bonds between neighbours in polymers."""
    name = name_codes(library, library_atom)
    residue = view.residue[view.atom_to_token]
    mol_type = view.mol_type[view.atom_to_token]
    found = []
    for kind, (tail, head) in _BACKBONE.items():
        tails = np.flatnonzero((name == name_code(tail)) & (mol_type == kind))
        heads = np.flatnonzero((name == name_code(head)) & (mol_type == kind))
        _, from_tail, from_head = np.intersect1d(
            residue[tails] + 1, residue[heads], assume_unique=True, return_indices=True
        )
        found.append(np.stack([tails[from_tail], heads[from_head]]))
    pairs = np.concatenate(found, axis=1)
    chain = view.entry.residues["chain"][residue[pairs]]
    return pairs[:, chain[0] == chain[1]]
