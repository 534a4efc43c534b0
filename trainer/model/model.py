"""AlphaFold 3's training network: trunk, denoising of many noised copies, confidence (algorithms 1 and 18).

Shapes: B batch, N tokens, A atoms, S noised copies (training) or samples. Coordinates in Å.
"""

from itertools import pairwise

import torch
from torch import Tensor, nn

from megafold.trainer import ops
from megafold.trainer.errors import ConfigError
from megafold.trainer.model.confidence import ConfidenceHead
from megafold.trainer.model.config import ModelConfig
from megafold.trainer.model.diffusion import DiffusionContext, DiffusionModule
from megafold.trainer.model.noise import (
    centre_random_augmentation,
    noise_schedule,
    random_normal,
    training_noise_levels,
)
from megafold.trainer.model.outputs import ConfidenceLogits, ModelOutputs, NoisedCopies, TrunkOutputs
from megafold.trainer.model.trunk import Trunk


class AlphaFold3(nn.Module):
    """The network. A batch is a dict of tensors named as the sample schema's, with a leading batch axis.

    ``backend`` may be changed between calls: parameters and state dict do not depend on it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.backend: str = config.backend
        self.trunk = Trunk(config)
        self.diffusion = DiffusionModule(config)
        sizes = config.confidence
        self.confidence = None if sizes is None else ConfidenceHead(config, sizes)

    def forward(
        self,
        batch: dict[str, Tensor],
        *,
        n_cycles: int,
        n_copies: int,
        generator: torch.Generator | None = None,
    ) -> ModelOutputs:
        """A training pass, without a mini roll-out and so without a structure to judge.

        Args:
            batch: features and labels.
            n_cycles: passes through the trunk; the last has gradients.
            n_copies: S, noised copies that share the trunk (AF3: 48).
            generator: source of rotations, translations and noise; None: PyTorch's own.
        """
        return self.denoise_copies(
            batch, self.run_trunk(batch, n_cycles=n_cycles), n_copies=n_copies, generator=generator
        )

    def run_trunk(self, batch: dict[str, Tensor], *, n_cycles: int) -> TrunkOutputs:
        """The trunk alone.

        Raises:
            ConfigError: ``n_cycles`` is below 1.
        """
        if n_cycles < 1:
            raise ConfigError(f"n_cycles must be at least 1, got {n_cycles}")
        with ops.use_backend(self.backend):
            outputs: TrunkOutputs = self.trunk(batch, n_cycles)
            return outputs

    def denoise_copies(
        self,
        batch: dict[str, Tensor],
        trunk: TrunkOutputs,
        *,
        n_copies: int,
        generator: torch.Generator | None = None,
    ) -> ModelOutputs:
        """Noise ``batch["coords"]`` and denoise it, ``n_copies`` times (SI 3.7.1)."""
        copies = self.noise_copies(batch, n_copies, generator)
        with ops.use_backend(self.backend):
            denoised = self.diffusion(copies.noised, copies.sigma, self.diffusion.prepare(batch, trunk))
        return ModelOutputs(
            trunk=trunk, denoised=denoised, noised=copies.noised, sigma=copies.sigma, target=copies.target
        )

    def noise_copies(
        self, batch: dict[str, Tensor], n_copies: int, generator: torch.Generator | None = None
    ) -> NoisedCopies:
        """Move ``batch["coords"]`` at random and add noise, ``n_copies`` times (SI 3.7.1)."""
        config = self.config
        coords = batch["coords"][:, None].expand(-1, n_copies, -1, -1)
        is_atom = batch["atom_mask"][:, None, :, None]
        target = is_atom * centre_random_augmentation(
            coords, batch["coords_mask"] & batch["atom_mask"], config.diffusion.s_trans, generator
        )
        shape = (len(coords), n_copies)
        sigma = training_noise_levels(shape, coords, config.diffusion, config.sigma_data, generator)
        noise = random_normal(tuple(coords.shape), coords, generator)
        noised = target + is_atom * sigma[:, :, None, None] * noise
        return NoisedCopies(target=target, noised=noised, sigma=sigma)

    def judge(self, batch: dict[str, Tensor], trunk: TrunkOutputs, coords: Tensor) -> ConfidenceLogits:
        """What the confidence head says of a structure ``coords`` [B, A, 3] (algorithm 31).

        Raises:
            ConfigError: the network has no such head.
        """
        if self.confidence is None:
            raise ConfigError("this network has no confidence head")
        with ops.use_backend(self.backend):
            logits: ConfidenceLogits = self.confidence(batch, trunk, coords)
            return logits

    @torch.no_grad()
    def sample(
        self,
        batch: dict[str, Tensor],
        *,
        n_cycles: int,
        n_samples: int,
        n_steps: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Sampled coordinates [B, n_samples, A, 3], centred; padding atoms are 0.

        ``n_steps`` defaults to the configuration's. The caller chooses ``eval()`` and autocast.
        """
        trunk = self.run_trunk(batch, n_cycles=n_cycles)
        return self.rollout(batch, trunk, n_samples=n_samples, n_steps=n_steps, generator=generator)

    @torch.no_grad()
    def rollout(
        self,
        batch: dict[str, Tensor],
        trunk: TrunkOutputs,
        *,
        n_samples: int,
        n_steps: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Algorithm 18 from given trunk representations; like :meth:`sample`."""
        with ops.use_backend(self.backend):
            context = self.diffusion.prepare(batch, trunk)
            x = self.denoise(batch, context, n_samples=n_samples, n_steps=n_steps, generator=generator)
        present = batch["atom_mask"][:, None, :, None].to(x.dtype)
        centre = (x * present).sum(-2, keepdim=True) / present.sum(-2, keepdim=True).clamp(min=1)
        return (x - centre) * present

    @torch.no_grad()
    def denoise(
        self,
        batch: dict[str, Tensor],
        context: DiffusionContext,
        *,
        n_samples: int,
        n_steps: int | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """Algorithm 18 in a prepared context; like :meth:`rollout`, but not centred."""
        config, mask = self.config.diffusion, batch["atom_mask"]
        context = self.diffusion.for_many_steps(context)
        levels = noise_schedule(n_steps or config.n_steps, config, self.config.sigma_data)
        coords = batch["ref_pos"]
        shape = (len(mask), n_samples, mask.shape[1], 3)
        x = levels[0] * random_normal(shape, coords, generator)
        # Noise is added before a step, up to a level that is known beforehand.
        sigmas = [
            previous * (1 + (config.gamma_0 if level > config.gamma_min else 0.0))
            for previous, level in pairwise(levels)
        ]
        singles = self.diffusion.at_noise_levels(context, sigmas)
        for (previous, level), sigma, s in zip(pairwise(levels), sigmas, singles, strict=True):
            x = centre_random_augmentation(x, mask, config.s_trans, generator)
            added = config.noise_scale * (sigma**2 - previous**2) ** 0.5
            x = x + added * random_normal(shape, x, generator)
            denoised = self.diffusion(x, x.new_full(shape[:2], sigma), context, s)
            x = x + config.step_scale * (level - sigma) * (x - denoised) / sigma
        return x
