"""Triangle multiplication as a torch operator with its backward, registered for the back end ``triton``."""

from collections.abc import Sequence
from typing import Any, Final

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from megafold.trainer.kernels.launch import blocks
from megafold.trainer.kernels.triangle_multiplication.launches import (
    PAD,
    Prepared,
    WeightGradients,
    call_for,
    close,
    contract,
    contract_gradient,
    finish,
    input_gradient,
    output_gradient,
    prepare,
    project,
    weight_gradient,
)
from megafold.trainer.ops.precision import result_dtype
from megafold.trainer.ops.registry import register
from megafold.trainer.ops.triangle import TriangleMultiplicationWeights

_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_CHANNELS: Final = (16, 32, 64, 128)
#: Positions are counted in 32 bits.
_MOST_POSITIONS: Final = 2**31 - 256
#: Triton runs on the CPU.
_INTERPRETED: Final = bool(triton.knobs.runtime.interpret)

#: What the backward needs: z standardised [R, Z]; x standardised [R, C]; a and b [2, C·B, NP, NP]; the
#: factors [3, R]; the prepared matrices.
Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _run(
    z: Tensor, mask: Tensor, weights: Sequence[Tensor], outgoing: bool, dtype: torch.dtype, keep: bool
) -> tuple[Tensor, Saved]:
    """The output and, with ``keep``, what the backward needs."""
    w = _contiguous(weights)
    call = call_for(z.shape[0], z.shape[1], w.output, dtype)
    prepared = prepare(call, w)
    standard, ab, factors = project(call, z.contiguous(), mask.contiguous().view(torch.uint8), prepared)
    x = contract(ab, outgoing)
    out, summed = close(call, standard, x, prepared, factors, keep=keep)
    return out, (standard, summed, ab, factors, *prepared)


def _contiguous(weights: Sequence[Tensor]) -> TriangleMultiplicationWeights:
    return TriangleMultiplicationWeights(*[w.contiguous() for w in weights])


