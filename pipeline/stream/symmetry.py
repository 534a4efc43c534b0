"""What a crop's ground truth could just as well be: for permutation alignment (AF3 SI 4.2).

Two kinds of exchange leave the molecule as it is: equivalent atoms within a residue (automorphisms of its
component), and chains of one entity. The second kind needs coordinates outside the crop.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.chemistry.library import ComponentLibrary, LibraryComponent
from megafold.pipeline.schema import MolType
from megafold.pipeline.stream.crop_view import CropView
from megafold.pipeline.stream.entry import EntryTables, present, ranges
from megafold.pipeline.stream.memory import Recent

#: Volume that three bonds span below which their centre has no handedness, Å³; tetrahedra have 2 or more.
_FLAT: Final = 0.5

#: Equivalent orders of residues' atoms by component and the atoms of it that are there.
KnownOrders = Recent[NDArray[np.int64]]


@dataclass(frozen=True, kw_only=True)
class ChainCandidates:
    """The chains that a chain of the crop could be exchanged with, itself among them.

    ``asym_id``: the crop's chain. ``atoms`` [k]: its atoms, as indices into the sample's. ``places`` [k]:
    numbers that corresponding atoms of copies share, in the order of a chain's atoms.
    ``candidate_asym_id`` [m]: chains of the same entity, ascending. ``coords`` [m, k, 3] in the sample's
    frame, Å, 0 where ``coords_mask`` [m, k] is false: unresolved there, or absent.
    """

    asym_id: int
    atoms: NDArray[np.int64]
    places: NDArray[np.int64]
    candidate_asym_id: NDArray[np.int64]
    coords: NDArray[np.float32]
    coords_mask: NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True)
class Symmetry:
    """All exchanges of one sample.

    ``automorphisms``: for each residue with any, [n, k] indices into the sample's atoms: row 0 is the
    residue's atoms as they are, each other row an equivalent order of them. ``chains``: for each chain of
    the crop whose entity has several in the entry.
    """

    automorphisms: tuple[NDArray[np.int64], ...]
    chains: tuple[ChainCandidates, ...]


def residue_automorphisms(
    view: CropView, library: ComponentLibrary, component_atom: NDArray[np.int32], known: KnownOrders
) -> tuple[NDArray[np.int64], ...]:
    """Equivalent orders of the atoms of each residue of a crop.

    Only automorphisms count that map the atoms which are there (a crop and bonds take some away) onto
    themselves. In chains of residues they must keep every centre's handedness, too: there, atoms such as
    valine's methyls or a phosphate's oxygens are named by it, and a model is to learn the names; a sulphate's
    names mean nothing. Residues with one order alone are left out. ``known`` keeps what has been found: most
    residues are like others before.
    """
    residue = view.residue[view.atom_to_token]
    starts = np.flatnonzero(np.diff(residue, prepend=-1))
    component = view.entry.residues["component"][residue[starts]]
    found = []
    for start, end, kind in zip(starts, [*starts[1:], len(residue)], component.tolist(), strict=True):
        here, key = component_atom[start:end], view.entry.components[kind]
        named = bool(view.mol_type[view.atom_to_token[start]] != MolType.LIGAND)
        make = partial(_orders, library, key, here, by_handedness=named)
        orders = known.get(f"{key} {named} {here.tobytes().hex()}", make)
        if len(orders) > 1:
            found.append(start + orders)
    return tuple(found)


def _orders(
    library: ComponentLibrary, key: str, here: NDArray[np.int32], *, by_handedness: bool
) -> NDArray[np.int64]:
    """Equivalent orders of a residue's atoms, as indices into ``here``, the atoms of the component it has."""
    component = library[key]
    automorphisms = component.automorphisms
    if by_handedness and len(automorphisms) > 1:
        automorphisms = automorphisms[_keep_handedness(component)]
    if len(automorphisms) < 2:
        return np.empty((0, 0), np.int64)
    place = np.full(int(max(automorphisms.max(), here.max())) + 1, -1)
    place[here] = np.arange(len(here))
    # Column j of an automorphism says where heavy atom j goes; atoms that are here must stay here.
    images = place[automorphisms[:, np.isin(automorphisms[0], here)]]
    return _identity_first(np.unique(images[(images >= 0).all(axis=1)], axis=0))


def _keep_handedness(component: LibraryComponent) -> NDArray[np.bool_]:
    """[N_automorphism] which of them turn no centre of the reference conformer into its mirror image."""
    orders, position = component.automorphisms, component.ref_pos.astype(np.float64)
    heavy = component.heavy_atoms
    image = np.zeros((len(orders), len(position)), np.int64)
    image[:, heavy] = orders
    neighbours: dict[int, list[int]] = {int(atom): [] for atom in heavy}
    for one, other in component.bonds.tolist():
        if one in neighbours and other in neighbours:
            neighbours[one].append(other)
            neighbours[other].append(one)
    keeps = np.ones(len(orders), bool)
    for centre, bonded in neighbours.items():
        if len(bonded) < 3:
            continue
        corners = position[image[:, bonded[:3]]] - position[image[:, centre]][:, None]
        volume = np.linalg.det(corners)  # of the identity first
        keeps &= (np.abs(volume) < _FLAT) | (volume * volume[0] > 0) | np.isnan(volume)
    return keeps


