"""Triangle attention as one torch operator with its backward, registered for the back end ``triton``."""

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
    padded,
    prepare,
    query_gradient,
)
from megafold.trainer.kernels.gated_output.launches import (
    Layout,
    gate_and_project,
    gated_gradients,
    holds,
)
from megafold.trainer.kernels.triangle_attention.launches import (
    WIDEST,
    Norm,
    Sizes,
    input_gradient,
    pack,
    project,
    sum_parts,
    weight_gradient,
)
from megafold.trainer.ops.precision import result_dtype
from megafold.trainer.ops.registry import register
from megafold.trainer.ops.triangle import TriangleAttentionWeights

#: Triton runs on the CPU.
_INTERPRETED: Final = bool(triton.knobs.runtime.interpret)


def _sizes(bias: Tensor, gate: Tensor) -> Sizes:
    return Sizes(gate.shape[1], bias.shape[0], gate.shape[0] // bias.shape[0])


def _rows(x: Tensor, starting: bool) -> Tensor:
    """[B, N, N, ...] with the row whose positions attend to each other first."""
    return x if starting else x.transpose(1, 2)


def _forward(
    z: Tensor, mask: Tensor, norm_weight: Tensor, norm_bias: Tensor, qkv: Tensor, gate: Tensor, bias: Tensor,
    out_weight: Tensor, keep: Tensor | None, starting: bool, residual: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The output; for the backward: projections, prepared bias, EvoFlash-3D's results, weights."""
    sizes = _sizes(bias, gate)
    packed = pack(sizes, qkv, gate, bias, out_weight, dtype)
    weight, weight_out = sizes.split(packed)
    rows = _rows(z, starting)
    projected, prepared = project(rows, Norm(norm_weight, norm_bias), weight, sizes)
    length = z.shape[1]
    masked = prepare(None, _rows(mask, starting), projected, Wanted(), (length, length)).masked
    q, k, v, gates = projected.unbind()
    attended, lse = attend(q, k, v, prepared, masked)
    kind = torch.promote_types(z.dtype, dtype) if residual and z.dtype != dtype else dtype
    out = torch.empty(z.shape, dtype=kind, device=z.device)
    gate_and_project(
        Layout(attended, gates),
        weight_out,
        rows if residual else None,
        None if keep is None else _rows(keep, starting),
        _rows(out, starting),
    )
    return out, projected, prepared, attended, lse, packed


def _backward(
    grad: Tensor, z: Tensor, mask: Tensor, norm_weight: Tensor, norm_bias: Tensor, keep: Tensor | None,
    projected: Tensor, prepared: Tensor, attended: Tensor, lse: Tensor, packed: Tensor, starting: bool,
    residual: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dZ; in float32, flat: bias layer and norm [HP + 2, C], q, k, v and gate [4·HD, C], output [C, HD]."""
    h, n, d = projected.shape[3:]
    sizes, norm = Sizes(z.shape[-1], h, d), Norm(norm_weight, norm_bias)
    weight, weight_out = sizes.split(packed)
    if grad.stride(-1) != 1:
        grad = grad.contiguous()
    rows, grad = _rows(z, starting), _rows(grad, starting)
    q, k, v, gates = projected.unbind()
    dprojected = torch.empty_like(projected)
    dq, dk, dv, dgates = dprojected.unbind()
    dattended = torch.empty_like(attended)
    kept = None if keep is None else _rows(keep, starting)
    dw_out = gated_gradients(grad, Layout(attended, gates), weight_out, kept, dattended, dgates)
    mask = _rows(mask, starting)
    wanted = Wanted(transposed=True, zeros=adds_bias_gradient(z.device), again=True)
    ready = prepare(prepared, mask, projected, wanted, (n, n))
    saved = Saved(q, k, v, ready.masked, attended, lse, mask)
    delta, dbias = query_gradient(dattended, saved, prepared, dq, ready.dbias, needs_bias=True)
    key_gradient(dattended, saved, ready.transposed, delta, dk, dv)
    del dattended
    dz = torch.empty(z.shape, dtype=z.dtype, device=z.device)
    dsmall = input_gradient(
        dprojected, dbias, grad if residual else None, rows, norm, weight, sizes, _rows(dz, starting)
    )
    return dz, sum_parts(dsmall, weight_gradient(dprojected, rows, norm, sizes), dw_out)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    z, mask, norm_weight, norm_bias, qkv, gate, bias, out_weight, keep, starting, residual, _dtype = inputs
    ctx.save_for_backward(z, mask, norm_weight, norm_bias, keep, *output[1:])
    ctx.settings = (starting, residual)
    ctx.dtypes = [t.dtype for t in (norm_weight, norm_bias, qkv, gate, bias, out_weight)]
    ctx.sizes = _sizes(bias, gate)
    ctx.set_materialize_grads(False)


_NOTHING: Final = (None,) * 12


def _finish(ctx: Any, gradients: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    dz, flat = gradients
    typed = [w.to(dtype) for w, dtype in zip(ctx.sizes.split_gradients(flat), ctx.dtypes, strict=True)]
    return dz, None, *typed, None, None, None, None


class _TriangleAttention(torch.autograd.Function):
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
            return _NOTHING
        return _finish(ctx, _backward(grad, *ctx.saved_tensors, *ctx.settings))


_operator = torch.library.custom_op("megafold::triangle_attention", _forward, mutates_args=())
_operator_backward = torch.library.custom_op(
    "megafold::triangle_attention_backward", _backward, mutates_args=()
)


@_operator.register_fake
def _(
    z: Tensor, mask: Tensor, norm_weight: Tensor, norm_bias: Tensor, qkv: Tensor, gate: Tensor, bias: Tensor,
    out_weight: Tensor, keep: Tensor | None, starting: bool, residual: bool, dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    sizes = _sizes(bias, gate)
    b, r, n, _ = z.shape
    kind = torch.promote_types(z.dtype, dtype) if residual else dtype
    return (
        z.new_empty(z.shape, dtype=kind),
        z.new_empty((4, b, r, sizes.h, n, sizes.d), dtype=dtype),
        z.new_empty((b, sizes.h, r, padded(n)), dtype=dtype),
        z.new_empty((b, r, sizes.h, n, sizes.d), dtype=dtype),
        z.new_empty((b, r, sizes.h, line_length(n, dtype)), dtype=torch.float32),
        z.new_empty(sizes.packed, dtype=dtype),
    )


@_operator_backward.register_fake
def _(
    grad: Tensor, z: Tensor, mask: Tensor, norm_weight: Tensor, norm_bias: Tensor, keep: Tensor | None,
    projected: Tensor, prepared: Tensor, attended: Tensor, lse: Tensor, packed: Tensor, starting: bool,
    residual: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    sizes = Sizes(z.shape[-1], projected.shape[3], projected.shape[5])
    return z.new_empty(z.shape), lse.new_empty(sum(sizes.gradients))


def _operator_gradients(ctx: Any, grad: Tensor | None, *_others: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return _NOTHING
    return _finish(ctx, _operator_backward(grad, *ctx.saved_tensors, *ctx.settings))


def _no_second_derivative(ctx: Any, *grads: Any) -> None:
    raise RuntimeError("triangle_attention cannot be differentiated twice; use the eager back end for it")


_operator.register_autograd(_operator_gradients, setup_context=_setup_context)
_operator_backward.register_autograd(_no_second_derivative)


def unsupported(
    z: Tensor, mask: Tensor, weights: TriangleAttentionWeights, *, starting: bool, keep: Tensor | None = None,
    residual: bool = False,
) -> str | None:  # fmt: skip
    """Why the kernels cannot take these arguments; None: they can."""
    if z.device.type != "cuda" and not _INTERPRETED:
        return f"device {z.device.type}"
    if result_dtype(z) not in UNIT or z.dtype not in UNIT:
        return f"dtype {z.dtype}"
    sizes = _sizes(weights.bias, weights.gate)
    if sizes.c > WIDEST or sizes.d > 128 or not holds(sizes.hd, sizes.c, result_dtype(z), z.device):
        return f"{sizes.h} heads of {sizes.d} channels on {sizes.c}"
    return "empty" if z.numel() == 0 else None


@register("triangle_attention", "triton", supports=unsupported)
def triangle_attention(
    z: Tensor, mask: Tensor, weights: TriangleAttentionWeights, *, starting: bool, keep: Tensor | None = None,
    residual: bool = False,
) -> Tensor:  # fmt: skip
    """See :func:`megafold.trainer.ops.triangle.triangle_attention`."""
    if z.stride(-1) != 1:
        z = z.contiguous()
    if mask.shape != z.shape[:-1]:
        mask = mask.expand(z.shape[:-1])
    w = weights
    others = (w.norm_weight, w.norm_bias, w.qkv, w.gate, w.bias, w.output, keep, starting, residual,
              result_dtype(z))  # fmt: skip
    if torch.compiler.is_compiling():
        out, *_ = _operator(z, mask, *others)
        return out
    result: Tensor = _TriangleAttention.apply(z, in_bytes(mask), *others)
    return result
