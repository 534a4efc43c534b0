"""The MSA module (algorithms 8 to 10).

Shapes: m [B, M, N, C_m] over M rows; z [B, N, N, C_z]; msa_mask [B, M, N], mask [B, N] and pair_mask
[B, N, N], all boolean. Rows are a set: their order does not matter.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafold.trainer import ops
from megafold.trainer.model.config import N_RESTYPE, ModelConfig
from megafold.trainer.model.pairformer import PairUpdate
from megafold.trainer.model.primitives import (
    Dropout,
    LayerNorm,
    Linear,
    NormLinear,
    Transition,
    run_block,
)
from megafold.trainer.ops.precision import full_precision, wide


class OuterProductMean(nn.Module):
    """Algorithm 9: the mean over the rows in which both tokens are present."""

    def __init__(self, c_m: int, c_z: int, c: int) -> None:
        super().__init__()
        self.projection = NormLinear(c_m, 2 * c)
        self.linear_out = Linear(c * c, c_z, bias=True, init="final")

    def forward(self, m: Tensor, msa_mask: Tensor) -> Tensor:
        """[B, M, N, C_m] → [B, N, N, C_z]."""
        a, b = (self.projection(m) * msa_mask.unsqueeze(-1)).chunk(2, dim=-1)
        with full_precision(m):  # bfloat16 cannot count beyond 256
            present = wide(msa_mask.to(m.dtype))
            n_rows = torch.einsum("bmi,bmj->bij", present, present).clamp(min=1)
        # Weighting a by 1/M first keeps the sum over thousands of rows small in low precision.
        a = a / max(1, m.shape[1])
        outer = torch.einsum("bmic,bmjd->bijcd", a, b).flatten(-2)
        mean = outer * (max(1, m.shape[1]) / n_rows).unsqueeze(-1)
        out: Tensor = self.linear_out(mean)
        return out


class MSAPairWeightedAveraging(nn.Module):
    """Algorithm 10."""

    def __init__(self, c_m: int, c_z: int, c: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.norm = LayerNorm(c_m)
        self.linear_v = Linear(c_m, n_head * c)
        self.linear_gate = Linear(c_m, n_head * c, init="gate")
        self.weights = NormLinear(c_z, n_head)
        self.linear_out = Linear(n_head * c, c_m, init="final")

    def forward(self, m: Tensor, z: Tensor, mask: Tensor) -> Tensor:
        """[B, M, N, C_m] → [B, M, N, C_m], without the residual."""
        projected = ops.layernorm_linear(
            m,
            self.norm.weight,
            self.norm.bias,
            torch.cat([self.linear_v.weight, self.linear_gate.weight]),
        )
        v, gate = projected.chunk(2, dim=-1)
        absent = ~mask[:, None, :, None]
        logits = wide(self.weights(z))
        w = torch.softmax(logits.masked_fill(absent, torch.finfo(logits.dtype).min), dim=2)
        w = w.masked_fill(absent, 0.0).to(v.dtype)
        o = torch.einsum("bijh,bmjhc->bmihc", w, v.unflatten(-1, (self.n_head, -1)))
        out: Tensor = self.linear_out(torch.sigmoid(gate) * o.flatten(-2))
        return out


class MSAUpdate(nn.Module):
    """How a block changes the MSA: algorithm 8, lines 7 and 8."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        msa = config.msa
        self.averaging = MSAPairWeightedAveraging(config.c_m, config.c_z, msa.c_average, msa.n_head)
        self.transition = Transition(config.c_m, config.pairformer.n_transition)
        self.dropout = Dropout(msa.dropout, "row")

    def forward(self, m: Tensor, z: Tensor, mask: Tensor) -> Tensor:
        """[B, M, N, C_m] → [B, M, N, C_m]."""
        m = m + self.dropout(self.averaging(m, z, mask))
        return m + self.transition(m)


class MSABlock(nn.Module):
    """One round of algorithm 8. The last one does not change the MSA, which nobody would read."""

    def __init__(self, config: ModelConfig, *, last: bool) -> None:
        super().__init__()
        self.outer_product_mean = OuterProductMean(config.c_m, config.c_z, config.msa.c_outer_product)
        self.msa = None if last else MSAUpdate(config)
        self.pair = PairUpdate(config.c_z, config.pairformer)

    def forward(
        self, m: Tensor, z: Tensor, msa_mask: Tensor, mask: Tensor, pair_mask: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The next m and z."""
        z = z + self.outer_product_mean(m, msa_mask)
        if self.msa is not None:
            m = self.msa(m, z, mask)
        return m, self.pair(z, pair_mask)


class MSAModule(nn.Module):
    """Algorithm 8. The stream has drawn the rows already (line 2)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.linear_msa = Linear(N_RESTYPE + 2, config.c_m)
        self.linear_s = Linear(config.c_s_inputs, config.c_m)
        self.blocks = nn.ModuleList(
            MSABlock(config, last=index == config.n_msa - 1) for index in range(config.n_msa)
        )
        self.recompute = config.activation_checkpointing

    def forward(
        self, batch: dict[str, Tensor], s_inputs: Tensor, z: Tensor, mask: Tensor, pair_mask: Tensor
    ) -> Tensor:
        """The next z [B, N, N, C_z], residual included; ``z`` itself where the batch has no rows."""
        if batch["msa"].shape[1] == 0:
            return z
        m = self.linear_msa(self._features(batch).to(s_inputs.dtype)) + self.linear_s(s_inputs)[:, None]
        for block in self.blocks:
            m, z = run_block(block, m, z, batch["msa_mask"], mask, pair_mask, recompute=self.recompute)
        return z

    @staticmethod
    def _features(batch: dict[str, Tensor]) -> Tensor:
        """[B, M, N, 34]: one-hot row, has_deletion, deletion_value."""
        deletions = torch.stack([batch["has_deletion"], batch["deletion_value"]], dim=-1)
        return torch.cat([F.one_hot(batch["msa"].long(), N_RESTYPE), deletions], dim=-1)
