"""The gated output's kernels, launched on tensors that are addressed by strides."""

from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from megafold.trainer.kernels.evoattention.launches import precision
from megafold.trainer.kernels.evoattention.tiles import architecture
from megafold.trainer.kernels.gated_output import kernel
from megafold.trainer.kernels.gated_output.tiles import Tile, tiles
from megafold.trainer.kernels.launch import Launch, blocks, shared_memory

#: Widest input and output that a program holds.
WIDEST: Final = 256
#: Bytes of shared memory that a program needs beside the weight; on AMD one takes the other's place.
_BESIDE_WEIGHT: Final = 0 if torch.version.hip else 24 * 1024
#: The tile of the gate alone: bound by memory, it differs little between GPUs.
_GATED_ROWS, _GATED_CHANNELS = 8, 128

#: Launches remembered for a kernel: far more than a model's shapes.
_REMEMBERED: Final = 1024
#: Sizes or strides.
Ints = tuple[int, ...]


class Layout(NamedTuple):
    """How positions and channels lie in memory.

    Attributes:
        heads: [B, R, H, N, D] view of the gated input; likewise ``gate``. Channels lie next to each other.
        gate: see ``heads``.
    """

    heads: Tensor
    gate: Tensor


def _power_of_two(width: int) -> int:
    return max(16, 1 << (width - 1).bit_length())


def _strides(x: Tensor | None) -> Ints:
    """Strides of b, r and n, 0 where an axis is shared."""
    if x is None:
        return 0, 0, 0
    return tuple([0 if size == 1 else stride for size, stride in zip(x.shape[:3], x.stride(), strict=False)])


