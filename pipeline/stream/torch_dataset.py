"""The stream as a PyTorch data set. The only module of the pipeline that imports torch."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import Dataset, Sampler

from megafold.cache_store import Digest, Store
from megafold.pipeline.stream.collate import PadSizes, collate
from megafold.pipeline.stream.config import StreamConfig
from megafold.pipeline.stream.sample import Sample, Stream
from megafold.pipeline.stream.sampling import SamplerState


class StreamDataset(Dataset[Sample]):
    """A map-style data set: an item depends on the seed, the epoch and the index alone.

    Works with any number of workers, started by fork, forkserver or spawn: each opens the cache by itself.
    """

    def __init__(
        self,
        cache: Path | str | Store,
        config: StreamConfig | None = None,
        manifest: Digest | None = None,
    ) -> None:
        self.stream = Stream(cache, config, manifest)
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
        """Sample ``index`` of the current epoch, or of the epoch given: ``(epoch, index)``."""
        epoch, place = index if isinstance(index, tuple) else (self.epoch, index)
        if not 0 <= place < self._length:
            raise IndexError(f"index {place} of an epoch of {self._length} samples")
        return self.stream.sample(place, epoch=epoch)


class RankSampler(Sampler[tuple[int, int]]):
    """One rank's share of what is left of an epoch, as ``(epoch, index)`` for :class:`StreamDataset`.

    ``state`` says where to start; to resume, set it to what the checkpoint holds. Iterating does not move
    it: workers fetch ahead, so only the training loop knows which samples were used.
    """

    def __init__(
        self, epoch_size: int, state: SamplerState | None = None, rank: int = 0, world_size: int = 1
    ) -> None:
        self.epoch_size = epoch_size
        self.state = state or SamplerState()
        self.rank = rank
        self.world_size = world_size

    def __iter__(self) -> Iterator[tuple[int, int]]:
        return self.state.indices(self.epoch_size, self.rank, self.world_size)

    def __len__(self) -> int:
        return max(0, self.epoch_size - self.state.position) // self.world_size


class TorchCollate:
    """``collate_fn`` of a DataLoader: features as tensors with a batch axis.

    With ``meta`` the batch also has a key ``meta``: the samples' metas, in order.
    """

    def __init__(self, sizes: PadSizes | None = None, *, meta: bool = False) -> None:
        self.sizes = sizes or PadSizes()
        self.meta = meta

    def __call__(self, samples: Sequence[Sample]) -> dict[str, Any]:
        """Pad and stack."""
        arrays = collate([sample.features for sample in samples], self.sizes)
        batch: dict[str, Any] = {name: torch.from_numpy(value) for name, value in arrays.items()}
        if self.meta:
            batch["meta"] = [dict(sample.meta) for sample in samples]
        return batch
