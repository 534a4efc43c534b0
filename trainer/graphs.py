"""The network's blocks replayed as CUDA graphs: a short crop's step waits for the GPU and not for the host.

A block of the network launches some 150 kernels forward and backward. On crops of 384 tokens the GPU is done
with them sooner than a host can launch them. A CUDA graph is recorded once for each kind of block and each
shape, and then takes one launch.

Blocks that recompute (``activation_checkpointing``), and blocks without gradients, leave nothing behind
between passes, so all of a kind share one pair of graphs and its memory. The graphs belong to a copy of the
block, into which inputs and weights are copied before each replay. The forward graph has no gradients and
serves recycling passes as well; the backward graph computes the block anew and then its gradients, from the
random state that the forward pass began with, so that dropout draws the same masks. A block that keeps its
activations has graphs of its own, in whose memory they stay between its forward and its backward pass.

Results and gradients are copied out: nothing that a caller holds changes with a later replay. Draws are those
of the block called plainly, from PyTorch's own generator: seeds and resumed runs mean the same with graphs
and without them.

The network knows of it in one place: ``run_block`` asks :func:`replayed` first.
"""

import copy
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Final, Protocol
from weakref import ReferenceType, WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megafold.trainer.ops.registry import active_backend

#: Kinds and shapes of blocks that are recorded, at most: a training step of AF3 has eight.
_MOST_SHAPES: Final = 64
#: Share of the device's memory that recordings may take before there are no others: of blocks that recompute,
#: and of those that keep their activations, which would take memory without graphs, too.
_SHARE: Final = 1 / 8
_SHARE_KEPT: Final = 1 / 2
#: Bytes of a block's largest input up to which it is replayed: 128 channels of 700 tokens' pairs in bfloat16.
#: Beyond it kernels last longer than launches, and the memory that graphs hold is better used.
LARGEST_INPUT: Final = 128 * 2**20
#: Back ends whose operators do the same at every call.
_BACKENDS: Final = ("eager", "triton")
#: Attributes of a module that say what it computes, besides its tensors.
_PLAIN: Final = (bool, int, float, str, type(None))

Key = tuple[Any, ...]
Pass = Callable[[], list[Tensor]]
Replay = Callable[[], None]
#: A replay, and the results of the pass, which every replay computes anew in the same memory.
Recorded = tuple[Replay, list[Tensor]]


class Recorder(Protocol):
    """Records what functions do to a device's memory, and keeps that device's generator."""

    def __call__(self, *passes: Pass, alone: bool = False) -> list[Recorded]:
        """For each of the functions, which are called one after the other, what replays it.

        ``alone``: what a pass leaves for the next may not be overwritten by other recordings.
        """

    def random_state(self) -> Tensor:
        """State of the generator that the functions draw from."""

    def set_random_state(self, state: Tensor) -> None:
        """Go back to a state."""

    def memory(self) -> int:
        """Bytes that are taken from the device."""

    def size(self) -> int:
        """Bytes that the device has."""


class CudaRecorder:
    """Records CUDA graphs on one device. They share their working memory, so no two may run at once."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None
        self._stream: Any = None

    def __call__(self, *passes: Pass, alone: bool = False) -> list[Recorded]:
        """See :class:`Recorder`."""
        with torch.cuda.device(self._device):
            if self._stream is None:  # one, as libraries keep working memory for each
                self._pool, self._stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream()
            pool = torch.cuda.graph_pool_handle() if alone else self._pool
            current = torch.cuda.current_stream()
            self._stream.wait_stream(current)
            try:
                with torch.cuda.stream(self._stream):
                    # What happens once (compiling, libraries' handles) may not happen while it is recorded.
                    for run in passes:
                        run()
                    draws = _Draws(torch.cuda.current_device())
                    return [self._capture(run, pool, draws) for run in passes]
            finally:
                current.wait_stream(self._stream)

    def _capture(self, run: Pass, pool: Any, draws: "_Draws") -> Recorded:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads load data and watch peers meanwhile.
            with (
                draws.recorded(),
                torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                results = run()
        except RuntimeError:
            _end_allocations(self._device, pool)
            raise

        def replay() -> None:
            with draws.replayed():
                graph.replay()

        return replay, results

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

    def size(self) -> int:
        """See :class:`Recorder`."""
        return torch.cuda.get_device_properties(self._device).total_memory


class _Draws:
    """What recordings draw from: a generator of their own, in step with PyTorch's for the device.

    PyTorch's would stay as it is while it is recorded if the recording failed, and no longer draw.
    """

    def __init__(self, device: int) -> None:
        self._default = torch.cuda.default_generators[device]
        self._own = torch.Generator(torch.device("cuda", device))

    @contextmanager
    def recorded(self) -> Iterator[None]:
        """What draws within, draws from the own generator."""
        before = self._default.graphsafe_get_state()
        self._default.graphsafe_set_state(self._own)
        try:
            yield
        finally:
            self._default.graphsafe_set_state(before)

    @contextmanager
    def replayed(self) -> Iterator[None]:
        """What is replayed within, draws what PyTorch's generator would, which goes on behind it."""
        self._own.set_state(self._default.get_state())
        yield
        self._default.set_state(self._own.get_state())


