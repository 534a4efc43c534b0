"""The trunk: algorithm 1, lines 1 to 14 and 17.

Shapes: B batch, N tokens; s [B, N, C_s], z [B, N, N, C_z].
"""

import torch
from torch import Tensor, nn

from megafold.trainer.model.config import ModelConfig
from megafold.trainer.model.embedding import InputFeatureEmbedder
from megafold.trainer.model.msa import MSAModule
from megafold.trainer.model.msa_rows import with_msa_of
from megafold.trainer.model.outputs import TrunkOutputs
from megafold.trainer.model.pairformer import PairformerStack
from megafold.trainer.model.primitives import Linear, NormLinear
from megafold.trainer.model.relative_position import RelativePositionEncoding
from megafold.trainer.model.template import TemplateEmbedder


class DistogramHead(nn.Module):
    """Logits of the distance between representative atoms (SI 4.4)."""

    def __init__(self, c_z: int, n_bins: int) -> None:
        super().__init__()
        self.linear = Linear(c_z, n_bins, bias=True, init="final")

    def forward(self, z: Tensor) -> Tensor:
        """[B, N, N, C_z] → [B, N, N, n_bins], symmetric."""
        logits = self.linear(z)
        symmetric: Tensor = logits + logits.transpose(1, 2)
        return symmetric


class Trunk(nn.Module):
    """From features to s_inputs, s and z, and the distogram's logits."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c_s, c_z = config.c_s, config.c_z
        self.input_embedder = InputFeatureEmbedder(config)
        self.linear_s_init = Linear(config.c_s_inputs, c_s)
        self.linear_z_row = Linear(config.c_s_inputs, c_z)
        self.linear_z_column = Linear(config.c_s_inputs, c_z)
        self.relative_position = RelativePositionEncoding(c_z, config.r_max, config.s_max)
        self.linear_bonds = Linear(1, c_z)
        self.recycle_s = NormLinear(c_s, c_s, init="final")
        self.recycle_z = NormLinear(c_z, c_z, init="final")
        self.template_embedder = TemplateEmbedder(config)
        self.msa_module = MSAModule(config)
        self.pairformer = PairformerStack(
            c_s, c_z, config.n_pairformer, config.pairformer, recompute=config.activation_checkpointing
        )
        self.distogram_head = DistogramHead(c_z, config.n_distogram_bins)

    def forward(self, batch: dict[str, Tensor], n_cycles: int) -> TrunkOutputs:
        """Recycle ``n_cycles`` times; gradients flow through the last cycle alone."""
        mask = batch["token_mask"]
        pair_mask = mask[:, :, None] & mask[:, None, :]
        s_inputs = self.input_embedder(batch)
        s_init, z_init = self._initial(batch, s_inputs)
        s, z = torch.zeros_like(s_init), torch.zeros_like(z_init)
        for cycle in range(n_cycles):
            last = cycle == n_cycles - 1
            if last:
                # Autocast keeps the weights that it cast without gradients, and would use them again.
                torch.clear_autocast_cache()
            with torch.set_grad_enabled(torch.is_grad_enabled() and last):
                z = z_init + self.recycle_z(z)
                z = z + self.template_embedder(batch, z, pair_mask)
                z = self.msa_module(with_msa_of(batch, cycle), s_inputs, z, mask, pair_mask)
                s = s_init + self.recycle_s(s)
                s, z = self.pairformer(s, z, mask, pair_mask)
        return TrunkOutputs(s_inputs=s_inputs, s_trunk=s, z_trunk=z, distogram_logits=self.distogram_head(z))

    def _initial(self, batch: dict[str, Tensor], s_inputs: Tensor) -> tuple[Tensor, Tensor]:
        """s and z before the first cycle (lines 2 to 5)."""
        z = self.linear_z_row(s_inputs)[:, :, None] + self.linear_z_column(s_inputs)[:, None]
        z = z + self.relative_position(batch)
        bonds = batch["token_bonds"].unsqueeze(-1).to(self.linear_bonds.weight.dtype)
        return self.linear_s_init(s_inputs), z + self.linear_bonds(bonds)