def _forward(
    z: Tensor, mask: Tensor, weights: Sequence[Tensor], outgoing: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output, and what the backward needs."""
    out, saved = _run(z, mask, weights, outgoing, dtype, keep=True)
    return out, *saved


def _backward(
    grad: Tensor, weights: Sequence[Tensor], saved: Sequence[Tensor], outgoing: bool,
    dtype: torch.dtype, wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dz in ``dtype``, then :class:`WeightGradients`; ``wanted``: dz, those. What is not wanted is empty."""
    w = _contiguous(weights)
    standard, summed, ab, factors, *matrices = saved
    prepared = Prepared(*matrices)
    call = call_for(grad.shape[0], grad.shape[1], w.output, ab.dtype)
    dx, dproducts = output_gradient(call, grad.contiguous(), standard, summed, prepared, factors)
    dab = contract_gradient(dx, ab, outgoing)
    del dx
    wants_z, wants_weights = wanted
    if wants_z:
        dz = input_gradient(call, standard, dab, dproducts, prepared, factors, dtype)
    else:
        dz = factors.new_empty(0)
    if wants_weights:
        parts = weight_gradient(call, standard, summed, dab, dproducts, prepared, factors)
        made = finish(call, parts, w)
    else:
        made = WeightGradients(*[factors.new_empty(0) for _ in WeightGradients._fields])
    return dz, *made


def _weight_gradients(
    weights: Sequence[Tensor], needs: Sequence[bool], gradients: Sequence[Tensor]
) -> list[Tensor | None]:
    """``gradients`` (:class:`WeightGradients`) taken apart, in each weight's dtype, where it is needed."""
    if not any(needs):
        return [None] * len(weights)
    w, made = TriangleMultiplicationWeights(*weights), WeightGradients(*gradients)
    first, second = len(w.projection), len(w.projection) + len(w.gate)
    apart = TriangleMultiplicationWeights(
        norm_in_weight=made.norm_in[0],
        norm_in_bias=made.norm_in[1],
        projection=made.matrices_in[:first],
        gate=made.matrices_in[first:second],
        norm_out_weight=made.norm_out[0],
        norm_out_bias=made.norm_out[1],
        output=made.output,
        output_gate=made.matrices_in[second:],
    )
    return [t.to(weight.dtype) if need else None for t, weight, need in zip(apart, w, needs, strict=True)]


class _TriangleMultiplication(torch.autograd.Function):
    """The operator outside of ``torch.compile``, where a custom operator's dispatch costs 0.1 ms more."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, mask: Tensor, outgoing: bool, dtype: torch.dtype, *weights: Tensor
    ) -> Tensor:
        keep = any(ctx.needs_input_grad)
        out, saved = _run(z, mask, weights, outgoing, dtype, keep)
        if keep:
            ctx.save_for_backward(*saved, *weights)
            ctx.outgoing, ctx.dtype = outgoing, z.dtype
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        tensors = ctx.saved_tensors
        saved, weights = tensors[:7], tensors[7:]
        needs_z, _mask, _outgoing, _dtype, *needs = ctx.needs_input_grad
        wanted = (needs_z, any(needs))
        dz, *rest = _backward(grad, weights, saved, ctx.outgoing, ctx.dtype, wanted)
        return dz if needs_z else None, None, None, None, *_weight_gradients(weights, needs, rest)


_operator = torch.library.custom_op("megafold::triangle_multiplication", _forward, mutates_args=())
_operator_backward = torch.library.custom_op(
    "megafold::triangle_multiplication_backward", _backward, mutates_args=()
)


@_operator.register_fake
def _(
    z: Tensor, mask: Tensor, weights: Sequence[Tensor], outgoing: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    b, n, _n, _c_z = z.shape
    c_z, c = TriangleMultiplicationWeights(*weights).output.shape
    padded = blocks(n, PAD) * PAD
    positions = b * padded * padded

    def made(*shape: int, like: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=like, device=z.device)

    return (
        made(*z.shape),
        made(positions, c_z),
        made(positions, c),
        made(2, c * b, padded, padded),
        made(3, positions, like=torch.float32),
        made(4 * c + c_z, c_z),
        made(c_z, c),
        made(4 * c + 2 * c_z, like=torch.float32),
    )


@_operator_backward.register_fake
def _(
    grad: Tensor, weights: Sequence[Tensor], saved: Sequence[Tensor], outgoing: bool,
    dtype: torch.dtype, wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    w = TriangleMultiplicationWeights(*weights)
    c_z, c = w.output.shape

    def made(needed: bool, shape: tuple[int, ...], like: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(
            shape if needed else (0,), dtype=like if needed else torch.float32, device=grad.device
        )

    wants_z, wants_weights = wanted
    return (
        made(wants_z, tuple(grad.shape), dtype),
        made(wants_weights, (4 * c + c_z, c_z), w.projection.dtype),
        made(wants_weights, (2, c_z)),
        made(wants_weights, (c_z, c), w.output.dtype),
        made(wants_weights, (2, c)),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    z, _mask, weights, outgoing, _dtype = inputs
    ctx.save_for_backward(*output[1:], *weights)
    ctx.outgoing, ctx.dtype = outgoing, z.dtype
    ctx.set_materialize_grads(False)


def _operator_gradients(ctx: Any, grad: Tensor | None, *_others: None) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    saved, weights = list(tensors[:7]), list(tensors[7:])
    needs_z, _mask, needs, *_rest = ctx.needs_input_grad
    if grad is None:
        return None, None, [None] * len(weights), None, None
    wanted = [needs_z, any(needs)]
    dz, *rest = _operator_backward(grad, weights, saved, ctx.outgoing, ctx.dtype, wanted)
    return dz if needs_z else None, None, _weight_gradients(weights, needs, rest), None, None


def _no_second_derivative(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(
        "triangle_multiplication cannot be differentiated twice; use the eager back end for it"
    )


_operator.register_autograd(_operator_gradients, setup_context=_setup_context)
_operator_backward.register_autograd(_no_second_derivative)


def unsupported(
    z: Tensor, mask: Tensor, weights: TriangleMultiplicationWeights, outgoing: bool
) -> str | None:
    """Why the kernels cannot take these arguments; None: they can."""
    if z.device.type != "cuda" and not _INTERPRETED:
        return f"device {z.device.type}"
    if result_dtype(z) not in _DTYPES or any(t.dtype not in _DTYPES for t in (z, *weights)):
        return f"dtypes {z.dtype}, {', '.join(sorted({str(t.dtype) for t in weights}))}"
    if len({w.dtype for w in (weights.projection, weights.gate, weights.output, weights.output_gate)}) > 1:
        return "matrices of several dtypes"
    if mask.dtype != torch.bool:
        return f"mask of {mask.dtype}"
    c_z, c = weights.output.shape
    if c_z not in _CHANNELS or c not in _CHANNELS:
        return f"{c_z} and {c} channels"
    if z.numel() == 0:
        return "empty"
    if z.shape[0] * (z.shape[1] + PAD) ** 2 > _MOST_POSITIONS:
        return f"{z.shape[0]} times {z.shape[1]} tokens"
    return None


@register("triangle_multiplication", "triton", supports=unsupported)
def triangle_multiplication(
    z: Tensor, mask: Tensor, weights: TriangleMultiplicationWeights, outgoing: bool
) -> Tensor:
    """See :func:`megafold.trainer.ops.triangle.triangle_multiplication`."""
    dtype = result_dtype(z)
    mask = mask.expand(z.shape[:-1])
    if torch.compiler.is_compiling():
        out, *_ = _operator(z, mask, list(weights), outgoing, dtype)
        return out
    result: Tensor = _TriangleMultiplication.apply(z, mask, outgoing, dtype, *weights)
    return result
