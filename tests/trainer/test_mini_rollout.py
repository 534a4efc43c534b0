"""The ground truth follows the mini roll-out before it is noised: in the loop, and shared by ranks."""

import pytest
import torch
from torch import Tensor

from megafold.trainer.errors import ConfigError
from megafold.trainer.evaluation import sample_structures
from megafold.trainer.loop import Feed, Trainer, loss_of_whole_samples
from megafold.trainer.losses import LossWeights, training_loss
from megafold.trainer.mini_rollout import MiniRollout
from megafold.trainer.model.model import AlphaFold3
from megafold.trainer.parallel.batches import N_TOKEN, shard_batch
from megafold.trainer.parallel.model import training_pass
from megafold.trainer.parallel.shards import Shards
from tests.trainer.batches import random_batch
from tests.trainer.fakes import FakeModel, quick_config
from tests.trainer.networks import as_dtype, mini_model
from tests.trainer.parallel_checks import error, peers_of, summed

#: Atoms of each of the two equal chains.
K = 15


def batch_of(dtype=torch.float32):
    """Two equal chains of three residues and a ligand, and what a loader says may be exchanged."""
    batch = as_dtype(random_batch(1, 9, n_ligand=3), dtype)
    coords, mask = (batch[name][0, : 2 * K].unflatten(0, (2, K)) for name in ("coords", "coords_mask"))
    chains = [
        {
            "atoms": torch.arange(chain * K, (chain + 1) * K),
            "candidates": torch.tensor([[1], [2]]),
            "own": torch.tensor(chain),
            "coords": coords,
            "coords_mask": mask,
        }
        for chain in (0, 1)
    ]
    return {**batch, "symmetry": [{"orders": [], "chains": chains}]}


def exchanged(batch, name):
    value = batch[name].clone()
    value[:, : 2 * K] = value[:, : 2 * K].roll(K, dims=1)
    return value


def trainer_of(model, folder, **changes):
    return Trainer(model, quick_config(n_cycles=1, **changes), Feed(batches=[]), folder)


def test_the_truth_that_is_noised_is_the_one_near_the_rollout(tmp_path, monkeypatch):
    model = mini_model(dtype=torch.float32)
    trainer, batch = trainer_of(model, tmp_path, rollout_steps=3), batch_of()
    wanted = exchanged(batch, "coords")
    asked: list[int] = []
    seen: list[dict[str, Tensor]] = []

    def rollout(features, trunk, *, n_samples, n_steps, generator):
        asked.append(n_steps)
        return (wanted + 0.01 * torch.randn_like(wanted) + 5.0)[:, None]

    def denoise_copies(features, trunk, **settings):
        seen.append(features)
        return AlphaFold3.denoise_copies(model, features, trunk, **settings)

    monkeypatch.setattr(model, "rollout", rollout)
    monkeypatch.setattr(model, "denoise_copies", denoise_copies)
    loss = loss_of_whole_samples(trainer, batch, 1)
    assert asked == [3]
    assert torch.equal(seen[0]["coords"], wanted)
    assert torch.equal(seen[0]["coords_mask"], exchanged(batch, "coords_mask"))
    assert loss.total.isfinite()


def test_without_steps_or_exchanges_there_is_no_rollout(tmp_path):
    batch = batch_of()
    assert MiniRollout.of(batch, quick_config(rollout_steps=0)) is None
    assert MiniRollout.of({**batch, "symmetry": [{"orders": [], "chains": []}]}, quick_config()) is None
    assert MiniRollout.of({}, quick_config()) is None
    loss_of_whole_samples(trainer_of(FakeModel(), tmp_path, rollout_steps=0), batch, 1)
    with pytest.raises(ConfigError, match=r"FakeModel has no mini roll-out.*rollout_steps=0"):
        loss_of_whole_samples(trainer_of(FakeModel(), tmp_path), batch, 1)


def test_weights_that_the_rollout_cast_still_learn(tmp_path):
    """Versions of autocast would hand the training pass what they have cast without gradients."""
    model = mini_model(dtype=torch.float32).train()
    trainer = trainer_of(model, tmp_path, rollout_steps=2, precision="bf16")
    loss_of_whole_samples(trainer, batch_of(), 1).total.backward()
    silent = [name for name, p in model.diffusion.named_parameters() if p.grad is None or not p.grad.any()]
    assert silent == []


def test_metrics_of_a_sampled_structure_allow_for_exchanges(tmp_path, monkeypatch):
    model, batch = mini_model(dtype=torch.float32), batch_of()
    batch["coords_mask"][:] = True
    monkeypatch.setattr(model, "sample", lambda *a, **k: exchanged(batch, "coords")[:, None])
    config = quick_config(sample_count=1)
    found = sample_structures(model, batch, config, tmp_path, torch.device("cpu"))
    assert found[0].rmsd[0] == pytest.approx(0, abs=1e-4)
    assert found[0].lddt[0] == pytest.approx(1)
    del batch["symmetry"]
    assert sample_structures(model, batch, config, tmp_path, torch.device("cpu"))[0].rmsd[0] > 1


WEIGHTS = LossWeights()


def check_shared(size: int) -> dict[str, float]:
    """Loss and gradients of a step with a roll-out in an SP group, against those of one rank."""
    peers = peers_of(size)
    if peers is None:
        return {}
    batch = batch_of(torch.float64)
    rollout = MiniRollout.of(batch, quick_config(rollout_steps=2))
    assert rollout is not None
    del batch["symmetry"]

    def serial(model: AlphaFold3, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        trunk = model.run_trunk(batch, n_cycles=1)
        settled, _ = rollout.settle(
            batch, lambda n: model.rollout(batch, trunk, n_samples=1, n_steps=n, generator=generator)
        )
        outputs = model.denoise_copies(settled, trunk, n_copies=3, generator=generator)
        return settled["coords"], training_loss(settled, outputs, WEIGHTS).total

    def shared(model: AlphaFold3, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        part = shard_batch(batch, peers)
        shards = Shards(peers, part.pop(N_TOKEN))
        own = training_pass(
            model, part, shards, n_cycles=1, n_copies=3, generator=generator, mini_rollout=rollout
        )
        return own.batch["coords"], training_loss(own.batch, own.outputs, WEIGHTS, own.share).total

    models, truths, totals = [], [], []
    for step in (serial, shared):
        models.append(mini_model())
        coords, total = step(models[-1], torch.Generator().manual_seed(5))
        total.backward()
        truths.append(coords)
        totals.append(total)
    errors = {
        "truth": error(truths[1], truths[0]),
        "loss": error(summed(totals[1].detach(), peers), totals[0]),
    }
    for (name, expected), own in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
        if expected.grad is not None:
            gradient = torch.zeros_like(own) if own.grad is None else own.grad
            errors[name] = error(summed(gradient, peers), expected.grad)
    return errors


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_that_share_a_sample_settle_on_one_truth(rank_pool, size):
    results = rank_pool.run(check_shared, size)
    worst = {key: value for result in results for key, value in result.items() if not value < 1e-10}
    assert len(results[0]) > 100
    assert worst == {}
