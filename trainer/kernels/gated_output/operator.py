"""The gated output as a torch operator with its backward, registered for the back end ``triton``."""

from typing import Final

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from megafold.trainer.kernels.differentiable import Differentiable, as_rows
from megafold.trainer.kernels.evoattention.launches import UNIT
from megafold.trainer.kernels.gated_output.launches import (
    Layout,
    gate_and_project,
    gate_rows,
    gate_rows_gradients,
    gated_gradients,
    holds,
)
from megafold.trainer.ops.precision import result_dtype
from megafold.trainer.ops.registry import register

#: Triton runs on the CPU.
_INTERPRETED: Final = bool(triton.knobs.runtime.interpret)


def _positions(x: Tensor) -> Tensor:
    """[rows, C] as one head of one row of positions, [1, 1, 1, rows, C]."""
    return x[None, None, None]


def _forward(x: Tensor, gate: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty((*x.shape[:-1], weight.shape[0]), dtype=dtype, device=x.device)
    layout = Layout(_positions(as_rows(x)), _positions(as_rows(gate)))
    gate_and_project(layout, weight.to(dtype).contiguous(), None, None, as_rows(out)[None, None])
    return out


def _backward(grad: Tensor, x: Tensor, gate: Tensor, weight: Tensor, wanted: list[bool]) -> list[Tensor]:
    rows, gates = as_rows(x), as_rows(gate)
    dx, dgate = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (rows, gates))
    layout = Layout(_positions(rows), _positions(gates))
    dw = gated_gradients(
        as_rows(grad)[None, None], layout, weight.to(grad.dtype).contiguous(), None, _positions(dx),
        _positions(dgate),
    )  # fmt: skip
    return [dx.view(x.shape), dgate.view(gate.shape), dw.sum(0).to(weight.dtype)]


def _shape(x: Tensor, gate: Tensor, weight: Tensor) -> list[int]:
    return [*x.shape[:-1], weight.shape[0]]


_gated_output = Differentiable("gated_output", _forward, _backward, _shape)


def _gate_forward(x: Tensor, gate: Tensor, dtype: torch.dtype) -> Tensor:
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    gate_rows(as_rows(x), as_rows(gate), as_rows(out))
    return out


def _gate_backward(grad: Tensor, x: Tensor, gate: Tensor, wanted: list[bool]) -> list[Tensor]:
    dx, dgate = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, gate))
    gate_rows_gradients(as_rows(grad), as_rows(x), as_rows(gate), as_rows(dx), as_rows(dgate))
    return [dx, dgate]


_gate = Differentiable("gate", _gate_forward, _gate_backward, lambda x, gate: x.shape)


def unsupported(
    x: Tensor, gate: Tensor, weight: Tensor, *, keep: Tensor | None = None, residual: Tensor | None = None
) -> str | None:
    """Why the kernels cannot take these arguments; None: they can."""
    if x.device.type != "cuda" and not _INTERPRETED:
        return f"device {x.device.type}"
    if result_dtype(x) not in UNIT or any(t.dtype not in UNIT for t in (x, gate, weight)):
        return f"dtypes {x.dtype}, {gate.dtype}, {weight.dtype}"
    if x.shape != gate.shape:
        return f"shapes {tuple(x.shape)} and {tuple(gate.shape)}"
    return "empty" if x.numel() == 0 else None


@register("gated_output", "triton", supports=unsupported)
def gated_output(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    *,
    keep: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """See :func:`megafold.trainer.ops.gated_output.gated_output`."""
    dtype = result_dtype(x)
    if not holds(x.shape[-1], weight.shape[0], dtype, x.device):
        out = F.linear(_gate(x, gate, dtype), weight)
    else:
        out = _gated_output(x, gate, weight, dtype)
    if keep is not None:
        out = out * keep
    return out if residual is None else residual + out
