"""Embedding of the input features (algorithm 2)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafold.trainer.model.atom_attention import AtomAttentionEncoder
from megafold.trainer.model.config import N_RESTYPE, ModelConfig


class InputFeatureEmbedder(nn.Module):
    """Algorithm 2."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.encoder = AtomAttentionEncoder(config, config.c_s, with_positions=False)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """s_inputs [B, N, C_s + 65]: the atoms' summary, restype, profile, deletion_mean."""
        a, _ = self.encoder(self.encoder.conditioner(batch))
        parts = [
            a[:, 0],
            F.one_hot(batch["restype"].long(), N_RESTYPE),
            batch["profile"],
            batch["deletion_mean"].unsqueeze(-1),
        ]
        return torch.cat([part.to(a.dtype) for part in parts], dim=-1)
