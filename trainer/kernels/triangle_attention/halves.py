"""Triangle attention within some rows of the pair matrix, whose bias comes from all of them.

The bias of the rows is a part of what all rows need, which other ranks may hold. Two operators are what
autograd sees: :class:`_Project` starts to send the rows' bias, :class:`_Attend` takes that of all; backwards
:class:`_Attend` starts to send the gradients of all rows' bias, before those of keys and values, and
:class:`_Project` takes that of its own.

Shapes: z [B, R, N, C], R rows of N; the prepared bias [B, H, R, N padded].
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megafold.trainer.kernels.evoattention.launches import (
    Saved,
    Wanted,
    adds_bias_gradient,
    attend,
    key_gradient,
    prepare,
    query_gradient,
)
from megafold.trainer.kernels.gated_output.launches import Layout, gate_and_project, gated_gradients
from megafold.trainer.kernels.triangle_attention.launches import (
    Norm,
    Sizes,
    input_gradient,
    pack,
    project,
    sum_parts,
    weight_gradient,
)
from megafold.trainer.kernels.triangle_attention.operator import unsupported
from megafold.trainer.ops.precision import result_dtype
from megafold.trainer.ops.triangle import TriangleAttentionWeights


class Exchange(Protocol):
    """What carries rows of the bias to the other ranks, and its gradient back."""

    def begin_gather(self, x: Tensor) -> None:
        """Start to send [...] to all P ranks."""

    def begin_scatter(self, gradient: Tensor) -> None:
        """Start to sum [P, ...] over the ranks, of which each gets its part."""

    def end(self) -> Tensor:
        """What has arrived of the last that was begun: [P, ...], or [...]."""


@dataclass
class _Way:
    """What the backward of the second half tells the first one's."""

    grad: Tensor | None = None
    dw_out: Tensor | None = None


class _Project(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, way: _Way, dtype: torch.dtype, z: Tensor, norm_weight: Tensor,
        norm_bias: Tensor, qkv: Tensor, gate: Tensor, bias: Tensor, out_weight: Tensor,
    ) -> Any:  # fmt: skip
        sizes = Sizes(z.shape[-1], bias.shape[0], gate.shape[0] // bias.shape[0])
        packed = pack(sizes, qkv, gate, bias, out_weight, dtype)
        projected, prepared = project(z, Norm(norm_weight, norm_bias), sizes.split(packed)[0], sizes)
        exchange.begin_gather(prepared)
        ctx.save_for_backward(z, norm_weight, norm_bias, packed)
        ctx.exchange, ctx.way, ctx.sizes = exchange, way, sizes
        ctx.dtypes = [t.dtype for t in (norm_weight, norm_bias, qkv, gate, bias, out_weight)]
        ctx.mark_non_differentiable(packed)
        return projected, z.new_zeros(()), packed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dprojected: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        z, norm_weight, norm_bias, packed = ctx.saved_tensors
        sizes, way, norm = ctx.sizes, ctx.way, Norm(norm_weight, norm_bias)
        of_weights = weight_gradient(dprojected, z, norm, sizes)
        dz = torch.empty(z.shape, dtype=z.dtype, device=z.device)
        weight, _ = sizes.split(packed)
        small = input_gradient(dprojected, ctx.exchange.end(), way.grad, z, norm, weight, sizes, dz)
        flat = sum_parts(small, of_weights, way.dw_out)
        way.grad = way.dw_out = None
        gradients = zip(sizes.split_gradients(flat), ctx.dtypes, strict=True)
        return None, None, None, dz, *(gradient.to(dtype) for gradient, dtype in gradients)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, exchange: Exchange, way: _Way, projected: Tensor, token: Tensor, z: Tensor, mask: Tensor,
        keep: Tensor | None, packed: Tensor,
    ) -> Tensor:  # fmt: skip
        h, n, d = projected.shape[3:]
        _, weight_out = Sizes(z.shape[-1], h, d).split(packed)
        masked = prepare(None, mask, projected, Wanted(), (n, n)).masked
        prepared = exchange.end().movedim(0, 2).flatten(2, 3)  # [B, H, N, N padded]
        q, k, v, gates = projected.unbind()
        attended, lse = attend(q, k, v, prepared, masked)
        out = torch.empty(z.shape, dtype=projected.dtype, device=z.device)
        gate_and_project(Layout(attended, gates), weight_out, z, keep, out)
        ctx.save_for_backward(projected, mask, keep, packed, prepared, attended, lse)
        ctx.exchange, ctx.way, ctx.ranks = exchange, way, n // z.shape[1]
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        projected, mask, keep, packed, prepared, attended, lse = ctx.saved_tensors
        h, n, d = projected.shape[3:]
        if grad.stride(-1) != 1:
            grad = grad.contiguous()
        _, weight_out = Sizes(grad.shape[-1], h, d).split(packed)
        q, k, v, gates = projected.unbind()
        dprojected = torch.empty_like(projected)
        dq, dk, dv, dgates = dprojected.unbind()
        dattended = torch.empty_like(attended)
        ctx.way.dw_out = gated_gradients(grad, Layout(attended, gates), weight_out, keep, dattended, dgates)
        wanted = Wanted(transposed=True, zeros=adds_bias_gradient(grad.device), again=True)
        ready = prepare(prepared, mask, projected, wanted, (n, n))
        saved = Saved(q, k, v, ready.masked, attended, lse, mask)
        delta, dbias = query_gradient(dattended, saved, prepared, dq, ready.dbias, needs_bias=True)
        ctx.exchange.begin_scatter(dbias.unflatten(2, (ctx.ranks, -1)).movedim(2, 0))
        key_gradient(dattended, saved, ready.transposed, delta, dk, dv)
        ctx.way.grad = grad
        return None, None, dprojected, grad.new_zeros(()), None, None, None, None


def unsupported_rows(z: Tensor, mask: Tensor, weights: TriangleAttentionWeights) -> str | None:
    """Why the kernels cannot take these rows; None: they can."""
    if z.dtype != result_dtype(z):
        return f"dtype {z.dtype} where the result is {result_dtype(z)}"
    return unsupported(z, mask, weights, starting=True)


def attend_rows(
    z: Tensor, mask: Tensor, weights: TriangleAttentionWeights, exchange: Exchange, keep: Tensor | None
) -> Tensor:
    """z and the update of its rows, each of which attends within itself.

    Args:
        z: [B, R, N, C].
        mask: [B, R, N] boolean.
        weights: the parameters.
        exchange: carries the bias, for this call alone.
        keep: dropout's factors, broadcast against ``z``, or None for none.

    Returns:
        [B, R, N, C].
    """
    z, way = z.contiguous(), _Way()
    projected, token, packed = _Project.apply(exchange, way, result_dtype(z), z, *weights)
    out: Tensor = _Attend.apply(
        exchange, way, projected, token, z.detach(), mask.expand(z.shape[:-1]), keep, packed
    )
    return out
