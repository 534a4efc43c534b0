"""The transition of few rows of any width: the single representation's, where the host's steps decide.

There is no memory to save, so what the backward can use again is kept: the normalised rows and the weights as
the products read them. autograd sees one function.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megafold.trainer.kernels.differentiable import as_rows
from megafold.trainer.kernels.layernorm.operator import normalise, normalise_backward, sum_parts
from megafold.trainer.kernels.transition.composed import activate, activate_gradient
from megafold.trainer.kernels.transition.fused import cast
from megafold.trainer.ops.precision import full_precision


def transition(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    weight_in: Tensor,
    weight_out: Tensor,
    dtype: torch.dtype,
    *,
    residual: bool,
) -> Tensor:
    """The operator's result, whose products are taken in ``dtype``; ``residual``: add ``x``."""
    result: Tensor = _Transition.apply(x, norm_weight, norm_bias, weight_in, weight_out, dtype, residual)
    return result


class _Transition(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        norm_weight: Tensor,
        norm_bias: Tensor,
        weight_in: Tensor,
        weight_out: Tensor,
        dtype: torch.dtype,
        residual: bool,
    ) -> Tensor:
        rows = as_rows(x)
        w_in, w_out = cast(weight_in, weight_out, dtype)
        normal = normalise(rows, norm_weight, norm_bias, dtype)
        hidden = activate(torch.mm(normal, w_in.T))
        update = torch.mm(hidden, w_out.T).view(*x.shape[:-1], -1)
        ctx.save_for_backward(rows, norm_weight, norm_bias, normal, w_in, w_out)
        ctx.settings = residual, weight_in.dtype, weight_out.dtype, x.shape
        ctx.set_materialize_grads(False)
        return x + update if residual else update

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * 7
        rows, norm_weight, norm_bias, normal, w_in, w_out = ctx.saved_tensors
        residual, dtype_in, dtype_out, shape = ctx.settings
        wants_x, wants_scale, wants_shift, wants_in, wants_out, _, _ = ctx.needs_input_grad
        narrow = grad.to(normal.dtype).reshape(-1, w_out.shape[0])
        dx = dscale = dshift = None
        # Both weights' gradients in one piece, for one cast.
        flat = normal.new_empty(w_in.numel() + w_out.numel())
        din, dout = flat[: w_in.numel()].view_as(w_in), flat[w_in.numel() :].view_as(w_out)
        with full_precision(rows):
            both = torch.mm(normal, w_in.T)
            hidden = activate_gradient(both, torch.mm(narrow, w_out))
            if wants_out:
                torch.mm(narrow.T, hidden, out=dout)
            if wants_in:
                torch.mm(both.T, normal, out=din)
            if wants_x or wants_scale or wants_shift:
                dnormal = torch.mm(both, w_in)
                added = grad.contiguous() if residual else None
                wants_sums = wants_scale or wants_shift
                dx, parts = normalise_backward(dnormal, rows, norm_weight, wants_x, wants_sums, added)
                dx = dx.view(shape) if wants_x else None
                if wants_sums:
                    dscale, dshift = torch.empty_like(norm_weight), torch.empty_like(norm_bias)
                    sum_parts(parts, dscale, dshift)
        if dtype_in == dtype_out:
            wide = flat.to(dtype_in)
            din, dout = wide[: w_in.numel()].view_as(w_in), wide[w_in.numel() :].view_as(w_out)
        return (
            dx,
            dscale if wants_scale else None,
            dshift if wants_shift else None,
            din.to(dtype_in) if wants_in else None,
            dout.to(dtype_out) if wants_out else None,
            None,
            None,
        )
