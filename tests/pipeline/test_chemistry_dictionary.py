"""Dictionaries: the same component from every source, and as gemmi and biotite read it."""

import gzip
import random
import shutil
import subprocess
import sys
from pathlib import Path

import biotite.structure.info as biotite_info
import biotite.structure.io.pdbx as pdbx
import gemmi
import numpy as np
import pytest
from biotite.structure import BondType
from biotite.structure.info.ccd import get_ccd, get_from_ccd

from megafold.pipeline.chemistry import Component, ComponentDictionary, load_dictionary
from megafold.pipeline.errors import ComponentError

LIGAND = """data_{code}
_chem_comp.id {code}
_chem_comp.name 'methanol; not the one you know'
_chem_comp.type non-polymer
_chem_comp.pdbx_modified_date {date}
loop_
_chem_comp_atom.comp_id
_chem_comp_atom.atom_id
_chem_comp_atom.type_symbol
_chem_comp_atom.charge
{code} C1 C 0
{code} "O1'" O ?
loop_
_chem_comp_bond.comp_id
_chem_comp_bond.atom_id_1
_chem_comp_bond.atom_id_2
_chem_comp_bond.value_order
{code} C1 "O1'" {order}
"""


def ligand(code: str = "LIG", order: str = "SING", date: str = "2020-01-01") -> str:
    return LIGAND.format(code=code, order=order, date=date)


def get(dictionary: ComponentDictionary, code: str) -> Component:
    component = dictionary.get(code)
    assert component is not None
    return component


@pytest.fixture(scope="module")
def bundled():
    return load_dictionary()


@pytest.fixture(scope="module")
def corpus_ccd(corpus_dir):
    return corpus_dir / "ccd" / "components.cif.gz"


def test_alanine(bundled):
    """Hand-checked against the CCD's ALA."""
    ala = bundled.get("ALA")
    assert (ala.key, ala.type, ala.one_letter, ala.parent) == ("ALA", "L-PEPTIDE LINKING", "A", "")
    assert ala.atom_names == tuple("N CA C O CB OXT H H2 HA HB1 HB2 HB3 HXT".split())
    assert ala.elements.tolist() == [7, 6, 6, 8, 6, 8, *[1] * 7]
    assert [ala.atom_names[i] for i in np.flatnonzero(ala.leaving)] == ["OXT", "H2", "HXT"]
    assert ala.stereo.tolist() == [0, 2, *[0] * 11]
    orders = {(ala.atom_names[i], ala.atom_names[j]): order for i, j, order, _ in ala.bond_rows()}
    assert orders[("C", "O")] == 2
    assert orders[("N", "CA")] == 1
    assert len(orders) == 12


def test_modified_residues_name_their_parents(bundled):
    assert bundled.get("MSE").parent == "MET"
    assert bundled.get("CRO").parent == "THR, TYR, GLY"
    assert bundled.get("SEP").one_letter == "S"


def test_the_bundled_dictionary_holds_what_biotite_says(bundled):
    assert bundled.codes() == sorted(get_ccd()["chem_comp"]["id"].as_array().tolist())
    codes = random.Random(0).sample(bundled.codes(), 300)
    for code in codes:
        names = get_from_ccd("chem_comp_atom", code, "atom_id").as_array()
        assert bundled.get(code).atom_names == tuple(names.tolist()), code


def test_biotite_reads_the_same_atoms_and_bonds(bundled):
    names = {"SINGLE": 1, "DOUBLE": 2, "TRIPLE": 3, "AROMATIC_SINGLE": 1, "AROMATIC_DOUBLE": 2}
    for code in random.Random(1).sample(bundled.codes(), 60):
        ours, theirs = bundled.get(code), biotite_info.residue(code, allow_missing_coord=True)
        assert ours.atom_names == tuple(theirs.atom_name.tolist())
        assert ours.charges.tolist() == theirs.charge.tolist()
        bonds = {
            (min(i, j), max(i, j)): names[BondType(kind).name]
            for i, j, kind in theirs.bonds.as_array().tolist()
        }
        assert {(i, j): order for i, j, order, _ in ours.bond_rows()} == bonds, code


