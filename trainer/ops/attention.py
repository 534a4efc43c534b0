"""Attention with a bias that rows share: triangle attention, attention with pair bias, atom windows.

Shapes: B batch (or batch and window), R rows that share one bias (rows of the pair tensor, noised
copies), H heads, I queries, J keys, D channels of a head.
"""

import torch
from torch import Tensor

from megafold.trainer.ops.precision import result_dtype, wide
from megafold.trainer.ops.registry import operator


@operator
def evoattention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """softmax_j(q_i·k_j / √D + bias_ij) v_j over the keys that ``mask`` holds.

    Args:
        q: [B, R, H, I, D]; not scaled.
        k: [B, R, H, J, D].
        v: [B, R, H, J, D].
        bias: [B, H, I, J], shared by the rows; None for none.
        mask: [B, R, J] or [B, 1, J] boolean, True: the key is present; None for all.

    Returns:
        [B, R, H, I, D] in the dtype of a matrix product. Where no key is present: zeros.
    """
    dtype = result_dtype(q)
    logits = wide(torch.matmul(q * q.shape[-1] ** -0.5, k.transpose(-1, -2)))
    if bias is not None:
        logits = logits + bias.unsqueeze(1)
    if mask is None:
        weights = torch.softmax(logits, dim=-1)
    else:
        absent = ~mask[:, :, None, None, :]
        # The lowest finite number and not -inf: a query without keys must give zeros, not NaN.
        logits = logits.masked_fill(absent, torch.finfo(logits.dtype).min)
        weights = torch.softmax(logits, dim=-1).masked_fill(absent, 0.0)
    return torch.matmul(weights.to(dtype), v.to(dtype))
