"""A training pass of the network in an SP group."""

from dataclasses import dataclass

import torch
from torch import Tensor

from megafold.trainer import ops
from megafold.trainer.errors import ConfigError
from megafold.trainer.losses.total import LossShare
from megafold.trainer.model.model import AlphaFold3
from megafold.trainer.model.outputs import ModelOutputs
from megafold.trainer.parallel.diffusion import own_copies, prepare
from megafold.trainer.parallel.shards import Shards
from megafold.trainer.parallel.trunk import run_trunk


@dataclass(frozen=True, kw_only=True)
class SharedPass:
    """One rank's part of a training pass.

    Attributes:
        outputs: of ``z_trunk`` and ``distogram_logits`` this rank's rows, of the copies its own.
        share: which part of the loss they make; the parts of an SP group add up to the sample's loss.
    """

    outputs: ModelOutputs
    share: LossShare


def training_pass(
    model: AlphaFold3,
    batch: dict[str, Tensor],
    shards: Shards,
    *,
    n_cycles: int,
    n_copies: int,
    generator: torch.Generator | None = None,
) -> SharedPass:
    """What :meth:`AlphaFold3.forward` computes, shared by the ranks of an SP group.

    Args:
        model: the serial model, with the same parameters on all ranks.
        batch: this rank's share; see :func:`megafold.trainer.parallel.batches.shard_batch`.
        shards: how its tokens fall onto ranks.
        n_cycles: passes through the trunk.
        n_copies: S, of the sample, not of the rank.
        generator: as in the serial model. Its state, and that of torch's own generator, must be the same
            on all ranks of the group: all of them draw all numbers.

    Raises:
        ConfigError: ``n_cycles`` is below 1.
    """
    if n_cycles < 1:
        raise ConfigError(f"n_cycles must be at least 1, got {n_cycles}")
    with ops.use_backend(model.backend):
        trunk = run_trunk(model.trunk, batch, n_cycles, shards)
    copies = model.noise_copies(batch, n_copies, generator)
    index, weight = own_copies(n_copies, shards.peers, copies.sigma)
    noised, sigma, target = (x[:, index] for x in (copies.noised, copies.sigma, copies.target))
    with ops.use_backend(model.backend):
        denoised = model.diffusion(noised, sigma, prepare(model.diffusion, batch, trunk, shards))
    outputs = ModelOutputs(trunk=trunk, denoised=denoised, noised=noised, sigma=sigma, target=target)
    return SharedPass(outputs=outputs, share=LossShare(rows=shards.rows, copy_weight=weight))
