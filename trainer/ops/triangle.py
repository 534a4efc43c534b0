"""Triangle multiplication."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megafold.trainer.ops.normalization import layernorm
from megafold.trainer.ops.registry import operator


class TriangleMultiplicationWeights(NamedTuple):
    """Parameters of algorithms 12 and 13's triangle multiplication; C hidden channels.

    Attributes:
        norm_in_weight: [C_z], with ``norm_in_bias`` [C_z].
        projection: [2·C, C_z]: a's rows, then b's.
        gate: [2·C, C_z]: likewise.
        norm_out_weight: [C], with ``norm_out_bias`` [C].
        output: [C_z, C].
        output_gate: [C_z, C_z].
    """

    norm_in_weight: Tensor
    norm_in_bias: Tensor
    projection: Tensor
    gate: Tensor
    norm_out_weight: Tensor
    norm_out_bias: Tensor
    output: Tensor
    output_gate: Tensor


@operator
def triangle_multiplication(
    z: Tensor, mask: Tensor, weights: TriangleMultiplicationWeights, outgoing: bool
) -> Tensor:
    """AF3 SI algorithms 12 (outgoing edges) and 13 (incoming), without the residual.

    Args:
        z: [B, N, N, C_z].
        mask: [B, N, N] boolean, True: both tokens are present.
        weights: the parameters.
        outgoing: True: Σ_k a_ik ⊙ b_jk, False: Σ_k a_ki ⊙ b_kj.

    Returns:
        [B, N, N, C_z].
    """
    z = layernorm.naive(z, weights.norm_in_weight, weights.norm_in_bias)
    ab = torch.sigmoid(F.linear(z, weights.gate)) * F.linear(z, weights.projection)
    ab = ab * mask.unsqueeze(-1)
    # Channels first, so that the sum over k is one batched matrix product.
    a, b = ab.movedim(-1, 1).chunk(2, dim=1)
    x = a @ b.transpose(-1, -2) if outgoing else a.transpose(-1, -2) @ b
    x = layernorm.naive(x.movedim(1, -1), weights.norm_out_weight, weights.norm_out_bias)
    return torch.sigmoid(F.linear(z, weights.output_gate)) * F.linear(x, weights.output)
