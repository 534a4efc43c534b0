"""How much a run waits for data: what the trainer adds up and prints."""

import csv
import math
import re
import time

import pytest

from megafold.trainer.logging.data_wait import DataWait
from megafold.trainer.loop import Feed, Trainer
from tests.trainer.fakes import FakeFeed, FakeModel, quick_config


def test_the_first_step_is_kept_apart():
    wait = DataWait()
    wait.add(3.0, 3.5)
    assert (wait.first_s, math.isnan(wait.share)) == (3.0, True)
    assert wait.line() == "Waited 3.0 s for the first batch"
    for waited, step in ((0.01, 0.5), (0.0, 0.5), (0.02, 1.0)):
        wait.add(waited, step)
    assert wait.share == pytest.approx(0.03 / 2)
    assert wait.line() == (
        "Waited 3.0 s for the first batch, then 1.50 % of the time for data: 0.03 s of 2.0 s in 3 steps, "
        "0.02 s at most"
    )


class SlowFeed(FakeFeed):
    """Batches that each take a while."""

    def __iter__(self):
        for batch in super().__iter__():
            time.sleep(0.05)
            yield batch


def test_a_trainer_prints_what_its_steps_waited(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("megafold.trainer.logging.run_log.draw_losses", lambda csv_path, png_path: None)
    feed = SlowFeed()
    Trainer(FakeModel(), quick_config(steps=6), Feed(batches=feed, sampler=feed), tmp_path).run()
    with (tmp_path / "metrics.csv").open() as file:
        rows = list(csv.DictReader(file))[1:]
    waited = sum(float(row["data_wait"]) * float(row["step_s"]) for row in rows)
    share = 100 * waited / sum(float(row["step_s"]) for row in rows)
    assert waited >= 5 * 0.05
    line = capsys.readouterr().out.splitlines()[-1]
    found = re.search(r"then ([\d.]+) % of the time for data: ([\d.]+) s of [\d.]+ s in 5 steps", line)
    assert found, line
    assert float(found[1]) == pytest.approx(share, abs=0.01)
    assert float(found[2]) == pytest.approx(waited, abs=0.01)
