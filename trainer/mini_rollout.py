"""The mini roll-out: the structure that the network predicts just now, for the truth to follow (SI 4.2)."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megafold.trainer.batches import Batch
from megafold.trainer.config import TrainConfig
from megafold.trainer.losses.permutation import with_nearest_truth


@dataclass(frozen=True)
class MiniRollout:
    """How a batch's ground truth follows the network.

    ``exchanges``: what may be exchanged in each sample; see
    :func:`~megafold.trainer.losses.permutation.nearest_truth`. ``n_steps``: of the roll-out.
    """

    exchanges: Sequence[Mapping[str, Any]]
    n_steps: int

    @classmethod
    def of(cls, batch: Batch, config: TrainConfig) -> "MiniRollout | None":
        """That of a loader's batch; None: nothing may be exchanged, or the truth is to stay as it is."""
        exchanges = batch.get("symmetry", ())
        if not config.rollout_steps or not any(own["chains"] or own["orders"] for own in exchanges):
            return None
        return cls(exchanges, config.rollout_steps)

    def settle(self, batch: dict[str, Tensor], rollout: Callable[[int], Tensor]) -> dict[str, Tensor]:
        """The batch, chains and atoms of its truth exchanged to be near ``rollout(n_steps)`` [B, 1, A, 3]."""
        with torch.no_grad():
            predicted = rollout(self.n_steps).squeeze(1)
        # Versions of autocast keep the weights that they cast without gradients, and would use them again.
        torch.clear_autocast_cache()
        return with_nearest_truth(batch, predicted, self.exchanges)
