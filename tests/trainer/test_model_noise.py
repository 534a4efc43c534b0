"""Noise schedule, noise levels and random rigid motions."""

import numpy as np
import torch

from megafold.trainer.model.config import DiffusionConfig
from megafold.trainer.model.noise import (
    centre_random_augmentation,
    noise_schedule,
    random_normal,
    random_rotations,
    training_noise_levels,
)

CONFIG = DiffusionConfig()


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_noise_schedule_is_equation_7():
    tau = np.linspace(0, 1, 201)
    expected = 16.0 * (160 ** (1 / 7) + tau * (4e-4 ** (1 / 7) - 160 ** (1 / 7))) ** 7
    np.testing.assert_allclose(noise_schedule(200, CONFIG, 16.0), expected, rtol=1e-10)
    np.testing.assert_allclose(expected[0], 2560)
    np.testing.assert_allclose(expected[-1], 0.0064)


def test_training_levels_are_log_normal():
    levels = training_noise_levels((200_000,), torch.zeros(1, dtype=torch.float64), CONFIG, 16.0, generator())
    logs = torch.log(levels / 16)
    assert abs(logs.mean() + 1.2) < 0.02
    assert abs(logs.std() - 1.5) < 0.02


def test_rotations_are_proper_and_uniform():
    rotations = random_rotations((50_000,), torch.zeros(1, dtype=torch.float64), generator())
    identity = torch.eye(3, dtype=torch.float64).expand(50_000, 3, 3)
    torch.testing.assert_close(rotations @ rotations.transpose(1, 2), identity)
    torch.testing.assert_close(torch.linalg.det(rotations), torch.ones(50_000, dtype=torch.float64))
    # Of uniform rotations every entry has mean 0 and variance 1/3, and the angle's cosine has mean -1/2.
    assert rotations.mean(0).abs().max() < 0.02
    assert (rotations.var(0) - 1 / 3).abs().max() < 0.01
    angle_cosine = (rotations.diagonal(dim1=1, dim2=2).sum(-1) - 1) / 2
    assert abs(angle_cosine.mean() + 0.5) < 0.02


def test_augmentation_moves_rigidly_about_the_centre():
    x = torch.randn(2, 4, 9, 3, dtype=torch.float64, generator=generator())
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[:, 6:] = False
    moved = centre_random_augmentation(x, mask, 1.0, generator(1))
    torch.testing.assert_close(
        torch.cdist(moved[:, :, :6], moved[:, :, :6]), torch.cdist(x[:, :, :6], x[:, :, :6])
    )
    centre = moved[:, :, :6].mean(2, keepdim=True)
    torch.testing.assert_close(moved[:, :, 6:], centre.expand(-1, -1, 3, -1))
    assert centre.std() > 0.3
    still = centre_random_augmentation(x, mask, 0.0, generator(1))
    assert still[:, :, :6].mean(2).abs().max() < 1e-12


def test_augmentation_without_atoms_is_finite():
    x = torch.zeros(1, 2, 5, 3)
    assert (
        centre_random_augmentation(x, torch.zeros(1, 5, dtype=torch.bool), 1.0, generator()).isfinite().all()
    )


def test_same_generator_same_numbers():
    like = torch.zeros(1)
    assert torch.equal(random_normal((5,), like, generator(3)), random_normal((5,), like, generator(3)))
    assert not torch.equal(random_normal((5,), like, generator(3)), random_normal((5,), like, generator(4)))
