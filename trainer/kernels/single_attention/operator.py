"""The Pairformer's single attention with its backward, registered for the back end ``triton``.

What it computes is small beside the pair matrix, so the host's steps decide: all weights are cast by one
launch, products write where the next kernel reads, and autograd sees one function. Under ``torch.compile`` it
is made of the other operators.
"""

from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from megafold.trainer import ops
from megafold.trainer.kernels.evoattention.launches import (
    UNIT,
    Saved,
    Wanted,
    adds_bias_gradient,
    attend,
    in_bytes,
    key_gradient,
    prepare,
    query_gradient,
)
from megafold.trainer.kernels.gated_output.launches import gate_rows, gate_rows_gradients
from megafold.trainer.kernels.launch import Launch, blocks
from megafold.trainer.kernels.layernorm.operator import (
    MOST_CHANNELS,
    normalise,
    normalise_backward,
    sum_parts,
)
from megafold.trainer.kernels.layernorm_linear import launches as linear
from megafold.trainer.kernels.single_attention import kernel
from megafold.trainer.ops.precision import result_dtype
from megafold.trainer.ops.registry import register
from megafold.trainer.ops.single import SingleAttentionWeights, composed

#: Triton runs on the CPU.
_INTERPRETED: Final = bool(triton.knobs.runtime.interpret)
_PACK: Final = 1024
_REMEMBERED: Final = 1024


