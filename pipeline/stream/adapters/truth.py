"""The ground truth of a crop's chains and of the chains that could take their places (AF3 SI 4.2).

Three of the packages exchange chains in their losses. Each wants the coordinates of all candidates under
numbers by which corresponding atoms are found; they differ in the names alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.stream.adapters.arrays import Features, modified
from megafold.pipeline.stream.symmetry import ChainCandidates, Symmetry, bonded_chains

#: Methods of crops whose chains are near each other, which a chain from elsewhere would not be.
IN_SPACE: Final = ("spatial", "interface")


@dataclass(frozen=True, kw_only=True)
class Truth:
    """Atoms of molecules: chains, or chains of the crop that are bonded to each other. N = all atoms.

    ``asym_id`` [N], ``molecule`` [N] (the lowest asym_id in it). Molecules of a ``group`` [N] can be
    exchanged: atoms of the same ``place`` [N] correspond. ``source`` [N]: the crop's atom that the atom is or
    corresponds to. ``residue`` [N], ``token`` [N]: numbers from 0, ascending. ``coords`` [N, 3] Å, 0 where
    ``coords_mask`` [N] is false. ``own`` [N_atom]: where each atom of the crop is, ascending.
    """

    asym_id: NDArray[np.int64]
    molecule: NDArray[np.int64]
    group: NDArray[np.int64]
    place: NDArray[np.int64]
    source: NDArray[np.int64]
    residue: NDArray[np.int64]
    token: NDArray[np.int64]
    coords: NDArray[np.float32]
    coords_mask: NDArray[np.bool_]
    own: NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Atoms of one chain, as in :class:`Truth`."""

    group: int
    place: NDArray[np.int64]
    source: NDArray[np.int64]
    coords: NDArray[np.float32]
    coords_mask: NDArray[np.bool_]


def whole_truth(features: Features, symmetry: Symmetry | None, *, crop_method: str | None = None) -> Truth:
    """The ground truth of a crop.

    Args:
        features: the sample's, unpadded.
        symmetry: the sample's; None: no chain can be exchanged.
        crop_method: how the crop was taken, where copies outside one in space are no candidates.

    Chains bonded to other chains in the crop are not exchanged.
    """
    asym_id = features["asym_id"].astype(np.int64)
    molecules = bonded_chains(features)
    chain_of_atom = asym_id[features["atom_to_token"]]
    parts = {}
    for chain in np.unique(asym_id).tolist():
        atoms = np.flatnonzero(chain_of_atom == chain)
        parts[chain] = _Part(
            group=molecules[chain],
            place=atoms,
            source=atoms,
            coords=features["coords"][atoms],
            coords_mask=features["coords_mask"][atoms],
        )
    own_places = {chain: part.place for chain, part in parts.items()}
    for group in _exchangeable(features, symmetry, molecules):
        own_places |= {found.asym_id: found.places for found in group}
        parts |= dict(_copies(group, set(molecules), within_crop=crop_method in IN_SPACE))

    chains = sorted(parts)
    ends = np.cumsum([0, *(len(parts[chain].place) for chain in chains)])
    own = [
        ends[chains.index(chain)] + np.searchsorted(parts[chain].place, places)
        for chain, places in sorted(own_places.items())
    ]

    def repeated(values: list[int]) -> NDArray[np.int64]:
        return np.repeat(np.array(values, np.int64), np.diff(ends))

    asym, source = repeated(chains), np.concatenate([parts[chain].source for chain in chains])
    token = features["atom_to_token"][source]
    new_residue = _changes(asym) | _changes(features["residue_index"][token])
    single = features["is_ligand"] | modified(features)
    return Truth(
        asym_id=asym,
        molecule=repeated([molecules.get(chain, chain) for chain in chains]),
        group=repeated([parts[chain].group for chain in chains]),
        place=np.concatenate([parts[chain].place for chain in chains]),
        source=source,
        residue=np.cumsum(new_residue) - 1,
        token=np.cumsum(new_residue | single[token]) - 1,
        coords=np.concatenate([parts[chain].coords for chain in chains]),
        coords_mask=np.concatenate([parts[chain].coords_mask for chain in chains]),
        own=np.concatenate(own),
    )


def _changes(values: NDArray[Any]) -> NDArray[np.bool_]:
    """[N] True: another value than the one before."""
    return np.concatenate([[True], values[1:] != values[:-1]])


def _exchangeable(
    features: Features, symmetry: Symmetry | None, molecules: dict[int, int]
) -> list[list[ChainCandidates]]:
    """The chains of each entity that can be exchanged."""
    if symmetry is None:
        return []
    sizes = np.bincount(list(molecules.values()))
    entity = dict(zip(features["asym_id"].tolist(), features["entity_id"].tolist(), strict=True))
    groups: dict[int, list[ChainCandidates]] = {}
    for found in symmetry.chains:
        if sizes[molecules[found.asym_id]] == 1:
            groups.setdefault(entity[found.asym_id], []).append(found)
    return list(groups.values())


def _copies(
    group: list[ChainCandidates], in_crop: set[int], *, within_crop: bool
) -> Iterator[tuple[int, _Part]]:
    """Each candidate of a group of chains, with the atoms that the crop has of any of them."""
    own = {found.asym_id for found in group}
    place, first = np.unique(np.concatenate([found.places for found in group]), return_index=True)
    source = np.concatenate([found.atoms for found in group])[first]
    for row, candidate in enumerate(group[0].candidate_asym_id.tolist()):
        if candidate not in own and (within_crop or candidate in in_crop):
            continue
        coords = np.zeros((len(place), 3), np.float32)
        mask = np.zeros(len(place), bool)
        for found in group:
            at = np.searchsorted(place, found.places)
            coords[at], mask[at] = found.coords[row], found.coords_mask[row]
        yield candidate, _Part(group=min(own), place=place, source=source, coords=coords, coords_mask=mask)
