"""Samples for Protenix (package ``protenix``): its feature and label dictionaries. A batch is one sample."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.schema import GAP, N_RESTYPE
from megafold.pipeline.stream.adapters.arrays import (
    N_CHARACTER,
    N_ELEMENT,
    Arrays,
    Features,
    modified,
    one_hot,
    template_pairs,
)
from megafold.pipeline.stream.adapters.truth import Truth, whole_truth
from megafold.pipeline.stream.symmetry import Symmetry

#: Template slots: Protenix averages over four, present or not.
N_TEMPLATE: Final = 4
#: What Protenix has for an entry without a resolution: its confidence losses are left out.
NO_RESOLUTION: Final = -1.0


def to_protenix(
    features: Features,
    *,
    resolution: float | None = None,
    symmetry: Symmetry | None = None,
    crop_method: str | None = None,
) -> tuple[dict[str, Any], Arrays, Arrays]:
    """``input_feature_dict``, ``label_full_dict`` and ``label_dict`` of one sample, for ``Protenix.forward``.

    Args:
        features: a sample's, unpadded.
        resolution: of the entry, Å: ``Sample.meta["resolution"]``.
        symmetry: what may be exchanged to fit a prediction: ``Sample.symmetry``; None: nothing.
        crop_method: ``Sample.meta["crop_method"]``: chains of a crop in space are exchanged with each other
            alone, as in the package; None: with all copies.
    """
    truth = whole_truth(features, symmetry, crop_method=crop_method)
    inputs: dict[str, Any] = {
        **_token_arrays(features),
        **_atom_arrays(features),
        **_exchange_arrays(truth, truth.own),
        **_msa_arrays(features),
        **_template_arrays(features),
        "bond_mask": bond_mask(features),
        "resolution": np.array([NO_RESOLUTION if resolution is None else resolution], np.float32),
        "atom_perm_list": _atom_orders(features, symmetry),
    }
    labels = {"coordinate": features["coords"], "coordinate_mask": features["coords_mask"].astype(np.int64)}
    full_labels = {
        **_exchange_arrays(truth, np.arange(len(truth.place))),
        "coordinate": truth.coords,
        "coordinate_mask": truth.coords_mask.astype(np.int64),
        "pae_rep_atom_mask": inputs["pae_rep_atom_mask"][truth.source],
    }
    return inputs, full_labels, labels


def _exchange_arrays(truth: Truth, atoms: NDArray[np.int64]) -> Arrays:
    return {
        "mol_id": truth.molecule[atoms],
        "entity_mol_id": truth.group[atoms],
        "mol_atom_index": truth.place[atoms],
    }


def _atom_orders(features: Features, symmetry: Symmetry | None) -> list[list[int]]:
    """For each atom where it is in each equivalent order of its residue's atoms, from 0 in the residue."""
    space = features["ref_space_uid"]
    place = np.arange(len(space)) - np.searchsorted(space, space)
    orders = [[int(value)] for value in place]
    for images in symmetry.automorphisms if symmetry else ():
        for atom, column in zip(images[0].tolist(), place[images].T.tolist(), strict=True):
            orders[atom] = column
    return orders


def bond_mask(features: Features) -> NDArray[np.int64]:
    """[N_atom, N_atom] 1: a ligand is bonded to a polymer here.

    A sample says which tokens a bond joins; of the polymer's token the resolved atom nearest to the
    ligand's is taken. Symmetric.
    """
    n_atom = len(features["ref_pos"])
    found = np.zeros((n_atom, n_atom), np.int64)
    ligand, coords = features["is_ligand"], features["coords"]
    for one, other in np.argwhere(features["token_bonds"] & ligand[:, None] & ~ligand):
        atom, first = features["token_atom_start"][[one, other]]
        atoms = np.arange(first, first + features["token_atom_count"][other])
        atoms = atoms[features["coords_mask"][atoms]]
        if features["coords_mask"][atom] and len(atoms):
            nearest = atoms[np.argmin(np.linalg.norm(coords[atoms] - coords[atom], axis=1))]
            found[atom, nearest] = found[nearest, atom] = 1
    return found


def _token_arrays(features: Features) -> Arrays:
    n_token = len(features["restype"])
    numbers = {
        name: features[name].astype(np.int64) for name in ("residue_index", "asym_id", "entity_id", "sym_id")
    }
    return {
        **numbers,
        "token_index": np.arange(n_token),
        "restype": one_hot(features["restype"], N_RESTYPE),
        "token_bonds": features["token_bonds"].astype(np.float32),
        "has_frame": features["frame_mask"].astype(np.int64),
        "frame_atom_index": np.where(features["frame_mask"][:, None], features["frame_atoms"], -1).astype(
            np.int64
        ),
        "profile": features["profile"],
        "deletion_mean": features["deletion_mean"],
    }


def _atom_arrays(features: Features) -> Arrays:
    token = features["atom_to_token"].astype(np.int64)
    center = _marked(features["center_atom"], len(token))
    polymer_center = center & (1 - features["is_ligand"][token])
    arrays = {
        "ref_mask": features["ref_mask"],
        "ref_element": one_hot(features["ref_element"] - 1, N_ELEMENT),
        "ref_charge": features["ref_charge"],
        "ref_atom_name_chars": one_hot(features["ref_atom_name_chars"], N_CHARACTER),
        "ref_space_uid": features["ref_space_uid"],
        "atom_to_token_idx": token,
        "atom_to_tokatom_idx": np.arange(len(token)) - features["token_atom_start"][token],
        "is_protein": features["is_protein"][token],
        "is_ligand": features["is_ligand"][token],
        "is_dna": features["is_dna"][token],
        "is_rna": features["is_rna"][token],
        "modified_res_mask": modified(features)[token],
        "pae_rep_atom_mask": center,
        "plddt_m_rep_atom_mask": polymer_center,
        "distogram_rep_atom_mask": _marked(features["rep_atom"], len(token)),
    }
    converted = {name: value.astype(np.int64) for name, value in arrays.items()}
    return converted | {"ref_pos": features["ref_pos"]}


def _marked(atoms: NDArray[np.int32], n_atom: int) -> NDArray[np.int64]:
    mask = np.zeros(n_atom, np.int64)
    mask[atoms] = 1
    return mask


def _msa_arrays(features: Features) -> Arrays:
    return {
        "msa": features["msa"].astype(np.int64),
        "has_deletion": features["has_deletion"],
        "deletion_value": features["deletion_value"],
    }


def _template_arrays(features: Features) -> Arrays:
    """Four slots; those without a template are gaps, masked."""
    distogram, vector = template_pairs(features)
    beta, frame = features["template_pseudo_beta_mask"], features["template_backbone_frame_mask"]
    arrays: Arrays = {
        "template_aatype": features["template_restype"].astype(np.int64),
        "template_distogram": distogram,
        "template_pseudo_beta_mask": (beta[:, :, None] & beta[:, None]).astype(np.float32),
        "template_unit_vector": vector,
        "template_backbone_frame_mask": (frame[:, :, None] & frame[:, None]).astype(np.float32),
    }
    n_slot = max(0, N_TEMPLATE - len(distogram))
    return {
        name: np.pad(
            value,
            [(0, n_slot)] + [(0, 0)] * (value.ndim - 1),
            constant_values=GAP if name == "template_aatype" else 0,
        )
        for name, value in arrays.items()
    }
