"""Several caches as one data set: each sample comes from one of them, drawn with given probabilities.

Which one is a function of (seed, epoch, index, attempt), like all else, and the sample is the one that this
source alone would give for that index. A source in ``uniform`` mode thus skips the indices that go to others.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from megafold.pipeline.errors import InputError
from megafold.pipeline.stream.config import FailureConfig, StreamConfig
from megafold.pipeline.stream.random_streams import RandomStreams
from megafold.pipeline.stream.sample import Sample, Stream
from megafold.pipeline.stream.symmetry import Symmetry


@dataclass(frozen=True, kw_only=True)
class Source:
    """One cache of a mixture: a name for messages and metas, its stream, and its share of the samples."""

    name: str
    stream: Stream
    probability: float


class MixedStream:
    """Samples from several streams; used like a :class:`Stream`.

    Args:
        sources: with different names; their probabilities sum to 1. Each stream keeps its own settings, but
            for the seed.
        seed: of all of them.
        epoch_size: samples in an epoch; None is the sum of the sources'.
        failures: what becomes of failing samples; None is as the first source's settings say.

    Raises:
        InputError: the sources cannot be mixed.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        seed: int = 0,
        epoch_size: int | None = None,
        failures: FailureConfig | None = None,
    ) -> None:
        names = [source.name for source in sources]
        shares = [source.probability for source in sources]
        if not sources or len(set(names)) < len(names):
            raise InputError(f"a mixture needs sources of different names: {names}", reason="stream-setting")
        if not (min(shares) >= 0 and abs(sum(shares) - 1) <= 1e-6):  # so that a NaN is refused, too
            raise InputError(
                f"the probabilities of {', '.join(names)} are {shares}: none is negative, and they sum to 1",
                reason="stream-setting",
            )
        if epoch_size is not None and epoch_size < 1:
            raise InputError(f"epoch_size is {epoch_size}, at least 1", reason="stream-setting")
        recycles = {source.stream.config.msa.recycles for source in sources}
        if len(recycles) > 1:
            raise InputError("the sources' msa.recycles differ: batches need one", reason="stream-setting")
        self.sources = tuple(sources)
        self.seed = seed
        self.failures = failures or sources[0].stream.failures
        self._epoch_size = epoch_size
        self._edges = np.cumsum(shares) / np.sum(shares)
        self.prepare()  # settings that do not fit a cache show now

    @property
    def configs(self) -> tuple[StreamConfig, ...]:
        """The sources' settings."""
        return tuple(source.stream.config for source in self.sources)

    def __len__(self) -> int:
        """Samples in an epoch."""
        return self._epoch_size or sum(len(source.stream) for source in self.sources)

    def source(self, index: int, *, epoch: int = 0, seed: int | None = None, attempt: int = 0) -> Source:
        """The source that a sample comes from."""
        streams = RandomStreams(self._seed(seed), epoch, index, attempt)
        return self.sources[int(np.searchsorted(self._edges, streams("source").random(), side="right"))]

    def sample(self, index: int, *, epoch: int = 0, seed: int | None = None, attempt: int = 0) -> Sample:
        """As :meth:`Stream.sample`; ``meta["source"]`` is the source's name."""
        source = self.source(index, epoch=epoch, seed=seed, attempt=attempt)
        made = source.stream.sample(index, epoch=epoch, seed=self._seed(seed), attempt=attempt)
        return replace(made, meta={**made.meta, "source": source.name})

    def symmetry(self, index: int, *, epoch: int = 0, seed: int | None = None, attempt: int = 0) -> Symmetry:
        """As :meth:`Stream.symmetry`."""
        source = self.source(index, epoch=epoch, seed=seed, attempt=attempt)
        return source.stream.symmetry(index, epoch=epoch, seed=self._seed(seed), attempt=attempt)

    def entry_name(self, index: int, *, epoch: int = 0, seed: int | None = None, attempt: int = 0) -> str:
        """Source and entry of a sample: ``pdb/1abc``."""
        source = self.source(index, epoch=epoch, seed=seed, attempt=attempt)
        entry = source.stream.entry_name(index, epoch=epoch, seed=self._seed(seed), attempt=attempt)
        return f"{source.name}/{entry}"

    def identity(self) -> dict[str, Any]:
        """As :meth:`Stream.identity`; the manifests by source."""
        each = {source.name: source.stream.identity() for source in self.sources}
        settings = {
            source.name: {"probability": source.probability, **each[source.name]["stream"]}
            for source in self.sources
        }
        return {
            "manifest": {name: identity["manifest"] for name, identity in each.items()},
            "stream": {"seed": self.seed, "epoch_size": self._epoch_size, "sources": settings},
        }

    def prepare(self) -> None:
        """As :meth:`Stream.prepare`, for all sources."""
        for source in self.sources:
            source.stream.prepare()

    def forget(self) -> None:
        """As :meth:`Stream.forget`, for all sources."""
        for source in self.sources:
            source.stream.forget()

    def _seed(self, seed: int | None) -> int:
        return self.seed if seed is None else seed


#: The name of the first cache in a mixture that :func:`open_stream` makes.
FIRST: Final = "main"


def open_stream(cache: Path | str, settings: Mapping[str, Any]) -> Stream | MixedStream:
    """A stream as a file of settings describes it.

    Args:
        cache: the cache's folder.
        settings: of :class:`StreamConfig`; with ``mix`` also ``{name: {"cache": …, "probability": …, …}}``:
            further caches with their shares of the samples, the first having the rest. Settings within
            one of them are on top of the first's, for that cache.

    Raises:
        InputError: a setting is unknown or cannot be used.
    """
    first = {name: value for name, value in settings.items() if name != "mix"}
    config = StreamConfig.from_mapping(first)
    mix = settings.get("mix", {})
    if not isinstance(mix, Mapping):
        raise InputError(f"stream settings: mix is {mix!r}: it has to be an object", reason="stream-setting")
    if not mix:
        return Stream(cache, config)
    sources, rest = [], 1.0
    for name, values in mix.items():
        if name == FIRST or not _is_source(values):
            raise InputError(
                f"stream settings: mix.{name} needs a cache (its folder or URL) and a probability "
                f"(a number), and a name but {FIRST!r}",
                reason="stream-setting",
            )
        changes = {key: value for key, value in values.items() if key not in ("cache", "probability")}
        own = StreamConfig.from_mapping(merged_settings(first, changes))
        probability = float(values["probability"])
        rest -= probability
        sources.append(Source(name=name, stream=Stream(values["cache"], own), probability=probability))
    sources.insert(0, Source(name=FIRST, stream=Stream(cache, config), probability=rest))
    return MixedStream(sources, seed=config.seed, epoch_size=config.sampling.epoch_size)


def _is_source(values: Any) -> bool:
    if not isinstance(values, Mapping) or not isinstance(values.get("cache"), str | Path):
        return False
    probability = values.get("probability")
    return isinstance(probability, int | float) and not isinstance(probability, bool)


def merged_settings(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Nested settings with ``changes`` on top: a mapping in both is merged, anything else is replaced."""
    merged = dict(base)
    for name, value in changes.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(name), Mapping)
        merged[name] = merged_settings(merged[name], value) if both else value
    return merged
