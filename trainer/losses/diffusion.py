"""Losses on the denoised structures (AF3 SI 3.7.1).

Shapes: B samples, S noised copies of each, N atoms. Everything is float32 at least, whatever autocast says.
"""

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from megafold.trainer.losses.alignment import weighted_rigid_align
from megafold.trainer.losses.term import masked_mean
from megafold.trainer.ops.precision import wide

#: How much more an atom of each kind counts than one of a protein (AF3 SI 3.7.1, equation 4).
ALPHA_DNA = 5.0
ALPHA_RNA = 5.0
ALPHA_LIGAND = 10.0

#: Standard deviation of the coordinates, Å (AF3 SI 3.7.1).
SIGMA_DATA = 16.0


def resolved_atoms(batch: Mapping[str, Tensor]) -> Tensor:
    """Atoms that enter the losses: real ones with ground truth, bool [B, N]."""
    return batch["coords_mask"] & batch["atom_mask"]


def per_atom(batch: Mapping[str, Tensor], token_feature: Tensor) -> Tensor:
    """Spread a token feature [B, N_token] over the tokens' atoms, [B, N]."""
    return torch.gather(token_feature, 1, batch["atom_to_token"].long())


def atom_weights(batch: Mapping[str, Tensor]) -> Tensor:
    """Weights of the atoms: 1 + 5·dna + 5·rna + 10·ligand (AF3 SI equation 4), float32 [B, N]."""
    weight = (
        1.0
        + ALPHA_DNA * batch["is_dna"].float()
        + ALPHA_RNA * batch["is_rna"].float()
        + ALPHA_LIGAND * batch["is_ligand"].float()
    )
    return per_atom(batch, weight)


def sigma_weight(sigma: Tensor, sigma_data: float = SIGMA_DATA) -> Tensor:
    """Weight of a noise level, (σ² + σ_data²) / (σ·σ_data)².

    AF3 SI equation 6 prints a sum in the denominator. With the product the network's own target has unit
    variance at every σ, which is what its preconditioning is built for (Karras et al. 2022, table 1).
    """
    sigma = wide(sigma)
    return (sigma**2 + sigma_data**2) / (sigma * sigma_data) ** 2


def mse_loss(predicted: Tensor, target: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """Weighted mean squared error after superposing the target (AF3 SI equations 2 to 4).

    Args:
        predicted: denoised positions [B, S, N, 3], Å.
        target: ground truth of each copy [B, S, N, 3], Å.
        weights: weights of the atoms [B, N].
        mask: resolved atoms, bool [B, N].

    Returns:
        ⅓ · mean over the resolved atoms of w·|x - x_GT|², [B, S], Å².
    """
    predicted = wide(predicted)
    mask = mask.unsqueeze(1)
    fit_weights = (weights.unsqueeze(1) * mask).expand(predicted.shape[:-1])
    aligned = weighted_rigid_align(wide(target), predicted.detach(), fit_weights)
    # Masked before the subtraction: the gradient of 0·∞ would be NaN.
    difference = torch.where(mask.unsqueeze(-1), predicted - aligned, 0.0)
    squared = difference.square().sum(dim=-1) * weights.unsqueeze(1)
    return masked_mean(squared, mask, (-1,)) / 3.0


def polymer_ligand_bonds(batch: Mapping[str, Tensor]) -> Tensor:
    """Bonds between a ligand and the polymer it hangs on, int64 [N_bond, 3]: sample, atom, atom.

    ``token_bonds`` names tokens. A ligand's token is one atom; of a residue's atoms the bonded one is that
    closest to it in the ground truth. A bond is left out unless both its atoms are resolved.
    """
    resolved, to_token = resolved_atoms(batch), batch["atom_to_token"].long()
    start = batch["token_atom_start"].long()
    before = F.pad(resolved.cumsum(dim=1), (1, 0))  # resolved atoms before each
    has_atom = before.gather(1, start + batch["token_atom_count"]) > before.gather(1, start)
    ligand = batch["is_ligand"] & batch["token_mask"] & has_atom
    polymer = ~batch["is_ligand"] & batch["token_mask"] & has_atom
    linked = batch["token_bonds"] & ligand.unsqueeze(2) & polymer.unsqueeze(1)
    sample, ligand_token, polymer_token = linked.nonzero().unbind(-1)
    ligand_atom = start[sample, ligand_token]
    candidates = (to_token[sample] == polymer_token.unsqueeze(-1)) & resolved[sample]
    coords = wide(batch["coords"])
    distance = (coords[sample] - coords[sample, ligand_atom].unsqueeze(1)).norm(dim=-1)
    nearest = distance.masked_fill(~candidates, torch.inf).argmin(dim=-1)
    return torch.stack([sample, ligand_atom, nearest], dim=-1)


def of_sample(bonds: Tensor, n_sample: int) -> Tensor:
    """Which of the bonds each sample has, bool [B, N_bond]."""
    return bonds[:, 0] == torch.arange(n_sample, device=bonds.device).unsqueeze(-1)


def bond_loss(predicted: Tensor, truth: Tensor, bonds: Tensor) -> Tensor:
    """Squared error of the bond lengths, mean over a sample's bonds (AF3 SI equation 5).

    Args:
        predicted: denoised positions [B, S, N, 3], Å.
        truth: ground truth [B, N, 3], Å.
        bonds: rows (sample, atom, atom), int64 [N_bond, 3].

    Returns:
        [B, S], Å²; 0 for a sample without bonds.
    """
    predicted = wide(predicted)
    sample, i, j = bonds.unbind(dim=-1)
    length = (predicted[sample, :, i] - predicted[sample, :, j]).norm(dim=-1)
    true_length = (wide(truth)[sample, i] - wide(truth)[sample, j]).norm(dim=-1)
    error = (length - true_length.unsqueeze(-1)).square()
    own = of_sample(bonds, len(predicted)).unsqueeze(-1)
    return masked_mean(error.expand(len(predicted), -1, -1), own, (1,))
