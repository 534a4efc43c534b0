"""What a crop's ground truth could just as well be: for permutation alignment (AF3 SI 4.2).

Two kinds of exchange leave the molecule as it is: equivalent atoms within a residue (automorphisms of its
component), and chains of one entity. The second kind needs coordinates outside the crop.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.chemistry.library import ComponentLibrary, LibraryComponent
from megafold.pipeline.schema import MolType
from megafold.pipeline.stream.crop_view import CropView
from megafold.pipeline.stream.entry import EntryTables, present, ranges
from megafold.pipeline.stream.labels import Frame
from megafold.pipeline.stream.memory import Recent

#: Volume that three bonds span below which their centre has no handedness, Å³; tetrahedra have 2 or more.
_FLAT: Final = 0.5

#: The one closer to CD (AF3 SI 2.1; the featurizer sees to it), which NH2 must not be taken for.
_ARGININE_NITROGEN: Final = "NH1"

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
    the crop whose entity has several in the entry. ``bonds`` [n, 2, 3]: of both ends of each bond between
    chains of the entry, in either direction, the asym_id, a number that corresponding tokens of copies
    share, and the token_index.
    """

    automorphisms: tuple[NDArray[np.int64], ...]
    chains: tuple[ChainCandidates, ...]
    bonds: NDArray[np.int64]


def residue_automorphisms(
    view: CropView, library: ComponentLibrary, component_atom: NDArray[np.int32], known: KnownOrders
) -> tuple[NDArray[np.int64], ...]:
    """Equivalent orders of the atoms of each residue of a crop.

    Only automorphisms count that map the atoms which are there (a crop and bonds take some away) onto
    themselves. In chains of residues they must keep every centre's handedness, too: there, atoms such as
    valine's methyls or a phosphate's oxygens are named by it, and a model is to learn the names; a sulphate's
    names mean nothing. Nor may an arginine's nitrogens be exchanged, of which NH1 is the one closer to CD.
    Residues with one order alone are left out. ``known`` keeps what has been found: most residues are like
    others before.
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
    if by_handedness and key == "ARG":
        nitrogen = component.atom_names.index(_ARGININE_NITROGEN)
        automorphisms = automorphisms[automorphisms[:, component.heavy_atoms == nitrogen][:, 0] == nitrogen]
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

    Chains of the crop that are bonded to each other (a protein and its glycan) are exchanged together, for
    copies that are bonded alike in the entry; where there are none they keep their places.

    Returns:
        ``orders``: arrays [G, n, k] of G residues each, which have n equivalent orders of k atoms: indices
        into the sample's atoms, [:, 0] as they are. ``chains``: for each chain, or chains bonded to each
        other, that may be exchanged: the ``atoms`` [k], the ``candidates`` [m, c] (asym_ids of the c chains),
        where they are themselves among them, ``own`` [], and ``coords`` [m, k, 3] and ``coords_mask`` [m, k]
        as in :class:`ChainCandidates`.
    """
    if symmetry is None:
        return {"orders": [], "chains": []}
    by_shape: dict[tuple[int, ...], list[NDArray[np.int64]]] = {}
    for images in symmetry.automorphisms:
        by_shape.setdefault(images.shape, []).append(images)
    return {
        "orders": [np.stack(group) for group in by_shape.values()],
        "chains": [
            _exchange(features, symmetry, chains, images)
            for chains, images in _alike_molecules(features, symmetry)
        ],
    }


def bonded_chains(features: Mapping[str, NDArray[Any]]) -> dict[int, int]:
    """For each chain of the crop the lowest asym_id of those it is bonded to, directly or over others."""
    asym_id = features["asym_id"].astype(np.int64)
    lowest = {chain: chain for chain in np.unique(asym_id).tolist()}
    pairs = np.unique(asym_id[np.argwhere(features["token_bonds"])], axis=0).tolist()
    for one, other in pairs:
        low, high = sorted((lowest[one], lowest[other]))
        lowest = {chain: low if found == high else found for chain, found in lowest.items()}
    return lowest


