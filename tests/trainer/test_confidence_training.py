"""The confidence head in a run: roll-outs are judged, checkpoints go on, structures tell what it expects."""

from typing import Any

import gemmi
import numpy as np
import pytest
import torch

from megafold.trainer.batches import TrainingData
from megafold.trainer.checkpoint import load_checkpoint
from megafold.trainer.errors import CheckpointError
from megafold.trainer.evaluation import sample_structures
from megafold.trainer.loop import Feed, Trainer, loss_of_whole_samples
from megafold.trainer.losses.confidence import confidence_losses
from megafold.trainer.mini_rollout import MiniRollout, is_judged
from megafold.trainer.model.model import AlphaFold3
from megafold.trainer.train import Resume, run_training
from tests.trainer.batches import random_batch
from tests.trainer.fakes import FakeModel, quick_config
from tests.trainer.networks import MINI, MINI_JUDGING, mini_model

PARTS = {"plddt", "resolved", "pde"}


@pytest.fixture(autouse=True)
def _no_drawing(monkeypatch):
    monkeypatch.setattr("megafold.trainer.logging.run_log.draw_losses", lambda csv_path, png_path: None)


def config_of(**changes):
    return quick_config(**{"n_copies": 2, "rollout_steps": 2, "learning_rate": 1e-3, **changes})


def network(config=MINI_JUDGING):
    return mini_model(config=config, dtype=torch.float32)


def trainer_of(model, folder, **changes):
    return Trainer(model, config_of(**changes), Feed(batches=[]), folder)


class Entries(torch.utils.data.Dataset):
    """Samples of 8 tokens."""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        sample = {name: value[0] for name, value in random_batch(index[1], 8).items()}
        return sample, {"entry": f"entry{index[1]}", "resolution": 2.0}


def collate(samples):
    batch = {name: torch.stack([s[name] for s, _ in samples]) for name in samples[0][0]}
    return {**batch, "meta": [meta for _, meta in samples]}


DATA = TrainingData(dataset=Entries(), collate=collate, identity={})


def test_when_the_head_is_trained():
    assert is_judged(network(), config_of())
    assert not is_judged(network(MINI), config_of())
    assert not is_judged(FakeModel(), config_of())
    assert not is_judged(network(), config_of(rollout_steps=0))
    assert not is_judged(network(), config_of(alpha_confidence=0.0))
    batch: dict[str, Any]
    for batch in ({}, {"symmetry": [{"chains": [], "orders": []}]}):
        assert MiniRollout.of(batch, config_of()) is None
        rollout = MiniRollout.of(batch, config_of(), judged=True)
        assert rollout is not None
        assert rollout.judged


@pytest.mark.parametrize(("alpha_pae", "parts"), [(0.0, PARTS), (1.0, PARTS | {"pae"})])
def test_a_step_trains_the_head(tmp_path, alpha_pae, parts):
    model = network().train()
    trainer = trainer_of(model, tmp_path, alpha_pae=alpha_pae)
    loss = loss_of_whole_samples(trainer, random_batch(1, 9), 2)
    assert parts <= loss.terms.keys()
    assert ("pae" in loss.terms) == ("pae" in parts)
    loss.total.backward()
    silent = {name for name, p in model.named_parameters() if p.grad is None or not p.grad.any()}
    # Zero gradients, where PAE is not learned, come from the loop.
    assert silent == (set() if alpha_pae else {f"confidence.pae.{x}" for x in NORM_LINEAR})


NORM_LINEAR = ("norm.weight", "norm.bias", "linear.weight")


@pytest.mark.parametrize("changes", [{"alpha_confidence": 0.0}, {"rollout_steps": 0}])
def test_a_step_without_a_weight_or_a_rollout_leaves_the_head_alone(tmp_path, monkeypatch, changes):
    model = network().train()
    monkeypatch.setattr(model, "judge", None)
    monkeypatch.setattr(model, "rollout", None)
    loss = loss_of_whole_samples(trainer_of(model, tmp_path, **changes), random_batch(1, 9), 1)
    assert not PARTS & loss.terms.keys()
    loss.total.backward()
    assert all(p.grad is None for p in model.confidence.parameters())


