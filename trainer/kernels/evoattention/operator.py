"""EvoFlash-3D as a torch operator with its backward, registered for the back end ``triton``."""

from typing import Any, Final

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from megafold.trainer.kernels.evoattention.launches import (
    UNIT,
    Saved,
    Wanted,
    adds_bias_gradient,
    attend,
    in_bytes,
    key_gradient,
    line_length,
    nothing,
    padded,
    prepare,
    query_gradient,
)
from megafold.trainer.ops.precision import result_dtype
from megafold.trainer.ops.registry import register

#: Triton runs on the CPU.
_INTERPRETED: Final = bool(triton.knobs.runtime.interpret)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The output; for the backward: the logarithm of the denominator."""
    ready = prepare(bias, mask, q, Wanted(plain=True), (q.shape[3], k.shape[3]))
    # The output is laid out as the queries are, which is how the next projection reads it.
    return attend(q, k, v, ready.plain, ready.masked)


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None,
    out: Tensor, lse: Tensor, needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV, and dBias [B, H, I, J padded] in float32, empty unless it is needed."""
    dq = torch.empty_like(q)
    saved = Saved(q, k, v, nothing(q.device), out, lse, mask)
    delta, dbias = _backward_of_queries(grad, saved, bias, dq, needs_bias)
    dk, dv = torch.empty_like(k), torch.empty_like(k)
    # The two forms of the bias are never there together: they are what a step needs beside its result.
    ready = prepare(bias, None, q, Wanted(transposed=True), (q.shape[3], k.shape[3]))
    key_gradient(grad, saved, ready.transposed, delta, dk, dv)
    return dq, dk, dv, dbias


def _backward_of_queries(
    grad: Tensor, saved: Saved, bias: Tensor | None, dq: Tensor, needs_bias: bool
) -> tuple[Tensor, Tensor]:
    """Fills ``dq``; what :func:`query_gradient` returns. Bias and mask are prepared anew, not kept."""
    added = needs_bias and adds_bias_gradient(grad.device)
    lengths = (saved.q.shape[3], saved.k.shape[3])
    ready = prepare(bias, saved.mask, saved.q, Wanted(plain=True, zeros=added), lengths)
    saved = saved._replace(masked=ready.masked)
    return query_gradient(grad, saved, ready.plain, dq, ready.dbias, needs_bias=needs_bias)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, bias, mask = inputs
    out, lse = output
    # Not bias and mask as they were prepared but the caller's own, which are there anyway.
    ctx.save_for_backward(q, k, v, bias, mask, out, lse)
    ctx.needs_bias = bias is not None and ctx.needs_input_grad[3]
    ctx.set_materialize_grads(False)


def _finish(ctx: Any, bias: Tensor | None, gradients: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    dq, dk, dv, dbias = gradients
    if not ctx.needs_bias or bias is None:
        return dq, dk, dv, None, None
    dbias = dbias[..., : bias.shape[3]]
    if bias.dtype != torch.float32 or not bias.is_contiguous():
        # Rounded and laid out as the bias is, which is how the projection that it comes from reads it.
        dbias = torch.empty_like(bias).copy_(dbias)
    return dq, dk, dv, dbias, None


class _Attention(torch.autograd.Function):
    """The operator outside of ``torch.compile``, where a custom operator's dispatch costs 0.1 ms more."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _forward(*inputs)
        _setup_context(ctx, inputs, output)
        return output[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None, None
        q, k, v, bias, mask, out, lse = ctx.saved_tensors
        return _finish(ctx, bias, _backward(grad, q, k, v, bias, mask, out, lse, ctx.needs_bias))


_operator = torch.library.custom_op("megafold::evoattention", _forward, mutates_args=())
_operator_backward = torch.library.custom_op("megafold::evoattention_backward", _backward, mutates_args=())


@_operator.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    b, r, h, i, _channels = q.shape
    return torch.empty_like(q), q.new_empty((b, r, h, line_length(i, q.dtype)), dtype=torch.float32)


@_operator_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None,
    out: Tensor, lse: Tensor, needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    b, _rows, h, i, _channels = q.shape
    dbias = lse.new_empty((b, h, i, padded(k.shape[3])) if needs_bias else (0,))
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(k), dbias


def _operator_gradients(ctx: Any, grad: Tensor | None, *_others: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None, None
    saved = ctx.saved_tensors
    return _finish(ctx, saved[3], _operator_backward(grad, *saved, ctx.needs_bias))


def _no_second_derivative(ctx: Any, *grads: Any) -> None:
    raise RuntimeError("evoattention cannot be differentiated twice; use the eager back end for it")


_operator.register_autograd(_operator_gradients, setup_context=_setup_context)
_operator_backward.register_autograd(_no_second_derivative)


def unsupported(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, mask: Tensor | None = None
) -> str | None:
    """Why the kernels cannot take these arguments; None: they can."""
    if q.device.type != "cuda" and not _INTERPRETED:
        return f"device {q.device.type}"
    if result_dtype(q) not in UNIT or any(t.dtype not in UNIT for t in (q, k, v)):
        return f"dtypes {q.dtype}, {k.dtype}, {v.dtype}"
    if q.shape[-1] > 128:
        return f"{q.shape[-1]} channels"
    if q.numel() == 0 or k.numel() == 0:
        return "empty"
    return None


@register("evoattention", "triton", supports=unsupported)
def evoattention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """See :func:`megafold.trainer.ops.attention.evoattention`."""
    dtype = result_dtype(q)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    b, _rows, h, i, _channels = q.shape
    j = k.shape[3]
    if bias is not None and bias.shape != (b, h, i, j):
        bias = bias.expand(b, h, i, j)
    if mask is not None and mask.shape != (b, mask.shape[1], j):
        mask = mask.expand(b, mask.shape[1], j)
    if torch.compiler.is_compiling():
        out, *_ = _operator(q, k, v, bias, mask)
        return out
    result: Tensor = _Attention.apply(q, k, v, bias, None if mask is None else in_bytes(mask))
    return result
