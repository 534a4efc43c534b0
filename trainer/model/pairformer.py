"""The Pairformer stack (algorithm 17) and the pair updates that the MSA and template stacks share.

Shapes: s [B, N, C_s]; z [B, N, N, C_z]; mask [B, N] boolean; pair_mask [B, N, N] boolean.
"""

from torch import Tensor, nn

from megafold.trainer.model.config import PairformerConfig
from megafold.trainer.model.primitives import Dropout, Transition, run_block
from megafold.trainer.model.transformer import SingleAttention
from megafold.trainer.model.triangle import TriangleAttention, TriangleMultiplication


class PairUpdate(nn.Module):
    """The pair half of a Pairformer block: algorithm 17, lines 2 to 6 (algorithm 8, lines 9 to 13)."""

    def __init__(self, c_z: int, config: PairformerConfig, *, n_transition: int | None = None) -> None:
        super().__init__()
        c, c_head, n_head = config.c_triangle, config.c_attention, config.n_head_pair
        self.multiplication_outgoing = TriangleMultiplication(c_z, c, outgoing=True)
        self.multiplication_incoming = TriangleMultiplication(c_z, c, outgoing=False)
        self.attention_starting = TriangleAttention(c_z, c_head, n_head, starting=True)
        self.attention_ending = TriangleAttention(c_z, c_head, n_head, starting=False)
        self.transition = Transition(c_z, n_transition or config.n_transition)
        self.dropout = Dropout(config.dropout, "row")

    def forward(self, z: Tensor, pair_mask: Tensor) -> Tensor:
        """[B, N, N, C_z] → [B, N, N, C_z], residuals included."""
        # All that is dropped is drawn at once; z is square, so column-wise dropout is row-wise, transposed.
        first, second, third, fourth = self.dropout.draws(z, 4)
        by_columns = None if fourth is None else fourth.transpose(1, 2)
        z = self.multiplication_outgoing(z, pair_mask, first, residual=True)
        z = self.multiplication_incoming(z, pair_mask, second, residual=True)
        z = self.attention_starting(z, pair_mask, third, residual=True)
        z = self.attention_ending(z, pair_mask, by_columns, residual=True)
        return self.transition(z, residual=True)


class PairformerBlock(nn.Module):
    """One round of algorithm 17."""

    def __init__(self, c_s: int, c_z: int, config: PairformerConfig) -> None:
        super().__init__()
        self.pair = PairUpdate(c_z, config)
        self.attention = SingleAttention(c_s, c_z, config.n_head_single)
        self.transition = Transition(c_s, config.n_transition)

    def forward(self, s: Tensor, z: Tensor, mask: Tensor, pair_mask: Tensor) -> tuple[Tensor, Tensor]:
        """The next s [B, N, C_s] and z [B, N, N, C_z], residuals included."""
        z = self.pair(z, pair_mask)
        s = self.attention(s, z, mask, residual=True)
        return self.transition(s, residual=True), z


class PairformerStack(nn.Module):
    """Algorithm 17."""

    def __init__(
        self, c_s: int, c_z: int, n_block: int, config: PairformerConfig, *, recompute: bool
    ) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(PairformerBlock(c_s, c_z, config) for _ in range(n_block))
        self.recompute = recompute

    def forward(self, s: Tensor, z: Tensor, mask: Tensor, pair_mask: Tensor) -> tuple[Tensor, Tensor]:
        """The last block's s [B, N, C_s] and z [B, N, N, C_z]."""
        for block in self.blocks:
            s, z = run_block(block, s, z, mask, pair_mask, recompute=self.recompute)
        return s, z
