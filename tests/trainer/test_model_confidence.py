"""The confidence head (AF3 SI algorithm 31)."""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from megafold.trainer.errors import ConfigError
from megafold.trainer.model.confidence import ConfidenceHead
from megafold.trainer.model.config import ConfidenceConfig, ModelConfig
from megafold.trainer.model.model import AlphaFold3
from megafold.trainer.model.outputs import ConfidenceLogits, TrunkOutputs
from megafold.trainer.presets.model import AF3, SMALL, TINY
from tests.trainer.batches import pad_batch, random_batch
from tests.trainer.networks import MINI, MINI_JUDGING, as_dtype, mini_model

SIZES = MINI_JUDGING.confidence or ConfidenceConfig()
PAIRS = ("pae", "pde")


def batch_of(n: int = 8, samples: int = 1) -> dict[str, Tensor]:
    return as_dtype(random_batch(2, n, n_ligand=3, batch_size=samples))


def trunk_of(n: int, samples: int = 1, config: ModelConfig = MINI) -> TrunkOutputs:
    generator = torch.Generator().manual_seed(4)

    def draw(*shape: int) -> Tensor:
        return torch.randn(samples, *shape, dtype=torch.float64, generator=generator).requires_grad_()

    return TrunkOutputs(
        s_inputs=draw(n, config.c_s_inputs),
        s_trunk=draw(n, config.c_s),
        z_trunk=draw(n, n, config.c_z),
        distogram_logits=draw(n, n, 1),
    )


def judging(config: ModelConfig = MINI_JUDGING) -> AlphaFold3:
    return mini_model(config=config)


def head_of(model: AlphaFold3) -> ConfidenceHead:
    assert model.confidence is not None
    return model.confidence


def test_shapes():
    batch, trunk = batch_of(samples=2), trunk_of(8, 2)
    n_atom = batch["coords"].shape[1]
    judged = judging().judge(batch, trunk, batch["coords"])
    assert judged.plddt.shape == (2, n_atom, SIZES.n_plddt_bins)
    assert judged.resolved.shape == (2, n_atom, 2)
    assert judged.pae.shape == (2, 8, 8, SIZES.n_pae_bins)
    assert judged.pde.shape == (2, 8, 8, SIZES.n_pde_bins)
    assert torch.equal(judged.coords, batch["coords"])
    assert torch.equal(judged.pde, judged.pde.transpose(1, 2))
    assert not torch.allclose(judged.pae, judged.pae.transpose(1, 2))


def normed(x: np.ndarray, layer: torch.nn.Module) -> np.ndarray:
    """Layer norm and linear layer of a ``NormLinear``."""
    parameters = {name: value.detach().numpy() for name, value in layer.named_parameters()}
    x = (x - x.mean(-1, keepdims=True)) / np.sqrt(x.var(-1, keepdims=True) + 1e-5)
    x = x * parameters["norm.weight"] + parameters["norm.bias"]
    return x @ parameters["linear.weight"].T


def test_the_head_is_algorithm_31():
    """Line by line in loops, but for the Pairformer, which has tests of its own."""
    n, model = 8, judging()
    head, batch, trunk = head_of(model), batch_of(), trunk_of(8)
    coords = 3 * torch.randn(batch["coords"].shape, dtype=torch.float64)
    weight = {name: value.detach().numpy() for name, value in head.named_parameters()}
    s_inputs, z = trunk.s_inputs[0].detach().numpy(), trunk.z_trunk[0].detach().numpy().copy()
    x = coords[0].numpy()[batch["rep_atom"][0].numpy()]
    lower = np.linspace(3.25, 50.75, 39)
    seen = set()
    for i in range(n):
        for j in range(n):
            z[i, j] += weight["linear_z_row.weight"] @ s_inputs[i]
            z[i, j] += weight["linear_z_column.weight"] @ s_inputs[j]
            distance = np.sqrt(((x[i] - x[j]) ** 2).sum())
            below = np.flatnonzero(distance > lower)
            seen.add(len(below))
            if len(below):  # nothing below the first edge
                z[i, j] += weight["linear_distance.weight"][:, below[-1]]
    assert len(seen) > 4
    assert 0 in seen
    mask = torch.ones(1, n, dtype=torch.bool)
    given = (trunk.s_trunk.detach(), torch.from_numpy(z)[None], mask, mask[:, :, None] & mask[:, None])
    s, z = (value[0].detach().numpy() for value in head.pairformer(*given))
    judged = model.judge(batch, trunk, coords)

    def close(value: Tensor, expected: np.ndarray) -> None:
        np.testing.assert_allclose(value[0].detach().numpy(), expected, atol=1e-10)

    close(judged.pae, normed(z, head.pae))
    # The sum of both directions goes through one linear layer, without an offset: so do its halves.
    close(judged.pde, normed(z, head.pde) + normed(z, head.pde).swapaxes(0, 1))
    for name, bins in (("plddt", SIZES.n_plddt_bins), ("resolved", 2)):
        of_tokens = normed(s, getattr(head, name)).reshape(n, SIZES.n_atom, bins)
        token = batch["atom_to_token"][0].numpy()
        places = [int(np.sum(token[:atom] == token[atom])) for atom in range(len(token))]
        close(getattr(judged, name), np.stack([of_tokens[token[i], p] for i, p in enumerate(places)]))


