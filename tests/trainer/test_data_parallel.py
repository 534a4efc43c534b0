"""Two ranks on this machine, with gloo: the same weights, the same skips, no hang."""

import csv
import json
import os
import socket
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import nn

from megafold.trainer.checkpoint import load_checkpoint
from megafold.trainer.data_parallel import Ranks, _buckets

ROOT = Path(__file__).parents[2]

SCRIPT = textwrap.dedent(
    """
    import json, os, sys
    from pathlib import Path

    import torch

    import megafold.trainer.logging.run_log as run_log
    from megafold.trainer.data_parallel import Ranks
    from megafold.trainer.loop import Feed, Trainer
    from tests.trainer.fakes import FakeFeed, FakeModel, quick_config

    run_log.draw_losses = lambda csv_path, png_path: None
    folder = Path(sys.argv[1])
    ranks = Ranks.from_environment()
    ranks.start(torch.device("cpu"))

    def run(name, steps, checkpoint=None):
        torch.manual_seed(ranks.rank)
        # One rank's third batch is bad; different initial weights show that the first rank's are taken.
        feed = FakeFeed(bad=frozenset({3} if ranks.rank == 1 else ()), rank=ranks.rank)
        model = FakeModel(seed=ranks.rank)
        feeds = Feed(batches=feed, sampler=feed)
        trainer = Trainer(model, quick_config(steps=steps), feeds, folder / name, ranks)
        if checkpoint is not None:
            trainer.resume(checkpoint)
        result = trainer.run()
        states = {"weights": model.state_dict(), "average": trainer.average.state_dict()}
        sums = {key: {n: v.double().sum().item() for n, v in state.items()} for key, state in states.items()}
        noise = torch.rand(1, generator=trainer.generator).item()
        return {**sums, "skipped": result.skipped, "noise": noise}

    out = {"whole": run("whole", 6)}
    run("parts", 2)
    torch.distributed.barrier()
    out["parts"] = run("parts", 6, folder / "parts/checkpoints/step-00000002.pt")
    (folder / f"rank-{ranks.rank}.json").write_text(json.dumps(out))
    torch.distributed.destroy_process_group()
    # Without the interpreter's teardown: gloo's threads now and then abort a process that has finished.
    sys.stdout.flush()
    os._exit(0)
    """
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run_ranks(folder):
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "2",
    }
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(folder)],
            cwd=ROOT,
            env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
        )
        for rank in range(2)
    ]
    try:
        assert [process.wait(timeout=300) for process in processes] == [0, 0]
    finally:
        for process in processes:
            process.kill()
    return [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)]


def test_ranks_agree_skip_together_and_resume(tmp_path):
    """Ranks skip a step together, and a resumed run is bit-equal on two of them."""
    first, second = run_ranks(tmp_path)
    assert first["whole"]["weights"] == second["whole"]["weights"]
    assert first["whole"]["average"] == second["whole"]["average"]
    assert first["whole"]["skipped"] == second["whole"]["skipped"] == 1
    assert first["whole"]["noise"] != second["whole"]["noise"]
    with (tmp_path / "whole/metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [int(row["step"]) for row in rows] == list(range(1, 7))
    assert [int(row["skipped"]) for row in rows] == [0, 0, 1, 1, 1, 1]
    assert rows[2]["loss"] == "nan"
    assert first["parts"] == first["whole"]
    assert second["parts"] == second["whole"]
    states = [
        load_checkpoint(tmp_path / name / "checkpoints/step-00000006.pt") for name in ("whole", "parts")
    ]
    for name, value in states[0]["model"].items():
        assert torch.equal(value, states[1]["model"][name])
    assert len(states[0]["rng"]) == 2


def test_alone_everything_is_free():
    ranks = Ranks()
    model = nn.Linear(2, 2)
    model.weight.grad = torch.ones(2, 2)
    ranks.average_gradients(model.parameters())
    ranks.same_weights(model)
    assert not ranks.start(torch.device("cpu"))
    assert ranks.gather("x") == ["x"]
    assert ranks.sum(torch.ones(1)) == 1
    assert torch.equal(model.weight.grad, torch.ones(2, 2))


def test_the_environment_names_the_ranks(monkeypatch):
    for name, value in (("RANK", "5"), ("WORLD_SIZE", "8"), ("LOCAL_RANK", "1")):
        monkeypatch.setenv(name, value)
    assert Ranks.from_environment() == Ranks(rank=5, world=8, local_rank=1)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name)
    assert Ranks.from_environment() == Ranks(rank=0, world=1, local_rank=0)


@pytest.mark.parametrize("limit", [1, 5, 100])
def test_buckets_hold_every_gradient_once(monkeypatch, limit):
    monkeypatch.setattr("megafold.trainer.data_parallel._BUCKET_ELEMENTS", limit)
    gradients = [torch.zeros(3), torch.zeros(2), torch.zeros(4, dtype=torch.float64), torch.zeros(9)]
    buckets = _buckets(gradients)
    assert [id(g) for bucket in buckets for g in bucket] == [id(g) for g in gradients]
    for bucket in buckets:
        assert len({g.dtype for g in bucket}) == 1
        assert len(bucket) == 1 or sum(g.numel() for g in bucket) <= limit