@pytest.mark.corpus
def test_gemmi_reads_the_same_components(bundled, corpus_ccd):
    document = gemmi.cif.read(str(corpus_ccd))
    assert len(document) == 252
    for block in document:
        theirs = gemmi.make_chemcomp_from_block(block)
        ours = bundled.get(theirs.name)
        assert ours.atom_names == tuple(atom.id for atom in theirs.atoms)
        assert ours.elements.tolist() == [atom.el.atomic_number for atom in theirs.atoms], theirs.name
        assert ours.charges.tolist() == [int(atom.charge) for atom in theirs.atoms], theirs.name
        orders = {"Single": 1, "Double": 2, "Triple": 3}
        bonds = {
            frozenset((bond.id1.atom, bond.id2.atom)): (orders[bond.type.name], bond.aromatic)
            for bond in theirs.rt.bonds
        }
        assert bonds == {
            frozenset((ours.atom_names[i], ours.atom_names[j])): (order, aromatic)
            for i, j, order, aromatic in ours.bond_rows()
        }, theirs.name


@pytest.mark.corpus
@pytest.mark.parametrize(("folder", "count"), [("ccd", 252), ("more/ccd", 506)])
def test_text_and_binary_dictionaries_give_the_same_digests(bundled, corpus_dir, folder, count):
    text = load_dictionary(corpus_dir / folder / "components.cif.gz")
    assert len(text.codes()) == count
    assert [code for code in text.codes() if text.digest(code) != bundled.digest(code)] == []


@pytest.mark.corpus
def test_plain_and_extra_files_give_the_same_digests(bundled, corpus_ccd, tmp_path):
    path = tmp_path / "components.cif"
    with gzip.open(corpus_ccd) as source, path.open("wb") as target:
        shutil.copyfileobj(source, target)
    plain, extra = load_dictionary(path), load_dictionary(path, [path])
    for code in ("HEM", "A", "PHE", plain.codes()[0], plain.codes()[-1]):
        assert plain.digest(code) == extra.digest(code) == bundled.digest(code)


def test_a_binary_dictionary_with_a_block_for_each_component(bundled, tmp_path):
    """As other programs lay it out; written by biotite."""
    file = pdbx.BinaryCIFFile()
    for code in ("HEM", "GLY"):
        block = pdbx.BinaryCIFBlock()
        for name in ("chem_comp", "chem_comp_atom", "chem_comp_bond"):
            block[name] = get_from_ccd(name, code)
        file[code] = block
    file.write(tmp_path / "two.bcif")
    (tmp_path / "two.bcif.gz").write_bytes(gzip.compress((tmp_path / "two.bcif").read_bytes()))
    for path in (tmp_path / "two.bcif", tmp_path / "two.bcif.gz"):
        found = load_dictionary(path)
        assert found.codes() == ["GLY", "HEM"]
        assert [found.digest(code) for code in found.codes()] == [bundled.digest(c) for c in found.codes()]


def test_extra_definitions_add_to_the_dictionary_and_win_over_it(bundled, tmp_path):
    (tmp_path / "first.cif").write_text(ligand("ALA") + ligand("MINE", order="DOUB"))
    (tmp_path / "second.cif").write_text(ligand("MINE"))
    found = load_dictionary(extra=[tmp_path / "first.cif", tmp_path / "second.cif"])
    assert get(found, "ALA").atom_names == ("C1", "O1'")
    assert get(found, "MINE").bond_orders.tolist() == [1]
    assert found.digest("GLY") == bundled.digest("GLY")
    assert "MINE" in found.codes()


def test_dates_and_names_leave_the_digest_alone_and_bond_orders_do_not(tmp_path):
    digests = []
    for order, date in (("SING", "2020-01-01"), ("SING", "2024-12-31"), ("DOUB", "2020-01-01")):
        (tmp_path / "own.cif").write_text(ligand(order=order, date=date))
        digests.append(load_dictionary(extra=[tmp_path / "own.cif"]).digest("LIG"))
    assert digests[0] == digests[1] != digests[2]