def holds(width_in: int, width_out: int, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a program's registers and shared memory hold a weight of these widths."""
    if max(width_in, width_out) > WIDEST:
        return False
    weight = _power_of_two(width_in) * _power_of_two(width_out) * dtype.itemsize
    return weight + _BESIDE_WEIGHT <= shared_memory(device)


class _Call(NamedTuple):
    """All that a launch depends on beside tensors.

    Attributes:
        shape: B, R, H, N and D.
        out: C.
        strides: of everything, in the kernel's order.
        dtype: of the product.
        device: of everything.
        precision: of the product, as the kernels take it.
    """

    shape: Ints
    out: int
    strides: tuple[Ints, ...]
    dtype: torch.dtype
    device: torch.device
    precision: str

    @property
    def numbers(self) -> Ints:
        """The strides, one after the other."""
        return tuple([each for strides in self.strides for each in strides])

    def tile(self, role: str) -> Tile:
        """The role's tile."""
        widest = _power_of_two(max(self.shape[2] * self.shape[4], self.out))
        found: Tile = getattr(tiles(architecture(self.device), self.dtype, widest), role)
        return found

    def constants(self, tile: Tile) -> dict[str, Any]:
        """The constants that begin both kernels' lists."""
        _, _, h, _, d = self.shape
        return {
            "H": h, "D": d, "KP": _power_of_two(h * d), "C": self.out, "CP": _power_of_two(self.out),
            "BM": tile.rows,
        }  # fmt: skip

    def slices(self, tile: Tile) -> int:
        """Programs of the backward that share a tile's positions, and the channels of x among them."""
        width = _power_of_two(self.shape[2] * self.shape[4])
        return width // min(tile.columns, width)


def _call(layout: Layout, weight: Tensor, *strides: Ints) -> _Call:
    heads, dtype = layout.heads, weight.dtype
    every = (heads.stride()[:4], layout.gate.stride()[:4], *strides)
    return _Call(tuple(heads.shape), weight.shape[0], every, dtype, heads.device, precision(dtype))


def gate_and_project(
    layout: Layout, weight: Tensor, residual: Tensor | None, keep: Tensor | None, out: Tensor
) -> None:
    """Fills ``out`` [B, R, N, C] with residual + keep · Linear(sigmoid(gate) · x).

    ``residual`` and ``keep`` [B, R, N, C], either may be shared along an axis (of size 1) or None; ``weight``
    [C, H·D] in the dtype of the product.
    """
    call = _call(layout, weight, _strides(residual), _strides(keep), _strides(out))
    _plan_forward(call, residual is not None, keep is not None)(
        layout.heads, layout.gate, weight, out if residual is None else residual,
        out if keep is None else keep, out,
    )  # fmt: skip


@lru_cache(_REMEMBERED)
def _plan_forward(call: _Call, has_residual: bool, has_keep: bool) -> Launch:
    tile = call.tile("forward")
    b, r, _, n, _ = call.shape
    return Launch(
        kernel.forward_kernel,
        b * r * blocks(n, tile.rows),
        (r, n, *call.numbers),
        call.constants(tile)
        | {"PRECISION": call.precision, "HAS_RESIDUAL": has_residual, "HAS_KEEP": has_keep},
        tile.options(),
    )


def gated_gradients(
    grad: Tensor, layout: Layout, weight: Tensor, keep: Tensor | None, dx: Tensor, dgate: Tensor
) -> Tensor:
    """Fills ``dx`` and ``dgate`` [B, R, H, N, D]; returns dW [programs, C, H·D] in float32, to be summed.

    ``grad`` [B, R, N, C].
    """
    b, r, h, n, d = layout.heads.shape
    call = _call(layout, weight, dx.stride()[:4], dgate.stride()[:4], _strides(keep), _strides(grad))
    tile = call.tile("backward")
    slices = call.slices(tile)
    sums = min(max(1, tile.programs // slices), b * r * blocks(n, tile.rows))
    parts = torch.empty((sums, weight.shape[0], h * d), dtype=torch.float32, device=grad.device)
    _plan_backward(call, sums * slices, keep is not None)(
        grad, layout.heads, layout.gate, weight, grad if keep is None else keep, dx, dgate, parts
    )
    return parts


@lru_cache(_REMEMBERED)
def _plan_backward(call: _Call, programs: int, has_keep: bool) -> Launch:
    tile = call.tile("backward")
    b, r, _, n, _ = call.shape
    columns = _power_of_two(call.shape[2] * call.shape[4]) // call.slices(tile)
    return Launch(
        kernel.backward_kernel,
        programs,
        (b, r, n, *call.numbers),
        call.constants(tile)
        | {"BK": columns, "PRECISION": call.precision, "HAS_KEEP": has_keep, "FETCH": tile.fetch},
        tile.options(),
    )


@lru_cache(_REMEMBERED)
def _plan_gate(function: Any, rows: int, channels: int, strides: Ints) -> Launch:
    programs = blocks(rows, _GATED_ROWS) * blocks(channels, _GATED_CHANNELS)
    sizes = {"BM": _GATED_ROWS, "BC": _GATED_CHANNELS}
    return Launch(function, programs, (rows, channels, *strides), sizes, {"num_warps": 4})


def gate_rows(x: Tensor, gate: Tensor, out: Tensor) -> None:
    """Fills ``out``, contiguous, with sigmoid(gate) · x, all [rows, C], channels next to each other."""
    _plan_gate(kernel.gate_kernel, *x.shape, (x.stride(0), gate.stride(0)))(x, gate, out)


def gate_rows_gradients(grad: Tensor, x: Tensor, gate: Tensor, dx: Tensor, dgate: Tensor) -> None:
    """Fills ``dx`` and ``dgate`` of :func:`gate_rows`; ``grad`` and ``dx`` are contiguous."""
    strides = (x.stride(0), gate.stride(0), dgate.stride(0))
    _plan_gate(kernel.gate_gradient_kernel, *x.shape, strides)(grad, x, gate, dx, dgate)


def forget_plans() -> None:
    """Choose tiles anew: for whoever changes the tables."""
    for plan in (_plan_forward, _plan_backward):
        plan.cache_clear()
