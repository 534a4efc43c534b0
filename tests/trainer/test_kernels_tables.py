"""Tables of tiles: what is looked up, what a GPU without a table gets, that all fit, how they are tuned."""

import json
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from dataclasses import astuple
from typing import Any

import pytest
import torch
import triton
from click.testing import CliRunner

from megafold.cli.tune import FAMILIES, command
from megafold.trainer.errors import ConfigError
from megafold.trainer.kernels import tune
from megafold.trainer.kernels.evoattention.tiles import FAMILY, Tile, tiles
from megafold.trainer.kernels.gated_output import tiles as gated_output
from megafold.trainer.kernels.layernorm_linear import tiles as layernorm_linear
from megafold.trainer.kernels.tables import (
    Entry,
    Table,
    known_targets,
    path_of,
    read_table,
    table,
    use_table,
)
from megafold.trainer.kernels.transition import tiles as transition
from megafold.trainer.kernels.triangle_multiplication import tiles as triangle_multiplication
from megafold.trainer.kernels.tune_problems import BY_LENGTH, PROBLEMS, Problem
from tests.trainer import kernels_targets
from tests.trainer.kernels_targets import (
    SHARED_MEMORY,
    SOURCES,
    TARGETS,
    compile_source,
    every_tile,
    residence,
    some_tiles,
)

TILE = {"bq": 16, "bk": 32, "rows": 1, "warps": 4, "stages": 1, "registers": None}
ROLES = ("forward", "query", "query_bias", "key", "bias")
compiles = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set")


def entry(length: int, bk: int) -> Entry:
    return Entry(bytes=2, channels=32, length=length, tiles=dict.fromkeys(ROLES, TILE | {"bk": bk}))


