"""The network's blocks replayed as CUDA graphs: a short crop's step waits for the GPU and not for the host.

A block of the network launches some 150 kernels forward and backward. On crops of 384 tokens the GPU is done
with them sooner than a host can launch them. A CUDA graph is recorded once for each kind of block and each
shape, and then takes one launch.

Blocks that recompute (``activation_checkpointing``) are replayed, and blocks without gradients: nothing of
them outlives a pass, so all blocks of a kind share one pair of graphs and its memory. The graphs belong to a
copy of the block, into which inputs and weights are copied before each replay; results are copied out. The
forward graph has no gradients and serves recycling passes as well; the backward graph computes the block anew
and then its gradients, from the random state that the forward pass began with, so that dropout draws the same
masks. Draws are those of the block called plainly, from PyTorch's own generator: seeds and resumed runs mean
the same with graphs and without.

The network knows of it in one place: ``run_block`` asks :func:`replayed` first.
"""

import copy
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megafold.trainer.ops.registry import active_backend

#: Kinds and shapes of blocks that are recorded, at most: their memory stays taken.
_MOST_RECORDINGS: Final = 32
#: Back ends whose operators do the same at every call.
_BACKENDS: Final = ("eager", "triton")
#: Attributes of a module that say what it computes, besides its tensors.
_PLAIN: Final = (bool, int, float, str, type(None))

Replay = Callable[[], None]


class Recorder(Protocol):
    """Records what a function does to a device's memory, and keeps that device's generator."""

    def __call__(self, function: Callable[[], list[Tensor]]) -> tuple[Replay, list[Tensor]]:
        """A replay, and the function's results, which every replay computes anew in the same memory."""

    def random_state(self) -> Tensor:
        """State of the generator that the function draws from."""

    def set_random_state(self, state: Tensor) -> None:
        """Go back to a state."""

    def memory(self) -> int:
        """Bytes that are taken from the device."""


class CudaRecorder:
    """Records CUDA graphs on one device. They share their working memory, so no two may run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def __call__(self, function: Callable[[], list[Tensor]]) -> tuple[Replay, list[Tensor]]:
        """See :class:`Recorder`."""
        with torch.cuda.device(self._device):
            if self._pool is None:
                self._pool = torch.cuda.graph_pool_handle()
            stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                # What happens once (compiling, libraries' handles) may not happen while it is recorded.
                function()
            current.wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            # Other threads load data and watch peers meanwhile.
            with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
                results = function()
        return graph.replay, results

    def random_state(self) -> Tensor:
        """See :class:`Recorder`."""
        return torch.cuda.get_rng_state(self._device)

    def set_random_state(self, state: Tensor) -> None:
        """See :class:`Recorder`."""
        torch.cuda.set_rng_state(state, self._device)

    def memory(self) -> int:
        """See :class:`Recorder`."""
        torch.cuda.empty_cache()
        return torch.cuda.memory_reserved(self._device)


@dataclass(frozen=True)
class _Known:
    """A block: its kind (equal for blocks that compute the same of their tensors), parameters and buffers."""

    kind: int
    tensors: list[Tensor]


class BlockGraphs:
    """Recorded blocks of one model on one device.

    A kind of block and shape is recorded when it first comes in an :meth:`active` context: not later, so that
    all steps of a run replay, those after a resumption too. What cannot be recorded runs plainly;
    :attr:`declined` says why. Once a block has been called its parameters may change their values, but may
    not be exchanged for others.

    Attributes:
        declined: reasons for which recording failed.
        seconds: time that recording took.
        bytes: memory that recordings hold.
        replays: forward passes replayed so far.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.declined: dict[tuple[Any, ...], str] = {}
        self.seconds = 0.0
        self.bytes = 0
        self.replays = 0
        self._recorder = recorder
        self._recordings: dict[tuple[Any, ...], _Recording] = {}
        self._blocks: WeakKeyDictionary[nn.Module, _Known | None] = WeakKeyDictionary()
        self._kinds: dict[tuple[Any, ...], int] = {}

    def __len__(self) -> int:
        """Number of recordings."""
        return len(self._recordings)

    @contextmanager
    def active(self) -> Iterator[None]:
        """Blocks that are called within are replayed where they can be."""
        token = _active.set(self)
        try:
            yield
        finally:
            _active.reset(token)

    def call(self, block: nn.Module, inputs: Sequence[Any]) -> Any:
        """The block's result, replayed; None if it has to be called plainly."""
        known = self._known(block)
        key = None if known is None else _key(known.kind, block.training, inputs)
        if known is None or key is None or key in self.declined:
            return None
        recording = self._recordings.get(key) or self._recorded(key, block, inputs)
        if recording is None:
            return None
        tensors = [*(x for x in inputs if isinstance(x, Tensor)), *known.tensors]
        if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
            wanted = tuple([t.requires_grad for t in tensors])
            if wanted not in recording.backwards and not self._attempt(key, recording.add_backward, wanted):
                return None
            results = _Replayed.apply(recording, wanted, *tensors)
        else:
            results = recording.forward(tensors)
        self.replays += 1
        return results[0] if recording.single else results

    def _known(self, block: nn.Module) -> _Known | None:
        if block not in self._blocks:
            signature = _signature(block)
            self._blocks[block] = (
                None
                if signature is None
                else _Known(self._kinds.setdefault(signature, len(self._kinds)), _tensors(block))
            )
        return self._blocks[block]

    def _recorded(self, key: tuple[Any, ...], block: nn.Module, inputs: Sequence[Any]) -> "_Recording | None":
        """A new recording, if there is room for one."""
        if len(self._recordings) >= _MOST_RECORDINGS:
            return None
        recording = _Recording(block, inputs, self._recorder)
        if not self._attempt(key, recording.record_forward):
            return None
        self._recordings[key] = recording
        return recording

    def _attempt(self, key: tuple[Any, ...], record: Callable[..., None], *args: Any) -> bool:
        """Record something; where it fails, that kind and shape runs plainly from now on."""
        began, state, before = time.perf_counter(), self._recorder.random_state(), self._recorder.memory()
        try:
            record(*args)
        except RuntimeError as error:  # out of memory, too
            self.declined[key] = str(error)
            self._recordings.pop(key, None)
            reason = str(error).partition("\n")[0]
            warnings.warn(f"a block runs without CUDA graphs: {reason}", RuntimeWarning, stacklevel=2)
        finally:
            self._recorder.set_random_state(state)
            self.seconds += time.perf_counter() - began
            self.bytes += self._recorder.memory() - before
        return key not in self.declined


