"""The whole network: shapes, masks, gradients, back ends, sampling."""

import dataclasses

import pytest
import torch

from megafold.trainer import ops
from megafold.trainer.errors import ConfigError
from megafold.trainer.model.model import AlphaFold3
from megafold.trainer.model.outputs import TrunkOutputs
from megafold.trainer.model.pairformer import PairformerBlock
from megafold.trainer.presets.model import AF3, TINY
from tests.trainer.batches import pad_batch, random_batch
from tests.trainer.networks import MINI, as_dtype, mini_model


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def fields(outputs: TrunkOutputs) -> dict[str, torch.Tensor]:
    return {field.name: getattr(outputs, field.name) for field in dataclasses.fields(outputs)}


def first_block(model: AlphaFold3) -> PairformerBlock:
    block = model.trunk.pairformer.blocks[0]
    assert isinstance(block, PairformerBlock)
    return block


def test_shapes():
    model = mini_model(dtype=torch.float32).train()
    batch = random_batch(0, batch_size=2)
    n, a = batch["restype"].shape[1], batch["ref_element"].shape[1]
    outputs = model(batch, n_cycles=2, n_copies=3, generator=generator())
    assert outputs.trunk.s_inputs.shape == (2, n, MINI.c_s_inputs)
    assert outputs.trunk.s_trunk.shape == (2, n, MINI.c_s)
    assert outputs.trunk.z_trunk.shape == (2, n, n, MINI.c_z)
    assert outputs.trunk.distogram_logits.shape == (2, n, n, 64)
    assert outputs.sigma.shape == (2, 3)
    for name in ("denoised", "noised", "target"):
        value = getattr(outputs, name)
        assert value.shape == (2, 3, a, 3)
        assert value.dtype == torch.float32
        assert value.isfinite().all()
    logits = outputs.trunk.distogram_logits
    torch.testing.assert_close(logits, logits.transpose(1, 2))


def test_padding_changes_nothing():
    model = mini_model()
    batch = as_dtype(random_batch(0, batch_size=2))
    padded = pad_batch(batch, n_token=5, n_atom=13, n_msa=3, n_templ=2)
    n, a = batch["restype"].shape[1], batch["ref_element"].shape[1]
    plain, wide = (model.run_trunk(each, n_cycles=2) for each in (batch, padded))
    torch.testing.assert_close(wide.s_inputs[:, :n], plain.s_inputs)
    torch.testing.assert_close(wide.s_trunk[:, :n], plain.s_trunk)
    torch.testing.assert_close(wide.z_trunk[:, :n, :n], plain.z_trunk)
    torch.testing.assert_close(wide.distogram_logits[:, :n, :n], plain.distogram_logits)
    assert all(value.isfinite().all() for value in fields(wide).values())

    x = torch.randn(2, 3, a, 3, dtype=torch.float64, generator=generator())
    sigma = torch.tensor([[0.1, 4.0, 300.0]] * 2, dtype=torch.float64)
    denoised = model.diffusion(x, sigma, model.diffusion.prepare(batch, plain))
    x_padded = torch.nn.functional.pad(x, (0, 0, 0, 13), value=5.0)
    denoised_padded = model.diffusion(x_padded, sigma, model.diffusion.prepare(padded, wide))
    torch.testing.assert_close(denoised_padded[:, :, :a], denoised)
    assert torch.count_nonzero(denoised_padded[:, :, a:]) == 0


def test_values_in_padding_do_not_matter():
    model = mini_model()
    padded = pad_batch(as_dtype(random_batch(0)), n_token=4, n_atom=9, n_msa=2)
    expected = model.run_trunk(padded, n_cycles=1)
    changed = {name: value.clone() for name, value in padded.items()}
    for name in ("restype", "residue_index", "asym_id", "entity_id", "ref_element", "ref_space_uid"):
        changed[name][:, -4:] = 3
    changed["msa"][:, -2:] = 7
    changed["deletion_value"][:, -2:] = 0.7
    changed["profile"][:, -4:] = 0.5
    changed["ref_pos"][:, -9:] = 2.5
    outputs = model.run_trunk(changed, n_cycles=1)
    n = int(padded["token_mask"].sum())
    torch.testing.assert_close(outputs.s_trunk[:, :n], expected.s_trunk[:, :n])
    torch.testing.assert_close(outputs.z_trunk[:, :n, :n], expected.z_trunk[:, :n, :n])


