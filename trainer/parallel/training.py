"""What the training loop needs to share samples among the ranks of an SP group."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megafold.trainer import ops
from megafold.trainer.batches import Batch, TrainingData
from megafold.trainer.devices import autocast, to_device
from megafold.trainer.errors import ConfigError
from megafold.trainer.loop import Trainer
from megafold.trainer.losses import TrainingLoss, training_loss
from megafold.trainer.mini_rollout import MiniRollout, is_judged
from megafold.trainer.model.model import AlphaFold3
from megafold.trainer.parallel.batches import N_TOKEN, shard_batch
from megafold.trainer.parallel.mesh import Peers
from megafold.trainer.parallel.model import training_pass
from megafold.trainer.parallel.shards import Shards


@dataclass(frozen=True)
class SharedLoss:
    """The loop's forward pass in an SP group: this rank's part of the loss; the parts add up."""

    peers: Peers

    def __call__(self, trainer: Trainer, batch: Batch, cycles: int) -> TrainingLoss:
        """The part of the loss of ``batch``, this rank's share as :func:`shard_batch` cut it.

        Raises:
            ConfigError: the model is not the network that can be shared.
        """
        model, config = trainer.model, trainer.config
        if not isinstance(model, AlphaFold3):
            raise ConfigError(f"sp above 1 shares an AlphaFold3, not a {type(model).__name__}")
        features = to_device(batch, trainer.device)
        shards = Shards(self.peers, int(batch[N_TOKEN]))
        with autocast(trainer.device, config.precision):
            own = training_pass(
                model,
                features,
                shards,
                n_cycles=cycles,
                n_copies=config.n_copies,
                generator=trainer.generator,
                mini_rollout=MiniRollout.of(batch, config, judged=is_judged(model, config)),
            )
        features = own.batch
        if config.loss_weights.bond > 0:
            # A copy's bonds are all the sample's. The rows of a boolean matrix are small beside z's.
            features = {**features, "token_bonds": _all_rows(features["token_bonds"], self.peers)}
        with ops.use_backend(config.backend):
            return training_loss(features, own.outputs, config.loss_weights, own.share)


@dataclass(frozen=True)
class SharedCollate:
    """A collate function that keeps a rank's share of each batch; loader processes run it."""

    collate: Callable[[list[Any]], Batch]
    peers: Peers

    def __call__(self, samples: list[Any]) -> Batch:
        """Pad, stack and cut."""
        return shard_batch(self.collate(samples), self.peers)


def shared_data(data: TrainingData, peers: Peers) -> TrainingData:
    """The same data, of which each rank of an SP group gets its share of the pair-shaped features."""
    if peers.size == 1:
        return data
    place = Peers(peers.rank, peers.size)  # without the process group, which stays in this process
    return replace(data, collate=SharedCollate(data.collate, place))


def _all_rows(rows: Tensor, peers: Peers) -> Tensor:
    """[B, R, N] → [B, P·R, N], boolean; nothing to differentiate."""
    pieces = [rows.new_empty(rows.shape).byte() for _ in range(peers.size)]
    dist.all_gather(pieces, rows.byte(), group=peers.group)
    return torch.cat(pieces, dim=1).bool()
