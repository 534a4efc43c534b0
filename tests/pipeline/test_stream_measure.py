"""What measuring a sample says, and that it changes nothing."""

import time

import numpy as np
import pytest

from megafold.pipeline.stream import Stream, measure
from megafold.pipeline.stream import sample as sample_module
from tests.pipeline import stream_cache as fake
from tests.pipeline.stream_cache import Chain


@pytest.fixture
def stream(tmp_path):
    chains = [Chain(["ALA", "GLY", "LYS"] * 4)]
    fake.publish(tmp_path / "cache", [(fake.structure("1abc", chains), chains, "")])
    return Stream(tmp_path / "cache")


def test_a_measured_sample_is_the_sample(stream):
    sample, cost = measure.measure_sample(stream, 3, epoch=1, cold=True)
    plain = stream.sample(3, epoch=1)
    for name, value in plain.features.items():
        np.testing.assert_array_equal(sample.features[name], value)
    assert sum(cost.stages.values()) == pytest.approx(cost.wall_s)
    assert min(cost.stages.values()) >= 0
    assert cost.cpu_s >= 0


def test_a_slow_stage_is_seen_and_clocks_are_taken_away(stream, monkeypatch):
    crop = sample_module.crop_entry

    def slow(*args):
        time.sleep(0.05)
        return crop(*args)

    monkeypatch.setattr(sample_module, "crop_entry", slow)
    _, cost = measure.measure_sample(stream, 0)
    assert cost.stages["crop"] >= 0.05
    assert cost.wall_s >= 0.05
    assert sample_module.crop_entry is slow


def test_bytes_read_are_those_of_the_files(stream, tmp_path):
    if measure.bytes_read() is None:
        pytest.skip("the system does not say what a process reads")
    (tmp_path / "file").write_bytes(bytes(3_000_000))
    before = measure.bytes_read() or 0
    (tmp_path / "file").read_bytes()
    assert 3_000_000 <= (measure.bytes_read() or 0) - before < 3_100_000
    cold = measure.measure_sample(stream, 0, cold=True)[1].bytes_read
    warm = measure.measure_sample(stream, 0)[1].bytes_read
    assert warm is not None
    assert cold is not None
    assert 0 <= warm < cold


def test_memory_is_known_of_processes_that_live():
    found = measure.resident_bytes()
    if found is None:
        pytest.skip("the system does not say what memory a process has")
    now, most = found
    assert 1_000_000 < now <= most
    assert measure.resident_bytes(2**22 + 1) is None


def test_a_summary_is_over_all_samples():
    costs = [
        measure.SampleCost(wall_s=0.001 * k, cpu_s=0.0005 * k, bytes_read=10 * k, stages={"crop": 0.001 * k})
        for k in range(1, 102)
    ]
    found = measure.summary(costs)
    assert found["samples"] == 101
    assert (found["p50_ms"], found["p99_ms"]) == (pytest.approx(51), pytest.approx(100))
    assert found["cpu_p50_ms"] == pytest.approx(25.5)
    assert (found["bytes_read"], found["most_bytes_read"]) == (510, 1010)
    assert found["stages_ms"]["crop"] == pytest.approx(51)
    assert found["stages_ms"]["labels"] == 0
