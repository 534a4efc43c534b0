"""Every file of both batches of the corpus: features, or a refusal for a reason its tags justify."""

import csv

import numpy as np
import pytest

from megafold.pipeline.errors import StructureError
from megafold.pipeline.structure import StructureOptions
from tests.pipeline import invariants
from tests.pipeline.structure_files import make

#: User components whose bonds the file does not tell.
REFUSED_VARIANTS = {"nras-braf-gdp-model_0": "unknown-component"}

#: Bonds that files of other programs leave out: disulfides, a magnesium, irons. All others tell of theirs.
INFERRED = {"1twr": 3, "6mub": 8, "6wqa": 4, "721p-assembly1": 8, "7cfn": 3}


def check_sane(made):
    invariants.check(made.content)
    coords = made.coords
    resolved = made.tables["atoms"]["resolved"].astype(bool)
    np.testing.assert_array_equal(np.isfinite(coords).all(axis=1), resolved)
    assert len(made.labels) == made.content.arrays["chains"].shape[1]
    bonds = made.tables["bonds"]
    assert (bonds["atom_i"] < bonds["atom_j"]).all()
    lengths = np.linalg.norm(coords[bonds["atom_i"]] - coords[bonds["atom_j"]], axis=1)
    covalent = (bonds["kind"] != 2) & np.isfinite(lengths)
    assert (lengths[covalent] < 3).all()


def tags(path):
    with path.open() as file:
        rows = list(csv.DictReader(file, delimiter="\t", quoting=csv.QUOTE_NONE))
    return {row["file" if "file" in row else "path"]: row["tags"] for row in rows}


@pytest.mark.corpus
@pytest.mark.slow
@pytest.mark.parametrize(("folder", "count"), [("structures", 81), ("more/structures", 70)])
def test_all_entries_build(corpus_dir, folder, count):
    paths = sorted((corpus_dir / folder).iterdir())
    assert len(paths) == count
    inferred = {}
    for path in paths:
        made = make(path, StructureOptions())
        check_sane(made)
        if found := made.attributes["changed"].get("bonds_inferred"):
            inferred[made.attributes["entry"]] = found
        assert made.own == () or "UNL" in {component.code for component in made.own}
    assert inferred == (INFERRED if folder == "structures" else {})


@pytest.mark.corpus
def test_variants_build_or_are_refused_for_what_they_are(corpus_dir):
    folder = corpus_dir / "more/variants"
    described = tags(corpus_dir / "more/manifest.tsv")
    refused = {}
    own: dict[str, list[str]] = {}
    for path in sorted(folder.iterdir()):
        name = path.name.removesuffix(".cif.gz")
        try:
            made = make(path, StructureOptions())
        except StructureError as error:
            refused[name] = error.reason
            assert "user-component" in described[f"variants/{path.name}"]
            continue
        check_sane(made)
        own |= {name: [component.code for component in made.own]} if made.own else {}
    assert refused == REFUSED_VARIANTS
    assert own == {"penicillin-ts2-ncaa": ["L:0"], "phenix-output": ["ZQ8"], "unl-ligand-with-bonds": ["UNL"]}


@pytest.mark.corpus
def test_broken_files(corpus_dir):
    folder = corpus_dir / "more/broken"
    with pytest.raises(StructureError, match="1ake-bad-loop") as error:
        make(folder / "1ake-bad-loop.cif.gz")
    assert error.value.reason == "invalid-cif"
    # An atom that is there twice counts once.
    made = make(folder / "1en2-bad-atoms.cif.gz")
    assert made.attributes["filtered"]["repeated_atoms"] == 1
    assert made.tables["atoms"]["resolved"].sum() == 8
    # A block without a name, and deuterium.
    made = make(folder / "5pti-noid.cif.gz")
    assert made.tables["atoms"]["resolved"].sum() == 11
    assert "D" not in {name[0] for name in made.names(0)}
    # Quotation marks in atom names, comments inside loops.
    made = make(folder / "difficult-quoting.cif.gz")
    resolved = np.flatnonzero(made.tables["atoms"]["resolved"])
    assert {made.names(0)[index] for index in resolved} == {"OP1", "O5'", "O3'"}


@pytest.mark.corpus
def test_predictions_without_chemistry_of_a_ligand_say_what_is_missing(corpus_dir):
    path = corpus_dir / "more/variants/nras-braf-gdp-model_0.cif.gz"
    with pytest.raises(StructureError, match=r"nras-braf-gdp-model_0.*chain G.*LIG.*--ccd-extra"):
        make(path)


@pytest.mark.corpus
def test_ligand_without_coordinates(corpus_dir):
    made = make(corpus_dir / "more/variants/unl-ligand-with-bonds.cif.gz", StructureOptions())
    assert made.tables["chains"]["atom_count"].tolist() == [28]
    assert not made.tables["atoms"]["resolved"].any()
    assert not made.tables["tokens"]["frame_mask"].any()
    assert len(made.own[0].bonds) == 32
    assert "no atom has coordinates" in made.attributes["warnings"]
