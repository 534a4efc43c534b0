"""Training losses (AF3 SI 3.7 and 4.4), in float32 at least. Atoms without ground truth enter none."""

from megafold.trainer.losses.alignment import weighted_rigid_align
from megafold.trainer.losses.confidence import confidence_losses
from megafold.trainer.losses.diffusion import (
    atom_weights,
    bond_loss,
    mse_loss,
    polymer_ligand_bonds,
    resolved_atoms,
    sigma_weight,
)
from megafold.trainer.losses.distogram import distogram_bins, distogram_loss
from megafold.trainer.losses.smooth_lddt import smooth_lddt_loss
from megafold.trainer.losses.term import LossTerm
from megafold.trainer.losses.total import LossWeights, TrainingLoss, training_loss

__all__ = [
    "LossTerm",
    "LossWeights",
    "TrainingLoss",
    "atom_weights",
    "bond_loss",
    "confidence_losses",
    "distogram_bins",
    "distogram_loss",
    "mse_loss",
    "polymer_ligand_bonds",
    "resolved_atoms",
    "sigma_weight",
    "smooth_lddt_loss",
    "training_loss",
    "weighted_rigid_align",
]
