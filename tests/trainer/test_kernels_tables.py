"""Tables of tiles: what is looked up, what a GPU without a table gets, and how a table is tuned."""

import json

import pytest
import torch
from click.testing import CliRunner

from megafold.cli.tune import FAMILIES, command
from megafold.trainer.errors import ConfigError
from megafold.trainer.kernels import tune
from megafold.trainer.kernels.evoattention.tiles import FAMILY, Tile, known_tiles, tiles
from megafold.trainer.kernels.gated_output.tiles import tile_of
from megafold.trainer.kernels.tables import (
    Entry,
    Table,
    known_targets,
    path_of,
    read_table,
    table,
    use_table,
)

TARGETS = ["cuda:80", "cuda:90", "hip:gfx90a", "hip:gfx942"]
TILE = {"bq": 16, "bk": 32, "rows": 1, "warps": 4, "stages": 1, "registers": None}
ROLES = ("forward", "query", "query_bias", "key", "bias")


def entry(length: int, bk: int) -> Entry:
    return Entry(bytes=2, channels=32, length=length, tiles=dict.fromkeys(ROLES, TILE | {"bk": bk}))


def test_every_architecture_has_a_table_of_all_families():
    assert known_targets() == TARGETS
    for target in TARGETS:
        found = table(target)
        assert found.target == target
        assert set(found.kernels) == set(FAMILIES)
        assert known_tiles(target)
    assert "H200" in table("cuda:90").tuned["device"]
    assert not table("hip:gfx942").tuned


def test_the_bucket_of_the_longest_length_that_fits_is_taken():
    chosen = Table(target="cuda:00", kernels={FAMILY: [entry(64, 32), entry(512, 64)]})
    with use_table(chosen):
        assert [tiles("cuda:00", torch.bfloat16, 32, n).forward.bk for n in (64, 511, 512, 4000)] == [
            32, 32, 64, 64
        ]  # fmt: skip
        assert tiles("cuda:00", torch.bfloat16, 32, 10).forward == Tile(16, 16, 1, 4, 1)


@pytest.mark.parametrize("target", ["cuda:75", "cuda:120", "hip:gfx1100", "cpu"])
def test_an_unknown_gpu_gets_tiles_that_fit_everywhere(target):
    assert table(target).kernels == {}
    found = tiles(target, torch.bfloat16, 32, 384).forward
    # Keys and values of one stage and the queries, in bytes.
    assert (found.bq + 2 * found.stages * found.bk) * 128 * 2 <= 64 * 1024
    assert tile_of("gated_output", "forward", target, torch.float32, 256).rows == 16


def test_a_table_survives_its_file(tmp_path):
    made = Table(target="cuda:00", tuned={"device": "x"}, kernels={FAMILY: [entry(64, 32)]})
    made.write(tmp_path / "table.json")
    assert read_table(tmp_path / "table.json") == made


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"target": "cuda:00", "tuned": {}})])
def test_a_broken_table_is_named(tmp_path, content):
    path = tmp_path / "table.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"table\.json.*megafold tune"):
        read_table(path)


def test_a_new_entry_takes_the_place_of_its_like():
    old = Table(target="cuda:00", kernels={FAMILY: [entry(64, 32), entry(512, 64)]})
    new = tune.with_entry(old, FAMILY, entry(64, 128))
    assert [(e.length, e.tiles["forward"]["bk"]) for e in new.kernels[FAMILY]] == [(64, 128), (512, 64)]
    assert [e.tiles["forward"]["bk"] for e in old.kernels[FAMILY]] == [32, 64]


def test_the_fastest_candidate_wins_and_what_fails_is_passed_over(monkeypatch):
    monkeypatch.setattr(tune, "_device", lambda: torch.device("cpu"))
    candidates = [Tile(64, bk, 1, 4, 1) for bk in (16, 32, 64, 128)]
    milliseconds = {16: 4.0, 32: 1.0, 64: 0.5, 128: 2.0}
    problem = tune.Problem(
        FAMILY,
        torch.bfloat16,
        32,
        384,
        {"forward": lambda: tiles("cpu", torch.bfloat16, 32, 384)},
        {"forward": candidates},
        dict.fromkeys(ROLES, candidates[3]),
    )

    def do_bench(run, **_options):
        bk = run().forward.bk
        if bk == 64:
            raise RuntimeError("out of resources")
        return milliseconds[bk]

    monkeypatch.setattr(tune.triton.testing, "do_bench", do_bench)
    lines: list[str] = []
    found = tune.tune(problem, 5.0, lines.append)
    assert found.tiles["forward"]["bk"] == 32
    assert found.tiles["key"]["bk"] == 128
    assert (found.bytes, found.channels, found.length) == (2, 32, 288)
    assert "2.000 ms, now 1.000 ms" in lines[0]


def test_without_a_gpu_the_command_says_what_it_needs():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = CliRunner().invoke(command, [])
    assert isinstance(result.exception, ConfigError)
    assert "no GPU" in str(result.exception)


def test_tables_lie_beside_their_module():
    assert path_of("hip:gfx942").name == "hip-gfx942.json"
    assert path_of("hip:gfx942").exists()
