"""Rows of the MSA of their own for each pass through the trunk (AF3 SI algorithm 8, line 2)."""

import pytest
import torch
from torch import Tensor

from megafold.trainer.devices import to_device
from megafold.trainer.loop import Feed, Trainer
from megafold.trainer.model.msa_rows import named_draws
from megafold.trainer.parallel.batches import N_TOKEN, shard_batch
from megafold.trainer.parallel.shards import Shards
from megafold.trainer.parallel.trunk import run_trunk
from tests.trainer.batches import random_batch
from tests.trainer.fakes import FakeFeed, FakeModel, quick_config
from tests.trainer.networks import as_dtype, mini_model
from tests.trainer.parallel_checks import error, peers_of

MSA = ("msa", "has_deletion", "deletion_value", "msa_mask")


def batch_of(n_token=7, draws=2):
    """A batch and, under ``recycles``, as many draws of its MSA, the first of which is its own."""
    batch = as_dtype(random_batch(0, n_token, n_ligand=2, n_msa=4))
    others = [as_dtype(random_batch(seed, n_token, n_ligand=2, n_msa=4)) for seed in range(1, draws)]
    recycles = {name: torch.stack([each[name] for each in (batch, *others)], dim=1) for name in MSA}
    return {**batch, "recycles": recycles}


def test_each_pass_sees_its_own_rows():
    model, batch = mini_model(), batch_of(draws=2)
    seen: list[dict[str, Tensor]] = []
    model.trunk.msa_module.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model.run_trunk(to_device(batch, torch.device("cpu")), n_cycles=3)
    for rows, draw in zip(seen, (0, 1, 0), strict=True):  # behind the last draw comes the first
        for name in MSA:
            assert torch.equal(rows[name], batch["recycles"][name][:, draw])
        assert torch.equal(rows["profile"], batch["profile"])


def test_equal_draws_change_nothing_and_others_do():
    model, batch = mini_model(), batch_of(draws=2)
    without = {name: value for name, value in batch.items() if name != "recycles"}
    same = {name: value[:, :1].expand(-1, 2, -1, -1) for name, value in batch["recycles"].items()}
    one, equal, other = (
        model.run_trunk(to_device(each, torch.device("cpu")), n_cycles=2).z_trunk
        for each in (without, {**batch, "recycles": same}, batch)
    )
    assert torch.equal(one, equal)
    assert (other - one).abs().max() > 1e-3


@pytest.mark.parametrize("redraw", [True, False])
def test_the_loop_hands_them_on_if_asked(tmp_path, monkeypatch, redraw):
    monkeypatch.setattr("megafold.trainer.logging.run_log.draw_losses", lambda csv_path, png_path: None)
    seen = []

    class Model(FakeModel):
        def forward(self, batch, **settings):
            seen.append({name for name in batch if name.startswith("recycles")})
            return super().forward(batch, **settings)

    class DrawnFeed(FakeFeed):
        def __iter__(self):
            for batch in super().__iter__():
                yield {**batch, "recycles": {name: torch.zeros(1, 2, 3, 4) for name in MSA}}

    feed = DrawnFeed()
    config = quick_config(steps=2, redraw_msa=redraw)
    Trainer(Model(), config, Feed(batches=feed, sampler=feed), tmp_path).run()
    assert seen == [{f"recycles.{name}" for name in MSA} if redraw else set()] * 2


def check_shared(size: int, n_token: int) -> dict[str, float]:
    """The trunk of a sample with draws, shared by ranks, against the serial one."""
    peers = peers_of(size)
    if peers is None:
        return {}
    model, whole = mini_model(), batch_of(n_token, draws=3)
    expected = model.run_trunk(to_device(whole, torch.device("cpu")), n_cycles=3)
    batch = shard_batch(whole, peers)
    shards = Shards(peers, batch.pop(N_TOKEN))
    out = run_trunk(model.trunk, {**batch, **named_draws(batch)}, 3, shards)
    own = slice(shards.rows.start, min(n_token, shards.rows.stop))
    count = len(range(n_token)[own])
    return {
        "z": error(out.z_trunk[:, :count, :n_token], expected.z_trunk[:, own]),
        "s": error(out.s_trunk[:, :n_token], expected.s_trunk),
    }


@pytest.mark.parametrize(("size", "n_token"), [(2, 7), (3, 5)])
def test_ranks_that_share_a_sample_see_the_same_rows(rank_pool, size, n_token):
    results = rank_pool.run(check_shared, size, n_token)
    found = [value for result in results for value in result.values()]
    assert len(found) == 2 * size
    assert max(found) < 1e-10
