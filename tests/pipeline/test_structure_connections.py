"""Bonds between residues that files tell of in other ways than ``struct_conn``, and what geometry adds."""

from dataclasses import replace

import numpy as np
import pytest

from megafold.pipeline.schema import BondKind
from tests.pipeline.structure_files import NO_FILTERS, CifFile, definition, make

TOLD_ALONE = replace(NO_FILTERS, infer_bonds=False)


def at(code, name, place):
    """How far to move a residue's ideal coordinates so that one of its atoms lies at a place."""
    component = definition(code)
    return np.asarray(place) - component.ideal_pos[component.atom_index[name]]


def chromophore(before, after):
    """SER, the chromophore of GFP, VAL: a chromophore's linking atoms are called N1 and C3."""
    file = CifFile().polymer("SER CRO VAL")
    shift = at("CRO", "N1", (0, 0, 0))
    tail = definition("CRO").ideal_pos[definition("CRO").atom_index["C3"]] + shift
    out = tail / np.linalg.norm(tail)
    file.add("SER", "A", 1, at=at("SER", "C", -out * before), only=("CA", "C"))
    file.add("CRO", "A", 2, at=shift, only=set(definition("CRO").atom_names) - {"OXT"})
    file.add("VAL", "A", 3, at=at("VAL", "N", tail + out * after), only=("N",))
    return file


@pytest.mark.parametrize(
    ("before", "after", "wanted"),
    [
        (1.33, 1.33, ["SER.C CRO.N1", "CRO.C3 VAL.N"]),
        (1.33, 2.2, ["SER.C CRO.N1"]),
        (2.2, 1.33, ["CRO.C3 VAL.N"]),
    ],
)
def test_neighbours_whose_linking_atoms_have_other_names(tmp_path, before, after, wanted):
    made = make(chromophore(before, after).write(tmp_path), TOLD_ALONE)
    pairs = [" ".join(end.removeprefix("0:") for end in bond[:2]) for bond in made.bonds()]
    assert pairs == wanted
    assert set(made.tables["bonds"]["kind"].tolist()) == {BondKind.COVALENT}
    assert set(made.tables["bonds"]["order"].tolist()) == {0}
    assert made.attributes["changed"] == {}


def test_a_row_between_neighbours_is_not_doubled_by_a_closer_contact(tmp_path):
    """The row's bond is 1.45 Å long, and other atoms of the two residues are 1.33 Å apart."""
    file = chromophore(1.33, 2.2)
    ca = definition("CRO").ideal_pos[definition("CRO").atom_index["CA1"]] + at("CRO", "N1", (0, 0, 0))
    file.atom("OG", "SER", "A", 1, ca + 1.45 * ca / np.linalg.norm(ca), element=8)
    items = (
        "id conn_type_id ptnr1_label_asym_id ptnr1_label_comp_id ptnr1_label_seq_id ptnr1_label_atom_id "
        "ptnr2_label_asym_id ptnr2_label_comp_id ptnr2_label_seq_id ptnr2_label_atom_id"
    )
    file.loop("_struct_conn", items, "1 covale A SER 1 OG A CRO 2 CA1")
    made = make(file.write(tmp_path), TOLD_ALONE)
    assert made.bonds() == [("0:SER.OG", "0:CRO.CA1", BondKind.COVALENT)]
    assert made.tables["bonds"]["order"].tolist() == [0]  # the row does not say


def test_links_of_a_glycan_and_their_orders(tmp_path):
    """Numbers of ``pdbx_branch_scheme``; an order that the file does not say is 0."""
    file = CifFile().loop("_entity", "id type", "1 branched")
    for number in range(3):
        file.add("NAG", "A", at=(9 * number, 0, 0), auth=11 - number)
    scheme = [f"A {11 - number} {number + 1}" for number in range(3)]
    file.loop("_pdbx_branch_scheme", "asym_id pdb_seq_num num", *scheme)
    items = "entity_id entity_branch_list_num_1 atom_id_1 entity_branch_list_num_2 atom_id_2 value_order"
    file.loop("_pdbx_entity_branch_link", items, "1 2 C1 1 O4 sing", "1 3 C1 2 O4 ?", "1 9 C1 3 O4 sing")
    made = make(file.write(tmp_path), TOLD_ALONE)
    assert made.tables["residues"]["auth_seq_id"].tolist() == [11, 10, 9]
    assert made.tables["chains"]["is_branched"].tolist() == [1]
    assert made.bonds() == [("0:NAG.O4", "0:NAG.C1", BondKind.GLYCOSIDIC)] * 2
    assert made.tables["bonds"]["order"].tolist() == [1, 0]
    residues = made.atom_residue[[made.tables["bonds"]["atom_i"], made.tables["bonds"]["atom_j"]]]
    assert residues.T.tolist() == [[0, 1], [1, 2]]
    # The anomeric oxygen of the first sugar is there, those of the others have left.
    assert ["O1" in made.names(residue) for residue in range(3)] == [True, False, False]


