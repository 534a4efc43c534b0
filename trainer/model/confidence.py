"""The confidence head (algorithm 31): how far off it takes a given structure to be.

Shapes: B batch, N tokens, A atoms; s [B, N, C_s], z [B, N, N, C_z], coords [B, A, 3] in Å. It learns from the
trunk's representations and teaches them nothing: no gradient leaves it.
"""

import torch
from torch import Tensor, nn

from megafold.trainer.model.config import ConfidenceConfig, ModelConfig
from megafold.trainer.model.outputs import ConfidenceLogits, TrunkOutputs
from megafold.trainer.model.pairformer import PairformerStack
from megafold.trainer.model.primitives import Linear, NormLinear, at_atoms
from megafold.trainer.model.template import N_BINS, template_distogram
from megafold.trainer.ops.precision import full_precision, wide


class ConfidenceHead(nn.Module):
    """Algorithm 31, with a layer norm before each of its four outputs, as in AF3's published code."""

    def __init__(self, config: ModelConfig, sizes: ConfidenceConfig) -> None:
        super().__init__()
        c_s, c_z = config.c_s, config.c_z
        self.n_atom = sizes.n_atom
        self.linear_z_row = Linear(config.c_s_inputs, c_z)
        self.linear_z_column = Linear(config.c_s_inputs, c_z)
        self.linear_distance = Linear(N_BINS, c_z)
        self.pairformer = PairformerStack(
            c_s, c_z, sizes.n_block, config.pairformer, recompute=config.activation_checkpointing
        )
        self.pae = NormLinear(c_z, sizes.n_pae_bins, init="final")
        self.pde = NormLinear(c_z, sizes.n_pde_bins, init="final")
        self.plddt = NormLinear(c_s, sizes.n_atom * sizes.n_plddt_bins, init="final")
        self.resolved = NormLinear(c_s, sizes.n_atom * 2, init="final")

    def forward(self, batch: dict[str, Tensor], trunk: TrunkOutputs, coords: Tensor) -> ConfidenceLogits:
        """Judge ``coords``; of padding the result says nothing that means anything."""
        mask = batch["token_mask"]
        coords = coords.detach()
        z = self.embed(batch, trunk, coords)
        # Its gradient goes nowhere; with it the recorded backward pass of the trunk's blocks serves here too.
        s = trunk.s_trunk.detach().requires_grad_(torch.is_grad_enabled())
        s, z = self.pairformer(s, z, mask, mask[:, :, None] & mask[:, None, :])
        return self.logits(batch, s, z, coords)

    def embed(
        self, batch: dict[str, Tensor], trunk: TrunkOutputs, coords: Tensor, rows: slice = slice(None)
    ) -> Tensor:
        """z of the judged structure (lines 1 to 3); of ``rows``, if given, and then so is ``z_trunk``."""
        s_inputs = trunk.s_inputs.detach()
        z = self.linear_z_row(s_inputs[:, rows])[:, :, None] + self.linear_z_column(s_inputs)[:, None]
        with full_precision(coords):
            bins = template_distogram(at_atoms(wide(coords), batch["rep_atom"].long()), rows)
        mask = batch["token_mask"]
        bins = bins * (mask[:, rows, None] & mask[:, None, :]).unsqueeze(-1)
        distance: Tensor = self.linear_distance(bins.to(self.linear_distance.weight.dtype))
        return trunk.z_trunk.detach() + z + distance

    def logits(self, batch: dict[str, Tensor], s: Tensor, z: Tensor, coords: Tensor) -> ConfidenceLogits:
        """What the last block's s and z say of ``coords`` (lines 5 to 8)."""
        plddt, resolved = self.of_atoms(batch, s)
        half = self.pde(z)
        return ConfidenceLogits(
            plddt=plddt, resolved=resolved, pae=self.pae(z), pde=half + half.transpose(1, 2), coords=coords
        )

    def of_atoms(self, batch: dict[str, Tensor], s: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of pLDDT and of being resolved, [B, A, bins], by each atom's place in its token."""
        token = batch["atom_to_token"].long()
        start = torch.gather(batch["token_atom_start"].long(), 1, token)
        place = torch.arange(token.shape[1], device=token.device) - start
        # Padding has a token without being one of its atoms.
        place = place.clamp(0, self.n_atom - 1)
        row = torch.arange(len(token), device=token.device).unsqueeze(-1)
        plddt, resolved = (
            layer(s).unflatten(-1, (self.n_atom, -1))[row, token, place]
            for layer in (self.plddt, self.resolved)
        )
        return plddt, resolved
