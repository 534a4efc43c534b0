"""Molecules beside molecules: docking at contact distance, glycans, haem, ions and waters."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.random import Generator

from megafold.pipeline.sample_corpus.geometry import (
    Coords,
    bond_angle,
    cross,
    first_contact,
    local_frame,
    place_atom,
    random_rotation,
    rotation_about,
    squared_distances,
    unit,
)
from megafold.pipeline.sample_corpus.model import BranchLink, Residue
from megafold.pipeline.sample_corpus.monomers import monomer, side_chain
from megafold.pipeline.sample_corpus.packing import ChainPacking

CONTACT: Final = 3.3
_GLYCOSIDIC: Final = 1.43
_FE_N: Final = 2.08


def component_residue(code: str, *, drop: tuple[str, ...] = ()) -> Residue:
    """A component in its ideal conformation, all heavy atoms but those in ``drop``, centred."""
    block = monomer(code)
    residue = Residue(code, block.names, block.elements, np.nan_to_num(block.pos))
    residue = residue.without(*drop)
    return residue.moved(np.eye(3), -residue.pos.mean(axis=0))


@dataclass(frozen=True, eq=False)
class Pose:
    """A rigid movement: rotation [3, 3] about the origin, then shift [3]."""

    rotation: Coords
    shift: Coords

    def apply(self, residues: list[Residue]) -> list[Residue]:
        """The residues moved; unresolved ones stay as they are."""
        return [r.moved(self.rotation, self.shift) if r.resolved else r for r in residues]


def dock(
    rng: Generator, fixed: Coords, moving: Coords, *, trials: int = 6, distance: float = CONTACT
) -> Pose:
    """Bring ``moving`` [M, 3] to ``fixed`` [N, 3] until their closest atoms are at ``distance``.

    Of several random orientations and directions the one with most atom pairs within 5 Å is taken.
    """
    centre = fixed.mean(axis=0)
    start = moving.mean(axis=0)
    best: tuple[int, Pose] | None = None
    for _ in range(trials):
        rotation = random_rotation(rng)
        direction = unit(rng.standard_normal(3))
        turned = (moving - start) @ rotation.T + centre
        away = first_contact(fixed, turned, direction, distance)
        if away is None:
            continue
        contacts = int((squared_distances(fixed, turned + away * direction) < 25).sum())
        if best is None or contacts > best[0]:
            best = contacts, Pose(rotation, centre - rotation @ start + away * direction)
    if best is None:
        raise RuntimeError("docking found no contact: the fixed molecule is hollow along every direction")
    return best[1]


def two_fold(rng: Generator, pos: Coords) -> tuple[Pose, Coords]:
    """Where a chain [N, 3] and its copy by a two-fold axis touch: the chain's pose, the operator [3, 4]."""
    flip = np.diag([-1.0, -1.0, 1.0])
    start = pos.mean(axis=0)
    best: tuple[int, Coords, float] | None = None
    for _ in range(5):
        rotation = random_rotation(rng)
        turned = (pos - start) @ rotation.T
        copy = turned @ flip.T
        apart = first_contact(copy, turned, np.array([1.0, 0.0, 0.0]), CONTACT)
        if apart is None:
            continue
        contacts = int((squared_distances(copy, turned + [apart, 0, 0]) < 25).sum())
        if best is None or contacts > best[0]:
            best = contacts, rotation, apart
    if best is None:
        raise RuntimeError("no two-fold arrangement: the chain does not meet its copy")
    _, rotation, apart = best
    origin = np.round(rng.uniform(-20, 20, 3), 3)
    shift = origin + [apart / 2, 0, 0] - rotation @ start
    return Pose(rotation, shift), np.column_stack([flip, origin - flip @ origin])


