"""Where a run computes, and in what precision."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megafold.trainer.batches import resolutions
from megafold.trainer.data_parallel import Ranks
from megafold.trainer.errors import ConfigError, DataError
from megafold.trainer.model.msa_rows import named_draws

#: Features without which nothing can be learned.
_NEEDED = frozenset("token_mask atom_mask atom_to_token rep_atom coords coords_mask".split())


def resolve_device(name: str, ranks: Ranks) -> torch.device:
    """The device that a setting means; ``auto`` takes this rank's GPU where there is one.

    Raises:
        ConfigError: there is no such device.
    """
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(
            f"device {name!r}: give auto, cpu, cuda or one of several GPUs as cuda:1"
        ) from error
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", ranks.local_rank)
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device.type == "cuda" and device.index >= count:
        raise ConfigError(
            f"device {device}: PyTorch {torch.__version__} finds {count} GPUs here; give another device, "
            "start no more ranks a machine than it has GPUs, or install a PyTorch that was built for these"
        )
    return device


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """The context of a forward pass in ``bf16`` or ``fp32``."""
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=precision == "bf16")


def to_device(batch: Mapping[str, Any], device: torch.device) -> dict[str, Tensor]:
    """The tensors of a batch, on a device; what is not a tensor stays behind, but for :func:`resolutions`.

    Raises:
        DataError: a feature is missing without which nothing can be learned.
    """
    tensors = {
        name: value
        for name, value in {**batch, **named_draws(batch), **resolutions(batch)}.items()
        if isinstance(value, Tensor)
    }
    missing = sorted(_NEEDED - tensors.keys())
    if missing:
        raise DataError(f"a batch lacks the features {missing}; it has {sorted(tensors)}")
    return {name: value.to(device, non_blocking=True) for name, value in tensors.items()}