class _Sizes(NamedTuple):
    """B sequences of N tokens with C channels, H heads, Z channels of a pair."""

    b: int
    n: int
    c: int
    h: int
    z: int

    @property
    def parts(self) -> tuple[int, int, int, int]:
        """Numbers of the packed weights: q to gate, output, bias, offsets of q to gate."""
        return 4 * self.c * self.c, self.c * self.c, self.h * self.z, 4 * self.c

    def split(self, packed: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """The packed weights: [4·C, C], [C, C], [H, Z], [4·C]."""
        projections, output, bias, offsets = packed.split_with_sizes(self.parts)
        c = self.c
        return projections.view(4 * c, c), output.view(c, c), bias.view(self.h, self.z), offsets

    def heads(self, rows: Tensor) -> tuple[Tensor, ...]:
        """[B·N, k·C] as k of [B, 1, H, N, D]."""
        return rows.view(self.b, 1, self.n, -1, self.h, self.c // self.h).permute(3, 0, 1, 4, 2, 5).unbind()


def _sizes(s: Tensor, weights: SingleAttentionWeights) -> _Sizes:
    return _Sizes(*s.shape, *weights.bias.shape)


@lru_cache(_REMEMBERED)
def _plan_pack(sizes: _Sizes) -> Launch:
    total = sum(sizes.parts)
    numbers = (sizes.c * sizes.c, sizes.h * sizes.z, sizes.c, total)
    return Launch(kernel.pack_kernel, blocks(total, _PACK), numbers, {"BLOCK": _PACK}, {})


def _pack(sizes: _Sizes, w: SingleAttentionWeights, dtype: torch.dtype) -> Tensor:
    packed = torch.empty(sum(sizes.parts), dtype=dtype, device=w.q.device)
    sources = [t.contiguous() for t in (w.q, w.kv, w.gate, w.output, w.bias, w.q_bias)]
    _plan_pack(sizes)(*sources, packed)
    return packed


class _Kept(NamedTuple):
    """What the backward needs of the forward.

    Attributes:
        x: [B·N, C], the normalised input.
        projected: [B·N, 4·C]: q, k, v, gate.
        prepared: the bias as EvoFlash-3D reads it.
        attended: [B·N, 4·C], of which the attention's output is the first quarter: laid out as the queries'
            gradient will be.
        lse: see :func:`attend`.
        gated: [B·N, C], what the output layer sees.
        packed: all weights.
    """

    x: Tensor
    projected: Tensor
    prepared: Tensor
    attended: Tensor
    lse: Tensor
    gated: Tensor
    packed: Tensor


def _bias_parameters(w: SingleAttentionWeights, cast: Tensor) -> linear.Parameters:
    return linear.Parameters(w.bias_norm_weight, w.bias_norm_bias, w.bias, None, cast)


def _forward(
    s: Tensor, z: Tensor, mask: Tensor, w: SingleAttentionWeights, dtype: torch.dtype
) -> tuple[Tensor, _Kept]:
    """The update [B, N, C] in ``dtype``."""
    sizes = _sizes(s, w)
    n, c = sizes.n, sizes.c
    packed = _pack(sizes, w, dtype)
    projections, output, bias_weight, offsets = sizes.split(packed)
    x = normalise(s, w.norm_weight, w.norm_bias, dtype).view(-1, c)
    projected = torch.addmm(offsets, x, projections.T)
    way = linear.forward if linear.fits(z, bias_weight, dtype) else linear.composed_forward
    bias = way(z, _bias_parameters(w, bias_weight), dtype)
    ready = prepare(bias.permute(0, 3, 1, 2), mask, projected, Wanted(plain=True), (n, n))
    q, k, v, _ = sizes.heads(projected)
    attended = torch.empty_like(projected)
    _, lse = attend(q, k, v, ready.plain, ready.masked, out=sizes.heads(attended)[0])
    gated = torch.empty_like(x)
    gate_rows(attended[:, :c], projected[:, 3 * c :], gated)
    update = torch.mm(gated, output.T).view(s.shape)
    return update, _Kept(x, projected, ready.plain, attended, lse, gated, packed)


def _backward(
    grad: Tensor, s: Tensor, z: Tensor, mask: Tensor, w: SingleAttentionWeights, kept: _Kept, residual: bool
) -> tuple[Tensor, Tensor, SingleAttentionWeights]:
    """Gradients of s and z, and of the weights in float32 or the weights' own dtype."""
    sizes = _sizes(s, w)
    c, packed = sizes.c, kept.packed
    projections, output, bias_weight, _ = sizes.split(packed)
    dpacked = torch.empty_like(packed)
    dprojections, doutput, _, doffsets = sizes.split(dpacked)
    narrow = grad.to(packed.dtype).reshape(-1, c)
    torch.mm(narrow.T, kept.gated, out=doutput)
    dgated = torch.mm(narrow, output)
    dprojected, dattended = torch.empty_like(kept.projected), torch.empty_like(dgated)
    gate_rows_gradients(
        dgated, kept.attended[:, :c], kept.projected[:, 3 * c :], dattended, dprojected[:, 3 * c :]
    )
    dbias = _attention_gradients(sizes, mask, kept, dattended, dprojected)
    torch.mm(dprojected.T, kept.x, out=dprojections)
    torch.sum(dprojected[:, :c], 0, out=doffsets[:c])
    dx = torch.mm(dprojected, projections).view(s.shape)
    added = grad.contiguous() if residual else None
    ds, parts = normalise_backward(dx, s, w.norm_weight, True, True, added)
    dnorm_weight, dnorm_bias = torch.empty_like(w.norm_weight), torch.empty_like(w.norm_bias)
    sum_parts(parts, dnorm_weight, dnorm_bias)
    way = linear.backward if linear.fits(z, w.bias, packed.dtype) else linear.composed_backward
    dz, dbias_norm_weight, dbias_norm_bias, dbias_weight, _ = way(
        dbias, z, _bias_parameters(w, bias_weight), [True, True, True, True, False]
    )
    # One cast for all matrices.
    sections = (c * c, 2 * c * c, c * c, *sizes.parts[1:3], c, 3 * c)
    dq, dkv, dgate, doutput, _, dq_bias, _ = dpacked.to(w.q.dtype).split_with_sizes(sections)
    made = SingleAttentionWeights(
        dnorm_weight, dnorm_bias, dq.view(c, c), dq_bias, dkv.view(2 * c, c), dgate.view(c, c),
        dbias_norm_weight, dbias_norm_bias, dbias_weight, doutput.view(c, c),
    )  # fmt: skip
    return ds, dz, made


def _attention_gradients(
    sizes: _Sizes, mask: Tensor, kept: _Kept, dattended: Tensor, dprojected: Tensor
) -> Tensor:
    """Fills the first three quarters of ``dprojected``; returns dBias [B, N, N, H]."""
    n = sizes.n
    wanted = Wanted(transposed=True, zeros=adds_bias_gradient(dattended.device), again=True)
    ready = prepare(kept.prepared, mask, kept.projected, wanted, (n, n))
    q, k, v, _ = sizes.heads(kept.projected)
    dq, dk, dv, _ = sizes.heads(dprojected)
    out, (grad,) = sizes.heads(kept.attended)[0], sizes.heads(dattended)
    saved = Saved(q, k, v, ready.masked, out, kept.lse, mask)
    delta, dbias = query_gradient(grad, saved, kept.prepared, dq, ready.dbias, needs_bias=True)
    key_gradient(grad, saved, ready.transposed, delta, dk, dv)
    narrow = kept.projected.new_empty((sizes.b, n, n, sizes.h))
    return narrow.copy_(dbias[..., :n].permute(0, 2, 3, 1))


class _SingleAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, s: Tensor, z: Tensor, mask: Tensor, residual: bool, dtype: torch.dtype, *weights: Tensor
    ) -> Tensor:
        update, kept = _forward(s, z, mask, SingleAttentionWeights(*weights), dtype)
        if any(ctx.needs_input_grad):
            ctx.save_for_backward(s, z, mask, *weights, *kept)
        ctx.residual = residual
        ctx.set_materialize_grads(False)
        return s + update if residual else update

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        needs_s, needs_z, _mask, _residual, _dtype, *needs = ctx.needs_input_grad
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        s, z, mask, *rest = ctx.saved_tensors
        weights, kept = rest[: len(needs)], rest[len(needs) :]
        w = SingleAttentionWeights(*weights)
        ds, dz, made = _backward(grad, s, z, mask, w, _Kept(*kept), ctx.residual)
        typed = [t.to(w.dtype) if need else None for t, w, need in zip(made, weights, needs, strict=True)]
        return ds if needs_s else None, dz if needs_z else None, None, None, None, *typed


def unsupported(
    s: Tensor, z: Tensor, mask: Tensor, weights: SingleAttentionWeights, *, residual: bool = False
) -> str | None:
    """Why the kernels cannot take these arguments; None: they can."""
    if s.device.type != "cuda" and not _INTERPRETED:
        return f"device {s.device.type}"
    dtypes = {t.dtype for t in (s, z, *weights)} | {result_dtype(s)}
    if not dtypes.issubset(UNIT):
        return f"dtypes {', '.join(sorted(map(str, dtypes)))}"
    heads, c = weights.bias.shape[0], s.shape[-1]
    if c > MOST_CHANNELS or z.shape[-1] > MOST_CHANNELS or c // heads > 128:
        return f"{heads} heads on {c} channels, {z.shape[-1]} of pairs"
    return "empty" if s.numel() == 0 else None


@register("single_attention", "triton", supports=unsupported)
def single_attention(
    s: Tensor, z: Tensor, mask: Tensor, weights: SingleAttentionWeights, *, residual: bool = False
) -> Tensor:
    """See :func:`megafold.trainer.ops.single.single_attention`."""
    if torch.compiler.is_compiling():
        return composed(
            s, z, mask, weights, residual, ops.layernorm_linear, ops.evoattention, ops.gated_output
        )
    dtype = result_dtype(s)
    mask = in_bytes(mask).unsqueeze(1)
    result: Tensor = _SingleAttention.apply(s, z.contiguous(), mask, residual, dtype, *weights)
    return result
