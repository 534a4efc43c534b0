"""Which dtype an operator computes in and returns."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


def result_dtype(x: Tensor) -> torch.dtype:
    """Autocast's dtype where autocast is on, else ``x``'s: what a matrix product would return."""
    kind = x.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype


def wide(x: Tensor) -> Tensor:
    """``x`` in float32, or as it is where it is wider: statistics and softmax are taken in this."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


@contextmanager
def full_precision(x: Tensor) -> Iterator[None]:
    """Autocast off on ``x``'s device."""
    with torch.autocast(x.device.type, enabled=False):
        yield
