"""Templates out of a cache are those that the same entries' mmCIF files give."""

import shutil

import numpy as np
import pytest
from scipy.spatial.transform import Rotation

from megafold.cache_store import LocalStore
from megafold.pipeline.builder.config import BuildConfig, Resources, Sources
from megafold.pipeline.builder.engine import Build
from megafold.pipeline.builder.progress import BuildProgress
from megafold.pipeline.errors import TemplateError
from megafold.pipeline.manifest import entry_rows
from megafold.pipeline.sample_corpus import write_sample_corpus
from megafold.pipeline.template import TemplateStructures
from megafold.pipeline.template.stored import is_cache

#: Hits of one HHR file; with selenomethionine, alternate locations, missing loops.
REAL = ("1psm", "2crb", "2q2k", "3u8v", "3zee", "4i6p")


def build(structures, cache, templates, alignments=None):
    sources = Sources(corpus=structures, alignments=alignments, template_structures=templates)
    config = BuildConfig(sources=sources, cache=cache, resources=Resources(workers=0))
    return Build(config, BuildProgress(quiet=True)).run()


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    """A small made-up corpus and a cache of it."""
    folder = tmp_path_factory.mktemp("corpus")
    write_sample_corpus(folder, entries=3, seed=3)
    structures = folder / "structures"
    report = build(structures, folder / "cache", (structures,), folder / "alignments")
    assert report.failures == []
    return folder


def rows(cache):
    return {row.entry: row for row in entry_rows(LocalStore.at(cache).manifest())}


def compare(files, stored, entry):
    """Chains of an entry from both sources, by label; returns how many residues have a CA."""
    first, second = files.load(entry), stored.load(entry)
    assert first is not None
    assert second is not None
    assert second.release_date == first.release_date
    by_label = {chain.label_asym_id: chain for chain in first.chains}
    n_residue = 0
    assert second.chains
    for chain in second.chains:
        other = by_label[chain.label_asym_id]
        assert chain.auth_asym_id == other.auth_asym_id
        assert chain.sequence == other.sequence
        assert_congruent(chain.atom_pos, other.atom_pos)
        n_residue += int(np.isfinite(chain.atom_pos[:, 1, 0]).sum())
    return n_residue


def assert_congruent(first, second):
    """The same atoms, and the same up to a rigid motion: an assembly's first copy may have been moved."""
    np.testing.assert_array_equal(np.isnan(first), np.isnan(second))
    present = np.isfinite(first[..., 0])
    a, b = first[present].astype(np.float64), second[present].astype(np.float64)
    if not np.array_equal(a, b):
        rotation, _ = Rotation.align_vectors(a - a.mean(axis=0), b - b.mean(axis=0))
        np.testing.assert_allclose(rotation.apply(b - b.mean(axis=0)), a - a.mean(axis=0), atol=3e-3)


def test_the_same_chains_as_from_the_files(sample):
    files, stored = TemplateStructures([sample / "structures"]), TemplateStructures([sample / "cache"])
    assert len(stored) == len(files) == 3
    for entry, row in rows(sample / "cache").items():
        assert entry in stored
        assert stored.path(entry) is None
        assert stored.digest(entry) == row.structure
        loaded = files.load(entry)
        assert loaded is not None
        if loaded.chains:
            assert compare(files, stored, entry) > 0
    assert stored.load("9zzz") is None
    assert stored.digest("9zzz") is None


def test_a_build_with_templates_out_of_a_cache(sample, tmp_path):
    """Here its own: the objects are those made from the files, their recipes name other structures."""
    structures, alignments, cache = sample / "structures", sample / "alignments", tmp_path / "cache"
    shutil.copytree(sample / "cache", cache)
    report = build(structures, cache, (cache,), alignments)
    assert set(report.computed) == {"template"}
    expected, found = rows(sample / "cache"), rows(cache)
    n_template = 0
    for entry, row in expected.items():
        for ours, theirs in zip(found[entry].chains, row.chains, strict=True):
            assert (ours.template, ours.n_template) == (theirs.template, theirs.n_template)
            n_template += theirs.n_template
        stages = [stage for stage in row.recipes if stage.startswith("template")]
        assert all(found[entry].recipes[stage] != row.recipes[stage] for stage in stages)
    assert n_template > 0
    assert build(structures, cache, (cache,), alignments).computed == {}


def test_structures_that_come_after_a_build_are_found_by_the_next(sample, tmp_path):
    """In one process, which keeps its listing of the folders between builds."""
    structures, alignments, cache = sample / "structures", sample / "alignments", tmp_path / "cache"
    shutil.copytree(sample / "cache", cache)
    (tmp_path / "pdb").mkdir()
    build(structures, cache, (tmp_path / "pdb",), alignments)
    assert not any(chain.n_template for row in rows(cache).values() for chain in row.chains)
    for path in structures.iterdir():
        shutil.copy(path, tmp_path / "pdb")
    assert set(build(structures, cache, (tmp_path / "pdb",), alignments).computed) == {"template"}
    expected = rows(sample / "cache")
    for entry, row in rows(cache).items():
        assert [chain.template for chain in row.chains] == [
            chain.template for chain in expected[entry].chains
        ]


def test_files_go_before_caches(sample, tmp_path):
    entry = next(entry for entry in rows(sample / "cache"))
    shutil.copy(sample / "structures" / f"{entry}.cif.gz", tmp_path)
    both = TemplateStructures([sample / "cache", tmp_path])
    assert both.path(entry) == tmp_path / f"{entry}.cif.gz"
    assert len(both) == 3


def test_a_cache_is_told_by_its_files(sample, tmp_path):
    assert is_cache(sample / "cache")
    assert not is_cache(sample / "structures")
    LocalStore.create(tmp_path / "empty")
    assert len(TemplateStructures([tmp_path / "empty"])) == 0


def test_a_lost_object_is_named(sample, tmp_path):
    cache = tmp_path / "cache"
    shutil.copytree(sample / "cache", cache)
    entry, row = next(iter(rows(cache).items()))
    stored = TemplateStructures([cache])
    next(path for path in cache.rglob(f"*{row.structure[4:]}*")).unlink()
    with pytest.raises(TemplateError, match=entry) as caught:
        stored.load(entry)
    assert caught.value.reason == "unreadable"


@pytest.mark.corpus
@pytest.mark.slow
def test_real_entries(corpus_dir, tmp_path):
    structures = tmp_path / "structures"
    structures.mkdir()
    for entry in REAL:
        found = [
            path
            for folder in ("structures", "more/structures")
            if (path := corpus_dir / folder / f"{entry}.cif.gz").exists()
        ]
        shutil.copy(found[0], structures)
    build(structures, tmp_path / "cache", (structures,))
    files, stored = TemplateStructures([structures]), TemplateStructures([tmp_path / "cache"])
    assert len(rows(tmp_path / "cache")) == len(REAL)
    assert sum(compare(files, stored, entry) for entry in REAL) > 500