def test_every_architecture_has_a_table_of_all_families():
    assert known_targets() == list(TARGETS)
    assert set(FAMILIES) == set(PROBLEMS) == set(SOURCES) == set(kernels_targets.FAMILIES)
    for target in TARGETS:
        found = table(target)
        assert found.target == target
        assert set(found.kernels) == set(FAMILIES)
        for name, (family, _) in kernels_targets.FAMILIES.items():
            assert family.known(target)
            assert all(set(each.tiles) == set(family.roles) for each in found.kernels[name]), name
    for target in ("cuda:80", "hip:gfx90a", "hip:gfx942"):
        entries = [each for entries in table(target).kernels.values() for each in entries]
        assert not any("device" in each.tuned for each in entries)
    assert all("H200" in each.tuned["device"] for each in table("cuda:90").kernels["transition"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("target", TARGETS)
def test_no_tile_asks_for_what_the_compiler_does_not_know(target, family):
    unknown = "maxnreg" if target.startswith("hip") else "matrix_instr_nonkdim"
    known, _ = kernels_targets.FAMILIES[family]
    for _, _, found in known.known(target):
        assert not any(unknown in getattr(found, role).options() for role in known.roles)


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("of", [some_tiles, pytest.param(every_tile, marks=pytest.mark.exhaustive)])
def test_tiles_compile_and_fit(of, target, family):
    known, _ = kernels_targets.FAMILIES[family]
    tabled = {getattr(found, role) for _, _, found in known.known(target) for role in known.roles}
    for itemsize, channels, role, tile in of(family, target):
        if itemsize == 4 and target != "hip:gfx942":
            continue  # products in full precision take the longest to compile; once is enough
        source = SOURCES[family](role, tile, itemsize, channels, True)
        made = compile_source(target, source, **tile.options())
        assert made.metadata.shared <= SHARED_MEMORY[target], (role, tile, channels)
        if target.startswith("hip") and itemsize == 2 and tile in tabled:
            _, spilled, waves = residence(made)
            assert spilled == 0, (role, tile, channels)
            assert waves >= 2, (role, tile, channels)


def test_every_kernel_is_compiled_for_every_architecture():
    """In two bytes for all of them, in four for one."""
    for target in TARGETS:
        for family, (known, _) in kernels_targets.FAMILIES.items():
            compiled = {(itemsize, role) for itemsize, _, role, _ in some_tiles(family, target)}
            assert compiled >= {(2, role) for role in known.roles}, (target, family)
            assert compiled <= {(each[0], each[2]) for each in every_tile(family, target)}


def test_the_bucket_of_the_longest_length_that_fits_is_taken():
    chosen = Table(target="cuda:00", kernels={FAMILY.name: [entry(64, 32), entry(512, 64)]})
    with use_table(chosen):
        assert [tiles("cuda:00", torch.bfloat16, 32, n).forward.bk for n in (64, 511, 512, 4000)] == [
            32, 32, 64, 64
        ]  # fmt: skip
        assert tiles("cuda:00", torch.bfloat16, 32, 10).forward == Tile(16, 16, 1, 4, 1)


def test_tiles_on_hopper_are_those_that_were_measured():
    forward = transition.tiles("cuda:90", 2, 128).forward
    assert astuple(forward) == (64, 32, 4, 3, True, 168, 2, None)
    assert forward.options() == {"num_warps": 4, "num_stages": 3, "maxnreg": 168}
    weights = triangle_multiplication.tiles("cuda:90", torch.float16, 64).weight_gradient
    assert astuple(weights) == (64, 32, 4, 3, 3, 168, False, False, None)
    narrow = layernorm_linear.tiles("cuda:90", 2, 128, outputs=16)
    assert narrow != layernorm_linear.tiles("cuda:90", 2, 128, outputs=17)
    assert narrow.weight.programs == 4


def test_a_role_that_a_table_lacks_gets_the_safe_tile():
    part = Entry(bytes=2, channels=32, length=1, tiles={"key": TILE})
    with use_table(Table(target="cuda:00", kernels={FAMILY.name: [part]})):
        found = tiles("cuda:00", torch.bfloat16, 32, 100)
    assert found.key == Tile(16, 32, 1, 4, 1)
    assert found.forward == FAMILY.safe(2, 32).forward


def test_a_tile_with_fields_of_another_family_is_named():
    wrong = Entry(bytes=2, channels=32, length=1, tiles={"key": {"rows": 16}})
    with (
        use_table(Table(target="cuda:00", kernels={FAMILY.name: [wrong]})),
        pytest.raises(ConfigError, match=r"cuda-00\.json, evoattention of 32 channels.*megafold tune"),
    ):
        tiles("cuda:00", torch.bfloat16, 32, 100)


@pytest.mark.parametrize("target", ["cuda:75", "cuda:120", "hip:gfx1100", "cpu"])
def test_an_unknown_gpu_gets_tiles_that_fit_everywhere(target):
    assert table(target).kernels == {}
    found = tiles(target, torch.bfloat16, 32, 384).forward
    # Keys and values of one stage and the queries, in bytes.
    assert (found.bq + 2 * found.stages * found.bk) * 128 * 2 <= 64 * 1024
    assert gated_output.tiles(target, torch.float32, 256).forward.rows == 16
    for family, widest in kernels_targets.FAMILIES.values():
        for itemsize, several in widest.items():
            for channels in several:
                assert family.find(target, itemsize, channels, 384) == family.safe(itemsize, channels)


def test_a_table_survives_its_file(tmp_path):
    made = Table(target="cuda:00", kernels={FAMILY.name: [entry(64, 32)]})
    made.write(tmp_path / "table.json")
    assert read_table(tmp_path / "table.json") == made
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]
    lines = (tmp_path / "table.json").read_text().splitlines()
    assert sum('"bq": 16, "bk": 32' in line for line in lines) == len(ROLES)
    with pytest.raises(ConfigError, match=r"table\.json is the table of cuda:00, not of cuda:90"):
        read_table(tmp_path / "table.json", "cuda:90")


@pytest.mark.parametrize("content", ["{", "[]", json.dumps({"target": "cuda:00", "tuned": {}})])
def test_a_broken_table_is_named(tmp_path, content):
    path = tmp_path / "table.json"
    path.write_text(content)
    with pytest.raises(ConfigError, match=r"table\.json.*megafold tune"):
        read_table(path)


def test_a_new_entry_takes_the_place_of_its_like():
    old = Table(target="cuda:00", kernels={FAMILY.name: [entry(64, 32), entry(512, 64)]})
    new = tune.with_entry(old, FAMILY.name, entry(64, 128))
    entries = new.kernels[FAMILY.name]
    assert [(e.length, e.tiles["forward"]["bk"]) for e in entries] == [(64, 128), (512, 64)]
    assert [e.tiles["forward"]["bk"] for e in old.kernels[FAMILY.name]] == [32, 64]


def test_lengths_are_buckets_of_the_attention_alone():
    found = tune.subjects(["evoattention", "adaln"], ["bf16"], [384, 64])
    lengths = {name: [s.length for s in found if s.family == name] for name in ("evoattention", "adaln")}
    assert lengths == {"evoattention": [64, 384] * 3, "adaln": [384] * 3}
    assert set(BY_LENGTH) <= set(FAMILIES)


def test_tiles_like_the_one_in_use_are_tried_first():
    candidates = [Tile(bq, bk, 1, warps, 2) for bq in (32, 64) for bk in (32, 64) for warps in (4, 8)]
    order = tune.nearest_first(Tile(32, 32, 1, 4, 2), candidates)
    assert len(order) == 7
    assert {astuple(t)[:4] for t in order[:3]} == {(64, 32, 1, 4), (32, 64, 1, 4), (32, 32, 1, 8)}
    assert astuple(order[-1])[:4] == (64, 64, 1, 8)


#: What ``do_bench`` says of a tile with so many keys.
MILLISECONDS = {16: 4.0, 32: 1.0, 64: 0.5, 128: 2.0}


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A GPU and its clock, both made up; gives the keys of the tiles that were timed, in their order."""
    seen: list[int] = []

    def do_bench(run: Any, **_options: Any) -> float:
        bk: int = run().forward.bk
        seen.append(bk)
        if bk == 64:
            raise RuntimeError("out of resources")
        return MILLISECONDS[bk]

    monkeypatch.setattr(tune, "gpu", lambda: torch.device("cpu"))
    monkeypatch.setattr(tune, "measured_on", lambda length: {"device": "made up", "length": str(length)})
    monkeypatch.setattr(tune.torch.cuda, "get_device_name", lambda: "made up")
    monkeypatch.setattr(tune.triton.testing, "do_bench", do_bench)

    def problem(_dtype: torch.dtype, channels: int, length: int) -> Problem:
        candidates = {"forward": [Tile(64, bk, 1, 4, 1) for bk in (16, 32, 64, 128)]}
        run = {"forward": lambda: lambda: tiles("cpu", torch.bfloat16, channels, length)}
        return Problem(FAMILY, torch.bfloat16, channels, length, run, candidates)

    monkeypatch.setitem(tune.PROBLEMS, FAMILY.name, (problem, (32,)))
    return seen


@pytest.fixture
def in_use() -> Table:
    """On the made-up GPU, tiles with 128 keys; the real candidate is faster."""
    role = TILE | {"bq": 64, "bk": 128}
    stored = Entry(bytes=2, channels=32, length=1, tiles=dict.fromkeys(ROLES, role))
    return Table(target="cpu", kernels={FAMILY.name: [stored]})


def test_the_fastest_candidate_wins_and_what_fails_is_passed_over(tmp_path, measured, in_use):
    lines: list[str] = []
    path = tmp_path / "cpu.json"
    in_use.write(path)
    found = tune.tune(tune.subjects([FAMILY.name], ["bf16"], [384]), path, 5.0, 0, lines.append)
    (old, new) = found.kernels[FAMILY.name]
    assert (old.length, old.tiles["forward"]["bk"]) == (1, 128)
    assert (new.bytes, new.channels, new.length) == (2, 32, 288)
    assert new.tiles["forward"]["bk"] == 32
    assert new.tiles["key"]["bk"] == 128
    assert new.tuned == {"device": "made up", "length": "384"}
    assert "2.0000 ms, now 1.0000 ms (0.500)" in lines[0]
    assert lines[1] == "1 of 1 done, about 0.0 min left"
    assert read_table(path) == found


def test_what_is_hardly_faster_changes_nothing(tmp_path, monkeypatch, measured, in_use):
    monkeypatch.setitem(MILLISECONDS, 32, 1.97)
    path = tmp_path / "cpu.json"
    in_use.write(path)
    found = tune.tune(tune.subjects([FAMILY.name], ["bf16"], [384]), path, 5.0, 0, lambda _: None)
    assert found.kernels[FAMILY.name][1].tiles["forward"]["bk"] == 128


def test_an_interrupted_run_goes_on_where_it_was(tmp_path, monkeypatch, measured, in_use):
    path = tmp_path / "cpu.json"
    in_use.write(path)
    todo = tune.subjects([FAMILY.name], ["bf16"], [128, 384, 768])
    real = tune.Tuner.tune

    def interrupted(self: Any, subject: Any) -> Entry:
        if subject.length == 768:
            raise KeyboardInterrupt
        return real(self, subject)

    monkeypatch.setattr(tune.Tuner, "tune", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tune.tune(todo, path, 5.0, 0, lambda _: None)
    assert [e.length for e in read_table(path).kernels[FAMILY.name]] == [1, 96, 288]
    monkeypatch.setattr(tune.Tuner, "tune", real)
    lines: list[str] = []
    measured.clear()
    found = tune.tune(todo, path, 5.0, 0, lines.append)
    assert lines[0] == "2 of 3 were done before"
    assert lines[-1] == "1 of 1 done, about 0.0 min left"
    assert [e.length for e in found.kernels[FAMILY.name]] == [1, 96, 288, 576]
    assert [p.name for p in tmp_path.iterdir()] == ["cpu.json"]
    # Other settings are another run.
    again: list[str] = []
    tune.tune(todo, path, 4.0, 0, again.append)
    assert again[-1] == "3 of 3 done, about 0.0 min left"


class Processes:
    """Stands for the processes that compile: what is to come of each candidate, by its keys."""

    def __init__(self, outcomes: dict[int, Exception | None]) -> None:
        self._outcomes = outcomes

    def submit(self, _function: Any, _subject: Any, _role: str, tile: Tile) -> Future[None]:
        future: Future[None] = Future()
        if tile.bk in self._outcomes:
            future.set_running_or_notify_cancel()
            error = self._outcomes[tile.bk]
            if error is None:
                future.set_result(None)
            else:
                future.set_exception(error)
        return future

    def shutdown(self, **_options: Any) -> None:
        pass


def test_candidates_that_are_not_compiled_in_time_or_crash_are_left_out(monkeypatch):
    started: list[int] = []

    def processes(count: int) -> Processes:
        started.append(count)
        return Processes({16: None, 32: BrokenProcessPool("killed"), 64: None})

    monkeypatch.setattr(tune, "_processes", processes)
    lines: list[str] = []
    candidates = [Tile(64, bk, 1, 4, 1) for bk in (16, 32, 64, 128)]
    with tune.Tuner(0.1, 3, lines.append) as tuner:
        found = tuner._compiled(tune.Subject(FAMILY.name, "bf16", 32, 64), "forward", candidates)
    assert [tile.bk for tile in found] == [16, 64]
    assert started == [3, 3]
    assert lines == ["evoattention forward: a process that compiled ended; others go on"]


def test_without_a_gpu_the_command_says_what_it_needs():
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = CliRunner().invoke(command, [])
    assert isinstance(result.exception, ConfigError)
    assert "no GPU" in str(result.exception)


def test_tables_lie_beside_their_module():
    assert path_of("hip:gfx942").name == "hip-gfx942.json"
    assert path_of("hip:gfx942").exists()
