"""DNA and RNA double helices: bases placed by helical parameters, one sugar and phosphate for all of them.

The base pair's reference frame is the standard one (Olson et al., J. Mol. Biol. 313, 229, 2001): x towards
the major groove, y along the pair's long axis, z along the 5'-3' direction of the first strand. The second
strand is the first turned by 180 degrees about x.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Final

import numpy as np
from numpy.random import Generator

from megafold.pipeline.sample_corpus.geometry import (
    Coords,
    bond_angle,
    cross,
    local_frame,
    place_atom,
    rotation_about,
    unit,
)
from megafold.pipeline.sample_corpus.model import Residue
from megafold.pipeline.sample_corpus.monomers import monomer

COMPLEMENT: Final = {"A": "U", "U": "A", "G": "C", "C": "G", "DA": "DT", "DT": "DA", "DG": "DC", "DC": "DG"}
_X, _Z = np.array([1.0, 0.0, 0.0]), np.array([0.0, 0.0, 1.0])
#: C1', N9 and C4 of adenine in the standard reference frame; every base is placed on these, pyrimidines with
#: N1 and C2, so that all nucleotides share one backbone.
_C1, _N, _C4 = np.array([-2.479, 5.346, 0.0]), np.array([-1.291, 4.498, 0.0]), np.array([-1.267, 3.124, 0.0])
_SUGAR: Final = ("C1'", "C2'", "C3'", "C4'", "O4'", "O3'", "O2'", "C5'")
_PURINES: Final = ("A", "G", "DA", "DG")


@dataclass(frozen=True)
class HelixForm:
    """A helix: rise (Å), twist, displacement (Å) and inclination of its pairs, and the backbone's torsions.

    ``sugar`` is the component whose experimental coordinates give the sugar's pucker. The torsions are such
    that O3' comes to 1.607 Å from the next phosphorus: found by least squares from the fibre models' values.
    """

    rise: float
    twist: float
    x_displacement: float
    inclination: float
    sugar: str
    chi: float
    gamma: float
    beta: float
    alpha: float


B_DNA: Final = HelixForm(3.38, 36.0, -0.30, 0.55, "DA", -103.88, 35.16, 189.49, -45.0)
A_RNA: Final = HelixForm(2.81, 32.7, -3.36, 18.14, "A", -147.80, 31.28, 186.25, -65.0)


@lru_cache(maxsize=4)
def _backbone(form: HelixForm) -> dict[str, Coords]:
    """Sugar and phosphate of a first-strand nucleotide in the pair's frame, by atom name."""
    block = monomer(form.sugar)
    model = {name: block.model_pos[block.index(name)] for name in (*_SUGAR, "N9") if name in block.names}
    length = float(np.linalg.norm(model["O4'"] - model["C1'"]))
    angle = bond_angle(model["O4'"], model["C1'"], model["N9"])
    o4 = place_atom(_C4, _N, _C1, length=length, angle=angle, torsion=form.chi)
    here = local_frame(_C1, _N, o4)
    there = local_frame(model["C1'"], model["N9"], model["O4'"])
    atoms: dict[str, Coords] = {
        name: here @ there.T @ (model[name] - model["C1'"]) + _C1 for name in _SUGAR if name in model
    }
    c3, c4, c5 = atoms["C3'"], atoms["C4'"], atoms["C5'"]
    # Lengths and angles: Parkinson et al., Acta Cryst. D52, 57 (1996).
    o5 = place_atom(c3, c4, c5, length=1.425, angle=110.5, torsion=form.gamma)
    p = place_atom(c4, c5, o5, length=1.593, angle=120.9, torsion=form.beta)
    # The two free oxygens lie in the plane that halves O5'-P-O3' of the nucleotide before.
    before = _screw(form, atoms["O3'"])
    away = -unit(unit(o5 - p) + unit(before - p))
    side = unit(cross(o5 - p, before - p))
    half = np.radians(119.6 / 2)
    atoms["OP1"] = p + 1.485 * (np.cos(half) * away - np.sin(half) * side)
    atoms["OP2"] = p + 1.485 * (np.cos(half) * away + np.sin(half) * side)
    return atoms | {"O5'": o5, "P": p}


