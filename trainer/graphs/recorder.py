"""What records CUDA graphs of functions, and what may be recorded by it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Protocol

import torch
from torch import Tensor

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
        self._failed: list[torch.cuda.CUDAGraph] = []

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
                    draws = _Draws(torch.cuda.current_device())
                    # What happens once (compiling, libraries' handles) may not happen while it is recorded.
                    draw = [draws.are_made_by(run) for run in passes]
                    return [
                        self._capture(run, pool, draws, draw=own)
                        for run, own in zip(passes, draw, strict=True)
                    ]
            finally:
                current.wait_stream(self._stream)

    def _capture(self, run: Pass, pool: Any, draws: "_Draws", *, draw: bool) -> Recorded:
        graph = torch.cuda.CUDAGraph()
        try:
            # Other threads load data and watch peers meanwhile.
            with (
                draws.recorded(),
                torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                results = run()
        except RuntimeError:
            # PyTorch takes it for one that goes on. Memory of the GPU can be told that it does not; that of
            # the host asks it with every allocation, and lets no other recording have the same pool.
            with suppress(RuntimeError):  # where it has ended, and what failed was something else
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            self._failed.append(graph)
            self._pool = torch.cuda.graph_pool_handle()
            raise

        def replay() -> None:
            with draws.replayed():
                graph.replay()

        return replay if draw else graph.replay, results

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

    def are_made_by(self, run: Pass) -> bool:
        """Call a function: whether it draws anything."""
        before = self._default.get_offset()
        run()
        return self._default.get_offset() != before

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
