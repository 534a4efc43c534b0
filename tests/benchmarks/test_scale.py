"""The benchmark of scale: the corpora and snapshots it makes are what it says, and its lines are complete."""

import importlib.util
import json
import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
from click.testing import CliRunner

from megafold.cache_store import LocalStore
from megafold.cli.main import group
from megafold.pipeline.manifest import entry_rows

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def scale():
    spec = importlib.util.spec_from_file_location("scale", ROOT / "benchmarks" / "scale.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["scale"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["scale"]


def test_entry_names_are_four_characters_and_differ(scale):
    names = [scale.entry_name(number) for number in (0, 35, 36, 20000, 36**4 - 1)]
    assert names == ["0000", "000z", "0010", "0ffk", "zzzz"]


def test_no_two_files_of_a_corpus_are_the_same(scale, tmp_path, monkeypatch):
    monkeypatch.setattr(scale, "_SOURCES", 1)
    scale.write_corpus(tmp_path, 30)
    structures = list((tmp_path / "structures").iterdir())
    assert len(structures) == len({path.read_bytes() for path in structures}) == 30
    a3m = list((tmp_path / "alignments").rglob("*.a3m.gz"))
    assert len(a3m) == len({path.read_bytes() for path in a3m}) == 8
    owners = {path.name.split("_")[0] for path in (tmp_path / "alignments").iterdir()}
    assert owners <= {scale.entry_name(number) for number in range(0, 30, 4)}


def test_command_is_watched_while_it_runs(scale, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    cost = scale.megafold("--version")
    assert cost.status == 0
    assert cost.wall_s > 0
    assert cost.peak_bytes > 1e6
    with pytest.raises(SystemExit, match="exit status 2"):
        scale.megafold("cache", "info", "no-such-folder")


@pytest.mark.exhaustive
def test_each_command_has_a_line(scale, tmp_path, monkeypatch, capsys):
    """With commands run in this process, one after the other, each of which takes two seconds."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))

    def run(*words, until=None):
        alone = ("--workers", "1") if "verify" in words else ()  # processes take their time to start
        done = CliRunner().invoke(group, [*map(str, words), *alone])
        assert done.exit_code == 0, done.output
        return scale.Cost(wall_s=2.0, cpu_s=1.0, peak_bytes=10**9, status=done.exit_code)

    monkeypatch.setattr(scale, "megafold", run)
    monkeypatch.setattr(scale, "_SOURCES", 1)
    out, folder = tmp_path / "out.json", tmp_path / "kept"
    folder.mkdir()
    monkeypatch.setattr(scale.tempfile, "TemporaryDirectory", lambda **_: nullcontext(folder))
    assert scale.main(["--entries", "8", "--rows", "100", "--workers", "0", "--json", str(out)]) == 0
    found, shown = json.loads(out.read_text()), capsys.readouterr().out
    builds = {row["command"]: row for row in found["builds"]}
    assert {
        "build",
        "build, nothing new",
        "build, one edited",
        "build, interrupted",
        "build, resumed",
    } <= set(builds)
    assert all(row["entries"] == 8 and row["wall_s"] == 2 for row in builds.values())
    snapshots = {row["what"]: row for row in found["snapshots"]}
    assert set(snapshots) == {"publish", "info", "ls", "show", "gc", "verify --quick", "stream"}
    assert snapshots["stream"]["held_bytes"] > 0
    assert shown.count(" 4.0\n") == len(builds)  # entries a second

    rows = list(entry_rows(LocalStore.at(folder / "rows-100").manifest()))
    assert len({row.entry for row in rows}) == len(rows) == 100
    sequences = [{chain.sequence_digest for chain in row.chains} for row in rows]
    assert sequences[0] != sequences[30]
