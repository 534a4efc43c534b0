"""Leaving atoms, by chemistry: what a bond costs, in components whose definitions mark its groups or not."""

from dataclasses import replace

import numpy as np
import pytest

from tests.pipeline.structure_files import NO_FILTERS, PARTNERS, CifFile, definition, make

TOLD_ALONE = replace(NO_FILTERS, infer_bonds=False)


def heavy_names(code):
    component = definition(code)
    return [name for name, heavy in zip(component.atom_names, component.heavy, strict=True) if heavy]


def bonded(code, atom, to, *, absent=(), times=1):
    """A peptide GLY-X-GLY and a ligand of which one atom is bonded to X, ``times`` over."""
    residue, name = to
    codes = ["GLY", *[residue] * times, "GLY"]
    file = CifFile().polymer(" ".join(codes))
    for seq in range(2, 2 + times):
        file.add(residue, "A", seq, at=(9 * seq, 0, 0))
    file.loop("_entity", "id type", "2 non-polymer")
    component = definition(code)
    shift = np.array((18, 30, 0)) - component.ideal_pos[component.atom_index[atom]]
    file.add(code, "B", at=shift, entity="2", auth=201, only=set(heavy_names(code)) - set(absent))
    rows = [
        f"{row} covale A {residue} {row + 1} {row + 1} {name} B {code} . 201 {atom}"
        for row in range(1, 1 + times)
    ]
    return file.loop("_struct_conn", PARTNERS, *rows)


def ligand(made):
    """Names of the last chain's atoms, and how many atoms with coordinates have left."""
    return made.names(len(made.codes) - 1), made.attributes["filtered"].get("leaving_atoms", 0)


@pytest.mark.parametrize(
    ("code", "atom", "to", "absent", "gone", "counted"),
    [
        # The spin label MTSL at a cysteine has lost methanesulfinate, all of it.
        ("MTN", "S1", ("CYS", "SG"), ("S2", "O2", "O3", "C12"), ("S2", "O2", "O3", "C12"), 0),
        ("MTN", "S1", ("CYS", "SG"), (), ("S2", "O2", "O3", "C12"), 4),
        # The bisulfite of a protease's inhibitor.
        ("04F", "C21", ("CYS", "SG"), ("O1",), ("S1", "O1", "O2", "O3"), 3),
        # Pyridoxal's aldehyde oxygen, with a Schiff base to lysine.
        ("PLP", "C4A", ("LYS", "NZ"), ("O4A",), ("O4A",), 0),
        # The anomeric oxygen of an N-glycan, and not the one of C4.
        ("NAG", "C1", ("ASN", "ND2"), ("O1", "O4"), ("O1",), 0),
        # A bond at another atom than theirs costs nothing.
        ("NAG", "C6", ("SER", "OG"), (), (), 0),
        ("PLP", "O3", ("SER", "OG"), ("O4A",), (), 0),
        # Phosphate at a histidine: its oxygens are unmarked, and the one without coordinates has left.
        ("PO4", "P", ("HIS", "NE2"), ("O3",), ("O3",), 0),
        ("PO4", "P", ("HIS", "NE2"), ("O2", "O4"), ("O2",), 0),
        ("PO4", "P", ("HIS", "NE2"), (), (), 0),
        # Where the bonded atom is not modelled nothing tells.
        ("PO4", "P", ("HIS", "NE2"), ("P", "O3"), (), 0),
        # A carbon at the end of its bond has not left.
        ("ACE", "C", ("LYS", "NZ"), ("CH3",), (), 0),
    ],
)  # fmt: skip
def test_what_a_bond_costs(tmp_path, code, atom, to, absent, gone, counted):
    made = make(bonded(code, atom, to, absent=absent).write(tmp_path), TOLD_ALONE)
    assert len(made.bonds()) == 1
    assert ligand(made) == ([name for name in heavy_names(code) if name not in gone], counted)


@pytest.mark.parametrize(
    ("absent", "times", "gone", "counted"),
    [
        ((), 1, ("O4",), 1),  # the first of equals
        (("O5",), 1, ("O5",), 0),  # rather the one without coordinates
        (("O4", "O5"), 1, ("O4",), 0),
        (("O5",), 2, ("O4", "O5"), 1),  # one for each bond
    ],
)
def test_one_group_leaves_for_each_bond(tmp_path, absent, times, gone, counted):
    """The hydrate of an aldehyde: two hydroxyls of one carbon are marked."""
    made = make(bonded("DO2", "CD", ("LYS", "NZ"), absent=absent, times=times).write(tmp_path), TOLD_ALONE)
    assert len(made.bonds()) == times
    assert ligand(made) == ([name for name in heavy_names("DO2") if name not in gone], counted)


def test_termini(tmp_path):
    """OXT is the last residue's, OP3 the first one's; the marks of a gamma peptide are where it is linked."""
    file = CifFile().polymer("GGL CYS GLY").polymer("DA DC DG", entity="2", kind="polydeoxyribonucleotide")
    for seq, code in enumerate(("GGL", "CYS", "GLY"), 1):
        file.add(code, "A", seq, at=(9 * seq, 0, 0))
    for seq, code in enumerate(("DA", "DC", "DG"), 1):
        file.add(code, "B", seq, at=(9 * seq, 40, 0), entity="2")
    made = make(file.write(tmp_path), TOLD_ALONE)
    marked = {"OE2", "OXT", "OP3"}
    assert [sorted(marked.intersection(made.names(residue))) for residue in range(6)] == [
        ["OXT"],  # of glutathione's glutamate: its alpha carboxylate is free
        [],
        ["OXT"],
        ["OP3"],
        [],
        [],
    ]


def test_a_marked_atom_with_coordinates_stays_within_a_polymer(tmp_path):
    """The end of a fragment that was modelled as one: the atom is there."""
    file = CifFile().polymer("ALA ALA ALA")
    for seq in (1, 2, 3):
        file.add("ALA", "A", seq, at=(9 * seq, 0, 0), only=set(heavy_names("ALA")) if seq == 2 else None)
    made = make(file.write(tmp_path), TOLD_ALONE)
    assert ["OXT" in made.names(residue) for residue in range(3)] == [False, True, True]
    assert "leaving_atoms" not in made.attributes["filtered"]
