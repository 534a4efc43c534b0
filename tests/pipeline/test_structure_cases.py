"""Inputs that broke others, each with the right value."""

import gzip
import shutil
from dataclasses import replace

import gemmi
import numpy as np
import pytest

from megafold.pipeline.errors import StructureError
from megafold.pipeline.schema import AMINO_ACIDS, BondKind, MolType
from megafold.pipeline.structure import StructureOptions
from tests.pipeline.structure_files import NO_FILTERS, TWO_FOLD, CifFile, definition, make, write_binary

PARTNERS = (
    "id conn_type_id ptnr1_label_asym_id ptnr1_label_comp_id ptnr1_label_seq_id ptnr1_auth_asym_id "
    "ptnr1_auth_seq_id ptnr1_label_atom_id ptnr1_symmetry ptnr2_label_asym_id ptnr2_label_comp_id "
    "ptnr2_label_seq_id ptnr2_auth_asym_id ptnr2_auth_seq_id ptnr2_label_atom_id ptnr2_symmetry "
    "pdbx_dist_value"
)


def schiff_base(second_symmetry="1_555"):
    """LYS of a tripeptide with retinal at its NZ, and a two-fold axis."""
    file = CifFile().polymer("GLY LYS GLY")
    file.add("GLY", "A", 1, at=(20, 0, 0)).add("LYS", "A", 2, at=(24, 0, 0)).add("GLY", "A", 3, at=(28, 0, 0))
    file.loop("_entity", "id type", "2 non-polymer")
    retinal = definition("RET")
    nz = definition("LYS").ideal_pos[definition("LYS").atom_index["NZ"]] + (24, 0, 0)
    c15 = retinal.ideal_pos[retinal.atom_index["C15"]]
    file.add("RET", "B", at=nz - c15 + (1.3, 0, 0), entity="2", auth=201, auth_asym="A")
    file.loop(
        "_struct_conn", PARTNERS, f"1 covale A LYS 2 A 2 NZ 1_555 B RET . A 201 C15 {second_symmetry} 1.30"
    )
    file.loop("_pdbx_struct_assembly_gen", "assembly_id oper_expression asym_id_list", "1 1,2 A,B")
    file.loop(*TWO_FOLD)
    return file


def test_covalent_bond_in_every_copy(tmp_path):
    made = make(schiff_base().write(tmp_path))
    assert made.labels == ["A", "B", "A", "B"]
    assert made.attributes["chains"]["operator"] == ["1", "1", "2", "2"]
    assert made.bonds() == [
        ("0:LYS.NZ", "1:RET.C15", BondKind.COVALENT),
        ("2:LYS.NZ", "3:RET.C15", BondKind.COVALENT),
    ]
    table = made.tables["bonds"]
    lengths = np.linalg.norm(made.coords[table["atom_i"]] - made.coords[table["atom_j"]], axis=1)
    assert lengths == pytest.approx([1.3, 1.3], abs=2e-3)


def test_bond_across_symmetry_joins_the_copies_that_are_a_bond_apart(tmp_path):
    file = CifFile().polymer("GLY CYS GLY")
    sulfur = definition("CYS").ideal_pos[definition("CYS").atom_index["SG"]]
    # The two-fold axis is z: SG at x = 1.02 makes a disulfide of 2.04 Å with its mate at x = -1.02.
    file.add("CYS", "A", 2, at=np.array([1.02, 0, 0]) - sulfur)
    file.add("GLY", "A", 1, at=(9, 9, 0)).add("GLY", "A", 3, at=(9, 14, 0))
    file.loop("_struct_conn", PARTNERS, "1 disulf A CYS 2 A 2 SG 1_555 A CYS 2 A 2 SG 2_555 2.04")
    file.loop("_pdbx_struct_assembly_gen", "assembly_id oper_expression asym_id_list", "1 1,2 A", "2 1 A")
    file.loop(*TWO_FOLD)
    path = file.write(tmp_path)
    assert make(path).bonds() == [("0:CYS.SG", "1:CYS.SG", BondKind.DISULFIDE)]
    alone = make(path, replace(NO_FILTERS, assembly="2"))
    assert alone.bonds() == []
    assert alone.attributes["filtered"]["bonds_out_of_assembly"] == 1


