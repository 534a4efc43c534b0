"""Whether a package finds exchanged atoms and chains: ``python tests/adapters/exchange.py PEER CACHE …``.

A "prediction" is made of the sample's ground truth: each chain takes another's place, each residue's
equivalent atoms theirs, all is turned. The package's own alignment must find labels that fit it exactly.
Runs in the package's environment; arguments as for the examples.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("LAYERNORM_TYPE", "torch")
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import numpy as np
import torch
from one_sample import arguments, draw
from torch.utils.data import default_convert

from megafold.pipeline.stream.adapters import (
    to_boltz,
    to_boltz_batch,
    to_openfold3,
    to_openfold3_batch,
    to_protenix,
)
from megafold.pipeline.stream.adapters.terminal import without_terminal_atoms
from megafold.pipeline.stream.adapters.truth import bonded_chains

#: Å: what float32 leaves, and what no wrong exchange comes near.
FITS, DIFFERS = 0.01, 0.3


def exchanged(features, symmetry):
    """Coordinates and mask of a prediction in which all is exchanged that can be, and how many chains are."""
    coords, mask = features["coords"].copy(), features["coords_mask"].copy()
    molecules = bonded_chains(features)
    bonded = {chain for chain, low in molecules.items() if list(molecules.values()).count(low) > 1}
    taken, moved = set(bonded), 0
    for chain in symmetry.chains:
        if chain.asym_id in bonded:
            continue
        free = [row for row, other in enumerate(chain.candidate_asym_id) if other not in taken]
        row = next((row for row in free if chain.candidate_asym_id[row] != chain.asym_id), free[0])
        taken.add(chain.candidate_asym_id[row])
        moved += int(chain.candidate_asym_id[row] != chain.asym_id)
        coords[chain.atoms], mask[chain.atoms] = chain.coords[row], chain.coords_mask[row]
    for images in symmetry.automorphisms:
        coords[images[0]], mask[images[0]] = coords[images[-1]], mask[images[-1]]
    turn, _ = np.linalg.qr(np.random.default_rng(0).standard_normal((3, 3)))
    turn[:, 0] *= np.sign(np.linalg.det(turn))
    return (coords @ turn + [5, -3, 8]).astype(np.float32), mask, moved


def distance(one, other, mask):
    """Root mean square distance after superposition, Å."""
    one, other = (points[mask].astype(np.float64) - points[mask].mean(axis=0) for points in (one, other))
    u, _, v = np.linalg.svd(one.T @ other)
    u[:, -1] *= np.sign(np.linalg.det(u @ v))
    return float(np.sqrt(np.square(one @ u @ v - other).sum(axis=1).mean()))


def boltz(features, symmetry, predicted):
    from boltz.data.feature.symmetry import minimum_lddt_symmetry_coords, minimum_symmetry_coords

    batch = default_convert(to_boltz_batch([to_boltz(features, symmetry=symmetry)]))
    padded = np.zeros((batch["ref_pos"].shape[1], 3), np.float32)
    padded[: len(predicted)] = predicted
    for routine in (minimum_symmetry_coords, minimum_lddt_symmetry_coords):
        coords, _, mask = routine(
            torch.from_numpy(padded)[None], batch, 0, nucleotide_weight=5.0, ligand_weight=10.0
        )
        yield routine.__name__, coords[0, : len(predicted)].numpy(), mask[0, : len(predicted)].numpy() > 0


def protenix(features, symmetry, predicted):
    from configs.configs_base import configs as base_configs
    from protenix.config.config import parse_configs
    from protenix.utils.permutation.permutation import SymmetricPermutation

    configs = parse_configs(base_configs, "", fill_required_with_null=True)
    inputs, full_labels, labels = default_convert(to_protenix(features, symmetry=symmetry))
    found, _ = SymmetricPermutation(configs, error_dir=None).permute_label_to_match_mini_rollout(
        torch.from_numpy(predicted)[None], inputs, labels, full_labels
    )
    yield "SymmetricPermutation", found["coordinate"].numpy(), found["coordinate_mask"].numpy() > 0


def openfold3(features, symmetry, predicted):
    from openfold3.core.utils.permutation_alignment import multi_chain_permutation_alignment

    batch = default_convert(to_openfold3_batch([to_openfold3(features, symmetry=symmetry)]))
    found = multi_chain_permutation_alignment(batch, torch.from_numpy(predicted)[None])
    coords, mask = found["atom_positions"][0].numpy(), found["atom_resolved_mask"][0].numpy() > 0
    yield "multi_chain_permutation_alignment", coords, mask


def main():
    peer = sys.argv.pop(1)
    sample = draw(arguments())
    features, symmetry = without_terminal_atoms(sample.features, sample.symmetry)
    assert symmetry
    predicted, mask, n_chain = exchanged(features, symmetry)
    before = distance(predicted, features["coords"], mask & features["coords_mask"])
    for name, coords, found in {"boltz": boltz, "openfold3": openfold3, "protenix": protenix}[peer](
        features, symmetry, predicted
    ):
        after = distance(predicted, coords, mask & found)
        print(
            f"{peer}, {sample.meta['entry']}: {name}, "
            f"{n_chain} chains and {len(symmetry.automorphisms)} residues exchanged, "
            f"{before:.3f} Å from the labels as they are, {after:.4f} Å from those found"
        )
        if not (after < FITS and before > DIFFERS and (mask == found).all()):
            sys.exit(f"{peer}: {name} does not find the exchanged atoms")


main()
