"""Launches of the fused linear layer of normalised rows, and for others its composition of products."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from megafold.trainer.kernels.differentiable import as_rows, gradient_like, no_gradient
from megafold.trainer.kernels.evoattention.tiles import architecture
from megafold.trainer.kernels.launch import Launcher, blocks
from megafold.trainer.kernels.layernorm.operator import (
    FEW_ROWS,
    INTERPRETED,
    multiprocessors,
    normalise,
    normalise_backward,
    sum_parts,
)
from megafold.trainer.kernels.layernorm_linear import kernel
from megafold.trainer.kernels.layernorm_linear.tiles import tiles
from megafold.trainer.ops.normalization import EPS
from megafold.trainer.ops.precision import full_precision

_CHANNELS: Final = (64, 128)
#: From so many outputs on the product is long enough that the normalised rows' way through memory is little.
_MOST_OUTPUTS: Final = 1024
#: Numbers that one program sums up, and how many parts of them at a time.
_SUM_BLOCK: Final = 32
_SUM_PARTS: Final = 32

_launch_forward = Launcher(kernel.forward_kernel)
_launch_input = Launcher(kernel.input_gradient_kernel)
_launch_weight = Launcher(kernel.weight_gradient_kernel)
_launch_sum = Launcher(kernel.sum_splits_kernel)


@dataclass(frozen=True)
class Parameters:
    """The operator's parameters; ``cast``: the weight in the product's dtype, where there is one already."""

    norm_weight: Tensor
    norm_bias: Tensor | None
    weight: Tensor
    bias: Tensor | None
    cast: Tensor | None = None

    def product(self, dtype: torch.dtype) -> Tensor:
        """The product's weight as the kernels read it."""
        return (self.weight if self.cast is None else self.cast).to(dtype).contiguous()