@pytest.mark.parametrize(
    ("told", "x", "bonded"),
    [
        ("2.04", 1.02, True),
        ("2.30", 1.02, True),  # the file's coordinates are rounded, its distance is of others
        ("2.40", 1.02, False),
        ("?", 1.02, True),
        ("?", 1.35, False),  # 2.7 Å is no bond
        ("0.02", 0.01, False),  # the atom itself, on the axis
    ],
)
def test_what_tells_the_copies_of_a_bond_across_symmetry(tmp_path, told, x, bonded):
    file = CifFile().polymer("GLY CYS GLY")
    sulfur = definition("CYS").ideal_pos[definition("CYS").atom_index["SG"]]
    file.add("CYS", "A", 2, at=np.array([x, 0, 0]) - sulfur)
    file.add("GLY", "A", 1, at=(9, 9, 0)).add("GLY", "A", 3, at=(9, 14, 0))
    file.loop("_struct_conn", PARTNERS, f"1 disulf A CYS 2 A 2 SG 1_555 A CYS 2 A 2 SG 2_555 {told}")
    file.loop("_pdbx_struct_assembly_gen", "assembly_id oper_expression asym_id_list", "1 1,2 A")
    made = make(file.loop(*TWO_FOLD).write(tmp_path))
    assert made.bonds() == ([("0:CYS.SG", "1:CYS.SG", BondKind.DISULFIDE)] if bonded else [])
    assert made.attributes["filtered"].get("bonds_out_of_assembly", 0) == (not bonded)


@pytest.mark.corpus
@pytest.mark.parametrize(
    ("path", "entry", "chains"),
    [
        ("structures/209d-assembly1.cif.gz", "209d-assembly1", 3),
        ("structures/721p-assembly1.cif.gz", "721p-assembly1", 6),
        ("more/variants/1fez-assembly1.cif.gz", "1fez-assembly1", 5),
        ("more/variants/6nxr-assembly1.cif.gz", "6nxr-assembly1", 6),
        ("more/variants/7lv2-assembly1.cif.gz", "7lv2-assembly1", 16),
        ("more/variants/2hiu-assembly1.cif.gz", "2hiu-assembly1", 2),
    ],
)
def test_cases_3_and_30_files_that_are_expanded_already(corpus_dir, path, entry, chains):
    made = make(corpus_dir / path)
    assert made.attributes["entry"] == entry
    assert made.attributes["assembly"] == "asym"
    assert set(made.attributes["chains"]["operator"]) == {""}
    assert len(made.labels) == len(set(made.labels)) == chains
    # Nothing is built twice: no two atoms at one place.
    coords = made.coords[np.isfinite(made.coords[:, 0])]
    assert len(np.unique(coords, axis=0)) == len(coords)
    assert any("taken as they are" in text for text in made.attributes["warnings"])


@pytest.mark.corpus
def test_copies_keep_their_names(corpus_dir):
    made = make(corpus_dir / "more/variants/7lv2-assembly1.cif.gz")
    assert {"A", "A-2"} <= set(made.labels)
    assert made.tables["chains"]["sym_id"].tolist() == list(range(1, 17))
    assert set(made.tables["chains"]["entity_id"]) == {1}


@pytest.mark.parametrize("label", [("B", "C"), ("X", "X")])
def test_ligands_with_one_number_are_not_fused(tmp_path, label):
    file = CifFile().polymer("GLY GLY")
    file.add("GLY", "A", 1).add("GLY", "A", 2, at=(4, 0, 0))
    file.loop("_entity", "id type", "2 non-polymer")
    # Same author number in chains C and D; in the second case also one label_asym_id, and an insertion code.
    same = label[0] == label[1]
    file.add("HEM", label[0], at=(30, 0, 0), entity="2", auth=201, auth_asym="C")
    file.add("HEM", label[1], at=(60, 0, 0), entity="2", auth=201, auth_asym="D", ins="A" if same else "?")
    made = make(file.write(tmp_path))
    assert made.codes == ["GLY", "GLY", "HEM", "HEM"]
    assert made.tables["chains"]["atom_count"].tolist()[1:] == [43, 43]
    assert made.tables["residues"]["auth_seq_id"].tolist()[2:] == [201, 201]
    assert len(set(made.labels)) == 3
    assert made.coords[made.atom(2, 1, "FE"), 0] - made.coords[made.atom(1, 1, "FE"), 0] == pytest.approx(30)


