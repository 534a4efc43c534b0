"""Samples for Boltz-1 (package ``boltz``): what ``BoltzFeaturizer`` gives to ``Boltz1``'s training step."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import permutations, product
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.schema import GAP, RESTYPES, MolType
from megafold.pipeline.stream.adapters.arrays import (
    N_CHARACTER,
    N_ELEMENT,
    Arrays,
    Features,
    class_order,
    modified,
    mol_types,
    named_classes,
    one_hot,
    padded_stack,
    scattered,
)
from megafold.pipeline.stream.adapters.terminal import without_terminal_atoms
from megafold.pipeline.stream.adapters.truth import Truth, whole_truth
from megafold.pipeline.stream.msa import squashed
from megafold.pipeline.stream.symmetry import Symmetry

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
#: What a batch has as lists over its samples.
_LISTED: Final = (
    *("all_coords", "all_resolved_mask", "crop_to_all_atom_map"),
    *("chain_symmetries", "amino_acids_symmetries", "ligand_symmetries"),
)
#: Most assignments of chains that the loss tries: the package's default.
MAX_CHAIN_SYMMETRIES: Final = 100


def to_boltz(
    features: Features,
    *,
    paired_rows: int = 0,
    symmetry: Symmetry | None = None,
    atoms_per_query: int = ATOMS_PER_QUERY,
) -> dict[str, Any]:
    """One sample's features as ``BoltzFeaturizer.process`` names them, without the batch axis.

    Args:
        features: a sample's, unpadded.
        paired_rows: how many rows after the query are paired: ``Sample.meta["paired_rows"]``.
        symmetry: what may be exchanged to fit a prediction: ``Sample.symmetry``; None: nothing.
        atoms_per_query: the model's ``atoms_per_window_queries``.
    """
    features, symmetry = without_terminal_atoms(features, symmetry)
    return {
        **_token_arrays(features),
        **_atom_arrays(features, atoms_per_query),
        **_msa_arrays(features, paired_rows),
        **_exchanges(features, symmetry),
    }


def to_boltz_batch(samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Adapted samples as one batch, padded with zeros as the package's ``collate`` does.

    What the exchanges of atoms and chains need is a list over the samples.
    """
    padded = padded_stack(
        [{name: value for name, value in sample.items() if name not in _LISTED} for sample in samples], {}
    )
    return padded | {name: [sample[name] for sample in samples] for name in _LISTED}


def _exchanges(features: Features, symmetry: Symmetry | None) -> dict[str, Any]:
    truth = whole_truth(features, symmetry)
    residues: list[list[list[tuple[int, int]]]] = []
    ligands: list[list[list[tuple[int, int]]]] = []
    single = features["token_atom_count"][features["atom_to_token"]] == 1
    for images in symmetry.automorphisms if symmetry else ():
        swaps = [
            [(int(atom), int(image)) for atom, image in zip(images[0], row, strict=True) if atom != image]
            for row in images[1:]
        ]
        (ligands if single[images[0, 0]] else residues).append(swaps)
    return {
        "all_coords": truth.coords,
        "all_resolved_mask": truth.coords_mask.astype(np.float32),
        "crop_to_all_atom_map": truth.own.astype(np.float32),
        "chain_symmetries": _chain_assignments(truth, np.unique(features["asym_id"]).tolist()),
        "amino_acids_symmetries": residues,
        "ligand_symmetries": ligands,
    }


def _chain_assignments(truth: Truth, own: list[int]) -> list[list[tuple[int, ...]]]:
    """Ways to give each chain of the crop a chain of its group, each another one. The first: each its own.

    Of each chain: its first atom and end, those of the one that takes its place, and the numbers of both.
    Of more than MAX_CHAIN_SYMMETRIES ways some at random, the same in every run.
    """
    chains, starts = np.unique(truth.asym_id, return_index=True)
    first, end = starts.tolist(), [*starts[1:].tolist(), len(truth.asym_id)]
    alike: dict[tuple[int, int], list[int]] = {}
    seen: Counter[int] = Counter()
    for number, atom in enumerate(first):
        molecule = int(truth.molecule[atom])
        alike.setdefault((int(truth.group[atom]), seen[molecule]), []).append(number)
        seen[molecule] += 1
    mine = [[number for number in group if chains[number] in own] for group in alike.values()]
    copies = [
        [*some, *(number for number in group if number not in some)]
        for some, group in zip(mine, alike.values(), strict=True)
    ]
    pairs = list(zip(copies, map(len, mine), strict=True))
    ways: Iterable[Sequence[Sequence[int]]]
    if math.prod(math.perm(len(group), size) for group, size in pairs) <= MAX_CHAIN_SYMMETRIES:
        ways = product(*(permutations(group, size) for group, size in pairs))
    else:
        rng = np.random.default_rng(0)
        ways = [mine] + [
            [rng.permutation(group)[:size].tolist() for group, size in pairs]
            for _ in range(MAX_CHAIN_SYMMETRIES - 1)
        ]
    return [
        [
            (first[a], end[a], first[b], end[b], a, b)
            for some, others in zip(mine, way, strict=True)
            for a, b in zip(some, others, strict=True)
        ]
        for way in ways
    ]


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
        "res_type": one_hot(_ORDER[named_classes(features)], len(_CLASSES), np.int64),
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
        "frame_resolved_mask": features["frame_mask"] & ~modified(features),
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
    is_residue = features["msa"][: 1 + paired_rows] != GAP
    for chain in np.unique(features["asym_id"]):
        own = features["asym_id"] == chain
        paired[: 1 + paired_rows, own] = is_residue[:, own].any(axis=1, keepdims=True)
    return {
        "msa": one_hot(_ORDER[features["msa"]], len(_CLASSES), np.int64),
        "msa_paired": paired,
        "msa_mask": features["msa_mask"].astype(np.int64),
        "has_deletion": features["has_deletion"].astype(bool),
        "deletion_value": features["deletion_value"] * _DELETION_SCALE,
        "deletion_mean": squashed(features["deletion_mean"]) * _DELETION_SCALE,
        "profile": scattered(features["profile"], _ORDER, len(_CLASSES)),
    }
