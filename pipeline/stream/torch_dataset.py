"""The stream as a PyTorch data set. With ``packed.py`` all of the pipeline that imports torch."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

from megafold.cache_store import Digest, Store
from megafold.pipeline.errors import InputError
from megafold.pipeline.stream.collate import PadSizes, collate, collate_recycles
from megafold.pipeline.stream.config import StreamConfig
from megafold.pipeline.stream.failures import FailureLog
from megafold.pipeline.stream.mixture import MixedStream
from megafold.pipeline.stream.order import SamplerState
from megafold.pipeline.stream.packed import PackedBatch
from megafold.pipeline.stream.sample import Sample, Stream
from megafold.pipeline.stream.symmetry import exchanges


class StreamDataset(Dataset[Sample]):
    """A map-style data set: an item depends on the seed, the epoch and the index alone.

    Works with any number of workers, started by fork, forkserver or spawn: each opens the cache by itself.

    Args:
        cache: a cache, or a stream that is there already; ``config`` and ``manifest`` are for a cache alone.
        config: settings.
        manifest: which snapshot.

    A sample that fails is replaced (``failures.py``): ``meta["replaced"]`` says what failed, ``failures``
    counts it over all workers.
    """

    def __init__(
        self,
        cache: Path | str | Store | Stream | MixedStream,
        config: StreamConfig | None = None,
        manifest: Digest | None = None,
    ) -> None:
        self.stream = cache if isinstance(cache, Stream | MixedStream) else Stream(cache, config, manifest)
        self.failures = FailureLog(self.stream.failures)
        self._length = len(self.stream)
        # In shared memory, so that workers which outlive an epoch see it change.
        self._epoch = torch.zeros((), dtype=torch.int64).share_memory_()

    def __len__(self) -> int:
        """Samples in an epoch."""
        return self._length

    @property
    def epoch(self) -> int:
        """The epoch of items asked for by index alone."""
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Change the epoch, for workers that are running too."""
        self._epoch.fill_(epoch)

    def __getitem__(self, index: int | tuple[int, int]) -> Sample:
        """Sample ``index`` of the current epoch, or of the epoch given: ``(epoch, index)``.

        Raises:
            TooManyFailures: too large a share of the samples fails; the message lists them.
        """
        epoch, place = index if isinstance(index, tuple) else (self.epoch, index)
        if not 0 <= place < self._length:
            raise IndexError(f"index {place} of an epoch of {self._length} samples")
        sample, failed = self.failures.sample(self.stream, place, epoch)
        if not failed:
            made: Sample = sample
            return made
        return replace(sample, meta={**sample.meta, "replaced": [asdict(failure) for failure in failed]})


class RankSampler(Sampler[tuple[int, int]]):
    """One rank's share of the samples, as ``(epoch, index)`` for :class:`StreamDataset`.

    An iteration ends with the epoch, the next one goes on behind it: over all ranks, every sample comes once
    and in the same order whatever ``world_size`` (:class:`SamplerState`).

    ``state_dict`` is the place behind the indices handed out so far. A loader asks for indices ahead of the
    batches that it gives, so a checkpoint needs the place behind the batches used: torchdata's
    StatefulDataLoader keeps it by itself; with a plain DataLoader it is
    ``start.advanced(batches * batch_size * world_size, epoch_size)``, with ``start`` the sampler's state
    before the first of them.
    """

    def __init__(
        self, epoch_size: int, state: SamplerState | None = None, rank: int = 0, world_size: int = 1
    ) -> None:
        if not 0 <= rank < world_size or epoch_size < 1:
            raise InputError(
                f"rank {rank} of {world_size} with epochs of {epoch_size} samples: ranks count from 0, "
                "and an epoch has a sample",
                reason="sampler",
            )
        self.epoch_size = epoch_size
        self.rank = rank
        self.world_size = world_size
        self.state = self._began = state or SamplerState()

    def __iter__(self) -> Iterator[tuple[int, int]]:
        began = self._began = self.state.advanced(0, self.epoch_size)
        for index in began.indices(self.epoch_size, self.rank, self.world_size):
            self.state = self.state.advanced(self.world_size, self.epoch_size)
            yield index

    def __len__(self) -> int:
        """Indices of the iteration that has begun, or will."""
        return self._began.rounds(self.epoch_size, self.world_size)

    def state_dict(self) -> dict[str, int]:
        """Seed, epoch, and the samples of it that all ranks have had: the same on every rank."""
        return self.state.to_dict()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a place, on any number of ranks.

        Raises:
            InputError: it is no state of a sampler.
        """
        self.state = self._began = SamplerState.from_mapping(state)


class TorchCollate:
    """``collate_fn`` of a DataLoader: features as tensors with a batch axis, in a dictionary.

    With ``meta`` the batch also has a key ``meta``: the samples' metas, in order. Where rows of the MSA are
    drawn for each recycle, it has ``recycles``: the features of ``msa.RESAMPLED`` for all recycles,
    [N_batch, N_recycle, N_msa, N_token]. Where samples carry their symmetry, it has ``symmetry``: of each
    sample what :func:`~megafold.pipeline.stream.symmetry.exchanges` gives, as tensors.
    """

    def __init__(self, sizes: PadSizes | None = None, *, meta: bool = False) -> None:
        self.sizes = sizes or PadSizes()
        self.meta = meta

    def __call__(self, samples: Sequence[Sample]) -> PackedBatch:
        """Pad and stack."""
        arrays = collate([sample.features for sample in samples], self.sizes)
        batch = PackedBatch({name: torch.from_numpy(value) for name, value in arrays.items()})
        if samples[0].recycles:
            recycled = collate_recycles(samples, self.sizes)
            batch["recycles"] = {name: torch.from_numpy(value) for name, value in recycled.items()}
        if any(sample.symmetry for sample in samples):
            batch["symmetry"] = [_tensors(exchanges(sample.features, sample.symmetry)) for sample in samples]
        if self.meta:
            batch["meta"] = [dict(sample.meta) for sample in samples]
        return batch


def _tensors(value: Any) -> Any:
    """``value`` with tensors for the arrays in its dictionaries and lists."""
    if isinstance(value, dict):
        return {name: _tensors(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [_tensors(inner) for inner in value]
    return torch.from_numpy(value)