def test_a_residue_whose_atoms_are_in_two_places_of_the_file_is_one(tmp_path):
    """Programs that add side chains write them at the end."""
    file = CifFile().polymer("SER GLY")
    file.add("SER", "A", 1, only=("N", "CA", "C", "O")).add("GLY", "A", 2, at=(4, 0, 0))
    file.add("SER", "A", 1, only=("CB", "OG"))
    made = make(file.write(tmp_path))
    assert made.codes == ["SER", "GLY"]
    assert made.tables["atoms"]["resolved"].tolist() == [1] * 10 + [0]  # all but the last OXT
    assert made.attributes["filtered"] == {}


def test_residues_without_insertion_codes_are_not_fused(tmp_path):
    file = CifFile()  # no entity, no label_seq_id that counts: 5, 5 (was 5A), 6
    for number, x in ((5, 0), (5, 4), (6, 8)):
        file.add("GLY", "A", number, at=(x, 0, 0), entity="?")
    made = make(file.write(tmp_path))
    assert made.codes == ["GLY", "GLY", "GLY"]
    assert made.tables["residues"]["label_seq_id"].tolist() == [1, 2, 3]


def test_author_numbers_are_no_positions(tmp_path):
    file = CifFile().polymer("MET GLY ALA SER")
    file.add("ALA", "A", 3, auth=11).add("SER", "A", 4, auth=12, at=(4, 0, 0))
    made = make(file.write(tmp_path))
    assert made.tables["residues"]["label_seq_id"].tolist() == [1, 2, 3, 4]
    assert made.tables["residues"]["resolved"].tolist() == [0, 0, 1, 1]
    assert made.tables["residues"]["auth_seq_id"].tolist()[2:] == [11, 12]
    bare = CifFile()
    bare.add("ALA", "A", 11, entity="?").add("SER", "A", 12, entity="?", at=(4, 0, 0))
    made = make(bare.write(tmp_path, "bare.cif"))
    assert made.tables["residues"]["label_seq_id"].tolist() == [1, 2]
    assert made.attributes["entities"][0]["sequence"] == "AS"


def test_modified_residues_are_one_token_an_atom(tmp_path):
    file = CifFile().polymer("MSE SEP GLY")
    for seq, code in enumerate(("MSE", "SEP", "GLY"), 1):
        file.add(code, "A", seq, at=(6 * seq, 0, 0), group="HETATM")
    made = make(file.write(tmp_path), replace(NO_FILTERS, convert_selenomethionine=False))
    tokens = made.tables["tokens"]
    # MSE 8 and SEP 10 heavy atoms without OXT; GLY has its OXT, being last.
    assert np.bincount(tokens["residue"]).tolist() == [8, 10, 1]
    assert tokens["atom_count"].tolist() == [1] * 18 + [5]
    assert made.attributes["entities"][0]["sequence"] == "MSG"


def test_leaving_atom_is_gone_in_the_bonded_copy_only(tmp_path):
    bonded = make(schiff_base().write(tmp_path))
    assert bonded.codes[3] == "RET"
    assert "O1" not in bonded.names(3)
    assert len(bonded.names(3)) == 20
    file = CifFile()
    component = definition("RET")
    for name, element, pos in zip(component.atom_names, component.elements, component.ideal_pos, strict=True):
        if element != 1:
            file.atom(name, "RET", "A", ".", pos, element=int(element))
    free = make(file.write(tmp_path, "free.cif"))
    assert "O1" in free.names(0)
    assert np.isfinite(free.coords).all()


@pytest.mark.corpus
def test_rhodopsin(corpus_dir):
    made = make(corpus_dir / "more/structures/1u19.cif.gz")
    residue = made.codes.index("RET")
    assert "O1" not in made.names(residue)
    assert sum("RET.C15" in bond[1] and "LYS.NZ" in bond[0] for bond in made.bonds()) == 1


