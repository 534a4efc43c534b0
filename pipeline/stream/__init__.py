"""From a cache to training samples: thin, random, and a function of (seed, epoch, index). NumPy only.

``megafold.pipeline.stream.torch_dataset`` adapts it to PyTorch.
"""

from megafold.pipeline.stream.check import SampleError, validate_sample
from megafold.pipeline.stream.collate import PadSizes, collate
from megafold.pipeline.stream.config import (
    CropConfig,
    FailureConfig,
    MsaConfig,
    SamplingConfig,
    SplitConfig,
    StreamConfig,
    TemplateConfig,
)
from megafold.pipeline.stream.failures import Failure, FailureLog, SampleTimeout, TooManyFailures
from megafold.pipeline.stream.mixture import MixedStream, Source, open_stream
from megafold.pipeline.stream.order import SamplerState, find_sampler_state
from megafold.pipeline.stream.sample import Sample, Stream

__all__ = [
    "CropConfig",
    "Failure",
    "FailureConfig",
    "FailureLog",
    "MixedStream",
    "MsaConfig",
    "PadSizes",
    "Sample",
    "SampleError",
    "SampleTimeout",
    "SamplerState",
    "SamplingConfig",
    "Source",
    "SplitConfig",
    "Stream",
    "StreamConfig",
    "TemplateConfig",
    "TooManyFailures",
    "collate",
    "find_sampler_state",
    "open_stream",
    "validate_sample",
]
