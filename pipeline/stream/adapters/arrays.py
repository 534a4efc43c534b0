"""What several adapters compute alike: one-hot arrays, class orders, template geometry, padded batches."""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.schema import RESTYPE_INDEX, RESTYPES, MolType

Features = Mapping[str, NDArray[Any]]
Arrays = dict[str, NDArray[Any]]

#: Classes of ``ref_element`` and of each character of an atom's name (AF3 SI table 5).
N_ELEMENT: Final = 128
N_CHARACTER: Final = 64

#: Template distograms have 39 bins from 3.25 Å to 50.75 Å; the last is open (AF3 SI table 5).
TEMPLATE_BINS: Final = np.linspace(3.25, 50.75, 39)


def one_hot(classes: NDArray[Any], count: int, dtype: Any = np.float32) -> NDArray[Any]:
    """[..., count] one where the class is; all zero for classes outside ``0 … count - 1``."""
    return (classes[..., None] == np.arange(count)).astype(dtype)


def class_order(names: Sequence[str]) -> NDArray[np.int64]:
    """[N_restype] the place in ``names`` of each class of RESTYPES."""
    return np.array([names.index(name) for name in RESTYPES], np.int64)


def scattered(values: NDArray[Any], order: NDArray[np.int64], count: int) -> NDArray[Any]:
    """[..., count] the last axis of ``values`` [..., N_restype] in another order of classes."""
    moved = np.zeros((*values.shape[:-1], count), values.dtype)
    moved[..., order] = values
    return moved


def mol_types(features: Features) -> NDArray[np.int64]:
    """[N_token] MolType of each token's chain."""
    flags = [
        (MolType.PROTEIN, "is_protein"),
        (MolType.RNA, "is_rna"),
        (MolType.DNA, "is_dna"),
        (MolType.LIGAND, "is_ligand"),
    ]
    found = np.zeros(len(features["is_protein"]), np.int64)
    for kind, name in flags:
        found[features[name]] = kind
    return found


def modified(features: Features) -> NDArray[np.bool_]:
    """[N_token] True: an atom of a polymer's modified residue. Whole residues have more than one atom."""
    found: NDArray[np.bool_] = (features["token_atom_count"] == 1) & ~features["is_ligand"]
    return found


def named_classes(features: Features) -> NDArray[np.int64]:
    """[N_token] classes by components' own names: a modified residue is unknown, not what it stems from."""
    found: NDArray[np.int64] = np.where(modified(features), RESTYPE_INDEX["UNK"], features["restype"])
    return found


def residue_numbers(features: Features) -> NDArray[np.int64]:
    """[N_token] 0-based number of each token's (chain, residue) in the crop."""
    found: NDArray[np.int64] = features["ref_space_uid"][features["token_atom_start"]].astype(np.int64)
    return found


def backbone_neighbours(features: Features) -> NDArray[np.bool_]:
    """[N_token, N_token] True: whole residues next to each other in a polymer's sequence."""
    whole = ~features["is_ligand"] & ~modified(features)
    chain, position = features["asym_id"], features["residue_index"].astype(np.int64)
    near = np.abs(position[:, None] - position) == 1
    found: NDArray[np.bool_] = near & (chain[:, None] == chain) & whole[:, None] & whole
    return found


def resolved_or(features: Features, atom: NDArray[Any], missing: int) -> NDArray[np.int64]:
    """``atom`` (indices of atoms), with ``missing`` where the atom has no coordinates."""
    return np.where(features["coords_mask"][atom], atom, missing).astype(np.int64)


def template_pairs(features: Features) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Distograms [N_templ, N_token, N_token, 39] and unit vectors [N_templ, N_token, N_token, 3].

    Zero where a token has no pseudo-beta, or no backbone frame, and between chains (AF3 SI algorithm 16).
    The vector of (i, j) is the direction from i's CA to j's in i's frame (CA the origin, C on the x axis,
    N in the xy plane; AF3 SI 1.8.1 of AlphaFold 2's supplement).
    """
    same_chain = features["asym_id"][:, None] == features["asym_id"]
    beta, beta_mask = features["template_pseudo_beta"], features["template_pseudo_beta_mask"]
    distance = np.linalg.norm(beta[:, :, None].astype(np.float64) - beta[:, None], axis=-1)
    place = np.searchsorted(TEMPLATE_BINS, distance, side="right") - 1
    place[~(beta_mask[:, :, None] & beta_mask[:, None] & same_chain)] = -1

    n, ca, c = np.moveaxis(features["template_backbone_frame"].astype(np.float64), 2, 0)
    e0 = _unit(c - ca)
    e1 = _unit(n - ca - (e0 * (n - ca)).sum(-1, keepdims=True) * e0)
    axes = np.stack([e0, e1, np.cross(e0, e1)], axis=-2)
    vector = np.einsum("tikx,tijx->tijk", axes, _unit(ca[:, None] - ca[:, :, None]))
    mask = features["template_backbone_frame_mask"]
    vector[~(mask[:, :, None] & mask[:, None] & same_chain)] = 0
    return one_hot(place, len(TEMPLATE_BINS)), vector.astype(np.float32)


def _unit(vector: NDArray[np.float64]) -> NDArray[np.float64]:
    length = np.linalg.norm(vector, axis=-1, keepdims=True)
    return vector / np.where(length > 0, length, 1)


def padded_stack(samples: Sequence[Mapping[str, NDArray[Any]]], pad: Mapping[str, Any]) -> Arrays:
    """One batch: each array padded at the end of each axis to the longest, then stacked.

    Args:
        samples: arrays of the same names and numbers of axes.
        pad: what to pad a name's array with; 0 (or False) for those that are not named.
    """
    batch = {}
    for name in samples[0]:
        values = [sample[name] for sample in samples]
        shape = np.max([value.shape for value in values], axis=0).astype(int)
        stacked = np.full((len(values), *shape), pad.get(name, 0), values[0].dtype)
        for place, value in enumerate(values):
            inside: tuple[int | slice, ...] = (place, *(slice(length) for length in value.shape))
            stacked[inside] = value
        batch[name] = stacked
    return batch