def test_unknown_component_without_bonds(tmp_path):
    file = CifFile().polymer("GLY GLY")
    file.add("GLY", "A", 1).add("GLY", "A", 2, at=(4, 0, 0))
    for index in range(3):
        file.atom(f"C{index}", "~QS", "B", ".", (9 + 1.5 * index, 0, 0), entity="2")
    with pytest.raises(StructureError, match=r"entry test, chain B: component ~QS") as error:
        make(file.write(tmp_path))
    assert error.value.reason == "unknown-component"


def test_unknown_component_with_bonds_in_the_file(tmp_path):
    file = CifFile()
    for index in range(3):
        file.atom(f"C{index}", "~QS", "B", ".", (1.5 * index, 0, 0))
    file.loop(
        "_chem_comp_bond", "comp_id atom_id_1 atom_id_2 value_order", "~QS C0 C1 sing", "~QS C1 C2 doub"
    )
    made = make(file.write(tmp_path))
    (own,) = made.own
    assert made.attributes["components"] == [own.key]
    assert own.key.startswith("~~QS:")
    assert own.atom_names == ("C0", "C1", "C2")
    assert own.bonds.tolist() == [[0, 1], [1, 2]]
    assert own.bond_orders.tolist() == [1, 2]
    assert made.attributes["component_digests"] == [own.digest]


def test_the_file_wins_over_the_dictionary_namesake(tmp_path):
    file = CifFile()
    rows = []
    for index in range(40):
        file.atom(f"C{index}", "LIG", "A", ".", (1.5 * index, 0, 0))
        rows.append(f"LIG C{index} C{index + 1} sing")
    file.loop("_chem_comp_bond", "comp_id atom_id_1 atom_id_2 value_order", *rows[:-1])
    made = make(file.write(tmp_path))
    assert made.tables["chains"]["atom_count"].tolist() == [40]
    assert made.tables["atoms"]["resolved"].all()
    assert [component.code for component in made.own] == ["LIG"]
    assert any("LIG" in text and "namesake" in text for text in made.attributes["warnings"])


def test_standard_residues_are_the_dictionarys_whatever_the_file_defines(tmp_path):
    file = CifFile().polymer("ALA ALA").add("ALA", "A", 1).add("ALA", "A", 2, at=(4, 0, 0))
    bonds = "ALA N CA sing", "ALA CA CB sing", "ALA CB C sing", "ALA C O doub"
    file.loop("_chem_comp_bond", "comp_id atom_id_1 atom_id_2 value_order", *bonds)
    made = make(file.write(tmp_path))
    assert made.own == ()
    assert made.attributes["components"] == ["ALA"]
    assert made.tables["tokens"]["atom_count"].tolist() == [5, 6]


def test_a_definition_that_contradicts_itself_is_left_to_the_dictionary(tmp_path):
    """Its bonds name an atom that is not there: the dictionary's glycerol is used, and no atom is lost."""
    file = CifFile().add("GOL", "A")
    file.loop("_chem_comp_atom", "comp_id atom_id type_symbol", "GOL C1 C", "GOL C2 C", "GOL O1 O")
    bonds = "GOL C1 C2 sing", "GOL C2 O9 sing"
    file.loop("_chem_comp_bond", "comp_id atom_id_1 atom_id_2 value_order", *bonds)
    made = make(file.write(tmp_path))
    assert made.attributes["components"] == ["GOL"]
    assert made.tables["atoms"]["resolved"].tolist() == [1] * 6
    assert any(
        "own definition of component GOL cannot be used" in text for text in made.attributes["warnings"]
    )


def test_atoms_of_the_first_block_that_has_any(tmp_path):
    path = CifFile().add("GOL", "A").write(tmp_path)
    second = (
        CifFile().add("HEM", "A").write(tmp_path, "second.cif").read_text().replace("data_TEST", "data_TWO")
    )
    path.write_text("data_NOTES\n_entry.id x\n" + path.read_text() + second)
    made = make(path)
    assert made.codes == ["GOL"]
    assert "2 data blocks have atoms; only the first is used" in made.attributes["warnings"]


