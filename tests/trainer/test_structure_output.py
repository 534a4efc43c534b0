"""mmCIF files as gemmi reads them."""

import gemmi
import numpy as np
import pytest

from megafold.pipeline.schema import RESTYPES
from megafold.trainer.cif import loop, quoted
from megafold.trainer.structure_output import (
    ELEMENTS,
    RESTYPE_COMPONENTS,
    chain_name,
    write_mmcif,
)

NAMES = ("P", "O5'", "C5'", "N9", "C1'")


def sample_features(n_pad=0):
    """Two chains of a protein with GLY 3 and ALA 4, an RNA G, a zinc and a two-atom ligand with an odd name.

    The first chain's second residue is modified: a token for each of its two atoms.
    """
    tokens = [
        # asym, entity, residue, restype, kind, space, atoms (name, element)
        (1, 1, 3, "GLY", "protein", 0, [("N", 7), ("CA", 6), ("C", 6)]),
        (1, 1, 4, "ALA", "protein", 1, [("CA", 6)]),
        (1, 1, 4, "ALA", "protein", 1, [("SE", 34)]),
        (2, 1, 3, "GLY", "protein", 2, [("N", 7), ("CA", 6), ("C", 6)]),
        (3, 2, 1, "G", "rna", 3, [(name, 15 if name == "P" else 6) for name in NAMES]),
        (4, 3, 1, "UNK", "ligand", 4, [("ZN", 30)]),
        (28, 4, 1, "UNK", "ligand", 5, [('C"1', 6)]),
        (28, 4, 1, "UNK", "ligand", 5, [("H'\"", 17)]),
        (28, 4, 2, "UNK", "ligand", 6, [("O1", 8)]),
    ]
    atoms = [(t, space, *atom) for t, (*_, space, names) in enumerate(tokens) for atom in names]
    kinds = [kind for *_, kind, _, _ in tokens]
    features = {
        "token_mask": [True] * len(tokens),
        "asym_id": [t[0] for t in tokens],
        "entity_id": [t[1] for t in tokens],
        "residue_index": [t[2] for t in tokens],
        "restype": [RESTYPES.index(t[3]) for t in tokens],
        **{f"is_{kind}": [k == kind for k in kinds] for kind in ("protein", "rna", "dna", "ligand")},
        "token_atom_count": [len(t[6]) for t in tokens],
        "atom_mask": [True] * len(atoms),
        "atom_to_token": [a[0] for a in atoms],
        "ref_space_uid": [a[1] for a in atoms],
        "ref_atom_name_chars": [[ord(c) - 32 for c in a[2].ljust(4)] for a in atoms],
        "ref_element": [a[3] for a in atoms],
    }
    arrays = {name: np.array(value) for name, value in features.items()}
    if not n_pad:
        return arrays
    return {
        name: np.concatenate([value, np.zeros((n_pad, *value.shape[1:]), value.dtype)])
        for name, value in arrays.items()
    }


def coordinates(features, seed=0):
    return np.random.default_rng(seed).normal(0, 20, (len(features["atom_mask"]), 3))


def all_atoms(model):
    return [(chain, residue, atom) for chain in model for residue in chain for atom in residue]


def test_gemmi_reads_back_what_was_written(tmp_path):
    features = sample_features()
    coords = coordinates(features)
    b_factors = np.linspace(1, 99, len(coords))
    write_mmcif(tmp_path / "x.cif", coords, features, {"entry": "1abc"}, b_factors)
    structure = gemmi.read_structure(str(tmp_path / "x.cif"))
    assert structure.name == "1abc"
    assert len(structure) == 1
    atoms = all_atoms(structure[0])
    np.testing.assert_allclose([a.pos.tolist() for *_, a in atoms], coords, atol=6e-4)
    np.testing.assert_allclose([a.b_iso for *_, a in atoms], b_factors, atol=6e-3)
    names = ["CA", "C", *NAMES, "ZN", 'C"1', "H'\"", "O1"]
    assert [a.name for *_, a in atoms][6:] == names
    assert [a.element.atomic_number for *_, a in atoms] == features["ref_element"].tolist()
    assert [chain.name for chain in structure[0]] == ["A", "B", "C", "D", "AB"]
    first = structure[0]["A"]
    assert [(r.name, r.label_seq, r.seqid.num, r.het_flag) for r in first] == [
        ("GLY", 3, 3, "A"),
        ("UNL", 4, 4, "H"),
    ]
    assert [len(residue) for residue in first] == [3, 2]
    ligand = structure[0]["AB"]
    residues = [(r.name, r.label_seq, r.seqid.num, len(r)) for r in ligand]
    assert residues == [("UNL", None, 1, 2), ("UNL", None, 2, 1)]


