"""Tokens, their atoms and frames, and the tables' inner order."""

from dataclasses import replace

import numpy as np
import pytest

from megafold.pipeline.schema import RESTYPES, MolType
from tests.pipeline.structure_files import NO_FILTERS, CifFile, definition, make

ENTRIES = ["1ehz", "1dsr", "2hhb", "4y60", "1ema"]


@pytest.fixture(scope="module", params=ENTRIES)
def made(request, corpus_dir):
    paths = [corpus_dir / folder / f"{request.param}.cif.gz" for folder in ("structures", "more/structures")]
    return make(next(path for path in paths if path.is_file()))


@pytest.mark.corpus
def test_crambin_by_hand(corpus_dir):
    """1CRN: 46 residues, 327 heavy atoms, three disulfides, 1.5 Å."""
    made = make(corpus_dir / "structures/1crn.cif.gz")
    (entity,) = made.attributes["entities"]
    assert entity["sequence"] == "TTCCPSIVARSNFNVCRLPGTPEAICATYTGCIIIPGATCPGDYAN"
    assert made.content.arrays["tokens"].shape[1] == 46
    assert made.tables["atoms"]["resolved"].sum() == 327
    cysteines = {
        tuple(sorted(made.tables["residues"]["label_seq_id"][made.atom_residue[[i, j]]]))
        for i, j in zip(made.tables["bonds"]["atom_i"], made.tables["bonds"]["atom_j"], strict=True)
    }
    assert cysteines == {(3, 40), (4, 32), (16, 26)}
    assert made.attributes["resolution"] == 1.5
    assert made.attributes["method"] == "X-RAY DIFFRACTION"
    assert made.attributes["release_date"] == "1981-07-28"
    assert made.names(45)[-1] == "OXT"
    assert "OXT" not in made.names(44)


@pytest.mark.corpus
def test_tables_nest(made):
    """Chains hold residues hold tokens hold atoms, without gaps and in order."""
    chains, tokens = made.tables["chains"], made.tables["tokens"]
    for table in ("residue", "token", "atom"):
        ends = np.cumsum(chains[f"{table}_count"])
        assert chains[f"first_{table}"].tolist() == [0, *ends[:-1].tolist()]
        assert ends[-1] == made.content.arrays[f"{table}s"].shape[1]
    assert (np.diff(tokens["residue"]) >= 0).all()
    assert tokens["first_atom"].tolist() == [0, *np.cumsum(tokens["atom_count"])[:-1].tolist()]
    assert chains["asym_id"].tolist() == list(range(1, len(chains["asym_id"]) + 1))
    for entity in np.unique(chains["entity_id"]):
        copies = chains["sym_id"][chains["entity_id"] == entity]
        assert copies.tolist() == list(range(1, len(copies) + 1))


@pytest.mark.corpus
def test_named_atoms_of_tokens(made):
    tokens, residues, chains = (made.tables[name] for name in ("tokens", "residues", "chains"))
    for token in range(len(tokens["residue"])):
        residue = tokens["residue"][token]
        code, first = made.codes[residue], tokens["first_atom"][token]
        mol_type = chains["mol_type"][residues["chain"][residue]]
        picked = [tokens[name][token] - first for name in ("center_atom", "rep_atom")]
        if residues["is_standard"][residue]:
            names = made.names(residue)
            if mol_type == MolType.PROTEIN:
                wanted = ["CA", "CA" if code == "GLY" else "CB"]
                frame = ["N", "CA", "C"]
            else:
                wanted = ["C1'", "C4" if code in ("A", "G", "DA", "DG") else "C2"]
                frame = ["C1'", "C3'", "C4'"]
            assert [names[index] for index in picked] == wanted
            assert [names[tokens[f"frame_atom_{i}"][token] - first] for i in range(3)] == frame
            assert RESTYPES[tokens["restype"][token]] == code
        else:
            assert tokens["atom_count"][token] == 1
            assert picked == [0, 0]
    centers = made.content.arrays["token_center"]
    np.testing.assert_array_equal(centers, made.coords[tokens["center_atom"]])


@pytest.mark.corpus
def test_frames_of_single_atoms(made):
    """The two closest atoms of the chain by brute force in float64, and the angle between them."""
    tokens = made.tables["tokens"]
    coords = np.round(made.coords.astype(float), 3)
    single = np.flatnonzero(made.tables["residues"]["is_standard"][tokens["residue"]] == 0)
    for token in single[:150]:
        atom = tokens["center_atom"][token]
        members = np.flatnonzero((made.atom_chain == made.atom_chain[atom]) & np.isfinite(coords[:, 0]))
        frame = [tokens[f"frame_atom_{i}"][token] for i in range(3)]
        if len(members) < 3 or not np.isfinite(coords[atom, 0]):
            assert not tokens["frame_mask"][token]
            continue
        others = members[members != atom]
        distance = np.round(np.linalg.norm(coords[others] - coords[atom], axis=1), 6)
        closest = others[np.lexsort((others, distance))[:2]]
        assert frame == [closest[0], atom, closest[1]]
        a, c = coords[closest[0]] - coords[atom], coords[closest[1]] - coords[atom]
        angle = np.degrees(np.arccos(np.clip(a @ c / np.linalg.norm(a) / np.linalg.norm(c), -1, 1)))
        assert bool(tokens["frame_mask"][token]) == (25 < angle < 155)


