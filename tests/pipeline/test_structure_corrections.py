"""What AF3 SI 2.1 changes (selenomethionine, arginine's nitrogens), and names of older dictionaries."""

from dataclasses import replace

import gemmi
import numpy as np
import pytest

from megafold.pipeline.schema import BondKind, MolType
from megafold.pipeline.structure.renaming import older_names
from tests.pipeline.structure_files import NO_FILTERS, PARTNERS, CifFile, definition, make


def with_methionines(*codes):
    file = CifFile().polymer(" ".join(codes))
    for seq, code in enumerate(codes, 1):
        file.add(code, "A", seq, at=(9 * seq, 0, 0), group="HETATM" if code == "MSE" else "ATOM")
    return file


def test_selenomethionine_is_methionine(tmp_path):
    path = with_methionines("MSE", "MET", "GLY", "MSE").write(tmp_path)
    made = make(path)
    assert made.codes == ["MET", "MET", "GLY", "MET"]
    assert made.attributes["components"] == ["GLY", "MET"]
    assert made.tables["tokens"]["atom_count"].tolist() == [8, 8, 4, 9]
    assert made.attributes["entities"][0]["sequence"] == "MMGM"
    sulfur = made.atom(0, 1, "SD")
    selenium = definition("MSE").ideal_pos[definition("MSE").atom_index["SE"]]
    np.testing.assert_allclose(made.coords[sulfur], selenium + np.array((9, 0, 0)), atol=1e-3)
    assert made.tables["atoms"]["element"][sulfur] == 16
    assert made.attributes["changed"] == {"selenomethionine_to_methionine": 2}
    kept = make(path, replace(NO_FILTERS, convert_selenomethionine=False))
    assert kept.codes == ["MSE", "MET", "GLY", "MSE"]
    assert kept.attributes["changed"] == {}


def test_selenomethionine_that_is_in_the_sequence_alone(tmp_path):
    file = CifFile().polymer("MSE GLY GLY").add("GLY", "A", 2).add("GLY", "A", 3, at=(9, 0, 0))
    made = make(file.write(tmp_path))
    assert made.codes == ["MET", "GLY", "GLY"]
    assert made.tables["tokens"]["atom_count"].tolist() == [8, 4, 5]
    assert made.attributes["changed"] == {}


def test_what_shares_a_position_with_selenomethionine_stays_what_it_is(tmp_path):
    file = CifFile().polymer("MSE GLY GLY").loop("_entity_poly_seq", "entity_id num mon_id", "1 1 LEU")
    file.add("LEU", "A", 1).add("GLY", "A", 2, at=(9, 0, 0)).add("GLY", "A", 3, at=(18, 0, 0))
    made = make(file.write(tmp_path))
    assert made.codes == ["LEU", "GLY", "GLY"]
    assert not any("the atoms are" in text for text in made.attributes["warnings"])


def test_unresolved_and_partly_replaced_selenomethionine(tmp_path):
    """A position that is both in the crystal has one component, and its alternates are alternates of it."""
    file = CifFile().polymer("MSE ALA MSE")
    file.loop("_entity_poly_seq", "entity_id num mon_id", "1 3 MET")
    file.add("ALA", "A", 2)
    file.add("MET", "A", 3, at=(9, 0, 0), alt="A", occ=0.4)
    file.add("MSE", "A", 3, at=(9, 0, 0), alt="B", occ=0.6)
    made = make(file.write(tmp_path))
    assert made.codes == ["MET", "ALA", "MET"]
    assert made.attributes["warnings"] == [
        "the file defines no assembly: the coordinates are taken as they are"
    ]
    selenium = definition("MSE").ideal_pos[definition("MSE").atom_index["SE"]] + np.array((9, 0, 0))
    np.testing.assert_allclose(made.coords[made.atom(0, 3, "SD")], selenium, atol=1e-3)


def test_bonds_of_selenomethionine_stay(tmp_path):
    file = with_methionines("GLY", "MSE", "GLY")
    file.loop("_entity", "id type", "2 non-polymer")
    file.atom("ZN", "ZN", "B", ".", (18, 9, 0), element=30, entity="2")
    file.loop("_struct_conn", PARTNERS, "1 metalc A MSE 2 2 SE B ZN . 1 ZN")
    assert make(file.write(tmp_path)).bonds() == [("0:MET.SD", "1:ZN.ZN", BondKind.METAL)]


