"""Alternate locations: one consistent conformer.

Neighbouring residues whose alternates share a letter were modelled together: taking A of one and B of the
next would tear the bond between them (or the side chains into each other). So the letters of a chain are
chosen together: first as few changes of letter between neighbours as there can be, then the highest mean
occupancy, then the letter that comes first. For a run of residues that all have the same letters this is: one
letter for the run, that of the highest mean occupancy, ties to the first.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

#: Occupancies are compared in whole thousandths, so that ties are ties on every machine.
_SCALE: Final = 1000


def mean_occupancies(alt: NDArray[np.int32], occupancy: NDArray[np.float64]) -> dict[int, int]:
    """Mean occupancy of each alternate of one residue, in thousandths, over the atoms of its letter."""
    return {
        letter: round(float(occupancy[alt == letter].mean()) * _SCALE)
        for letter in np.unique(alt[alt > 0]).tolist()
    }


def choose_letters(residues: Sequence[dict[int, int]], follows: Sequence[bool]) -> list[int]:
    """The alternate to keep of each residue of a chain.

    ``residues``: for each residue its alternates and their mean occupancies, empty for none. ``follows``:
    whether the residue is the neighbour of the one before it. Returns 0 for residues without alternates.
    """
    chosen = [0] * len(residues)
    start = 0
    while start < len(residues):
        if not residues[start]:
            start += 1
            continue
        end = start + 1
        while end < len(residues) and residues[end] and follows[end]:
            end += 1
        chosen[start:end] = _best_path(residues[start:end])
        start = end
    return chosen


def _best_path(residues: Sequence[dict[int, int]]) -> list[int]:
    """Fewest changes of letter, then most occupancy, then the first letters: dynamic programming along a
    run."""
    # Scores compare as tuples (changes, -occupancy); among equals `min` keeps the first letter.
    scores: list[dict[int, tuple[int, int]]] = []
    for position in range(len(residues) - 1, -1, -1):
        here = {}
        for letter, occupancy in sorted(residues[position].items()):
            after = _after(letter, scores[-1]) if scores else (0, 0)
            here[letter] = (after[0], after[1] - occupancy)
        scores.append(here)
    scores.reverse()
    path: list[int] = []
    for here in scores:
        candidates = [
            (here[letter][0] + (bool(path) and letter != path[-1]), here[letter][1], letter)
            for letter in here
        ]
        path.append(min(candidates)[2])
    return path


def _after(letter: int, following: dict[int, tuple[int, int]]) -> tuple[int, int]:
    return min((changes + (other != letter), occupancy) for other, (changes, occupancy) in following.items())
