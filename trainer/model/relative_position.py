"""Relative position encoding (algorithm 3). Shapes: token features [B, N]; result [B, N, N, C_z]."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafold.trainer.model.primitives import Linear


def relative_position_features(
    batch: dict[str, Tensor], r_max: int, s_max: int, rows: slice = slice(None)
) -> Tensor:
    """One-hot features [B, N, N, 2·(2·r_max + 2) + 1 + 2·s_max + 2], integer; of some rows, if given.

    In this order: residue offset i - j within a chain, token offset within a residue, whether the
    entity is the same, offset of the copies (``sym_id``) within an entity. Offsets are clipped; the
    last class of each stands for "elsewhere".
    """

    def same(name: str) -> Tensor:
        return batch[name][:, rows, None] == batch[name][:, None, :]

    def offset(name: str, limit: int, defined: Tensor) -> Tensor:
        value = batch[name].long()
        difference = (value[:, rows, None] - value[:, None, :] + limit).clamp(0, 2 * limit)
        return F.one_hot(torch.where(defined, difference, 2 * limit + 1), 2 * limit + 2)

    same_chain, same_entity = same("asym_id"), same("entity_id")
    same_residue = same_chain & same("residue_index")
    parts = [
        offset("residue_index", r_max, same_chain),
        offset("token_index", r_max, same_residue),
        same_entity.unsqueeze(-1),
        offset("sym_id", s_max, same_entity),
    ]
    return torch.cat(parts, dim=-1)


class RelativePositionEncoding(nn.Module):
    """Algorithm 3."""

    def __init__(self, c_z: int, r_max: int, s_max: int) -> None:
        super().__init__()
        self.r_max, self.s_max = r_max, s_max
        self.linear = Linear(2 * (2 * r_max + 2) + 1 + 2 * s_max + 2, c_z)

    def forward(self, batch: dict[str, Tensor], rows: slice = slice(None)) -> Tensor:
        """[B, N, N, C_z]; only those rows i of it, if given."""
        features = relative_position_features(batch, self.r_max, self.s_max, rows)
        encoding: Tensor = self.linear(features.to(self.linear.weight.dtype))
        return encoding
