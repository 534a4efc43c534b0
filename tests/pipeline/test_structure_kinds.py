"""Kinds of polymers and atoms that are rare but valid: D peptides, hybrids, rings, deuterium, odd bases."""

import numpy as np
import pytest

from megafold.pipeline.schema import RESTYPES, BondKind, MolType
from megafold.pipeline.structure import StructureOptions
from tests.pipeline.structure_files import PARTNERS, CifFile, definition, make


def chain(codes, kind, step=9):
    file = CifFile().polymer(codes, kind=kind)
    for seq, code in enumerate(codes.split(), 1):
        file.add(code, "A", seq, at=(step * seq, 0, 0))
    return file


def test_d_peptide_is_a_protein_of_single_atom_tokens(tmp_path):
    """Each residue of the class of its letter; its chirality is the definition's."""
    made = make(chain("DAL DLY GLY DTR", "'polypeptide(D)'").write(tmp_path))
    assert made.tables["chains"]["mol_type"].tolist() == [MolType.PROTEIN]
    assert made.attributes["entities"][0]["sequence"] == "AKGW"
    assert made.tables["residues"]["is_standard"].tolist() == [0, 0, 1, 0]
    tokens = made.tables["tokens"]
    heavy = [
        int((definition(code).heavy & ~definition(code).leaving).sum()) for code in ("DAL", "DLY", "DTR")
    ]
    assert np.bincount(tokens["residue"]).tolist() == [
        heavy[0],
        heavy[1],
        1,
        heavy[2] + 1,
    ]  # the last has its OXT
    assert {RESTYPES[index] for index in tokens["restype"][tokens["residue"] == 1]} == {"LYS"}


@pytest.mark.parametrize(
    ("codes", "mol_type", "letters", "classes"),
    [
        ("A U G DC DG", MolType.RNA, "AUGCG", {"A", "U", "G", "DC", "DG"}),
        ("DA DT DG C G", MolType.DNA, "ATGCG", {"DA", "DT", "DG", "C", "G"}),
        ("A U DG DC", MolType.DNA, "AUGC", {"A", "U", "DG", "DC"}),  # as many of each
    ],
)
def test_hybrids_are_what_most_of_their_residues_are(tmp_path, codes, mol_type, letters, classes):
    kind = "'polydeoxyribonucleotide/polyribonucleotide hybrid'"
    made = make(chain(codes, kind).write(tmp_path))
    assert made.tables["chains"]["mol_type"].tolist() == [mol_type]
    assert made.attributes["entities"][0]["sequence"] == letters
    assert {RESTYPES[index] for index in made.tables["tokens"]["restype"]} == classes
    assert (made.tables["residues"]["is_standard"] == 1).all()


def test_a_polymer_is_what_its_residues_are_whatever_the_file_calls_it(tmp_path):
    made = make(chain("A U G C", "polydeoxyribonucleotide").write(tmp_path))
    assert made.tables["chains"]["mol_type"].tolist() == [MolType.RNA]
    assert made.attributes["entities"][0]["sequence"] == "AUGC"
    assert any("calls it polydeoxyribonucleotide" in text for text in made.attributes["warnings"])
    half = make(chain("A GOL GOL U", "other").write(tmp_path, "half.cif"))
    assert half.tables["chains"]["mol_type"].tolist() == [MolType.RNA]
    # Where few residues are of any kind, the file's word stands: ligands that somebody linked.
    odd = make(chain("GOL GOL A GOL", "polyribonucleotide").write(tmp_path, "odd.cif"))
    assert odd.tables["chains"]["mol_type"].tolist() == [MolType.RNA]
    assert odd.attributes["entities"][0]["sequence"] == "NNAN"


def test_unknown_base_of_dna_is_the_unknown_class_of_dna(tmp_path):
    made = make(chain("DA N DC DN", "polydeoxyribonucleotide").write(tmp_path))
    classes = [RESTYPES[index] for index in made.tables["tokens"]["restype"]]
    assert classes == ["DA", "DN", "DC", "DN"]
    rna = make(chain("A N C", "polyribonucleotide").write(tmp_path, "rna.cif"))
    assert [RESTYPES[index] for index in rna.tables["tokens"]["restype"]] == ["A", "N", "C"]


def test_deuterium_is_hydrogen(tmp_path):
    """Perdeuterated neutron structures: D atoms and heavy water are counted and left."""
    file = CifFile().polymer("ALA GLY")
    file.add("ALA", "A", 1).add("GLY", "A", 2, at=(4, 0, 0))
    file.atom("DA", "ALA", "A", 1, (0, 1, 1), element=1)
    file.atom("D", "GLY", "A", 2, (4, 1, 1), element=1)
    file.atoms = [line.replace(" H ", " D ") for line in file.atoms]
    file.atom("O", "DOD", "W", ".", (0, 9, 0), element=8, entity="2", auth=301)
    file.atom("D1", "DOD", "W", ".", (0, 9, 1), element=1, entity="2", auth=301)
    made = make(file.write(tmp_path))
    assert made.attributes["filtered"] == {"hydrogens": 2, "waters": 1}
    assert made.tables["atoms"]["resolved"].sum() == 9
    assert made.labels == ["A"]


