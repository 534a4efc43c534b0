"""Samples for lucidrains' alphafold3-pytorch: the arguments of ``Alphafold3.forward``.

Build the model with ``dim_atom_inputs=ATOM_INPUTS`` and ``dim_template_feats=TEMPLATE_FEATURES``; its other
sizes fit as they are. The arrays are the fields of the package's ``AtomInput``.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.schema import GAP, RESTYPES, MolType
from megafold.pipeline.stream.adapters.arrays import (
    N_CHARACTER,
    N_ELEMENT,
    Arrays,
    Features,
    backbone_neighbours,
    class_order,
    modified,
    mol_types,
    one_hot,
    padded_stack,
    residue_numbers,
    resolved_or,
    scattered,
    template_pairs,
)
from megafold.pipeline.stream.msa import squashed

#: Length of an atom's features: ref_pos 3, ref_mask, ref_charge, ref_element 128, name 4 · 64.
ATOM_INPUTS: Final = 3 + 1 + 1 + N_ELEMENT + 4 * N_CHARACTER
#: Length of a template's features of a pair: distogram 39, mask, unit vector 3, mask, restypes 2 · 32.
TEMPLATE_FEATURES: Final = 39 + 1 + 3 + 1 + 2 * 32
#: Atoms in a window of the atom transformer: the package's default.
ATOMS_PER_WINDOW: Final = 27

_CLASSES: Final = (*RESTYPES[:21], "A", "C", "G", "U", "N", "DA", "DC", "DG", "DT", "DN", "-")
_ORDER: Final = class_order(_CLASSES)
_METAL_ID: Final = 32
_KINDS: Final = (MolType.PROTEIN, MolType.RNA, MolType.DNA, MolType.LIGAND)
_PAD: Final = {
    "molecule_ids": -1,
    "additional_molecule_feats": -1,
    "atom_parent_ids": -1,
    "molecule_atom_indices": -1,
    "distogram_atom_indices": -1,
    "atom_indices_for_frame": -1,
    "resolved_labels": -1,
    "missing_atom_mask": True,
}


def to_alphafold3_pytorch(
    features: Features, *, resolution: float | None = None, atoms_per_window: int = ATOMS_PER_WINDOW
) -> Arrays:
    """One sample's arguments of ``Alphafold3.forward``, without the batch axis.

    Args:
        features: a sample's, unpadded.
        resolution: of the entry, Å; without one the package leaves its confidence losses out.
        atoms_per_window: the model's.
    """
    ligand_ion = _is_ion(features)
    arrays: Arrays = {
        **_token_arrays(features, ligand_ion),
        **_msa_arrays(features),
        **_template_arrays(features),
        "atom_inputs": atom_inputs(features),
        "atompair_inputs": atompair_inputs(features, atoms_per_window),
        "atom_parent_ids": features["asym_id"][features["atom_to_token"]].astype(np.int64) - 1,
        "atom_pos": features["coords"],
        "missing_atom_mask": ~features["coords_mask"],
        "molecule_atom_indices": resolved_or(features, features["center_atom"], -1),
        "distogram_atom_indices": resolved_or(features, features["rep_atom"], -1),
        "atom_indices_for_frame": np.where(
            features["frame_mask"][:, None], features["frame_atoms"], -1
        ).astype(np.int64),
        "resolved_labels": features["coords_mask"].astype(np.int64),
    }
    if resolution is not None:
        arrays["resolution"] = np.array(resolution, np.float32)
    return arrays


def to_alphafold3_pytorch_batch(samples: Sequence[Arrays]) -> Arrays:
    """Adapted samples as one batch, padded as the package's collate function does."""
    return padded_stack(samples, _PAD)


def atom_inputs(features: Features) -> NDArray[np.float32]:
    """[N_atom, ATOM_INPUTS] the reference features of AF3 SI table 5, side by side."""
    return np.concatenate(
        [
            features["ref_pos"],
            features["ref_mask"][:, None],
            features["ref_charge"][:, None],
            one_hot(features["ref_element"], N_ELEMENT),
            one_hot(features["ref_atom_name_chars"], N_CHARACTER).reshape(-1, 4 * N_CHARACTER),
        ],
        axis=1,
        dtype=np.float32,
    )


