"""The filters of AF3 SI 2.5.4, each with what it keeps, what it removes and what it counts."""

from dataclasses import replace

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from megafold.pipeline.errors import InputError, StructureError
from megafold.pipeline.structure import StructureOptions
from megafold.pipeline.structure.neighbours import interfaces
from tests.pipeline.structure_files import NO_FILTERS, PARTNERS, TWO_FOLD, CifFile, make


def peptide(file, asym, count, *, at=(0, 0, 0), entity="1", step=3.8, total=None):
    """A row of ALA, 3.8 Å from each to the next."""
    file.polymer(" ".join(["ALA"] * (total or count)), entity=entity)
    for seq in range(1, count + 1):
        file.add("ALA", asym, seq, at=np.add(at, (step * seq, 0, 0)), entity=entity)
    return file


def test_crystallisation_aids_only_in_crystals(tmp_path):
    for method, kept in (
        ("X-RAY DIFFRACTION", ["A", "C"]),
        ("ELECTRON MICROSCOPY", ["A", "B", "C"]),
        ("FIBER DIFFRACTION", ["A", "B", "C"]),
        ("ELECTRON CRYSTALLOGRAPHY", ["A", "C"]),
    ):
        file = peptide(CifFile(), "A", 5)
        file.loop("_exptl", "entry_id method", f"TEST '{method}'")
        file.loop("_entity", "id type", "2 non-polymer", "3 non-polymer")
        file.add("GOL", "B", at=(0, 20, 0), entity="2").add("HEM", "C", at=(0, 40, 0), entity="3")
        made = make(file.write(tmp_path), StructureOptions())
        assert made.labels == kept
        assert made.attributes["filtered"].get("crystallisation_aids", 0) == 3 - len(kept)


def test_few_resolved_residues(tmp_path):
    file = peptide(peptide(CifFile(), "A", 4, total=9), "B", 3, at=(0, 30, 0), entity="2", total=12)
    path = file.write(tmp_path)
    made = make(path, StructureOptions())
    assert made.labels == ["A"]
    assert made.attributes["filtered"]["polymers_with_few_resolved_residues"] == 1
    assert make(path, replace(StructureOptions(), min_resolved_residues=3)).labels == ["A", "B"]


@pytest.mark.parametrize(("step", "kept"), [(9.9, ["A", "B"]), (10.1, ["B"])])
def test_ca_gaps(tmp_path, step, kept):
    file = peptide(CifFile(), "A", 5, step=step)
    peptide(file, "B", 5, at=(0, 50, 0), entity="2")
    made = make(file.write(tmp_path), StructureOptions())
    assert made.labels == kept
    assert made.attributes["filtered"].get("ca_gaps", 0) == 2 - len(kept)


def test_gap_of_unresolved_residues_is_no_ca_gap(tmp_path):
    file = CifFile().polymer("ALA " * 9)
    for seq, x in ((1, 0), (2, 4), (8, 60), (9, 64)):
        file.add("ALA", "A", seq, at=(x, 0, 0))
    assert make(file.write(tmp_path), StructureOptions()).labels == ["A"]


@pytest.mark.parametrize(
    ("counts", "offset", "kept"),
    [
        ((6, 6), 0.5, ["A"]),  # the same share, the same size: the later one goes
        ((5, 9), 0.5, ["B"]),  # all of A's atoms clash, half of B's
        ((6, 6), 40.0, ["A", "B"]),
    ],
)
def test_clashing_chains(tmp_path, counts, offset, kept):
    file = peptide(CifFile(), "A", counts[0])
    peptide(file, "B", counts[1], at=(0, 0, offset), entity="2")
    made = make(file.write(tmp_path), StructureOptions())
    assert made.labels == kept
    assert made.attributes["filtered"].get("clashing_chains", 0) == 2 - len(kept)


def clashing_share(made, chain, other, distance=1.7):
    """Which part of a chain's atoms is within a distance of another chain's (AF3 SI 2.5.4)."""
    here, there = (made.coords[made.atom_chain == index].astype(float) for index in (chain, other))
    here, there = (points[np.isfinite(points[:, 0])] for points in (here, there))
    return (cdist(here, there).min(axis=1) < distance).mean()


@pytest.mark.parametrize(("overlap", "kept"), [(3, ["A", "B"]), (4, ["A"])])
def test_three_tenths_of_the_atoms_may_clash(tmp_path, overlap, kept):
    """More than 30 % of a chain's atoms: 15 of 50 are not more."""
    file = peptide(CifFile(), "A", 10, step=6)
    peptide(file, "B", 10, at=(6 * (10 - overlap), 0, 0.5), entity="2", step=6)
    path = file.write(tmp_path)
    assert clashing_share(make(path), 1, 0) == overlap / 10
    assert make(path, StructureOptions()).labels == kept


@pytest.mark.parametrize(("distance", "kept"), [(1.69, ["A"]), (1.71, ["A", "B"])])
def test_atoms_clash_below_1_7_angstrom(tmp_path, distance, kept):
    file = peptide(CifFile(), "A", 4)
    file.loop("_entity", "id type", "2 non-polymer")
    nitrogen = np.array([float(value) for value in file.atoms[0].split()[10:13]])
    carbon = np.array([float(value) for value in file.atoms[1].split()[10:13]])
    away = (nitrogen - carbon) / np.linalg.norm(nitrogen - carbon)
    file.atom("ZN", "ZN", "B", ".", nitrogen + distance * away, element=30, entity="2")
    made = make(file.write(tmp_path), replace(StructureOptions(), infer_bonds=False))
    assert made.labels == kept


