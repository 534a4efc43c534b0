"""The deposited chains as flat tables, before they are copied into the assembly."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.structure.chains import Chain
from megafold.pipeline.structure.connections import Link
from megafold.pipeline.structure.layout import Layout
from megafold.pipeline.structure.tokens import Tokens


@dataclass(frozen=True, kw_only=True)
class Unit:
    """Chains, residues, tokens and atoms of the deposited coordinates, each table in the order of the chains.

    ``spans``: by table name, [C, 2] first row and row count of each chain. ``residues``, ``tokens`` and
    ``atoms``: columns by name; columns that are indices count within the unit. ``links``: atoms are rows of
    ``atoms``. ``has_bonds``: [K] whether a component's definition has bonds. ``ca_atom``: [R] atom called CA,
    -1 for none.
    """

    chains: list[Chain]
    spans: dict[str, NDArray[np.int64]]
    residues: dict[str, NDArray[np.int64]]
    tokens: dict[str, NDArray[np.int64]]
    atoms: dict[str, NDArray[np.int64]]
    coords: NDArray[np.float64]
    occupancy_b: NDArray[np.float64]
    links: list[Link]
    has_bonds: NDArray[np.bool_]
    ca_atom: NDArray[np.int64]


def make_unit(layout: Layout, keep: NDArray[np.bool_], tokens: Tokens, links: list[Link]) -> Unit:
    """Put the tables together. Links to atoms that have left are gone with them."""
    kept = np.flatnonzero(keep)
    place = np.where(keep, np.cumsum(keep) - 1, -1)
    resolved = layout.resolved[kept]
    count = len(layout.chains)
    atom_chain = layout.chain_of_residue[layout.atom_residue[kept]]
    residue_resolved = np.zeros(len(layout.residues), bool)
    residue_resolved[layout.atom_residue[kept][resolved]] = True
    numbers = {
        "label_seq_id": [residue.seq for residue in layout.residues],
        "auth_seq_id": [residue.auth_seq for residue in layout.residues],
        "ins_code": [residue.ins_code for residue in layout.residues],
    }
    return Unit(
        chains=layout.chains,
        spans={
            "residue": _spans(layout.chain_of_residue, count),
            "token": _spans(layout.chain_of_residue[tokens.residue], count),
            "atom": _spans(atom_chain, count),
        },
        residues={
            "component": layout.component_of_residue,
            **{name: np.array(values, np.int64).reshape(-1) for name, values in numbers.items()},
            "resolved": residue_resolved.astype(np.int64),
            "is_standard": tokens.is_standard.astype(np.int64),
        },
        tokens={
            "residue": tokens.residue,
            "first_atom": tokens.first_atom,
            "atom_count": tokens.atom_count,
            "restype": tokens.restype,
            "center_atom": tokens.center_atom,
            "rep_atom": tokens.rep_atom,
            **{f"frame_atom_{index}": tokens.frame_atoms[:, index] for index in range(3)},
            "frame_mask": tokens.frame_mask.astype(np.int64),
        },
        atoms={
            "component_atom": layout.component_atom[kept],
            "element": layout.element[kept],
            "resolved": resolved.astype(np.int64),
        },
        coords=layout.coords[kept],
        occupancy_b=layout.occupancy_b[kept],
        links=[
            Link(
                first=int(place[link.first]),
                second=int(place[link.second]),
                order=link.order,
                kind=link.kind,
                across=link.across,
                distance=link.distance,
            )
            for link in links
            if keep[link.first] and keep[link.second]
        ],
        has_bonds=np.array([len(component.bonds) > 0 for component in layout.components], bool),
        ca_atom=_kept(layout.named_atoms(["CA"]), place),
    )


def _spans(chain: NDArray[np.int64], count: int) -> NDArray[np.int64]:
    bounds = np.searchsorted(chain, np.arange(count + 1))
    return np.stack([bounds[:-1], np.diff(bounds)], axis=1)


def _kept(atoms: NDArray[np.int64], place: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.where(atoms < 0, -1, place[np.maximum(atoms, 0)])
