"""Which blocks are recorded, under what key, and whether there is room for them."""

import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from megafold.trainer.graphs.recorder import Recorder
from megafold.trainer.graphs.recordings import Kept, Recomputed, tensors_of
from megafold.trainer.ops.registry import active_backend

#: Kinds and shapes of blocks that are recorded, at most: a training step of AF3 has nine.
_MOST_SHAPES: Final = 64
#: Share of the device's memory that recordings may take before there are no others: of blocks that recompute,
#: and of those that keep their activations, which would take memory without graphs, too.
_SHARE: Final = 1 / 4
_SHARE_KEPT: Final = 1 / 2
#: Bytes of a block's largest input up to which it is replayed: 128 channels of 700 tokens' pairs in bfloat16.
#: Beyond it kernels last longer than launches, and the memory that graphs hold is better used.
LARGEST_INPUT: Final = 128 * 2**20
#: Back ends whose operators do the same at every call.
_BACKENDS: Final = ("eager", "triton")
#: Attributes of a module that say what it computes, besides its tensors.
_PLAIN: Final = (bool, int, float, str, type(None))

Key = tuple[Any, ...]


@dataclass(frozen=True)
class _Known:
    """A block: its kind (equal for blocks that compute the same of their tensors), parameters and buffers.

    ``first``: the module that has its first parameter, and by what name.
    """

    kind: int
    tensors: list[Tensor]
    first: tuple[ReferenceType[nn.Module], str] | None
    address: int

    @classmethod
    def of(cls, block: nn.Module, kind: int) -> "_Known":
        """What is to be known of ``block``."""
        tensors = tensors_of(block)
        name = next((name for name, _ in block.named_parameters()), None)
        if name is None:
            return cls(kind, tensors, None, 0)
        path, _, own = name.rpartition(".")
        return cls(kind, tensors, (ref(block.get_submodule(path)), own), tensors[0].data_ptr())

    def is_still(self) -> bool:
        """No other parameters have come, or to another place; told by the first, as all come together."""
        if self.first is None:
            return True
        module, name = self.first[0](), self.first[1]
        parameter = None if module is None else module._parameters.get(name)
        return parameter is self.tensors[0] and parameter.data_ptr() == self.address


