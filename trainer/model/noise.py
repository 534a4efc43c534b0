"""Noise levels, random rotations and the sampler's steps (algorithms 18 and 19, SI 3.7).

Random numbers come from the given generator, on its own device, so that a CPU generator gives the same
numbers whatever device the model is on. Coordinates in Å, float32 or wider.
"""

import torch
from torch import Tensor

from megafold.trainer.model.config import DiffusionConfig


def random_normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Standard normal numbers with the dtype and device of ``like``."""
    device = like.device if generator is None else generator.device
    return torch.randn(shape, generator=generator, device=device, dtype=like.dtype).to(like.device)


def random_rotations(shape: tuple[int, ...], like: Tensor, generator: torch.Generator | None) -> Tensor:
    """Uniform rotation matrices [*shape, 3, 3], from normalised normal quaternions."""
    quaternion = random_normal((*shape, 4), like, generator)
    w, x, y, z = (quaternion / quaternion.norm(dim=-1, keepdim=True)).unbind(-1)
    rows = [
        [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
        [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
        [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
    ]
    return torch.stack([torch.stack(row, dim=-1) for row in rows], dim=-2)


def centre_random_augmentation(
    x: Tensor, mask: Tensor, s_trans: float, generator: torch.Generator | None
) -> Tensor:
    """Algorithm 19: centre, rotate and translate each copy at random.

    Args:
        x: [B, S, A, 3].
        mask: [B, A] boolean: the atoms that count for the centre. The others are put at the centre.
        s_trans: standard deviation of the translation, Å.
        generator: source of the random numbers.

    Returns:
        [B, S, A, 3].
    """
    present = mask[:, None, :, None].to(x.dtype)
    centre = (x * present).sum(-2, keepdim=True) / present.sum(-2, keepdim=True).clamp(min=1)
    rotation = random_rotations(tuple(x.shape[:2]), x, generator)
    translation = s_trans * random_normal((*x.shape[:2], 1, 3), x, generator)
    # Written out: on a GPU a matrix product may round positions to TF32.
    centred = (x - centre) * present
    rotated = (centred.unsqueeze(-2) * rotation.unsqueeze(-3)).sum(-1)
    return rotated + translation


def training_noise_levels(
    shape: tuple[int, ...],
    like: Tensor,
    config: DiffusionConfig,
    sigma_data: float,
    generator: torch.Generator | None,
) -> Tensor:
    """Noise levels in Å: sigma_data · exp(p_mean + p_std · N(0, 1)) (SI 3.7.1)."""
    return sigma_data * torch.exp(config.p_mean + config.p_std * random_normal(shape, like, generator))


def noise_schedule(n_steps: int, config: DiffusionConfig, sigma_data: float) -> list[float]:
    """The ``n_steps + 1`` noise levels of a rollout in Å, falling (SI equation 7)."""
    first, last = config.s_max ** (1 / config.p), config.s_min ** (1 / config.p)
    return [sigma_data * (first + i / n_steps * (last - first)) ** config.p for i in range(n_steps + 1)]
