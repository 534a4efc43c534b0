"""Adaptive layer norm as a torch operator with its backward, registered for the back end ``triton``.

The products of the conditioning are cuBLAS's; they are taken once for all the noised copies that share it.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megafold.trainer.kernels.adaln import kernel
from megafold.trainer.kernels.adaln.tiles import Tile, tiles
from megafold.trainer.kernels.differentiable import Differentiable, as_rows, gradient_like, no_gradient
from megafold.trainer.kernels.evoattention.tiles import architecture
from megafold.trainer.kernels.launch import Launcher, blocks
from megafold.trainer.kernels.layernorm.operator import (
    FLOATS,
    INTERPRETED,
    MOST_CHANNELS,
    normalise,
    normalise_backward,
    sum_parts,
)
from megafold.trainer.kernels.layernorm.tiles import padded
from megafold.trainer.ops.normalization import EPS
from megafold.trainer.ops.precision import full_precision, result_dtype
from megafold.trainer.ops.registry import register

_launch_forward = Launcher(kernel.forward_kernel)
_launch_backward = Launcher(kernel.backward_kernel)


@dataclass(frozen=True)
class Sharing:
    """``a``'s rows as [groups, copies, inner]: the copies share a row of conditioning."""

    groups: int
    copies: int
    inner: int


def _sharing(a: Tensor, s: Tensor) -> Sharing | None:
    """How ``s`` is broadcast against ``a``; None: along axes that do not lie next to each other."""
    shape = a.shape[:-1]
    sizes = [1] * (len(shape) - s.dim() + 1) + list(s.shape[:-1])
    shared = [i for i, (own, size) in enumerate(zip(sizes, shape, strict=True)) if own == 1 and size > 1]
    if not shared:
        return Sharing(1, 1, shape.numel())
    start, stop = shared[0], shared[-1] + 1
    if any(sizes[i] > 1 for i in range(start, stop)):
        return None
    return Sharing(shape[:start].numel(), shape[start:stop].numel(), shape[stop:].numel())


def _constants(tile: Tile, channels: int) -> dict[str, float]:
    return {"BM": tile.rows, "C": channels, "CP": padded(channels), "EPS": EPS}


def _spread(product: Tensor, a: Tensor, s: Tensor) -> Tensor:
    """A product of each row of ``s`` [rows, C] for each row of ``a`` instead."""
    return product.view(*s.shape[:-1], -1).expand(*a.shape[:-1], -1).reshape(-1, product.shape[-1])


def _gathered(gradient: Tensor, a: Tensor, s: Tensor) -> Tensor:
    """The gradient of what :func:`_spread` was given."""
    full = gradient.view(*a.shape[:-1], -1)
    return full.sum_to_size(*s.shape[:-1], full.shape[-1]).view(-1, full.shape[-1])


def modulate(
    a: Tensor, scale: Tensor, shift: Tensor, scale_bias: Tensor, sharing: Sharing, dtype: torch.dtype
) -> Tensor:
    """sigmoid(scale + scale_bias) · norm(a) + shift like ``a`` in ``dtype``; no autograd.

    scale, shift: [groups · inner, C], contiguous.
    """
    rows = as_rows(a)
    m, c = rows.shape
    out = torch.empty(a.shape, dtype=dtype, device=a.device)
    tile = tiles(architecture(a.device), a.element_size(), c).forward
    _launch_forward(
        blocks(m, tile.rows),
        (rows, scale, shift, scale_bias, out), (m, sharing.copies, sharing.inner, rows.stride(0)),
        _constants(tile, c), tile.options(),
    )  # fmt: skip
    return out


