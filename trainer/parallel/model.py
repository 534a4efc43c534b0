"""A training pass of the network in an SP group."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megafold.trainer import ops
from megafold.trainer.errors import ConfigError
from megafold.trainer.losses.total import LossShare
from megafold.trainer.mini_rollout import MiniRollout
from megafold.trainer.model.model import AlphaFold3
from megafold.trainer.model.outputs import ModelOutputs, TrunkOutputs
from megafold.trainer.parallel.confidence import judge
from megafold.trainer.parallel.diffusion import own_copies, prepare
from megafold.trainer.parallel.shards import Shards
from megafold.trainer.parallel.trunk import run_trunk


@dataclass(frozen=True, kw_only=True)
class SharedPass:
    """One rank's part of a training pass.

    Attributes:
        outputs: of ``z_trunk``, ``distogram_logits`` and the pair-shaped logits of the confidence head this
            rank's rows, of the copies its own.
        share: which part of the loss they make; the parts of an SP group add up to the sample's loss.
        batch: the batch, with the ground truth that they are to be compared with.
    """

    outputs: ModelOutputs
    share: LossShare
    batch: dict[str, Tensor]


def training_pass(
    model: AlphaFold3,
    batch: dict[str, Tensor],
    shards: Shards,
    *,
    n_cycles: int,
    n_copies: int,
    generator: torch.Generator | None = None,
    mini_rollout: MiniRollout | None = None,
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
        mini_rollout: what the ground truth follows before it is noised, and the confidence head judges.

    Raises:
        ConfigError: ``n_cycles`` is below 1, or a network without a confidence head is to judge.
    """
    if n_cycles < 1:
        raise ConfigError(f"n_cycles must be at least 1, got {n_cycles}")
    with ops.use_backend(model.backend):
        trunk = run_trunk(model.trunk, batch, n_cycles, shards)
    predicted: Tensor | None = None
    if mini_rollout is not None:
        rollout = partial(_rollout, model, batch, trunk, shards, generator)
        batch, predicted = mini_rollout.settle(batch, rollout)
    confidence = None
    if mini_rollout is not None and mini_rollout.judged and predicted is not None:
        if model.confidence is None:
            raise ConfigError("this network has no confidence head")
        with ops.use_backend(model.backend):
            confidence = judge(model.confidence, batch, trunk, predicted, shards)
    copies = model.noise_copies(batch, n_copies, generator)
    index, weight = own_copies(n_copies, shards.peers, copies.sigma)
    noised, sigma, target = (x[:, index] for x in (copies.noised, copies.sigma, copies.target))
    with ops.use_backend(model.backend):
        denoised = model.diffusion(noised, sigma, prepare(model.diffusion, batch, trunk, shards))
    outputs = ModelOutputs(
        trunk=trunk, denoised=denoised, noised=noised, sigma=sigma, target=target, confidence=confidence
    )
    share = LossShare(rows=shards.rows, copy_weight=weight, whole_weight=1 / shards.peers.size)
    return SharedPass(outputs=outputs, share=share, batch=batch)


def _rollout(
    model: AlphaFold3,
    batch: dict[str, Tensor],
    trunk: TrunkOutputs,
    shards: Shards,
    generator: torch.Generator | None,
    n_steps: int,
) -> Tensor:
    """One structure [B, 1, A, 3], denoised by every rank, since one is too few to share; the first one's."""
    with ops.use_backend(model.backend):
        context = prepare(model.diffusion, batch, trunk, shards)
        x = model.denoise(batch, context, n_samples=1, n_steps=n_steps, generator=generator)
    if shards.peers.size > 1:  # ranks' kernels may round differently, and they must decide alike
        dist.broadcast(x, group_src=0, group=shards.peers.group)
    return x
