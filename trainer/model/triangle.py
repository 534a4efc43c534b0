"""Triangle updates of the pair representation (algorithms 12 to 15).

Shapes: z [B, N, N, C_z]; mask [B, N, N] boolean, True: both tokens are present. Residuals are the
caller's, unless it asks for them.
"""

from torch import Tensor, nn

from megafold.trainer import ops
from megafold.trainer.model.primitives import LayerNorm, Linear


class TriangleMultiplication(nn.Module):
    """Algorithm 12 (outgoing edges) or 13 (incoming edges)."""

    def __init__(self, c_z: int, c: int, *, outgoing: bool) -> None:
        super().__init__()
        self.outgoing = outgoing
        self.norm_in = LayerNorm(c_z)
        self.linear_ab = Linear(c_z, 2 * c)
        self.linear_ab_gate = Linear(c_z, 2 * c, init="gate")
        self.norm_out = LayerNorm(c)
        self.linear_out = Linear(c, c_z, init="final")
        self.linear_gate = Linear(c_z, c_z, init="gate")

    def forward(
        self, z: Tensor, mask: Tensor, keep: Tensor | None = None, *, residual: bool = False
    ) -> Tensor:
        """[B, N, N, C_z] → [B, N, N, C_z].

        ``keep``: dropout's factors, broadcast against ``z``; ``residual``: add ``z``.
        """
        return ops.triangle_multiplication(z, mask, self.weights, self.outgoing, keep=keep, residual=residual)

    @property
    def weights(self) -> ops.TriangleMultiplicationWeights:
        """The parameters."""
        assert self.norm_in.bias is not None
        assert self.norm_out.bias is not None
        return ops.TriangleMultiplicationWeights(
            norm_in_weight=self.norm_in.weight,
            norm_in_bias=self.norm_in.bias,
            projection=self.linear_ab.weight,
            gate=self.linear_ab_gate.weight,
            norm_out_weight=self.norm_out.weight,
            norm_out_bias=self.norm_out.bias,
            output=self.linear_out.weight,
            output_gate=self.linear_gate.weight,
        )


class TriangleAttention(nn.Module):
    """Algorithm 14 (around the starting node) or 15 (around the ending node)."""

    def __init__(self, c_z: int, c: int, n_head: int, *, starting: bool) -> None:
        super().__init__()
        self.n_head = n_head
        self.starting = starting
        self.norm = LayerNorm(c_z)
        self.linear_qkv = Linear(c_z, 3 * n_head * c)
        self.linear_bias = Linear(c_z, n_head)
        self.linear_gate = Linear(c_z, n_head * c, init="gate")
        self.linear_out = Linear(n_head * c, c_z, init="final")

    def forward(
        self, z: Tensor, mask: Tensor, keep: Tensor | None = None, *, residual: bool = False
    ) -> Tensor:
        """[B, N, N, C_z] → [B, N, N, C_z].

        ``keep``: dropout's factors, broadcast against ``z``; ``residual``: add ``z``.
        """
        return ops.triangle_attention(
            z, mask, self.weights, starting=self.starting, keep=keep, residual=residual
        )

    @property
    def weights(self) -> ops.TriangleAttentionWeights:
        """The parameters."""
        assert self.norm.bias is not None
        return ops.TriangleAttentionWeights(
            norm_weight=self.norm.weight,
            norm_bias=self.norm.bias,
            qkv=self.linear_qkv.weight,
            gate=self.linear_gate.weight,
            bias=self.linear_bias.weight,
            output=self.linear_out.weight,
        )
