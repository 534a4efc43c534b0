"""The build: reuse, determinism, failures, interruption. On a small sample corpus, end to end."""

import contextlib
import errno
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from megafold.cache_store import (
    JSON,
    MAIN_REF,
    Content,
    Digest,
    LocalStore,
    LockHeld,
    Manifest,
    MissingManifest,
    RefMoved,
    WriteFailed,
)
from megafold.cli.main import group
from megafold.pipeline.builder import recipes
from megafold.pipeline.builder.config import BuildConfig, FailureLimit, Resources, Sources
from megafold.pipeline.builder.engine import Build, BuildReport
from megafold.pipeline.builder.known import Known
from megafold.pipeline.builder.planner import Planner
from megafold.pipeline.builder.progress import BuildProgress
from megafold.pipeline.corpus import discover
from megafold.pipeline.errors import InputError
from megafold.pipeline.manifest import entry_rows
from megafold.pipeline.sample_corpus import write_sample_corpus
from megafold.pipeline.structure import StructureOptions
from tests.pipeline.structure_files import CifFile

ENTRIES = 10
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def sample(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("corpus")
    write_sample_corpus(folder, entries=ENTRIES, seed=1)
    return folder


@pytest.fixture
def corpus(sample, tmp_path) -> Path:
    """A copy that a test may change."""
    return Path(shutil.copytree(sample, tmp_path / "corpus"))


def build(corpus: Path, cache: Path, **changes) -> BuildReport:
    retry_failed = changes.pop("retry_failed", False)
    ccd_extra = changes.pop("ccd_extra", ())
    resources = Resources(**{"workers": 0, **changes})
    sources = Sources(
        corpus=corpus / "structures",
        alignments=corpus / "alignments",
        template_structures=(corpus / "structures",),
        ccd_extra=ccd_extra,
    )
    config = BuildConfig(sources=sources, cache=cache, resources=resources, retry_failed=retry_failed)
    return Build(config, BuildProgress(quiet=True)).run()


@pytest.fixture(scope="module")
def built(sample, tmp_path_factory) -> tuple[Path, BuildReport]:
    cache = tmp_path_factory.mktemp("built") / "cache"
    return cache, build(sample, cache)


def test_every_entry_is_in_the_snapshot(built, sample):
    cache, report = built
    names = {path.name.split(".")[0] for path in (sample / "structures").glob("*.cif.gz")}
    assert report.failures == []
    assert {row.entry for row in entry_rows(LocalStore.at(cache).manifest())} == names


def test_second_build_computes_nothing(built, sample):
    cache, report = built
    again = build(sample, cache)
    assert again.computed == {}
    assert again.manifest == report.manifest
    assert sum(again.reused.values()) >= ENTRIES


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes", [{"workers": 1}, {"workers": 2, "order": "reversed"}], ids=["one worker", "two, reversed"]
)
def test_workers_and_order_do_not_change_the_manifest(built, sample, tmp_path, changes):
    assert build(sample, tmp_path / "cache", **changes).manifest == built[1].manifest


def test_place_of_the_corpus_does_not_change_the_manifest(built, corpus, tmp_path):
    for path in corpus.rglob("*"):
        os.utime(path, (1, 1))
    assert build(corpus, tmp_path / "cache").manifest == built[1].manifest


BUILD_COMMAND = """
import sys
from pathlib import Path
from tests.pipeline.test_builder import build
build(Path(sys.argv[1]), Path(sys.argv[2]), workers=1)
"""


@pytest.mark.slow
def test_killed_twice_and_resumed_gives_the_same_manifest(built, sample, tmp_path):
    cache = tmp_path / "cache"
    for finished_before in (1, 4):
        process = subprocess.Popen(
            [sys.executable, "-c", BUILD_COMMAND, sample, cache],
            cwd=ROOT,
            start_new_session=True,
            stderr=subprocess.DEVNULL,
        )
        wait_for(lambda: journal_lines(cache) >= finished_before, process)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        assert LocalStore.at(cache).ref(MAIN_REF) is None
    finished = journal_results(cache)
    assert finished.total() >= 4
    report = build(sample, cache)
    assert report.manifest == built[1].manifest
    assert report.computed == dict(Counter(built[1].computed) - finished)
    assert list(LocalStore.at(cache).journals()) == []


