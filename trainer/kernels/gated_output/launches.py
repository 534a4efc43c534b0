"""The gated output's kernels, launched on tensors that are addressed by strides."""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from megafold.trainer.kernels.evoattention.launches import precision
from megafold.trainer.kernels.evoattention.tiles import architecture
from megafold.trainer.kernels.gated_output import kernel
from megafold.trainer.kernels.gated_output.tiles import Tile, tile_of
from megafold.trainer.kernels.launch import Launcher, blocks

#: Widest input and output that a program holds.
WIDEST: Final = 256
#: The name in the tables.
FAMILY: Final = "gated_output"

_launch_forward = Launcher(kernel.forward_kernel)
_launch_backward = Launcher(kernel.backward_kernel)


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


def _strides(x: Tensor | None, axes: int) -> Sequence[int]:
    """Strides of all axes but the channels', 0 where an axis is shared."""
    if x is None:
        return (0,) * axes
    return [0 if size == 1 else stride for size, stride in zip(x.shape[:-1], x.stride()[:-1], strict=True)]


def _sizes(layout: Layout, weight: Tensor, tile: int) -> dict[str, Any]:
    _, _, h, _, d = layout.heads.shape
    return {
        "H": h,
        "D": d,
        "KP": _power_of_two(h * d),
        "C": weight.shape[0],
        "CP": _power_of_two(weight.shape[0]),
        "BM": tile,
        "PRECISION": precision(weight.dtype),
    }


def _tile(layout: Layout, weight: Tensor, role: str) -> Tile:
    widest = _power_of_two(max(weight.shape))
    return tile_of(FAMILY, role, architecture(layout.heads.device), weight.dtype, widest)


def gate_and_project(
    layout: Layout, weight: Tensor, residual: Tensor | None, keep: Tensor | None, out: Tensor
) -> None:
    """Fills ``out`` [B, R, N, C] with residual + keep · Linear(sigmoid(gate) · x).

    ``residual`` and ``keep`` [B, R, N, C], either may be shared along an axis (expanded, or of size 1) or
    None; ``weight`` [C, H·D] in the dtype of the product.
    """
    b, r, _, n, _ = layout.heads.shape
    tile = _tile(layout, weight, "forward")
    _launch_forward(
        b * r * blocks(n, tile.rows),
        (layout.heads, layout.gate, weight, out if residual is None else residual,
         out if keep is None else keep, out),
        (r, n, *_inner(layout.heads), *_inner(layout.gate), *_strides(residual, 3), *_strides(keep, 3),
         *_strides(out, 3)),
        _sizes(layout, weight, tile.rows)
        | {"HAS_RESIDUAL": residual is not None, "HAS_KEEP": keep is not None},
        tile.options(),
    )  # fmt: skip


def gated_gradients(
    grad: Tensor, layout: Layout, weight: Tensor, keep: Tensor | None, dx: Tensor, dgate: Tensor
) -> Tensor:
    """Fills ``dx`` and ``dgate`` [B, R, H, N, D]; returns dW [C, H·D] in float32.

    ``grad`` [B, R, N, C].
    """
    b, r, h, n, d = layout.heads.shape
    tile = _tile(layout, weight, "backward")
    programs = min(tile.programs, b * r * blocks(n, tile.rows))
    parts = torch.empty((programs, weight.shape[0], h * d), dtype=torch.float32, device=grad.device)
    _launch_backward(
        programs,
        (grad, layout.heads, layout.gate, weight, grad if keep is None else keep, dx, dgate, parts),
        (b, r, n, *_inner(layout.heads), *_inner(layout.gate), *_inner(dx), *_inner(dgate),
         *_strides(keep, 3), *_strides(grad, 3)),
        _sizes(layout, weight, tile.rows) | {"HAS_KEEP": keep is not None},
        tile.options(),
    )  # fmt: skip
    return parts.sum(0)


def _inner(x: Tensor) -> Sequence[int]:
    """Strides of b, r, h and n."""
    return x.stride()[:4]
