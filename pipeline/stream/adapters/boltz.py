"""Samples for Boltz-1 (package ``boltz``): what ``BoltzFeaturizer`` gives to ``Boltz1``'s training step."""

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
    class_order,
    mol_types,
    one_hot,
    padded_stack,
    scattered,
)

#: Atoms are padded to a multiple of the atom transformer's queries: the package's default.
ATOMS_PER_QUERY: Final = 32
#: Distogram labels: 64 classes, split at 63 distances from 2 Å to 22 Å.
DISTOGRAM_SPLITS: Final = np.linspace(2, 22, 63)

_CLASSES: Final = (
    *("<pad>", "-", *RESTYPES[:21]),
    *("A", "G", "C", "U", "N", "DA", "DG", "DC", "DT", "DN"),
)
_ORDER: Final = class_order(_CLASSES)
_KIND: Final = {MolType.PROTEIN: 0, MolType.DNA: 1, MolType.RNA: 2, MolType.LIGAND: 3}
#: Boltz multiplies arctan(d / 3) by π/2, where AF3 SI table 5 has 2/π.
_DELETION_SCALE: Final = np.float32(np.pi**2 / 4)
#: No pocket is given: class UNSPECIFIED of four.
_N_POCKET: Final = 4


def to_boltz(features: Features, *, paired_rows: int = 0, atoms_per_query: int = ATOMS_PER_QUERY) -> Arrays:
    """One sample's features as ``BoltzFeaturizer.process`` names them, without the batch axis.

    Args:
        features: a sample's, unpadded.
        paired_rows: how many rows after the query are paired: ``Sample.meta["paired_rows"]``.
        atoms_per_query: the model's ``atoms_per_window_queries``.
    """
    return {
        **_token_arrays(features),
        **_atom_arrays(features, atoms_per_query),
        **_msa_arrays(features, paired_rows),
    }


def to_boltz_batch(samples: Sequence[Arrays]) -> Arrays:
    """Adapted samples as one batch, padded with zeros as the package's ``collate`` does."""
    return padded_stack(samples, {})


def _token_arrays(features: Features) -> Arrays:
    n_token = len(features["restype"])
    mask = features["coords_mask"]
    rep = features["rep_atom"]
    center = features["coords"][rep]
    distance = np.linalg.norm(center[:, None].astype(np.float64) - center, axis=-1)
    kind = mol_types(features)
    return {
        "token_index": np.arange(n_token),
        "residue_index": features["residue_index"].astype(np.int64) - 1,
        "asym_id": features["asym_id"].astype(np.int64) - 1,
        "entity_id": features["entity_id"].astype(np.int64) - 1,
        "sym_id": features["sym_id"].astype(np.int64) - 1,
        "mol_type": np.array([_KIND[MolType(value)] for value in kind], np.int64),
        "res_type": one_hot(_ORDER[features["restype"]], len(_CLASSES), np.int64),
        "disto_center": center,
        "disto_target": one_hot(
            np.searchsorted(DISTOGRAM_SPLITS, distance), len(DISTOGRAM_SPLITS) + 1, np.int64
        ),
        "token_bonds": features["token_bonds"][..., None].astype(np.float32),
        "token_pad_mask": np.ones(n_token, np.float32),
        "token_resolved_mask": mask[features["center_atom"]].astype(np.float32),
        "token_disto_mask": mask[rep].astype(np.float32),
        "pocket_feature": one_hot(np.zeros(n_token, np.int64), _N_POCKET, np.int64),
        "cyclic_period": np.zeros(n_token, np.int32),
        "frames_idx": features["frame_atoms"].astype(np.int64),
        "frame_resolved_mask": features["frame_mask"],
    }


def _atom_arrays(features: Features, multiple: int) -> Arrays:
    n_token, n_atom = len(features["restype"]), len(features["ref_pos"])
    mask = features["coords_mask"]
    resolved_polymer = mask[features["center_atom"]] & ~features["is_ligand"]
    arrays = {
        "ref_pos": features["ref_pos"],
        "atom_resolved_mask": mask,
        "ref_element": one_hot(features["ref_element"], N_ELEMENT, np.int64),
        "ref_charge": features["ref_charge"].astype(np.int8),
        "ref_atom_name_chars": one_hot(features["ref_atom_name_chars"], N_CHARACTER, np.int64),
        "ref_space_uid": features["ref_space_uid"].astype(np.int64),
        "atom_pad_mask": np.ones(n_atom, np.float32),
        "atom_to_token": one_hot(features["atom_to_token"], n_token, np.int64),
    }
    n_pad = -n_atom % multiple
    padded = {
        name: np.pad(value, [(0, n_pad)] + [(0, 0)] * (value.ndim - 1)) for name, value in arrays.items()
    }
    padded["coords"] = np.pad(features["coords"], [(0, n_pad), (0, 0)])[None]
    n_all = n_atom + n_pad
    padded["token_to_rep_atom"] = one_hot(features["rep_atom"], n_all, np.int64)
    padded["r_set_to_rep_atom"] = one_hot(features["center_atom"][resolved_polymer], n_all, np.int64)
    return padded


def _msa_arrays(features: Features, paired_rows: int) -> Arrays:
    n_row, n_token = features["msa"].shape
    paired: NDArray[np.float32] = np.zeros((n_row, n_token), np.float32)
    paired[: 1 + paired_rows] = features["msa"][: 1 + paired_rows] != GAP
    return {
        "msa": one_hot(_ORDER[features["msa"]], len(_CLASSES), np.int64),
        "msa_paired": paired,
        "msa_mask": features["msa_mask"].astype(np.int64),
        "has_deletion": features["has_deletion"].astype(bool),
        "deletion_value": features["deletion_value"] * _DELETION_SCALE,
        "deletion_mean": features["deletion_mean"] * _DELETION_SCALE,
        "profile": scattered(features["profile"], _ORDER, len(_CLASSES)),
    }