@pytest.mark.corpus
def test_names_of_another_dictionary_are_matched_by_bonds(corpus_dir):
    path = corpus_dir / "structures/1gbt.cif.gz"
    made = make(path)
    residue = made.codes.index("GBS")
    atoms = np.flatnonzero(made.atom_residue == residue)
    theirs = gemmi.read_structure(str(path))[0]
    ligand = next(r for chain in theirs for r in chain if r.name == "GBS")
    assert made.tables["atoms"]["resolved"][atoms].all()
    by_pos = {tuple(np.round(a.pos.tolist(), 3)): a.element.atomic_number for a in ligand}
    ours = dict(zip(map(tuple, np.round(made.coords[atoms].astype(float), 3)), atoms, strict=True))
    elements = made.tables["atoms"]["element"]
    assert {pos: elements[atom] for pos, atom in ours.items()} == by_pos
    # Every bond of the definition is a bond's length long.
    component = definition("GBS")
    place = dict(zip(made.tables["atoms"]["component_atom"][atoms], atoms, strict=True))
    for i, j in component.bonds.tolist():
        if i in place and j in place:
            assert np.linalg.norm(made.coords[place[i]] - made.coords[place[j]]) < 1.65


@pytest.mark.parametrize(
    ("category", "items", "rows", "date"),
    [
        (
            "_pdbx_audit_revision_history",
            "ordinal revision_date",
            ("2 2011-07-13", "1 1995-02-07"),
            "1995-02-07",
        ),
        (
            "_database_PDB_rev",
            "num date date_original",
            ("1 1985-01-02 1984-06-11", "2 2003-04-01 ?"),
            "1985-01-02",
        ),
        ("_database_PDB_rev", "num date date_original", ("1 ? 1984-06-11",), None),
    ],
)
def test_release_dates(tmp_path, category, items, rows, date):
    file = CifFile().add("HEM", "A").loop(category, items, *rows)
    made = make(file.write(tmp_path))
    assert made.attributes["release_date"] == date
    assert made.attributes["deposition_date"] == ("1984-06-11" if "original" in items else None)


@pytest.mark.corpus
@pytest.mark.parametrize(("entry", "date"), [("4hhb", "1984-07-17"), ("1u19", "2004-10-12"), ("1ad5", None)])
def test_legacy_entries(corpus_dir, entry, date):
    assert make(corpus_dir / f"more/structures/{entry}.cif.gz").attributes["release_date"] == date


@pytest.mark.corpus
def test_ring_without_a_row(corpus_dir):
    made = make(corpus_dir / "more/structures/1sfi.cif.gz")
    rings = [bond for bond in made.bonds() if bond[2] == BondKind.CYCLISATION]
    assert rings == [("1:GLY.N", "1:ASP.C", BondKind.CYCLISATION)]
    assert any("ring" in text for text in made.attributes["warnings"])
    assert "OXT" not in made.names(int(made.tables["chains"]["first_residue"][1]) + 13)


@pytest.mark.corpus
@pytest.mark.parametrize("path", ["more/structures/1ema.cif.gz", "structures/3kcs.cif.gz"])
def test_one_residue_for_three_letters(corpus_dir, path):
    made = make(corpus_dir / path)
    entity = made.attributes["entities"][0]
    codes = made.codes[: len(entity["components"])]
    chromophore = next(i for i, code in enumerate(codes) if code not in (*AMINO_ACIDS, "MSE"))
    assert len(entity["sequence"]) == len(codes)
    assert entity["sequence"][chromophore] == "X"
    block = gemmi.cif.read(str(corpus_dir / path))[0]
    wanted = [str(code) for code in block.find_values("_entity_poly_seq.mon_id")]
    assert codes == ["MET" if code == "MSE" else code for code in wanted]


