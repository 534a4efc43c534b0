"""Blocks as they are recorded, and as autograd sees them."""

import copy
from collections.abc import Sequence
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from megafold.trainer.graphs.recorder import Recorder, Replay


class _Recording:
    """A block with inputs of its own, as it is recorded."""

    def __init__(self, block: nn.Module, inputs: Sequence[Any], recorder: Recorder) -> None:
        self.single = True
        self.recorder = recorder
        self.block = block
        self.weights = tensors_of(block)
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


class Recomputed(_Recording):
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

    def replay(self, wanted: tuple[bool, ...], tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """New tensors with the block's results, through which gradients flow."""
        results: tuple[Tensor, ...] = _Replayed.apply(self, wanted, *tensors)
        return results

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


class Kept(_Recording):
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

    def replay(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """New tensors with the block's results, through which gradients flow."""
        results: tuple[Tensor, ...] = _ReplayedKept.apply(self, *tensors)
        return results

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
        ctx: Any, recording: Recomputed, wanted: tuple[bool, ...], *tensors: Tensor
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
    def forward(ctx: Any, recording: Kept, *tensors: Tensor) -> tuple[Tensor, ...]:
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


def tensors_of(block: nn.Module) -> list[Tensor]:
    """Parameters, then buffers."""
    return [*block.parameters(), *block.buffers()]
