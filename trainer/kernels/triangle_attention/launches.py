"""The kernels of triangle attention's projections, launched on z as it lies."""

from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from megafold.trainer.kernels.evoattention.launches import LIMIT, UNIT, padded, precision
from megafold.trainer.kernels.evoattention.tiles import architecture
from megafold.trainer.kernels.gated_output.tiles import Tile
from megafold.trainer.kernels.launch import Launch, blocks
from megafold.trainer.kernels.triangle_attention import kernel
from megafold.trainer.kernels.triangle_attention.tiles import tiles
from megafold.trainer.ops.normalization import EPS

#: Widest z and widest q that a program holds.
WIDEST: Final = 256
_PACK: Final = 1024
#: Numbers that a program sums, and how many parts at a time.
_SUM, _STEP = 64, 64
#: Launches remembered for a kernel: far more than a model's shapes.
_REMEMBERED: Final = 1024
#: Sizes or strides.
Ints = tuple[int, ...]


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

    @property
    def packed(self) -> int:
        """Numbers that :func:`pack` gives."""
        return (4 * self.hd + self.hp) * self.c + self.c * self.hd

    @property
    def gradients(self) -> Ints:
        """Numbers of the gradients: bias layer and norm, q to gate, output."""
        return (self.hp + 2) * self.c, 4 * self.hd * self.c, self.c * self.hd

    def split(self, packed: Tensor) -> tuple[Tensor, Tensor]:
        """The projections' weight [4·HD + HP, C] and the output's [C, HD] of what :func:`pack` made."""
        projections, output = packed.split_with_sizes(((4 * self.hd + self.hp) * self.c, self.c * self.hd))
        return projections.view(-1, self.c), output.view(self.c, self.hd)

    def split_gradients(self, flat: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
        """What :func:`sum_parts` made, by weight: norm's weight and bias, qkv, gate, bias, output."""
        c, of_head = self.c, self.hd * self.c
        parts = (self.h * c, (self.hp - self.h) * c, c, c, 3 * of_head, of_head, of_head)
        bias, _padding, scale, shift, qkv, gate, output = flat.split_with_sizes(parts)
        return scale, shift, qkv.view(-1, c), gate.view(-1, c), bias.view(-1, c), output.view(c, self.hd)


class Norm(NamedTuple):
    """Parameters of the layer norm [C]."""

    weight: Tensor
    bias: Tensor


def _power_of_two(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def pack(sizes: Sizes, qkv: Tensor, gate: Tensor, bias: Tensor, out: Tensor, dtype: torch.dtype) -> Tensor:
    """All weights in ``dtype``, in one array: one launch instead of a cast for each."""
    packed = torch.empty(sizes.packed, dtype=dtype, device=qkv.device)
    _plan_pack(sizes)(qkv.contiguous(), gate.contiguous(), bias.contiguous(), out.contiguous(), packed)
    return packed


@lru_cache(_REMEMBERED)
def _plan_pack(sizes: Sizes) -> Launch:
    hd, c = sizes.hd, sizes.c
    numbers = (3 * hd * c, hd * c, sizes.h * c, c * hd, sizes.packed)
    return Launch(kernel.pack_kernel, blocks(sizes.packed, _PACK), numbers, {"BLOCK": _PACK}, {})


class _Call(NamedTuple):
    """All that a launch depends on beside tensors.

    Attributes:
        sizes: of the layers.
        shape: B, R and N.
        strides: of z, then of what else a kernel takes.
        dtype: of the products.
        device: of everything.
        precision: of the products, as the kernels take it.
    """

    sizes: Sizes
    shape: Ints
    strides: tuple[Ints, ...]
    dtype: torch.dtype
    device: torch.device
    precision: str

    @property
    def part(self) -> int:
        """Elements between q and k."""
        b, r, n = self.shape
        return b * r * n * self.sizes.hd

    @property
    def numbers(self) -> Ints:
        """The strides, one after the other, and :attr:`part`."""
        return (*(each for strides in self.strides for each in strides), self.part)

    def tile(self, role: str) -> Tile:
        """The role's tile."""
        chosen = tiles(architecture(self.device), self.dtype, _power_of_two(self.sizes.c))
        found: Tile = getattr(chosen, role)
        return found

    def tiles(self, tile: Tile) -> int:
        """How many tiles cover all positions."""
        b, r, n = self.shape
        return b * r * blocks(n, tile.rows)

    def constants(self, *, heads: bool = True) -> dict[str, Any]:
        """The constants that begin every kernel's list."""
        sizes = self.sizes
        return {"C": sizes.c, "CP": _power_of_two(sizes.c), "H": sizes.h, "D": sizes.d} | (
            {"HP": sizes.hp} if heads else {}
        )


def _call(z: Tensor, sizes: Sizes, dtype: torch.dtype, *others: Tensor | None) -> _Call:
    strides = tuple([(0, 0, 0) if x is None else x.stride()[:3] for x in (z, *others)])
    return _Call(sizes, tuple(z.shape[:3]), strides, dtype, z.device, precision(dtype))


def project(z: Tensor, norm: Norm, weight: Tensor, sizes: Sizes) -> tuple[Tensor, Tensor]:
    """q, k, v and gate [4, B, R, H, N, D], and the bias as EvoFlash-3D reads it.

    ``z`` [B, R, N, C], channels next to each other.
    """
    b, r, n, _ = z.shape
    projected = torch.empty((4, b, r, sizes.h, n, sizes.d), dtype=weight.dtype, device=z.device)
    bias = torch.empty((b, sizes.h, r, padded(n)), dtype=weight.dtype, device=z.device)
    _plan_project(_call(z, sizes, weight.dtype))(z, *norm, weight, projected, bias)
    return projected, bias


@lru_cache(_REMEMBERED)
def _plan_project(call: _Call) -> Launch:
    tile = call.tile("project")
    _, r, n = call.shape
    return Launch(
        kernel.project_kernel,
        call.tiles(tile),
        (r, n, padded(n), *call.numbers),
        call.constants() | {"BM": tile.rows, "BN": tile.columns, "SCALE": UNIT[call.dtype],
         "LIMIT": LIMIT[call.dtype], "EPS": EPS, "PRECISION": call.precision},
        tile.options(),
    )  # fmt: skip


def input_gradient(
    dprojected: Tensor, dbias: Tensor, residual: Tensor | None, z: Tensor, norm: Norm, weight: Tensor,
    sizes: Sizes, dz: Tensor,
) -> Tensor:  # fmt: skip
    """Fills ``dz`` [B, R, N, C], to which the gradient that the residual brings is added.

    Returns:
        [programs, HP + 2, C] float32, to be summed: gradients of the bias layer's weight, the norm's weight
        and its offset.
    """
    call = _call(z, sizes, weight.dtype, dz, residual)
    tile = call.tile("input_gradient")
    programs = min(tile.programs, call.tiles(tile))
    parts = torch.empty((programs, sizes.hp + 2, sizes.c), dtype=torch.float32, device=z.device)
    _plan_input(call, programs, residual is not None)(
        dprojected, dbias, dz if residual is None else residual, z, *norm, weight, dz, parts
    )
    return parts


@lru_cache(_REMEMBERED)
def _plan_input(call: _Call, programs: int, has_residual: bool) -> Launch:
    tile = call.tile("input_gradient")
    return Launch(
        kernel.input_gradient_kernel,
        programs,
        (*call.shape, padded(call.shape[2]), *call.numbers),
        call.constants() | {"BM": tile.rows, "BN": tile.columns, "EPS": EPS, "PRECISION": call.precision,
         "HAS_RESIDUAL": has_residual},
        tile.options(),
    )  # fmt: skip


def weight_gradient(dprojected: Tensor, z: Tensor, norm: Norm, sizes: Sizes) -> Tensor:
    """[splits, 4·HD, C] float32, to be summed: gradient of the weights of q, k, v and gate."""
    call = _call(z, sizes, dprojected.dtype)
    tile = call.tile("weight_gradient")
    splits = min(tile.programs, call.tiles(tile))
    parts = torch.empty((splits, 4 * sizes.hd, sizes.c), dtype=torch.float32, device=z.device)
    _plan_weight(call, splits)(dprojected, z, *norm, parts)
    return parts


@lru_cache(_REMEMBERED)
def _plan_weight(call: _Call, splits: int) -> Launch:
    tile = call.tile("weight_gradient")
    return Launch(
        kernel.weight_gradient_kernel,
        splits * blocks(4 * call.sizes.hd, tile.columns),
        (*call.shape, splits, *call.numbers),
        call.constants(heads=False)
        | {"BM": tile.rows, "BN": tile.columns, "EPS": EPS, "PRECISION": call.precision},
        tile.options(),
    )


def sum_parts(first: Tensor, second: Tensor, third: Tensor) -> Tensor:
    """Sums over the first axis of three arrays, flat and one after the other: one launch."""
    counts = tuple([x.numel() // len(x) for x in (first, second, third)])
    out = torch.empty(sum(counts), dtype=torch.float32, device=first.device)
    _plan_sum(counts, (len(first), len(second), len(third)))(first, second, third, out)
    return out


@lru_cache(_REMEMBERED)
def _plan_sum(counts: Ints, parts: Ints) -> Launch:
    programs = sum(blocks(count, _SUM) for count in counts)
    return Launch(kernel.sum_kernel, programs, (*counts, *parts), {"BLOCK": _SUM, "STEP": _STEP}, {})


def forget_plans() -> None:
    """Choose tiles anew: for whoever changes the tables."""
    for plan in (_plan_project, _plan_input, _plan_weight):
        plan.cache_clear()
