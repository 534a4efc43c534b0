"""Chains of files that do not say what their sequences are: polymers are read off the residues with atoms."""

import numpy as np
import pytest

from megafold.pipeline.schema import MolType
from megafold.pipeline.structure import StructureOptions
from tests.pipeline.structure_files import CifFile, definition, make

#: Å, a peptide bond.
BOND = 1.33


def alanines(numbers, breaks=(), gap=8.0, *, start=(0, 0, 0), auth=None):
    """ALA without an entity, numbered as told; each is bonded to the one before but for ``breaks``."""
    component = definition("ALA")
    head, tail = (component.ideal_pos[component.atom_index[name]] for name in ("N", "C"))
    file, shift = CifFile(), np.asarray(start, float)
    for place, number in enumerate(numbers):
        if place:
            away = (tail - head) / np.linalg.norm(tail - head)
            shift = shift + tail - head + away * (gap if place in breaks else BOND)
        author = (place + 1 if number == "." else number) if auth is None else auth[place]
        file.add("ALA", "A", number, at=shift, entity="?", auth=author, group="ATOM")
    return file


@pytest.mark.parametrize(
    ("numbers", "breaks", "codes"),
    [
        ((1, 2, 3, 4), (), "ALA ALA ALA ALA"),
        ((11, 12, 15, 16), (2,), "ALA ALA UNK UNK ALA ALA"),  # 13 and 14 are not modelled
        ((11, 12, 15, 16), (), "ALA ALA ALA ALA"),  # a jump over a bond is no gap
        ((11, 12, 13, 14), (2,), "ALA ALA ALA ALA"),  # a break that the numbers do not tell of
        ((14, 13, 9, 20), (2,), "ALA ALA ALA ALA"),  # numbers that do not count
        ((1, 2, 2_000_000_000, 2_000_000_001), (2,), "ALA ALA ALA ALA"),  # a slip that would fill the memory
        ((".", 12, 15, 16), (1,), "ALA ALA ALA ALA"),
    ],
)
def test_breaks_of_a_chain_without_a_sequence(tmp_path, numbers, breaks, codes):
    made = make(alanines(numbers, breaks).write(tmp_path))
    assert made.codes == codes.split()
    residues = made.tables["residues"]
    assert residues["label_seq_id"].tolist() == list(range(1, len(made.codes) + 1))
    assert residues["resolved"].astype(bool).tolist() == [code == "ALA" for code in made.codes]
    if "UNK" in codes:
        assert residues["auth_seq_id"].tolist() == list(range(11, 17))
        assert not residues["ins_code"].any()


@pytest.mark.parametrize(
    ("author", "kept"),
    [((11, 12, 13, 14), False), ((11, 12, 23, 24), True), ((14, 13, 12, 11), False)],
)
def test_a_jump_of_the_authors_numbers_is_no_ca_gap(tmp_path, author, kept):
    """Where only atoms tell of the sequence, neighbours in it may be far apart in the protein."""
    file = alanines((1, 2, 3, 4), (2,), gap=12.0, auth=author)
    file.add("HEM", "B", at=(0, 60, 0), entity="?")
    made = make(file.write(tmp_path), StructureOptions())
    assert made.labels == (["A", "B"] if kept else ["B"])
    assert made.attributes["filtered"].get("ca_gaps", 0) == (not kept)


def test_atoms_of_a_ligand_in_a_polymers_chain(tmp_path):
    """Some programs write ATOM for everything: what does not link into a polymer is a ligand all the same."""
    file = alanines((1, 2, 3, 4))
    file.add("HEM", "A", 5, at=(0, 60, 0), entity="?", group="ATOM")
    made = make(file.write(tmp_path))
    assert made.labels == ["A", "A.1"]
    assert made.tables["chains"]["mol_type"].tolist() == [MolType.PROTEIN, MolType.LIGAND]
    assert made.attributes["entities"][0]["sequence"] == "AAAA"


def test_residues_at_one_position_of_the_sequence(tmp_path):
    """Two residues that differ in the author's number alone: the first has the position."""
    file = CifFile().polymer("ALA SER ALA")
    # The file's order is not the sequence's.
    for seq, code, author in ((3, "ALA", 3), (2, "SER", 2), (2, "SER", 7), (1, "ALA", 1)):
        file.add(code, "A", seq, at=(9 * author, 0, 0), auth=author)
    made = make(file.write(tmp_path))
    assert made.codes == ["ALA", "SER", "ALA"]
    assert made.tables["residues"]["auth_seq_id"].tolist() == [1, 2, 3]
    assert made.attributes["filtered"]["repeated_atoms"] == 6
    place = definition("SER").ideal_pos[definition("SER").atom_index["CA"]] + (18, 0, 0)
    np.testing.assert_allclose(made.coords[made.atom(0, 2, "CA")], place, atol=1e-3)


def test_a_sequence_that_no_residue_fits_is_not_believed(tmp_path):
    """Numbers beyond its end: the residues with atoms are the chain."""
    file = CifFile().polymer("GLY GLY")
    for seq in (11, 12, 13):
        file.add("ALA", "A", seq, at=(4 * seq, 0, 0))
    made = make(file.write(tmp_path))
    assert made.codes == ["ALA"] * 3
    assert made.attributes["entities"][0]["sequence"] == "AAA"


def test_author_numbers_of_unresolved_residues_are_those_of_the_scheme(tmp_path):
    file = CifFile().polymer("GLY ALA SER ALA GLY")
    scheme = [("-1", "."), ("52", "."), ("52", "A"), ("?", "."), ("60", ".")]
    rows = [f"A {seq} {code} {number} {ins}" for seq, (code, (number, ins)) in enumerate(
        zip("GLY ALA SER ALA GLY".split(), scheme, strict=True), 1)]  # fmt: skip
    file.loop("_pdbx_poly_seq_scheme", "asym_id seq_id mon_id pdb_seq_num pdb_ins_code", *rows)
    file.add("ALA", "A", 2, auth=52)
    residues = make(file.write(tmp_path)).tables["residues"]
    assert residues["resolved"].tolist() == [0, 1, 0, 0, 0]
    assert residues["auth_seq_id"].tolist() == [-1, 52, 52, 4, 60]  # without a number, its position
    assert [chr(code or 32) for code in residues["ins_code"].tolist()] == [" ", " ", "A", " ", " "]
