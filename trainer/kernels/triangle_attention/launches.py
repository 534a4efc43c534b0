"""The kernels of triangle attention's projections, launched on z as it lies."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from megafold.trainer.kernels.evoattention.launches import LIMIT, UNIT, padded, precision
from megafold.trainer.kernels.evoattention.tiles import architecture
from megafold.trainer.kernels.gated_output.tiles import Tile, tile_of
from megafold.trainer.kernels.launch import Launcher, blocks
from megafold.trainer.kernels.triangle_attention import kernel
from megafold.trainer.ops.normalization import EPS

#: Widest z and widest q that a program holds.
WIDEST: Final = 256
#: The name in the tables.
FAMILY: Final = "triangle_attention"
_PACK: Final = 1024

_launch_pack = Launcher(kernel.pack_kernel)
_launch_project = Launcher(kernel.project_kernel)
_launch_input_gradient = Launcher(kernel.input_gradient_kernel)
_launch_weight_gradient = Launcher(kernel.weight_gradient_kernel)


class Sizes(NamedTuple):
    """H heads of D channels over C channels of z."""

    c: int
    h: int
    d: int

    @property
    def hd(self) -> int:
        """Channels of all heads."""
        return self.h * self.d

    @property
    def hp(self) -> int:
        """Heads with padding: rows of the bias layer's weight."""
        return _power_of_two(self.h)

    def split(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """The projections' weight [4·HD + HP, C] and the output's [C, HD] of what :func:`pack` made."""
        before = (4 * self.hd + self.hp) * self.c
        return packed[:before].view(-1, self.c), packed[before:].view(self.c, self.hd)


class Norm(NamedTuple):
    """Parameters of the layer norm [C]."""

    weight: Tensor
    bias: Tensor


def _power_of_two(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def pack(sizes: Sizes, qkv: Tensor, gate: Tensor, bias: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """All weights in ``dtype``, in one array: one launch instead of a cast for each."""
    total = (4 * sizes.hd + sizes.hp) * sizes.c + sizes.c * sizes.hd
    packed = torch.empty(total, dtype=dtype, device=qkv.device)
    weights = [w.contiguous() for w in (qkv, gate, bias, out)]
    _launch_pack(
        blocks(total, _PACK),
        (*weights, packed),
        (*[w.numel() for w in weights], total),
        {"BLOCK": _PACK},
        {},
    )
    return packed


def _constants(sizes: Sizes) -> dict[str, Any]:
    return {"C": sizes.c, "CP": _power_of_two(sizes.c), "H": sizes.h, "D": sizes.d}


def _tile(z: Tensor, weight: Tensor, role: str) -> Tile:
    return tile_of(FAMILY, role, architecture(z.device), weight.dtype, _power_of_two(z.shape[-1]))


def project(z: Tensor, norm: Norm, weight: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """q, k, v and gate [4, B, R, H, N, D], and the bias as EvoFlash-3D reads it.

    ``z`` [B, R, N, C], channels next to each other.
    """
    b, r, n, _ = z.shape
    jp = padded(n)
    projected = torch.empty((4, b, r, sizes.h, n, sizes.d), dtype=weight.dtype, device=z.device)
    bias = torch.empty((b, sizes.h, r, jp), dtype=weight.dtype, device=z.device)
    tile = _tile(z, weight, "project")
    _launch_project(
        b * r * blocks(n, tile.rows),
        (z, *norm, weight, projected, bias),
        (r, n, jp, *z.stride()[:3], projected.stride(0)),
        _constants(sizes) | {"HP": sizes.hp, "BM": tile.rows, "BN": tile.columns, "SCALE": UNIT[weight.dtype],
         "LIMIT": LIMIT[weight.dtype], "EPS": EPS, "PRECISION": precision(weight.dtype)},
        tile.options(),
    )  # fmt: skip
    return projected, bias


def input_gradient(
    dprojected: Tensor, dbias: Tensor, residual: Tensor | None, z: Tensor, norm: Norm, weight: Tensor,
    sizes: Sizes, dz: Tensor,
) -> Tensor:  # fmt: skip
    """Fills ``dz`` [B, R, N, C], to which the gradient that the residual brings is added.

    Returns:
        [HP + 2, C] float32: gradients of the bias layer's weight, the norm's weight and its offset.
    """
    b, r, n, _ = z.shape
    tile = _tile(z, weight, "input_gradient")
    programs = min(tile.programs, b * r * blocks(n, tile.rows))
    parts = torch.empty((programs, sizes.hp + 2, sizes.c), dtype=torch.float32, device=z.device)
    _launch_input_gradient(
        programs,
        (dprojected, dbias, dz if residual is None else residual, z, *norm, weight, dz, parts),
        (b, r, n, dbias.shape[-1], *z.stride()[:3], *dz.stride()[:3], *_strides(residual),
         dprojected.stride(0)),
        _constants(sizes) | {"HP": sizes.hp, "BM": tile.rows, "BN": tile.columns, "EPS": EPS,
         "PRECISION": precision(weight.dtype), "HAS_RESIDUAL": residual is not None},
        tile.options(),
    )  # fmt: skip
    return parts.sum(0)


def _strides(x: Tensor | None) -> Sequence[int]:
    return (0, 0, 0) if x is None else x.stride()[:3]


def weight_gradient(dprojected: Tensor, z: Tensor, norm: Norm, sizes: Sizes) -> Tensor:
    """Gradient [4·HD, C] float32 of the weights of q, k, v and gate."""
    b, r, n, _ = z.shape
    tile = _tile(z, dprojected, "weight_gradient")
    splits = min(tile.programs, b * r * blocks(n, tile.rows))
    parts = torch.empty((splits, 4 * sizes.hd, sizes.c), dtype=torch.float32, device=z.device)
    _launch_weight_gradient(
        splits * blocks(4 * sizes.hd, tile.columns),
        (dprojected, z, *norm, parts),
        (b, r, n, splits, *z.stride()[:3], dprojected.stride(0)),
        _constants(sizes)
        | {"BM": tile.rows, "BN": tile.columns, "EPS": EPS, "PRECISION": precision(dprojected.dtype)},
        tile.options(),
    )
    return parts.sum(0)