def _alike_molecules(
    features: Mapping[str, NDArray[Any]], symmetry: Symmetry
) -> list[tuple[list[int], list[list[int]]]]:
    """Each molecule of the crop that may be exchanged, and its candidates, ascending, itself among them.

    A molecule is a chain, or chains that are bonded to each other: asym_ids, in one order in all candidates.
    """
    members: dict[int, list[int]] = {}
    for chain, lowest in bonded_chains(features).items():
        members.setdefault(lowest, []).append(chain)
    copies = {found.asym_id: found.candidate_asym_id.tolist() for found in symmetry.chains}
    there = [_Bond(*bond[:, :2].ravel().tolist()) for bond in symmetry.bonds]
    in_crop = {tuple(pair) for pair in features["token_index"][np.argwhere(features["token_bonds"])].tolist()}
    tokens = map(tuple, symmetry.bonds[:, :, 2].tolist())
    own = [bond for bond, pair in zip(there, tokens, strict=True) if pair in in_crop]
    found = [
        (chains, _images(chains, [bond for bond in own if bond.chain in chains], set(there), copies))
        for chains in members.values()
    ]
    # No candidate may have a chain that keeps its place; what then has itself alone keeps its place, too.
    while True:
        fixed = {chain for chains, images in found if len(images) == 1 for chain in chains}
        left = [
            (chains, [image for image in images if image == chains or fixed.isdisjoint(image)])
            for chains, images in found
        ]
        if left == found:
            return [(chains, images) for chains, images in found if len(images) > 1]
        found = left


class _Bond(NamedTuple):
    """A bond between two chains: their asym_ids, and where in them it is."""

    chain: int
    place: int
    other: int
    other_place: int


def _images(
    chains: list[int], bonds: Sequence[_Bond], there: Set[_Bond], copies: Mapping[int, list[int]]
) -> list[list[int]]:
    """A molecule's candidates: for each copy of one of its chains those that are bonded to it alike.

    ``bonds``: between its chains. ``there``: all of the entry. ``copies``: of the chains that have some.
    """
    first = max(chains, key=lambda chain: len(copies.get(chain, ())))
    images = [chains]
    for copy in copies.get(first, ()):
        image = {first: copy} if copy != first else {}
        while reached := [bond for bond in bonds if bond.chain in image and bond.other not in image]:
            chain = min(bond.other for bond in reached)
            ends = [(image[b.chain], b.place, b.other_place) for b in reached if b.other == chain]
            alike = (
                other
                for other in copies.get(chain, [chain])
                if other not in image.values() and all(_Bond(a, i, other, j) in there for a, i, j in ends)
            )
            if (found := next(alike, None)) is None:
                break
            image[chain] = found
        if len(image) == len(chains):
            images.append([image[chain] for chain in chains])
    return sorted(images)


def _exchange(
    features: Mapping[str, NDArray[Any]], symmetry: Symmetry, chains: list[int], images: list[list[int]]
) -> dict[str, NDArray[Any]]:
    """The exchanges of a molecule of ``chains``, which has the candidates ``images``."""
    known = {found.asym_id: found for found in symmetry.chains}
    chain_of_atom = features["asym_id"][features["atom_to_token"]]
    candidates = np.array(images, np.int64)
    atoms, coords, masks = [], [], []
    for chain, places in zip(chains, candidates.T, strict=True):
        if chain in known:
            rows = np.searchsorted(known[chain].candidate_asym_id, places)
            atoms.append(known[chain].atoms)
            coords.append(known[chain].coords[rows])
            masks.append(known[chain].coords_mask[rows])
        else:  # it has no copy: candidates that have it have it where it is
            own = np.flatnonzero(chain_of_atom == chain)
            atoms.append(own)
            coords.append(np.repeat(features["coords"][None, own], len(images), axis=0))
            masks.append(np.repeat(features["coords_mask"][None, own], len(images), axis=0))
    return {
        "atoms": np.concatenate(atoms),
        "candidates": candidates,
        "own": np.array(images.index(chains)),
        "coords": np.concatenate(coords, axis=1),
        "coords_mask": np.concatenate(masks, axis=1),
    }


