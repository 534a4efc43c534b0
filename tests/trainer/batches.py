"""Random batches that follow the sample schema: chains, residues and atoms agree with each other."""

import numpy as np
import torch
from torch import Tensor

from megafold.pipeline.schema import GAP, SAMPLE

_BACKBONE = ("N", "CA", "C", "O", "CB")
_ELEMENT = {"N": 7, "C": 6, "O": 8}


def random_batch(
    seed: int,
    n_token: int = 12,
    *,
    n_ligand: int = 3,
    n_msa: int = 5,
    n_templ: int = 2,
    batch_size: int = 1,
    unresolved: float = 0.1,
) -> dict[str, Tensor]:
    """A batch of ``batch_size`` samples without padding.

    Two protein chains of the same entity with five atoms a residue (the last ``n_ligand`` tokens are one
    ligand's atoms), a random MSA, random templates, random coordinates. Atom counts are the same in
    every sample.
    """
    samples = [
        _sample(np.random.default_rng((seed, index)), n_token, n_ligand, n_msa, n_templ, unresolved)
        for index in range(batch_size)
    ]
    return {
        feature.name: torch.from_numpy(
            np.stack([sample[feature.name].astype(feature.dtype) for sample in samples])
        )
        for feature in SAMPLE
    }


def pad_batch(
    batch: dict[str, Tensor], *, n_token: int = 0, n_atom: int = 0, n_msa: int = 0, n_templ: int = 0
) -> dict[str, Tensor]:
    """Append so many padding tokens, atoms, MSA rows and templates, with the schema's padding values."""
    extra = {"N_token": n_token, "N_atom": n_atom, "N_msa": n_msa, "N_templ": n_templ}
    padded = {}
    for feature in SAMPLE:
        value = batch[feature.name]
        widths: list[int] = []
        for axis in reversed(feature.axes):
            widths += [0, extra.get(axis, 0)]
        padded[feature.name] = torch.nn.functional.pad(value, widths, value=feature.pad)
    return padded


def _sample(
    rng: np.random.Generator, n_token: int, n_ligand: int, n_msa: int, n_templ: int, unresolved: float
) -> dict[str, np.ndarray]:
    n_residue = n_token - n_ligand
    is_ligand = np.arange(n_token) >= n_residue
    sample = _tokens(rng, n_residue, n_ligand)
    sample |= _atoms(rng, sample, is_ligand)
    restype = sample["restype"]
    msa = rng.integers(0, 20, (n_msa, n_token))
    msa[rng.random(msa.shape) < 0.2] = GAP
    msa[:1] = restype
    deletions = np.where(rng.random(msa.shape) < 0.1, rng.integers(1, 9, msa.shape), 0)
    squashed = 2 / np.pi * np.arctan(deletions / 3)
    sample |= {
        "msa": msa,
        "has_deletion": deletions > 0,
        "deletion_value": squashed,
        "msa_mask": np.ones(msa.shape, bool),
        "deletion_mean": deletions.mean(0) if n_msa else np.zeros(n_token),
        "profile": np.eye(32)[msa].mean(0) if n_msa else np.eye(32)[restype],
    }
    sample |= _templates(rng, restype, is_ligand, n_templ)
    n_atom = len(sample["ref_mask"])
    mask = rng.random(n_atom) >= unresolved
    sample |= {
        "coords": np.where(mask[:, None], 8 * rng.standard_normal((n_atom, 3)), 0),
        "coords_mask": mask,
        "b_factor": np.where(mask, rng.uniform(5, 80, n_atom), 0),
    }
    return sample


def _tokens(rng: np.random.Generator, n_residue: int, n_ligand: int) -> dict[str, np.ndarray]:
    n_token, first = n_residue + n_ligand, (n_residue + 1) // 2
    index = np.arange(n_token)
    is_ligand = index >= n_residue
    chain = np.where(is_ligand, 3, np.where(index < first, 1, 2))
    count = np.where(is_ligand, 1, len(_BACKBONE))
    start = np.concatenate([[0], np.cumsum(count)[:-1]]) if n_token else count
    frame = start[:, None] + np.array([0, 1, 2])
    bonds = np.zeros((n_token, n_token), bool)
    for i in range(n_residue, n_token - 1):
        bonds[i, i + 1] = bonds[i + 1, i] = True
    return {
        "token_mask": np.ones(n_token, bool),
        "residue_index": np.where(is_ligand, 1, np.where(index < first, index + 1, index - first + 1)),
        "token_index": index + 1,
        "asym_id": chain,
        "entity_id": np.where(is_ligand, 2, 1),
        "sym_id": np.where(chain == 2, 2, 1),
        "restype": np.where(is_ligand, 20, rng.integers(0, 20, n_token)),
        "is_protein": ~is_ligand,
        "is_rna": np.zeros(n_token, bool),
        "is_dna": np.zeros(n_token, bool),
        "is_ligand": is_ligand,
        "token_atom_start": start,
        "token_atom_count": count,
        "center_atom": np.where(is_ligand, start, start + 1),
        "rep_atom": np.where(is_ligand, start, start + 4),
        "frame_mask": ~is_ligand,
        "frame_atoms": np.where(is_ligand[:, None], 0, frame),
        "token_bonds": bonds,
    }


def _atoms(
    rng: np.random.Generator, tokens: dict[str, np.ndarray], is_ligand: np.ndarray
) -> dict[str, np.ndarray]:
    token = np.repeat(np.arange(len(is_ligand)), tokens["token_atom_count"])
    names = [
        f"C{i}" if is_ligand[t] else _BACKBONE[i - tokens["token_atom_start"][t]] for i, t in enumerate(token)
    ]
    space = np.where(is_ligand, np.argmax(is_ligand) if is_ligand.any() else 0, np.arange(len(is_ligand)))
    return {
        "atom_mask": np.ones(len(token), bool),
        "atom_to_token": token,
        "ref_mask": np.ones(len(token), bool),
        "ref_element": np.array([_ELEMENT[name[0]] for name in names]),
        "ref_charge": rng.integers(-1, 2, len(token)),
        "ref_space_uid": space[token],
        "ref_pos": 1.5 * rng.standard_normal((len(token), 3)),
        "ref_atom_name_chars": np.array([[ord(c) - 32 for c in name.ljust(4)[:4]] for name in names]),
    }


def _templates(
    rng: np.random.Generator, restype: np.ndarray, is_ligand: np.ndarray, n_templ: int
) -> dict[str, np.ndarray]:
    n_token = len(restype)
    present = (rng.random((n_templ, n_token)) < 0.8) & ~is_ligand
    backbone = present & (rng.random(present.shape) < 0.9)
    centre = 8 * rng.standard_normal((n_templ, n_token, 1, 3))
    atoms = centre + 1.5 * rng.standard_normal((n_templ, n_token, 4, 3))
    return {
        "template_restype": np.where(present, np.broadcast_to(restype, present.shape), GAP),
        "template_pseudo_beta_mask": present,
        "template_backbone_frame_mask": backbone,
        "template_pseudo_beta": np.where(present[..., None], atoms[:, :, 3], 0),
        "template_backbone_frame": np.where(backbone[..., None, None], atoms[:, :, :3], 0),
    }
