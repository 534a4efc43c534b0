"""Batches that travel between processes as one piece of memory."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

#: Tensors begin at multiples of so many bytes: a cache line, and what any dtype needs.
_ALIGNMENT: Final = 64


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in the buffer a tensor is."""

    offset: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    def of(self, buffer: Tensor) -> Tensor:
        size = math.prod(self.shape) * self.dtype.itemsize
        return buffer[self.offset : self.offset + size].view(self.dtype).view(self.shape)


class PackedBatch(dict[str, Any]):
    """A batch, by name. When it is pickled or pinned, its tensors become parts of one buffer.

    A loader hands over each tensor's memory by a file descriptor of its own, which costs the process that
    receives it more than a connection to the worker that made it: 0.2 ms, and a batch has 40. So this one
    has a single tensor to hand over. Tensors in dictionaries and lists within it are packed, too; those on
    GPUs or with gradients are not, and all else is pickled as ever.
    """

    def copy(self) -> "PackedBatch":
        """Another batch of the same tensors."""
        return PackedBatch(self)

    __copy__ = copy

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _unpacked, _packed(self, pin=False)

    def pin_memory(self) -> "PackedBatch":
        """This batch in page-locked memory, which a GPU can read by itself; loaders call it."""
        return _unpacked(*_packed(self, pin=True))


def _packed(batch: PackedBatch, *, pin: bool) -> tuple[Tensor, dict[str, Any]]:
    """One buffer with all tensors, and the batch with a :class:`_Place` where each was."""
    tensors: list[tuple[_Place, Tensor]] = []
    end = 0

    def place(value: Any) -> Any:
        nonlocal end
        if not _is_plain(value):
            return value
        start = -(-end // _ALIGNMENT) * _ALIGNMENT
        end = start + value.nbytes
        tensors.append((_Place(start, value.dtype, tuple(value.shape)), value))
        return tensors[-1][0]

    layout = _with(place, dict(batch))
    buffer = torch.empty(end, dtype=torch.uint8, pin_memory=pin)
    for where, value in tensors:
        where.of(buffer).copy_(value)
    return buffer, layout


def _unpacked(buffer: Tensor, layout: dict[str, Any]) -> PackedBatch:
    def tensor(value: Any) -> Any:
        return value.of(buffer) if isinstance(value, _Place) else value

    return PackedBatch(_with(tensor, layout))


def _is_plain(value: Any) -> bool:
    return (
        type(value) is Tensor
        and value.device.type == "cpu"
        and value.layout == torch.strided
        and not value.requires_grad
    )


def _with(change: Callable[[Any], Any], value: Any) -> Any:
    """``value`` with ``change`` applied to all that is in it, and in dictionaries and lists in it."""
    if isinstance(value, dict):
        return {name: _with(change, inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with(change, inner) for inner in value]
    return change(value)
