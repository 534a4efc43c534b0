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
    Ending,
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
#: Positions are counted in 32 bits, and the last of the factors' three rows begins at twice their number.
_MOST_POSITIONS: Final = 2**30 - 256
#: Triton runs on the CPU.
_INTERPRETED: Final = bool(triton.knobs.runtime.interpret)

#: What the backward needs: z standardised [R, Z]; x standardised [R, C]; a and b [2, C·B, NP, NP]; the
#: factors [3, R]; the prepared matrices.
Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _run(
    z: Tensor, mask: Tensor, weights: Sequence[Tensor], ending: Ending, outgoing: bool, dtype: torch.dtype,
    backward: bool,
) -> tuple[Tensor, Saved]:  # fmt: skip
    """The output and, for the ``backward``, what it needs."""
    w, z = _contiguous(weights), z.contiguous()
    call = call_for(z.shape[0], z.shape[1], w.output, dtype, ending)
    prepared = prepare(call, w)
    standard, ab, factors = project(call, z, mask.contiguous().view(torch.uint8), prepared)
    x = contract(ab, outgoing)
    out, summed = close(call, z, ending.keep, standard, x, prepared, factors, backward=backward)
    return out, (standard, summed, ab, factors, *prepared)


def _contiguous(weights: Sequence[Tensor]) -> TriangleMultiplicationWeights:
    return TriangleMultiplicationWeights(*[w.contiguous() for w in weights])


