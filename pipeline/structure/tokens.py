"""Tokens (AF3 SI 2.6): one per standard or unknown residue of a polymer, one per heavy atom of everything
else."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

from megafold.pipeline.schema import AMINO_ACIDS, MolType
from megafold.pipeline.structure.layout import Layout
from megafold.pipeline.structure.polymer_types import is_whole, restype

#: Atoms looked at for a single-atom token's frame: more than two others, so that ties are broken by index.
_NEIGHBOURS: Final = 6
#: Cosine of 25°: frames closer to a straight line are no frames (AF3 SI 4.3.2).
_STRAIGHT: Final = float(np.cos(np.deg2rad(25.0)))
#: Coordinates are whole multiples of this, in Å.
_PRECISION: Final = 1e-3

_PURINES: Final = frozenset({"A", "G", "DA", "DG"})
_PYRIMIDINES: Final = frozenset({"C", "U", "DC", "DT"})


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Tokens of the kept atoms of a layout: ``T`` tokens, ``R`` residues. Atom indices count the kept ones
    only.

    ``frame_atoms`` [T, 3] are -1 where there is no frame; ``is_standard`` [R] marks residues tokenised whole.
    """

    residue: NDArray[np.int64]
    first_atom: NDArray[np.int64]
    atom_count: NDArray[np.int64]
    restype: NDArray[np.int64]
    center_atom: NDArray[np.int64]
    rep_atom: NDArray[np.int64]
    frame_atoms: NDArray[np.int64]
    frame_mask: NDArray[np.bool_]
    is_standard: NDArray[np.bool_]


def tokenise(layout: Layout, keep: NDArray[np.bool_]) -> Tokens:
    """Tokens, their atoms and frames. ``keep`` [N]: the layout's atoms that have not left."""
    kept = np.flatnonzero(keep)
    place = np.where(keep, np.cumsum(keep) - 1, -1)
    residue = layout.atom_residue[kept]
    whole, classes = _residue_classes(layout)
    starts = np.ones(len(kept), bool)
    starts[1:] = ~whole[residue[1:]] | (residue[1:] != residue[:-1])
    first = np.flatnonzero(starts)
    of_token = residue[first]
    is_single = ~whole[of_token]

    # Atoms of whole residues by their names; a single atom is its own centre, representative and frame
    # origin.
    slots = np.array(
        [
            _anchor_slots(component.code, names)
            for component, names in zip(layout.components, layout.slots, strict=True)
        ],
        np.int64,
    ).reshape(-1, 5)
    anchors = layout.first_atom[of_token, None] + slots[layout.component_of_residue[of_token]]
    anchors = np.where(is_single[:, None], first[:, None], place[np.where(is_single[:, None], 0, anchors)])
    frames = anchors[:, 2:].copy()
    coords = layout.coords[kept]
    frames[is_single] = _atom_frames(coords, layout.chain_of_residue[residue], first[is_single])
    return Tokens(
        residue=of_token,
        first_atom=first,
        atom_count=np.diff(np.append(first, len(kept))),
        restype=classes[of_token],
        center_atom=anchors[:, 0],
        rep_atom=anchors[:, 1],
        frame_atoms=frames,
        frame_mask=_frame_mask(coords, frames),
        is_standard=whole,
    )


def _residue_classes(layout: Layout) -> tuple[NDArray[np.bool_], NDArray[np.int64]]:
    """[R] whether a residue is one token, and its class; both depend on its component and the type of its
    chain."""
    mol_types = np.array([chain.mol_type for chain in layout.chains], np.int64).reshape(-1)
    pair = layout.component_of_residue * len(MolType) + mol_types[layout.chain_of_residue]
    distinct, inverse = np.unique(pair, return_inverse=True)
    kinds = [
        (layout.components[value // len(MolType)], MolType(value % len(MolType)))
        for value in distinct.tolist()
    ]
    whole = np.array(
        [is_whole(component.code, kind) and not component.is_own for component, kind in kinds], bool
    )
    classes = np.array([restype(component, kind) for component, kind in kinds], np.int64)
    return whole.reshape(-1)[inverse], classes.reshape(-1)[inverse]


def _anchor_slots(code: str, slots: dict[str, int]) -> tuple[int, ...]:
    """Places of centre, representative and the frame's three atoms in a residue that is one token."""
    if code in AMINO_ACIDS or code == "UNK":
        names = ("CA", "CA" if code == "GLY" else "CB", "N", "CA", "C")
    else:
        base = "C4" if code in _PURINES else "C2" if code in _PYRIMIDINES else "C1'"
        names = ("C1'", base, "C1'", "C3'", "C4'")
    return tuple(slots.get(name, 0) for name in names)


def _atom_frames(
    coords: NDArray[np.float64], chain: NDArray[np.int64], atoms: NDArray[np.int64]
) -> NDArray[np.int64]:
    """[A, 3] frames of single-atom tokens: the closest atom of the chain, the atom itself, the second
    closest.

    -1 where the chain has fewer than three resolved atoms or the atom is not resolved. Distances are compared
    as whole numbers and ties go to the lower index, so that no machine's rounding decides.
    """
    frames = np.full((len(atoms), 3), -1, np.int64)
    grid = np.round(np.nan_to_num(coords) / _PRECISION).astype(np.int64)
    resolved = np.isfinite(coords[:, 0])
    usable = resolved[atoms]
    for index in np.unique(chain[atoms[usable]]).tolist():
        bounds = np.searchsorted(chain, [index, index + 1])
        members = np.arange(*bounds)[resolved[bounds[0] : bounds[1]]]
        if len(members) < 3:
            continue
        rows = np.flatnonzero(usable & (chain[atoms] == index))
        own = atoms[rows]
        _, near = cKDTree(coords[members]).query(coords[own], k=min(_NEIGHBOURS, len(members)))
        near = members[near]
        offset = grid[near] - grid[own][:, None]
        squared = (offset * offset).sum(axis=2)
        squared[near == own[:, None]] = np.iinfo(np.int64).max  # not the atom itself
        order = np.lexsort((near, squared), axis=1)[:, :2]
        closest = np.take_along_axis(near, order, axis=1)
        frames[rows] = np.stack([closest[:, 0], own, closest[:, 1]], axis=1)
    return frames


def _frame_mask(coords: NDArray[np.float64], frames: NDArray[np.int64]) -> NDArray[np.bool_]:
    """[T] True where three atoms are there, resolved, and neither straight nor folded back."""
    exists = (frames >= 0).all(axis=1)
    a, b, c = (coords[frames[:, column]] for column in range(3))
    first, second = a - b, c - b
    product = (first * second).sum(axis=1)
    norms = np.sqrt((first * first).sum(axis=1) * (second * second).sum(axis=1))
    with np.errstate(invalid="ignore", divide="ignore"):
        cosine = product / norms
    return exists & (np.abs(cosine) < _STRAIGHT)  # False where NaN