@pytest.mark.corpus
@pytest.mark.parametrize(
    ("path", "residues"),
    [("structures/1a8o", 4), ("more/structures/1o6u", 31), ("more/variants/3en2-atomworks", 3)],
)
def test_selenomethionines_of_entries(corpus_dir, path, residues):
    """As many as the file has sites of selenium, each at that place."""
    path = corpus_dir / f"{path}.cif.gz"
    made = make(path, replace(NO_FILTERS, assembly="asym"))
    structure = gemmi.read_structure(str(path))
    selenomethionines = [residue for chain in structure[0] for residue in chain if residue.name == "MSE"]
    assert made.attributes["changed"]["selenomethionine_to_methionine"] == len(selenomethionines) == residues
    places = [residue["SE"][0].pos.tolist() for residue in selenomethionines if "SE" in residue]
    assert "MSE" not in made.attributes["components"]
    sulfur = np.round(made.coords[made.tables["atoms"]["element"] == 16].astype(float), 3).tolist()
    assert all(np.round(place, 3).tolist() in sulfur for place in places)


def arginine(tmp_path, swapped, *, skip=()):
    component = definition("ARG")
    file = CifFile().polymer("GLY ARG GLY")
    file.add("GLY", "A", 1, at=(-12, 0, 0)).add("GLY", "A", 3, at=(12, 0, 0))
    for index in np.flatnonzero(component.heavy & ~component.leaving).tolist():
        name = component.atom_names[index]
        renamed = {"NH1": "NH2", "NH2": "NH1"}.get(name, name) if swapped else name
        if renamed not in skip:
            element = int(component.elements[index])
            file.atom(
                renamed, "ARG", "A", 2, component.model_pos[index], element=element, occ=0.5 + index / 100
            )
    return file


@pytest.mark.parametrize("swapped", [False, True])
def test_nh1_is_the_nitrogen_closer_to_cd(tmp_path, swapped):
    made = make(arginine(tmp_path, swapped).write(tmp_path))
    cd, first, second = (made.coords[made.atom(0, 2, name)].astype(float) for name in ("CD", "NH1", "NH2"))
    assert np.linalg.norm(cd - first) < np.linalg.norm(cd - second)
    assert made.attributes["changed"] == ({"arginine_nitrogens_exchanged": 1} if swapped else {})
    # Occupancies go with their atoms.
    index = definition("ARG").atom_index
    assert made.occupancy[made.atom(0, 2, "NH1")] == pytest.approx(0.5 + index["NH1"] / 100)


def test_arginine_with_a_nitrogen_missing_is_left_alone(tmp_path):
    made = make(arginine(tmp_path, True, skip=("NH2",)).write(tmp_path))
    assert made.attributes["changed"] == {}
    assert np.isnan(made.coords[made.atom(0, 2, "NH2")]).all()
    path = arginine(tmp_path, True).write(tmp_path)
    assert make(path, replace(NO_FILTERS, order_arginine=False)).attributes["changed"] == {}


def test_a_bond_follows_the_exchanged_nitrogen(tmp_path):
    file = arginine(tmp_path, True)
    file.loop("_entity", "id type", "2 non-polymer")
    file.atom("ZN", "ZN", "B", ".", (0, 30, 0), element=30, entity="2")
    file.loop("_struct_conn", PARTNERS, "1 metalc A ARG 2 2 NH1 B ZN . 1 ZN")
    assert make(file.write(tmp_path)).bonds() == [("0:ARG.NH2", "1:ZN.ZN", BondKind.METAL)]


@pytest.mark.corpus
@pytest.mark.parametrize("entry", ["7cfn", "5kc1"])
def test_arginines_of_entries(corpus_dir, entry):
    """The number exchanged is the number that gemmi's reading of the file has the other way round."""
    path = corpus_dir / f"structures/{entry}.cif.gz"
    made = make(path, replace(NO_FILTERS, assembly="asym"))
    wrong = 0
    for residue in (residue for chain in gemmi.read_structure(str(path))[0] for residue in chain):
        if residue.name == "ARG" and all(name in residue for name in ("CD", "NH1", "NH2")):
            cd, first, second = (residue[name][0].pos for name in ("CD", "NH1", "NH2"))
            wrong += cd.dist(first) > cd.dist(second)
    assert made.attributes["changed"].get("arginine_nitrogens_exchanged", 0) == wrong
    residues = np.flatnonzero(np.array(made.codes) == "ARG")
    for index in residues.tolist():
        rows, names = np.flatnonzero(made.atom_residue == index), made.names(index)
        cd, first, second = (made.coords[rows[names.index(name)]] for name in ("CD", "NH1", "NH2"))
        if np.isfinite([cd, first, second]).all():
            assert np.linalg.norm(cd - first) <= np.linalg.norm(cd - second) + 1e-4


OLD = {"OP1": "O1P", "OP2": "O2P", "OP3": "O3P", "C7": "C5M"}


