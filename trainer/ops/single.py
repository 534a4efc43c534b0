"""The Pairformer's attention of single representations with pair bias."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from megafold.trainer.ops.attention import evoattention
from megafold.trainer.ops.gated_output import gated_output
from megafold.trainer.ops.normalization import layernorm_linear
from megafold.trainer.ops.registry import operator


class SingleAttentionWeights(NamedTuple):
    """Parameters of algorithm 24 without conditioning; H heads on C channels.

    Attributes:
        norm_weight: [C], with ``norm_bias`` [C].
        q: [C, C], with ``q_bias`` [C].
        kv: [2·C, C]: k's rows, then v's, each head by head.
        gate: [C, C].
        bias_norm_weight: [C_z], with ``bias_norm_bias`` [C_z].
        bias: [H, C_z].
        output: [C, C].
    """

    norm_weight: Tensor
    norm_bias: Tensor
    q: Tensor
    q_bias: Tensor
    kv: Tensor
    gate: Tensor
    bias_norm_weight: Tensor
    bias_norm_bias: Tensor
    bias: Tensor
    output: Tensor


@operator
def single_attention(
    s: Tensor, z: Tensor, mask: Tensor, weights: SingleAttentionWeights, *, residual: bool = False
) -> Tensor:
    """AF3 SI algorithm 24 as the Pairformer calls it, without conditioning.

    Args:
        s: [B, N, C].
        z: [B, N, N, C_z].
        mask: [B, N] boolean, True: the token is present.
        weights: the parameters.
        residual: add ``s``.

    Returns:
        [B, N, C].
    """
    return composed(
        s, z, mask, weights, residual, layernorm_linear.naive, evoattention.naive, gated_output.naive
    )


def composed(
    s: Tensor,
    z: Tensor,
    mask: Tensor,
    weights: SingleAttentionWeights,
    residual: bool,
    layernorm_linear: Callable[..., Tensor],
    evoattention: Callable[..., Tensor],
    gated_output: Callable[..., Tensor],
) -> Tensor:
    """:func:`single_attention`, made of these operators."""
    w = weights
    weight = torch.cat([w.q, w.kv, w.gate])
    offset = torch.cat([w.q_bias, w.q_bias.new_zeros(3 * len(w.q_bias))])
    projected = layernorm_linear(s, w.norm_weight, w.norm_bias, weight, offset)
    # [B, N, 4·C] → three of [B, 1, H, N, D], and the gate
    *qkv, gate = projected.unsqueeze(1).chunk(4, dim=-1)
    q, k, v = (t.unflatten(-1, (len(w.bias), -1)).transpose(2, 3) for t in qkv)
    bias = layernorm_linear(z, w.bias_norm_weight, w.bias_norm_bias, w.bias)
    o = evoattention(q, k, v, bias.permute(0, 3, 1, 2), mask[:, None])
    update = gated_output(o.transpose(2, 3).flatten(-2), gate, w.output).squeeze(1)
    return s + update if residual else update