def modulate_backward(
    grad: Tensor, a: Tensor, scale: Tensor, scale_bias: Tensor, sharing: Sharing, *,
    want_input: bool, want_conditioning: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of a, scale and shift; those not wanted are empty. grad: like ``a``, contiguous."""
    rows = as_rows(a)
    count, c = scale.shape
    da = torch.empty(a.shape, dtype=a.dtype, device=a.device) if want_input else no_gradient(a)
    dscale = torch.empty_like(scale) if want_conditioning else no_gradient(scale)
    dshift = torch.empty_like(dscale)
    tile = tiles(architecture(a.device), a.element_size(), c).backward
    _launch_backward(
        blocks(count, tile.rows),
        (rows, scale, scale_bias, grad, da, dscale, dshift),
        (count, sharing.copies, sharing.inner, rows.stride(0)),
        _constants(tile, c) | {"INPUT": want_input, "CONDITIONING": want_conditioning}, tile.options(),
    )  # fmt: skip
    return da, dscale, dshift


def _forward(
    a: Tensor, s: Tensor, norm_weight: Tensor, scale_weight: Tensor, scale_bias: Tensor, shift_weight: Tensor,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    sharing = _sharing(a, s)
    with full_precision(a):
        normal = normalise(as_rows(s), norm_weight, None, dtype)
        scale, shift = normal @ scale_weight.to(dtype).T, normal @ shift_weight.to(dtype).T
    if sharing is None:
        scale, shift = _spread(scale, a, s), _spread(shift, a, s)
        sharing = Sharing(1, 1, len(scale))
    return modulate(a, scale, shift, scale_bias, sharing, dtype)


def _backward(
    grad: Tensor, a: Tensor, s: Tensor, norm_weight: Tensor, scale_weight: Tensor, scale_bias: Tensor,
    shift_weight: Tensor, wanted: list[bool],
) -> list[Tensor]:  # fmt: skip
    sharing = _sharing(a, s)
    with full_precision(a):
        normal = normalise(as_rows(s), norm_weight, None, grad.dtype)
        scale = normal @ scale_weight.to(grad.dtype).T
        rows = scale if sharing else _spread(scale, a, s)
        da, dscale, dshift = modulate_backward(
            grad, a, rows, scale_bias, sharing or Sharing(1, 1, len(rows)),
            want_input=wanted[0], want_conditioning=any(wanted[1:]),
        )  # fmt: skip
        if sharing is None and any(wanted[1:]):
            dscale, dshift = _gathered(dscale, a, s), _gathered(dshift, a, s)
        made = [da, no_gradient(a), no_gradient(a)]
        if wanted[1] or wanted[2]:
            dnormal = torch.addmm(
                dscale @ scale_weight.to(grad.dtype), dshift, shift_weight.to(grad.dtype)
            ).view(s.shape)
            made[1], parts = normalise_backward(dnormal, s, norm_weight, wanted[1], wanted[2])
            made[2] = gradient_like(norm_weight, wanted[2], a)
            if wanted[2]:
                sum_parts(parts, made[2], no_gradient(a))
        made.append((dscale.T @ normal).to(scale_weight.dtype) if wanted[3] else no_gradient(a))
        made.append(dscale.sum(0, dtype=torch.float32).to(scale_bias.dtype) if wanted[4] else no_gradient(a))
        made.append((dshift.T @ normal).to(shift_weight.dtype) if wanted[5] else no_gradient(a))
    return made


_operator = Differentiable("adaln", _forward, _backward, lambda a, *_others: a.shape)


def unsupported(
    a: Tensor, s: Tensor, norm_weight: Tensor, scale_weight: Tensor, scale_bias: Tensor, shift_weight: Tensor
) -> str | None:
    """Why the kernels cannot take these arguments; None: they can."""
    if a.device.type != "cuda" and not INTERPRETED:
        return f"device {a.device.type}"
    given = [t.dtype for t in (a, s, norm_weight, scale_weight, scale_bias, shift_weight)]
    if result_dtype(a) not in FLOATS or not FLOATS.issuperset(given):
        return f"dtypes {', '.join(map(str, given))}"
    if max(a.shape[-1], s.shape[-1]) > MOST_CHANNELS:
        return f"{a.shape[-1]} and {s.shape[-1]} channels"
    if s.dim() > a.dim() or any(
        own > size for own, size in zip(s.shape[-2::-1], a.shape[-2::-1], strict=False)
    ):
        return "conditioning of more rows than what is conditioned"
    return "empty" if a.numel() == 0 or s.numel() == 0 else None


@register("adaln", "triton", supports=unsupported)
def adaln(
    a: Tensor, s: Tensor, norm_weight: Tensor, scale_weight: Tensor, scale_bias: Tensor, shift_weight: Tensor
) -> Tensor:
    """See :func:`megafold.trainer.ops.normalization.adaln`."""
    return _operator(a, s, norm_weight, scale_weight, scale_bias, shift_weight, result_dtype(a))
