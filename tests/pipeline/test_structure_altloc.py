"""Alternate locations: one consistent conformer."""

import itertools

import numpy as np
import pytest

from megafold.pipeline.structure.altloc import choose_letters, mean_occupancies
from tests.pipeline.structure_files import CifFile, make


def exhaustive(residues):
    """Every path: fewest changes, most occupancy, first letters."""
    paths = itertools.product(*(sorted(residue) for residue in residues))
    return list(
        min(
            paths,
            key=lambda path: (
                sum(a != b for a, b in itertools.pairwise(path)),
                -sum(residue[letter] for residue, letter in zip(residues, path, strict=True)),
                path,
            ),
        )
    )


def test_choice_equals_exhaustive_search():
    rng = np.random.default_rng(7)
    for _ in range(300):
        residues = [
            {int(k): int(rng.integers(0, 5)) * 100 for k in rng.permutation(4)[: rng.integers(1, 4)] + 1}
            for _ in range(rng.integers(1, 6))
        ]
        follows = [False] + [True] * (len(residues) - 1)
        assert choose_letters(residues, follows) == exhaustive(residues)


@pytest.mark.parametrize(
    ("residues", "follows", "wanted"),
    [
        ([{1: 500, 2: 500}], [False], [1]),  # a tie: the first letter
        ([{1: 600, 2: 400}, {1: 300, 2: 700}], [False, True], [2, 2]),  # means over the run: .45, .55
        ([{1: 600, 2: 400}, {1: 300, 2: 700}], [False, False], [1, 2]),  # no neighbours
        ([{1: 600, 2: 400}, {}, {1: 300, 2: 700}], [False, True, True], [1, 0, 2]),  # two runs
        ([{1: 500, 2: 500}, {2: 500, 3: 500}], [False, True], [2, 2]),  # the letter they share
    ],
)
def test_runs(residues, follows, wanted):
    assert choose_letters(residues, follows) == wanted


def test_mean_occupancies():
    alt = np.array([0, 1, 1, 2], np.int32)
    assert mean_occupancies(alt, np.array([1.0, 0.2, 0.4, 0.7])) == {1: 300, 2: 700}


def two_residues(tmp_path, first, second):
    """ALA-SER with alternates 1.33 Å apart in each conformer, the conformers 3 Å from each other."""
    file = CifFile().polymer("ALA SER")
    names = ("N", "CA", "C", "O", "CB")
    for seq, code, occupancies in ((1, "ALA", first), (2, "SER", second)):
        for letter, occupancy in occupancies.items():
            for index, name in enumerate(names):
                # C of the first residue at x = 0, N of the second at x = 1.33.
                x = {1: -1.5 * abs(2 - index), 2: 1.33 + 1.5 * index}[seq]
                pos = (x, 3.0 * "AB".index(letter), 0.5 * index)
                file.atom(name, code, "A", seq, pos, alt=letter, occ=occupancy)
    return make(file.write(tmp_path))


@pytest.mark.parametrize(
    ("first", "second", "letter"),
    [
        ({"A": 0.6, "B": 0.4}, {"A": 0.3, "B": 0.7}, "B"),
        ({"A": 0.7, "B": 0.3}, {"A": 0.4, "B": 0.6}, "A"),
        ({"A": 0.5, "B": 0.5}, {"A": 0.5, "B": 0.5}, "A"),
        ({"B": 0.5, "A": 0.5}, {"B": 0.5, "A": 0.5}, "A"),  # the file's order does not matter
    ],
)
def test_backbone_stays_intact(tmp_path, first, second, letter):
    made = two_residues(tmp_path, first, second)
    carbon, nitrogen = made.coords[made.atom(0, 1, "C")], made.coords[made.atom(0, 2, "N")]
    assert carbon[1] == nitrogen[1] == 3.0 * "AB".index(letter)
    assert abs(carbon[0] - nitrogen[0]) == pytest.approx(1.33)
    assert made.attributes["filtered"]["alternate_locations"] == 10


def test_atoms_without_letter_stay_and_missing_ones_are_not_borrowed(tmp_path):
    file = CifFile().polymer("SER ALA")
    for name in ("N", "CA", "C", "O"):
        file.atom(name, "SER", "A", 1, (0, 0, 0))
    file.atom("CB", "SER", "A", 1, (1, 0, 0), alt="A", occ=0.6)
    file.atom("CB", "SER", "A", 1, (2, 0, 0), alt="B", occ=0.4)
    file.atom("OG", "SER", "A", 1, (3, 0, 0), alt="B", occ=0.4)
    made = make(file.write(tmp_path))
    assert made.coords[made.atom(0, 1, "CB"), 0] == 1
    assert np.isnan(made.coords[made.atom(0, 1, "OG")]).all()
    assert made.coords[made.atom(0, 1, "CA"), 0] == 0


def test_microheterogeneity_keeps_the_higher_occupancy(tmp_path):
    file = CifFile().polymer("GLY SER GLY")
    file.loop("_entity_poly_seq", "entity_id num mon_id", "1 2 THR")
    file.add("GLY", "A", 1).add("GLY", "A", 3, at=(8, 0, 0))
    file.add("SER", "A", 2, at=(4, 0, 0), alt="A", occ=0.3)
    file.add("THR", "A", 2, at=(4, 0, 0), alt="B", occ=0.7)
    made = make(file.write(tmp_path))
    assert made.codes == ["GLY", "THR", "GLY"]
    assert made.attributes["entities"][0]["sequence"] == "GTG"
    assert any("SER/THR share a position; THR is used" in text for text in made.attributes["warnings"])
    assert made.attributes["filtered"] == {"alternate_locations": 6}  # of SER