def atompair_inputs(features: Features, window: int) -> NDArray[np.float32]:
    """[N_window, window, 2 · window, 5] what an atom knows of those of its window and the one before.

    Difference of ``ref_pos`` (3), 1 / (1 + its square), 1; all zero between residues (AF3 SI algorithm 5).
    """
    n_atom = len(features["ref_pos"])
    n_window = -(-n_atom // window)
    query = np.arange(n_window * window).reshape(n_window, window)
    key = np.concatenate([query - window, query], axis=1)
    exists = (query < n_atom)[:, :, None] & ((key >= 0) & (key < n_atom))[:, None]
    query, key = np.minimum(query, n_atom - 1), np.clip(key, 0, n_atom - 1)
    position, space = features["ref_pos"], features["ref_space_uid"]
    offset = position[query][:, :, None] - position[key][:, None]
    known = np.broadcast_to(np.float32(1), (*offset.shape[:-1], 1))
    nearness = 1 / (1 + np.square(offset).sum(-1, keepdims=True))
    pairs = np.concatenate([offset, nearness, known], axis=-1, dtype=np.float32)
    pairs[~(exists & (space[query][:, :, None] == space[key][:, None]))] = 0
    return pairs


def _is_ion(features: Features) -> NDArray[np.bool_]:
    """[N_token] True: the only atom of a ligand's residue, which the package calls a metal ion."""
    residue = residue_numbers(features)
    alone: NDArray[np.bool_] = features["is_ligand"] & (np.bincount(residue)[residue] == 1)
    return alone


def _token_arrays(features: Features, ion: NDArray[np.bool_]) -> Arrays:
    kind = mol_types(features)
    kinds = np.stack([kind == value for value in _KINDS] + [ion], axis=1)
    kinds[:, 3] &= ~ion
    changed = modified(features)
    changes = np.stack([changed & (kind == value) for value in _KINDS[:3]] + [np.zeros_like(ion)], axis=1)
    n_token = len(kind)
    numbers = [
        features["residue_index"] - 1,
        np.arange(n_token),
        features["asym_id"] - 1,
        features["entity_id"] - 1,
        features["sym_id"] - 1,
    ]
    profile = scattered(features["profile"], _ORDER, len(RESTYPES))
    return {
        "molecule_ids": np.where(ion, _METAL_ID, _ORDER[features["restype"]]),
        "molecule_atom_lens": features["token_atom_count"].astype(np.int64),
        "is_molecule_types": kinds,
        "is_molecule_mod": changes,
        "additional_molecule_feats": np.stack(numbers, axis=1).astype(np.int64),
        "additional_token_feats": np.concatenate(
            [profile, squashed(features["deletion_mean"])[:, None]], axis=1, dtype=np.float32
        ),
        "token_bonds": features["token_bonds"] | backbone_neighbours(features),
    }


def _msa_arrays(features: Features) -> Arrays:
    return {
        "msa": one_hot(_ORDER[features["msa"]], len(RESTYPES)),
        "msa_mask": np.any(features["msa_mask"], axis=1),
        "additional_msa_feats": np.stack([features["has_deletion"], features["deletion_value"]], axis=-1),
    }


def _template_arrays(features: Features) -> Arrays:
    """One slot of gaps, masked, where a sample has no template: the model needs at least one."""
    restype = features["template_restype"]
    n_token = restype.shape[1]
    if len(restype) == 0:
        empty = np.zeros((1, n_token, n_token, TEMPLATE_FEATURES), np.float32)
        return {"templates": empty, "template_mask": np.zeros(1, bool)}
    distogram, vector = template_pairs(features)
    same_chain = features["asym_id"][:, None] == features["asym_id"]
    masks = []
    for name in ("template_backbone_frame_mask", "template_pseudo_beta_mask"):
        mask = features[name]
        masks.append((mask[:, :, None] & mask[:, None] & same_chain)[..., None])
    classes = one_hot(_ORDER[restype], len(RESTYPES))
    shape = (len(restype), n_token, n_token, len(RESTYPES))
    templates = np.concatenate(
        [
            distogram,
            masks[0],
            vector,
            masks[1],
            np.broadcast_to(classes[:, None], shape),
            np.broadcast_to(classes[:, :, None], shape),
        ],
        axis=-1,
        dtype=np.float32,
    )
    return {"templates": templates, "template_mask": (restype != GAP).any(axis=1)}
