"""``megafold cache``: what it prints, and what it says of bad options, files and disks."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import CliRunner

from megafold.cache_store import Content, LocalStore
from megafold.cli.cores import usable_cores
from megafold.cli.main import group, is_told
from megafold.pipeline.builder import engine
from megafold.pipeline.builder.engine import BuildReport
from megafold.pipeline.builder.progress import BuildProgress
from megafold.pipeline.errors import InputError
from megafold.pipeline.schema import MolType
from tests.pipeline import stream_cache as fake
from tests.pipeline.stream_cache import Chain

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def cache(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("cli") / "cache"
    chains = [Chain(["ALA"] * 8)]
    for _ in range(3):
        chains.append(Chain(["LGD"], MolType.LIGAND, entity=2, origin=(7.6 * len(chains), 9, 1)))
    names = [f"entry-of-a-rather-long-name-{number}" for number in range(3)]
    fake.publish(path, [(fake.structure(name, chains), chains, "") for name in names])
    return path


def run(*arguments):
    return CliRunner().invoke(group, ["cache", *map(str, arguments)], env={"COLUMNS": "40"})


def test_an_entry_is_a_line_however_narrow_the_terminal(cache):
    result = run("ls", cache)
    assert result.exit_code == 0, result.output
    heading, *lines = result.output.splitlines()
    assert heading.split()[:3] == ["entry", "assembly", "chains"]
    for number, line in enumerate(lines):
        assert line.split()[0] == f"entry-of-a-rather-long-name-{number}"
        assert "3 ligand 1 protein" in line
    assert len(lines) == 3


def test_a_reader_that_has_enough_is_no_error(cache):
    command = f"{sys.executable} -m megafold cache show {cache} entry-of-a-rather-long-name-0 | true"
    shown = subprocess.run(command, shell=True, cwd=ROOT, capture_output=True, text=True, check=False)
    assert shown.stderr == ""


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--memory-limit", "lots"),
        ("--memory-limit", "-1GiB"),
        ("--task-timeout", "0"),
        ("--task-timeout", "-5"),
        ("--workers", "-1"),
    ],
)
def test_options_without_a_meaning_are_refused_before_anything_is_written(tmp_path, option, value):
    result = run("build", tmp_path, tmp_path / "cache", option, value)
    assert result.exit_code != 0
    assert option in str(result.exception) + result.output
    assert not (tmp_path / "cache").exists()


def test_what_became_of_hits_is_told(tmp_path):
    path = tmp_path / "cache"
    hits = fake.template("AAAA", [])
    told: dict[str, Any] = {"skipped": {"no-structure": 3}, "warnings": ["x.m8: not read"]}
    store = LocalStore.create(path)
    made = store.put(Content(arrays=hits.arrays, attributes={**hits.attributes, **told}))
    chains = [Chain(["ALA"] * 4, template=str(made))]
    fake.publish(path, [(fake.structure("8abc", chains), chains, "")])
    lines = run("show", path, "8abc").output.splitlines()
    assert "  left out: 3 no-structure" in lines
    assert "  warning: x.m8: not read" in lines


def test_names_are_printed_as_they_are(tmp_path):
    """Rich would take these for its marks."""
    name = "8a[b] :a:.cif"
    (tmp_path / name).write_text("no mmCIF")
    result = run("build", tmp_path, tmp_path / "cache", "--workers", "0", "--clusters", "none")
    assert result.exit_code == 1
    assert f"{name} is no valid mmCIF file" in result.stdout


def test_remarks_are_printed_as_they_are(capsys):
    remark = "clusters[1].tsv :a: [/c] has lines of proteins that are not in the corpus: longer than a line"
    BuildProgress().say(remark)
    assert capsys.readouterr().err == f"{remark}\n"


def test_scheduler_that_is_not_there_is_told_before_anything_is_read(tmp_path):
    (tmp_path / "8abc.cif").write_text("data_8ABC")
    result = run("build", tmp_path, tmp_path / "cache", "--scheduler", "10.0.0.1")
    assert isinstance(result.exception, InputError)
    assert "--scheduler 10.0.0.1" in str(result.exception)
    assert "dask scheduler" in str(result.exception)
    assert not (tmp_path / "cache").exists()


def test_cores_are_counted_where_the_system_knows_no_affinity(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 3, 5}, raising=False)
    assert usable_cores() == 3
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: 7)
    assert usable_cores() == 7


def test_errors_of_files_and_disks_are_told_and_others_are_defects():
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
        assert is_told(OSError(code, os.strerror(code)))
    for code in (errno.ENOENT, errno.EACCES, errno.EROFS, errno.EISDIR):
        assert is_told(OSError(code, os.strerror(code), "a/file"))
        assert not is_told(OSError(code, os.strerror(code)))
    assert not is_told(OSError(errno.EBADF, os.strerror(errno.EBADF), "a/file"))


@pytest.mark.parametrize(("within_limit", "status"), [(True, 0), (False, 1)])
@pytest.mark.parametrize("output", [[], ["--json"], ["--quiet"]])
def test_more_failures_than_allowed_are_an_exit_status(tmp_path, monkeypatch, output, within_limit, status):
    """However little is printed: scripts go on or not by it."""
    failure = {"entry": "1abc", "stage": "structure", "reason": "no-atoms", "message": "1abc.cif: no atoms"}
    report = BuildReport(
        manifest="0" * 64,
        entries=1,
        failed_entries=1,
        computed={"structure": 2},
        reused={},
        failures=[failure],
        chains=0,
        chains_with_msa=0,
        chains_with_template=0,
        clusters={"method": "identical-sequences", "proteins": 0, "clusters": 0},
        elapsed_s=0.0,
        within_limit=within_limit,
    )
    monkeypatch.setattr(engine, "Build", lambda config, progress: SimpleNamespace(run=lambda: report))
    shown = CliRunner().invoke(group, ["cache", "build", str(tmp_path), str(tmp_path / "cache"), *output])
    assert shown.exit_code == status
    assert ("1abc.cif: no atoms" in shown.stdout) == (output != ["--quiet"])
