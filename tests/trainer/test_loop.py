"""The loop on a small network: it learns, logs, skips what is not finite, and stops and resumes well."""

import csv
import math
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from megafold.trainer.checkpoint import load_checkpoint
from megafold.trainer.errors import DataError, DivergedError
from megafold.trainer.logging.csv_log import CsvLog, read_rows
from megafold.trainer.logging.plot import draw_losses
from megafold.trainer.loop import Feed, Trainer
from megafold.trainer.losses import LossWeights, training_loss
from tests.trainer.fakes import FakeFeed, FakeModel, quick_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _no_drawing(monkeypatch):
    """Drawing takes longer than the training here."""
    monkeypatch.setattr("megafold.trainer.logging.run_log.draw_losses", lambda csv_path, png_path: None)


def make_trainer(folder, feed=None, model=None, **changes):
    data = feed or FakeFeed()
    return Trainer(model or FakeModel(), quick_config(**changes), Feed(batches=data, sampler=data), folder)


def rows_of(folder):
    with (folder / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def test_it_learns_and_records_every_step(tmp_path):
    result = make_trainer(tmp_path, steps=60, learning_rate=0.2).run()
    rows = rows_of(tmp_path)
    assert [int(row["step"]) for row in rows] == list(range(1, 61))
    losses = [float(row["loss"]) for row in rows]
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10])
    assert set(rows[0]) == {
        *("step", "loss", "diffusion", "mse", "smooth_lddt", "distogram"),
        *("learning_rate", "grad_norm", "skipped", "samples_per_s", "data_wait", "step_s"),
    }
    assert [float(row["learning_rate"]) for row in rows[:3]] == pytest.approx([0.1, 0.2, 0.2])
    assert all(0 <= float(row["data_wait"]) <= 1 for row in rows)
    assert (result.step, result.skipped, result.stopped) == (60, 0, False)
    assert result.checkpoint == tmp_path / "checkpoints/step-00000060.pt"
    draw_losses(tmp_path / "metrics.csv", tmp_path / "loss.png")
    assert imread(tmp_path / "loss.png").std() > 0
    assert list((tmp_path / "tensorboard").glob("events.*"))


