"""``megafold train --sp`` under torchrun, on a cache that ``megafold cache build`` made."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from megafold.pipeline.sample_corpus import write_sample_corpus

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "GOMP_SPINCOUNT": "0", "PYTHONPATH": str(ROOT)}
SIZES = "--preset tiny --tokens 23 --msa-rows 16 --templates 1".split()
SETTINGS = [
    *SIZES,
    *"--device cpu --precision fp32 --sample-structures 0".split(),
    *"--set n_copies=3 --set n_cycles=2 --set alpha_bond=0.5 --set log_every=1".split(),
]
STEPS = 3


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("parallel")
    corpus = write_sample_corpus(folder / "corpus", entries=7)
    command = ["cache", "build", str(corpus.structures), str(folder / "cache")]
    run([*command, "--alignments", str(corpus.alignments), "--workers", "1"])
    return folder / "cache"


def run(arguments: list[str], ranks: int = 1) -> str:
    """``megafold ARGUMENTS``, under torchrun if ``ranks`` is above 1; what it printed."""
    result = subprocess.run(
        [*launcher(ranks), *arguments], cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


def launcher(ranks: int, *options: str) -> list[str]:
    torchrun = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *options, "-m"]
    return [sys.executable, "-m", *(torchrun if ranks > 1 else []), "megafold"]


def train(cache: Path, out: Path, ranks: int, sp: int, *options: str) -> dict[str, Any]:
    """Four samples a step; the summary that was printed."""
    arguments = ["train", str(cache), *SETTINGS, "--steps", str(STEPS), "--sp", str(sp), "--out", str(out)]
    accumulate = f"accumulate={4 * sp // ranks}"
    printed = run([*arguments, "--set", accumulate, "--json", *options], ranks)
    summary: dict[str, Any] = json.loads(printed)  # of the first rank alone
    return summary


def values(out: Path) -> list[list[float]]:
    """The losses and the gradient's norm of every step."""
    with (out / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))
    names = "loss diffusion mse smooth_lddt distogram bond grad_norm".split()
    return [[float(row[name]) for name in names] for row in rows]


@pytest.fixture(scope="module")
def alone(cache, tmp_path_factory) -> list[list[float]]:
    """What one process on its own computes."""
    out = tmp_path_factory.mktemp("alone") / "run"
    assert train(cache, out, 1, 1)["steps"] == STEPS
    found = values(out)
    assert len({row[0] for row in found}) == STEPS
    assert any(row[5] > 0 for row in found)  # some sample has a bond to a ligand
    return found


@pytest.fixture(scope="module")
def two_by_two(cache, tmp_path_factory) -> Path:
    """A run on 2 × 2 ranks with a checkpoint at every step."""
    out = tmp_path_factory.mktemp("two") / "run"
    assert train(cache, out, 4, 2, "--set", "checkpoint_every=1")["steps"] == STEPS
    return out


def test_groups_of_ranks_train_as_one_process(two_by_two, alone):
    assert flat(values(two_by_two)) == pytest.approx(flat(alone), rel=1e-5)


@pytest.mark.parametrize(
    ("ranks", "options"), [(2, ("--workers", "1")), pytest.param(1, (), marks=pytest.mark.exhaustive)]
)
def test_a_checkpoint_goes_on_on_another_layout(cache, two_by_two, alone, tmp_path, ranks, options):
    """Two ranks share samples of worker processes; one is alone. Others: ``test_parallel_loop``."""
    (tmp_path / "checkpoints").mkdir()
    shutil.copy(two_by_two / "checkpoints/step-00000001.pt", tmp_path / "checkpoints")
    train(cache, tmp_path, ranks, ranks, "--resume", *options)
    assert flat(values(tmp_path)) == pytest.approx(flat(alone[1:]), rel=1e-5)


def flat(rows: list[list[float]]) -> list[float]:
    return [value for row in rows for value in row]


