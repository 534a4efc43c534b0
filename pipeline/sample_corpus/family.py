"""Families: a parent fold with a designed sequence, and members that share the fold and have diverged."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.random import Generator

from megafold.pipeline.sample_corpus.backbone import CA, Fold, grow_fold, neighbour_counts, vary_fold
from megafold.pipeline.sample_corpus.evolution import PROTEIN_LETTERS, encode, evolve_protein
from megafold.pipeline.sample_corpus.geometry import Coords
from megafold.pipeline.sample_corpus.seeds import generator

#: Order of secondary structure elements, shortest and longest fold, of the families of one span of entries.
PLANS: Final = (
    ("HE", 44, 62),
    ("EEH", 40, 58),
    ("H", 50, 80),
    ("HEE", 60, 90),
    ("E", 34, 46),
    ("HHE", 48, 70),
)
#: The pairs of letters that residues favour: (buried, exposed) by secondary structure.
_DESIGN: Final = {
    "H": ("AALLLIVMFWA", "EEKKRQADSN"),
    "E": ("VVIILFYAWC", "TTKRESQYV"),
    "L": ("LVAFPYMT", "DNSTPEKQGR"),
}
_TAGS: Final = ("", "", "GSHM", "MGS", "GPLGS")
_ALPHABET: Final = np.array(list(PROTEIN_LETTERS))


@dataclass(frozen=True, eq=False)
class Family:
    """A fold, the parent's sequence, and how fast each residue changes ([L], about 1 on average)."""

    name: str
    fold: Fold
    sequence: str
    rates: Coords


@dataclass(frozen=True, eq=False)
class Member:
    """A chain that shares a family's fold.

    ``columns`` holds, for each residue, the index of the family's residue it corresponds to, -1 for tags and
    insertions. ``backbone`` [L, 5, 3] is NaN where ``resolved`` is False.
    """

    family: Family
    sequence: str
    columns: tuple[int, ...]
    resolved: tuple[bool, ...]
    backbone: Coords

    @property
    def rates(self) -> Coords:
        """How fast each residue changes, [L]; tags and insertions fastest."""
        rates = self.family.rates
        return np.array([rates[column] if column >= 0 else 2.5 for column in self.columns])


@lru_cache(maxsize=64)
def family(seed: int, span: int, index: int) -> Family:
    """Family ``index`` of a span of entries."""
    rng = generator(seed, "family", span, index)
    kinds, shortest, longest = PLANS[index]
    fold = grow_fold(rng, kinds, int(rng.integers(shortest, longest + 1)))
    counts = neighbour_counts(fold.backbone)
    burial = np.clip((counts - 4) / 8, 0, 1)
    letters = [_design(rng, state, burial[i], fold.phi[i]) for i, state in enumerate(fold.structure)]
    loop = np.array([state == "L" for state in fold.structure])
    rates = 0.35 + 1.1 * (1 - burial) + 0.6 * loop
    return Family(
        name=f"family {span}.{index}", fold=fold, sequence="".join(letters), rates=rates / rates.mean()
    )


def _design(rng: Generator, state: str, burial: float, phi: float) -> str:
    if phi > 0:
        return "G" if phi > 65 or rng.random() < 0.5 else "N"
    buried, exposed = _DESIGN[state]
    letter = str(rng.choice(list(buried if rng.random() < burial else exposed)))
    # Proline fixes phi near -65 degrees; elsewhere its ring would not close onto the backbone.
    if letter == "P" and not -80 < phi < -50:
        letter = "S"
    return letter


def make_member(rng: Generator, parent: Family) -> Member:
    """A member of the family: fold varied, sequence diverged, ends and one loop changed.

    Residues can be without coordinates: expression tags, and a loop into which residues were inserted.
    """
    fold = vary_fold(rng, parent.fold)
    time = np.array([rng.uniform(0.15, 0.75)])
    evolved = evolve_protein(rng, encode(parent.sequence, PROTEIN_LETTERS)[None], parent.rates, time)[0]
    letters = [str(letter) for letter in _ALPHABET[evolved]]
    for i, letter in enumerate(letters):
        if fold.phi[i] > 0 and letter not in "GN":
            letters[i] = "G"
        if letter == "P" and not -80 < fold.phi[i] < -50:
            letters[i] = "A"
    first, last = int(rng.integers(0, 3)), len(fold) - int(rng.integers(0, 3))
    parts = _loosen(rng, fold, [(letters[i], i, True) for i in range(first, last)])
    nowhere = np.full((5, 3), np.nan)
    return Member(
        family=parent,
        sequence="".join(letter for letter, _, _ in parts),
        columns=tuple(column for _, column, _ in parts),
        resolved=tuple(resolved for _, _, resolved in parts),
        backbone=np.stack([fold.backbone[column] if resolved else nowhere for _, column, resolved in parts]),
    )


def _loosen(rng: Generator, fold: Fold, parts: list[tuple[str, int, bool]]) -> list[tuple[str, int, bool]]:
    """Add a tag and a disordered insertion: residues of the sequence without coordinates."""
    sites = [
        k
        for k in range(4, len(parts) - 5)
        if "L" in fold.structure[parts[k][1]]
        # The missing stretch is spanned by CA atoms at most 9.5 Å apart.
        and np.linalg.norm(fold.backbone[parts[k - 1][1], CA] - fold.backbone[parts[k + 2][1], CA]) < 9.5
    ]
    if sites and rng.random() < 0.5:
        k = int(rng.choice(sites))
        inserted = [(str(rng.choice(list("GSNDEKTPA"))), -1, False) for _ in range(int(rng.integers(2, 5)))]
        loose = [(letter, column, False) for letter, column, _ in parts[k : k + 2]]
        parts = parts[:k] + loose[:1] + inserted + loose[1:] + parts[k + 2 :]
    tag = [(letter, -1, False) for letter in str(rng.choice(_TAGS))]
    tail = [(letter, -1, False) for letter in "LEHHHHHH"] if rng.random() < 0.15 else []
    return tag + parts + tail
