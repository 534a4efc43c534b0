"""Triangle multiplication and triangle attention."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megafold.trainer.ops.attention import evoattention
from megafold.trainer.ops.gated_output import gated_output
from megafold.trainer.ops.normalization import layernorm, layernorm_linear
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
    z: Tensor,
    mask: Tensor,
    weights: TriangleMultiplicationWeights,
    outgoing: bool,
    *,
    keep: Tensor | None = None,
    residual: bool = False,
) -> Tensor:
    """AF3 SI algorithms 12 (outgoing edges) and 13 (incoming).

    Args:
        z: [B, N, N, C_z].
        mask: [B, N, N] boolean, True: both tokens are present.
        weights: the parameters.
        outgoing: True: Σ_k a_ik ⊙ b_jk, False: Σ_k a_ki ⊙ b_kj.
        keep: dropout's factors, broadcast against ``z``, or None for none.
        residual: add ``z``.

    Returns:
        [B, N, N, C_z].
    """
    normal = layernorm.naive(z, weights.norm_in_weight, weights.norm_in_bias)
    ab = torch.sigmoid(F.linear(normal, weights.gate)) * F.linear(normal, weights.projection)
    ab = ab * mask.unsqueeze(-1)
    # Channels first, so that the sum over k is one batched matrix product.
    a, b = ab.movedim(-1, 1).chunk(2, dim=1)
    x = a @ b.transpose(-1, -2) if outgoing else a.transpose(-1, -2) @ b
    x = layernorm.naive(x.movedim(1, -1), weights.norm_out_weight, weights.norm_out_bias)
    update = torch.sigmoid(F.linear(normal, weights.output_gate)) * F.linear(x, weights.output)
    if keep is not None:
        update = update * keep
    return z + update if residual else update


class TriangleAttentionWeights(NamedTuple):
    """Parameters of algorithms 14 and 15: H heads of D channels.

    Attributes:
        norm_weight: [C_z], with ``norm_bias`` [C_z].
        qkv: [3·H·D, C_z]: q's rows, then k's, then v's, each head by head.
        gate: [H·D, C_z].
        bias: [H, C_z].
        output: [C_z, H·D].
    """

    norm_weight: Tensor
    norm_bias: Tensor
    qkv: Tensor
    gate: Tensor
    bias: Tensor
    output: Tensor


@operator
def triangle_attention(
    z: Tensor,
    mask: Tensor,
    weights: TriangleAttentionWeights,
    *,
    starting: bool,
    keep: Tensor | None = None,
    residual: bool = False,
) -> Tensor:
    """AF3 SI algorithms 14 (around the starting node) and 15 (around the ending node).

    Args:
        z: [B, N, N, C_z].
        mask: [B, N, N] boolean, True: both tokens are present.
        weights: the parameters.
        starting: True: ij attends to ik, False: to kj.
        keep: dropout's factors, broadcast against ``z``, or None for none.
        residual: add ``z``.

    Returns:
        [B, N, N, C_z].
    """
    if not starting:
        # The ending node's attention is the starting node's on the transposed pair matrix.
        keep = None if keep is None else keep.transpose(1, 2)
        out: Tensor = triangle_attention.naive(
            z.transpose(1, 2), mask.transpose(1, 2), weights, starting=True, keep=keep, residual=residual
        )
        return out.transpose(1, 2)
    # One pass over z for all projections.
    stacked = torch.cat([weights.qkv, weights.gate, weights.bias])
    n_head = len(weights.bias)
    projected = layernorm_linear.naive(z, weights.norm_weight, weights.norm_bias, stacked)
    qkv, gate, bias = projected.split([len(weights.qkv), len(weights.gate), n_head], dim=-1)
    # [B, I, J, 3·H·D] → three of [B, I, H, J, D]
    q, k, v = qkv.unflatten(-1, (3, n_head, -1)).permute(3, 0, 1, 4, 2, 5)
    o = evoattention.naive(q, k, v, bias.permute(0, 3, 1, 2), mask)
    return gated_output.naive(
        o.transpose(2, 3).flatten(-2), gate, weights.output, keep=keep, residual=z if residual else None
    )