def test_a_monomer_library_file(tmp_path):
    """Refinement programs write `data_comp_LIG`, x y z and bond `type`."""
    text = ligand(order="aromatic").replace("data_LIG", "data_comp_LIG").replace("value_order", "type")
    text = text.replace("atom.charge\n", "atom.x\n_chem_comp_atom.y\n_chem_comp_atom.z\n")
    text = text.replace("C1 C 0\n", "C1 C 0.0 1.0 2.0\n").replace("O ?\n", "O 3.0 4.0 5.0\n")
    (tmp_path / "own.cif").write_text(text)
    component = get(load_dictionary(extra=[tmp_path / "own.cif"]), "LIG")
    assert component.ideal_pos.tolist() == [[0, 1, 2], [3, 4, 5]]
    assert component.bond_rows() == [(0, 1, 0, True)]


def test_a_block_start_within_a_text_field_starts_no_block(tmp_path):
    text = ligand("AAA").replace("'methanol; not the one you know'", "\n;a name\ndata_BBB is none\n;")
    for path in (tmp_path / "ccd.cif", tmp_path / "ccd.cif.gz"):
        data = (text + ligand("CCC")).encode()
        path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
        found = load_dictionary(path)
        assert found.codes() == ["AAA", "CCC"]
        assert get(found, "AAA").name == "a name\ndata_BBB is none"


def test_a_code_without_atoms_is_an_empty_component(bundled):
    assert len(bundled.get("UNL")) == 0
    assert bundled.get("UNL")


def test_an_unknown_code_is_none_and_its_digest_an_error_that_names_it(bundled):
    assert bundled.get("~QS") is None
    with pytest.raises(ComponentError, match=r"'~QS'.*--ccd-extra") as caught:
        bundled.digest("~QS")
    assert caught.value.reason == "unknown-component"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("absent.cif", None),
        ("absent.bcif", None),
        ("empty.cif", b""),
        ("empty.bcif", b""),
        ("prose.cif", b"dear dictionary"),
        ("prose.bcif", b"dear dictionary"),
        ("torn.cif.gz", gzip.compress(ligand().encode() * 50)[:-12]),
        ("plain.cif.gz", ligand().encode()),
        ("flipped.cif.gz", gzip.compress(ligand().encode())[:10] + b"\xff" * 20),
        ("flipped.bcif.gz", gzip.compress(b"x" * 99)[:10] + b"\xff" * 20),
    ],
)
def test_files_that_are_no_dictionaries_are_refused_by_name(tmp_path, name, content):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(ComponentError, match=name):
        load_dictionary(tmp_path / name)


@pytest.mark.parametrize(
    "change",
    [
        ("O1'\" O", "O1'\" Qq"),
        ('C1 "O1\'" SING', "C1 O9 SING"),
        ("C 0\n", "C many\n"),
        ("loop_", "loop_ loop_"),
    ],
    ids=["element", "bond", "charge", "syntax"],
)
def test_definitions_that_make_no_sense_are_refused_by_file(tmp_path, change):
    text = ligand()
    assert change[0] in text
    (tmp_path / "own.cif").write_text(text.replace(*change))
    with pytest.raises(ComponentError, match=r"own\.cif"):
        load_dictionary(extra=[tmp_path / "own.cif"])


def test_reading_a_dictionary_imports_neither_rdkit_nor_biotite_nor_torch():
    code = (
        "import sys; from megafold.pipeline.chemistry import load_dictionary; "
        "import megafold.pipeline.chemistry.library; load_dictionary().get('ALA'); "
        "print([name for name in ('rdkit', 'biotite', 'torch') if name in sys.modules])"
    )
    root = Path(__file__).resolve().parents[2]
    done = subprocess.run([sys.executable, "-c", code], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