@pytest.mark.parametrize(
    ("kind", "codes", "mol_type"),
    [
        ("polydeoxyribonucleotide", "DA DT DG DC", MolType.DNA),
        ("polyribonucleotide", "A U G C 5MC", MolType.RNA),
    ],
)
def test_nucleotides_with_the_names_from_before_2007(tmp_path, kind, codes, mol_type):
    """``O1P`` is OP1, ``C5*`` is C5', thymine's ``C5M`` is C7: the same object as from today's names."""
    made = []
    for name, is_old in (("new.cif", False), ("old.cif", True)):
        file = CifFile().polymer(codes, kind=kind)
        for seq, code in enumerate(codes.split(), 1):
            component = definition(code)
            for index in np.flatnonzero(component.heavy & ~component.leaving).tolist():
                atom = component.atom_names[index]
                if is_old:
                    atom = OLD.get(atom, atom.replace("'", "*"))
                pos = component.ideal_pos[index] + np.array((0, 0, 9 * seq))
                file.atom(atom, code, "A", seq, pos, element=int(component.elements[index]))
        made.append(make(file.write(tmp_path, name), entry="test"))
    new, old = made
    assert old.tables["chains"]["mol_type"].tolist() == [mol_type]
    np.testing.assert_array_equal(old.coords, new.coords)
    assert old.tables["atoms"]["resolved"].sum() == len(old.coords) - 1  # the first OP3
    assert "atoms_outside_definition" not in old.attributes["filtered"]
    assert sum("older atom names" in text for text in old.attributes["warnings"]) == len(codes.split())


def test_names_of_other_programs(tmp_path):
    """ILE CD, and OT1 and OT2 of the last residue, as simulation programs write them."""
    file = CifFile().polymer("GLY ILE")
    file.add("GLY", "A", 1)
    component = definition("ILE")
    for index in np.flatnonzero(component.heavy).tolist():
        name = component.atom_names[index]
        name = {"CD1": "CD", "O": "OT1", "OXT": "OT2"}.get(name, name)
        pos = component.ideal_pos[index] + np.array((9, 0, 0))
        file.atom(name, "ILE", "A", 2, pos, element=int(component.elements[index]))
    made = make(file.write(tmp_path))
    assert np.isfinite(made.coords).all()
    assert made.names(1) == [
        name for name, heavy in zip(component.atom_names, component.heavy, strict=True) if heavy
    ]
    assert made.attributes["filtered"] == {}


@pytest.mark.parametrize(("code", "read"), [("ILE", True), ("5MC", False)])
def test_one_strange_atom_spoils_the_older_names_of_what_is_not_standard(tmp_path, code, read):
    """A standard residue is known well enough to read its CD, or O1P, beside an atom that nobody knows."""
    filler, kind = ("GLY", "'polypeptide(L)'") if code == "ILE" else ("A", "polyribonucleotide")
    new, old = ("CD1", "CD") if code == "ILE" else ("OP1", "O1P")
    file = CifFile().polymer(f"{filler} {code} {filler}", kind=kind)
    component = definition(code)
    for index in np.flatnonzero(component.heavy & ~component.leaving).tolist():
        name = old if component.atom_names[index] == new else component.atom_names[index]
        file.atom(name, code, "A", 2, component.ideal_pos[index], element=int(component.elements[index]))
    file.atom("QQ", code, "A", 2, (0, 0, 50))
    made = make(file.write(tmp_path))
    assert bool(made.tables["atoms"]["resolved"][made.atom(0, 2, new)]) == read
    assert made.attributes["filtered"]["atoms_outside_definition"] == 2 - read


def test_a_name_means_what_it_means_today_unless_all_are_old():
    component = replace(
        definition("GOL"),
        atom_names=tuple(f"A{i}" for i in range(14)),
        alt_names=("A1", "A0", *(f"B{i}" for i in range(2, 14))),
    )
    carbon, oxygen = 6, 8  # GOL: C1 O1 C2 O2 C3 O3
    assert component.elements.tolist()[:4] == [carbon, oxygen, carbon, oxygen]
    swapped = replace(component, elements=np.full(14, carbon))
    assert older_names(swapped, {"A0": 6, "A1": 6, "B2": 6}) == {"A0": "A1", "A1": "A0", "B2": "A2"}
    assert older_names(swapped, {"A0": 6, "A3": 6, "B2": 6}) == {"B2": "A2"}
    assert older_names(swapped, {"A0": 6, "A1": 6}) == {}
    # An atom of another element is another atom.
    assert older_names(component, {"B2": 7}) == {}
    # Definitions of a user's need not tell of older names.
    assert older_names(replace(component, alt_names=()), {"B2": 6}) == {}
