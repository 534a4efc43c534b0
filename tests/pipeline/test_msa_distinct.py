"""Equal rows against a dictionary of whole rows, also where all hashes collide."""

import numpy as np
import pytest

from megafold.pipeline.msa import distinct
from megafold.pipeline.msa.alignment import Alignment, Insertions
from megafold.pipeline.msa.distinct import distinct_rows, first_equal_rows
from megafold.pipeline.msa.species import RowSpecies
from megafold.pipeline.schema import GAP


def by_dictionary(codes):
    first: dict[tuple, int] = {}
    return [first.setdefault(tuple(row), index) for index, row in enumerate(codes.tolist())]


def collide(codes):
    return np.zeros(len(codes), np.uint64)


@pytest.mark.parametrize("width", [1, 7, 8, 9, 40])
@pytest.mark.parametrize("n_row", [1, 2, 5000])
@pytest.mark.parametrize("hashes", [None, collide])
def test_first_equal_row(monkeypatch, width, n_row, hashes):
    if hashes is not None:
        monkeypatch.setattr(distinct, "_row_hashes", hashes)
    rng = np.random.default_rng(width * n_row)
    codes = rng.integers(0, 32, (40, width)).astype(np.uint8)[rng.integers(0, 40, n_row)]
    assert first_equal_rows(codes).tolist() == by_dictionary(codes)
    wide = np.full((n_row, 2 * width), 7, np.uint8)
    wide[:, width:] = codes
    assert first_equal_rows(wide[:, width:]).tolist() == by_dictionary(codes)  # a view of other rows


def test_rows_that_differ_in_one_letter_hash_apart():
    """Each of the 64 letters of a row changed to each other class: no two rows hash alike."""
    rows = np.full((64 * 32, 64), 3, np.uint8)
    index = np.arange(len(rows))
    rows[index, index // 32] = index % 32
    assert len(np.unique(distinct._row_hashes(rows))) == len(np.unique(rows, axis=0))


def test_duplicates_insertions_and_species_by_hand():
    rows = ["MK", "MR", "--", "MR", "MR", "MK", "MK", "MR"]
    codes = np.array([[GAP if c == "-" else ord(c) - 65 for c in row] for row in rows], np.uint8)
    species = RowSpecies.of(["", "x", "x", "x", "y", "", "x", ""], 8)
    inserted = Insertions(row=np.array([1, 3, 4]), column=np.array([0, 1, 1]), count=np.array([1, 2, 3]))
    found = distinct_rows(Alignment(query="MK", headers=[b""] * 8, codes=codes, insertions=inserted), species)
    assert found.row.tolist() == [1, 4, 6, 7]
    assert [found.species.names[k] if k >= 0 else "" for k in found.species.index] == ["x", "y", "x", ""]
    assert found.insertions.row.tolist() == [0, 1]
    assert found.insertions.count.tolist() == [1, 3]
    assert found.n_empty == 1