def _identity_first(images: NDArray[np.int64]) -> NDArray[np.int64]:
    is_identity = (np.diff(images, axis=1) > 0).all(axis=1)
    return np.concatenate([images[is_identity], images[~is_identity]])


def exchanges(features: Mapping[str, NDArray[Any]], symmetry: Symmetry | None) -> dict[str, Any]:
    """A sample's exchanges as plain arrays, for a loss that knows nothing of the pipeline.

    Chains of the crop that are bonded to others (by a glycan, say) keep their places: a sample does not say
    which copies have such bonds, too.

    Returns:
        ``orders``: arrays [G, n, k] of G residues each, which have n equivalent orders of k atoms: indices
        into the sample's atoms, [:, 0] as they are. ``chains``: for each chain that may be exchanged its
        ``atoms`` [k], its ``candidates`` [m] (asym_ids), where it is itself among them, ``own`` [], and
        ``coords`` [m, k, 3] and ``coords_mask`` [m, k] as in :class:`ChainCandidates`.
    """
    if symmetry is None:
        return {"orders": [], "chains": []}
    by_shape: dict[tuple[int, ...], list[NDArray[np.int64]]] = {}
    for images in symmetry.automorphisms:
        by_shape.setdefault(images.shape, []).append(images)
    ends = features["asym_id"][np.argwhere(features["token_bonds"])]
    bonded = np.unique(ends[ends[:, 0] != ends[:, 1]])
    chains = []
    for chain in symmetry.chains:
        free = ~np.isin(chain.candidate_asym_id, bonded)
        if chain.asym_id in bonded or free.sum() < 2:
            continue
        candidates = chain.candidate_asym_id[free]
        chains.append(
            {
                "atoms": chain.atoms,
                "candidates": candidates,
                "own": np.array(np.searchsorted(candidates, chain.asym_id)),
                "coords": chain.coords[free],
                "coords_mask": chain.coords_mask[free],
            }
        )
    return {"orders": [np.stack(group) for group in by_shape.values()], "chains": chains}


def candidate_chains(view: CropView) -> dict[int, NDArray[np.int64]]:
    """For each chain index of the crop whose entity has several chains: the indices of all of them."""
    entity = view.entry.chains["entity_id"]
    groups = {int(chain): np.flatnonzero(entity == entity[chain]) for chain in np.unique(view.chain)}
    return {chain: group for chain, group in groups.items() if len(group) > 1}


def chain_atoms(entry: EntryTables, chains: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices of all atoms of ``chains``."""
    return ranges(entry.chains["first_atom"][chains], entry.chains["atom_count"][chains])


def chain_candidates(
    view: CropView,
    groups: Mapping[int, NDArray[np.int64]],
    atoms: NDArray[np.int64],
    component_atom: NDArray[np.int32],
    coords: NDArray[np.float32],
) -> tuple[ChainCandidates, ...]:
    """Candidates of every chain in ``groups``.

    Args:
        view: the crop.
        groups: as :func:`candidate_chains` gives them.
        atoms: ascending indices into the entry's atoms: all atoms of all chains in ``groups``.
        component_atom: [len(atoms)] their indices within their components.
        coords: [len(atoms), 3] their coordinates in the sample's frame, NaN where unresolved.
    """
    entry = view.entry
    residue = _residue_of_atoms(entry, atoms)
    first_residue = entry.chains["first_residue"].astype(np.int64)
    chain = entry.residues["chain"][residue].astype(np.int64)
    stride = int(component_atom.max(initial=0)) + 1
    # Copies correspond by (position in the chain, atom of the component): they may lack different atoms.
    keys = (residue - first_residue[chain]) * stride + component_atom
    crop_chain = view.chain[view.atom_to_token]
    found = []
    for own, group in groups.items():
        mine = np.flatnonzero(crop_chain == own)
        wanted = keys[np.searchsorted(atoms, view.atoms[mine])]
        positions = np.full((len(group), len(mine), 3), np.nan, np.float32)
        for place, candidate in enumerate(group):
            theirs = np.flatnonzero(chain == candidate)
            order = theirs[np.argsort(keys[theirs], kind="stable")]
            at = np.minimum(np.searchsorted(keys[order], wanted), len(order) - 1)
            same = keys[order[at]] == wanted
            positions[place, same] = coords[order[at[same]]]
        mask = present(positions)
        found.append(
            ChainCandidates(
                asym_id=int(entry.chains["asym_id"][own]),
                atoms=mine,
                places=wanted,
                candidate_asym_id=entry.chains["asym_id"][group].astype(np.int64),
                coords=np.where(mask[:, :, None], positions, np.float32(0)),
                coords_mask=mask,
            )
        )
    return tuple(found)


def _residue_of_atoms(entry: EntryTables, atoms: NDArray[Any]) -> NDArray[np.int64]:
    token = np.searchsorted(entry.tokens["first_atom"], atoms, side="right") - 1
    found: NDArray[np.int64] = entry.tokens["residue"][token].astype(np.int64)
    return found
