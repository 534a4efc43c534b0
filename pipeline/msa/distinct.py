"""Which rows of an alignment are kept: rows that equal an earlier one of the same species go.

Equal rows of different species stay: each can pair with rows of its own species.
"""

import hashlib
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.msa.alignment import Alignment, Insertions
from megafold.pipeline.msa.species import RowSpecies
from megafold.pipeline.schema import GAP

_ROW_BLOCK: Final = 2048
_WORD_BYTES: Final = 8


@dataclass(frozen=True, kw_only=True)
class DistinctRows:
    """The rows of an alignment that are kept, without the query.

    ``codes`` uint8 [N_all, N_residue] hold all rows of the file, of which ``row`` int64 [N_row] are kept:
    they are not copied. ``insertions`` and ``species`` number the kept ones. ``n_empty`` counts rows that
    had no residue.
    """

    codes: NDArray[np.uint8]
    row: NDArray[np.int64]
    insertions: Insertions
    species: RowSpecies
    n_empty: int


def distinct_rows(alignment: Alignment, species: RowSpecies) -> DistinctRows:
    """Drop the query, rows without residues, and duplicates; ``species`` names the query none."""
    codes, n_row = alignment.codes, len(alignment.codes)
    first = first_equal_rows(codes)
    empty = np.zeros(n_row, bool)
    candidates = np.unique(first)
    for start in range(0, len(candidates), _ROW_BLOCK):
        block = candidates[start : start + _ROW_BLOCK]
        empty[block] = (codes[block] == GAP).all(axis=1)
    empty = empty[first]
    # A row is known by the first one that equals it, and its species.
    key = first * (len(species.names) + 1) + (species.index + 1)
    kept = np.zeros(n_row, bool)
    kept[np.unique(key, return_index=True)[1]] = True
    kept &= ~empty
    kept[0] = False
    new_row = np.cumsum(kept, dtype=np.int32) - np.int32(1)
    row, column, count = alignment.insertions.row, alignment.insertions.column, alignment.insertions.count
    inside = kept[row]
    return DistinctRows(
        codes=codes,
        row=np.flatnonzero(kept),
        insertions=Insertions(row=new_row[row[inside]], column=column[inside], count=count[inside]),
        species=RowSpecies(names=species.names, index=species.index[kept]),
        n_empty=int(empty.sum()),
    )


def first_equal_rows(codes: NDArray[np.uint8]) -> NDArray[np.int64]:
    """For each row the first one that equals it: int64 [N_row].

    Rows are compared by a hash of 64 bits, then the equal ones letter by letter, so that the answer is exact.
    """
    _, index, inverse = np.unique(_row_hashes(codes), return_index=True, return_inverse=True)
    first: NDArray[np.int64] = index[inverse]
    repeats = np.flatnonzero(first != np.arange(len(first)))
    for start in range(0, len(repeats), _ROW_BLOCK):
        block = repeats[start : start + _ROW_BLOCK]
        if (codes[block] != codes[first[block]]).any():
            return _first_equal_by_letters(codes)
    return first


def _row_hashes(codes: NDArray[np.uint8]) -> NDArray[np.uint64]:
    """Sums of the rows' 8-byte words times fixed odd random numbers, modulo 2**64."""
    n_row, width = codes.shape
    n_word = -(-width // _WORD_BYTES)
    weights = np.frombuffer(hashlib.shake_128(b"weights").digest(n_word * _WORD_BYTES), "<u8") | np.uint64(1)
    padded = np.zeros((min(n_row, _ROW_BLOCK), n_word * _WORD_BYTES), np.uint8)
    hashes = np.empty(n_row, np.uint64)
    for start in range(0, n_row, _ROW_BLOCK):
        block = codes[start : start + _ROW_BLOCK]
        padded[: len(block), :width] = block
        words = padded[: len(block)].view(np.uint64)
        words = words ^ (words >> np.uint64(29))  # the product's low bits should depend on all letters
        hashes[start : start + len(block)] = words @ weights
    return hashes


def _first_equal_by_letters(codes: NDArray[np.uint8]) -> NDArray[np.int64]:
    """As :func:`first_equal_rows`, slower: for rows whose hashes collide."""
    first: dict[bytes, int] = {}
    return np.array([first.setdefault(row.tobytes(), index) for index, row in enumerate(codes)], np.int64)
