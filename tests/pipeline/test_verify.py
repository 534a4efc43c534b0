"""Verification of a built cache: damage is found and named, a healthy cache is quiet, staleness is told."""

import gzip
import json
import os
import pickle
import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from megafold.cache_store import Content, Digest, LocalStore, Manifest
from megafold.pipeline.builder import verify
from megafold.pipeline.builder.config import Sources
from megafold.pipeline.manifest import entry_rows
from tests.pipeline.test_builder import build, query_of
from tests.pipeline.test_builder import built as built
from tests.pipeline.test_builder import sample as sample

ROOT = Path(__file__).resolve().parents[2]


def silent(done: int, total: int) -> None:
    pass


def sources(corpus: Path) -> Sources:
    structures = corpus / "structures"
    return Sources(corpus=structures, alignments=corpus / "alignments", template_structures=(structures,))


@pytest.fixture
def cache(built, tmp_path) -> Path:
    return Path(shutil.copytree(built[0], tmp_path / "cache"))


def store_findings(cache: Path, quick: bool = False):
    store = LocalStore.at(cache)
    found = verify.check_store(store, store.manifest(), quick=quick, workers=1, progress=silent)
    return [finding for finding in found if finding.level == "error"]


def test_healthy_cache_has_no_findings(built, sample):
    store = LocalStore.at(built[0])
    manifest = store.manifest()
    assert verify.check_store(store, manifest, quick=False, workers=1, progress=silent) == []
    assert verify.check_versions(manifest) == []
    assert verify.check_schema(store, manifest) == []
    assert verify.check_corpus(store, manifest, sources(sample)) == []
    assert verify.check_recompute(manifest, sources(sample), None, silent) == []


@pytest.mark.parametrize("quick", [False, True], ids=["full", "quick"])
def test_fifty_bit_flips_are_all_found_and_named(cache, quick):
    objects = sorted((cache / "objects").rglob("*.zarr.zip"))
    rng = random.Random(7)
    names = {path.name.removesuffix(".zarr.zip") for path in objects}
    users = verify.users(LocalStore.at(cache).manifest(), names)
    for _ in range(50):
        path = rng.choice(objects)
        healthy = path.read_bytes()
        place, bit = rng.randrange(len(healthy)), rng.randrange(8)
        damaged = bytearray(healthy)
        damaged[place] ^= 1 << bit
        path.chmod(0o644)
        path.write_bytes(bytes(damaged))
        (finding,) = store_findings(cache, quick)
        digest = path.name.removesuffix(".zarr.zip")
        assert finding.subject == digest, f"byte {place}, bit {bit}"
        assert list(finding.entries) == users.get(digest, [])
        assert finding.action
        path.write_bytes(healthy)
    assert store_findings(cache, quick) == []


def test_ten_deleted_or_swapped_objects_are_found_and_named(cache):
    objects = sorted((cache / "objects").rglob("*.zarr.zip"))
    chosen = random.Random(3).sample(objects, 15)
    deleted, pairs = chosen[:5], list(zip(chosen[5::2], chosen[6::2], strict=True))
    for path in deleted:
        path.unlink()
    for one, other in pairs:
        aside = one.with_name("aside")
        one.rename(aside)
        other.rename(one)
        aside.rename(other)
    found = {finding.subject: finding.kind for finding in store_findings(cache)}
    expected = {path.name.removesuffix(".zarr.zip"): "missing-object" for path in deleted}
    expected |= {path.name.removesuffix(".zarr.zip"): "swapped-object" for pair in pairs for path in pair}
    assert found == expected


def test_flipped_manifest_and_ref_are_found(cache):
    (path,) = (cache / "manifests").glob("*.parquet")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 4
    path.chmod(0o644)
    path.write_bytes(bytes(data))
    status, findings = run_verify(cache)
    assert status == 1
    assert "corrupt-manifest" in {finding["kind"] for finding in findings}
    (cache / "refs" / "main").write_text("not a digest\n")
    status, findings = run_verify(cache)
    assert status == 1
    assert "corrupt-ref" in {finding["kind"] for finding in findings}


