"""A crop's tokens and atoms as index arrays into the entry, and the features that follow from them."""

from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.manifest import EntryRow
from megafold.pipeline.schema import MolType
from megafold.pipeline.stream.entry import EntryTables, ranges


@dataclass(frozen=True, kw_only=True)
class CropView:
    """Where a crop's tokens and atoms are.

    ``tokens`` [N_token] and ``atoms`` [N_atom] are ascending indices into the entry's. ``atom_to_token``
    [N_atom] is the position of each atom's token in the crop. ``residue`` and ``chain`` [N_token] are
    indices into the entry's tables.
    """

    entry: EntryTables
    tokens: NDArray[np.int64]
    atoms: NDArray[np.int64]
    atom_to_token: NDArray[np.int64]
    residue: NDArray[np.int64]
    chain: NDArray[np.int64]

    @classmethod
    def of(cls, entry: EntryTables, tokens: NDArray[np.int64]) -> "CropView":
        """The view of ``tokens``."""
        count = entry.tokens["atom_count"][tokens]
        residue = entry.tokens["residue"][tokens].astype(np.int64)
        return cls(
            entry=entry,
            tokens=tokens,
            atoms=ranges(entry.tokens["first_atom"][tokens], count),
            atom_to_token=np.repeat(np.arange(len(tokens)), count),
            residue=residue,
            chain=entry.residues["chain"][residue].astype(np.int64),
        )

    @property
    def atomised(self) -> NDArray[np.bool_]:
        """[N_token] True: the token is one atom of a ligand or modified residue."""
        found: NDArray[np.bool_] = self.entry.residues["is_standard"][self.residue] == 0
        return found

    @property
    def mol_type(self) -> NDArray[np.int32]:
        """[N_token] MolType of the token's chain."""
        found: NDArray[np.int32] = self.entry.chains["mol_type"][self.chain]
        return found

    def crop_atom(self, entry_atom: NDArray[Any]) -> NDArray[np.int64]:
        """Positions in the crop of atoms of the entry, -1 for those that are not in it."""
        place = np.searchsorted(self.atoms, entry_atom)
        place = np.minimum(place, len(self.atoms) - 1)
        return np.where(self.atoms[place] == entry_atom, place, -1)


def crop_names(view: CropView, row: EntryRow) -> dict[str, Any]:
    """What the features leave out and a structure file needs: component codes and chain names.

    ``comp_ids``: the code of each token's component, as the file had it. ``label_asym_ids`` and
    ``auth_asym_ids``: chain names by ``asym_id``; further copies of a chain get their number behind the name.
    """
    codes = [
        key.removeprefix("~").rpartition(":")[0] if key[:1] == "~" else key for key in view.entry.components
    ]
    component = view.entry.residues["component"][view.residue]
    names: dict[str, Any] = {"comp_ids": [codes[index] for index in component]}
    for scheme in ("label_asym_id", "auth_asym_id"):
        seen: Counter[str] = Counter()
        by_id = names[f"{scheme}s"] = {}
        for chain in row.chains:
            name = getattr(chain, scheme)
            seen[name] += 1
            by_id[chain.asym_id] = name if seen[name] == 1 else f"{name}-{seen[name]}"
    return names


def token_features(view: CropView, coords_mask: NDArray[np.bool_]) -> dict[str, NDArray[Any]]:
    """Token features that need neither library nor MSA; ``coords_mask`` [N_atom] says what is resolved."""
    entry, tokens = view.entry, view.entry.tokens
    count = tokens["atom_count"][view.tokens]
    frame = np.stack([tokens[f"frame_atom_{place}"][view.tokens] for place in range(3)], axis=1)
    frame_atoms = view.crop_atom(frame)
    usable = (frame_atoms >= 0) & coords_mask[frame_atoms]
    frame_mask = (tokens["frame_mask"][view.tokens] == 1) & usable.all(axis=1)
    mol_type = view.mol_type
    features: dict[str, NDArray[Any]] = {
        "token_mask": np.ones(len(view.tokens), bool),
        "residue_index": entry.residues["label_seq_id"][view.residue],
        "token_index": view.tokens + 1,
        "restype": tokens["restype"][view.tokens],
        "token_atom_start": np.cumsum(count) - count,
        "token_atom_count": count,
        "center_atom": view.crop_atom(tokens["center_atom"][view.tokens]),
        "rep_atom": view.crop_atom(tokens["rep_atom"][view.tokens]),
        "frame_atoms": np.where(frame_mask[:, None], frame_atoms, 0),
        **{name: entry.chains[name][view.chain] for name in ("asym_id", "entity_id", "sym_id")},
    }
    features = {
        name: value if value.dtype == bool else value.astype(np.int32) for name, value in features.items()
    }
    features["frame_mask"] = frame_mask
    for kind in MolType:
        features[f"is_{kind.name.lower()}"] = mol_type == kind
    features["atom_to_token"] = view.atom_to_token.astype(np.int32)
    return features


@dataclass(frozen=True)
class ResidueGroup:
    """Tokens of a crop whose chains share an object, and the residues of it that they need.

    ``residues`` is ascending without repeats; ``columns`` [n] gives each token's place in it.
    """

    digest: str
    tokens: NDArray[np.int64]
    residues: NDArray[np.int64]
    columns: NDArray[np.int64]


def residue_groups(view: CropView, digests: list[str], *, standard_only: bool = False) -> list[ResidueGroup]:
    """Group a crop's polymer tokens by the object of their chain, in order of first use.

    Args:
        view: the crop.
        digests: the object of each chain of the entry, ``""`` for none.
        standard_only: leave out atomised residues.
    """
    wanted = view.mol_type != MolType.LIGAND
    if standard_only:
        wanted &= ~view.atomised
    tokens: dict[str, list[NDArray[np.int64]]] = {}
    for chain in np.unique(view.chain[wanted]):
        if digests[chain]:
            own = np.flatnonzero(wanted & (view.chain == chain))
            tokens.setdefault(digests[chain], []).append(own)
    groups = []
    for digest, parts in tokens.items():
        members = np.concatenate(parts)
        position = view.entry.residues["label_seq_id"][view.residue[members]].astype(np.int64) - 1
        residues, columns = np.unique(position, return_inverse=True)
        groups.append(ResidueGroup(digest, members, residues, columns))
    return groups
