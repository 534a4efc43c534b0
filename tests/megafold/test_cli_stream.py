"""``megafold stream bench``: what it counts, by number of workers."""

import json

import pytest
from click.testing import CliRunner

from megafold.cache_store import LocalStore
from megafold.cli.main import group
from megafold.pipeline.stream.measure import STAGES
from tests.pipeline import stream_cache as fake
from tests.pipeline.stream_cache import Chain


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    path = tmp_path_factory.mktemp("bench") / "cache"
    store = LocalStore.create(path)
    msa = str(store.put(fake.msa("AGKAG", ["AGKA-", "--KAG"])))
    chains = [Chain(["ALA", "GLY", "LYS", "ALA", "GLY"], msa=msa)]
    fake.publish(path, [(fake.structure("1abc", chains), chains, "")])
    return path


def bench(*arguments):
    return CliRunner().invoke(group, ["stream", "bench", *map(str, arguments)])


def test_prints_a_row_for_each_number_of_workers_and_the_stages(cache):
    result = bench(cache, "--workers", "0", "--samples", 3)
    assert result.exit_code == 0, result.output
    heading, row, *_ = result.output.splitlines()
    assert heading.split()[:2] == ["workers", "samples/s"]
    assert row.split()[0] == "0"
    assert all(stage in result.output for stage in STAGES)


def test_json_adds_up(cache):
    pytest.importorskip("torch")
    result = bench(cache, "--workers", "0,1", "--samples", 4, "--cold", "--start", "fork", "--json")
    assert result.exit_code == 0, result.output
    here, worker = json.loads(result.stdout)["tries"]
    assert (here["workers"], worker["workers"]) == (0, 1)
    for found in (here, worker):
        assert found["samples"] == 4
        assert found["samples_per_s"] > 0
        assert 0 < found["p50_ms"] <= found["p90_ms"] <= found["p99_ms"]
        assert sum(found["stages_ms"].values()) == pytest.approx(found["mean_ms"])
        assert all(value >= 0 for value in found["stages_ms"].values())
    # The same samples, cold, are the same bytes wherever they are read.
    files = sum(path.stat().st_size for path in (cache / "objects").rglob("*") if path.is_file())
    assert here["bytes_read"] == pytest.approx(worker["bytes_read"], rel=0.1)
    assert 1000 < here["most_bytes_read"] < 4 * files


@pytest.mark.parametrize("text", ["two", "1,,2", "-1"])
def test_numbers_of_workers_that_are_none_are_refused(cache, text):
    result = bench(cache, "--workers", text)
    assert result.exit_code == 2
    assert "0,1,2,4" in result.output