def test_empty_sample_beside_a_full_one_is_finite():
    model = mini_model()
    batch = as_dtype(random_batch(0, batch_size=2))
    for name in ("token_mask", "atom_mask", "msa_mask", "coords_mask"):
        batch[name][1] = False
    outputs = model(batch, n_cycles=1, n_copies=2, generator=generator())
    assert outputs.denoised.isfinite().all()
    assert all(value.isfinite().all() for value in fields(outputs.trunk).values())
    assert torch.count_nonzero(outputs.denoised[1]) == 0


def test_batch_without_msa_and_templates():
    model = mini_model()
    batch = as_dtype(random_batch(0, n_msa=0, n_templ=0))
    assert model(batch, n_cycles=1, n_copies=1, generator=generator()).denoised.isfinite().all()


def test_trunk_sees_no_labels():
    model = mini_model()
    batch = as_dtype(random_batch(0))
    moved = batch | {"coords": batch["coords"] + 17, "b_factor": batch["b_factor"] * 0}
    for name, value in fields(model.run_trunk(batch, n_cycles=1)).items():
        assert torch.equal(getattr(model.run_trunk(moved, n_cycles=1), name), value)


def test_translated_labels_give_the_same_targets():
    model = mini_model()
    batch = as_dtype(random_batch(0, unresolved=0.2))
    moved = batch | {"coords": torch.where(batch["coords_mask"][..., None], batch["coords"] + 17, 0.0)}
    first, second = (model(each, n_cycles=1, n_copies=2, generator=generator()) for each in (batch, moved))
    torch.testing.assert_close(second.target, first.target)
    torch.testing.assert_close(second.denoised, first.denoised)


def test_noised_is_target_plus_noise_of_sigma():
    model = mini_model()
    batch = as_dtype(random_batch(0, n_token=60))
    outputs = model.denoise_copies(
        batch, model.run_trunk(batch, n_cycles=1), n_copies=8, generator=generator()
    )
    ratio = (outputs.noised - outputs.target).std(dim=(2, 3)) / outputs.sigma
    torch.testing.assert_close(ratio, torch.ones_like(ratio), rtol=0.1, atol=0)
    seen = batch["coords_mask"][0]
    distances = torch.cdist(batch["coords"][0, seen], batch["coords"][0, seen])
    torch.testing.assert_close(
        torch.cdist(outputs.target[0, :, seen], outputs.target[0, :, seen]),
        distances.expand(8, -1, -1),
        rtol=0,
        atol=1e-6,
    )


def test_padding_is_not_noised():
    batch = pad_batch(as_dtype(random_batch(0)), n_atom=6)
    copies = mini_model().noise_copies(batch, 3, generator())
    for moved in (copies.target, copies.noised):
        assert torch.count_nonzero(moved[:, :, -6:]) == 0
        assert (moved[:, :, :-6] != 0).all()


def test_same_generator_same_outputs():
    model = mini_model()
    batch = as_dtype(random_batch(0))
    first, same, other = (
        model(batch, n_cycles=1, n_copies=2, generator=generator(seed)).denoised for seed in (0, 0, 1)
    )
    assert torch.equal(first, same)
    assert not torch.equal(first, other)


def test_gradient_reaches_every_parameter():
    model = mini_model().train()
    batch = as_dtype(random_batch(0))
    outputs = model(batch, n_cycles=2, n_copies=2, generator=generator())
    (outputs.denoised.square().sum() + outputs.trunk.distogram_logits.square().sum()).backward()
    silent = {
        name
        for name, parameter in model.named_parameters()
        if parameter.grad is None or torch.count_nonzero(parameter.grad) == 0
    }
    assert silent == set()


