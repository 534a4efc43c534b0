"""Assemblies, and what the content of an object may depend on."""

import gzip
import os
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from megafold.pipeline.errors import StructureError
from megafold.pipeline.structure import StructureOptions
from megafold.pipeline.structure.assembly import parse_operators
from tests.pipeline.structure_files import NO_FILTERS, TWO_FOLD, CifFile, make, write_binary

GENERATORS = "_pdbx_struct_assembly_gen"
ITEMS = "assembly_id oper_expression asym_id_list"


@pytest.mark.parametrize(
    ("expression", "wanted"),
    [
        ("1", [("1",)]),
        ("1,2", [("1",), ("2",)]),
        ("(1-3)", [("1",), ("2",), ("3",)]),
        ("(1,2,6-8,P)", [("1",), ("2",), ("6",), ("7",), ("8",), ("P",)]),
        ("(X0)(1-2)", [("X0", "1"), ("X0", "2")]),
        ("(1,2)(3,4)", [("1", "3"), ("1", "4"), ("2", "3"), ("2", "4")]),
        ("P(1)", [("P", "1")]),
    ],
)
def test_operator_expressions(expression, wanted):
    assert parse_operators(expression) == wanted


@pytest.mark.parametrize("expression", ["(1", "1)", "((1))", "(1-400)(1-400)", "(1-100001)"])
def test_operator_expressions_that_make_no_sense(expression):
    with pytest.raises(ValueError):
        parse_operators(expression)


def test_operator_expressions_of_the_largest_assemblies():
    """Helices of hundreds of copies are real."""
    assert len(parse_operators("(1-300)(1-300)")) == 90_000
    assert len(parse_operators("(1-100000)")) == 100_000


def two_chains():
    file = CifFile().polymer("ALA ALA")
    for asym, y in (("A", 10), ("B", 30)):
        file.add("ALA", asym, 1, at=(10, y, 0)).add("ALA", asym, 2, at=(14, y, 0))
    return file


def test_copies_come_after_originals(tmp_path):
    file = two_chains().loop(GENERATORS, ITEMS, "1 1,2 A", "1 1 B").loop(*TWO_FOLD)
    made = make(file.write(tmp_path))
    assert made.labels == ["A", "B", "A"]
    assert made.attributes["chains"]["operator"] == ["1", "1", "2"]
    assert made.tables["chains"]["sym_id"].tolist() == [1, 2, 3]
    first, last = (made.coords[made.atom_chain == chain] for chain in (0, 2))
    np.testing.assert_allclose(last[np.isfinite(last[:, 0])], (first * (-1, -1, 1))[np.isfinite(first[:, 0])])


def test_composed_operators_apply_the_last_first(tmp_path):
    name, items, *rows = TWO_FOLD
    shift = "3 1 0 0 100 0 1 0 0 0 0 1 0"
    file = two_chains().loop(GENERATORS, ITEMS, "1 (2)(3) A").loop(name, items, *rows, shift)
    made = make(file.write(tmp_path))
    plain = make(two_chains().write(tmp_path, "plain.cif"))
    atom = made.atom(0, 1, "CA")
    x, y, z = plain.coords[plain.atom(0, 1, "CA")]
    np.testing.assert_allclose(made.coords[atom], [-(x + 100), -y, z], atol=1e-3)
    assert made.attributes["chains"]["operator"] == ["2-3"]
    assert made.attributes["filtered"] == {"chains_outside_assembly": 1}


@pytest.mark.parametrize(
    ("generator", "assembly", "warning"),
    [
        ("", "asym", "defines no assembly"),
        ("1 9 A,B", "asym", r"does not define (9)"),
        ("1 1 X,Y", "asym", "name none of its chains"),
        ("1 (1 A,B", "asym", "cannot be understood"),
        ("5 1 A", "5", "assembly 5 is used"),
    ],
)
def test_odd_categories_fall_back_with_a_warning(tmp_path, generator, assembly, warning):
    file = two_chains().loop(*TWO_FOLD)
    if generator:
        file.loop(GENERATORS, ITEMS, generator)
    path = file.write(tmp_path)
    made = make(path)
    assert made.attributes["assembly"] == assembly
    assert any(warning in text for text in made.attributes["warnings"])
    with pytest.raises(StructureError, match="no assembly 7") as error:
        make(path, StructureOptions(assembly="7"))
    assert error.value.reason == "no-such-assembly"


