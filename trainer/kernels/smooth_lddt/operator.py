"""Smooth lDDT as a torch operator with its backward, registered for the back end ``triton``."""

from functools import lru_cache
from typing import Any, Final

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from megafold.trainer.kernels.launch import Launch, blocks
from megafold.trainer.kernels.smooth_lddt import kernel
from megafold.trainer.ops.registry import register
from megafold.trainer.ops.smooth_lddt import mean_of_pairs, smooth_lddt

#: Triton runs on the CPU.
_INTERPRETED: Final = bool(triton.knobs.runtime.interpret)
#: Atoms of a tile, both ways. Wider tiles take more registers, and fewer of them have no pair that counts.
_TILE: Final = 16
_REMEMBERED: Final = 1024


@lru_cache(_REMEMBERED)
def _plan(copies: int, of_a_sample: int, n: int, with_gradient: bool) -> Launch:
    return Launch(
        kernel.smooth_lddt_kernel,
        copies * blocks(n, _TILE),
        (of_a_sample, n),
        {"BM": _TILE, "BN": _TILE, "WITH_GRADIENT": with_gradient},
        {"num_warps": 2},
    )


class _SmoothLddt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, predicted: Tensor, truth: Tensor, radius: Tensor) -> Tensor:
        b, s, n, _ = predicted.shape
        wanted = ctx.needs_input_grad[0]
        predicted = predicted.contiguous()
        # Not one array: where the second began would be another variant of the kernel for some lengths.
        score, count = predicted.new_empty(b, s, n), predicted.new_empty(b, s, n)
        gradient = torch.empty_like(predicted) if wanted else score
        launch = _plan(b * s, s, n, wanted)
        launch(predicted, truth.contiguous(), radius.contiguous(), score, count, gradient)
        total = count.sum(-1)
        if wanted:
            ctx.save_for_backward(gradient, total)
        return mean_of_pairs(score.sum(-1), total)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        gradient, total = ctx.saved_tensors
        return (grad / total.clamp(min=1))[..., None, None] * gradient, None, None


def unsupported(predicted: Tensor, truth: Tensor, radius: Tensor, copies_at_once: int = 1) -> str | None:
    """Why the kernel cannot take these arguments; None: it can."""
    if predicted.device.type != "cuda" and not _INTERPRETED:
        return f"device {predicted.device.type}"
    if any(t.dtype != torch.float32 for t in (predicted, truth, radius)):
        return f"dtypes {predicted.dtype}, {truth.dtype}, {radius.dtype}"
    return "empty" if predicted.numel() == 0 else None


@register("smooth_lddt", "triton", supports=unsupported)
def smooth_lddt_in_one(predicted: Tensor, truth: Tensor, radius: Tensor, copies_at_once: int = 1) -> Tensor:
    """See :func:`megafold.trainer.ops.smooth_lddt.smooth_lddt`."""
    if torch.compiler.is_compiling() or truth.requires_grad:
        return smooth_lddt.naive(predicted, truth, radius, copies_at_once)
    result: Tensor = _SmoothLddt.apply(predicted, truth, radius)
    return result
