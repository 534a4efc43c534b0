"""Dropout and residual as a torch operator with its backward, registered for the back end ``triton``."""

from functools import lru_cache
from typing import Any, Final

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from megafold.trainer.kernels.dropout_add import kernel
from megafold.trainer.kernels.launch import Launch, blocks
from megafold.trainer.ops.registry import register

#: Triton runs on the CPU.
_INTERPRETED: Final = bool(triton.knobs.runtime.interpret)
#: Elements of a tile: bound by memory alone, it differs little between GPUs.
_ELEMENTS: Final = 4096
_WIDEST: Final = 1024
_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_REMEMBERED: Final = 1024


@lru_cache(_REMEMBERED)
def _plan(shape: tuple[int, ...], keep: tuple[int, ...], has_residual: bool) -> Launch:
    b, r, n, c = shape
    padded = 1 << (c - 1).bit_length()
    tile = max(1, _ELEMENTS // padded)
    return Launch(
        kernel.dropout_add_kernel,
        b * r * blocks(n, tile),
        (r, n, *keep),
        {"C": c, "CP": padded, "BM": tile, "HAS_RESIDUAL": has_residual},
        {"num_warps": 4},
    )


def _strides(keep: Tensor) -> tuple[int, ...]:
    """Of b, r and n, 0 where an axis is shared."""
    return tuple([0 if size == 1 else s for size, s in zip(keep.shape[:3], keep.stride(), strict=False)])


class _DropoutAdd(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, residual: Tensor, x: Tensor, keep: Tensor) -> Tensor:
        x, residual = x.contiguous(), residual.contiguous()
        out = torch.empty(x.shape, dtype=torch.promote_types(residual.dtype, x.dtype), device=x.device)
        _plan(tuple(x.shape), _strides(keep), True)(x, residual, keep, out)
        ctx.save_for_backward(keep)
        ctx.dtypes = residual.dtype, x.dtype
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None
        (keep,) = ctx.saved_tensors
        of_residual, of_x = ctx.dtypes
        grad = grad.contiguous()
        dx = torch.empty(grad.shape, dtype=of_x, device=grad.device)
        _plan(tuple(grad.shape), _strides(keep), False)(grad, grad, keep, dx)
        return grad.to(of_residual), dx, None


def unsupported(residual: Tensor, x: Tensor, keep: Tensor) -> str | None:
    """Why the kernels cannot take these arguments; None: they can."""
    if x.device.type != "cuda" and not _INTERPRETED:
        return f"device {x.device.type}"
    if any(t.dtype not in _DTYPES for t in (residual, x, keep)):
        return f"dtypes {residual.dtype}, {x.dtype}, {keep.dtype}"
    if x.ndim != 4 or x.shape != residual.shape or keep.ndim != 4 or keep.stride(-1) != 1:
        return f"shapes {tuple(residual.shape)}, {tuple(x.shape)}, {tuple(keep.shape)}"
    if x.shape[-1] > _WIDEST or keep.shape[-1] != x.shape[-1]:
        return f"{x.shape[-1]} channels"
    return "empty" if x.numel() == 0 else None


@register("dropout_add", "triton", supports=unsupported)
def dropout_add(residual: Tensor, x: Tensor, keep: Tensor) -> Tensor:
    """See :func:`megafold.trainer.ops.gated_output.dropout_add`."""
    if torch.compiler.is_compiling() or keep.requires_grad:
        return residual + x * keep  # Inductor makes one kernel of it itself
    result: Tensor = _DropoutAdd.apply(residual, x, keep)
    return result
