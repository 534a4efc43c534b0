"""Layer normalisation as a torch operator with its backward, registered for the back end ``triton``."""

from functools import cache
from typing import Final

import torch
import triton
from torch import Tensor

from megafold.trainer.kernels.differentiable import Differentiable, as_rows, gradient_like, no_gradient
from megafold.trainer.kernels.evoattention.tiles import architecture
from megafold.trainer.kernels.launch import Launcher, blocks
from megafold.trainer.kernels.layernorm import kernel
from megafold.trainer.kernels.layernorm.tiles import Tile, padded, tiles
from megafold.trainer.ops.normalization import EPS
from megafold.trainer.ops.precision import result_dtype
from megafold.trainer.ops.registry import register

#: Triton runs on the CPU.
INTERPRETED: Final = bool(triton.knobs.runtime.interpret)
FLOATS: Final = frozenset({torch.float32, torch.float16, torch.bfloat16})
#: A row has to fit into one program's registers.
MOST_CHANNELS: Final = 8192
#: Up to so many rows, operators whose products are cuBLAS's either way are left to the reference: there is no
#: memory to save, and its fewer steps on the host are what such a call takes.
FEW_ROWS: Final = 2048

_launch_forward = Launcher(kernel.forward_kernel)
_launch_backward = Launcher(kernel.backward_kernel)
_launch_sum = Launcher(kernel.sum_parts_kernel)
#: Above so many parts they are summed in two rounds, the first in so many groups.
_GROUPED: Final = 2048
_GROUPS: Final = 64
_SUM_COLUMNS: Final = 16


@cache
def multiprocessors(device: torch.device) -> int:
    """How many programs run at once at least; 2 in the interpreter, so that programs share work there too."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def _constants(chosen: Tile, channels: int) -> dict[str, float]:
    return {"BM": chosen.rows, "C": channels, "CP": padded(channels), "EPS": EPS}


def normalise(x: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """LayerNorm of ``x`` [..., C] as a contiguous tensor of ``dtype``; no autograd."""
    rows = as_rows(x)
    m, c = rows.shape
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    chosen = tiles(architecture(x.device), x.element_size(), c).forward
    _launch_forward(
        blocks(m, chosen.rows),
        (rows, rows if weight is None else weight, rows if bias is None else bias, out),
        (m, rows.stride(0)),
        _constants(chosen, c) | {"HAS_WEIGHT": weight is not None, "HAS_BIAS": bias is not None},
        chosen.options(),
    )
    return out


def sum_parts(parts: Tensor, scale: Tensor, shift: Tensor) -> None:
    """Sum ``parts`` [n, 2, C] float32 into ``scale`` and ``shift`` [C]; either may be empty: not wanted."""
    count, _two, c = parts.shape
    if count > _GROUPED:
        grouped = torch.empty((_GROUPS, 2, c), dtype=torch.float32, device=parts.device)
        _launch_parts(parts, grouped, grouped, _GROUPS)
        parts = grouped
    _launch_parts(parts, scale, shift, 1)


def _launch_parts(parts: Tensor, scale: Tensor, shift: Tensor, groups: int) -> None:
    count, _two, c = parts.shape
    wanted = {"SCALE": scale.numel() > 0, "SHIFT": shift.numel() > 0}
    _launch_sum(
        groups * blocks(2 * c, _SUM_COLUMNS),
        (parts, scale, shift), (count, groups),
        {"BP": 64, "BC": _SUM_COLUMNS, "C": c} | wanted, {},
    )  # fmt: skip


def normalise_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, want_input: bool, want_sums: bool,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dX like ``x``, and parts [n, 2, C] of the sums for dWeight and dBias; each empty unless wanted.

    grad: [..., C], contiguous. ``residual``: likewise, what is added to dX.
    """
    rows = as_rows(x)
    m, c = rows.shape
    chosen = tiles(architecture(x.device), x.element_size(), c).backward
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if want_input else no_gradient(x)
    needed = blocks(m, chosen.rows)
    programs = min(needed, multiprocessors(x.device) * chosen.programs) if want_sums else needed
    parts = torch.empty((programs if want_sums else 0, 2, c), dtype=torch.float32, device=x.device)
    _launch_backward(
        programs,
        (rows, rows if weight is None else weight, grad, grad if residual is None else residual, dx, parts),
        (m, rows.stride(0), blocks(needed, programs)),
        _constants(chosen, c)
        | {"HAS_WEIGHT": weight is not None, "HAS_RESIDUAL": residual is not None}
        | {"INPUT": want_input, "SUMS": want_sums},
        chosen.options(),
    )
    return dx, parts


def _forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    return normalise(x, weight, bias, dtype)


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, wanted: list[bool]
) -> list[Tensor]:
    dx, parts = normalise_backward(grad, x, weight, wanted[0], wanted[1] or wanted[2])
    scale, shift = gradient_like(weight, wanted[1], x), gradient_like(bias, wanted[2], x)
    if parts.numel() > 0:
        sum_parts(parts, scale, shift)
    return [dx, scale, shift]


_operator = Differentiable("layernorm", _forward, _backward, lambda x, *_parameters: x.shape)


def unsupported(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> str | None:
    """Why the kernels cannot take these arguments; None: they can."""
    if x.device.type != "cuda" and not INTERPRETED:
        return f"device {x.device.type}"
    if result_dtype(x) not in FLOATS or any(
        t is not None and t.dtype not in FLOATS for t in (x, weight, bias)
    ):
        return f"dtype {x.dtype}"
    if x.shape[-1] > MOST_CHANNELS:
        return f"{x.shape[-1]} channels"
    return "empty" if x.numel() == 0 else None


@register("layernorm", "triton", supports=unsupported)
def layernorm(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    """See :func:`megafold.trainer.ops.normalization.layernorm`."""
    return _operator(x, weight, bias, result_dtype(x))