def test_steps_are_clipped_adam_and_an_average(tmp_path):
    """Three steps against numpy in float64: rate, clipping, Adam and the average together."""
    trainer = make_trainer(
        tmp_path, model=FakeModel(quiet=True), steps=3, clip_norm=0.25, warmup_steps=2, learning_rate=0.02
    )
    trainer.run()
    model, norms = FakeModel(quiet=True), []
    parameters = dict(model.named_parameters())
    weights = {name: value.detach().double().numpy().copy() for name, value in parameters.items()}
    average = {name: value.copy() for name, value in weights.items()}
    m, v = ({name: np.zeros_like(value) for name, value in weights.items()} for _ in range(2))
    for step, rate in enumerate((0.01, 0.02, 0.02), start=1):
        batch = FakeFeed().batch(step)
        loss = training_loss(batch, model(batch, n_cycles=1, n_copies=3), LossWeights()).total
        found = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        gradients = {
            name: np.zeros_like(weights[name]) if value is None else value.double().numpy()
            for name, value in zip(parameters, found, strict=True)
        }
        norms.append(math.sqrt(sum((value**2).sum() for value in gradients.values())))
        for name, parameter in parameters.items():
            g = gradients[name] * min(1, 0.25 / norms[-1])
            m[name], v[name] = 0.9 * m[name] + 0.1 * g, 0.95 * v[name] + 0.05 * g**2
            root = np.sqrt(v[name] / (1 - 0.95**step)) + 1e-8
            weights[name] -= rate * m[name] / (1 - 0.9**step) / root
            average[name] = 0.9 * average[name] + 0.1 * weights[name]
            parameter.data.copy_(torch.from_numpy(weights[name]))
    assert min(norms) > 0.25
    assert [float(row["grad_norm"]) for row in rows_of(tmp_path)] == pytest.approx(norms, rel=1e-4)
    for name, parameter in trainer.model.named_parameters():
        np.testing.assert_allclose(parameter.detach(), weights[name], rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(trainer.average.state_dict()[name], average[name], rtol=1e-4, atol=1e-5)


def test_csv_has_each_step_once_after_a_resume(tmp_path):
    make_trainer(tmp_path, steps=9, checkpoint_every=4, keep_checkpoints=9).run()
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("10,0.5")  # a crash in the middle of a line
    trainer = make_trainer(tmp_path, steps=12)
    trainer.resume(tmp_path / "checkpoints/step-00000004.pt")
    trainer.run()
    rows = rows_of(tmp_path)
    assert [int(row["step"]) for row in rows] == list(range(1, 13))
    assert all(math.isfinite(float(row["loss"])) for row in rows)


def test_csv_grows_columns(tmp_path):
    log = CsvLog(tmp_path / "log.csv", 0)
    log.append({"step": 1, "loss": 0.25})
    log.append({"step": 2, "loss": 0.125, "bond": 3.0})
    log.close()
    CsvLog(tmp_path / "log.csv", 1).close()
    assert list(read_rows(tmp_path / "log.csv")) == [{"step": "1", "loss": "0.25", "bond": ""}]


def test_steps_that_are_not_finite_are_skipped(tmp_path):
    feed = FakeFeed(bad=frozenset({3, 4}))
    trainer = make_trainer(tmp_path, feed=feed, model=FakeModel(quiet=True), steps=4)
    before = make_trainer(tmp_path / "before", model=FakeModel(quiet=True), steps=2)
    before.run()
    result = trainer.run()
    assert result.skipped == 2
    assert [int(row["skipped"]) for row in rows_of(tmp_path)] == [0, 0, 1, 2]
    # Weights, optimizer and average are as after step 2.
    for name, value in before.model.state_dict().items():
        if name != "calls":
            assert torch.equal(trainer.model.state_dict()[name], value)
            assert torch.equal(trainer.average.state_dict()[name], before.average.state_dict()[name])
    states = [t.optimizer.state_dict()["state"][0]["exp_avg"] for t in (before, trainer)]
    assert torch.equal(*states)
    assert load_checkpoint(result.checkpoint)["skipped"] == 2


class OverflowingModel(FakeModel):
    """Finite losses whose gradients are not: the derivative of √x at 0."""

    def forward(self, batch, **options):
        outputs = super().forward(batch, **options)
        outputs.trunk.distogram_logits.register_hook(lambda gradient: gradient * torch.inf)
        return outputs


def test_gradients_that_are_not_finite_are_skipped(tmp_path):
    trainer = make_trainer(tmp_path, model=OverflowingModel(), steps=2)
    assert trainer.run().skipped == 2
    assert all(math.isfinite(float(row["loss"])) for row in rows_of(tmp_path))
    assert torch.equal(trainer.model.table, FakeModel().table)


def test_a_run_that_has_diverged_gives_up(tmp_path):
    feed = FakeFeed(bad=frozenset(range(3, 100)))
    trainer = make_trainer(tmp_path, feed=feed, steps=50, max_skipped_in_a_row=5, checkpoint_every=2)
    with pytest.raises(DivergedError, match=r"5 steps in a row, up to step 7.*step-00000006\.pt"):
        trainer.run()


def test_accumulated_steps_are_those_of_a_larger_batch(tmp_path):
    """Two passes of one sample are one pass of two."""

    class Pairs(FakeFeed):
        def __iter__(self):
            while True:
                self.position += 1
                batches = [self.batch(2 * self.position - 1), self.batch(2 * self.position)]
                yield {name: torch.cat([b[name] for b in batches]) for name in batches[0]}

    one = make_trainer(tmp_path / "a", model=FakeModel(quiet=True), steps=3, accumulate=2)
    two = make_trainer(tmp_path / "b", feed=Pairs(), model=FakeModel(quiet=True), steps=3)
    one.run()
    two.run()
    torch.testing.assert_close(one.model.table, two.model.table, rtol=1e-3, atol=1e-4)
    first_losses = [float(rows_of(tmp_path / name)[0]["loss"]) for name in ("a", "b")]
    assert first_losses[0] == pytest.approx(first_losses[1])


def test_bf16_keeps_losses_and_weights_in_float32(tmp_path):
    trainer = make_trainer(tmp_path, steps=2, precision="bf16")
    trainer.run()
    assert {p.dtype for p in trainer.model.parameters()} == {torch.float32}
    assert math.isfinite(float(rows_of(tmp_path)[-1]["loss"]))


def test_cycles_depend_on_seed_and_step_alone(tmp_path):
    calls = []
    for name in ("a", "b"):
        trainer = make_trainer(tmp_path / name, steps=8, n_cycles=4)
        trainer.run()
        calls.append(int(trainer.model.calls))
    assert calls[0] == calls[1]
    assert 8 < calls[0] < 32


def test_data_that_are_empty_or_lack_features_are_named(tmp_path):
    trainer = Trainer(FakeModel(), quick_config(), Feed(batches=[]), tmp_path / "a")
    with pytest.raises(DataError, match="no batch"):
        trainer.run()
    batch = FakeFeed().batch(1)
    del batch["coords_mask"]
    trainer = Trainer(FakeModel(), quick_config(), Feed(batches=[batch]), tmp_path / "b")
    with pytest.raises(DataError, match="coords_mask"):
        trainer.run()


SCRIPT = textwrap.dedent(
    """
    import sys, time
    from pathlib import Path
    from megafold.trainer.loop import Feed, Trainer
    from tests.trainer.fakes import FakeFeed, FakeModel, quick_config

    class Slow(FakeFeed):
        def batch(self, position):
            time.sleep(0.02)
            return super().batch(position)

    feed = Slow()
    config = quick_config(steps=100_000, log_every=1)
    trainer = Trainer(FakeModel(), config, Feed(batches=feed, sampler=feed), Path(sys.argv[1]))
    result = trainer.run()
    print("stopped", result.stopped, "at", result.step, flush=True)
    """
)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_finishes_the_step_and_saves(tmp_path, number):
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step 3/"):
            process.send_signal(number)
            break
    lines += process.stdout.readlines()
    assert process.wait() == 0
    text = "".join(lines)
    assert "finishing the step" in text
    assert "--resume" in text
    step = int(text.rsplit("at", 1)[1])
    state = load_checkpoint(tmp_path / f"checkpoints/step-{step:08d}.pt")
    assert state["step"] == state["sampler"]["position"] == step
    assert int(rows_of(tmp_path)[-1]["step"]) == step


def test_a_drawing_without_room_hides_no_error(tmp_path, monkeypatch, capsys):
    from megafold.trainer.logging import run_log

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_log, "draw_losses", full)
    trainer = Trainer(FakeModel(), quick_config(steps=2), Feed(batches=FakeFeed()), tmp_path)
    monkeypatch.setattr(trainer, "save", lambda: (_ for _ in ()).throw(DataError("the first")))
    with pytest.raises(DataError, match="the first"):
        trainer.run()
    assert "loss.png is not drawn" in capsys.readouterr().out
