"""Going through a step for the sake of what it would launch, before the first one that counts.

Kernels that are compiled and not run leave worthless numbers behind. So a block of the network is called
forward and backward by itself, and zeros take the place of its results: what follows sees finite numbers, and
no kernel of a backward pass is missed where the loss fails on them.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn

_rehearsing: ContextVar[bool] = ContextVar("rehearsing", default=False)


@contextmanager
def rehearsal() -> Iterator[None]:
    """Within, :func:`rehearsed` stands for the network's blocks."""
    token = _rehearsing.set(True)
    try:
        yield
    finally:
        _rehearsing.reset(token)


def rehearsed(block: Any, inputs: Sequence[Any]) -> Any:
    """Call a block and its backward pass: zeros like its results, or None outside of a :func:`rehearsal`.

    What shares its work with other ranks is no module, and is left to the step's own backward pass.
    """
    if torch.compiler.is_compiling() or not (_rehearsing.get() and isinstance(block, nn.Module)):
        return None
    own = [
        x.detach().requires_grad_(x.requires_grad) if isinstance(x, Tensor) and x.is_floating_point() else x
        for x in inputs
    ]
    results = block(*own)
    several = results if isinstance(results, tuple) else (results,)
    differentiable = torch.is_grad_enabled()
    if differentiable:
        of_block = [p for p in block.parameters() if p.requires_grad]
        leaves = [*of_block, *(x for x in own if isinstance(x, Tensor) and x.requires_grad)]
        gradients = [torch.zeros_like(x) for x in several]
        torch.autograd.grad(several, leaves, gradients, allow_unused=True)
    zeros = tuple([torch.zeros_like(x).requires_grad_(differentiable and x.requires_grad) for x in several])
    return zeros if isinstance(results, tuple) else zeros[0]
