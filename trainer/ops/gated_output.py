"""What ends an update: the gated output of attention, dropout and residual."""

import torch
import torch.nn.functional as F
from torch import Tensor

from megafold.trainer.ops.registry import operator


@operator
def gated_output(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    *,
    keep: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + keep ⊙ LinearNoBias(sigmoid(gate) ⊙ x).

    Args:
        x: [..., C].
        gate: [..., C], before the sigmoid.
        weight: [C_out, C].
        keep: dropout's factors, broadcast against the result, or None for none.
        residual: [..., C_out], or None for none.

    Returns:
        [..., C_out].
    """
    out = F.linear(torch.sigmoid(gate) * x, weight)
    if keep is not None:
        out = out * keep
    return out if residual is None else residual + out


@operator
def dropout_add(residual: Tensor, x: Tensor, keep: Tensor) -> Tensor:
    """residual + keep ⊙ x.

    Args:
        residual: [B, N, N, C].
        x: [B, N, N, C].
        keep: dropout's factors, broadcast against ``x``.

    Returns:
        [B, N, N, C].
    """
    return residual + x * keep