def _end_allocations(device: torch.device, pool: Any) -> None:
    """Let PyTorch know that a recording that failed allocates no more; it forgets to by itself."""
    end = getattr(torch._C, "_cuda_endAllocateToPool", None)
    with suppress(RuntimeError):  # it has ended: what failed was not the recording
        if end is not None:
            end(torch.device(device).index or 0, pool)


@dataclass(frozen=True)
class _Known:
    """A block: its kind (equal for blocks that compute the same of their tensors), parameters and buffers."""

    kind: int
    tensors: list[Tensor]
    addresses: list[int]

    def is_still(self, block: nn.Module) -> bool:
        """No other parameters have come, or to another place; told by the first, as all come together."""
        first = next(block.parameters(), None)
        return first is None or (first is self.tensors[0] and first.data_ptr() == self.addresses[0])


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
        self._recomputed: dict[Key, _Recomputed] = {}
        self._kept: dict[Key, _Kept] = {}
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
        recording: _Recomputed | _Kept | None
        if not (torch.is_grad_enabled() and any(wanted)):
            recording = self._recomputing(key, block, inputs)
            results = None if recording is None else recording.forward(tensors)
        elif keep:
            recording = self._keeping(key, wanted, block, inputs)
            results = None if recording is None else _ReplayedKept.apply(recording, *tensors)
        else:
            recording = self._recomputing(key, block, inputs, wanted)
            results = None if recording is None else _Replayed.apply(recording, wanted, *tensors)
        if recording is None or results is None:
            return None
        self.replays += 1
        return results[0] if recording.single else results

    def _known(self, block: nn.Module) -> _Known | None:
        if block in self._blocks:
            known = self._blocks[block]
            if known is None or known.is_still(block):
                return known
            self._kept = {own: kept for own, kept in self._kept.items() if kept.block is not block}
        signature, tensors = _signature(block), _tensors(block)
        if signature is None:
            self._blocks[block] = None
        else:
            kind = self._kinds.setdefault(signature, len(self._kinds))
            self._blocks[block] = _Known(kind, tensors, [t.data_ptr() for t in tensors])
        return self._blocks[block]

    def _recomputing(
        self, key: Key, block: nn.Module, inputs: Sequence[Any], wanted: tuple[bool, ...] | None = None
    ) -> "_Recomputed | None":
        """The recording of a block that leaves nothing behind; ``wanted``: with such a backward pass."""
        recording = self._recomputed.get(key)
        if recording is None:
            if not self._has_room(key, _SHARE):
                return None
            recording = _Recomputed(block, inputs, self._recorder)
            if not self._attempt(key, recording.record_forward):
                return None
            self._recomputed[key] = recording
        if wanted is None or wanted in recording.backwards:
            return recording
        return recording if self._attempt(key, recording.record_backward, wanted) else None

    def _keeping(
        self, key: Key, wanted: tuple[bool, ...], block: nn.Module, inputs: Sequence[Any]
    ) -> "_Kept | None":
        """The recording of a block that keeps its activations, if they are nobody's now."""
        own = (*key, wanted, id(block))
        recording = self._kept.get(own)
        if recording is None:
            if not self._has_room(key, _SHARE_KEPT):
                return None
            recording = _Kept(block, inputs, self._recorder)
            if not self._attempt(key, recording.record):
                return None
            self._kept[own] = recording
        return recording if recording.is_free() else None

    def _has_room(self, key: Key, share: float) -> bool:
        if self.bytes > share * self._recorder.size():
            return False
        if key not in self._shapes and len(self._shapes) < _MOST_SHAPES:
            self._shapes.add(key)
        return key in self._shapes

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