class BlockGraphs:
    """Recorded blocks of one model on one device.

    A kind of block and shape is recorded when it first comes in an :meth:`active` context: not later, so that
    all steps of a run replay, those after a resumption too. What cannot be recorded runs plainly;
    :attr:`declined` says why. A block's parameters may change their values, and may be moved or exchanged for
    others, all together.

    Attributes:
        declined: reasons for which recording failed.
        seconds: time that recording took.
        bytes: memory that recordings hold.
        replays: forward passes replayed so far.
        released: all recordings are gone, and there will be no others.
    """

    def __init__(self, recorder: Recorder, largest: int = LARGEST_INPUT) -> None:
        """``largest``: bytes of an input up to which a block is replayed."""
        self.declined: dict[Key, str] = {}
        self.seconds = 0.0
        self.bytes = 0
        self.replays = 0
        self.released = False
        self._recorder = recorder
        self._largest = largest
        self._full = False
        self._recomputed: dict[Key, Recomputed] = {}
        self._kept: dict[Key, Kept] = {}
        self._shapes: set[Key] = set()
        self._blocks: WeakKeyDictionary[nn.Module, _Known | None] = WeakKeyDictionary()
        self._kinds: dict[Key, int] = {}

    def __len__(self) -> int:
        """Number of recordings."""
        return len(self._recomputed) + len(self._kept)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Blocks that are called within are replayed where they can be."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    def __str__(self) -> str:
        return (
            f"CUDA graphs: {len(self)} kinds and shapes of blocks recorded in {self.seconds:.1f} s, "
            f"{self.bytes / 2**30:.1f} GiB"
        )

    def release(self) -> None:
        """Give the memory back, as soon as no backward pass needs it, and record no more; warns of it."""
        self._recomputed.clear()
        self._kept.clear()
        self.bytes = 0
        self.released = True
        _warn("there is too little memory: blocks run without CUDA graphs from now on")

    def call(self, block: nn.Module, inputs: Sequence[Any], *, keep: bool) -> Any:
        """The block's result, replayed; None if it has to be called plainly. ``keep``: its activations."""
        if self.released:
            return None
        known = self._known(block)
        key = None if known is None else _key(known.kind, block.training, inputs, self._largest)
        if known is None or key is None or key in self.declined:
            return None
        tensors = [*(x for x in inputs if isinstance(x, Tensor)), *known.tensors]
        wanted = tuple([t.requires_grad for t in tensors])
        recording: Recomputed | Kept | None
        if not (torch.is_grad_enabled() and any(wanted)):
            recording = self._recomputing(key, block, inputs)
            results = None if recording is None else recording.forward(tensors)
        elif keep:
            recording = self._keeping(key, wanted, block, inputs)
            results = None if recording is None else recording.replay(tensors)
        else:
            recording = self._recomputing(key, block, inputs, wanted)
            results = None if recording is None else recording.replay(wanted, tensors)
        if recording is None or results is None:
            return None
        self.replays += 1
        return results[0] if recording.single else results

    def _known(self, block: nn.Module) -> _Known | None:
        if block in self._blocks:
            known = self._blocks[block]
            if known is None or known.is_still():
                return known
            self._kept = {own: kept for own, kept in self._kept.items() if kept.block is not block}
        signature = _signature(block)
        if signature is None:
            self._blocks[block] = None
        else:
            self._blocks[block] = _Known.of(block, self._kinds.setdefault(signature, len(self._kinds)))
        return self._blocks[block]

    def _recomputing(
        self, key: Key, block: nn.Module, inputs: Sequence[Any], wanted: tuple[bool, ...] | None = None
    ) -> Recomputed | None:
        """The recording of a block that leaves nothing behind; ``wanted``: with such a backward pass."""
        recording = self._recomputed.get(key)
        if recording is None:
            if not self._has_room(key, _SHARE):
                return None
            recording = Recomputed(block, inputs, self._recorder)
            if not self._attempt(key, recording.record_forward):
                return None
            self._recomputed[key] = recording
        if wanted is None or wanted in recording.backwards:
            return recording
        return recording if self._attempt(key, recording.record_backward, wanted) else None

    def _keeping(
        self, key: Key, wanted: tuple[bool, ...], block: nn.Module, inputs: Sequence[Any]
    ) -> Kept | None:
        """The recording of a block that keeps its activations, if they are nobody's now."""
        own = (*key, wanted, id(block))
        recording = self._kept.get(own)
        if recording is None:
            if not self._has_room(key, _SHARE_KEPT):
                return None
            recording = Kept(block, inputs, self._recorder)
            if not self._attempt(key, recording.record):
                return None
            self._kept[own] = recording
        return recording if recording.is_free() else None

    def _has_room(self, key: Key, share: float) -> bool:
        """Whether a kind and shape may be recorded; warns where it is the first that may not."""
        fits = self.bytes <= share * self._recorder.size()
        if fits and len(self._shapes) < _MOST_SHAPES:
            self._shapes.add(key)
        if fits and key in self._shapes:
            return True
        if not self._full:
            self._full = True
            _warn(
                f"{len(self)} kinds and shapes of blocks are recorded as CUDA graphs, which hold "
                f"{self.bytes / 2**30:.1f} GiB: others run without. Crops padded to one shape need few"
            )
        return False

    def _attempt(self, key: Key, record: Callable[..., None], *args: Any) -> bool:
        """Record something; where it fails, that kind and shape runs plainly from now on.

        Where memory is short, all do.
        """
        began, state, before = time.perf_counter(), self._recorder.random_state(), self._recorder.memory()
        try:
            record(*args)
        except torch.OutOfMemoryError:
            self.release()
        except RuntimeError as error:
            self.declined[key] = str(error)
            self._recomputed.pop(key, None)
            _warn(f"a block runs without CUDA graphs: {str(error).partition(chr(10))[0]}")
        finally:
            self._recorder.set_random_state(state)
            self.seconds += time.perf_counter() - began
            if not self.released:
                self.bytes += self._recorder.memory() - before
        return key not in self.declined and not self.released


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=3)


_active: ContextVar[BlockGraphs | None] = ContextVar("megafold_graphs", default=None)


def replayed(block: Any, inputs: Sequence[Any], *, keep: bool) -> Any:
    """The result of ``block`` on ``inputs``, replayed; None if it has to be called plainly.

    ``keep``: activations are kept for the backward pass, not computed anew.
    """
    if torch.compiler.is_compiling():  # which cannot read a context variable
        return None
    graphs = _active.get()
    if graphs is None or not isinstance(block, nn.Module):
        return None
    return graphs.call(block, inputs, keep=keep)


def _signature(block: nn.Module) -> Key | None:
    """Equal for blocks that compute the same of their tensors; None if that cannot be told."""
    parts: list[Any] = []
    for name, module in block.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            return None
        attributes = {
            key: value if isinstance(value, _PLAIN) else ("object", id(value))
            for key, value in vars(module).items()
            if not key.startswith("_") and key != "training"
        }
        parts.append((name, type(module), *sorted(attributes.items())))
    tensors = tensors_of(block)
    if len({p.dtype for p in block.parameters()}) > 1:
        return None
    return (*parts, *((t.shape, t.dtype, t.device) for t in tensors))


def _key(kind: int, training: bool, inputs: Sequence[Any], largest: int) -> Key | None:
    """What a recording depends on; None if the call cannot be recorded."""
    backend = active_backend()
    if backend not in _BACKENDS or not isinstance(inputs[0], Tensor):
        return None
    parts: list[Any] = []
    for x in inputs:
        if isinstance(x, Tensor):
            if x.numel() * x.element_size() > largest:
                return None
            parts.append((x.shape, x.dtype, x.device))
        elif x is None or type(x).__hash__ is not None:
            parts.append(x)
        else:
            return None
    device = inputs[0].device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return (kind, training, backend, autocast, torch.are_deterministic_algorithms_enabled(), *parts)