def _screw(form: HelixForm, point: Coords) -> Coords:
    """A point of a pair's frame, as it is in the pair before, seen from this pair's frame."""
    tilt = rotation_about(_X, form.inclination)
    displaced = tilt @ point + form.x_displacement * _X
    moved = rotation_about(_Z, -form.twist) @ displaced - form.rise * _Z
    return np.asarray(tilt.T @ (moved - form.x_displacement * _X))


@lru_cache(maxsize=16)
def _nucleotide(form: HelixForm, code: str) -> Residue:
    """A whole first-strand nucleotide in the pair's frame, displaced and inclined."""
    block = monomer(code)
    ring = ("N9", "C4") if code in _PURINES else ("N1", "C2")
    glycosidic, next_atom = (block.pos[block.index(name)] for name in ring)
    sugar_end = block.pos[block.index("C1'")]
    # The base lies on adenine's C1'-N9 bond, its own plane in the pair's.
    turn = local_frame(_C1, _N, _C4) @ local_frame(sugar_end, glycosidic, next_atom).T
    backbone = _backbone(form)
    tilt = rotation_about(_X, form.inclination)
    names, elements, pos = [], [], []
    for name, element, ideal in zip(block.names, block.elements, block.pos, strict=True):
        if name == "OP3":
            continue
        local = backbone[name] if name in backbone else turn @ (ideal - sugar_end) + _C1
        names.append(name)
        elements.append(element)
        pos.append(tilt @ local + form.x_displacement * _X)
    return Residue(code, tuple(names), tuple(elements), np.stack(pos))


def _level(form: HelixForm, residue: Residue, level: int, second: bool) -> Residue:
    flip = np.diag([1.0, -1.0, -1.0]) if second else np.eye(3)
    rotation = rotation_about(_Z, form.twist * level)
    return residue.moved(rotation @ flip, form.rise * level * _Z)


def _five_prime(residue: Residue) -> Residue:
    """A strand's first nucleotide has no phosphate."""
    return residue.without("P", "OP1", "OP2")


def duplex(form: HelixForm, codes: list[str]) -> tuple[list[Residue], list[Residue]]:
    """Both strands of a double helix, each in its 5'-3' order; ``codes`` are the first strand's."""
    first = [_level(form, _nucleotide(form, code), level, False) for level, code in enumerate(codes)]
    second = [
        _level(form, _nucleotide(form, COMPLEMENT[code]), level, True)
        for level, code in reversed(list(enumerate(codes)))
    ]
    return [_five_prime(first[0]), *first[1:]], [_five_prime(second[0]), *second[1:]]


@dataclass(frozen=True, eq=False)
class Hairpin:
    """An RNA hairpin: residues in order and the base pairs as 0-based indices."""

    residues: tuple[Residue, ...]
    pairs: tuple[tuple[int, int], ...]


def hairpin(rng: Generator, stem: list[str]) -> Hairpin:
    """A hairpin with the given 5' side of the stem.

    Two pyrimidines stack on the stem, one on each side; the turn between them is disordered: in the sequence,
    but without coordinates.
    """
    form, size = A_RNA, len(stem)
    stacked = [str(code) for code in rng.choice(list("CU"), 2)]
    turn = [str(code) for code in rng.choice(list("ACGU"), int(rng.integers(4, 7)))]
    first = [_level(form, _nucleotide(form, code), k, False) for k, code in enumerate([*stem, stacked[0]])]
    partners = [COMPLEMENT[code] for code in stem] + [stacked[1]]
    second = [_level(form, _nucleotide(form, code), k, True) for k, code in enumerate(partners)]
    residues = [
        _five_prime(first[0]),
        *first[1:],
        *(Residue(code) for code in turn),
        *reversed(second),
    ]
    last = len(residues) - 1
    return Hairpin(tuple(residues), tuple((k, last - k) for k in range(size)))


def random_sequence(rng: Generator, bases: str, length: int) -> list[str]:
    """Random bases that begin and end with a G-C pair and hold no run of four."""
    letters: list[str] = []
    while len(letters) < length:
        ends = len(letters) in (0, length - 1)
        letter = str(rng.choice(list("GC" if ends else bases)))
        if letters[-3:] != [letter] * 3:
            letters.append(letter)
    return letters