@pytest.mark.slow
def test_interrupted_by_ctrl_c_says_how_to_go_on(built, sample, tmp_path):
    cache = tmp_path / "cache"
    command = [sys.executable, "-m", "megafold", "cache", "build", sample / "structures", cache]
    process = subprocess.Popen(
        [*command, "--alignments", sample / "alignments", "--clusters", "none", "--workers", "1"],
        cwd=ROOT,
        start_new_session=True,
        stderr=subprocess.PIPE,
        text=True,
        # Shells start what runs in their background with Ctrl-C ignored, and the tests may run there.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    wait_for(lambda: journal_lines(cache) >= 2, process)
    os.killpg(process.pid, signal.SIGINT)  # as a terminal does: the workers get it too
    _, said = process.communicate(timeout=120)
    assert process.returncode == 130
    assert "the same command goes on" in said
    assert "Traceback" not in said
    assert build(sample, cache).manifest == built[1].manifest


def journal_lines(cache: Path) -> int:
    return sum(path.read_bytes().count(b"\n") for path in cache.glob("journal/*.jsonl"))


def journal_results(cache: Path) -> Counter[str]:
    """How many results of each stage the journals hold; a kill may have torn a line."""
    store = LocalStore.at(cache)
    records = [record for name in store.journals() for record in store.journal(name).replay()]
    return Counter(stage for stage, _ in {(record["stage"], record["recipe"]) for record in records})


def wait_for(condition, process, limit_s: float = 120.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert process.poll() is None, "the build ended before it could be killed"
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_edited_alignment_rebuilds_that_msa_and_no_structure(built, corpus, tmp_path):
    cache = Path(shutil.copytree(built[0], tmp_path / "cache"))
    before = {row.entry: row for row in entry_rows(LocalStore.at(cache).manifest())}
    folder = next(path for path in sorted((corpus / "alignments").iterdir()) if list(path.glob("*.a3m*")))
    (folder / "extra.a3m").write_text(query_of(folder))
    report = build(corpus, cache)
    assert report.computed.get("structure", 0) == 0
    assert report.computed["msa"] == 1
    after = {row.entry: row for row in entry_rows(LocalStore.at(cache).manifest())}
    assert {row.structure for row in after.values()} == {row.structure for row in before.values()}
    changed = {
        chain.sequence_digest
        for entry, row in after.items()
        for chain, old in zip(row.chains, before[entry].chains, strict=True)
        if chain.msa != old.msa
    }
    assert {digest[:16] for digest in changed} == {folder.name}


def query_of(folder: Path) -> str:
    """An A3M with the folder's query and one row that differs in its first letter."""
    import gzip

    path = sorted(folder.glob("*.a3m*"))[0]
    lines = gzip.decompress(path.read_bytes()).decode().splitlines()
    sequence = lines[1]
    return f">query\n{sequence}\n>tr|X0X0X0|X0X0X0_HUMAN\n{'-' + sequence[1:]}\n"


def test_edited_structure_rebuilds_that_entry_alone(built, corpus, tmp_path):
    import gzip

    cache = Path(shutil.copytree(built[0], tmp_path / "cache"))
    path = sorted((corpus / "structures").glob("*.cif.gz"))[0]
    text = gzip.decompress(path.read_bytes()).decode()
    path.write_bytes(gzip.compress(text.replace("data_", "data_edited_", 1).encode() + b"\n# edited\n"))
    report = build(corpus, cache)
    assert report.computed["structure"] == 1
    assert report.computed.get("msa", 0) == 0


def test_broken_file_is_a_named_failure_and_not_tried_again(corpus, tmp_path):
    broken = sorted((corpus / "structures").glob("*.cif.gz"))[0]
    broken.write_bytes(b"not a structure")
    entry = broken.name.split(".")[0]
    report = build(corpus, tmp_path / "cache")
    assert report.entries == ENTRIES - 1
    structures = [failure for failure in report.failures if failure["stage"] == "structure"]
    assert [failure["entry"] for failure in structures] == [entry]
    assert broken.name in structures[0]["message"]
    assert str(tmp_path) not in structures[0]["message"]
    again = build(corpus, tmp_path / "cache")
    assert again.computed == {}
    assert again.failures == report.failures
    assert again.manifest == report.manifest
    retried = build(corpus, tmp_path / "cache", retry_failed=True)
    assert retried.computed["structure"] == 1
    assert retried.manifest == report.manifest


EXTRA_COMPONENT = """data_~Q9
_chem_comp.id ~Q9
_chem_comp.name made-up
_chem_comp.type NON-POLYMER
loop_
_chem_comp_atom.comp_id
_chem_comp_atom.atom_id
_chem_comp_atom.type_symbol
_chem_comp_atom.charge
~Q9 C0 C 0
~Q9 C1 C 0
~Q9 C2 C 0
loop_
_chem_comp_bond.comp_id
_chem_comp_bond.atom_id_1
_chem_comp_bond.atom_id_2
_chem_comp_bond.value_order
~Q9 C0 C1 SING
~Q9 C1 C2 SING
"""


def test_unknown_component_is_tried_again_when_the_dictionary_knows_it(tmp_path):
    one_ligand(tmp_path)
    cache = tmp_path / "cache"
    first = build(tmp_path, cache)
    assert [failure["reason"] for failure in first.failures] == ["unknown-component"]
    assert build(tmp_path, cache).computed == {}
    extra = tmp_path / "extra.cif"
    extra.write_text(EXTRA_COMPONENT)
    cured = build(tmp_path, cache, ccd_extra=(extra,))
    assert cured.failures == []
    (row,) = entry_rows(LocalStore.at(cache).manifest())
    assert "~Q9" in row.components


def one_ligand(folder: Path, definition: str = "") -> None:
    """An entry with a polymer of glycines and one residue of ``~Q9``, which ``definition`` may define."""
    file = CifFile().polymer("GLY GLY GLY GLY")
    for position in range(1, 5):
        file.add("GLY", "A", position, at=(3.8 * position, 0, 0))
    for index in range(3):
        file.atom(f"C{index}", "~Q9", "B", ".", (9 + 1.5 * index, 8, 0), entity="2")
    for name in ("structures", "alignments"):
        (folder / name).mkdir()
    path = file.write(folder / "structures")
    path.write_text(path.read_text() + definition)


def test_definitions_that_come_and_go_make_their_entries_stale_and_no_others(tmp_path):
    one_ligand(tmp_path, EXTRA_COMPONENT)
    extra, unrelated = tmp_path / "extra.cif", tmp_path / "unrelated.cif"
    extra.write_text(EXTRA_COMPONENT.replace("C0 C1 SING", "C0 C1 DOUB"))
    unrelated.write_text(EXTRA_COMPONENT.replace("~Q9", "~Q8"))
    alone = build(tmp_path, tmp_path / "alone")
    defined = build(tmp_path, tmp_path / "defined", ccd_extra=(extra,))
    assert alone.manifest != defined.manifest  # the file's own definition; the dictionary's
    cache = tmp_path / "cache"
    assert build(tmp_path, cache).manifest == alone.manifest
    assert build(tmp_path, cache, ccd_extra=(unrelated,)).computed == {}
    assert build(tmp_path, cache, ccd_extra=(extra,)).manifest == defined.manifest
    assert build(tmp_path, cache, ccd_extra=(extra,)).computed == {}
    assert build(tmp_path, cache).manifest == alone.manifest  # it is in no dictionary again


def test_full_disk_stops_the_build_and_blames_no_entry(built, sample, tmp_path, monkeypatch):
    from megafold.cache_store import files

    honest, cache = files.os.fsync, tmp_path / "cache"
    written = 0

    def fill_up(fd):
        nonlocal written
        written += 1
        if written > 40:  # of files, folders and journal lines
            raise OSError(errno.ENOSPC, "No space left on device")
        honest(fd)

    monkeypatch.setattr(files.os, "fsync", fill_up)
    with pytest.raises(WriteFailed, match=r"No space left on device.*goes on from what is finished"):
        build(sample, cache)
    assert LocalStore.at(cache).ref(MAIN_REF) is None
    monkeypatch.setattr(files.os, "fsync", honest)
    report = build(sample, cache)
    assert report.manifest == built[1].manifest
    assert report.reused != {}


@pytest.mark.parametrize("what", ["lost", "damaged"])
def test_lost_or_damaged_snapshot_is_made_again(built, sample, tmp_path, what):
    cache = Path(shutil.copytree(built[0], tmp_path / "cache"))
    store = LocalStore.at(cache)
    path = store.manifest_path(store.manifest().digest())
    path.chmod(0o644)
    path.unlink() if what == "lost" else path.write_bytes(path.read_bytes()[:-9])
    report = build(sample, cache)
    assert report.manifest == built[1].manifest
    assert store.manifest().digest() == store.ref(MAIN_REF)
    assert build(sample, cache).computed == {}


def test_every_task_knows_the_digests_of_all_files_that_it_reads(built, sample):
    """What it reads is compared with these when it ends."""
    store, structures = LocalStore.at(built[0]), sample / "structures"
    sources = Sources(corpus=structures, alignments=sample / "alignments", template_structures=(structures,))
    before = Known(store, "dictionary")
    before.add_manifest(store.manifest(), with_failures=True)
    planner = Planner(sources, discover(structures), StructureOptions(), Known(store, "dictionary"))
    tasks: list[Any] = planner.start()
    for task in list(tasks):
        outcome = before.find(task.recipe)
        assert outcome is not None
        tasks += planner.settle(task, outcome)
    assert {task.stage for task in tasks} == {"structure", "component", "msa", "template"}
    for task in tasks:
        files = [task.path] if task.stage == "structure" else getattr(task, "files", ())
        assert task.digests == {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("what", ["component", "rdkit"])
def test_conformers_of_another_version_are_made_again(built, monkeypatch, what):
    store = LocalStore.at(built[0])
    manifest = store.manifest()
    with store.open(Digest.parse(str(manifest.attributes["components"]))) as reader:
        attributes: Any = reader.attributes
        key, definition = attributes["keys"][0], attributes["digests"][0]

    def found() -> object:
        known = Known(store, "dictionary")
        known.add_manifest(manifest, with_failures=True)
        return known.find_reference(key, definition)

    assert found() is not None
    monkeypatch.setattr(recipes, "VERSIONS", {**recipes.VERSIONS, what: "later"})
    assert found() is None


def test_what_is_known_of_a_component_is_all_that_the_library_says(built, tmp_path):
    """Also that it has no conformer, and why, and that its automorphisms are not all there."""
    store = LocalStore.at(shutil.copytree(built[0], tmp_path / "cache"))
    manifest = store.manifest()
    with store.open(Digest.parse(str(manifest.attributes["components"]))) as reader:
        content = reader.read_all()
    attributes: Any = dict(content.attributes)
    keys, definitions = attributes["keys"], attributes["digests"]
    attributes |= {"capped": keys[:1], "failures": {keys[1]: "embedding"}}
    library = store.put(Content(dict(content.arrays), attributes))
    changed = Manifest(manifest.table, {**manifest.attributes, "components": str(library)})
    known = Known(store, "dictionary")
    known.add_manifest(changed, with_failures=True)
    found: Any = [known.find_reference(*one) for one in zip(keys[:3], definitions[:3], strict=True)]
    assert [(one["capped"], one["failure"]) for one in found] == [
        (True, ""),
        (False, "embedding"),
        (False, ""),
    ]
    store.delete(library)
    lost = Known(store, "dictionary")
    lost.add_manifest(changed, with_failures=True)
    assert lost.find_reference(keys[0], definitions[0]) is None


@pytest.mark.parametrize("what", ["lost", "damaged"])
def test_snapshot_whose_ledger_is_lost_or_damaged_is_made_again(built, sample, tmp_path, monkeypatch, what):
    cache = Path(shutil.copytree(built[0], tmp_path / "cache"))
    said: list[str] = []
    monkeypatch.setattr(BuildProgress, "say", lambda self, text: said.append(text))
    store = LocalStore.at(cache)
    plain, ledger = store.manifest(), store.put_ledger([])
    digest = store.put_manifest(Manifest(plain.table, {**plain.attributes, "ledger": str(ledger)}))
    config = BuildConfig(sources=Sources(corpus=sample / "structures"), cache=cache)
    asked = Build(config, BuildProgress(quiet=True))
    assert asked._readable(store, digest) is not None
    path = store.ledger_path(ledger)
    path.chmod(0o644)
    path.unlink() if what == "lost" else path.write_bytes(path.read_bytes()[:-9])
    assert asked._readable(store, digest) is None
    assert str(ledger) in said[0]
    assert "all entries are computed again" in said[0]


def test_failure_from_a_damaged_object_ends_with_the_damage(built, corpus, tmp_path):
    """The MSA's task reads its sequence from the structure's object."""
    cache = Path(shutil.copytree(built[0], tmp_path / "cache"))
    store = LocalStore.at(cache)
    chain = next(chain for row in entry_rows(store.manifest()) for chain in row.chains if chain.msa)
    folder = corpus / "alignments" / chain.sequence_digest[:16]
    (folder / "more.a3m").write_text(query_of(folder))
    undamaged = build(corpus, tmp_path / "undamaged")
    users = [r for r in entry_rows(store.manifest()) if chain.msa in {c.msa for c in r.chains}]
    for user in users:  # whichever the task reads
        path = store.object_path(Digest.parse(user.structure))
        path.chmod(0o644)
        path.write_bytes(path.read_bytes()[:200])
    damaged = build(corpus, cache)
    assert {failure["reason"] for failure in damaged.failures} == {"damaged-cache"}
    assert "Move the file away and build again" in damaged.failures[0]["message"]
    for user in users:
        store.object_path(Digest.parse(user.structure)).unlink()
    mended = build(corpus, cache)
    assert mended.failures == []
    assert mended.manifest == undamaged.manifest


def test_failed_component_stays_in_the_ledger_until_it_is_retried(sample, tmp_path, monkeypatch):
    from megafold.pipeline.builder import tasks

    honest = tasks.build_reference

    def refuse_alanine(component):
        if component.key == "ALA":
            raise MemoryError
        return honest(component)

    cache = tmp_path / "cache"
    monkeypatch.setattr(tasks, "build_reference", refuse_alanine)
    first = build(sample, cache)
    assert {failure["stage"] for failure in first.failures} == {"component"}
    assert first.entries == ENTRIES  # they have the dictionary's coordinates instead
    monkeypatch.setattr(tasks, "build_reference", honest)
    retried = build(sample, cache)  # memory says nothing of the input: such failures are always tried again
    assert retried.computed == {"component": 1}
    assert retried.failures == []

    def crash_on_alanine(component):
        if component.key == "ALA":
            raise RuntimeError("a defect")
        return honest(component)

    monkeypatch.setattr(tasks, "build_reference", crash_on_alanine)
    cache = tmp_path / "lasting"
    first = build(sample, cache)
    assert {failure["reason"] for failure in first.failures} == {"defect:RuntimeError"}
    monkeypatch.setattr(tasks, "build_reference", honest)
    again = build(sample, cache)
    assert again.computed == {}
    assert (again.manifest, again.failures) == (first.manifest, first.failures)
    cured = build(sample, cache, retry_failed=True)
    assert cured.computed == {"component": 1}
    assert cured.failures == []


def test_wrong_alignment_leaves_the_entry_without_an_msa(built, corpus, tmp_path):
    folder = sorted((corpus / "alignments").iterdir())[0]
    for path in folder.iterdir():
        path.unlink()
    (folder / "uniref_hits.a3m").write_text(">query\nWWWW\n>other\nWWWW\n")
    report = build(corpus, tmp_path / "cache")
    assert report.entries == ENTRIES
    assert {failure["reason"] for failure in report.failures} == {"query-mismatch"}
    rows = entry_rows(LocalStore.at(tmp_path / "cache").manifest())
    chains = [chain for row in rows for chain in row.chains]
    concerned = [chain for chain in chains if chain.sequence_digest[:16] == folder.name]
    assert concerned
    assert all(chain.msa == "" and chain.msa_status == "failed" for chain in concerned)


def test_workers_in_another_folder_find_files_that_are_named_from_here(built, corpus, tmp_path, monkeypatch):
    from megafold.pipeline.builder import runner

    honest = runner.run_task

    def elsewhere(config, task):
        with contextlib.chdir("/"):
            return honest(config, task)

    monkeypatch.setattr(runner, "run_task", elsewhere)
    monkeypatch.chdir(tmp_path)
    report = build(corpus.relative_to(tmp_path), Path("cache"))
    assert report.failures == []
    assert report.manifest == built[1].manifest


def test_structure_that_could_not_be_read_for_a_moment_is_tried_again(built, sample, tmp_path, monkeypatch):
    from megafold.pipeline.builder import tasks

    honest = tasks.featurize_structure
    unlucky = sorted((sample / "structures").glob("*.cif.gz"))[0]

    def away(path, *others):
        if path == unlucky:
            path = path.with_name("unmounted.cif.gz")
        return honest(path, *others)

    monkeypatch.setattr(tasks, "featurize_structure", away)
    report = build(sample, tmp_path / "cache")
    assert {failure["reason"] for failure in report.failures} == {"unreadable-file"}
    monkeypatch.setattr(tasks, "featurize_structure", honest)
    again = build(sample, tmp_path / "cache")
    assert again.computed["structure"] == 1
    assert again.manifest == built[1].manifest


def test_file_edited_during_a_build_is_never_another_files_result(built, corpus, tmp_path, monkeypatch):
    """The recipe has the digest of what was there at first, the worker reads what is there later."""
    from megafold.pipeline.builder import tasks

    folder = next(path for path in sorted((corpus / "alignments").iterdir()) if list(path.glob("*.a3m*")))
    file = folder / "extra.a3m"
    honest = tasks.featurize_msa
    first, second = query_of(folder), query_of(folder).replace("HUMAN", "MOUSE")
    file.write_text(first)
    expected = build(corpus, tmp_path / "expected").manifest

    def edited_just_now(sequence, mol_type, files):
        if file in files:
            file.write_text(second)
        return honest(sequence, mol_type, files)

    cache = tmp_path / "cache"
    monkeypatch.setattr(tasks, "featurize_msa", edited_just_now)
    report = build(corpus, cache)
    assert {failure["reason"] for failure in report.failures} == {"changed-meanwhile"}
    assert f"{folder.name}/extra.a3m changed" in report.failures[0]["message"]
    monkeypatch.setattr(tasks, "featurize_msa", honest)
    file.write_text(first)
    assert build(corpus, cache).manifest == expected


def test_alignment_that_cannot_be_read_costs_its_chain_alone(built, corpus, tmp_path):
    folder = next(path for path in sorted((corpus / "alignments").iterdir()) if list(path.glob("*.a3m*")))
    (folder / "elsewhere.a3m").symlink_to(tmp_path / "unmounted" / "elsewhere.a3m")
    report = build(corpus, tmp_path / "cache")
    assert report.entries == ENTRIES
    assert {failure["stage"] for failure in report.failures} == {"msa"}
    assert all("elsewhere.a3m" in failure["message"] for failure in report.failures)
    assert not any(str(tmp_path / "corpus") in failure["message"] for failure in report.failures)
    (folder / "elsewhere.a3m").unlink()
    mended = build(corpus, tmp_path / "cache")
    assert mended.manifest == built[1].manifest


def test_folder_without_alignments_of_any_chain_is_told(built, corpus, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(BuildProgress, "say", lambda self, text: said.append(text))
    build(corpus, Path(shutil.copytree(built[0], tmp_path / "right")))
    assert not any("alignments of no chain" in text for text in said)
    for folder in (corpus / "alignments").iterdir():
        folder.rename(folder.with_name(f"of-{folder.name}"))
    build(corpus, tmp_path / "wrong")
    (remark,) = (text for text in said if "alignments of no chain" in text)
    assert str(corpus / "alignments") in remark


def test_removed_entry_leaves_the_snapshot(built, corpus, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr(BuildProgress, "say", lambda self, text: said.append(text))
    cache = Path(shutil.copytree(built[0], tmp_path / "cache"))
    path = sorted((corpus / "structures").glob("*.cif.gz"))[-1]
    path.unlink()
    assert build(corpus, cache).entries == ENTRIES - 1
    assert any(f"1 of {ENTRIES} entries" in text and path.name[:4] in text for text in said)


def gc(cache: Path, *options: str) -> Result:
    return CliRunner().invoke(group, ["cache", "gc", str(cache), "--older-than", "0", "--json", *options])


def test_garbage_is_what_neither_snapshots_nor_interrupted_builds_name(built, corpus, tmp_path):
    cache = Path(shutil.copytree(built[0], tmp_path / "cache"))
    store = LocalStore.at(cache)
    before = set(store.digests())
    first = store.manifest().digest()
    folder = next(path for path in sorted((corpus / "alignments").iterdir()) if list(path.glob("*.a3m*")))
    (folder / "extra.a3m").write_text(query_of(folder))
    build(corpus, cache)
    assert json.loads(gc(cache).output)["removed"] == []  # the first snapshot may be some run's
    store.manifest_path(first).unlink()
    would = json.loads(gc(cache, "--dry-run").output)["removed"]
    assert set(map(str, store.digests())) > set(would)
    removed = json.loads(gc(cache).output)["removed"]
    assert removed == would
    still = {str(digest) for row in entry_rows(store.manifest()) for digest in [row.structure]}
    assert not still & set(removed)
    assert len(removed) in (1, 2)  # the alignment as it was, and its pairing if it had one
    assert set(removed) < set(map(str, before))
    assert build(corpus, cache).computed == {}

    orphan = Digest.parse(removed[0])
    store.put(LocalStore.at(built[0]).open(orphan).read_all())
    for stage, result in (("msa", "object"), ("structure", "structure")):
        outcome: dict[str, JSON] = {"result": {result: str(orphan)}, "problems": []}
        with store.journal("interrupted") as journal:
            journal.append({"stage": stage, "recipe": "r", "dictionary": "d", "outcome": outcome})
        assert json.loads(gc(cache).output)["removed"] == []
        journal.remove()
    leftover = store.object_path(orphan).with_name(".tmp-1-ab")
    leftover.write_bytes(b"half an object")
    for hours, expected in ((0.9, []), (1.1, [str(orphan)])):
        for path in (store.object_path(orphan), leftover):
            os.utime(path, (time.time() - hours * 3600,) * 2)
        assert json.loads(gc(cache, "--older-than", "1", "--dry-run").output)["removed"] == expected
        assert leftover.exists()
        assert json.loads(gc(cache, "--older-than", "1").output)["removed"] == expected
        assert leftover.exists() == (hours < 1)


def test_nothing_is_garbage_where_the_snapshot_is_lost(built, tmp_path):
    cache = Path(shutil.copytree(built[0], tmp_path / "cache"))
    store = LocalStore.at(cache)
    before = list(store.digests())
    store.manifest_path(store.manifest().digest()).unlink()
    assert isinstance(gc(cache).exception, MissingManifest)
    assert list(store.digests()) == before


def test_lost_object_is_computed_again(built, sample, tmp_path):
    cache = Path(shutil.copytree(built[0], tmp_path / "cache"))
    store = LocalStore.at(cache)
    row = next(entry_rows(store.manifest()))
    (digest,) = [digest for digest in store.digests() if str(digest) == row.structure]
    store.delete(digest)
    report = build(sample, cache)
    assert report.computed["structure"] == 1
    assert report.manifest == built[1].manifest
    assert store.has(digest)


def test_neither_a_second_build_nor_a_collection_begins_while_one_builds(built, sample, tmp_path):
    cache = Path(shutil.copytree(built[0], tmp_path / "cache"))
    garbage = LocalStore.at(cache).put(Content({"x": np.zeros(3, np.float32)}))
    with LocalStore.at(cache).build_lock():
        with pytest.raises(LockHeld, match=f"locked by process {os.getpid()}"):
            build(sample, cache)
        assert isinstance(gc(cache).exception, LockHeld)
        assert LocalStore.at(cache).has(garbage)


def test_build_that_another_overtook_publishes_nothing_and_loses_nothing(
    built, corpus, tmp_path, monkeypatch
):
    """Where locks do not hold, as between machines whose file system has none in common."""
    cache = Path(shutil.copytree(built[0], tmp_path / "cache"))
    store = LocalStore.at(cache)
    first = store.manifest()
    other = Manifest(first.table.slice(1), dict(first.attributes))
    folder = next(path for path in sorted((corpus / "alignments").iterdir()) if list(path.glob("*.a3m*")))
    (folder / "extra.a3m").write_text(query_of(folder))
    put_manifest = LocalStore.put_manifest

    def overtaken(self: LocalStore, manifest: Manifest) -> Digest:
        with pytest.raises(LockHeld):  # where they do
            store.build_lock().acquire()
        store.move_ref(MAIN_REF, store.ref(), put_manifest(store, other))
        return put_manifest(self, manifest)

    with monkeypatch.context() as patch:
        patch.setattr(LocalStore, "put_manifest", overtaken)
        with pytest.raises(RefMoved, match="another build published meanwhile"):
            build(corpus, cache)
    assert store.ref() == other.digest()
    assert journal_results(cache)["msa"] == 1
    # The structure of the entry that the other snapshot lacks is computed again, and nothing else of the two.
    report = build(corpus, cache)
    assert report.computed.get("msa", 0) == 0
    assert report.entries == ENTRIES
    assert list(store.journals()) == []


@pytest.mark.slow
def test_entry_that_kills_its_worker_costs_itself_alone(sample, tmp_path):
    killer = sorted((sample / "structures").glob("*.cif.gz"))[3].name.split(".")[0]
    code = """
import os, json, sys
from pathlib import Path
import dask
dask.config.set({"distributed.worker.preload": ["tests.pipeline.crash_preload"]})
from tests.pipeline.test_builder import build
report = build(Path(sys.argv[1]), Path(sys.argv[2]), workers=2)
print(json.dumps(report.to_json()))
"""
    shown = subprocess.run(
        [sys.executable, "-c", code, sample, tmp_path / "cache"],
        cwd=ROOT,
        env={**os.environ, "MEGAFOLD_TEST_KILLER": killer},
        capture_output=True,
        text=True,
        check=True,
    )
    report = json.loads(shown.stdout.splitlines()[-1])
    assert [failure["entry"] for failure in report["failures"]] == [killer]
    assert report["failures"][0]["reason"] == "worker-died"
    assert report["entries"] == ENTRIES - 1


def test_table_of_files_gives_the_same_objects_as_folders(built, sample, tmp_path):
    rows = list(entry_rows(LocalStore.at(built[0]).manifest()))
    folders = {path.name: path for path in (sample / "alignments").iterdir()}
    lines = ["entry\tstructure\tchain\tmsa"]
    for row in rows:
        chains = {chain.label_asym_id: folders.get(chain.sequence_digest[:16]) for chain in row.chains}
        found = [(chain, folder) for chain, folder in chains.items() if folder]
        structure = sample / "structures" / f"{row.entry}.cif.gz"
        lines += [f"{row.entry}\t{structure}\t{chain}\t{folder}" for chain, folder in found]
        if not found:
            lines.append(f"{row.entry}\t{structure}\t\t")
    table = tmp_path / "corpus.tsv"
    table.write_text("\n".join(lines) + "\n")
    command = [
        sys.executable,
        "-m",
        "megafold",
        "cache",
        "build",
        table,
        tmp_path / "cache",
        "--clusters",
        "none",
        "--workers",
        "0",
    ]
    subprocess.run([*command, "--quiet"], cwd=ROOT, check=True)
    again = list(entry_rows(LocalStore.at(tmp_path / "cache").manifest()))
    assert [(row.structure, row.pairing, row.chains) for row in again] == [
        (row.structure, row.pairing, row.chains) for row in rows
    ]


def test_empty_folder_is_a_clear_error(tmp_path):
    (tmp_path / "structures").mkdir()
    (tmp_path / "alignments").mkdir()
    with pytest.raises(InputError, match="structures"):
        build(tmp_path, tmp_path / "cache")


def test_failure_limit_reads_numbers_and_shares():
    assert FailureLimit.parse("3").allows(3, 4)
    assert not FailureLimit.parse("3").allows(4, 1000)
    assert FailureLimit.parse("5%").allows(5, 100)
    assert not FailureLimit.parse("5%").allows(6, 100)
    assert FailureLimit.parse("0").allows(0, 10)
    for text in ("many", "-1", "101%", "1.5", ""):
        with pytest.raises(InputError, match="max-failures"):
            FailureLimit.parse(text)


def test_corpus_is_listed_once(built, sample, monkeypatch):
    from megafold.pipeline.builder import config, engine

    listed = []
    honest = engine.discover

    def listing(corpus):
        listed.append(corpus)
        return honest(corpus)

    for module in (config, engine):
        monkeypatch.setattr(module, "discover", listing)
    sources = Sources(corpus=sample / "structures", alignments=sample / "alignments")
    sources = sources.with_templates_from_corpus()
    assert sources.template_structures == (sample / "structures",)
    asked = BuildConfig(sources=sources, cache=built[0], resources=Resources(workers=0))
    assert Build(asked, BuildProgress(quiet=True)).run().computed == {}
    assert listed == [sample / "structures"]


def test_unchanged_snapshot_is_hashed_once(built, sample, monkeypatch):
    hashed = []
    honest = Manifest.digest

    def digest(manifest):
        hashed.append(manifest)
        return honest(manifest)

    monkeypatch.setattr(Manifest, "digest", digest)
    report = build(sample, built[0])
    assert report.manifest == built[1].manifest
    assert len(hashed) == 1


def test_journal_is_no_limit_to_how_many_tasks_end_in_a_second(sample, tmp_path, monkeypatch):
    from megafold.cache_store import journal
    from megafold.pipeline.builder import engine

    synced: Counter[str] = Counter()
    honest = os.fsync

    def sync(file):
        synced[Path(f"/proc/self/fd/{file}").resolve().suffix] += 1
        honest(file)

    monkeypatch.setattr(journal.os, "fsync", sync)
    monkeypatch.setattr(engine, "_SYNC_EVERY_S", 1e9)
    report = build(sample, tmp_path / "cache")
    assert sum(report.computed.values()) > 2 * ENTRIES
    assert 1 <= synced[".jsonl"] <= 2  # when it is made, and when it is closed


def test_hit_list_of_a_sequence_that_entries_share_is_parsed_once(corpus, tmp_path, monkeypatch):
    from megafold.pipeline.builder import planner

    structures = corpus / "structures"
    folder = next(path for path in sorted((corpus / "alignments").iterdir()) if list(path.glob("hmmsearch*")))
    alone = build(corpus, tmp_path / "alone")
    rows = entry_rows(LocalStore.at(tmp_path / "alone").manifest())
    entry = next(
        row.entry for row in rows for chain in row.chains if chain.sequence_digest.startswith(folder.name)
    )
    for copy in ("x1cp", "x2cp"):
        shutil.copy(structures / f"{entry}.cif.gz", structures / f"{copy}.cif.gz")
    parsed = []
    honest = planner.hit_entries

    def hit_entries(path):
        parsed.append(path)
        return honest(path)

    monkeypatch.setattr(planner, "hit_entries", hit_entries)
    report = build(corpus, tmp_path / "cache")
    assert report.computed["template"] == alone.computed["template"]
    assert len(parsed) == len(set(parsed))
    shared = {row.entry: row for row in entry_rows(LocalStore.at(tmp_path / "cache").manifest())}
    recipes = {name: recipe for name, recipe in shared[entry].recipes.items() if name.startswith("template")}
    assert recipes
    for copy in ("x1cp", "x2cp"):
        assert {name: shared[copy].recipes[name] for name in recipes} == recipes
        assert [chain.template for chain in shared[copy].chains] == [c.template for c in shared[entry].chains]

    broken = next(folder.glob("hmmsearch*"))
    broken.write_bytes(broken.read_bytes()[:-9])
    report = build(corpus, tmp_path / "cache")
    failed = {failure["entry"] for failure in report.failures if failure["stage"] == "template"}
    assert failed == {entry, "x1cp", "x2cp"}  # all that need it, not the first alone