def attach_sugar(
    code: str, anchor: tuple[Coords, Coords, Coords], *, phi: float, psi: float, angle: float
) -> Residue:
    """A sugar whose C1 is bonded to the last of the three ``anchor`` atoms (a, b, x), its O1 gone.

    ``phi`` is the torsion O5-C1-x-b, ``psi`` is C1-x-b-a, ``angle`` is C1-x-b.
    """
    block = monomer(code)
    a, b, x = anchor
    c1, o1, o5 = (block.pos[block.index(name)] for name in ("C1", "O1", "O5"))
    carbon = place_atom(a, b, x, length=_GLYCOSIDIC, angle=angle, torsion=psi)
    ring = place_atom(
        b, x, carbon, length=float(np.linalg.norm(o5 - c1)), angle=bond_angle(o1, c1, o5), torsion=phi
    )
    rotation = local_frame(carbon, x, ring) @ local_frame(c1, o1, o5).T
    residue = Residue(code, block.names, block.elements, block.pos)
    return residue.moved(rotation, carbon - rotation @ c1).without("O1")


@dataclass(frozen=True)
class _Linkage:
    """A glycosidic bond to build: the sugar, what it is bonded to, and its preferred torsions and angle."""

    code: str
    parent: int
    atoms: tuple[str, str, str]
    phi: float
    psi: float
    angle: float


#: The core of N-glycans, from the asparagine outwards (parent -1).
_N_GLYCAN: Final = (
    _Linkage("NAG", -1, ("CB", "CG", "ND2"), -90.0, 180.0, 123.0),
    _Linkage("NAG", 0, ("C5", "C4", "O4"), -78.0, -128.0, 117.0),
    _Linkage("BMA", 1, ("C5", "C4", "O4"), -85.0, -120.0, 117.0),
    _Linkage("MAN", 2, ("C4", "C3", "O3"), 72.0, -105.0, 117.0),
    _Linkage("MAN", 2, ("C5", "C6", "O6"), 68.0, 178.0, 114.0),
)


def grow_glycan(
    rng: Generator, packing: ChainPacking, site: int, count: int
) -> tuple[list[Residue], list[BranchLink]] | None:
    """The first ``count`` sugars of an N-glycan on the asparagine at ``site``, which is placed here too.

    None, and the asparagine left as it was, where the glycan finds no room.
    """
    before = packing.placed.get(site)
    conformations = packing.in_space(site, side_chain("ASN"))
    scores = packing.scores(site, conformations)
    for rotamer in np.argsort(scores, kind="stable"):
        if not np.isfinite(scores[rotamer]):
            break
        packing.fix(site, "ASN", conformations[rotamer])
        asparagine = packing.residues()[site]
        surroundings = _without_atom(packing.atoms_and_obstacles(), asparagine.atom("ND2"))
        sugars = _grow(rng, asparagine, surroundings, _N_GLYCAN[:count])
        if sugars is not None:
            links = [
                BranchLink(k, link.parent, link.atoms[2]) for k, link in enumerate(_N_GLYCAN[:count]) if k
            ]
            return sugars, links
    if before is not None:
        packing.fix(site, before.code, before.pos)
    return None


def _without_atom(points: Coords, atom: Coords) -> Coords:
    return np.asarray(points[((points - atom) ** 2).sum(-1) > 1e-6])


def _grow(
    rng: Generator, asparagine: Residue, surroundings: Coords, linkages: tuple[_Linkage, ...]
) -> list[Residue] | None:
    sugars: list[Residue] = []
    for link in linkages:
        parent = asparagine if link.parent < 0 else sugars[link.parent]
        first, second, third = (parent.atom(name) for name in link.atoms)
        taken = np.concatenate([surroundings, *(sugar.pos for sugar in sugars)])
        taken = _without_atom(taken, third)
        own = (squared_distances(taken, parent.pos) < 1e-6).any(axis=1)
        limits = np.where(own, 2.3, 3.0)
        for _ in range(30):
            phi, psi = rng.normal(link.phi, 14), rng.normal(link.psi, 16)
            sugar = attach_sugar(link.code, (first, second, third), phi=phi, psi=psi, angle=link.angle)
            if (squared_distances(sugar.pos, taken) > limits**2).all():
                sugars.append(sugar)
                break
        else:
            return None
    return sugars