def test_deuterium_without_element_symbols(tmp_path):
    file = CifFile().polymer("ALA GLY")
    file.add("ALA", "A", 1).add("GLY", "A", 2, at=(4, 0, 0))
    file.atom("DB1", "ALA", "A", 1, (0, 1, 1), element=1)
    lines = [line.split() for line in file.atoms]
    file.atoms = [" ".join([*fields[:2], "?", *fields[3:]]) for fields in lines]
    made = make(file.write(tmp_path))
    assert made.attributes["filtered"] == {"hydrogens": 1}
    assert sorted(set(made.tables["atoms"]["element"].tolist())) == [6, 7, 8]


def ring(told):
    """A cyclic tetrapeptide: head and tail a bond apart."""
    file = CifFile().polymer("GLY ALA DAL ALA", kind="cyclic-pseudo-peptide")
    head, tail = definition("GLY"), definition("ALA")
    nitrogen = head.ideal_pos[head.atom_index["N"]]
    carbon = tail.ideal_pos[tail.atom_index["C"]]
    file.add("GLY", "A", 1).add("ALA", "A", 2, at=(0, 30, 0)).add("DAL", "A", 3, at=(0, 60, 0))
    file.add("ALA", "A", 4, at=nitrogen - carbon + (0, 0, -1.33), only=("N", "CA", "C", "O", "CB"))
    if told:
        items = (
            "id conn_type_id ptnr1_label_asym_id ptnr1_label_comp_id ptnr1_label_seq_id ptnr1_label_atom_id "
            "ptnr2_label_asym_id ptnr2_label_comp_id ptnr2_label_seq_id ptnr2_label_atom_id"
        )
        file.loop("_struct_conn", items, "1 covale A ALA 4 C A GLY 1 N")
    return file


@pytest.mark.parametrize("told", [True, False])
def test_rings_are_closed_once_and_lose_their_terminus(tmp_path, told):
    made = make(ring(told).write(tmp_path))
    assert made.bonds() == [("0:GLY.N", "0:ALA.C", BondKind.CYCLISATION)]
    assert "OXT" not in made.names(3)
    assert any("is a ring" in text for text in made.attributes["warnings"]) != told
    assert made.tables["chains"]["mol_type"].tolist() == [MolType.PROTEIN]


def test_metal_of_a_cluster_keeps_its_atoms(tmp_path):
    """Metal coordination costs nobody an atom: cysteine's SG and all of the cluster stay."""
    file = CifFile().polymer("GLY CYS GLY")
    for seq, code in ((1, "GLY"), (2, "CYS"), (3, "GLY")):
        file.add(code, "A", seq, at=(9 * seq, 0, 0))
    file.loop("_entity", "id type", "2 non-polymer")
    sulfur = definition("CYS").ideal_pos[definition("CYS").atom_index["SG"]] + (18, 0, 0)
    file.add("SF4", "B", at=sulfur + (0, 0, 2.3) - definition("SF4").ideal_pos[0], entity="2")
    file.loop("_struct_conn", PARTNERS, "1 metalc A CYS 2 2 SG B SF4 . 1 FE1")
    made = make(file.write(tmp_path))
    assert made.bonds() == [("0:CYS.SG", "1:SF4.FE1", BondKind.METAL)]
    assert len(made.names(3)) == 8
    assert "SG" in made.names(1)


def test_metal_coordination_costs_no_terminal_atom(tmp_path):
    """Vanadate at a histidine: its oxygens stay, though the file has no coordinates of them."""
    file = CifFile().polymer("GLY HIS GLY")
    for seq, code in ((1, "GLY"), (2, "HIS"), (3, "GLY")):
        file.add(code, "A", seq, at=(9 * seq, 0, 0))
    file.loop("_entity", "id type", "2 non-polymer")
    nitrogen = definition("HIS").ideal_pos[definition("HIS").atom_index["NE2"]] + (18, 0, 0)
    vanadate = definition("VO4")
    shift = nitrogen + (0, 0, 2.1) - vanadate.ideal_pos[vanadate.atom_index["V"]]
    file.atom(
        "V", "VO4", "B", ".", vanadate.ideal_pos[vanadate.atom_index["V"]] + shift, element=23, entity="2"
    )
    file.loop("_struct_conn", PARTNERS, "1 metalc A HIS 2 2 NE2 B VO4 . 1 V")
    made = make(file.write(tmp_path))
    assert made.bonds() == [("0:HIS.NE2", "1:VO4.V", BondKind.METAL)]
    assert made.names(3) == ["V", "O1", "O2", "O3", "O4"]


def test_residues_of_zero_occupancy_and_their_filters(tmp_path):
    """Zero occupancy is no reason to leave anything: the stream may weigh it."""
    file = CifFile().polymer("ALA ALA ALA ALA ALA")
    for seq in range(1, 6):
        file.add("ALA", "A", seq, at=(3.8 * seq, 0, 0), occ=0.0)
    made = make(file.write(tmp_path), StructureOptions())
    assert made.labels == ["A"]
    assert made.tables["residues"]["resolved"].tolist() == [1] * 5