def test_entities_are_those_of_the_sample(tmp_path):
    features = sample_features()
    write_mmcif(tmp_path / "x.cif", coordinates(features), features)
    structure = gemmi.read_structure(str(tmp_path / "x.cif"))
    found = {e.name: (e.entity_type, e.polymer_type, list(e.full_sequence)) for e in structure.entities}
    kinds = gemmi.EntityType
    assert found["1"] == (kinds.Polymer, gemmi.PolymerType.PeptideL, ["UNK", "UNK", "GLY", "UNL"])
    assert found["2"] == (kinds.Polymer, gemmi.PolymerType.Rna, ["G"])
    assert found["3"][0] == found["4"][0] == kinds.NonPolymer
    assert {e.name: list(e.subchains) for e in structure.entities} == {
        "1": ["A", "B"],
        "2": ["C"],
        "3": ["D"],
        "4": ["AB"],
    }
    block = gemmi.cif.read(str(tmp_path / "x.cif")).sole_block()
    details = dict(zip(block.find_values("_entity.id"), block.find_values("_entity.details"), strict=True))
    assert "UNL" in details["3"]
    assert details["2"] == "."
    types = dict(zip(block.find_values("_chem_comp.id"), block.find_values("_chem_comp.type"), strict=True))
    assert types["GLY"].strip("'") == "peptide linking"
    assert types["G"].strip("'") == "RNA linking"


def test_several_models_names_and_a_mask(tmp_path):
    features = sample_features(n_pad=2)
    models = np.stack([coordinates(features, seed) for seed in range(3)])
    models[:, -2:] = np.nan  # padding
    mask = features["atom_mask"].copy()
    mask[0] = False
    models[:, 0] = np.nan
    comp_ids = ["GLY", "MSE", "MSE", "GLY", "G", "ZN", "LIG", "LIG", "XYZ", "", ""]
    meta = {
        "comp_ids": comp_ids,
        "label_asym_ids": {1: "A", 2: "B", 3: "C", 4: "D", 28: "E"},
        "auth_asym_ids": {1: "H", 2: "L"},
    }
    write_mmcif(tmp_path / "x.cif", models, features, meta, mask=mask)
    structure = gemmi.read_structure(str(tmp_path / "x.cif"))
    assert len(structure) == 3
    for number, model in enumerate(structure):
        atoms = all_atoms(model)
        assert len(atoms) == 16
        np.testing.assert_allclose([a.pos.tolist() for *_, a in atoms], models[number, 1:-2], atol=6e-4)
    assert [chain.name for chain in structure[0]] == ["H", "L", "C", "D", "E"]
    assert [r.name for r in structure[0]["H"]] == ["GLY", "MSE"]
    assert [r.name for r in structure[0]["E"]] == ["LIG", "XYZ"]
    assert [r.subchain for r in structure[0]["L"]] == ["B"]


def test_positions_must_be_finite_and_fit(tmp_path):
    features = sample_features()
    coords = coordinates(features)
    with pytest.raises(ValueError, match=r"x\.cif: coordinates"):
        write_mmcif(tmp_path / "x.cif", coords[:-1], features)
    coords[3, 1] = np.nan
    with pytest.raises(ValueError, match=r"x\.cif: a position is not finite"):
        write_mmcif(tmp_path / "x.cif", coords, features)
    assert list(tmp_path.iterdir()) == []


def test_vocabularies():
    assert RESTYPE_COMPONENTS == RESTYPES
    assert len(ELEMENTS) == 119
    assert all(gemmi.Element(symbol).atomic_number == z for z, symbol in enumerate(ELEMENTS))
    assert [chain_name(i) for i in (1, 26, 27, 52, 53, 702, 703)] == ["A", "Z", "AA", "AZ", "BA", "ZZ", "AAA"]


@pytest.mark.parametrize(
    "value",
    [
        "CA", "O5'", 'C"1', "H'\"", "a b", "it's a", 'say "x" now', "both ' and \" here", "_name", "#", "$x",
        ";x", "data_x", "LOOP_", "global_", "?", ".", "[1]", "line\nbreak", "line\n;break' \" x", "-1.5",
        "'", '"', "a'", "x' y\" z",
    ],
)  # fmt: skip
def test_any_text_survives(value):
    text = "data_x\n" + loop("thing", ["id", "text"], [("1", value), ("2", "next")])
    block = gemmi.cif.read_string(text).sole_block()
    rows = [[gemmi.cif.as_string(cell) for cell in row] for row in block.find("_thing.", ["id", "text"])]
    assert len(rows) == 2
    assert rows[1] == ["2", "next"]
    assert rows[0][1].replace("\n ;", "\n;").strip("\n") == value


def test_nothing_is_a_dot():
    assert quoted("α-D") == "\\u03b1-D"
    assert quoted("") == "."
    assert loop("thing", ["id"], []) == ""