_active: ContextVar[BlockGraphs | None] = ContextVar("megafold_graphs", default=None)


def replayed(block: Any, inputs: Sequence[Any]) -> Any:
    """The result of ``block`` on ``inputs``, replayed; None if it has to be called plainly.

    Where gradients are wanted, inputs and weights alone are kept for the backward pass.
    """
    if torch.compiler.is_compiling():  # which cannot read a context variable
        return None
    graphs = _active.get()
    if graphs is None or not isinstance(block, nn.Module):
        return None
    return graphs.call(block, inputs)


class _Recording:
    """The graphs of one kind of block and shape. ``tensors`` are inputs, then parameters and buffers."""

    def __init__(self, block: nn.Module, inputs: Sequence[Any], recorder: Recorder) -> None:
        self.backwards: dict[tuple[bool, ...], _Backward] = {}
        self.single = True
        self.recorder = recorder
        self._block = copy.deepcopy(block)
        self._inputs = [_like(x) if isinstance(x, Tensor) else x for x in inputs]
        self._own_inputs: list[Tensor] = [x for x in self._inputs if isinstance(x, Tensor)]
        self._own_weights = _tensors(self._block)
        self._fill([*(x for x in inputs if isinstance(x, Tensor)), *_tensors(block)])

    def record_forward(self) -> None:
        """Needed by all else."""
        self._replay, self._results = self.recorder(self._forward)
        self._grads = [torch.zeros_like(t) for t in self._results]

    def add_backward(self, wanted: tuple[bool, ...]) -> None:
        """Record the gradients to the tensors that are wanted."""
        tensors = [*self._own_inputs, *self._own_weights]
        for own, want in zip(tensors, wanted, strict=True):
            own.requires_grad_(want)
        inputs = [t.requires_grad for t in self._own_inputs].count(True)
        leaves = [t for t in tensors if t.requires_grad]
        made = _Backward([t.shape for t in leaves], inputs)
        made.replay, made.results = self.recorder(lambda: self._backward(leaves, made))
        self.backwards[wanted] = made

    @torch.no_grad()
    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """New tensors with the block's results."""
        self._fill(tensors)
        self._replay()
        return tuple([t.clone() for t in self._results])

    @torch.no_grad()
    def backward(
        self, wanted: tuple[bool, ...], tensors: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """New tensors with the gradients of ``tensors``, drawing from the generator as it is."""
        self._fill(tensors)
        for own, grad in zip(self._grads, grads, strict=True):
            if grad is None:
                own.zero_()
            else:
                own.copy_(grad)
        made = self.backwards[wanted]
        made.replay()
        found = iter(made.gradients())
        return [next(found) if want else None for want in wanted]

    @torch.no_grad()
    def _fill(self, tensors: Sequence[Tensor]) -> None:
        n_input = len(self._own_inputs)
        for own, given in zip(self._own_inputs, tensors[:n_input], strict=True):
            own.copy_(given)
        if self._own_weights:
            torch._foreach_copy_(self._own_weights, list(tensors[n_input:]))

    @torch.no_grad()
    def _forward(self) -> list[Tensor]:
        return self._call()

    def _call(self) -> list[Tensor]:
        kind = self._own_inputs[0].device.type
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        # Its cache would keep casts of one recording for the next.
        with torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False):
            results = self._block(*self._inputs)
        self.single = isinstance(results, Tensor)
        return [results] if self.single else list(results)

    @torch.enable_grad()
    def _backward(self, leaves: list[Tensor], made: "_Backward") -> list[Tensor]:
        results = [(t, grad) for t, grad in zip(self._call(), self._grads, strict=True) if t.requires_grad]
        # On this thread, which is the one that is recorded.
        with (
            torch.autograd.set_multithreading_enabled(False),
            torch.autocast(leaves[0].device.type, enabled=False),
        ):
            grads = torch.autograd.grad(
                [t for t, _ in results], leaves, [grad for _, grad in results], allow_unused=True
            )
        return made.laid_out(grads)