def test_gradients_flow_through_the_last_cycle_alone():
    model = mini_model()
    batch = as_dtype(random_batch(0))
    parameter = first_block(model).pair.attention_starting.linear_out.weight
    calls = []
    model.trunk.pairformer.register_forward_hook(lambda *_: calls.append(torch.is_grad_enabled()))
    model.run_trunk(batch, n_cycles=3).z_trunk.sum().backward()
    assert calls == [False, False, True]
    assert parameter.grad is not None
    with pytest.raises(ConfigError, match="n_cycles"):
        model.run_trunk(batch, n_cycles=0)


def test_a_fresh_network_starts_as_the_supplement_says():
    torch.manual_seed(0)
    model = AlphaFold3(MINI).eval()
    batch = random_batch(0)
    outputs = model(batch, n_cycles=1, n_copies=2, generator=generator())
    assert torch.count_nonzero(outputs.trunk.distogram_logits) == 0
    # The decoder's last layer is zero: what is left is EDM's skip connection.
    variance = outputs.sigma[:, :, None, None] ** 2 + 16.0**2
    torch.testing.assert_close(outputs.denoised, 16.0**2 / variance * outputs.noised)
    # Residual branches of the trunk start at zero: a second cycle changes nothing.
    first, second = (model.run_trunk(batch, n_cycles=n) for n in (1, 2))
    torch.testing.assert_close(first.z_trunk, second.z_trunk)
    block = first_block(model)
    z, mask = torch.randn(1, 5, 5, MINI.c_z), torch.ones(1, 5, 5, dtype=torch.bool)
    assert torch.equal(block.pair(z, mask), z)


@pytest.mark.parametrize("n_cycles", [1, 2])
def test_bfloat16_autocast_is_finite_and_trains(n_cycles):
    model = mini_model(dtype=torch.float32).train()
    batch = random_batch(0)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = model(batch, n_cycles=n_cycles, n_copies=2, generator=generator())
    assert outputs.denoised.dtype == torch.float32
    assert outputs.denoised.isfinite().all()
    (outputs.denoised.square().mean() + outputs.trunk.distogram_logits.float().square().mean()).backward()
    for name, parameter in model.named_parameters():
        # A cycle without gradients must not leave weights behind that the last cycle then uses.
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name


def test_bfloat16_autocast_is_close_to_float32():
    model = mini_model(dtype=torch.float32)
    batch = random_batch(0)
    exact = model(batch, n_cycles=1, n_copies=4, generator=generator())
    with torch.autocast("cpu", torch.bfloat16):
        low = model(batch, n_cycles=1, n_copies=4, generator=generator())
    assert torch.equal(low.noised, exact.noised)
    error = (low.denoised - exact.denoised).square().mean().sqrt()
    assert error < 0.05 * exact.denoised.square().mean().sqrt()


def test_activation_checkpointing_changes_no_gradient():
    batch = as_dtype(random_batch(0))
    gradients = []
    for recompute in (False, True):
        config = dataclasses.replace(MINI, activation_checkpointing=recompute)
        model = mini_model(config=config).train()
        torch.manual_seed(0)
        model(batch, n_cycles=1, n_copies=2, generator=generator()).denoised.square().sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, msg=name)


def test_sampling_is_centred_masked_and_repeatable():
    model = mini_model(dtype=torch.float32)
    batch = pad_batch(random_batch(0, batch_size=2), n_token=2, n_atom=6)
    settings = {"n_cycles": 1, "n_samples": 3, "n_steps": 4}
    coords = model.sample(batch, **settings, generator=generator())
    n = batch["atom_mask"].sum(1)
    assert coords.shape == (2, 3, batch["atom_mask"].shape[1], 3)
    assert coords.isfinite().all()
    assert not coords.requires_grad
    assert coords.sum(2).abs().max() / n.max() < 1e-3
    assert torch.count_nonzero(coords[:, :, -6:]) == 0
    assert torch.equal(model.sample(batch, **settings, generator=generator()), coords)
    assert not torch.equal(coords[:, 0], coords[:, 1])


