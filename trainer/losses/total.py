"""The training loss: the weighted sum of its parts (AF3 SI equations 6 and 15)."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from megafold.trainer.losses.confidence import confidence_losses
from megafold.trainer.losses.diffusion import (
    SIGMA_DATA,
    atom_weights,
    bond_loss,
    mse_loss,
    of_sample,
    per_atom,
    polymer_ligand_bonds,
    resolved_atoms,
    sigma_weight,
)
from megafold.trainer.losses.distogram import distogram_loss
from megafold.trainer.losses.smooth_lddt import smooth_lddt_loss
from megafold.trainer.losses.term import LossTerm, without_autocast
from megafold.trainer.model.outputs import ModelOutputs


@dataclass(frozen=True, kw_only=True)
class LossWeights:
    """Weights of the parts. The defaults are those of initial training (AF3 SI table 6)."""

    diffusion: float = 4.0
    distogram: float = 3e-2
    bond: float = 0.0
    smooth_lddt: float = 1.0
    confidence: float = 1e-4
    pae: float = 0.0
    sigma_data: float = SIGMA_DATA
    copies_at_once: int = 1


@dataclass(frozen=True, kw_only=True)
class LossShare:
    """The part of a sample's loss that one of several ranks computes. The parts of all ranks add up.

    Attributes:
        rows: rows of the pair matrix that the rank has, of the tokens in the batch.
        copy_weight: [S], what each of the rank's noised copies counts in the mean over all copies.
        whole_weight: what counts a part of the loss that every rank computes whole.
    """

    rows: slice
    copy_weight: Tensor
    whole_weight: float


@dataclass(frozen=True)
class TrainingLoss:
    """The loss of a batch: ``total`` to differentiate, ``terms`` to report, by name."""

    total: Tensor
    terms: dict[str, LossTerm]

    def values(self) -> dict[str, Tensor]:
        """Means of the parts and the total, detached scalars."""
        means = {name: term.mean.detach() for name, term in self.terms.items()}
        return {"loss": self.total.detach(), **means}


def training_loss(
    batch: Mapping[str, Tensor],
    outputs: ModelOutputs,
    weights: LossWeights,
    share: LossShare | None = None,
) -> TrainingLoss:
    """All losses of a forward pass, in float32 at least; or the share of them that ``outputs`` make.

    The diffusion loss of a noised copy is λ(σ)·(L_mse + α_bond·L_bond) + L_smooth_lddt; a sample's is the
    mean over its copies. The reported parts are ``diffusion``, its ingredients ``mse`` (not weighted by σ),
    ``smooth_lddt`` and, where it has a weight, ``bond``, and ``distogram``. With a confidence head there are
    ``plddt``, ``resolved``, ``pde`` and, where it has a weight, ``pae``; their sum counts α_confidence. A
    sample without any resolved atom enters none of them but ``resolved``.
    """
    with without_autocast(outputs.denoised):
        mask = resolved_atoms(batch)
        present = mask.any(dim=-1)

        def over_copies(values: Tensor) -> Tensor:
            return values.mean(dim=1) if share is None else (values * share.copy_weight).sum(dim=1)

        mse = mse_loss(outputs.denoised, outputs.target, atom_weights(batch), mask)
        nucleotide = per_atom(batch, batch["is_dna"] | batch["is_rna"])
        lddt = smooth_lddt_loss(outputs.denoised, batch["coords"], mask, nucleotide, weights.copies_at_once)
        parts = {"mse": LossTerm(over_copies(mse), present)}
        scaled = mse
        if weights.bond > 0:
            bonds = polymer_ligand_bonds(batch)
            bond = bond_loss(outputs.denoised, batch["coords"], bonds)
            parts["bond"] = LossTerm(over_copies(bond), of_sample(bonds, len(mask)).any(dim=-1))
            scaled = mse + weights.bond * bond
        copies = sigma_weight(outputs.sigma, weights.sigma_data) * scaled + weights.smooth_lddt * lddt
        diffusion = LossTerm(over_copies(copies), present)
        distogram = distogram_loss(
            batch, outputs.trunk.distogram_logits, slice(None) if share is None else share.rows
        )
        total = weights.diffusion * diffusion.mean + weights.distogram * distogram.mean
        confidence = {}
        if outputs.confidence is not None:
            confidence = confidence_losses(
                batch,
                outputs.confidence,
                with_pae=weights.pae > 0,
                rows=slice(None) if share is None else share.rows,
                whole_weight=1.0 if share is None else share.whole_weight,
            )
            scale = {"pae": weights.pae}
            judged = sum(scale.get(name, 1.0) * term.mean for name, term in confidence.items())
            total = total + weights.confidence * judged
    terms = {
        "diffusion": diffusion,
        **parts,
        "smooth_lddt": LossTerm(over_copies(lddt), present),
        "distogram": distogram,
        **confidence,
    }
    return TrainingLoss(total, terms)
