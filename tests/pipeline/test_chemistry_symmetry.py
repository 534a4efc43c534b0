"""Automorphisms: group orders known from chemistry, and every row checked against the graph."""

import dataclasses

import numpy as np
import pytest

from megafold.pipeline.chemistry import Component, load_dictionary
from megafold.pipeline.chemistry.symmetry import automorphisms


@pytest.fixture(scope="module")
def dictionary():
    return load_dictionary()


@pytest.mark.parametrize(
    ("code", "order"),
    [
        ("ZN", 1),
        ("UNL", 1),
        ("GLY", 2),  # O and OXT
        ("ASP", 4),  # OD1 and OD2 as well
        ("PHE", 4),  # ring flip
        ("TRP", 2),
        ("HIS", 2),
        ("ARG", 4),  # NH1 and NH2, by resonance
        ("VAL", 4),
        ("A", 6),  # OP1, OP2 and the leaving OP3
        ("ATP", 24),  # 3! on PG, 2 on PB, 2 on PA
        ("ACT", 2),
        ("SO4", 24),
        ("NO3", 6),
        ("TRS", 6),
        ("GOL", 2),
        ("BNZ", 12),
        ("BME", 1),
        ("HEM", 4),  # two carboxylates; vinyls and methyls pin the ring
        ("TLA", 8),  # L-tartrate: two carboxylates and the two-fold axis
    ],
)
def test_the_group_has_the_order_that_chemistry_says(dictionary, code, order):
    rows, capped = automorphisms(dictionary.get(code))
    assert len(rows) == order
    assert not capped


def test_the_swapped_atoms_of_aspartate(dictionary):
    component = dictionary.get("ASP")
    rows, _ = automorphisms(component)
    changed = {
        tuple(component.atom_names[atom] for atom, image in zip(rows[0], row, strict=True) if atom != image)
        for row in rows
    }
    assert changed == {(), ("OD1", "OD2"), ("O", "OXT"), ("O", "OD1", "OD2", "OXT")}


@pytest.mark.parametrize("code", ["ASP", "ATP", "HEM", "60C", "IHP", "SF4", "JSG", "CLA"])
def test_rows_are_distinct_permutations_that_keep_elements_and_bonds(dictionary, code):
    component = dictionary.get(code)
    rows, capped = automorphisms(component)
    heavy = np.flatnonzero(component.elements != 1)
    assert rows.dtype == np.int16
    assert rows[0].tolist() == heavy.tolist()
    assert len(np.unique(rows, axis=0)) == len(rows)
    assert capped == (len(rows) == 1000)
    bonded = np.zeros((len(component), len(component)), bool)
    bonded[tuple(component.bonds.T)] = bonded[tuple(component.bonds.T[::-1])] = True
    for row in rows[:: max(1, len(rows) // 50)]:
        assert sorted(row.tolist()) == heavy.tolist()
        assert (component.elements[row] == component.elements[heavy]).all()
        assert (bonded[np.ix_(row, row)] == bonded[np.ix_(heavy, heavy)]).all()


def test_stereocentres_of_opposite_hand_are_not_swapped():
    """The two centres of a meso compound are mirror images: no rotation of the molecule swaps them."""
    atoms = Component.from_atoms(
        "MES",
        ["C1", "C2", "O1", "O2", "F1", "F2"],
        [6, 6, 8, 8, 9, 9],
        bonds=[(0, 1), (0, 2), (1, 3), (0, 4), (1, 5)],
    )
    assert len(automorphisms(atoms)[0]) == 2
    meso = dataclasses.replace(atoms, stereo=np.array([1, 2, 0, 0, 0, 0]))
    assert len(automorphisms(meso)[0]) == 1


def test_a_double_bond_that_does_not_resonate_tells_its_ends_apart():
    """Isoprene-like: a vinyl and an ethyl on one carbon."""
    atoms = Component.from_atoms(
        "LIG",
        ["C0", "C1", "C2", "C3", "C4"],
        [6] * 5,
        bonds=[(0, 1), (1, 2), (0, 3), (3, 4)],
        bond_orders=[1, 2, 1, 1],
    )
    assert len(automorphisms(atoms)[0]) == 1


def test_an_oxygen_with_its_hydrogen_is_none_without():
    """Two single bonds and no charge do not resonate: the hydrogen tells the oxygens apart."""
    names, elements = ["C", "O1", "O2", "H1"], [6, 8, 8, 1]
    bonds = [(0, 1), (0, 2), (1, 3)]
    atoms = Component.from_atoms("LIG", names, elements, bonds=bonds, bond_orders=[1, 1, 1])
    assert len(automorphisms(atoms)[0]) == 1
    # With a double bond or a charge it is an acid.
    acid = Component.from_atoms("LIG", names, elements, bonds=bonds, bond_orders=[1, 2, 1])
    assert len(automorphisms(acid)[0]) == 2
    ion = Component.from_atoms(
        "LIG", names, elements, bonds=bonds, bond_orders=[1, 1, 1], charges=[0, 0, -1, 0]
    )
    assert len(automorphisms(ion)[0]) == 2


def test_hydrogen_alone_has_no_atoms_to_swap():
    rows, capped = automorphisms(Component.from_atoms("LIG", ["H1", "H2"], [1, 1], bonds=[(0, 1)]))
    assert (rows.shape, capped) == ((1, 0), False)


def test_hydrogens_may_come_first():
    """Ethanediol's halves, drawn from its hydroxyl's hydrogens on."""
    names, elements = ["HO1", "HO2", "O1", "O2", "C1", "C2"], [1, 1, 8, 8, 6, 6]
    bonds = [(0, 2), (1, 3), (2, 4), (3, 5), (4, 5)]
    rows, _ = automorphisms(Component.from_atoms("LIG", names, elements, bonds=bonds))
    assert rows.tolist() == [[2, 3, 4, 5], [3, 2, 5, 4]]


def test_the_cap_cuts_and_says_so(dictionary):
    rows, capped = automorphisms(dictionary.get("ATP"), cap=10)
    assert (len(rows), capped) == (10, True)
    rows, capped = automorphisms(dictionary.get("ATP"), cap=24)
    assert (len(rows), capped) == (24, False)


@pytest.mark.parametrize("sides", [(30, 30), (12, 40)])
def test_symmetric_giants_do_not_hang(sides):
    """A torus of carbons: one colour, hundreds of atoms."""
    width, height = sides
    number = np.arange(width * height).reshape(width, height)
    bonds = [
        pair
        for shift in (0, 1)
        for pair in zip(number.ravel(), np.roll(number, 1, axis=shift).ravel(), strict=True)
    ]
    names = [f"C{index}" for index in range(width * height)]
    rows, capped = automorphisms(Component.from_atoms("LIG", names, [6] * len(names), bonds=bonds))
    assert rows[0].tolist() == list(range(len(names)))
    assert capped
