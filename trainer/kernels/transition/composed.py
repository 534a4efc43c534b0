"""The transition of any width: products by cuBLAS, norm and activation by kernels, some rows at a time.

The backward computes the hidden activation anew, so that only the input is kept.
"""

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor

from megafold.trainer.kernels.differentiable import as_rows, gradient_like, no_gradient
from megafold.trainer.kernels.launch import Launcher, blocks
from megafold.trainer.kernels.layernorm.operator import normalise, normalise_backward, padded, sum_parts
from megafold.trainer.kernels.transition import kernel
from megafold.trainer.kernels.transition.fused import Parameters
from megafold.trainer.ops.precision import full_precision

#: Bytes of activations that are there at once.
SCRATCH_BYTES: Final = 512 * 2**20
#: Hidden channels that one program takes.
_BLOCK: Final = 512

_launch_activation = Launcher(kernel.activation_kernel)
_launch_activation_gradient = Launcher(kernel.activation_gradient_kernel)


def _strips(rows: int, width: int, item_size: int) -> Iterator[slice]:
    """Equal numbers of rows, so many that what is ``width`` wide stays within the scratch memory."""
    parts = min(rows, blocks(rows * width * item_size, SCRATCH_BYTES))
    step = blocks(rows, parts)
    return (slice(first, min(rows, first + step)) for first in range(0, rows, step))


def _input(rows: Tensor, parameters: Parameters, dtype: torch.dtype) -> Tensor:
    if parameters.norm_weight is None:
        return rows.to(dtype)
    return normalise(rows, parameters.norm_weight, parameters.norm_bias, dtype)


def _activate(launch: Launcher, tensors: tuple[Tensor, ...]) -> None:
    rows, hidden = tensors[-1].shape
    block = min(_BLOCK, padded(hidden))
    launch(rows * blocks(hidden, block), tensors, (), {"H": hidden, "BLOCK": block}, {})


def activate(both: Tensor) -> Tensor:
    """[rows, 2·H] → [rows, H]."""
    hidden = both.new_empty((both.shape[0], both.shape[1] // 2))
    _activate(_launch_activation, (both, hidden))
    return hidden


def activate_gradient(both: Tensor, dhidden: Tensor) -> Tensor:
    """``both`` becomes its own gradient; returns what :func:`activate` made of it."""
    hidden = torch.empty_like(dhidden)
    _activate(_launch_activation_gradient, (both, dhidden, hidden))
    return hidden


def forward(x: Tensor, parameters: Parameters, dtype: torch.dtype) -> Tensor:
    """The operator's result in ``dtype``."""
    rows = as_rows(x)
    weight_in, weight_out = parameters.products(dtype)
    c_out, hidden_channels = weight_out.shape
    out = torch.empty((*x.shape[:-1], c_out), dtype=dtype, device=x.device)
    out_rows = out.view(-1, c_out)
    with full_precision(x):
        for here in _strips(rows.shape[0], 3 * hidden_channels, dtype.itemsize):
            both = _input(rows[here], parameters, dtype) @ weight_in.T
            torch.mm(activate(both), weight_out.T, out=out_rows[here])
    return out


def backward(grad: Tensor, x: Tensor, parameters: Parameters, wanted: list[bool]) -> list[Tensor]:
    """Gradients of x, norm_weight, norm_bias, weight_in, weight_out: those wanted, others empty.

    grad: [..., C_out], contiguous.
    """
    rows, grad_rows = as_rows(x), grad.view(-1, grad.shape[-1])
    hidden = parameters.weight_out.shape[1]
    strips = list(_strips(rows.shape[0], 5 * hidden, grad.element_size()))
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if wanted[0] else no_gradient(x)
    norm_parts: list[Tensor] = []
    dweights: list[list[Tensor]] = []
    with full_precision(x):
        for here in strips:
            dinput, *dthose = _backward_of_rows(rows[here], grad_rows[here], parameters, wanted)
            dweights.append(dthose)
            if parameters.norm_weight is not None and any(wanted[:3]):
                want_sums = wanted[1] or wanted[2]
                dinput, parts = normalise_backward(
                    dinput, rows[here], parameters.norm_weight, wanted[0], want_sums
                )
                norm_parts.append(parts)
            if wanted[0]:
                dx.view(-1, x.shape[-1])[here] = dinput
    norms = [gradient_like(p, want, x) for p, want in
             zip((parameters.norm_weight, parameters.norm_bias), wanted[1:3], strict=True)]  # fmt: skip
    if wanted[1] or wanted[2]:
        sum_parts(torch.cat(norm_parts) if len(norm_parts) > 1 else norm_parts[0], *norms)
    made = [dx, *norms]
    for i, parameter in enumerate((parameters.weight_in, parameters.weight_out)):
        strip_sums = [d[i] for d in dweights]
        total = strip_sums[0] if len(strip_sums) == 1 else torch.stack(strip_sums).sum(0, dtype=torch.float32)
        made.append(total.to(parameter.dtype) if wanted[3 + i] else no_gradient(x))
    return made


def _backward_of_rows(rows: Tensor, grad: Tensor, parameters: Parameters, wanted: list[bool]) -> list[Tensor]:
    """Gradients of the first product's input, weight_in and weight_out by these rows."""
    weight_in, weight_out = parameters.products(grad.dtype)
    a = _input(rows, parameters, grad.dtype)
    both = a @ weight_in.T
    hidden = activate_gradient(both, grad @ weight_out)
    nothing = no_gradient(grad)
    return [
        both @ weight_in if any(wanted[:3]) else nothing,
        both.T @ a if wanted[3] else nothing,
        grad.T @ hidden if wanted[4] else nothing,
    ]
