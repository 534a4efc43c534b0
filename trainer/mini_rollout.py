"""The mini roll-out: the structure that the network predicts just now (SI 4.1).

The truth follows it (SI 4.2), and the confidence head learns to judge it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from megafold.trainer.batches import Batch
from megafold.trainer.config import TrainConfig
from megafold.trainer.losses.permutation import with_nearest_truth


def is_judged(model: nn.Module, config: TrainConfig) -> bool:
    """Whether the confidence head is trained: there is one, it has a weight, and structures to judge.

    The same for all batches and ranks, which report the same losses.
    """
    has_head = getattr(model, "confidence", None) is not None
    return has_head and config.rollout_steps > 0 and config.alpha_confidence > 0


@dataclass(frozen=True)
class MiniRollout:
    """How a batch's structure is predicted, and its ground truth follows it.

    ``exchanges``: what may be exchanged in each sample; see
    :func:`~megafold.trainer.losses.permutation.nearest_truth`. ``n_steps``: of the roll-out. ``judged``: by
    the confidence head.
    """

    exchanges: Sequence[Mapping[str, Any]]
    n_steps: int
    judged: bool = False

    @classmethod
    def of(cls, batch: Batch, config: TrainConfig, *, judged: bool = False) -> "MiniRollout | None":
        """That of a loader's batch; None: it is not judged, and no truth can or is to be exchanged."""
        exchanges = batch.get("symmetry", ())
        exchangeable = any(own["chains"] or own["orders"] for own in exchanges)
        if not config.rollout_steps or not (judged or exchangeable):
            return None
        return cls(exchanges, config.rollout_steps, judged)

    def settle(
        self, batch: dict[str, Tensor], rollout: Callable[[int], Tensor]
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The batch with the truth that is nearest to the predicted structure, and that structure [B, A, 3].

        ``rollout(n_steps)`` predicts it, [B, 1, A, 3].
        """
        with torch.no_grad():
            predicted = rollout(self.n_steps).squeeze(1)
        # Versions of autocast keep the weights that they cast without gradients, and would use them again.
        torch.clear_autocast_cache()
        return with_nearest_truth(batch, predicted, self.exchanges), predicted