class _Recording:
    """A block with inputs of its own, as it is recorded."""

    def __init__(self, block: nn.Module, inputs: Sequence[Any], recorder: Recorder) -> None:
        self.single = True
        self.recorder = recorder
        self.block = block
        self.weights = _tensors(block)
        self._arguments = [_like(x) if isinstance(x, Tensor) else x for x in inputs]
        self.inputs: list[Tensor] = [x for x in self._arguments if isinstance(x, Tensor)]
        self.take_inputs([x for x in inputs if isinstance(x, Tensor)])

    @torch.no_grad()
    def take_inputs(self, inputs: Sequence[Tensor]) -> None:
        """Copy inputs in."""
        for own, given in zip(self.inputs, inputs, strict=True):
            own.copy_(given)

    def call(self) -> list[Tensor]:
        """The block's results."""
        kind = self.inputs[0].device.type
        dtype, enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
        # Its cache would keep casts of one recording for the next.
        with torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=False):
            results = self.block(*self._arguments)
        self.single = isinstance(results, Tensor)
        return [results] if self.single else list(results)


class _Recomputed(_Recording):
    """A kind of block and shape: a forward graph without gradients, and backward graphs that begin anew.

    ``tensors`` are inputs, then parameters and buffers; a backward graph is for those that are wanted.
    """

    def __init__(self, block: nn.Module, inputs: Sequence[Any], recorder: Recorder) -> None:
        super().__init__(copy.deepcopy(block), inputs, recorder)
        self.backwards: dict[tuple[bool, ...], tuple[Replay, _Gradients]] = {}

    def record_forward(self) -> None:
        """Needed by all else."""

        @torch.no_grad()
        def run() -> list[Tensor]:
            return self.call()

        [(self._replay, self._results)] = self.recorder(run)
        self._grads = [torch.zeros_like(t) for t in self._results]

    def record_backward(self, wanted: tuple[bool, ...]) -> None:
        """Record the gradients to the tensors that are wanted."""
        for own, want in zip([*self.inputs, *self.weights], wanted, strict=True):
            own.requires_grad_(want)
        gradients = _Gradients(self.inputs, self.weights)

        @torch.enable_grad()
        def run() -> list[Tensor]:
            return gradients.of(self.call(), self._grads)

        [(replay, gradients.results)] = self.recorder(run)
        self.backwards[wanted] = replay, gradients

    @torch.no_grad()
    def forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """New tensors with the block's results."""
        self._take(tensors)
        self._replay()
        return tuple([t.clone() for t in self._results])

    @torch.no_grad()
    def backward(
        self, wanted: tuple[bool, ...], tensors: Sequence[Tensor], grads: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """New tensors with the gradients of ``tensors``, drawing from the generator as it is."""
        self._take(tensors)
        _fill(self._grads, grads)
        replay, gradients = self.backwards[wanted]
        replay()
        return gradients.copies()

    def _take(self, tensors: Sequence[Tensor]) -> None:
        n_input = len(self.inputs)
        self.take_inputs(tensors[:n_input])
        if self.weights:
            with torch.no_grad():
                torch._foreach_copy_(self.weights, list(tensors[n_input:]))


class _Kept(_Recording):
    """One block and shape: a forward graph that leaves activations in its memory, and its backward graph."""

    def __init__(self, block: nn.Module, inputs: Sequence[Any], recorder: Recorder) -> None:
        super().__init__(block, inputs, recorder)
        for own, given in zip(self.inputs, (x for x in inputs if isinstance(x, Tensor)), strict=True):
            own.requires_grad_(given.requires_grad)
        self._gradients = _Gradients(self.inputs, self.weights)
        self._live: list[Tensor] = []
        self._grads: list[Tensor] = []
        self._owner: ReferenceType[_Owner] | None = None

    def record(self) -> None:
        """Record both passes."""

        @torch.enable_grad()
        def forward() -> list[Tensor]:
            self._live = self.call()
            self._grads = [torch.empty_like(t) for t in self._live]
            return [t.detach() for t in self._live]

        def backward() -> list[Tensor]:
            # Let go of here: parameters know one gradient node at a time, which belongs to its stream.
            live, self._live = self._live, []
            return self._gradients.of(live, self._grads)

        (self._forward, self._results), (self._backward, self._gradients.results) = self.recorder(
            forward, backward, alone=True
        )

    def is_free(self) -> bool:
        """No backward pass is to come that needs the activations."""
        return self._owner is None or self._owner() is None

    @torch.no_grad()
    def forward(self, inputs: Sequence[Tensor], owner: "_Owner") -> tuple[Tensor, ...]:
        """New tensors with the block's results; the activations are the owner's as long as it lives."""
        self._owner = ref(owner)
        self.take_inputs(inputs)
        self._forward()
        return tuple([t.clone() for t in self._results])

    @torch.no_grad()
    def backward(self, grads: Sequence[Tensor | None], owner: "_Owner | None") -> list[Tensor | None]:
        """New tensors with the gradients of inputs, parameters and buffers."""
        if owner is None or self._owner is None or self._owner() is not owner:
            raise RuntimeError("a replayed block's backward pass can be run once; set cuda_graphs to off")
        self._owner = None
        _fill(self._grads, grads)
        self._backward()
        return self._gradients.copies()


class _Owner:
    """Lives as long as a backward pass may come."""


class _Gradients:
    """What a backward graph leaves: gradients of inputs one by one, those of weights in one piece."""

    results: list[Tensor]

    def __init__(self, inputs: Sequence[Tensor], weights: Sequence[Tensor]) -> None:
        self._wanted = [t.requires_grad for t in (*inputs, *weights)]
        self._leaves = [t for t in (*inputs, *weights) if t.requires_grad]
        self._n_input = [t.requires_grad for t in inputs].count(True)
        self._found: list[bool] = []

    def of(self, results: Sequence[Tensor], grads: Sequence[Tensor]) -> list[Tensor]:
        """From the gradients of the block's results, which are freed of what they kept for it."""
        pairs = [(t, grad) for t, grad in zip(results, grads, strict=True) if t.requires_grad]
        # On this thread, which is the one that is recorded.
        with (
            torch.autograd.set_multithreading_enabled(False),
            torch.autocast(self._leaves[0].device.type, enabled=False),
        ):
            made = torch.autograd.grad(
                [t for t, _ in pairs], self._leaves, [grad for _, grad in pairs], allow_unused=True
            )
        self._found = [grad is not None for grad in made]
        of_inputs = [grad for grad in made[: self._n_input] if grad is not None]
        of_weights = [grad.flatten() for grad in made[self._n_input :] if grad is not None]
        return [*of_inputs, torch.cat(of_weights)] if of_weights else of_inputs

    def copies(self) -> list[Tensor | None]:
        """New tensors with the results, for all inputs and weights; None where there is no gradient."""
        copies = iter([t.clone() for t in self.results])
        found: list[Tensor | None] = [next(copies) if has else None for has in self._found[: self._n_input]]
        places = list(zip(self._leaves[self._n_input :], self._found[self._n_input :], strict=True))
        sizes = [leaf.numel() for leaf, has in places if has]
        pieces = iter(next(copies).split(sizes) if sizes else ())
        found += [next(pieces).view(leaf.shape) if has else None for leaf, has in places]
        all_found = iter(found)
        return [next(all_found) if want else None for want in self._wanted]


class _Replayed(torch.autograd.Function):
    """A replayed block that keeps its inputs and weights for the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, recording: _Recomputed, wanted: tuple[bool, ...], *tensors: Tensor
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


class _ReplayedKept(torch.autograd.Function):
    """A replayed block whose activations stay where its graphs have them."""

    @staticmethod
    def forward(ctx: Any, recording: _Kept, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.recording, ctx.owner = recording, _Owner()
        n_input = len(recording.inputs)
        ctx.save_for_backward(*tensors[n_input:])  # tells if a weight has been changed meanwhile
        ctx.set_materialize_grads(False)
        return recording.forward(tensors[:n_input], ctx.owner)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        _ = ctx.saved_tensors
        owner, ctx.owner = ctx.owner, None
        return None, *ctx.recording.backward(grads, owner)


@torch.no_grad()
def _fill(own: Sequence[Tensor], given: Sequence[Tensor | None]) -> None:
    """Copy gradients in; None is 0."""
    for memory, grad in zip(own, given, strict=True):
        if grad is None:
            memory.zero_()
        else:
            memory.copy_(grad)


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _tensors(block: nn.Module) -> list[Tensor]:
    return [*block.parameters(), *block.buffers()]


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
    tensors = _tensors(block)
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