def test_the_pairformer_of_the_head_has_its_own_blocks():
    head = head_of(judging(replace(MINI_JUDGING, confidence=replace(SIZES, n_block=3))))
    assert len(head.pairformer.blocks) == 3


def test_no_gradient_leaves_the_head_and_every_parameter_gets_one():
    model = judging().train()
    batch, trunk = batch_of(), trunk_of(8)
    coords = batch["coords"].clone().requires_grad_()
    judged = model.judge(batch, trunk, coords)
    sum(getattr(judged, name).sin().sum() for name in ("plddt", "resolved", *PAIRS)).backward()
    assert all(getattr(trunk, item.name).grad is None for item in fields(trunk))
    assert coords.grad is None
    assert not judged.coords.requires_grad
    silent = [name for name, p in head_of(model).named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == []


def test_only_distances_count():
    """Turned, mirrored and moved, a structure is the same to the head."""
    model, batch, trunk = judging(), batch_of(), trunk_of(8)
    coords = 5 * torch.randn(batch["coords"].shape, dtype=torch.float64)
    turn = torch.linalg.qr(torch.randn(3, 3, dtype=torch.float64))[0]
    first, second = (model.judge(batch, trunk, x) for x in (coords, coords @ turn.T + 7))
    for name in ("plddt", "resolved", *PAIRS):
        torch.testing.assert_close(getattr(first, name), getattr(second, name))
    other = model.judge(batch, trunk, 2 * coords)
    assert not torch.allclose(first.pae, other.pae)


def test_padding_changes_nothing():
    model, batch, trunk = judging(), batch_of(), trunk_of(8)
    judged = model.judge(batch, trunk, batch["coords"])
    n_atom = batch["coords"].shape[1]
    padded = as_dtype(pad_batch(batch, n_token=3, n_atom=6))
    wide = torch.nn.functional.pad
    longer = TrunkOutputs(
        s_inputs=wide(trunk.s_inputs, (0, 0, 0, 3), value=9.0),
        s_trunk=wide(trunk.s_trunk, (0, 0, 0, 3), value=9.0),
        z_trunk=wide(trunk.z_trunk, (0, 0, 0, 3, 0, 3), value=9.0),
        distogram_logits=trunk.distogram_logits,
    )
    coords = wide(batch["coords"], (0, 0, 0, 6), value=50.0)
    other: ConfidenceLogits = model.judge(padded, longer, coords)
    for name in ("plddt", "resolved"):
        torch.testing.assert_close(getattr(other, name)[:, :n_atom], getattr(judged, name))
    for name in PAIRS:
        torch.testing.assert_close(getattr(other, name)[:, :8, :8], getattr(judged, name))
    assert all(getattr(other, name).isfinite().all() for name in ("plddt", "resolved", *PAIRS))


def test_a_network_without_the_head_judges_nothing():
    model, batch = mini_model(), batch_of()
    assert model.confidence is None
    assert not any("confidence" in name for name in model.state_dict())
    with pytest.raises(ConfigError, match="no confidence head"):
        model.judge(batch, trunk_of(8), batch["coords"])


def test_the_rest_of_the_network_does_not_depend_on_the_head():
    """Neither its initial weights nor the order of its parameters."""
    torch.manual_seed(0)
    plain = AlphaFold3(MINI).state_dict()
    torch.manual_seed(0)
    judged = AlphaFold3(MINI_JUDGING).state_dict()
    assert list(judged)[: len(plain)] == list(plain)
    assert all(torch.equal(value, judged[name]) for name, value in plain.items())
    assert all(name.startswith("confidence.") for name in list(judged)[len(plain) :])


def test_presets_and_sizes():
    assert TINY.confidence is None
    assert SMALL.confidence == AF3.confidence == ConfidenceConfig()
    config = ModelConfig.from_dict(AF3.to_dict())
    assert config == AF3
    assert ModelConfig.from_dict({"confidence": None}).confidence is None
    with pytest.raises(ConfigError, match="n_plddt_bins must be positive"):
        ConfidenceConfig(n_plddt_bins=0)
    with pytest.raises(ConfigError, match=r"confidence\.n_bins"):
        ModelConfig.from_dict({"confidence": {"n_bins": 3}})


def test_initial_logits_are_even():
    torch.manual_seed(0)
    model = AlphaFold3(MINI_JUDGING).double()
    batch = batch_of()
    judged = model.judge(batch, trunk_of(8), batch["coords"])
    assert not any(getattr(judged, name).any() for name in ("plddt", "resolved", *PAIRS))
