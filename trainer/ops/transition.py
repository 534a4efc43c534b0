"""SwiGLU transitions."""

import torch.nn.functional as F
from torch import Tensor

from megafold.trainer.ops.normalization import layernorm
from megafold.trainer.ops.registry import operator


@operator
def swiglu(x: Tensor, weight_in: Tensor, weight_out: Tensor) -> Tensor:
    """LinearNoBias(swish(LinearNoBias(x)) ⊙ LinearNoBias(x)).

    Args:
        x: [..., C].
        weight_in: [2·C_hidden, C]; the rows that swish sees come first.
        weight_out: [C_out, C_hidden].

    Returns:
        [..., C_out].
    """
    gate, value = F.linear(x, weight_in).chunk(2, dim=-1)
    return F.linear(F.silu(gate) * value, weight_out)


@operator
def transition(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight_in: Tensor,
    weight_out: Tensor,
    *,
    residual: bool = False,
) -> Tensor:
    """AF3 SI algorithm 11: SwiGLU of LayerNorm(x).

    Args:
        x: [..., C].
        norm_weight: [C], with ``norm_bias`` [C].
        weight_in: [2·C_hidden, C]; the rows that swish sees come first.
        weight_out: [C, C_hidden].
        residual: add ``x``.

    Returns:
        [..., C].
    """
    update = swiglu.naive(layernorm.naive(x, norm_weight, norm_bias), weight_in, weight_out)
    return x + update if residual else update
