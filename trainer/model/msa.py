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
        a, b = self.operands(m, msa_mask)
        return self.mean(a, b, msa_mask, msa_mask)

    def operands(self, m: Tensor, msa_mask: Tensor) -> tuple[Tensor, Tensor]:
        """a and b [B, M, N, C]; zeros where there is nothing."""
        a, b = (self.projection(m) * msa_mask.unsqueeze(-1)).chunk(2, dim=-1)
        return a, b

    def mean(self, a: Tensor, b: Tensor, mask_i: Tensor, mask_j: Tensor) -> Tensor:
        """[B, M, I, C], [B, M, J, C] and their masks [B, M, I], [B, M, J] → [B, I, J, C_z]."""
        m_rows = max(1, a.shape[1])
        with full_precision(a):  # bfloat16 cannot count beyond 256
            n_rows = torch.einsum("bmi,bmj->bij", wide(mask_i.to(a.dtype)), wide(mask_j.to(a.dtype)))
        # Weighting a by 1/M first keeps the sum over thousands of rows small in low precision.
        outer = torch.einsum("bmic,bmjd->bijcd", a / m_rows, b).flatten(-2)
        mean = outer * (m_rows / n_rows.clamp(min=1)).unsqueeze(-1)
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
        return self.average(m, self.row_weights(z, mask))

    def row_weights(self, z: Tensor, mask: Tensor) -> Tensor:
        """[B, I, J, C_z] → how much token j counts for token i, [B, I, J, H] in float32."""
        absent = ~mask[:, None, :, None]
        logits = wide(self.weights(z))
        w = torch.softmax(logits.masked_fill(absent, torch.finfo(logits.dtype).min), dim=2)
        return w.masked_fill(absent, 0.0)

    def average(self, m: Tensor, w: Tensor) -> Tensor:
        """[B, M, N, C_m] → [B, M, N, C_m] with weights ``w`` [B, N, N, H]."""
        projected = ops.layernorm_linear(
            m,
            self.norm.weight,
            self.norm.bias,
            torch.cat([self.linear_v.weight, self.linear_gate.weight]),
        )
        v, gate = projected.chunk(2, dim=-1)
        o = torch.einsum("bijh,bmjhc->bmihc", w.to(v.dtype), v.unflatten(-1, (self.n_head, -1)))
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
        m = self.dropout.add(m, self.averaging(m, z, mask))
        return self.transition(m, residual=True)


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
        """The next m [B, M, N, C_m] and z [B, N, N, C_z], residuals included."""
        z = z + self.outer_product_mean(m, msa_mask)
        if self.msa is not None:
            m = self.msa(m, z, mask)
        return m, self.pair(z, pair_mask)


class MSAModule(nn.Module):
    """Algorithm 8. The stream has drawn the rows already (line 2; see ``msa_rows.py``)."""

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
        m = self.embed(batch, s_inputs)
        for block in self.blocks:
            m, z = run_block(block, m, z, batch["msa_mask"], mask, pair_mask, recompute=self.recompute)
        return z

    def embed(self, batch: dict[str, Tensor], s_inputs: Tensor, tokens: slice = slice(None)) -> Tensor:
        """m before the first block [B, M, N, C_m], from one-hot rows, has_deletion and deletion_value."""
        deletions = torch.stack([batch["has_deletion"], batch["deletion_value"]], dim=-1)[:, :, tokens]
        restype = F.one_hot(batch["msa"][:, :, tokens].long(), N_RESTYPE)
        features = torch.cat([restype, deletions], dim=-1).to(s_inputs.dtype)
        m: Tensor = self.linear_msa(features) + self.linear_s(s_inputs[:, tokens])[:, None]
        return m
