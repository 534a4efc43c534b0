"""Layer normalisation, alone and with what follows it. Statistics in float32 at least."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megafold.trainer.ops.precision import full_precision, result_dtype, wide
from megafold.trainer.ops.registry import operator

EPS = 1e-5


@operator
def layernorm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """Normalise the last axis of ``x`` [..., C]; ``weight`` and ``bias`` [C] or None."""
    dtype = result_dtype(x)
    with full_precision(x):
        scale = None if weight is None else wide(weight)
        shift = None if bias is None else wide(bias)
        return F.layer_norm(wide(x), x.shape[-1:], scale, shift, EPS).to(dtype)


@operator
def layernorm_linear(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """Linear(LayerNorm(x)).

    Args:
        x: [..., C].
        norm_weight: [C].
        norm_bias: [C] or None.
        weight: [C_out, C]; may be several layers' weights, stacked.
        bias: [C_out] or None.

    Returns:
        [..., C_out].
    """
    return F.linear(layernorm.naive(x, norm_weight, norm_bias), weight, bias)


@operator
def adaln(
    a: Tensor,
    s: Tensor,
    norm_weight: Tensor,
    scale_weight: Tensor,
    scale_bias: Tensor,
    shift_weight: Tensor,
) -> Tensor:
    """Adaptive layer norm, AF3 SI algorithm 26.

    Args:
        a: [..., C], normalised without scale or offset.
        s: [..., C_s], broadcast against ``a``.
        norm_weight: [C_s], scale of the norm of ``s``, which has no offset.
        scale_weight: [C, C_s], with ``scale_bias`` [C].
        shift_weight: [C, C_s].

    Returns:
        [..., C]: sigmoid(Linear(s)) ⊙ a + LinearNoBias(s).
    """
    s = layernorm.naive(s, norm_weight, None)
    scale = torch.sigmoid(F.linear(s, scale_weight, scale_bias))
    return scale * layernorm.naive(a) + F.linear(s, shift_weight)
