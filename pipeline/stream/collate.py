"""From samples of different sizes to one batch: padding as the schema says, batch axis first."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.schema import SAMPLE, Feature
from megafold.pipeline.stream.check import SampleError
from megafold.pipeline.stream.msa import RESAMPLED
from megafold.pipeline.stream.sample import Sample


@dataclass(frozen=True, kw_only=True)
class PadSizes:
    """Lengths to pad to; None is the longest of the batch.

    Fixed lengths keep compiled models from compiling anew.
    """

    tokens: int | None = None
    atoms: int | None = None
    msa: int | None = None
    templates: int | None = None


def padded_lengths(samples: Sequence[Mapping[str, NDArray[Any]]], sizes: PadSizes) -> dict[str, int]:
    """Length of each axis of a batch of ``samples``.

    Raises:
        SampleError: a sample is longer than a fixed size.
    """
    fixed = {"N_token": sizes.tokens, "N_atom": sizes.atoms, "N_msa": sizes.msa, "N_templ": sizes.templates}
    lengths = {}
    for axis, size in fixed.items():
        feature = next(feature for feature in SAMPLE if axis in feature.axes)
        place = feature.axes.index(axis)
        longest = max(sample[feature.name].shape[place] for sample in samples)
        if size is not None and longest > size:
            raise SampleError(f"a sample has {axis} {longest}, padding to {size}: raise the size")
        lengths[axis] = longest if size is None else size
    return lengths


def collate(
    samples: Sequence[Mapping[str, NDArray[Any]]], sizes: PadSizes | None = None
) -> dict[str, NDArray[Any]]:
    """Pad and stack samples' features; every array gets a leading batch axis.

    Padding holds each feature's ``pad`` value of the schema; its masks are false.

    Raises:
        SampleError: there is no sample, or one is longer than a fixed size.
    """
    if not samples:
        raise SampleError("a batch of no samples")
    lengths = padded_lengths(samples, sizes or PadSizes())
    return {feature.name: _stacked(samples, feature, lengths) for feature in SAMPLE}


def collate_recycles(samples: Sequence[Sample], sizes: PadSizes | None = None) -> dict[str, NDArray[Any]]:
    """The MSA features of all recycles of samples, the first included: [N_batch, N_recycle, N_msa, N_token].

    Raises:
        SampleError: samples have different numbers of recycles, or are longer than a fixed size.
    """
    if len({len(sample.recycles) for sample in samples}) != 1:
        raise SampleError("the samples of a batch have different numbers of recycles")
    turns = zip(*((sample.features, *sample.recycles) for sample in samples), strict=True)
    named = [[{name: turn[name] for name in RESAMPLED} for turn in batch] for batch in turns]
    sizes = sizes or PadSizes()
    lengths = {"N_msa": sizes.msa, "N_token": sizes.tokens}
    for place, (axis, size) in enumerate(lengths.items()):
        longest = max(turn["msa"].shape[place] for batch in named for turn in batch)
        if size is not None and longest > size:
            raise SampleError(f"a sample has {axis} {longest}, padding to {size}: raise the size")
        lengths[axis] = size or longest
    features = [feature for feature in SAMPLE if feature.name in RESAMPLED]
    return {
        feature.name: np.stack([_stacked(batch, feature, lengths) for batch in named], axis=1)
        for feature in features
    }


def _stacked(
    samples: Sequence[Mapping[str, NDArray[Any]]], feature: Feature, lengths: Mapping[str, Any]
) -> NDArray[Any]:
    shape = [int(axis) if axis.isdigit() else lengths[axis] for axis in feature.axes]
    stacked = np.full((len(samples), *shape), feature.pad, feature.dtype)
    for place, sample in enumerate(samples):
        value = sample[feature.name]
        stacked[place][tuple(slice(length) for length in value.shape)] = value
    return stacked