@pytest.mark.parametrize(
    "operator",
    [
        "2 -1 0 0 0 0 -1 0 0 0 0 -1 0",  # an inversion makes D residues
        "2 -1 0 0 0 0 -1 0 0 0 0 1.02 0",
        "2 -1 0 0 ? 0 -1 0 0 0 0 1 0",
        "2 0 0 0 0 0 0 0 0 0 0 0 0",
    ],
)
def test_operators_that_are_no_rotations_are_not_applied(tmp_path, operator):
    name, items, identity, _ = TWO_FOLD
    file = two_chains().loop(GENERATORS, ITEMS, "1 1,2 A,B").loop(name, items, identity, operator)
    made = make(file.write(tmp_path))
    assert made.attributes["assembly"] == "asym"
    assert made.labels == ["A", "B"]
    assert any("are no rotations (2)" in text for text in made.attributes["warnings"])


def test_rounded_rotations_are_applied(tmp_path):
    """A three-fold axis to two digits, as old files have it."""
    name, items, identity, _ = TWO_FOLD
    third = "2 -0.5 -0.866 0 0 0.866 -0.5 0 0 0 0 1 0"
    file = two_chains().loop(GENERATORS, ITEMS, "1 1,2 A").loop(name, items, identity, third)
    made = make(file.write(tmp_path))
    assert made.attributes["chains"]["operator"] == ["1", "2"]


def test_a_chain_that_an_assembly_names_twice_is_built_once(tmp_path):
    file = two_chains().loop(GENERATORS, ITEMS, "1 1,2 A", "1 2 A,B").loop(*TWO_FOLD)
    made = make(file.write(tmp_path))
    copies = zip(made.labels, made.attributes["chains"]["operator"], strict=True)
    assert list(copies) == [("A", "1"), ("B", "2"), ("A", "2")]
    assert any("chain A by operator 2 twice" in text for text in made.attributes["warnings"])


def test_coordinates_as_deposited_on_request(tmp_path):
    path = two_chains().loop(GENERATORS, ITEMS, "1 1,2 A,B").loop(*TWO_FOLD).write(tmp_path)
    made = make(path, replace(NO_FILTERS, assembly="asym"))
    assert made.attributes["assembly"] == "asym"
    assert made.labels == ["A", "B"]
    assert made.attributes["warnings"] == []


def test_coordinates_are_rounded(tmp_path):
    name, items, *_ = TWO_FOLD
    c, s = np.cos(0.3), np.sin(0.3)
    file = (
        two_chains()
        .loop(GENERATORS, ITEMS, "1 1 A,B")
        .loop(name, items, f"1 {c} {-s} 0 0 {s} {c} 0 0 0 0 1 0")
    )
    coords = make(file.write(tmp_path)).coords.astype(float)
    coords = coords[np.isfinite(coords)]
    np.testing.assert_array_equal(coords.astype(np.float32), np.round(coords, 3).astype(np.float32))


SCRIPT = """
import sys
from pathlib import Path
from megafold.pipeline.chemistry import load_dictionary
from megafold.pipeline.structure import featurize_structure
dictionary = load_dictionary()
for path in sys.argv[1:]:
    print(featurize_structure(Path(path), "x", dictionary).content.digest())
"""


@pytest.mark.corpus
def test_content_depends_on_neither_hash_seed_nor_order(corpus_dir):
    paths = [
        str(corpus_dir / path)
        for path in (
            "structures/1pfe.cif.gz",
            "more/structures/6lu7.cif.gz",
            "structures/209d-assembly1.cif.gz",
        )
    ]

    def digests(seed, files):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        command = [sys.executable, "-c", SCRIPT, *files]
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True
        ).stdout.split()

    assert digests("1", paths) == digests("2", paths[::-1])[::-1]


@pytest.mark.corpus
@pytest.mark.parametrize(("entry", "suffix"), [("1cbs", ".bcif"), ("1ay7", ".bcif.gz"), ("2hhb", ".bcif")])
def test_binary_cif_gives_the_same_object(corpus_dir, tmp_path, entry, suffix):
    source = corpus_dir / f"structures/{entry}.cif.gz"
    path = tmp_path / (entry + suffix)
    write_binary(source, path)
    assert make(path, entry=entry).content.digest() == make(source, entry=entry).content.digest()


def test_suffixes_and_gzip_do_not_matter(tmp_path):
    path = two_chains().write(tmp_path)
    packed = tmp_path / "test.mmcif.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    assert make(path).content.digest() == make(packed).content.digest()