def attach_heme(rng: Generator, packing: ChainPacking, candidates: list[int]) -> tuple[int, Residue] | None:
    """A haem on a histidine placed at one of ``candidates``: (residue, haem), or None where none has room."""
    block = monomer("HEM")
    iron = block.pos[block.index("FE")]
    ring = [block.pos[block.index(name)] for name in ("NA", "NB")]
    local = (block.pos - iron) @ local_frame(iron, ring[0], ring[1])
    histidine = side_chain("HIS")
    place = {name: k for k, name in enumerate(histidine.names)}
    for site in candidates:
        conformations = packing.in_space(site, histidine)
        scores = packing.scores(site, conformations)
        others = packing.atoms()
        for rotamer in np.argsort(scores, kind="stable")[:6]:
            if not np.isfinite(scores[rotamer]):
                break
            side = conformations[rotamer]
            nitrogen = side[place["NE2"]]
            axis = unit(nitrogen - (side[place["CE1"]] + side[place["CD2"]]) / 2)
            centre = nitrogen + _FE_N * axis
            frame = _frame_with_normal(rng, axis)
            far = others[((others - centre) ** 2).sum(-1) < 13**2]
            own = (squared_distances(far, packing.placed[site].pos) < 1e-6).any(axis=1)
            for angle in range(0, 360, 15):
                pos = local @ (rotation_about(axis, angle) @ frame).T + centre
                if (squared_distances(pos, far[~own]) > 3.0**2).all():
                    packing.fix(site, "HIS", side)
                    return site, Residue("HEM", block.names, block.elements, pos)
    return None


def _frame_with_normal(rng: Generator, axis: Coords) -> Coords:
    """A right-handed frame whose z is ``axis``, turned about it at random."""
    x = unit(cross(axis, rng.standard_normal(3)))
    return np.stack([x, cross(axis, x), axis], axis=-1)


def coordinate(
    rng: Generator, donor: Coords, behind: Coords, others: Coords, distance: float
) -> Coords | None:
    """A position [3] at ``distance`` from ``donor``, away from ``behind``, 2.7 Å or more from ``others``."""
    outwards = unit(donor - behind)
    for _ in range(40):
        direction = unit(outwards + 0.7 * unit(rng.standard_normal(3)))
        place = donor + distance * direction
        if len(others) == 0 or ((others - place) ** 2).sum(-1).min() > 2.7**2:
            return np.asarray(place)
    return None


def waters(rng: Generator, polar: Coords, everything: Coords, count: int) -> list[Residue]:
    """Up to ``count`` waters at 2.8 to 3.1 Å from polar atoms [N, 3] and at least 2.7 Å from everything."""
    found: list[Residue] = []
    taken = everything
    for _ in range(12 * count):
        if len(found) == count:
            break
        start = polar[rng.integers(len(polar))]
        place = start + rng.uniform(2.8, 3.1) * unit(rng.standard_normal(3))
        if ((taken - place) ** 2).sum(-1).min() > 2.7**2:
            taken = np.vstack([taken, place])
            found.append(Residue("HOH", ("O",), ("O",), place[None]))
    return found


def sphere_around(rng: Generator, metal: Coords, everything: Coords, count: int) -> list[Residue]:
    """Up to ``count`` waters at 2.1 Å from a metal, apart from each other and from all else."""
    found: list[Residue] = []
    taken = everything[((everything - metal) ** 2).sum(-1) > 1e-6]
    for _ in range(400):
        if len(found) == count:
            break
        place = metal + 2.1 * unit(rng.standard_normal(3))
        if ((taken - place) ** 2).sum(-1).min() > 2.7**2:
            taken = np.vstack([taken, place])
            found.append(Residue("HOH", ("O",), ("O",), place[None]))
    return found
