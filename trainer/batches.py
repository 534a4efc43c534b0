"""Batches for the loop: loading in worker processes with a position that counts what has been used."""

import math
import signal
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from megafold.trainer.config import TrainConfig
from megafold.trainer.data_parallel import Ranks
from megafold.trainer.errors import DataError
from megafold.trainer.fetch_ahead import FetchAhead
from megafold.trainer.losses.confidence import RESOLUTION

#: Features as in the sample schema, with a leading batch axis; and ``meta``, a mapping for each sample.
Batch = dict[str, Any]


class SamplerState(Protocol):
    """Something whose place in the data is three integers: ``seed``, ``epoch`` and ``position``."""

    def state_dict(self) -> dict[str, int]:
        """The place: what comes next is what follows the items handed out so far."""

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to a place."""


def resolutions(batch: Mapping[str, Any]) -> dict[str, Tensor]:
    """The samples' resolutions as a feature, ``resolution`` float32 [B], Å; NaN for one that has none.

    Nothing of a batch whose ``meta`` is silent about them.
    """
    metas = batch.get("meta") or ()
    if not any(RESOLUTION in meta for meta in metas):
        return {}
    values = [meta.get(RESOLUTION) for meta in metas]
    return {RESOLUTION: torch.tensor([math.nan if value is None else value for value in values])}


class SampleOrder(SamplerState, Protocol):
    """A sampler: yields this rank's indices into a data set, for ever or an epoch at a time.

    ``state_dict`` counts an index from the moment it has been yielded.
    """

    def __iter__(self) -> Iterator[Any]:
        """Indices from the present place on."""


class EpochOrder:
    """One rank's samples, for ever: ``(epoch, index)``, every ``world``-th of all epochs' in a row.

    The indices need no shuffling: what an index stands for is drawn from the seed, the epoch and the index.
    Where an epoch does not go round, the last ranks go on with the next one: all samples come once, in the
    same order on any number of ranks.
    """

    def __init__(self, epoch_size: int, seed: int = 0, rank: int = 0, world: int = 1) -> None:
        """``epoch_size``: samples in an epoch, over all ranks.

        Raises:
            DataError: an epoch has no samples.
        """
        if epoch_size < 1:
            raise DataError("an epoch has 0 samples: build a cache with at least one entry")
        self._epoch_size, self._rank, self._world = epoch_size, rank, world
        self._seed, self._epoch, self._position = seed, 0, 0

    def __iter__(self) -> Iterator[tuple[int, int]]:
        while True:
            epochs, self._position = divmod(self._position, self._epoch_size)
            self._epoch += epochs
            epochs, index = divmod(self._position + self._rank, self._epoch_size)
            self._position += self._world
            yield self._epoch + epochs, index

    def state_dict(self) -> dict[str, int]:
        """Seed, epoch, and the samples of it that all ranks together have had."""
        return {"seed": self._seed, "epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to a place."""
        self._seed, self._epoch, self._position = state["seed"], state["epoch"], state["position"]


@dataclass(frozen=True, kw_only=True)
class TrainingData:
    """The data side of a run, as the trainer needs it.

    Attributes:
        dataset: gives a sample for an index; by default the indices are ``(epoch, index)``.
        collate: makes a batch of samples.
        sampler: gives the indices; by default :class:`EpochOrder` over ``len(dataset)``.
        identity: what the data are, for checkpoints: ``manifest`` (a digest) and ``stream`` (settings).
        evaluate: indices of the samples whose structures are sampled after training; without any, the
            sample that training would see next.
    """

    dataset: Dataset[Any]
    collate: Callable[[list[Any]], Batch]
    sampler: SampleOrder | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)
    evaluate: Sequence[Any] = ()

    def order(self, seed: int, ranks: Ranks) -> SampleOrder:
        """The sampler.

        Raises:
            DataError: there is none, and the data set has no length or is empty.
        """
        if self.sampler is not None:
            return self.sampler
        if not isinstance(self.dataset, Sized):
            raise DataError("a data set without a length needs a sampler")
        return EpochOrder(len(self.dataset), seed, ranks.dp_rank, ranks.dp)


class BatchStream:
    """Endless batches of a data set; it is its own :class:`SamplerState`.

    Workers load ahead of the trainer, so the sampler's own place is ahead, too. Here the place after each
    batch is remembered until the batch is handed out: a resumed run repeats nothing and leaves nothing out.
    What workers have loaded is received in a thread during the step before, in memory that a GPU can read.
    """

    def __init__(self, data: TrainingData, config: TrainConfig, ranks: Ranks) -> None:
        self._data = data
        self._sampler = data.order(config.seed, ranks)
        self._config = config
        self._place = self._sampler.state_dict()
        self._ahead: deque[dict[str, int]] = deque()
        self._loader: Iterator[Batch] | None = None

    def __iter__(self) -> "BatchStream":
        return self

    def __next__(self) -> Batch:
        if self._loader is None:
            self._loader = self._load()
        batch = next(self._loader, None)
        if batch is None:  # the epoch is over
            self._loader = self._load()
            batch = next(self._loader, None)
        if batch is None:
            raise DataError("the data set has no sample for this rank: build a cache with at least one entry")
        self._place = self._ahead.popleft()
        return batch

    def state_dict(self) -> dict[str, int]:
        """The place after the batches handed out so far."""
        return dict(self._place)

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go to a place; batches loaded ahead are thrown away."""
        self.close()
        self._sampler.load_state_dict(state)
        self._place = dict(state)

    def close(self) -> None:
        """Stop the workers."""
        if isinstance(self._loader, FetchAhead):
            self._loader.close()
        self._loader = None
        self._ahead.clear()
        self._sampler.load_state_dict(self._place)

    def _load(self) -> Iterator[Batch]:
        config, workers = self._config, self._config.num_workers
        loader = iter(
            DataLoader(
                self._data.dataset,
                batch_sampler=_index_batches(self._sampler, config.batch_size, self._ahead),
                num_workers=workers,
                collate_fn=self._data.collate,
                prefetch_factor=config.prefetch if workers else None,
                multiprocessing_context=config.worker_start if workers else None,
                worker_init_fn=_leave_signals_to_the_trainer,
                pin_memory=config.device != "cpu" and torch.cuda.is_available(),
                # Without its own, a loader draws from torch's global generator when it starts, and a
                # resumed run would not draw the dropout masks of one that was never stopped.
                generator=torch.Generator().manual_seed(config.seed),
            )
        )
        # Without workers the samples are made where they are taken: in the main thread, where their time
        # budget has its alarm.
        if not workers:
            return loader
        # Left to the garbage collector, workers outlive an error, and as they ignore SIGTERM, the interpreter
        # would wait for them for ever.
        return FetchAhead(loader, loader._shutdown_workers)  # type: ignore[attr-defined]


def _index_batches(
    sampler: SampleOrder, batch_size: int, ahead: deque[dict[str, int]]
) -> Iterator[list[Any]]:
    """Lists of indices; as each leaves for the workers, the sampler's place behind it is noted in ``ahead``.

    Not a method: a reference from the loader back to the stream would leave the workers to the garbage
    collector, which stops them in an order that takes them many seconds.
    """
    indices: list[Any] = []
    for index in sampler:
        indices.append(index)
        if len(indices) == batch_size:
            ahead.append(sampler.state_dict())
            yield indices
            indices = []
    if indices:
        ahead.append(sampler.state_dict())
        yield indices


def _leave_signals_to_the_trainer(_: int) -> None:
    """Ctrl-C and SIGTERM reach the whole process group; a worker must last until the step is done."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