def test_the_worst_clash_is_settled_first(tmp_path):
    """B clashes with A and C, and loses to A by more than C loses to B: with B gone nothing clashes."""
    file = peptide(CifFile(), "A", 20, step=6)
    peptide(file, "B", 10, at=(6 * 14, 0, 0.5), entity="2", step=6)
    peptide(file, "C", 8, at=(6 * 20, 0, 1.0), entity="3", step=6)
    path = file.write(tmp_path)
    made = make(path)
    shares = [clashing_share(made, *pair) for pair in ((1, 0), (0, 1), (2, 1), (1, 2), (2, 0))]
    assert shares == pytest.approx([0.6, 0.3, 0.5, 0.4, 0], abs=1e-9)
    filtered = make(path, StructureOptions())
    assert filtered.labels == ["A", "C"]
    assert filtered.attributes["filtered"]["clashing_chains"] == 1


def test_ion_on_a_symmetry_axis_is_there_once_though_bonded(tmp_path):
    file = peptide(CifFile(), "A", 5, at=(10, 0, 0))
    file.loop("_entity", "id type", "2 non-polymer")
    file.atom("ZN", "ZN", "B", ".", (0, 0, 0), element=30, entity="2")
    file.loop("_pdbx_struct_assembly_gen", "assembly_id oper_expression asym_id_list", "1 1,2 A,B")
    file.loop(*TWO_FOLD)
    file.loop("_struct_conn", PARTNERS, "1 metalc A ALA 1 1 N B ZN . 1 ZN")
    made = make(file.write(tmp_path), StructureOptions())
    assert made.labels == ["A", "B", "A"]
    assert made.attributes["filtered"]["clashing_chains"] == 1


def test_covalent_ligand_of_few_atoms_is_no_clash(tmp_path):
    file = peptide(CifFile(), "A", 5)
    file.loop("_entity", "id type", "2 non-polymer")
    first = file.atoms[0].split()
    pos = [float(value) for value in first[10:13]]
    file.atom("C", "ACE", "B", ".", (pos[0] - 1.35, pos[1], pos[2]), entity="2")
    file.atom("O", "ACE", "B", ".", (pos[0] - 2.6, pos[1], pos[2]), element=8, entity="2")
    file.loop("_struct_conn", PARTNERS, "1 covale A ALA 1 1 N B ACE . 1 C")
    assert make(file.write(tmp_path), StructureOptions()).labels == ["A", "B"]


def test_atoms_outside_the_definition_are_counted(tmp_path):
    file = peptide(CifFile(), "A", 4)
    file.atom("QQ", "ALA", "A", 2, (1, 1, 1))
    made = make(file.write(tmp_path), StructureOptions())
    assert made.attributes["filtered"]["atoms_outside_definition"] == 1
    assert np.isfinite(made.coords[:, 0]).sum() == 4 * 5


def test_unknown_ligands(tmp_path):
    file = peptide(CifFile(), "A", 4)
    file.loop("_entity", "id type", "2 non-polymer")
    file.atom("C1", "UNL", "B", ".", (0, 30, 0), entity="2").atom(
        "C2", "UNL", "B", ".", (1.5, 30, 0), entity="2"
    )
    path = file.write(tmp_path)
    made = make(path, StructureOptions())
    assert made.labels == ["A"]
    assert made.attributes["filtered"]["unknown_ligands"] == 1
    kept = make(path, NO_FILTERS)
    assert kept.labels == ["A", "B"]
    assert kept.own[0].atom_names == ("C1", "C2")


def test_nothing_left(tmp_path):
    file = CifFile().loop("_exptl", "entry_id method", "TEST 'X-RAY DIFFRACTION'").add("GOL", "A")
    with pytest.raises(StructureError, match=r"entry test.*crystallisation_aids 1") as error:
        make(file.write(tmp_path), StructureOptions())
    assert error.value.reason == "empty-after-filters"


def test_too_many_chains_counts_deposited_chains(tmp_path):
    file = peptide(peptide(CifFile(), "A", 4), "B", 4, at=(0, 40, 0), entity="2")
    file.loop("_pdbx_struct_assembly_gen", "assembly_id oper_expression asym_id_list", "1 1,2 A,B")
    file.loop(*TWO_FOLD)
    path = file.write(tmp_path)
    assert len(make(path, StructureOptions(max_polymer_chains=2)).labels) == 4
    with pytest.raises(StructureError) as error:
        make(path, StructureOptions(max_polymer_chains=1))
    assert error.value.reason == "too-many-chains"


def test_waters_and_hydrogens_are_counted(tmp_path):
    file = peptide(CifFile(), "A", 4)
    file.atom("O", "HOH", "W", ".", (0, 9, 0), element=8, entity="3").atom(
        "H1", "HOH", "W", ".", (0, 9, 1), element=1
    )
    file.atom("O", "DOD", "W", ".", (0, 19, 0), element=8, entity="3", auth=2)
    file.atom("HA", "ALA", "A", 1, (0, 1, 1), element=1)
    made = make(file.write(tmp_path))
    assert made.labels == ["A"]
    assert made.attributes["filtered"] == {"hydrogens": 1, "waters": 2}


@pytest.mark.parametrize("options", [{"clash_fraction": 0}, {"max_ca_gap": -1}, {"assembly": ""}])
def test_options_check_themselves(options):
    with pytest.raises(InputError, match=next(iter(options))):
        StructureOptions(**options)


def test_interfaces_equal_brute_force():
    rng = np.random.default_rng(3)
    coords = [rng.normal(rng.uniform(-25, 25, 3), 3, (rng.integers(0, 40), 3)) for _ in range(40)]
    wanted = [
        [i, j]
        for i in range(40)
        for j in range(i + 1, 40)
        if len(coords[i]) and len(coords[j]) and cdist(coords[i], coords[j]).min() <= 5
    ]
    assert interfaces(coords, 5.0).tolist() == wanted
    assert len(wanted) > 20
