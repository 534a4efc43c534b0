"""The diffusion module and its sampler against algorithms 18 and 20 to 22, in float64."""

from typing import Any

import numpy as np
import pytest
import torch

from megafold.trainer.model import diffusion
from megafold.trainer.model import model as network
from megafold.trainer.model.diffusion import FourierEmbedding
from megafold.trainer.model.outputs import TrunkOutputs
from megafold.trainer.model.transformer import AttentionPairBias
from tests.trainer.batches import random_batch
from tests.trainer.networks import MINI, as_dtype, mini_model

SIGMA_DATA = 16.0


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def trunk_outputs(n: int) -> TrunkOutputs:
    return TrunkOutputs(
        s_inputs=rand(1, n, MINI.c_s_inputs, seed=1),
        s_trunk=rand(1, n, MINI.c_s, seed=2),
        z_trunk=rand(1, n, n, MINI.c_z, seed=3),
        distogram_logits=rand(1, n, n, 64, seed=4),
    )


def test_fourier_embedding_is_algorithm_22():
    layer, t = FourierEmbedding(256).double(), rand(5)
    w, b = layer.w.numpy(), layer.b.numpy()
    np.testing.assert_allclose(layer(t), np.cos(2 * np.pi * (t.numpy()[:, None] * w + b)), atol=1e-12)
    for drawn in (w, b):  # standard normal numbers, and not the same ones
        assert abs(drawn.mean()) < 0.2
        assert abs(drawn.std() - 1) < 0.15
    assert abs(np.corrcoef(w, b)[0, 1]) < 0.2


def test_conditioning_is_algorithm_21():
    layer = mini_model().diffusion.conditioning
    batch = as_dtype(random_batch(0))
    trunk = trunk_outputs(batch["restype"].shape[1])
    sigma = torch.tensor([[0.5, 16.0, 700.0]], dtype=torch.float64)
    z = layer.pair(torch.cat([trunk.z_trunk, layer.relative_position(batch)], -1))
    s = layer.single(torch.cat([trunk.s_trunk, trunk.s_inputs], -1))[:, None]
    noise = layer.fourier(torch.from_numpy(np.log(sigma.numpy() / SIGMA_DATA) / 4))
    s = s + layer.noise(noise)[:, :, None]
    for of_single, of_pair in zip(layer.single_transitions, layer.pair_transitions, strict=True):
        s, z = s + of_single(s), z + of_pair(z)
    assert len(layer.single_transitions) == 2
    shared, pair = layer.shared(batch, trunk)
    torch.testing.assert_close(pair, z)
    torch.testing.assert_close(layer.at_noise_level(shared, sigma), s)


def test_denoising_is_algorithm_20():
    """EDM's preconditioning around the network, and what its transformer is given."""
    module = mini_model().diffusion
    batch = as_dtype(random_batch(0))
    context = module.prepare(batch, trunk_outputs(batch["restype"].shape[1]))
    seen: dict[str, tuple[tuple[torch.Tensor, ...], torch.Tensor]] = {}
    for name in ("encoder", "transformer", "decoder"):
        getattr(module, name).register_forward_hook(
            lambda _, inputs, output, name=name: seen.update({name: (inputs, output)})
        )
    x = rand(1, 3, batch["ref_pos"].shape[1], 3)
    sigma = torch.tensor([[0.5, 16.0, 700.0]], dtype=torch.float64)
    out = module(x, sigma, context)

    t = sigma[:, :, None, None]
    norm = (t**2 + SIGMA_DATA**2) ** 0.5
    torch.testing.assert_close(seen["encoder"][0][1], x / norm)
    s = module.conditioning.at_noise_level(context.s, sigma)
    a, s_given, z_given = seen["transformer"][0][:3]
    torch.testing.assert_close(a, seen["encoder"][1][0] + module.single(s))
    torch.testing.assert_close(s_given, s)
    assert torch.equal(z_given, context.z)
    torch.testing.assert_close(seen["decoder"][0][0], module.norm(seen["transformer"][1]))
    assert torch.equal(seen["decoder"][0][1], seen["encoder"][1][1])
    expected = (SIGMA_DATA / norm) ** 2 * x + SIGMA_DATA * t / norm * seen["decoder"][1]
    torch.testing.assert_close(out, expected)