@pytest.mark.corpus
@pytest.mark.parametrize("entry", ["3vfj", "1dsr"])
def test_all_cross_links(corpus_dir, entry):
    """Every covalent row that is no bond between neighbours in a chain is a bond of the object."""
    path = corpus_dir / f"more/structures/{entry}.cif.gz"
    structure = gemmi.read_structure(str(path))
    structure.setup_entities()
    wanted = set()
    for link in structure.connections:
        if link.type not in (gemmi.ConnectionType.Covale, gemmi.ConnectionType.Disulf):
            continue
        a, b = (structure[0].find_cra(partner) for partner in (link.partner1, link.partner2))
        if a.atom is None or b.atom is None or "HOH" in (a.residue.name, b.residue.name):
            continue
        numbers = sorted(residue.label_seq or 0 for residue in (a.residue, b.residue))
        same_chain = a.residue.subchain == b.residue.subchain
        if not (same_chain and numbers[1] - numbers[0] == 1 and {a.atom.name, b.atom.name} == {"C", "N"}):
            wanted.add(frozenset(tuple(np.round(atom.pos.tolist(), 3)) for atom in (a.atom, b.atom)))
    made = make(path)
    table = made.tables["bonds"]
    found = {
        frozenset(tuple(np.round(made.coords[atom].astype(float), 3)) for atom in pair)
        for pair in zip(table["atom_i"], table["atom_j"], strict=True)
    }
    assert len(wanted) >= 3
    assert wanted <= found


@pytest.mark.corpus
def test_no_polymer_at_all(corpus_dir):
    made = make(corpus_dir / "more/structures/3hya.cif.gz", StructureOptions())
    chains = made.tables["chains"]
    assert set(chains["mol_type"]) == {MolType.LIGAND}
    block = gemmi.cif.read(str(corpus_dir / "more/structures/3hya.cif.gz"))[0]
    types = {row[0]: row[1] for row in block.find("_entity.", ["id", "type"])}
    kinds = [types[row[1]] for row in block.find("_struct_asym.", ["id", "entity_id"])]
    assert chains["is_branched"].tolist() == [kind == "branched" for kind in kinds if kind != "water"]
    assert {entity["sequence"] for entity in made.attributes["entities"]} == {""}
    kinds = made.tables["bonds"]["kind"].tolist()
    assert kinds.count(BondKind.GLYCOSIDIC) == sum(
        count - 1
        for count, branched in zip(chains["residue_count"], chains["is_branched"], strict=True)
        if branched
    )


def test_odd_but_valid_values(tmp_path):
    """Chain ids of several letters, negative numbers, zero occupancy."""
    file = CifFile().polymer("GLY ALA")
    file.add("GLY", "AAAb", 1, auth=-3, auth_asym="heavy", occ=0.0)
    file.add("ALA", "AAAb", 2, auth=-2, auth_asym="heavy", at=(4, 0, 0), occ=0.0)
    made = make(file.write(tmp_path))
    assert made.labels == ["AAAb"]
    assert made.attributes["chains"]["auth_asym_id"] == ["heavy"]
    assert made.tables["residues"]["auth_seq_id"].tolist() == [-3, -2]
    resolved = np.isfinite(made.coords[:, 0])
    assert resolved.sum() == 9
    assert (made.occupancy[resolved] == 0).all()


def test_unknown_chain_is_counted(tmp_path):
    file = CifFile().polymer("UNK UNK UNK UNK").polymer("ALA ALA ALA ALA", entity="2")
    for seq in range(1, 5):
        file.add("UNK", "A", seq, at=(4 * seq, 0, 0)).add("ALA", "B", seq, at=(4 * seq, 30, 0), entity="2")
    path = file.write(tmp_path)
    made = make(path, StructureOptions())
    assert made.labels == ["B"]
    assert made.attributes["filtered"]["unknown_polymer_chains"] == 1
    kept = make(path, NO_FILTERS)
    assert kept.labels == ["A", "B"]
    # UNK is one token, of its own class.
    assert kept.tables["tokens"]["restype"].tolist() == [20] * 4 + [0] * 4


def test_files_that_cannot_be_read(tmp_path):
    absent = tmp_path / "1abc.cif"
    with pytest.raises(StructureError, match=r"1abc\.cif") as error:
        make(absent)
    assert error.value.reason == "unreadable-file"
    absent.write_text("data_x\nloop_\n_a.b\n_a.c\n1 2 3\n")
    with pytest.raises(StructureError) as error:
        make(absent)
    assert error.value.reason == "invalid-cif"
    absent.write_text("data_x\n_entry.id x\n")
    with pytest.raises(StructureError) as error:
        make(absent)
    assert error.value.reason == "no-atoms"


