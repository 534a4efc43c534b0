"""Sequences that evolve: substitutions, insertions and deletions along a simple tree."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from megafold.pipeline.sample_corpus.geometry import Coords

PROTEIN_LETTERS: Final = "ACDEFGHIKLMNPQRSTVWY"
RNA_LETTERS: Final = "ACGU"
#: Background frequencies of the amino acids, as BLOSUM62 was derived with (Henikoff & Henikoff 1992).
_BACKGROUND: Final = dict(
    zip(
        "ARNDCQEGHILKMFPSTWYV",
        (
            0.074, 0.052, 0.045, 0.054, 0.025, 0.034, 0.054, 0.074, 0.026, 0.068,
            0.099, 0.058, 0.025, 0.047, 0.039, 0.057, 0.051, 0.013, 0.032, 0.073,
        ),
        strict=True,
    )
)  # fmt: skip
_PAIRS: Final = ("AU", "UA", "GC", "CG", "GU", "UG")


@dataclass(frozen=True)
class Homolog:
    """One homolog, aligned to the query.

    ``aligned`` has one character for each residue of the query, ``-`` where the homolog has none.
    ``insertions`` maps a position p to the residues that come before the query's residue p (0-based).
    """

    aligned: str
    insertions: dict[int, str] = field(default_factory=dict)

    @property
    def residue_count(self) -> int:
        """Residues of the homolog."""
        return len(self.aligned) - self.aligned.count("-") + sum(map(len, self.insertions.values()))


@lru_cache(maxsize=1)
def _substitution_cdf() -> Coords:
    """[20, 20] cumulative probabilities of what replaces an amino acid, itself excluded.

    BLOSUM62 holds log-odds in half bits: q(a, b) is proportional to p(a) p(b) 2^(S/2).
    """
    from biotite.sequence.align import SubstitutionMatrix

    matrix = SubstitutionMatrix.std_protein_matrix()
    order = [matrix.get_alphabet1().encode(letter) for letter in PROTEIN_LETTERS]
    scores = matrix.score_matrix()[np.ix_(order, order)].astype(float)
    frequencies = np.array([_BACKGROUND[letter] for letter in PROTEIN_LETTERS])
    probabilities = frequencies * 2 ** (scores / 2)
    np.fill_diagonal(probabilities, 0)
    return np.cumsum(probabilities / probabilities.sum(axis=1, keepdims=True), axis=1)


def encode(sequence: str, letters: str) -> NDArray[np.int64]:
    """Indices into ``letters``, [L]."""
    return np.array([letters.index(letter) for letter in sequence], dtype=np.int64)


def evolve_protein(
    rng: Generator, sequences: NDArray[np.int64], rates: Coords, time: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Substitute residues [N, L] of each row for its ``time`` [N]; ``rates`` [L] are relative to 1."""
    changed = rng.random(sequences.shape) < 1 - np.exp(-time[:, None] * rates)
    draws = rng.random(sequences.shape)
    replaced = (draws[..., None] > _substitution_cdf()[sequences]).sum(axis=-1)
    return np.where(changed, np.minimum(replaced, len(PROTEIN_LETTERS) - 1), sequences)


def evolve_rna(
    rng: Generator, sequences: NDArray[np.int64], pairs: list[tuple[int, int]], time: NDArray[np.float64]
) -> NDArray[np.int64]:
    """Substitute nucleotides [N, L]; columns that pair change together and stay a pair."""
    count = len(sequences)
    changed = rng.random(sequences.shape) < 1 - np.exp(-time[:, None])
    result = np.where(changed, rng.integers(4, size=sequences.shape), sequences)
    codes = np.array([[RNA_LETTERS.index(letter) for letter in pair] for pair in _PAIRS])
    for i, j in pairs:
        drawn = codes[rng.choice(len(codes), count, p=[0.22, 0.22, 0.22, 0.22, 0.06, 0.06])]
        replace = changed[:, i]
        result[:, i] = np.where(replace, drawn[:, 0], sequences[:, i])
        result[:, j] = np.where(replace, drawn[:, 1], sequences[:, j])
    return result


def homologs(
    rng: Generator,
    sequence: str,
    rates: Coords,
    count: int,
    pairs: list[tuple[int, int]] | None = None,
) -> list[Homolog]:
    """``count`` homologs of a protein, or of an RNA where base ``pairs`` are given (may be an empty list).

    The query and a few ancestors that diverged from it are the roots; every homolog evolves from one of them.
    Rows lose and gain residues where ``rates`` [L] are high, and one in seven is a fragment.
    """
    letters = PROTEIN_LETTERS if pairs is None else RNA_LETTERS
    query = encode(sequence, letters)

    def evolve(rows: NDArray[np.int64], time: NDArray[np.float64]) -> NDArray[np.int64]:
        return evolve_protein(rng, rows, rates, time) if pairs is None else evolve_rna(rng, rows, pairs, time)

    scale = 1.0 if pairs is None else 0.35
    ancestors = evolve(np.tile(query, (4, 1)), scale * np.array([0.0, 0.25, 0.45, 0.7]))
    rows = evolve(ancestors[rng.integers(4, size=count)], scale * rng.uniform(0.05, 0.9, count))
    indels = _Indels(rng, rates, count)
    return [_with_indels(rng, row, indels, k, letters) for k, row in enumerate(np.array(list(letters))[rows])]


class _Indels:
    """Where rows [count] lose and gain residues: drawn for all rows at once."""

    def __init__(self, rng: Generator, rates: Coords, count: int) -> None:
        length, likely = len(rates), np.cumsum(rates / rates.sum())

        def where() -> NDArray[np.int64]:
            return np.minimum(np.searchsorted(likely, rng.random((count, 2))), length - 1)

        self.deletions = rng.choice(3, count, p=[0.5, 0.3, 0.2])
        self.deleted, self.deleted_sizes = where(), rng.integers(1, 5, (count, 2))
        self.insertions = rng.choice(3, count, p=[0.55, 0.3, 0.15])
        self.inserted, self.inserted_sizes = where(), rng.integers(1, 7, (count, 2))
        self.is_fragment = rng.random(count) < 0.15


def _with_indels(rng: Generator, row: NDArray[np.str_], indels: _Indels, k: int, letters: str) -> Homolog:
    """Homolog ``k`` with its deletions, insertions, and ends cut off where it is a fragment."""
    length = len(row)
    for start, size in zip(indels.deleted[k], indels.deleted_sizes[k][: indels.deletions[k]], strict=False):
        row[start : start + size] = "-"
    if indels.is_fragment[k]:
        kept = int(length * rng.uniform(0.35, 0.75))
        first = int(rng.integers(0, length - kept + 1))
        row[:first] = "-"
        row[first + kept :] = "-"
    present = np.flatnonzero(row != "-")
    if len(present) == 0:
        row[0] = letters[0]
        present = np.array([0])
    insertions: dict[int, str] = {}
    for place, size in zip(
        indels.inserted[k], indels.inserted_sizes[k][: indels.insertions[k]], strict=False
    ):
        # An insertion lies between aligned residues: local alignments do not begin or end with one.
        if present[0] < place <= present[-1]:
            insertions[int(place)] = "".join(letters[i] for i in rng.integers(len(letters), size=size))
    return Homolog(aligned="".join(row), insertions=insertions)