def test_the_head_judges_the_rollout_and_teaches_the_rest_nothing(tmp_path, monkeypatch):
    """Gradients of trunk and diffusion module do not depend on its weight."""
    found = []
    structures = []
    rollout, judge = AlphaFold3.rollout, AlphaFold3.judge

    def kept_rollout(*args, **settings):
        structures.append(rollout(*args, **settings).squeeze(1))
        return structures[-1].unsqueeze(1)

    def kept_judge(model, batch, trunk, coords):
        structures.append(coords)
        return judge(model, batch, trunk, coords)

    monkeypatch.setattr(AlphaFold3, "rollout", kept_rollout)
    monkeypatch.setattr(AlphaFold3, "judge", kept_judge)
    for alpha in (1e-4, 3.0):
        model = network().train()
        trainer = trainer_of(model, tmp_path, alpha_confidence=alpha)
        trainer.generator.manual_seed(3)
        torch.manual_seed(3)
        loss_of_whole_samples(trainer, random_batch(1, 9), 2).total.backward()
        predicted, judged = structures[-2:]
        assert torch.equal(predicted, judged)
        found.append({name: p.grad for name, p in model.named_parameters()})
    for name, gradient in found[0].items():
        if not name.startswith("confidence."):
            assert torch.equal(gradient, found[1][name]), name
        elif "pae" not in name:
            torch.testing.assert_close(gradient * 3e4, found[1][name], rtol=1e-3, atol=1e-6)


def test_the_head_learns():
    """To judge a structure that is near the truth here and there, from a trunk that stands still."""
    model, batch = network(), random_batch(1, 9)
    off = torch.randn(batch["coords"].shape, generator=torch.Generator().manual_seed(0))
    predicted = batch["coords"] + off * torch.linspace(0, 6, off.shape[1]).unsqueeze(-1)
    with torch.no_grad():
        trunk = model.run_trunk(batch, n_cycles=1)
    optimizer = torch.optim.Adam(model.confidence.parameters(), lr=1e-2)
    sums = []
    for _ in range(40):
        losses = confidence_losses(batch, model.judge(batch, trunk, predicted), with_pae=True)
        total = torch.stack([term.mean for term in losses.values()]).sum()
        sums.append(total.item())
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
    assert sums[-1] < 0.25 * sums[0]


def test_a_run_stops_and_resumes_exactly(tmp_path):
    config = {"checkpoint_every": 2, "alpha_confidence": 0.1, "alpha_pae": 1.0}
    run_training(config_of(steps=4, **config), DATA, tmp_path / "whole", model=network())
    run_training(config_of(steps=2, **config), DATA, tmp_path / "parts", model=network())
    torch.manual_seed(77)
    again = network()
    run_training(config_of(steps=4, **config), DATA, tmp_path / "parts", model=again, resume=Resume())
    states = [
        load_checkpoint(tmp_path / name / "checkpoints/step-00000004.pt") for name in ("whole", "parts")
    ]
    for part in ("model", "average"):
        assert any(name.startswith("confidence.") for name in states[0][part])
        for name, value in states[0][part].items():
            assert torch.equal(value, states[1][part][name]), name
    for index, entry in states[0]["optimizer"]["state"].items():
        for name, value in entry.items():
            assert torch.equal(value, states[1]["optimizer"]["state"][index][name])


def test_a_checkpoint_from_before_the_head_goes_on(tmp_path, capsys):
    first = run_training(config_of(steps=2), DATA, tmp_path, model=network(MINI))
    assert first.checkpoint is not None
    old = load_checkpoint(first.checkpoint)
    model = network()
    trainer = trainer_of(model, tmp_path)
    fresh = {name: value.clone() for name, value in model.confidence.state_dict().items()}
    trainer.resume(first.checkpoint)
    assert "is from before the confidence head, which starts anew" in capsys.readouterr().out
    for name, value in model.state_dict().items():
        assert torch.equal(value, old["model"].get(name, fresh.get(name.removeprefix("confidence."))))
    # The moments are those of their parameters: the next step is taken by all.
    after = run_training(config_of(steps=4), DATA, tmp_path, model=network(), resume=Resume())
    assert after.checkpoint is not None
    new = load_checkpoint(after.checkpoint)
    steps = [int(entry["step"]) for _, entry in sorted(new["optimizer"]["state"].items())]
    n_old = len(old["optimizer"]["state"])
    assert steps == [4] * n_old + [2] * (len(steps) - n_old)
    assert len(steps) == len(list(model.parameters()))
    assert after.skipped == 0


