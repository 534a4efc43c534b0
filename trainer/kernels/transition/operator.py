"""SwiGLU transitions as torch operators with their backward, registered for the back end ``triton``."""

import torch
from torch import Tensor

from megafold.trainer.kernels.differentiable import Differentiable
from megafold.trainer.kernels.layernorm.operator import FEW_ROWS, FLOATS, INTERPRETED, MOST_CHANNELS
from megafold.trainer.kernels.transition import composed, few, fused
from megafold.trainer.kernels.transition.fused import Parameters, fits
from megafold.trainer.ops.precision import result_dtype
from megafold.trainer.ops.registry import register


def _transition(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight_in: Tensor,
    weight_out: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    way = fused if fits(x, weight_in, weight_out, dtype) else composed
    return way.forward(x, Parameters(norm_weight, norm_bias, weight_in, weight_out), dtype)


def _transition_backward(
    grad: Tensor, x: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight_in: Tensor, weight_out: Tensor,
    wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    way = fused if fits(x, weight_in, weight_out, grad.dtype) else composed
    return way.backward(grad, x, Parameters(norm_weight, norm_bias, weight_in, weight_out), wanted)


def _transition_added(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight_in: Tensor,
    weight_out: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    parameters = Parameters(norm_weight, norm_bias, weight_in, weight_out)
    return fused.forward(x, parameters, dtype, residual=True)


def _transition_added_backward(
    grad: Tensor, x: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight_in: Tensor, weight_out: Tensor,
    wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    parameters = Parameters(norm_weight, norm_bias, weight_in, weight_out)
    return fused.backward(grad, x, parameters, wanted, residual=True)


def _swiglu(x: Tensor, weight_in: Tensor, weight_out: Tensor, dtype: torch.dtype) -> Tensor:
    way = fused if fits(x, weight_in, weight_out, dtype) else composed
    return way.forward(x, Parameters(None, None, weight_in, weight_out), dtype)


def _swiglu_backward(
    grad: Tensor, x: Tensor, weight_in: Tensor, weight_out: Tensor, wanted: list[bool]
) -> list[Tensor]:
    way = fused if fits(x, weight_in, weight_out, grad.dtype) else composed
    want_x, *want_weights = wanted
    dx, _scale, _shift, *dweights = way.backward(
        grad, x, Parameters(None, None, weight_in, weight_out), [want_x, False, False, *want_weights]
    )
    return [dx, *dweights]


def _shape(x: Tensor, *parameters: Tensor) -> tuple[int, ...]:
    return (*x.shape[:-1], parameters[-1].shape[0])


_transition_operator = Differentiable("transition", _transition, _transition_backward, _shape)
_added_operator = Differentiable("transition_added", _transition_added, _transition_added_backward, _shape)
_swiglu_operator = Differentiable("swiglu", _swiglu, _swiglu_backward, _shape)


def unsupported(x: Tensor, weight_in: Tensor, weight_out: Tensor) -> str | None:
    """Why the kernels cannot take swiglu's arguments; None: they can."""
    return _unsupported(x, weight_in, weight_out, ()) or _few(x, weight_in, weight_out)


def unsupported_norm(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight_in: Tensor, weight_out: Tensor, *,
    residual: bool = False,
) -> str | None:  # fmt: skip
    """Why the kernels cannot take transition's arguments; None: they can."""
    reason = _unsupported(x, weight_in, weight_out, (norm_weight, norm_bias))
    if reason is None and torch.compiler.is_compiling():
        return _few(x, weight_in, weight_out)
    return reason


def _unsupported(x: Tensor, weight_in: Tensor, weight_out: Tensor, norm: tuple[Tensor, ...]) -> str | None:
    dtype = result_dtype(x)
    given = [t.dtype for t in (x, *norm, weight_in, weight_out)]
    if x.device.type != "cuda" and not INTERPRETED:
        return f"device {x.device.type}"
    if dtype not in FLOATS or not FLOATS.issuperset(given):
        return f"dtypes {', '.join(map(str, given))}"
    if x.shape[-1] > MOST_CHANNELS:
        return f"{x.shape[-1]} channels"
    if x.numel() == 0:
        return "empty"
    return None


def _few(x: Tensor, weight_in: Tensor, weight_out: Tensor) -> str | None:
    """That the rows are few, where no kernel takes them whole."""
    rows = x.shape[:-1].numel()
    few = rows <= FEW_ROWS and not fits(x, weight_in, weight_out, result_dtype(x))
    return f"{rows} rows of {x.shape[-1]} channels" if few else None


@register("transition", "triton", supports=unsupported_norm)
def transition(
    x: Tensor, norm_weight: Tensor, norm_bias: Tensor, weight_in: Tensor, weight_out: Tensor, *,
    residual: bool = False,
) -> Tensor:  # fmt: skip
    """See :func:`megafold.trainer.ops.transition.transition`."""
    dtype = result_dtype(x)
    inputs = (x, norm_weight, norm_bias, weight_in, weight_out, dtype)
    if not torch.compiler.is_compiling() and _few(x, weight_in, weight_out):
        return few.transition(*inputs, residual=residual)
    if not residual:
        return _transition_operator(*inputs)
    if x.dtype == dtype and fits(x, weight_in, weight_out, dtype):
        return _added_operator(*inputs)
    return x + _transition_operator(*inputs)


@register("swiglu", "triton", supports=unsupported)
def swiglu(x: Tensor, weight_in: Tensor, weight_out: Tensor) -> Tensor:
    """See :func:`megafold.trainer.ops.transition.swiglu`."""
    return _swiglu_operator(x, weight_in, weight_out, result_dtype(x))
