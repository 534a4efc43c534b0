"""Samples for OpenFold3 (package ``openfold3``): the batch of ``OpenFold3.forward``."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.schema import N_RESTYPE
from megafold.pipeline.stream.adapters.arrays import (
    N_CHARACTER,
    Arrays,
    Features,
    modified,
    one_hot,
    padded_stack,
    template_pairs,
)

#: Classes of ``ref_element``: OpenFold3 has the known elements, where AF3 SI table 5 has 128.
N_ELEMENT: Final = 119
#: Weights of the losses in its first stage of training.
LOSS_WEIGHTS: Final = {
    "bond": 0.0,
    "smooth_lddt": 4.0,
    "mse": 4.0,
    "plddt": 1e-4,
    "pde": 1e-4,
    "experimentally_resolved": 1e-4,
    "pae": 0.0,
    "distogram": 3e-2,
}

Batch = dict[str, Any]


def to_openfold3(
    features: Features, *, paired_rows: int = 0, loss_weights: Mapping[str, float] = LOSS_WEIGHTS
) -> Batch:
    """One sample's batch, without the batch axis.

    Args:
        features: a sample's, unpadded.
        paired_rows: how many rows after the query are paired: ``Sample.meta["paired_rows"]``.
        loss_weights: of this sample; the package sets them for each data set.

    The labels are under ``ground_truth``, the weights under ``loss_weights``.
    """
    molecules = _molecule_arrays(features)
    labels = {
        **{name: molecules[name] for name in ("is_protein", "is_rna", "is_dna", "is_ligand", "is_atomized")},
        **{name: molecules[name] for name in _LABELLED},
        "atom_mask": np.ones(len(features["ref_pos"]), np.float32),
        "atom_positions": features["coords"],
        "atom_resolved_mask": features["coords_mask"].astype(np.float32),
    }
    return {
        **molecules,
        **_atom_arrays(features),
        **_msa_arrays(features, paired_rows),
        **_template_arrays(features),
        "token_bonds": features["token_bonds"].astype(np.int32),
        "ground_truth": labels,
        "loss_weights": {name: np.array(value, np.float32) for name, value in loss_weights.items()},
    }


_LABELLED: Final = (
    "token_index",
    "restype",
    "token_mask",
    "num_atoms_per_token",
    "start_atom_index",
    "mol_entity_id",
    "mol_sym_id",
    "mol_sym_token_index",
    "mol_sym_component_id",
)


def to_openfold3_batch(samples: Sequence[Batch]) -> Batch:
    """Adapted samples as one batch, padded with zeros; nested dictionaries stay nested."""
    nested = [name for name, value in samples[0].items() if isinstance(value, dict)]
    flat = [{name: value for name, value in sample.items() if name not in nested} for sample in samples]
    batch: Batch = dict(padded_stack(flat, {}))
    return batch | {name: to_openfold3_batch([sample[name] for sample in samples]) for name in nested}


def _molecule_arrays(features: Features) -> Arrays:
    n_token = len(features["restype"])
    changed = modified(features)
    arrays: dict[str, NDArray[Any]] = {
        "residue_index": features["residue_index"],
        "token_index": np.arange(n_token),
        "asym_id": features["asym_id"],
        "entity_id": features["entity_id"],
        "sym_id": features["sym_id"],
        "restype": one_hot(features["restype"], N_RESTYPE, np.int32),
        "is_protein": features["is_protein"],
        "is_rna": features["is_rna"],
        "is_dna": features["is_dna"],
        "is_ligand": features["is_ligand"],
        "is_atomized": features["is_ligand"] | changed,
        "num_atoms_per_token": features["token_atom_count"],
        "start_atom_index": features["token_atom_start"],
        "mol_entity_id": features["entity_id"],
        "mol_sym_id": features["sym_id"],
        "mol_sym_token_index": features["token_index"] - _first_token(features),
        "mol_sym_component_id": features["asym_id"],
    }
    arrays = {name: value.astype(np.int32) for name, value in arrays.items()}
    arrays["token_mask"] = np.ones(n_token, np.float32)
    arrays["cyclic_mask"] = np.zeros(n_token, bool)
    return arrays


def _first_token(features: Features) -> NDArray[np.int64]:
    """[N_token] lowest ``token_index`` of the token's chain in the crop."""
    chains, place = np.unique(features["asym_id"], return_inverse=True)
    first = np.array(
        [features["token_index"][place == chain].min() for chain in range(len(chains))], np.int64
    )
    found: NDArray[np.int64] = first[place]
    return found


def _atom_arrays(features: Features) -> Arrays:
    return {
        "ref_pos": features["ref_pos"],
        "ref_mask": features["ref_mask"].astype(np.int32),
        "ref_element": one_hot(features["ref_element"] - 1, N_ELEMENT, np.int32),
        "ref_charge": features["ref_charge"],
        "ref_atom_name_chars": one_hot(features["ref_atom_name_chars"], N_CHARACTER, np.int32),
        "ref_space_uid": features["ref_space_uid"],
        "atom_mask": np.ones(len(features["ref_pos"]), np.float32),
        "atom_to_token_index": features["atom_to_token"],
    }


def _msa_arrays(features: Features, paired_rows: int) -> Arrays:
    return {
        "msa": one_hot(features["msa"], N_RESTYPE, np.int32),
        "has_deletion": features["has_deletion"],
        "deletion_value": features["deletion_value"],
        "msa_mask": features["msa_mask"].astype(np.float32),
        "num_paired_seqs": np.array(1 + paired_rows, np.int64),
        "profile": features["profile"],
        "deletion_mean": features["deletion_mean"],
    }


def _template_arrays(features: Features) -> Arrays:
    """One slot, all gaps and masked, where a sample has no template: the embedder averages over slots."""
    distogram, vector = template_pairs(features)
    arrays = {
        "template_restype": one_hot(features["template_restype"], N_RESTYPE, np.int32),
        "template_pseudo_beta_mask": features["template_pseudo_beta_mask"].astype(np.float32),
        "template_backbone_frame_mask": features["template_backbone_frame_mask"].astype(np.float32),
        "template_distogram": distogram,
        "template_unit_vector": vector,
    }
    if len(distogram) == 0:
        arrays = {name: np.zeros((1, *value.shape[1:]), value.dtype) for name, value in arrays.items()}
        arrays["template_restype"][..., -1] = 1
    return arrays