def candidate_chains(view: CropView) -> dict[int, NDArray[np.int64]]:
    """For each chain index of the crop whose entity has several chains: the indices of all of them."""
    entity = view.entry.chains["entity_id"]
    groups = {int(chain): np.flatnonzero(entity == entity[chain]) for chain in np.unique(view.chain)}
    return {chain: group for chain, group in groups.items() if len(group) > 1}


def chain_bonds(entry: EntryTables) -> NDArray[np.int64]:
    """[n, 2, 3] bonds between chains, as in :class:`Symmetry`."""
    ends = np.stack([entry.bonds["atom_i"], entry.bonds["atom_j"]], axis=1).astype(np.int64)
    token = np.searchsorted(entry.tokens["first_atom"], ends, side="right") - 1
    residue = entry.tokens["residue"][token].astype(np.int64)
    chain = entry.residues["chain"][residue]
    # Copies correspond by position in the chain and, in an atomised residue, by the atom's place in it.
    within = token - np.searchsorted(entry.tokens["residue"], residue)
    place = (residue - entry.chains["first_residue"][chain]) * (int(within.max(initial=0)) + 1) + within
    named = np.stack([entry.chains["asym_id"][chain], place, token + 1], axis=2)
    between = named[chain[:, 0] != chain[:, 1]]
    return np.concatenate([between, between[:, ::-1]])


def chain_atoms(entry: EntryTables, chains: NDArray[np.int64]) -> NDArray[np.int64]:
    """Indices of all atoms of ``chains``."""
    return ranges(entry.chains["first_atom"][chains], entry.chains["atom_count"][chains])


def chain_candidates(
    view: CropView,
    groups: Mapping[int, NDArray[np.int64]],
    atoms: NDArray[np.int64],
    component_atom: NDArray[np.int32],
    coords: NDArray[np.float32],
    frame: Frame,
) -> tuple[ChainCandidates, ...]:
    """Candidates of every chain in ``groups``.

    Args:
        view: the crop.
        groups: as :func:`candidate_chains` gives them.
        atoms: ascending indices into the entry's atoms: all atoms of all chains in ``groups``.
        component_atom: [len(atoms)] their indices within their components.
        coords: [len(atoms), 3] their coordinates in the entry, NaN where unresolved.
        frame: the sample's.
    """
    entry = view.entry
    residue = _residue_of_atoms(entry, atoms)
    first_residue = entry.chains["first_residue"].astype(np.int64)
    chain = entry.residues["chain"][residue].astype(np.int64)
    stride = int(component_atom.max(initial=0)) + 1
    # Copies correspond by (position in the chain, atom of the component): they may lack different atoms.
    keys = (residue - first_residue[chain]) * stride + component_atom
    starts = np.searchsorted(chain, np.arange(len(first_residue)))
    ends = np.searchsorted(chain, np.arange(len(first_residue)), side="right")
    crop_chain = view.chain[view.atom_to_token]
    found = []
    for own, group in groups.items():
        mine = np.flatnonzero(crop_chain == own)
        wanted = keys[np.searchsorted(atoms, view.atoms[mine])]
        positions = np.full((len(group), len(mine), 3), np.nan, np.float32)
        for place, candidate in enumerate(group):
            order = starts[candidate] + np.argsort(keys[starts[candidate] : ends[candidate]], kind="stable")
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
                coords=np.where(mask[:, :, None], frame.apply(positions), 0).astype(np.float32),
                coords_mask=mask,
            )
        )
    return tuple(found)


def _residue_of_atoms(entry: EntryTables, atoms: NDArray[Any]) -> NDArray[np.int64]:
    token = np.searchsorted(entry.tokens["first_atom"], atoms, side="right") - 1
    found: NDArray[np.int64] = entry.tokens["residue"][token].astype(np.int64)
    return found