@pytest.mark.parametrize(("good", "bad"), [("10.00", "abc"), ("10.00", "1e400"), (" 1 ?", " one ?")])
def test_values_that_are_no_numbers(tmp_path, good, bad):
    path = CifFile().polymer("GLY").add("GLY", "A", 1).write(tmp_path)
    path.write_text(path.read_text().replace(good, bad, 1))
    with pytest.raises(StructureError, match=r"test\.cif") as error:
        make(path)
    assert error.value.reason == "invalid-value"


def test_coordinates_that_no_atom_can_have(tmp_path):
    far = CifFile().polymer("GLY").add("GLY", "A", 1, at=(1e30, 0, 0)).write(tmp_path)
    with pytest.raises(StructureError, match=r"test\.cif.*1e\+30 Å") as error:
        make(far)
    assert error.value.reason == "invalid-value"


@pytest.mark.corpus
def test_cut_gzip_file(corpus_dir, tmp_path):
    path = tmp_path / "1crn.cif.gz"
    shutil.copy(corpus_dir / "structures/1crn.cif.gz", path)
    data = path.read_bytes()
    path.chmod(0o644)
    path.write_bytes(data[: len(data) // 2])
    with pytest.raises(StructureError):
        make(path)
    path.write_bytes(gzip.compress(b"data_"))
    with pytest.raises(StructureError):
        make(path)


def test_damaged_gzip_file_that_gives_a_valid_text(tmp_path):
    """A flipped bit may make the text longer: its end is cut off, and only the check sum tells."""
    file = CifFile().polymer("GLY " * 2000)
    for position in range(1, 2001):
        file.add("GLY", "A", position, at=(3.8 * position, 0, 0))
    text = file.write(tmp_path).read_bytes()
    shorter = b"".join(text.splitlines(keepends=True)[:-40])
    path = tmp_path / "1abc.cif.gz"
    path.write_bytes(gzip.compress(text)[:-8] + gzip.compress(shorter)[-8:])
    with pytest.raises(StructureError) as error:
        make(path)
    assert error.value.reason == "invalid-cif"


@pytest.mark.parametrize(
    ("name", "data", "reason"),
    [
        ("1abc.cif.gz", b"", "no-atoms"),
        ("1abc.cif.gz", b"\x1f", "invalid-cif"),
        ("1abc.cif.gz", b"\x1f\x8b\x08", "invalid-cif"),
        ("1abc.cif.gz", gzip.compress(b"data_x" * 99)[:10] + b"\xff" * 20, "invalid-cif"),
        ("1abc.bcif.gz", gzip.compress(b"data_x" * 99)[:10] + b"\xff" * 20, "invalid-cif"),
    ],
)
def test_remains_of_a_download(tmp_path, name, data, reason):
    """They are there and can be read, so another try would find the same."""
    path = tmp_path / name
    path.write_bytes(data)
    with pytest.raises(StructureError, match=name) as error:
        make(path)
    assert error.value.reason == reason


@pytest.mark.parametrize(
    ("encoding", "title"), [("utf-8", "2 Å"), ("utf-8-sig", "2 Å"), ("latin-1", "2 \ufffd")]
)
def test_titles_in_any_encoding(tmp_path, encoding, title):
    path = CifFile().polymer("GLY").add("GLY", "A", 1).write(tmp_path)
    assert make(path).attributes["title"] is None
    path.write_text(path.read_text() + "_struct.title '2 Å'\n", encoding)
    assert make(path).attributes["title"] == title


@pytest.mark.parametrize("name", ["1ABC.CIF", "1ABC.CIF.GZ", "1ABC.BCIF", "1ABC.BCIF.GZ"])
def test_names_in_capitals(tmp_path, name):
    file = CifFile().polymer("GLY").add("GLY", "A", 1).write(tmp_path)
    data = file.read_bytes()
    if ".BCIF" in name:
        write_binary(file, tmp_path / "1abc.bcif")
        data = (tmp_path / "1abc.bcif").read_bytes()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("GZ") else data)
    assert make(tmp_path / name).codes == ["GLY"]
