"""Triangle multiplication of some rows of the pair matrix, whose product is the caller's.

The kernels before and after the product work position by position, so they take any rows; the product needs
all of them, which other ranks may hold. Two operators are what autograd sees, with the caller's own between
them: :class:`_Project` gives a and b of the rows, :class:`_Close` takes x of the rows.

Shapes: z [1, I, N, C_z], I rows of N; a and b [2, C, I, N]; x [C, I, N].
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megafold.trainer.kernels.triangle_multiplication.launches import (
    PAD,
    Call,
    Ending,
    Prepared,
    close,
    finish,
    input_gradient,
    output_gradient,
    prepare,
    project,
    weight_gradient,
)
from megafold.trainer.kernels.triangle_multiplication.operator import split_weight_gradients, unsupported
from megafold.trainer.ops.precision import result_dtype
from megafold.trainer.ops.triangle import TriangleMultiplicationWeights


@dataclass(frozen=True)
class _RowsCall(Call):
    """A call for ``rows`` rows of one matrix; both they and N are multiples of 8, so nothing is padded."""

    rows: int

    @cached_property
    def positions(self) -> int:
        """R."""
        return self.rows * self.n

    @cached_property
    def hidden(self) -> tuple[int, int, int]:
        """Shape of a, b and x."""
        return self.c, self.rows, self.n

    @cached_property
    def shape(self) -> tuple[int, int, int, int]:
        """Of z and the output."""
        return 1, self.rows, self.n, self.z


_rows_call = cache(_RowsCall)


@dataclass
class _Way:
    """What the backward of the second half tells the first one's."""

    grad: Tensor | None = None
    dproducts: Tensor | None = None
    summed: Tensor | None = None


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _RowsCall, way: _Way, z: Tensor, mask: Tensor, *weights: Tensor) -> Any:
        w = TriangleMultiplicationWeights(*[weight.contiguous() for weight in weights])
        prepared = prepare(call, w)
        standard, ab, factors = project(call, z, mask.contiguous().view(torch.uint8), prepared)
        ctx.save_for_backward(standard, factors, *prepared, *weights)
        ctx.call, ctx.way, ctx.dtype = call, way, z.dtype
        ctx.mark_non_differentiable(standard, factors, *prepared)
        return ab, z.new_zeros(()), standard, factors, *prepared

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dab: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        standard, factors, packed, closing, offsets, *weights = ctx.saved_tensors
        call, way, prepared = ctx.call, ctx.way, Prepared(packed, closing, offsets)
        _call, _way, needs_z, _mask, *needs = ctx.needs_input_grad
        dab, dz = dab.contiguous(), None
        if needs_z:
            dz = input_gradient(call, way.grad, standard, dab, way.dproducts, prepared, factors, ctx.dtype)
        made: list[Tensor | None] = [None] * len(weights)
        if any(needs):
            w = TriangleMultiplicationWeights(*[weight.contiguous() for weight in weights])
            parts = weight_gradient(call, standard, way.summed, dab, way.dproducts, prepared, factors)
            made = split_weight_gradients(weights, needs, finish(call, parts, w))
        way.grad = way.dproducts = way.summed = None
        return None, None, dz, None, *made


class _Close(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, call: _RowsCall, way: _Way, x: Tensor, token: Tensor, z: Tensor, keep: Tensor | None,
        standard: Tensor, factors: Tensor, *matrices: Tensor,
    ) -> Tensor:  # fmt: skip
        backward = any(ctx.needs_input_grad)
        prepared = Prepared(*matrices)
        out, summed = close(call, z, keep, standard, x.contiguous(), prepared, factors, backward=backward)
        ctx.save_for_backward(standard, summed, factors, keep, *matrices)
        ctx.call, ctx.way = call, way
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        standard, summed, factors, keep, *matrices = ctx.saved_tensors
        grad = grad.contiguous()
        dx, dproducts = output_gradient(ctx.call, grad, keep, standard, summed, Prepared(*matrices), factors)
        ctx.way.grad, ctx.way.dproducts, ctx.way.summed = grad, dproducts, summed
        return None, None, dx, grad.new_zeros(()), *(None,) * (len(ctx.needs_input_grad) - 4)


def unsupported_rows(z: Tensor, mask: Tensor, weights: TriangleMultiplicationWeights) -> str | None:
    """Why the kernels cannot take these rows; None: they can."""
    batch, rows, n, _ = z.shape
    if batch != 1 or rows % PAD or n % PAD or rows > n:
        return f"{batch} times {rows} rows of {n}"
    if z.dtype != result_dtype(z):
        return f"dtype {z.dtype} where the result is {result_dtype(z)}"
    return unsupported(z, mask, weights, True)


def multiply_rows(
    z: Tensor,
    mask: Tensor,
    weights: TriangleMultiplicationWeights,
    product: Callable[[Tensor], Tensor],
    keep: Tensor | None,
) -> Tensor:
    """z and the update of its rows.

    Args:
        z: [1, I, N, C_z].
        mask: [1, I, N] boolean.
        weights: the parameters.
        product: from a and b [2, C, I, N], their rows of all channels, to x [C, I, N]; differentiable.
        keep: dropout's factors [1, 1, N, C_z], or None for none.

    Returns:
        [1, I, N, C_z].
    """
    z, dtype = z.contiguous(), result_dtype(z)
    kept = None if keep is None else keep.contiguous()
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    dropped = Ending(kept, True).dropped
    sizes = weights.output.shape
    call = _rows_call(1, z.shape[2], *sizes, dtype, z.device, tf32, dropped, True, z.shape[1])
    way = _Way()
    ab, token, *kept_for = _Project.apply(call, way, z, mask.expand(z.shape[:-1]), *weights)
    out: Tensor = _Close.apply(call, way, product(ab), token, z.detach(), kept, *kept_for)
    return out