def fits(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether the fused kernels take a problem and are the faster way for it."""
    if dtype == torch.float32 and not INTERPRETED:
        return False  # full-precision products are cuBLAS's trade
    return x.shape[-1] in _CHANNELS and weight.shape[0] <= _MOST_OUTPUTS


def forward(x: Tensor, parameters: Parameters, dtype: torch.dtype) -> Tensor:
    """Fused: [..., O] in ``dtype``."""
    rows = as_rows(x)
    m, c = rows.shape
    weight = parameters.product(dtype)
    outputs = weight.shape[0]
    out = torch.empty((*x.shape[:-1], outputs), dtype=dtype, device=x.device)
    tile = tiles(architecture(x.device), dtype.itemsize, c, outputs).forward
    norm_bias, bias = parameters.norm_bias, parameters.bias
    _launch_forward(
        blocks(m, tile.rows),
        (rows, parameters.norm_weight, rows if norm_bias is None else norm_bias, weight,
         rows if bias is None else bias, out),
        (m, rows.stride(0)),
        {"BM": tile.rows, "BO": tile.outputs, "C": c, "OUT": outputs, "EPS": EPS,
         "HAS_NORM_BIAS": norm_bias is not None, "HAS_BIAS": bias is not None},
        tile.options(),
    )  # fmt: skip
    return out


def backward(grad: Tensor, x: Tensor, parameters: Parameters, wanted: list[bool]) -> list[Tensor]:
    """Fused: gradients of x, norm_weight, norm_bias, weight, bias; empty where not wanted.

    grad: [..., O], contiguous.
    """
    rows = as_rows(x)
    m, c = rows.shape
    outputs = grad.shape[-1]
    chosen = tiles(architecture(x.device), grad.dtype.itemsize, c, outputs)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if wanted[0] else no_gradient(x)
    scale = gradient_like(parameters.norm_weight, wanted[1], x)
    shift = gradient_like(parameters.norm_bias, wanted[2], x)
    if any(wanted[:3]):
        tile = chosen.input
        programs = blocks(m, tile.rows)
        sums = wanted[1] or wanted[2]
        parts = torch.empty((programs if sums else 0, 2, c), dtype=torch.float32, device=x.device)
        _launch_input(
            programs,
            (rows, parameters.norm_weight, parameters.product(grad.dtype), grad, dx, parts),
            (m, rows.stride(0)),
            {"BM": tile.rows, "BO": tile.outputs, "C": c, "OUT": outputs, "EPS": EPS,
             "INPUT": wanted[0], "SUMS": sums},
            tile.options(),
        )  # fmt: skip
        if sums:
            sum_parts(parts, scale, shift)
    dweight, dbias = no_gradient(x), no_gradient(x)
    if wanted[3] or wanted[4]:
        dweight, dbias = _weight_gradients(grad, rows, parameters, wanted[3:])
    return [dx, scale, shift, dweight, dbias]


def _weight_gradients(
    grad: Tensor, rows: Tensor, parameters: Parameters, wanted: list[bool]
) -> tuple[Tensor, Tensor]:
    m, c = rows.shape
    outputs = grad.shape[-1]
    tile = tiles(architecture(rows.device), grad.dtype.itemsize, c, outputs).weight
    per_split = blocks(outputs, tile.outputs)
    most = blocks(multiprocessors(rows.device) * tile.programs, per_split)
    splits = max(1, min(most, blocks(m, tile.rows)))
    parts = torch.empty((splits, outputs, c), dtype=torch.float32, device=rows.device)
    bias_parts = torch.empty((splits, outputs if wanted[1] else 0), dtype=torch.float32, device=rows.device)
    norm_bias = parameters.norm_bias
    _launch_weight(
        splits * per_split,
        (rows, parameters.norm_weight, rows if norm_bias is None else norm_bias, grad, parts, bias_parts),
        (m, splits, rows.stride(0)),
        {"BO": tile.outputs, "BM": tile.rows, "C": c, "OUT": outputs, "EPS": EPS,
         "HAS_NORM_BIAS": norm_bias is not None, "HAS_BIAS": wanted[1]},
        tile.options(),
    )  # fmt: skip
    made = []
    for parameter, want, those in (
        (parameters.weight, wanted[0], parts),
        (parameters.bias, wanted[1], bias_parts),
    ):
        total = gradient_like(parameter, want, rows)
        if total.numel() > 0:
            _launch_sum(
                blocks(total.numel(), _SUM_BLOCK), (those, total), (total.numel(), splits),
                {"BP": _SUM_PARTS, "BLOCK": _SUM_BLOCK}, {},
            )  # fmt: skip
        made.append(total)
    return made[0], made[1]


def composed_forward(x: Tensor, parameters: Parameters, dtype: torch.dtype) -> Tensor:
    """[..., O] in ``dtype``, the normalised rows in memory."""
    bias = parameters.bias
    with full_precision(x):
        rows = normalise(x, parameters.norm_weight, parameters.norm_bias, dtype)
        weight = parameters.product(dtype)
        out: Tensor = torch.nn.functional.linear(rows, weight, None if bias is None else bias.to(dtype))
    return out


def composed_backward(grad: Tensor, x: Tensor, parameters: Parameters, wanted: list[bool]) -> list[Tensor]:
    """As :func:`backward`; the normalised rows are computed anew."""
    grads = grad.view(-1, grad.shape[-1])
    made = [no_gradient(x)] * 5
    with full_precision(x):
        if any(wanted[:3]):
            dnormal = (grads @ parameters.product(grad.dtype)).view(x.shape)
            sums = wanted[1] or wanted[2]
            made[0], parts = normalise_backward(dnormal, x, parameters.norm_weight, wanted[0], sums)
            made[1] = gradient_like(parameters.norm_weight, wanted[1], x)
            made[2] = gradient_like(parameters.norm_bias, wanted[2], x)
            if sums:
                sum_parts(parts, made[1], made[2])
        if wanted[3]:
            rows = normalise(x, parameters.norm_weight, parameters.norm_bias, grad.dtype)
            columns = grads.T
            if grad.dtype == torch.float32 and len(grads) <= FEW_ROWS:
                # As eager lays out an expanded gradient: cuBLAS adds shorter chains.
                columns = columns.contiguous()
            made[3] = (columns @ rows.view(-1, x.shape[-1])).to(parameters.weight.dtype)
        if wanted[4] and parameters.bias is not None:
            made[4] = grads.sum(0, dtype=torch.float32).to(parameters.bias.dtype)
    return [t if t.numel() > 0 else no_gradient(x) for t in made]
