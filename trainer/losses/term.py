"""What a loss returns: a value for each sample, and which samples have one."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megafold.trainer.ops.precision import wide


@dataclass(frozen=True)
class LossTerm:
    """One loss over a batch.

    Attributes:
        per_sample: float32 [B]; 0 where ``present`` is false.
        present: bool [B]; false for a sample nothing of which enters the loss (no resolved atom, no bond).
    """

    per_sample: Tensor
    present: Tensor

    @property
    def mean(self) -> Tensor:
        """Mean over the samples that have a value; 0, with a zero gradient, where none has."""
        return self.per_sample.sum() / self.present.sum().clamp(min=1)


def masked_mean(values: Tensor, mask: Tensor, dims: tuple[int, ...]) -> Tensor:
    """Mean of ``values`` where ``mask`` is true, over ``dims``; 0 where the mask is empty.

    Masked values do not enter, not even as 0·∞.
    """
    kept = torch.where(mask, values, 0.0)
    return kept.sum(dim=dims) / mask.expand(values.shape).sum(dim=dims).clamp(min=1)


def cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """Of logits [..., bins] and the true bins [...], [...], in float32 at least."""
    # Flat: with further axes the bins would be moved in memory, and a GPU has no deterministic sum.
    entropy = F.cross_entropy(wide(logits).flatten(0, -2), target.flatten(), reduction="none")
    return entropy.view(target.shape)


def without_autocast(tensor: Tensor) -> torch.autocast:
    """A context in which operations on ``tensor``'s device keep float32."""
    return torch.autocast(device_type=tensor.device.type, enabled=False)