@pytest.mark.corpus
def test_unresolved_backbones_have_no_frame(made):
    tokens = made.tables["tokens"]
    frames = np.stack([tokens[f"frame_atom_{i}"] for i in range(3)], axis=1)
    resolved = made.tables["atoms"]["resolved"][np.maximum(frames, 0)].all(axis=1) & (frames >= 0).all(axis=1)
    assert not (tokens["frame_mask"].astype(bool) & ~resolved).any()


@pytest.mark.parametrize(
    ("kind", "code", "parent"),
    [
        ("'polypeptide(L)'", "MSE", "MET"),
        ("'polypeptide(L)'", "SEP", "SER"),
        ("'polypeptide(L)'", "DAL", "ALA"),  # a D residue: of the class of its letter, one token an atom
        ("'polypeptide(L)'", "CRO", "UNK"),  # stands for three residues
        ("polyribonucleotide", "PSU", "U"),
        ("polyribonucleotide", "5MC", "C"),
        ("polydeoxyribonucleotide", "5CM", "DC"),
    ],
)
def test_class_of_modified_residues(tmp_path, kind, code, parent):
    filler = {"'polypeptide(L)'": "GLY", "polyribonucleotide": "A", "polydeoxyribonucleotide": "DA"}[kind]
    file = CifFile().polymer(f"{filler} {code} {filler}", kind=kind)
    for seq, residue in enumerate((filler, code, filler), 1):
        file.add(residue, "A", seq, at=(12 * seq, 0, 0))
    made = make(file.write(tmp_path), replace(NO_FILTERS, convert_selenomethionine=False))
    tokens = made.tables["tokens"]
    of_residue = tokens["restype"][tokens["residue"] == 1]
    assert {RESTYPES[index] for index in of_residue} == {parent}
    component = definition(code)
    assert len(of_residue) == (component.heavy & ~component.leaving).sum()


def test_ligand_atoms_count_as_unknown(tmp_path):
    made = make(CifFile().add("ALA", "A").write(tmp_path))  # a free amino acid
    assert made.tables["chains"]["mol_type"].tolist() == [MolType.LIGAND]
    assert {RESTYPES[index] for index in made.tables["tokens"]["restype"]} == {"UNK"}
    assert made.names(0) == ["N", "CA", "C", "O", "CB", "OXT"]  # nothing has left


def test_unresolved_residues_are_masked_tokens(tmp_path):
    file = CifFile().polymer("GLY ALA SEP SER")
    file.add("GLY", "A", 1).add("SER", "A", 4, at=(12, 0, 0))
    made = make(file.write(tmp_path))
    assert made.codes == ["GLY", "ALA", "SEP", "SER"]
    assert made.tables["tokens"]["atom_count"].tolist() == [4, 5, *[1] * 10, 7]
    middle = np.isin(made.atom_residue, (1, 2))
    assert np.isnan(made.coords[middle]).all()
    assert np.isnan(made.content.arrays["atom_occupancy_b"][middle]).all()
    assert not made.tables["atoms"]["resolved"][middle].any()


def test_nucleic_termini(tmp_path):
    file = CifFile().polymer("A C G", kind="polyribonucleotide")
    for seq, code in enumerate("ACG", 1):
        file.add(code, "A", seq, at=(12 * seq, 0, 0))
    made = make(file.write(tmp_path))
    assert ["OP3" in made.names(residue) for residue in range(3)] == [True, False, False]


def test_peptide_nucleic_acid_is_a_ligand_of_several_residues(tmp_path):
    """CPN-APN: neither protein nor nucleic acid; the bond between the residues is told by geometry."""
    file = CifFile().polymer("CPN APN", kind="'peptide nucleic acid'")
    first, second = definition("CPN"), definition("APN")
    file.add("CPN", "A", 1)
    gap = first.ideal_pos[first.atom_index["C"]] - second.ideal_pos[second.atom_index["N4'"]]
    far = file.add("APN", "A", 2, at=gap + (0, 0, 40)).write(tmp_path)
    made = make(far)
    assert made.tables["chains"]["mol_type"].tolist() == [MolType.LIGAND]
    assert made.tables["chains"]["residue_count"].tolist() == [2]
    assert made.tables["residues"]["is_standard"].tolist() == [0, 0]
    assert made.bonds() == []