class _Backward:
    """A backward graph: gradients of inputs one by one, those of weights in one piece."""

    replay: Replay
    results: list[Tensor]

    def __init__(self, shapes: list[torch.Size], n_input: int) -> None:
        self._shapes = shapes
        self._n_input = n_input
        self._has: list[bool] = []

    def laid_out(self, grads: Sequence[Tensor | None]) -> list[Tensor]:
        """What a replay leaves behind."""
        self._has = [grad is not None for grad in grads]
        of_inputs = [grad for grad in grads[: self._n_input] if grad is not None]
        of_weights = [grad.flatten() for grad in grads[self._n_input :] if grad is not None]
        return [*of_inputs, torch.cat(of_weights)] if of_weights else of_inputs

    def gradients(self) -> list[Tensor | None]:
        """New tensors with what the replay left; None where a tensor has no gradient."""
        copies = iter([t.clone() for t in self.results])
        found = [next(copies) if has else None for has in self._has[: self._n_input]]
        places = list(zip(self._shapes[self._n_input :], self._has[self._n_input :], strict=True))
        sizes = [shape.numel() for shape, has in places if has]
        pieces = iter(next(copies).split(sizes) if sizes else ())
        return [*found, *(next(pieces).view(shape) if has else None for shape, has in places)]


class _Replayed(torch.autograd.Function):
    """A replayed block that keeps its inputs and weights for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, recording: _Recording, wanted: tuple[bool, ...], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.recording, ctx.wanted = recording, wanted
        ctx.random_state = recording.recorder.random_state()
        ctx.save_for_backward(*tensors)
        ctx.set_materialize_grads(False)
        return recording.forward(tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        recorder = ctx.recording.recorder
        now = recorder.random_state()
        recorder.set_random_state(ctx.random_state)
        found = ctx.recording.backward(ctx.wanted, ctx.saved_tensors, grads)
        recorder.set_random_state(now)
        return None, None, *found


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _tensors(block: nn.Module) -> list[Tensor]:
    return [*block.parameters(), *block.buffers()]


def _signature(block: nn.Module) -> tuple[Any, ...] | None:
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
    tensors = _tensors(block)
    if len({p.dtype for p in block.parameters()}) > 1:
        return None
    return (*parts, *((t.shape, t.dtype, t.device) for t in tensors))


def _key(kind: int, training: bool, inputs: Sequence[Any]) -> tuple[Any, ...] | None:
    """What a recording depends on; None if the call cannot be recorded."""
    backend = active_backend()
    if backend not in _BACKENDS or not isinstance(inputs[0], Tensor):
        return None
    parts: list[Any] = []
    for x in inputs:
        if isinstance(x, Tensor):
            parts.append((x.shape, x.dtype, x.device))
        elif x is None or type(x).__hash__ is not None:
            parts.append(x)
        else:
            return None
    device = inputs[0].device.type
    autocast = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
    return (kind, training, backend, autocast, torch.are_deterministic_algorithms_enabled(), *parts)