def test_a_checkpoint_of_another_network_is_still_refused(tmp_path):
    first = run_training(config_of(steps=1), DATA, tmp_path, model=network())
    assert first.checkpoint is not None
    with pytest.raises(CheckpointError, match="of another network"):
        trainer_of(network(MINI), tmp_path).resume(first.checkpoint)


def atoms_of(path):
    structure = gemmi.read_structure(str(path))
    return [[atom for chain in model for residue in chain for atom in residue] for model in structure]


def test_structures_tell_what_the_head_expects(tmp_path, monkeypatch):
    model, batch = network(), collate([Entries()[0, 1], Entries()[0, 2]])
    sampled = torch.stack([batch["coords"], 0.3 * batch["coords"]], dim=1)
    monkeypatch.setattr(model, "rollout", lambda *args, **settings: sampled)
    config = config_of(sample_count=2, sample_steps=3, alpha_pae=1.0)
    first, second = sample_structures(model, batch, config, tmp_path, torch.device("cpu"))
    for structure in (first, second):
        b_factors = np.array([[atom.b_iso for atom in atoms] for atoms in atoms_of(structure.path)])
        assert b_factors.shape[0] == 2
        assert ((b_factors > 0) & (b_factors < 100)).all()
        assert not np.allclose(b_factors[0], b_factors[1])
        np.testing.assert_allclose(b_factors.mean(1), 100 * np.array(structure.plddt), atol=0.01)
        for scores in (structure.ptm, structure.iptm):
            assert len(scores) == 2
            assert all(score is not None and 0 < score < 1 for score in scores)
        assert len(structure.ranking) == 2
        assert len(structure.chain_pair_iptm) == 2
        for pairs in structure.chain_pair_iptm:
            assert list(pairs) == ["A", "B", "C"]  # as in the file
            assert all(0 < pairs[a][b] == pairs[b][a] < 1 for a in "ABC" for b in "ABC")
            assert len({value for row in pairs.values() for value in row.values()}) == 6
    assert first.plddt != second.plddt


def test_scores_that_nothing_taught_are_not_told(tmp_path, monkeypatch):
    """Nor computed."""
    batch = collate([Entries()[0, 1]])
    monkeypatch.setattr("megafold.trainer.evaluation.confidence_scores", None)

    def sampled(model, **changes):
        config = config_of(sample_count=1, sample_steps=2, **changes)
        return sample_structures(model, batch, config, tmp_path, torch.device("cpu"))[0]

    without_pae = sampled(network())
    assert len(without_pae.plddt) == 1
    assert without_pae.ptm == without_pae.iptm == without_pae.ranking == without_pae.chain_pair_iptm == ()
    for model, changes in ((network(MINI), {}), (network(), {"alpha_confidence": 0.0})):
        structure = sampled(model, **changes)
        assert structure.plddt == ()
        assert {atom.b_iso for atoms in atoms_of(structure.path) for atom in atoms} == {0.0}


def test_the_last_stage_gives_the_head_gradients_alone(tmp_path):
    """AF3 SI table 6: structure and distogram are not trained any more."""
    model = network().train()
    settings = {"alpha_diffusion": 0.0, "alpha_distogram": 0.0, "alpha_pae": 1.0, "n_copies": 1}
    loss_of_whole_samples(trainer_of(model, tmp_path, **settings), random_batch(1, 9), 2).total.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.any() == name.startswith("confidence."), name


def test_the_heads_backward_pass_comes_when_the_copies_is_over(tmp_path):
    """So what the copies kept is free by then, and the longest crop is what the diffusion module allows."""
    model = network().train()
    order = []
    for name, parameter in model.named_parameters():
        part = name.partition(".")[0]
        parameter.register_post_accumulate_grad_hook(lambda _, part=part: order.append(part))
    loss_of_whole_samples(trainer_of(model, tmp_path, alpha_pae=1.0), random_batch(1, 9), 1).total.backward()
    assert list(dict.fromkeys(order)) == ["diffusion", "confidence", "trunk"]
    assert order == sorted(order, key=["diffusion", "confidence", "trunk"].index)