def _forward(
    z: Tensor, mask: Tensor, weights: Sequence[Tensor], keep: Tensor | None, outgoing: bool, residual: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """The output, and what the backward needs."""
    out, saved = _run(z, mask, weights, Ending(keep, residual), outgoing, dtype, backward=True)
    return out, *saved


def _backward(
    grad: Tensor, weights: Sequence[Tensor], keep: Tensor | None, saved: Sequence[Tensor], outgoing: bool,
    residual: bool, dtype: torch.dtype, wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dz in ``dtype``, then :class:`WeightGradients`; ``wanted``: dz, those. What is not wanted is empty."""
    w, grad = _contiguous(weights), grad.contiguous()
    standard, summed, ab, factors, *matrices = saved
    prepared = Prepared(*matrices)
    call = call_for(grad.shape[0], grad.shape[1], w.output, ab.dtype, Ending(keep, residual))
    dx, dproducts = output_gradient(call, grad, keep, standard, summed, prepared, factors)
    dab = contract_gradient(dx, ab, outgoing)
    del dx
    wants_z, wants_weights = wanted
    if wants_z:
        dz = input_gradient(call, grad, standard, dab, dproducts, prepared, factors, dtype)
    else:
        dz = factors.new_empty(0)
    if wants_weights:
        parts = weight_gradient(call, standard, summed, dab, dproducts, prepared, factors)
        made = finish(call, parts, w)
    else:
        made = WeightGradients(*[factors.new_empty(0) for _ in WeightGradients._fields])
    return dz, *made


def split_weight_gradients(
    weights: Sequence[Tensor], needs: Sequence[bool], gradients: Sequence[Tensor]
) -> list[Tensor | None]:
    """``gradients`` (:class:`WeightGradients`) taken apart, in each weight's dtype, where it is needed."""
    if not any(needs):
        return [None] * len(weights)
    w, made = TriangleMultiplicationWeights(*weights), WeightGradients(*gradients)
    rows = [len(w.projection), len(w.gate), len(w.output_gate)]
    projection, gate, output_gate = made.matrices_in.split_with_sizes(rows)
    norm_in_weight, norm_in_bias = made.norm_in.unbind()
    norm_out_weight, norm_out_bias = made.norm_out.unbind()
    apart = TriangleMultiplicationWeights(
        norm_in_weight, norm_in_bias, projection, gate, norm_out_weight, norm_out_bias, made.output,
        output_gate,
    )  # fmt: skip
    return [t.to(weight.dtype) if need else None for t, weight, need in zip(apart, w, needs, strict=True)]


class _TriangleMultiplication(torch.autograd.Function):
    """The operator outside of ``torch.compile``, where a custom operator's dispatch costs 0.1 ms more."""

    @staticmethod
    def forward(
        ctx: Any,
        z: Tensor,
        mask: Tensor,
        ending: Ending,
        outgoing: bool,
        dtype: torch.dtype,
        *weights: Tensor,
    ) -> Tensor:
        backward = any(ctx.needs_input_grad)
        out, saved = _run(z, mask, weights, ending, outgoing, dtype, backward)
        if backward:
            ctx.save_for_backward(*saved, ending.keep, *weights)
            ctx.settings = outgoing, ending.residual, z.dtype
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        tensors = ctx.saved_tensors
        saved, keep, weights = tensors[:7], tensors[7], tensors[8:]
        needs_z, _mask, _ending, _outgoing, _dtype, *needs = ctx.needs_input_grad
        wanted = (needs_z, any(needs))
        outgoing, residual, dtype = ctx.settings
        dz, *rest = _backward(grad, weights, keep, saved, outgoing, residual, dtype, wanted)
        return dz if needs_z else None, None, None, None, None, *split_weight_gradients(weights, needs, rest)


_operator = torch.library.custom_op("megafold::triangle_multiplication", _forward, mutates_args=())
_operator_backward = torch.library.custom_op(
    "megafold::triangle_multiplication_backward", _backward, mutates_args=()
)


@_operator.register_fake
def _(
    z: Tensor, mask: Tensor, weights: Sequence[Tensor], keep: Tensor | None, outgoing: bool, residual: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
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
        made(2, c_z, c),
        made(4 * c + 2 * c_z, like=torch.float32),
    )


@_operator_backward.register_fake
def _(
    grad: Tensor, weights: Sequence[Tensor], keep: Tensor | None, saved: Sequence[Tensor], outgoing: bool,
    residual: bool, dtype: torch.dtype, wanted: Sequence[bool],
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
    z, _mask, weights, keep, outgoing, residual, _dtype = inputs
    ctx.save_for_backward(*output[1:], keep, *weights)
    ctx.settings = outgoing, residual, z.dtype
    ctx.set_materialize_grads(False)


def _operator_gradients(ctx: Any, grad: Tensor | None, *_others: None) -> tuple[Any, ...]:
    tensors = ctx.saved_tensors
    saved, keep, weights = list(tensors[:7]), tensors[7], list(tensors[8:])
    needs_z, _mask, needs, *_rest = ctx.needs_input_grad
    nothing = (None,) * 4
    if grad is None:
        return None, None, [None] * len(weights), *nothing
    wanted = [needs_z, any(needs)]
    dz, *rest = _operator_backward(grad, weights, keep, saved, *ctx.settings, wanted)
    return dz if needs_z else None, None, split_weight_gradients(weights, needs, rest), *nothing


def _no_second_derivative(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(
        "triangle_multiplication cannot be differentiated twice; use the eager back end for it"
    )


_operator.register_autograd(_operator_gradients, setup_context=_setup_context)
_operator_backward.register_autograd(_no_second_derivative)


def unsupported(
    z: Tensor, mask: Tensor, weights: TriangleMultiplicationWeights, outgoing: bool, *,
    keep: Tensor | None = None, residual: bool = False,
) -> str | None:  # fmt: skip
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
    z: Tensor, mask: Tensor, weights: TriangleMultiplicationWeights, outgoing: bool, *,
    keep: Tensor | None = None, residual: bool = False,
) -> Tensor:  # fmt: skip
    """See :func:`megafold.trainer.ops.triangle.triangle_multiplication`."""
    dtype = result_dtype(z)
    if (keep is None and not residual) or _ends_within(z, keep, dtype):
        return _apply(z, mask, weights, outgoing, Ending(keep, residual), dtype)
    out = _apply(z, mask, weights, outgoing, Ending(None, False), dtype)
    if keep is not None:
        out = out * keep
    return z + out if residual else out


def _ends_within(z: Tensor, keep: Tensor | None, dtype: torch.dtype) -> bool:
    """Whether dropout and residual are the kernels' work: what is not is left to PyTorch."""
    b, n, _n, c_z = z.shape
    if keep is not None and (keep.requires_grad or keep.shape not in ((b, 1, n, c_z), (b, n, 1, c_z))):
        return False
    return z.dtype == dtype


def _apply(
    z: Tensor, mask: Tensor, weights: TriangleMultiplicationWeights, outgoing: bool, ending: Ending,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    mask = mask.expand(z.shape[:-1])
    if ending.keep is not None:
        ending = ending._replace(keep=ending.keep.contiguous())
    if torch.compiler.is_compiling():
        out, *_ = _operator(z, mask, list(weights), ending.keep, outgoing, ending.residual, dtype)
        return out
    result: Tensor = _TriangleMultiplication.apply(z, mask, ending, outgoing, dtype, *weights)
    return result
