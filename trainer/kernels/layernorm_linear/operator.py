"""A linear layer of a layer norm as a torch operator, registered for the back end ``triton``."""

import torch
from torch import Tensor

from megafold.trainer.kernels.differentiable import Differentiable
from megafold.trainer.kernels.layernorm.operator import FEW_ROWS, FLOATS, INTERPRETED, MOST_CHANNELS
from megafold.trainer.kernels.layernorm_linear import launches
from megafold.trainer.kernels.layernorm_linear.launches import Parameters, fits
from megafold.trainer.ops.precision import result_dtype
from megafold.trainer.ops.registry import register


def _forward(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    parameters = Parameters(norm_weight, norm_bias, weight, bias)
    way = launches.forward if fits(x, weight, dtype) else launches.composed_forward
    return way(x, parameters, dtype)


def _backward(
    grad: Tensor, x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, weight: Tensor,
    bias: Tensor | None, wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    parameters = Parameters(norm_weight, norm_bias, weight, bias)
    way = launches.backward if fits(x, weight, grad.dtype) else launches.composed_backward
    return way(grad, x, parameters, wanted)


def _shape(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None
) -> tuple[int, ...]:
    return (*x.shape[:-1], weight.shape[0])


_operator = Differentiable("layernorm_linear", _forward, _backward, _shape)


def unsupported(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None = None
) -> str | None:
    """Why the kernels cannot take these arguments; None: they can."""
    if x.device.type != "cuda" and not INTERPRETED:
        return f"device {x.device.type}"
    given = [t.dtype for t in (x, norm_weight, norm_bias, weight, bias) if t is not None]
    if result_dtype(x) not in FLOATS or not FLOATS.issuperset(given):
        return f"dtypes {', '.join(map(str, given))}"
    if x.shape[-1] > MOST_CHANNELS:
        return f"{x.shape[-1]} channels"
    if x.numel() == 0 or weight.numel() == 0:
        return "empty"
    few = x.shape[:-1].numel() <= FEW_ROWS and not fits(x, weight, result_dtype(x))
    return f"{x.shape[:-1].numel()} rows of {x.shape[-1]} channels" if few else None


@register("layernorm_linear", "triton", supports=unsupported)
def layernorm_linear(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """See :func:`megafold.trainer.ops.normalization.layernorm_linear`."""
    return _operator(x, norm_weight, norm_bias, weight, bias, result_dtype(x))
