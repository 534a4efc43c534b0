"""The fused transition: for 64 or 128 channels, where one program holds whole rows and all sums of them."""

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from megafold.trainer.kernels.differentiable import as_rows, gradient_like, no_gradient
from megafold.trainer.kernels.evoattention.tiles import architecture
from megafold.trainer.kernels.launch import Launcher, blocks
from megafold.trainer.kernels.layernorm.operator import INTERPRETED, multiprocessors, sum_parts
from megafold.trainer.kernels.transition import kernel
from megafold.trainer.kernels.transition.tiles import ROW_MULTIPLE, Tiles, tiles
from megafold.trainer.ops.normalization import EPS

#: Scratch that the backward may take for what the weights' gradients are made of: so many times the input's
#: bytes, and at most so many bytes. Less scratch means more and shorter launches, each of which ends with
#: some multiprocessors idle.
SCRATCH_SHARE: Final = 5
SCRATCH_BYTES: Final = 768 * 2**20
#: What it takes anyway, if there are rows for it.
LEAST_SCRATCH_BYTES: Final = 64 * 2**20
_CHANNELS: Final = (64, 128)
#: Columns of a tile of the scratch memory.
STRIP_COLUMNS: Final = 64
#: Rows of the weights' gradients that one program sums up.
_SUM_ROWS: Final = 16

#: Numbers that one program casts.
_CAST: Final = 2048

_launch_cast = Launcher(kernel.cast_kernel)
_launch_forward = Launcher(kernel.forward_kernel)
_launch_input = Launcher(kernel.input_gradient_kernel)
_launch_weights = Launcher(kernel.weight_gradient_kernel)
_launch_sum = Launcher(kernel.sum_weights_kernel)