def test_rollout_with_a_perfect_denoiser_finds_the_structure(monkeypatch):
    """With a denoiser that knows the answer (in whatever pose), algorithm 18 ends there."""
    model = mini_model()
    batch = as_dtype(random_batch(0))
    truth = batch["coords"] - batch["coords"].mean(1, keepdim=True)

    def denoise(x: torch.Tensor, *_: object) -> torch.Tensor:
        u, _, vt = torch.linalg.svd(truth.transpose(1, 2)[:, None] @ (x - x.mean(2, keepdim=True)))
        vt = torch.cat([vt[..., :2, :], vt[..., 2:, :] * torch.linalg.det(u @ vt)[..., None, None]], dim=-2)
        return truth[:, None] @ (u @ vt) + x.mean(2, keepdim=True)

    monkeypatch.setattr(model.diffusion, "forward", denoise)
    coords = model.sample(batch, n_cycles=1, n_samples=2, n_steps=60, generator=generator())
    error = torch.cdist(coords, coords) - torch.cdist(truth, truth)[:, None]
    assert error.abs().max() < 0.1


def test_state_dict_does_not_depend_on_the_back_end():
    names = [
        list(AlphaFold3(dataclasses.replace(MINI, backend=backend)).state_dict())
        for backend in ("eager", "compile", "triton")
    ]
    assert names[0] == names[1] == names[2]


def test_model_runs_its_back_end_and_falls_back(monkeypatch):
    model = mini_model()
    seen = []
    model.trunk.register_forward_hook(lambda *_: seen.append(ops.active_backend()))
    monkeypatch.setattr(ops.registry, "_PROVIDERS", {"eager": None, "triton": None})
    batch = as_dtype(random_batch(0))
    expected = model.run_trunk(batch, n_cycles=1).z_trunk
    monkeypatch.setattr(ops.registry, "_implementations", {})
    model.backend = "triton"
    assert torch.equal(model.run_trunk(batch, n_cycles=1).z_trunk, expected)
    assert seen == ["eager", "triton"]


@pytest.mark.slow
def test_compile_back_end_equals_eager():
    block = first_block(mini_model()).pair
    z = torch.randn(1, 6, 6, MINI.c_z, dtype=torch.float64, generator=generator())
    mask = torch.ones(1, 6, 6, dtype=torch.bool)
    mask[:, 4] = mask[:, :, 4] = False
    with torch.no_grad():
        expected = block(z, mask)
        with ops.use_backend("compile"):
            torch.testing.assert_close(block(z, mask), expected, rtol=1e-10, atol=1e-10)


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def test_parameter_counts():
    with torch.device("meta"):
        model = AlphaFold3(AF3)
    # By hand for one Pairformer block: two triangle multiplications, two triangle attentions, the pair
    # transition, single attention and single transition (algorithms 11 to 15, 17 and 24).
    c_s, c_z = 384, 128
    multiplication = 4 * c_z + 4 * c_z * c_z + 2 * c_z * c_z
    attention = 2 * c_z + 5 * c_z * c_z + 4 * c_z
    single = 2 * c_s + 5 * c_s * c_s + c_s + 2 * c_z + 16 * c_z
    transitions = sum(2 * c + 12 * c * c for c in (c_s, c_z))
    block = 2 * multiplication + 2 * attention + single + transitions
    assert count(model.trunk.pairformer) == 48 * block
    assert 150e6 < count(model.trunk) < 155e6
    assert 200e6 < count(model.diffusion) < 206e6
    # 24 atoms of 50 bins and 2, 64 bins of both errors, s_inputs in rows and columns, 39 bins of distance.
    outputs = 24 * 52 * c_s + 2 * 64 * c_z + 4 * (c_s + c_z)
    assert model.confidence is not None
    assert count(model.confidence) == 4 * block + outputs + (2 * 449 + 39) * c_z
    assert count(AlphaFold3(TINY)) < 1.1e6