def test_biases_that_steps_share_change_nothing(monkeypatch):
    module = mini_model().diffusion
    batch = as_dtype(random_batch(0))
    context = module.prepare(batch, trunk_outputs(batch["restype"].shape[1]))
    x = rand(1, 2, batch["ref_pos"].shape[1], 3)
    sigmas = [torch.full((1, 2), sigma, dtype=torch.float64) for sigma in (0.5, 700.0)]
    expected = [module(x, sigma, context) for sigma in sigmas]

    shared = module.for_many_steps(context)
    layers = [layer for layer in module.modules() if isinstance(layer, AttentionPairBias)]
    assert len(layers) == len(module.transformer.blocks) + 2 * MINI.atom.n_block
    computed = []
    for layer in layers:
        layer.bias.register_forward_hook(lambda *_: computed.append(1))
    assert all(torch.equal(module(x, sigma, shared), e) for sigma, e in zip(sigmas, expected, strict=True))
    assert not computed

    monkeypatch.setattr(diffusion, "_MOST_BIASES", 1)
    assert module.for_many_steps(context) is context


@pytest.mark.parametrize("most", [2, 20])
def test_steps_are_conditioned_on_their_own_noise_levels(monkeypatch, most):
    monkeypatch.setattr(diffusion, "_MOST_LEVELS", most)
    model = mini_model()
    batch = as_dtype(random_batch(0))
    seen: list[tuple[Any, ...]] = []
    model.diffusion.register_forward_pre_hook(lambda _, inputs: seen.append(inputs))
    model.rollout(batch, trunk_outputs(len(batch["restype"][0])), n_samples=2, n_steps=5)
    assert len({float(sigma[0, 0]) for _, sigma, *_ in seen}) == 5
    for _, sigma, context, s in seen:
        expected = model.diffusion.conditioning.at_noise_level(context.s, sigma)
        torch.testing.assert_close(s.expand_as(expected), expected)


def test_rollout_computes_each_bias_once():
    model = mini_model()
    batch = as_dtype(random_batch(0))
    computed = []
    for layer in model.diffusion.modules():
        if isinstance(layer, AttentionPairBias):
            layer.bias.register_forward_hook(lambda layer, *_: computed.append(layer))
    model.rollout(batch, trunk_outputs(len(batch["restype"][0])), n_samples=2, n_steps=3)
    assert (
        len(computed) == len(set(computed)) == len(model.diffusion.transformer.blocks) + 2 * MINI.atom.n_block
    )


@pytest.mark.parametrize("n_steps", [1, 25])
def test_rollout_is_algorithm_18(monkeypatch, n_steps):
    model = mini_model()
    batch = as_dtype(random_batch(0))
    n = batch["ref_pos"].shape[1]
    drawn = iter([rand(1, 2, n, 3, seed=seed) for seed in range(n_steps + 1)])
    monkeypatch.setattr(network, "random_normal", lambda *_: next(drawn))
    monkeypatch.setattr(
        network, "centre_random_augmentation", lambda x, *_: 0.9 * (x - x.mean(2, keepdim=True)) + 0.5
    )
    monkeypatch.setattr(
        model.diffusion, "forward", lambda x, sigma, *_: x / (1 + sigma[..., None, None]) + x.roll(1, 2)
    )
    coords = model.rollout(batch, trunk_outputs(len(batch["restype"][0])), n_samples=2, n_steps=n_steps)

    steps = np.arange(n_steps + 1) / n_steps
    c = SIGMA_DATA * (160 ** (1 / 7) + steps * (4e-4 ** (1 / 7) - 160 ** (1 / 7))) ** 7
    noise = [rand(1, 2, n, 3, seed=seed).numpy() for seed in range(n_steps + 1)]
    x = c[0] * noise[0]
    for before, after, xi in zip(c[:-1], c[1:], noise[1:], strict=True):
        x = 0.9 * (x - x.mean(2, keepdims=True)) + 0.5
        t = before * ((0.8 if after > 1 else 0) + 1)
        x_noisy = x + 1.003 * np.sqrt(t**2 - before**2) * xi
        denoised = x_noisy / (1 + t) + np.roll(x_noisy, 1, 2)
        x = x_noisy + 1.5 * (after - t) * (x_noisy - denoised) / t
    np.testing.assert_allclose(coords, x - x.mean(2, keepdims=True), rtol=1e-9, atol=1e-9 * np.abs(x).max())