ALTERNATES = (
    "id conn_type_id ptnr1_label_asym_id ptnr1_label_comp_id ptnr1_label_seq_id ptnr1_auth_seq_id "
    "ptnr1_label_atom_id pdbx_ptnr1_label_alt_id ptnr2_label_asym_id ptnr2_label_comp_id ptnr2_label_seq_id "
    "ptnr2_auth_seq_id ptnr2_label_atom_id pdbx_dist_value"
)


@pytest.mark.parametrize(
    ("letter", "other_at", "distance", "bonded"),
    [
        ("A", 9.0, "1.33", True),  # the alternate that is taken
        ("A", 9.0, "9.99", True),  # its distance is not asked for
        ("B", 0.0, "1.33", True),  # the other one, of which the atom is at the same place
        ("B", 9.0, "1.33", True),  # the atoms taken are as far apart as the row says
        ("B", 9.0, "1.90", False),
        ("B", 9.0, "?", True),  # a usual bond
    ],
)
def test_rows_about_alternates(tmp_path, letter, other_at, distance, bonded):
    file = CifFile().polymer("GLY LYS GLY")
    file.add("LYS", "A", 2, at=at("LYS", "NZ", (0, 0, 0)), skip=("NZ",))
    for alt, occupancy, x in (("A", 0.6, 0.0), ("B", 0.4, other_at)):
        file.atom("NZ", "LYS", "A", 2, (x, 0, 0), element=7, alt=alt, occ=occupancy)
    file.loop("_entity", "id type", "2 non-polymer")
    file.add("RET", "B", at=at("RET", "C15", (1.33, 0, 0)), entity="2", auth=201)
    row = f"1 covale A LYS 2 2 NZ {letter} B RET . 201 C15 {distance}"
    made = make(file.loop("_struct_conn", ALTERNATES, row).write(tmp_path), TOLD_ALONE)
    assert made.bonds() == ([("0:LYS.NZ", "1:RET.C15", BondKind.COVALENT)] if bonded else [])
    assert not any("not there" in text for text in made.attributes["warnings"])


@pytest.mark.parametrize(
    "row",
    [
        "1 covale A LYS 2 2 NZ ? B RET . 202 C15 1.33",  # no such residue
        "1 covale A LYS 2 2 NX ? B RET . 201 C15 1.33",  # no such atom
        "1 covale A ARG 2 2 NZ ? B RET . 201 C15 1.33",  # another component
        "1 covale A LYS 2 2 NZ ? B RET . ? C15 1.33",
    ],
)
def test_rows_about_what_is_not_there(tmp_path, row):
    file = CifFile().polymer("GLY LYS GLY").add("LYS", "A", 2, at=at("LYS", "NZ", (0, 0, 0)))
    file.loop("_entity", "id type", "2 non-polymer")
    file.add("RET", "B", at=at("RET", "C15", (1.33, 0, 0)), entity="2", auth=201)
    made = make(file.loop("_struct_conn", ALTERNATES, row).write(tmp_path), TOLD_ALONE)
    assert made.bonds() == []
    assert "1 struct_conn rows name atoms that are not there" in made.attributes["warnings"]


@pytest.mark.parametrize("row", ["A CYS 2 ? SG ? A CYS 4 ? SG 2.05", "A CYS . 12 SG ? A CYS . 14 SG 2.05"])
def test_partners_by_either_numbering(tmp_path, row):
    """Positions 2 and 4 are the author's 12 and 14, and the author's 2 and 4 are at 12 and 14."""
    codes = ["GLY"] * 14
    file = CifFile()
    for seq, author in ((2, 12), (4, 14), (12, 2), (14, 4)):
        codes[seq - 1] = "CYS"
        file.add(
            "CYS", "A", seq, at=at("CYS", "SG", (2.05 * (seq == 4), 9.0 * (seq > 4) * seq, 0)), auth=author
        )
    file.polymer(" ".join(codes)).loop("_struct_conn", ALTERNATES, f"1 disulf {row}")
    made = make(file.write(tmp_path), TOLD_ALONE)
    assert made.bonds() == [("0:CYS.SG", "0:CYS.SG", BondKind.DISULFIDE)]
    ends = [made.tables["bonds"][name][0] for name in ("atom_i", "atom_j")]
    assert made.tables["residues"]["label_seq_id"][made.atom_residue[ends]].tolist() == [2, 4]


def test_metal_coordination_without_a_metal_is_no_bond(tmp_path):
    file = CifFile().polymer("GLY LYS GLY").add("LYS", "A", 2, at=at("LYS", "NZ", (0, 0, 0)))
    file.loop("_entity", "id type", "2 non-polymer")
    file.add("RET", "B", at=at("RET", "C15", (2.5, 0, 0)), entity="2", auth=201)
    row = "1 metalc A LYS 2 2 NZ ? B RET . 201 C15 2.50"
    made = make(file.loop("_struct_conn", ALTERNATES, row).write(tmp_path), TOLD_ALONE)
    assert made.bonds() == []
    assert "1 struct_conn rows of metal coordination have no metal: no bonds" in made.attributes["warnings"]
