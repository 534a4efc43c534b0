"""Layers that every module is made of, and how they start.

Initial values follow AF3's published inference code, where the supplement says nothing: weights are
LeCun normal (truncated at two standard deviations), He normal before a ReLU or in a SwiGLU, zero in the
last layer of a residual branch ("final") and in gates, which therefore start at 1/2.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megafold.trainer import ops
from megafold.trainer.graphs import replayed
from megafold.trainer.ops.precision import full_precision
from megafold.trainer.rehearsal import rehearsed

Init = Literal["default", "relu", "final", "gate"]

#: Standard deviation of a unit normal that is cut off at -2 and 2.
_TRUNCATED_STD = 0.87962566103423978


def initialise_(weight: Tensor, init: Init) -> None:
    """Fill ``weight`` [C_out, C_in] in place."""
    if init in ("final", "gate"):
        nn.init.zeros_(weight)
        return
    scale = {"default": 1.0, "relu": 2.0}[init]
    std = (scale / weight.shape[-1]) ** 0.5 / _TRUNCATED_STD
    nn.init.trunc_normal_(weight, std=std, a=-2 * std, b=2 * std)


class Linear(nn.Linear):
    """A linear layer [..., C_in] → [..., C_out]; without bias, as most of the supplement's."""

    def __init__(self, c_in: int, c_out: int, *, bias: bool = False, init: Init = "default") -> None:
        super().__init__(c_in, c_out, bias=bias)
        initialise_(self.weight, init)
        if self.bias is not None:
            nn.init.zeros_(self.bias)


class PreciseLinear(Linear):
    """A linear layer that autocast leaves alone: its input or output is a position in Å."""

    def forward(self, x: Tensor) -> Tensor:
        """[..., C_in] → [..., C_out] in the parameters' dtype."""
        with full_precision(x):
            return F.linear(x.to(self.weight.dtype), self.weight, self.bias)


class LayerNorm(nn.Module):
    """Layer norm with scale, and offset unless ``offset`` is False."""

    def __init__(self, c: int, *, offset: bool = True) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(c))
        self.bias = nn.Parameter(torch.zeros(c)) if offset else None

    def forward(self, x: Tensor) -> Tensor:
        """[..., C] → [..., C]."""
        return ops.layernorm(x, self.weight, self.bias)


class NormLinear(nn.Module):
    """Linear(LayerNorm(x)): the supplement's most frequent pair."""

    def __init__(self, c_in: int, c_out: int, *, init: Init = "default", offset: bool = True) -> None:
        super().__init__()
        self.norm = LayerNorm(c_in, offset=offset)
        self.linear = Linear(c_in, c_out, init=init)

    def forward(self, x: Tensor) -> Tensor:
        """[..., C_in] → [..., C_out]."""
        return ops.layernorm_linear(x, self.norm.weight, self.norm.bias, self.linear.weight)


class Transition(nn.Module):
    """Algorithm 11."""

    def __init__(self, c: int, n: int) -> None:
        super().__init__()
        self.norm = LayerNorm(c)
        self.linear_in = Linear(c, 2 * n * c, init="relu")
        self.linear_out = Linear(n * c, c, init="final")

    def forward(self, x: Tensor, *, residual: bool = False) -> Tensor:
        """[..., C] → [..., C]; ``residual``: add ``x``."""
        norm, linear_in, linear_out = self.norm, self.linear_in, self.linear_out
        assert norm.bias is not None
        return ops.transition(
            x, norm.weight, norm.bias, linear_in.weight, linear_out.weight, residual=residual
        )


class Dropout(nn.Module):
    """Dropout whose mask is shared along one axis of [B, N, N, C].

    "Row-wise" dropout shares it along the rows (axis 1), "column-wise" along the columns (axis 2).
    """

    def __init__(self, rate: float, shared: Literal["row", "column"]) -> None:
        super().__init__()
        self.rate = rate
        self.axis = {"row": 1, "column": 2}[shared]

    def add(self, residual: Tensor, x: Tensor) -> Tensor:
        """``residual`` and ``x``, whose channels are dropped with probability ``rate`` in training.

        The others are scaled by 1 / (1 - rate).
        """
        keep = self.keep(x)
        return residual + x if keep is None else ops.dropout_add(residual, x, keep)

    def keep(self, x: Tensor) -> Tensor | None:
        """What dropout multiplies a tensor like ``x`` by, of length 1 along the shared axis, or None."""
        return self.draws(x, 1)[0]

    def draws(self, x: Tensor, count: int) -> Sequence[Tensor | None]:
        """:meth:`keep` for ``count`` tensors like ``x``, drawn at once."""
        if not self.training or self.rate == 0:
            return [None] * count
        shape = list(x.shape)
        shape[self.axis] = 1
        return F.dropout(x.new_ones([count, *shape]), self.rate).unbind()


def at_atoms(positions: Tensor, atoms: Tensor) -> Tensor:
    """Positions [B, N, 3] of one atom of each token, of [B, A, 3] those of the indices [B, N]."""
    return torch.gather(positions, 1, atoms.unsqueeze(-1).expand(-1, -1, 3))


def run_block(block: Callable[..., Any], *inputs: Any, recompute: bool) -> Any:
    """Call ``block``; with ``recompute``, keep its inputs alone for the backward pass."""
    results = rehearsed(block, inputs)
    if results is None:
        results = replayed(block, inputs, keep=not recompute)
    if results is not None:
        return results
    # The gradients that meet at an input are added within the block, as in a replayed one: the same sums.
    inputs = tuple([_own(x) for x in inputs])
    if not (recompute and torch.is_grad_enabled()):
        return block(*inputs)
    backend = ops.active_backend()

    def again(*inputs: Any) -> Any:
        # The backward pass runs this in another thread, outside the caller's `use_backend`.
        with ops.use_backend(backend):
            return block(*inputs)

    return checkpoint(again, *inputs, use_reentrant=False)


def _own(x: Any) -> Any:
    """A tensor's view, if it has gradients, or what it is."""
    return x.view_as(x) if isinstance(x, Tensor) and x.requires_grad and torch.is_grad_enabled() else x