@dataclass(frozen=True)
class Parameters:
    """The operator's parameters; without a norm both of its are None."""

    norm_weight: Tensor | None
    norm_bias: Tensor | None
    weight_in: Tensor
    weight_out: Tensor

    def products(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The products' weights as the kernels read them."""
        return cast(self.weight_in, self.weight_out, dtype)


def cast(weight_in: Tensor, weight_out: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Both weights in ``dtype``, contiguous: by one launch, unless there is nothing to do."""
    weight_in, weight_out = weight_in.contiguous(), weight_out.contiguous()
    if weight_in.dtype == weight_out.dtype == dtype:
        return weight_in, weight_out
    made = [torch.empty(w.shape, dtype=dtype, device=w.device) for w in (weight_in, weight_out)]
    counts = (weight_in.numel(), weight_out.numel())
    programs = sum(blocks(count, _CAST) for count in counts)
    _launch_cast(programs, (weight_in, weight_out, *made), counts, {"BLOCK": _CAST}, {})
    return made[0], made[1]


def fits(x: Tensor, weight_in: Tensor, weight_out: Tensor, dtype: torch.dtype) -> bool:
    """Whether the fused kernels take a problem and are the faster way for it."""
    c_out, hidden = weight_out.shape
    if dtype == torch.float32 and not INTERPRETED:
        return False  # full-precision products are cuBLAS's trade
    if x.shape[-1] not in _CHANNELS or c_out != x.shape[-1] or hidden % STRIP_COLUMNS:
        return False
    return tiles(architecture(x.device), dtype.itemsize, c_out).divide(hidden)


def _constants(x: Tensor, hidden: int, norm: bool) -> dict[str, Any]:
    return {"C": x.shape[-1], "H": hidden, "NORM": norm, "EPS": EPS}


def forward(x: Tensor, parameters: Parameters, dtype: torch.dtype, *, residual: bool = False) -> Tensor:
    """The operator's result in ``dtype``; ``residual``: and the input, added before it is rounded."""
    rows = as_rows(x)
    m, c = rows.shape
    weight_in, weight_out = parameters.products(dtype)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    tile = tiles(architecture(x.device), dtype.itemsize, c).forward
    norm = parameters.norm_weight is not None
    _launch_forward(
        blocks(m, tile.rows),
        (rows, *_norm(parameters, rows), weight_in, weight_out, out),
        (m, rows.stride(0)),
        {"BM": tile.rows, "BH": tile.hidden}
        | _constants(x, weight_out.shape[1], norm)
        | {"HELD": tile.held, "RESIDUAL": residual},
        tile.options(),
    )
    return out


def _norm(parameters: Parameters, nothing: Tensor) -> tuple[Tensor, Tensor]:
    if parameters.norm_weight is None or parameters.norm_bias is None:
        return nothing, nothing
    return parameters.norm_weight, parameters.norm_bias


class _Strip:
    """Scratch rows of a backward, and the weights' gradients that are summed from them.

    One strip after the other is filled by the input's kernel and added up, so that the scratch memory does
    not grow with the rows.
    """

    def __init__(self, like: Tensor, rows: int, hidden: int, chosen: Tiles) -> None:
        channels = like.shape[-1]
        width = 3 * hidden + channels
        item_size = like.element_size()
        scratch_bytes = max(
            LEAST_SCRATCH_BYTES, min(SCRATCH_BYTES, SCRATCH_SHARE * rows * channels * item_size)
        )
        most = scratch_bytes // (width * item_size)
        # Whole waves of the input's programs where there are several, so that none runs nearly empty.
        wave = covering(multiprocessors(like.device) * chosen.resident * chosen.input.rows)
        step = wave if most >= wave else ROW_MULTIPLE
        self.rows = max(ROW_MULTIPLE, min(covering(rows), most // step * step))
        self.scratch = torch.empty((self.rows, 3 * hidden), dtype=like.dtype, device=like.device)
        self.normal = torch.empty((self.rows, channels), dtype=like.dtype, device=like.device)
        self._tile = chosen.weights
        self._sizes = {"C": channels, "H": hidden}
        tiles_of_sum = 3 * hidden // self._tile.hidden
        self._splits = max(
            1, min(blocks(multiprocessors(like.device), tiles_of_sum), self.rows // self._tile.rows)
        )
        shape = (self._splits, 3 * hidden, channels)
        self._parts = torch.empty(shape, dtype=torch.float32, device=like.device)
        self._earlier = 0

    def add(self, grad: Tensor) -> None:
        """Add what the scratch rows of the output's gradient ``grad`` [rows, C] hold."""
        _launch_weights(
            self._splits * (3 * self._sizes["H"] // self._tile.hidden),
            (self.scratch, self.normal, grad, self._parts), (grad.shape[0], self._splits, self._earlier),
            {"BN": self._tile.hidden, "BK": self._tile.rows} | self._sizes,
            self._tile.options(),
        )  # fmt: skip
        self._earlier += 1

    def finish(self, dweight_in: Tensor, dweight_out: Tensor) -> None:
        """Write the sums of all strips; either may be empty: not wanted."""
        _launch_sum(
            blocks(3 * self._sizes["H"], _SUM_ROWS),
            (self._parts, dweight_in, dweight_out), (self._splits,),
            {"BN": _SUM_ROWS} | self._sizes
            | {"WEIGHT_IN": dweight_in.numel() > 0, "WEIGHT_OUT": dweight_out.numel() > 0}, {},
        )  # fmt: skip


def covering(rows: int) -> int:
    """The rows of scratch that ``rows`` take."""
    return blocks(rows, ROW_MULTIPLE) * ROW_MULTIPLE


def backward(
    grad: Tensor, x: Tensor, parameters: Parameters, wanted: list[bool], *, residual: bool = False
) -> list[Tensor]:
    """Gradients of x, norm_weight, norm_bias, weight_in, weight_out: those wanted, others empty.

    grad: [..., C], contiguous. ``residual``: x was added to the result.
    """
    rows, grad_rows = as_rows(x), grad.view(-1, grad.shape[-1])
    m, c = rows.shape
    weight_in, weight_out = parameters.products(grad.dtype)
    norm = parameters.norm_weight is not None
    chosen = tiles(architecture(x.device), grad.dtype.itemsize, c)
    tile = chosen.input
    of_input, of_weights = any(wanted[:3]), any(wanted[3:])
    strip = _Strip(grad, m, weight_out.shape[1], chosen) if of_weights else None
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if of_input else no_gradient(x)
    parts_shape = (blocks(covering(m), tile.rows) if of_input and norm else 0, 2, c)
    norm_parts = torch.empty(parts_shape, dtype=torch.float32, device=x.device)
    step = m if strip is None else strip.rows
    scratch = (dx, dx) if strip is None else (strip.scratch, strip.normal)
    for first in range(0, m, step):
        here = slice(first, min(m, first + step))
        count = here.stop - first
        # All scratch rows are written, those beyond the last with zeros, so that the sums need no bounds.
        programs = blocks(covering(count), tile.rows)
        _launch_input(
            programs,
            (rows[here], *_norm(parameters, rows), weight_in, weight_out, grad_rows[here],
             dx.view(-1, c)[here], norm_parts[first // tile.rows :], *scratch),
            (count, rows.stride(0)),
            {"BM": tile.rows, "BH": tile.hidden} | _constants(x, weight_out.shape[1], norm)
            | {"HELD": tile.held, "RESIDUAL": residual, "INPUT": of_input, "WEIGHTS": of_weights},
            tile.options(),
        )  # fmt: skip
        if strip is not None:
            strip.add(grad_rows[here])
    return _finish(x, parameters, wanted, dx, norm_parts, strip)


def _finish(
    x: Tensor,
    parameters: Parameters,
    wanted: list[bool],
    dx: Tensor,
    norm_parts: Tensor,
    strip: _Strip | None,
) -> list[Tensor]:
    those = (parameters.norm_weight, parameters.norm_bias, parameters.weight_in, parameters.weight_out)
    made = [gradient_like(p, want, x) for p, want in zip(those, wanted[1:], strict=True)]
    if norm_parts.numel() > 0 and (wanted[1] or wanted[2]):
        sum_parts(norm_parts, made[0], made[1])
    if strip is not None:
        strip.finish(made[2], made[3])
    return [dx if wanted[0] else no_gradient(x), *made]