def run_verify(cache: Path, *options: str) -> tuple[int, list[dict]]:
    shown = subprocess.run(
        [sys.executable, "-m", "megafold", "cache", "verify", cache, "--json", "--workers", "1", *options],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert "Traceback" not in shown.stderr, shown.stderr
    return shown.returncode, json.loads(shown.stdout)["findings"]


def test_edited_files_are_stale_and_only_they_are_rebuilt(cache, sample, tmp_path):
    corpus = Path(shutil.copytree(sample, tmp_path / "corpus"))
    folder = next(path for path in sorted((corpus / "alignments").iterdir()) if list(path.glob("*.a3m*")))
    (folder / "extra.a3m").write_text(query_of(folder))
    edited = sorted((corpus / "structures").glob("*.cif.gz"))[0]
    edited.write_bytes(gzip.compress(gzip.decompress(edited.read_bytes()) + b"\n# edited\n"))
    entry = edited.name.split(".")[0]

    store = LocalStore.at(cache)
    findings = verify.check_corpus(store, store.manifest(), sources(corpus))
    assert {finding.level for finding in findings} == {"stale"}
    kinds = sorted(finding.subject for finding in findings if finding.subject == entry)
    assert kinds == [entry]
    alignment = [finding for finding in findings if folder.name in finding.message]
    assert len(alignment) == 1
    assert "extra.a3m" in alignment[0].message
    rows = list(entry_rows(store.manifest()))
    using = {
        row.entry for row in rows for chain in row.chains if chain.sequence_digest[:16] == folder.name
    } - {entry}
    assert set(alignment[0].entries) >= using

    report = build(corpus, cache)
    assert report.computed["structure"] == 1
    assert report.computed["msa"] == 1
    assert verify.check_corpus(store, LocalStore.at(cache).manifest(), sources(corpus)) == []


def test_new_and_removed_entries_are_told(cache, sample, tmp_path):
    corpus = Path(shutil.copytree(sample, tmp_path / "corpus"))
    first, *_, last = sorted((corpus / "structures").glob("*.cif.gz"))
    shutil.copy(first, first.with_name("new1.cif.gz"))
    last.unlink()
    store = LocalStore.at(cache)
    left = [row for row in entry_rows(store.manifest()) if row.entry != last.name.split(".")[0]]
    chain = next(chain for row in left for chain in row.chains if chain.msa)
    shutil.rmtree(corpus / "alignments" / chain.sequence_digest[:16])
    findings = verify.check_corpus(store, store.manifest(), sources(corpus))
    kinds = {finding.subject: finding.kind for finding in findings}
    assert kinds["new1"] == "new"
    assert kinds[last.name.split(".")[0]] == "gone"
    for row in left:
        for entity in {c.entity_id for c in row.chains if c.sequence_digest == chain.sequence_digest}:
            assert kinds[f"{row.entry} msa:{entity}"] == "gone"


def test_a_featurizer_that_computes_something_else_is_found(cache, sample, monkeypatch):
    from megafold.pipeline.builder import tasks

    structure, msa = tasks.featurize_structure, tasks.featurize_msa

    def plus_one(content: Content, name: str) -> Content:
        return Content({**content.arrays, name: content.arrays[name] + 1}, dict(content.attributes))

    def shifted(*arguments):
        made = structure(*arguments)
        return replace(made, content=plus_one(made.content, "atom_coords"))

    def miscounted(*arguments):
        made = msa(*arguments)
        return (
            made if made.content is None else replace(made, content=plus_one(made.content, "deletion_mean"))
        )

    monkeypatch.setattr(tasks, "featurize_structure", shifted)
    monkeypatch.setattr(tasks, "featurize_msa", miscounted)
    manifest = LocalStore.at(cache).manifest()
    findings = verify.check_recompute(manifest, sources(sample), 2, silent)
    assert {finding.kind for finding in findings} == {"not-reproduced"}
    entries = {entry for finding in findings for entry in finding.entries}
    assert len(entries) == 2
    expected = set()
    for row in (row for row in entry_rows(manifest) if row.entry in entries):
        expected |= {row.structure} | {chain.msa for chain in row.chains if chain.msa}
    assert len(expected) > 2
    assert {finding.subject for finding in findings} == expected


def test_other_versions_of_stages_and_libraries_are_told(built, monkeypatch):
    manifest = LocalStore.at(built[0]).manifest()
    later = {"structure": "99", "rdkit": "2099.1", "spectra": "1"}
    monkeypatch.setattr(verify, "VERSIONS", {**verify.VERSIONS, **later})
    found = {(f.level, f.subject): f.message for f in verify.check_versions(manifest)}
    assert set(found) == {("stale", "structure"), ("info", "rdkit"), ("stale", "spectra")}
    assert found["stale", "structure"].endswith("this is 99")
    assert "none" in found["stale", "spectra"]


def test_verify_names_a_folder_that_is_no_cache(tmp_path):
    shown = subprocess.run(
        [sys.executable, "-m", "megafold", "cache", "verify", tmp_path / "nothing"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        env=os.environ,
    )
    assert shown.returncode == 2
    assert "nothing is not a cache" in shown.stderr
    assert "Traceback" not in shown.stderr


def test_a_lost_ref_is_found(cache, sample):
    (cache / "refs" / "main").unlink()
    status, findings = run_verify(cache, "--corpus", str(sample / "structures"))
    assert status == 1
    assert [finding["kind"] for finding in findings] == ["no-snapshot"]


def test_a_lost_ledger_is_found(sample, tmp_path):
    corpus = Path(shutil.copytree(sample, tmp_path / "corpus"))
    sorted((corpus / "structures").glob("*.cif.gz"))[0].write_bytes(b"not a structure")
    build(corpus, tmp_path / "cache")
    (ledger,) = (tmp_path / "cache" / "failures").iterdir()
    ledger.unlink()
    status, findings = run_verify(tmp_path / "cache")
    assert status == 1
    assert [(finding["kind"], finding["subject"]) for finding in findings] == [
        ("missing-ledger", ledger.stem)
    ]


def test_a_damaged_library_hides_no_other_finding(cache, sample):
    store = LocalStore.at(cache)
    library = store.object_path(Digest.parse(str(store.manifest().attributes["components"])))
    library.chmod(0o644)
    library.write_bytes(library.read_bytes()[:200])
    status, findings = run_verify(cache, "--corpus", str(sample / "structures"))
    assert status == 1
    assert {finding["kind"] for finding in findings} == {"corrupt-object", "unchecked"}


def test_rows_are_gone_through_for_findings_alone(cache, monkeypatch):
    def refuse(_):
        raise AssertionError("a row was read")

    monkeypatch.setattr(verify, "entry_rows", refuse)
    assert store_findings(cache, True) == []


@contextmanager
def pickling_map(workers: int) -> Iterator[Callable]:
    """What a map over processes does to function, items and results, in this one."""
    assert workers == 2

    def mapped(function: Callable, items: Sequence) -> Iterator:
        function, items = pickle.loads(pickle.dumps((function, items)))
        return (pickle.loads(pickle.dumps(function(item))) for item in items)

    yield mapped


def test_checks_over_processes_find_the_same(cache, monkeypatch):
    """Of the store, and from a few thousand objects on of the schema; a manifest that says other kinds."""
    store = LocalStore.at(cache)
    manifest = store.manifest()
    rows = manifest.table.to_pylist()
    row = next(row for row in rows if row["pairing"])
    row["pairing"], row["structure"] = row["structure"], row["pairing"]
    table = pa.Table.from_pylist(rows, schema=manifest.table.schema)
    wrong = Manifest(table, dict(manifest.attributes))
    lost = store.object_path(Digest.parse(rows[-1]["structure"]))
    lost.unlink()

    def found(workers: int) -> list:
        return [
            *verify.check_store(store, wrong, quick=True, workers=workers, progress=silent),
            *verify.check_schema(store, wrong, workers=workers),
        ]

    alone = found(1)
    assert [(f.kind, f.subject, f.entries) for f in alone] == [
        ("missing-object", lost.name.split(".")[0], (rows[-1]["entry"],)),
        ("schema", row["structure"], (row["entry"],)),
        ("schema", row["pairing"], (row["entry"],)),
    ]
    assert "it is a pairing, the manifest says structure" in alone[1].message
    monkeypatch.setattr(verify, "process_map", pickling_map)
    monkeypatch.setattr(verify, "_WORTH_PROCESSES", 1)
    assert found(2) == alone


def test_an_object_whose_arrays_are_others_than_the_schemas_is_found(cache):
    store = LocalStore.at(cache)
    manifest = store.manifest()
    row = next(entry_rows(manifest))
    with store.open(Digest.parse(row.structure)) as reader:
        content = reader.read_all()
    coords = content.arrays["atom_coords"].astype(np.float64)
    digest = store.put(Content({**content.arrays, "atom_coords": coords}, dict(content.attributes)))
    rows = manifest.table.to_pylist()
    rows[0]["structure"] = str(digest)
    table = pa.Table.from_pylist(rows, schema=manifest.table.schema)
    (finding,) = verify.check_schema(store, Manifest(table, dict(manifest.attributes)))
    assert (finding.level, finding.subject, finding.entries) == ("error", str(digest), (row.entry,))
    assert "atom_coords" in finding.message
