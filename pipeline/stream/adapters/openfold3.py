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
    named_classes,
    one_hot,
    padded_stack,
    template_pairs,
)
from megafold.pipeline.stream.adapters.terminal import without_terminal_atoms
from megafold.pipeline.stream.adapters.truth import Truth, whole_truth
from megafold.pipeline.stream.symmetry import Symmetry

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
#: Confidence losses count for entries of such resolutions alone, Å: the package's defaults.
RESOLUTIONS: Final = (0.1, 4.0)
CONFIDENCE_LOSSES: Final = ("plddt", "pde", "experimentally_resolved", "pae")

Batch = dict[str, Any]


def to_openfold3(
    features: Features,
    *,
    paired_rows: int = 0,
    resolution: float | None = None,
    symmetry: Symmetry | None = None,
    crop_method: str | None = None,
    loss_weights: Mapping[str, float] = LOSS_WEIGHTS,
) -> Batch:
    """One sample's batch, without the batch axis.

    Args:
        features: a sample's, unpadded.
        paired_rows: how many rows after the query are paired: ``Sample.meta["paired_rows"]``.
        resolution: of the entry, Å: ``Sample.meta["resolution"]``. Without one, and outside RESOLUTIONS,
            confidence losses weigh nothing.
        symmetry: what may be exchanged to fit a prediction: ``Sample.symmetry``; None: nothing.
        crop_method: ``Sample.meta["crop_method"]``: chains of a crop in space are exchanged with each other
            alone, as in the package; None: with all copies.
        loss_weights: of this sample; the package sets them for each data set.

    The labels are under ``ground_truth``, the weights under ``loss_weights``.
    """
    features, symmetry = without_terminal_atoms(features, symmetry)
    truth = whole_truth(features, symmetry, crop_method=crop_method)
    start = np.flatnonzero(np.diff(truth.token, prepend=-1))
    source = features["atom_to_token"][truth.source[start]]
    own = truth.token[truth.own[features["token_atom_start"]]]
    exchange = _exchange_arrays(truth, start)
    numbers = _numbers(features["token_index"], own, len(start))
    shared = _token_arrays(features)
    labels = {
        **{name: value[source] for name, value in shared.items()},
        **exchange,
        "token_index": numbers,
        "num_atoms_per_token": np.diff([*start, len(truth.token)]).astype(np.int32),
        "start_atom_index": start.astype(np.int32),
        "atom_mask": np.ones(len(truth.place), np.float32),
        "atom_positions": truth.coords,
        "atom_resolved_mask": truth.coords_mask.astype(np.float32),
    }
    weights = dict(loss_weights)
    if resolution is None or not RESOLUTIONS[0] <= resolution <= RESOLUTIONS[1]:
        weights |= dict.fromkeys(CONFIDENCE_LOSSES, 0.0)
    return {
        **shared,
        **{name: value[own] for name, value in exchange.items()},
        **_number_arrays(features),
        "token_index": numbers[own],
        **_atom_arrays(features),
        **_msa_arrays(features, paired_rows),
        **_template_arrays(features),
        "token_bonds": features["token_bonds"].astype(np.int32),
        "ref_space_uid_to_perm": _atom_orders(features, truth, symmetry),
        "ground_truth": labels,
        "loss_weights": {name: np.array(value, np.float32) for name, value in weights.items()},
    }


def to_openfold3_batch(samples: Sequence[Batch]) -> Batch:
    """Adapted samples as one batch, padded with zeros; ``ref_space_uid_to_perm`` is a list of theirs."""
    orders = "ref_space_uid_to_perm"
    nested = [name for name, value in samples[0].items() if isinstance(value, dict) and name != orders]
    flat = [
        {name: value for name, value in sample.items() if name not in (*nested, orders)} for sample in samples
    ]
    batch: Batch = dict(padded_stack(flat, {}))
    if orders in samples[0]:
        batch[orders] = [sample[orders] for sample in samples]
    return batch | {name: to_openfold3_batch([sample[name] for sample in samples]) for name in nested}


def _exchange_arrays(truth: Truth, start: NDArray[np.int64]) -> Arrays:
    """Of each token of the truth: its molecule's kind and copy, its number and its residue's in these."""
    molecule, group = truth.molecule[start], truth.group[start]
    residue = truth.residue[start]
    arrays = {name: np.zeros(len(start), np.int32) for name in _EXCHANGE}
    for kind, value in enumerate(np.unique(group), start=1):
        for copy, member in enumerate(np.unique(molecule[group == value]), start=1):
            here = molecule == member
            arrays["mol_entity_id"][here] = kind
            arrays["mol_sym_id"][here] = copy
            arrays["mol_sym_token_index"][here] = np.arange(here.sum())
            arrays["mol_sym_component_id"][here] = np.unique(residue[here], return_inverse=True)[1] + 1
    return arrays


_EXCHANGE: Final = ("mol_entity_id", "mol_sym_id", "mol_sym_token_index", "mol_sym_component_id")


def _numbers(own_numbers: NDArray[np.int32], own: NDArray[np.int64], n_token: int) -> NDArray[np.int32]:
    """[n_token] ascending numbers of the truth's tokens: those of the crop stay where there is room."""
    numbers = np.full(n_token, -1, np.int32)
    numbers[own] = own_numbers
    for place in np.flatnonzero(numbers < 0):
        numbers[place] = numbers[place - 1] + 1 if place else 0
    # A copy that lacks atoms leaves no room for them.
    return numbers if (np.diff(numbers) > 0).all() else np.arange(n_token, dtype=np.int32)


def _token_arrays(features: Features) -> Arrays:
    """What tokens of the crop and of the ground truth both have."""
    names = ("is_protein", "is_rna", "is_dna", "is_ligand")
    return {
        **{name: features[name].astype(np.int32) for name in names},
        "is_atomized": (features["is_ligand"] | modified(features)).astype(np.int32),
        "restype": one_hot(named_classes(features), N_RESTYPE, np.int32),
        "token_mask": np.ones(len(features["restype"]), np.float32),
    }


def _number_arrays(features: Features) -> Arrays:
    names = ("residue_index", "asym_id", "entity_id", "sym_id")
    return {
        **{name: features[name].astype(np.int32) for name in names},
        "num_atoms_per_token": features["token_atom_count"],
        "start_atom_index": features["token_atom_start"],
        "cyclic_mask": np.zeros(len(features["restype"]), bool),
    }


def _atom_orders(features: Features, truth: Truth, symmetry: Symmetry | None) -> dict[int, NDArray[np.int32]]:
    """For each residue [n, k] equivalent orders of its atoms, as places among the truth's of that residue."""
    residue = truth.residue
    place = truth.own - np.searchsorted(residue, residue[truth.own])
    space = features["ref_space_uid"]
    orders = {int(uid): place[space == uid][None].astype(np.int32) for uid in np.unique(space)}
    for images in symmetry.automorphisms if symmetry else ():
        orders[int(space[images[0, 0]])] = place[images].astype(np.int32)
    return orders


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
        "num_paired_seqs": np.array(1 + paired_rows, np.int32),
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