def test_the_loader_of_a_rank_has_its_rows_of_the_bonds(cache):
    """Of real samples, from a worker process, as the trainer gets them."""
    from megafold.cli.train import _data, command
    from megafold.trainer.batches import BatchStream
    from megafold.trainer.config import TrainConfig
    from megafold.trainer.data_parallel import Ranks
    from megafold.trainer.parallel.batches import TOKEN_AXES
    from megafold.trainer.parallel.mesh import Peers
    from megafold.trainer.parallel.training import shared_data

    context = command.make_context("train", [str(cache), *SIZES, "--device", "cpu"])
    settings = {"num_workers": 1, "worker_start": "fork", "device": "cpu", "sample_count": 0}
    config = TrainConfig.for_preset("tiny", **settings)
    data = _data(context.params["cache"], context.params, config)

    def batches(peers: Peers) -> list[dict[str, Any]]:
        stream = BatchStream(shared_data(data, peers), config, Ranks())
        try:
            return [next(stream) for _ in range(12)]
        finally:
            stream.close()

    wholes, size = batches(Peers()), 3
    bonds = 0
    parts = [batches(Peers(rank, size)) for rank in range(size)]
    for whole, *shares in zip(wholes, *parts, strict=True):
        n = whole["token_mask"].shape[1]
        rows = -(-n // size)
        for share in shares:
            assert share["token_bonds"].shape == (1, rows, rows * size)
            for name in whole.keys() - TOKEN_AXES.keys() - {"meta"}:
                assert torch.equal(share[name], whole[name]), name
            for name in TOKEN_AXES.keys() - {"token_bonds"}:
                axis = TOKEN_AXES[name][0]
                assert share[name].shape[axis] == rows * size
                assert torch.equal(share[name].narrow(axis, 0, n), whole[name]), name
        together = torch.cat([share["token_bonds"] for share in shares], 1)
        assert torch.equal(together[:, :n, :n], whole["token_bonds"])
        assert together.sum() == whole["token_bonds"].sum()
        bonds += int(together.sum())
    assert bonds > 0


@pytest.mark.exhaustive  # test_parallel_failures.py has torchrun start such a job again
def test_a_killed_rank_ends_the_job_and_is_named(cache, tmp_path):
    """Killed at a moment of its own; torchrun starts the ranks again from the newest checkpoint."""
    arguments = ["train", str(cache), *SETTINGS, "--sp", "2", "--steps", "9", "--set", "checkpoint_every=2"]
    said = tmp_path / "stderr"
    with said.open("w") as file:
        job = subprocess.Popen(
            [*launcher(2, "--max-restarts", "1"), *arguments, "--out", str(tmp_path)],
            cwd=ROOT,
            env=ENVIRONMENT,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
        )
    try:
        wait_for(lambda: (tmp_path / "checkpoints/step-00000002.pt").exists(), 120)
        victim = child_of_rank(job.pid, 1)
        os.kill(victim, signal.SIGKILL)
        killed = time.monotonic()
        name = f"rank 1 ({os.uname().nodename}, process {victim}) died"
        wait_for(lambda: f"Error: {name}" in said.read_text(), 60)
        wait_for(lambda: child_of_rank(job.pid, 1) not in (0, victim), 60 - (time.monotonic() - killed))
        printed, _ = job.communicate(timeout=120)
    finally:
        job.kill()
    assert job.returncode == 0
    assert "Resumed from" in printed
    with (tmp_path / "metrics.csv").open() as file:
        assert [int(row["step"]) for row in csv.DictReader(file)] == list(range(1, 10))


def wait_for(condition: Any, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, f"not within {seconds:.0f} s"
        time.sleep(0.05)


def child_of_rank(launcher: int, rank: int) -> int:
    """The process of a rank that torchrun has started; 0 where there is none now."""
    for child in Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split():
        try:
            variables = Path(f"/proc/{child}/environ").read_bytes().split(b"\0")
        except (OSError, ProcessLookupError):
            continue
        if f"RANK={rank}".encode() in variables:
            return int(child)
    return 0
