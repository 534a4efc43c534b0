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
    call_for,
    close,
    contract,
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

#: What the backward needs: z standardised [R, Z]; a and b [2, C, B, NP, NP]; x standardised [C, B, NP, NP];
#: the reciprocal deviations of both [2, R]; the prepared matrices.
Saved = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]


def _run(
    z: Tensor, mask: Tensor, weights: Sequence[Tensor], outgoing: bool, dtype: torch.dtype, keep: bool
) -> tuple[Tensor, Saved]:
    """The output and, with ``keep``, what the backward needs."""
    w = TriangleMultiplicationWeights(*(t.contiguous() for t in weights))
    call = call_for(z.shape[0], z.shape[1], w.output, dtype)
    prepared = prepare(call, w)
    scales = torch.empty((2, call.positions), dtype=torch.float32, device=z.device)
    standard, ab = project(call, z.contiguous(), mask.contiguous().view(torch.uint8), prepared, scales[0])
    a, b = ab.unbind()
    x = torch.empty_like(a)
    if outgoing:
        contract(a, b.mT, x)
    else:
        contract(a.mT, b, x)
    out = close(call, standard, x, prepared, scales[1], keep=keep)
    return out, (standard, ab, x, scales, *prepared)


def _forward(
    z: Tensor, mask: Tensor, weights: Sequence[Tensor], outgoing: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The output, and what the backward needs."""
    out, saved = _run(z, mask, weights, outgoing, dtype, keep=True)
    return out, *saved


def _backward(
    grad: Tensor, mask: Tensor, weights: Sequence[Tensor], saved: Sequence[Tensor], outgoing: bool,
    dtype: torch.dtype, wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dz in ``dtype``; gradients of projection, gate and output_gate, stacked, and of norm_in; of output's.

    ``wanted``: dz, those of the input's parameters, those of the output's. What is not wanted is empty.
    """
    w = TriangleMultiplicationWeights(*(t.contiguous() for t in weights))
    standard, ab, x, scales, *matrices = saved
    prepared = Prepared(*matrices)
    call = call_for(grad.shape[0], grad.shape[1], w.output, x.dtype)
    mask = mask.contiguous().view(torch.uint8)
    dx, dgate, made = output_gradient(call, grad.contiguous(), standard, x, prepared, scales[1])
    dz, dinput, dnorm_in, doutput, dnorm_out = (scales.new_empty(0) for _ in range(5))
    if wanted[2]:
        norm = (w.norm_out_weight, w.norm_out_bias)
        doutput, dnorm_out = finish(made, [w.output] * 3, norm, w.output.dtype)
    a, b = ab.unbind()
    dab = torch.empty_like(ab)
    da, db = dab.unbind()
    if outgoing:
        contract(dx, b, da)
        contract(dx.mT, a, db)
    else:
        contract(b, dx.mT, da)
        contract(a, dx, db)
    del dx
    if wanted[0]:
        dz = input_gradient(call, standard, mask, dab, dgate, prepared, scales[0], dtype)
    if wanted[1]:
        made = weight_gradient(call, standard, mask, dab, dgate, prepared)
        stacked = [w.projection, w.gate, w.output_gate]
        dinput, dnorm_in = finish(made, stacked, (w.norm_in_weight, w.norm_in_bias), _common(*stacked))
    return dz, dinput, dnorm_in, doutput, dnorm_out


def _common(*tensors: Tensor) -> torch.dtype:
    """The dtype of all of them, float32 where they differ."""
    return tensors[0].dtype if len({t.dtype for t in tensors}) == 1 else torch.float32


def _wanted(needs_z: bool, needs_weights: Sequence[bool]) -> list[bool]:
    """As :func:`_backward` takes it."""
    needs = dict(zip(TriangleMultiplicationWeights._fields, needs_weights, strict=True))
    of_output = any([needs.pop("norm_out_weight"), needs.pop("norm_out_bias"), needs.pop("output")])
    return [needs_z, any(needs.values()), of_output]


def _weight_gradients(
    weights: Sequence[Tensor], needs: Sequence[bool], gradients: Sequence[Tensor]
) -> list[Tensor | None]:
    """What :func:`_backward` returns after dz, taken apart, in each weight's dtype."""
    w = TriangleMultiplicationWeights(*weights)
    dinput, dnorm_in, doutput, dnorm_out = gradients
    first, second = len(w.projection), len(w.projection) + len(w.gate)
    apart: dict[str, Tensor] = {}
    if dinput.numel():
        apart |= {"norm_in_weight": dnorm_in[0], "norm_in_bias": dnorm_in[1], "projection": dinput[:first],
                  "gate": dinput[first:second], "output_gate": dinput[second:]}  # fmt: skip
    if doutput.numel():
        apart |= {"norm_out_weight": dnorm_out[0], "norm_out_bias": dnorm_out[1], "output": doutput}
    return [
        apart[name].to(weight.dtype) if needed else None
        for name, weight, needed in zip(w._fields, w, needs, strict=True)
    ]


class _TriangleMultiplication(torch.autograd.Function):
    """The operator outside of ``torch.compile``, where a custom operator's dispatch costs 0.1 ms more."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, mask: Tensor, outgoing: bool, dtype: torch.dtype, *weights: Tensor
    ) -> Tensor:
        keep = any(ctx.needs_input_grad)
        out, saved = _run(z, mask, weights, outgoing, dtype, keep)
        if keep:
            ctx.save_for_backward(mask, *saved, *weights)
            ctx.outgoing, ctx.dtype = outgoing, z.dtype
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        mask, *tensors = ctx.saved_tensors
        saved, weights = tensors[:7], tensors[7:]
        needs_z, _mask, _outgoing, _dtype, *needs = ctx.needs_input_grad
        wanted = _wanted(needs_z, needs)
        dz, *rest = _backward(grad, mask, weights, saved, ctx.outgoing, ctx.dtype, wanted)
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
        made(2, c, b, padded, padded),
        made(c, b, padded, padded),
        made(2, positions, like=torch.float32),
        made(4 * c + c_z, c_z),
        made(c_z, c),
        made(4 * c + 2 * c_z, like=torch.float32),
    )


@_operator_backward.register_fake
def _(
    grad: Tensor, mask: Tensor, weights: Sequence[Tensor], saved: Sequence[Tensor], outgoing: bool,
    dtype: torch.dtype, wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    w = TriangleMultiplicationWeights(*weights)
    c_z, c = w.output.shape

    def made(needed: bool, shape: tuple[int, ...], like: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(
            shape if needed else (0,), dtype=like if needed else torch.float32, device=grad.device
        )

    return (
        made(wanted[0], tuple(grad.shape), dtype),
        made(wanted[1], (4 * c + c_z, c_z), _common(w.projection, w.gate, w.output_gate)),
        made(wanted[1], (2, c_z)),
        made(wanted[2], (c_z, c), w.output.dtype),
        made(wanted[2], (2, c)),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    z, mask, weights, outgoing, _dtype = inputs
    ctx.save_for_backward(mask, *output[1:], *weights)
    ctx.outgoing, ctx.dtype = outgoing, z.dtype
    ctx.set_materialize_grads(False)


def _operator_gradients(ctx: Any, grad: Tensor | None, *_others: None) -> tuple[Any, ...]:
    mask, *tensors = ctx.saved_tensors
    saved, weights = tensors[:7], tensors[7:]
    needs_z, _mask, needs, *_rest = ctx.needs_input_grad
    if grad is None:
        return None, None, [None] * len(weights), None, None
    wanted = _wanted(needs_z, needs)
    dz, *rest = _operator_backward(grad, mask, weights, saved, ctx.outgoing, ctx.dtype, wanted)
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
