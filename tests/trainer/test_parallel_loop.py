"""Training runs on DP × SP ranks: the same weights as alone, and checkpoints that change hands."""

from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from megafold.trainer.batches import BatchStream, TrainingData
from megafold.trainer.config import TrainConfig
from megafold.trainer.data_parallel import Ranks
from megafold.trainer.errors import ConfigError
from megafold.trainer.loop import Feed, Trainer
from megafold.trainer.parallel.mesh import ParallelMesh, Peers, require_divisible
from megafold.trainer.parallel.training import SharedLoss, shared_data
from tests.trainer.batches import random_batch
from tests.trainer.fakes import FakeModel, quick_config
from tests.trainer.networks import MINI_JUDGING, as_dtype, mini_model

LITTLE = replace(MINI_JUDGING, n_pairformer=1, n_msa=1, diffusion=replace(MINI_JUDGING.diffusion, n_block=1))


class Entries(Dataset[dict[str, Tensor]]):
    """Samples of 5 tokens."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: tuple[int, int]) -> dict[str, Tensor]:
        batch = as_dtype(random_batch(index[1], 5, n_ligand=2, n_msa=3, n_templ=1), self.dtype)
        return {name: value[0] for name, value in batch.items()}


def stack(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    return {name: torch.stack([sample[name] for sample in samples]) for name in samples[0]}


def data_of(dtype: torch.dtype) -> TrainingData:
    return TrainingData(dataset=Entries(dtype), collate=stack, identity={"manifest": "ab"})


DATA = data_of(torch.float64)


@contextmanager
def quiet() -> Any:
    """No logs: several ranks and runs write side by side."""
    import megafold.trainer.loop as loop

    before = loop.RunLog
    loop.RunLog = lambda *_: loop.SilentLog()  # type: ignore[misc,assignment]
    try:
        yield
    finally:
        loop.RunLog = before  # type: ignore[misc]


def config_of(sp: int, accumulate: int, steps: int, n_cycles: int = 2) -> TrainConfig:
    return quick_config(
        sp=sp,
        accumulate=accumulate,
        steps=steps,
        n_copies=2,
        n_cycles=n_cycles,
        alpha_bond=0.5,
        alpha_confidence=0.1,
        alpha_pae=0.5,
        rollout_steps=2,
        learning_rate=1e-3,
    )


def run(folder: Path, config: TrainConfig, world: int, checkpoint: Path | None = None) -> Trainer:
    """Train on the first ``world`` ranks, which are all or this one alone."""
    ranks = Ranks(dist.get_rank(), world, 0, config.sp) if world > 1 else Ranks()
    peers = ParallelMesh.create(torch.device("cpu"), config.sp).sp if world > 1 else Peers()
    dtype = torch.float32 if config.precision == "bf16" else torch.float64
    stream = BatchStream(shared_data(data_of(dtype), peers), config, ranks)
    feed = Feed(batches=stream, sampler=stream, identity=DATA.identity)
    model = mini_model(seed=ranks.rank, config=LITTLE, dtype=dtype)
    model.backend = config.backend
    loss_of = SharedLoss(peers) if peers.size > 1 else None
    trainer = Trainer(model, config, feed, folder, ranks, loss_of)
    if checkpoint is not None:
        trainer.resume(checkpoint)
    with quiet():
        trainer.values = trainer.run().values  # type: ignore[attr-defined]
    return trainer


def difference(trainer: Trainer, other: Trainer) -> float:
    """Largest difference between weights, and between averaged weights."""
    largest = 0.0
    for state, reference in (
        (trainer.model.state_dict(), other.model.state_dict()),
        (trainer.average.state_dict(), other.average.state_dict()),
    ):
        for name, value in reference.items():
            largest = max(largest, float((state[name] - value).abs().max()))
    return largest


def check_eight_steps(folder: Path) -> tuple[float, float]:
    """Eight steps of two samples on 2 × 2 ranks and alone: difference of weights, distance they went."""
    shared = run(folder / "shared", config_of(2, 1, 8, 1), 4)
    if dist.get_rank() > 0:
        return 0.0, 1.0
    start = mini_model(config=LITTLE)
    alone = run(folder / "alone", config_of(1, 2, 8, 1), 1)
    moved = max(
        float((p - q).abs().max()) for p, q in zip(start.parameters(), alone.model.parameters(), strict=True)
    )
    return difference(shared, alone), moved


@pytest.mark.slow
def test_eight_steps_give_the_same_weights(rank_pool, tmp_path):
    results = rank_pool.run(check_eight_steps, tmp_path)
    assert results[0][0] < 1e-10
    assert results[0][1] > 1e-3


def check_layouts(folder: Path) -> dict[str, tuple[float, float]]:
    """A checkpoint of 2 × 2 ranks continued on others, four samples a step: loss, and weights after it."""
    run(folder / "first", config_of(2, 2, 2), 4)
    path = folder / "first/checkpoints/step-00000002.pt"
    dist.barrier()
    layouts = {"2x2": (2, 2), "1x4": (4, 4), "4x1": (1, 1)}
    found = {
        name: run(folder / name, config_of(sp, accumulate, 3), 4, path)
        for name, (sp, accumulate) in layouts.items()
    }
    if dist.get_rank() > 0:
        return {}
    found["1x1"] = run(folder / "1x1", config_of(1, 4, 3), 1, path)
    return {
        name: (float(trainer.values["loss"]), difference(trainer, found["2x2"]))  # type: ignore[attr-defined]
        for name, trainer in found.items()
    }


def test_a_checkpoint_resumes_on_another_layout(rank_pool, tmp_path):
    losses = rank_pool.run(check_layouts, tmp_path)[0]
    assert set(losses) == {"2x2", "1x4", "4x1", "1x1"}
    expected = losses["2x2"][0]
    for loss, moved in losses.values():
        assert loss == pytest.approx(expected, rel=1e-10)
        assert moved < 1e-9


def check_precision(folder: Path) -> tuple[float, float]:
    """Losses of a step in bfloat16 on four ranks and alone, through a back end without kernels for CPUs."""
    settings = replace(config_of(4, 1, 1), precision="bf16", backend="triton")
    shared = run(folder / "shared", settings, 4)
    alone = run(folder / f"alone{dist.get_rank()}", replace(settings, sp=1), 1)
    return tuple(float(trainer.values["loss"]) for trainer in (shared, alone))  # type: ignore[return-value,attr-defined]


def test_low_precision_and_another_back_end(rank_pool, tmp_path):
    pytest.importorskip("triton")
    for shared, alone in rank_pool.run(check_precision, tmp_path):
        assert shared == pytest.approx(alone, rel=0.05)


def check_skip(folder: Path) -> tuple[int, float]:
    """Rank 3's part of the loss is not a number in the second step."""
    config = config_of(2, 1, 3)
    ranks = Ranks(dist.get_rank(), 4, 0, 2)
    peers = ParallelMesh.create(torch.device("cpu"), 2).sp
    stream = BatchStream(shared_data(DATA, peers), config, ranks)
    shared = SharedLoss(peers)

    def loss_of(trainer: Trainer, batch: Any, cycles: int) -> Any:
        loss = shared(trainer, batch, cycles)
        if trainer.step == 2 and ranks.rank == 3:
            loss = replace(loss, total=loss.total * torch.nan)
        return loss

    feed = Feed(batches=stream, sampler=stream)
    trainer = Trainer(mini_model(config=LITTLE), config, feed, folder, ranks, loss_of)
    with quiet():
        result = trainer.run()
    return result.skipped, sum(float(p.double().sum()) for p in trainer.model.parameters())


def test_all_ranks_skip_a_step_together(rank_pool, tmp_path):
    results = rank_pool.run(check_skip, tmp_path)
    assert {skipped for skipped, _ in results} == {1}
    assert len({weights for _, weights in results}) == 1


def test_the_ranks_must_fill_the_groups():
    with pytest.raises(ConfigError, match=r"sp is 4 and there are 6 ranks.*torchrun"):
        require_divisible(6, 4)
    assert ParallelMesh.create(torch.device("cpu"), 1) == ParallelMesh()
    with pytest.raises(ConfigError, match="sp is 2 and there are 1 ranks"):
        ParallelMesh.create(torch.device("cpu"), 2)


def test_only_the_network_is_shared(tmp_path):
    trainer = Trainer(FakeModel(), quick_config(), Feed(batches=[]), tmp_path)
    with pytest.raises(ConfigError, match="not a FakeModel"):
        SharedLoss(Peers(0, 2))(trainer, {}, 1)
