"""Where side chains of a backbone can meet: disulfide bonds and metal sites."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import Final

import numpy as np

from megafold.pipeline.sample_corpus.backbone import CB
from megafold.pipeline.sample_corpus.geometry import (
    Coords,
    bond_angle,
    place_atom,
    squared_distances,
    torsion_angle,
    unit,
)
from megafold.pipeline.sample_corpus.monomers import SideChain, grid_side_chain
from megafold.pipeline.sample_corpus.packing import ChainPacking

S_S: Final = 2.05
ZN_N, ZN_S = 2.1, 2.33
_BACKBONE_CONTACT: Final = 2.9
_DONOR: Final = {"HIS": "NE2", "CYS": "SG"}


@dataclass(frozen=True, eq=False)
class Site:
    """Residues and their side chains: ``members`` are (residue, code, coordinates [N_atom, 3], donor)."""

    members: tuple[tuple[int, str, Coords, str], ...]
    metal: Coords | None = None


@lru_cache(maxsize=4)
def _grid(code: str, step: int) -> SideChain:
    steps = np.arange(-180.0, 180.0, step)
    return grid_side_chain(code, *([steps] * (1 if code == "CYS" else 2)))


def _clear_of_backbone(packing: ChainPacking, i: int, conformations: Coords) -> np.ndarray:
    """Which conformations [N, N_atom, 3] at residue ``i`` keep away from the backbone, [N]."""
    others = [k for k in packing.resolved if k != i]
    points = packing.member.backbone[others].reshape(-1, 3)
    near = points[((points - packing.member.backbone[i, CB]) ** 2).sum(-1) < 9.0**2]
    squares = squared_distances(conformations[:, 1:], near)
    return np.asarray((squares > _BACKBONE_CONTACT**2).all(axis=(1, 2)))


def _pairs(packing: ChainPacking, shortest: float, longest: float) -> list[tuple[int, int]]:
    """Residue pairs by their CB distance, closest first; without GLY and PRO."""
    free = [i for i in packing.resolved if packing.letters[i] not in "GP" and i not in packing.placed]
    beta = packing.member.backbone[free, CB]
    distances = np.sqrt(squared_distances(beta, beta))
    found = [
        (distances[a, b], free[a], free[b])
        for a, b in combinations(range(len(free)), 2)
        if free[b] - free[a] >= 3 and shortest <= distances[a, b] <= longest
    ]
    return [(i, j) for _, i, j in sorted(found)]


def find_disulfide(packing: ChainPacking) -> Site | None:
    """Two residues whose CYS side chains can form a bond of 2.05 Å with angles near 104 degrees."""
    best: tuple[float, Site] | None = None
    grid = _grid("CYS", 3)
    sulfur = grid.names.index("SG")
    for i, j in _pairs(packing, 3.3, 4.6)[:12]:
        first, second = packing.in_space(i, grid), packing.in_space(j, grid)
        first = first[_clear_of_backbone(packing, i, first)]
        second = second[_clear_of_backbone(packing, j, second)]
        if not len(first) or not len(second):
            continue
        distances = np.sqrt(squared_distances(first[:, sulfur], second[:, sulfur]))
        beta_i, beta_j = first[:, None, 0], second[None, :, 0]
        sg_i, sg_j = first[:, None, sulfur], second[None, :, sulfur]
        angles = np.stack([bond_angle(beta_i, sg_i, sg_j), bond_angle(beta_j, sg_j, sg_i)])
        dihedral = np.abs(torsion_angle(beta_i, sg_i, sg_j, beta_j))
        # Widths: what real disulfides vary by.
        cost = (
            ((distances - S_S) / 0.02) ** 2 + (((angles - 104) / 5) ** 2).sum(0) + ((dihedral - 90) / 25) ** 2
        )
        a, b = np.unravel_index(int(np.argmin(cost)), cost.shape)
        if abs(distances[a, b] - S_S) < 0.05 and (np.abs(angles[:, a, b] - 104) < 14).all():
            site = Site(((i, "CYS", first[a], "SG"), (j, "CYS", second[b], "SG")))
            if best is None or cost[a, b] < best[0]:
                best = (float(cost[a, b]), site)
    return best[1] if best else None


def _metal_positions(packing: ChainPacking, i: int, code: str) -> tuple[Coords, Coords]:
    """Conformations at residue ``i`` and where each would hold a zinc ion, [N, N_atom, 3] and [N, 3]."""
    grid = _grid(code, 20 if code == "HIS" else 15)
    conformations = packing.in_space(i, grid)
    conformations = conformations[_clear_of_backbone(packing, i, conformations)]
    place = {name: k for k, name in enumerate(grid.names)}
    if code == "HIS":
        # The lone pair of NE2 points away from the middle of its two ring neighbours.
        nitrogen = conformations[:, place["NE2"]]
        middle = (conformations[:, place["CE1"]] + conformations[:, place["CD2"]]) / 2
        metals = nitrogen + ZN_N * unit(nitrogen - middle)
    else:
        turns = np.tile(np.arange(0.0, 360.0, 20.0), len(conformations))
        conformations = np.repeat(conformations, 18, axis=0)
        alpha = np.broadcast_to(packing.member.backbone[i, 1], (len(conformations), 3))
        beta, sulfur = conformations[:, 0], conformations[:, place["SG"]]
        metals = place_atom(alpha, beta, sulfur, length=ZN_S, angle=106.0, torsion=turns)
    backbone = packing.member.backbone[packing.resolved].reshape(-1, 3)
    clear = (squared_distances(metals, backbone) > 3.0**2).all(axis=1) if len(metals) else np.zeros(0, bool)
    return conformations[clear], metals[clear]


def _compatible(sides: list[Coords]) -> bool:
    return all(squared_distances(a, b).min() > 2.9**2 for a, b in combinations(sides, 2))


def find_zinc_site(packing: ChainPacking) -> Site | None:
    """Two to four HIS or CYS residues that hold a zinc ion at 2.1 Å (N) or 2.33 Å (S), each within 0.2 Å."""
    cache: dict[tuple[int, str], tuple[Coords, Coords]] = {}
    best: Site | None = None

    def positions(i: int, code: str) -> tuple[Coords, Coords]:
        if (i, code) not in cache:
            cache[i, code] = _metal_positions(packing, i, code)
        return cache[i, code]

    pairs = _pairs(packing, 3.8, 8.5)
    for i, j in pairs[:16]:
        for code_i, code_j in (("HIS", "HIS"), ("HIS", "CYS"), ("CYS", "HIS"), ("CYS", "CYS")):
            (sides_i, metals_i), (sides_j, metals_j) = positions(i, code_i), positions(j, code_j)
            if not len(metals_i) or not len(metals_j):
                continue
            squares = squared_distances(metals_i, metals_j)
            close = np.argwhere(squares < 0.3**2)
            for a, b in close[np.argsort(squares[tuple(close.T)], kind="stable")][:20]:
                if not _compatible([sides_i[a], sides_j[b]]):
                    continue
                metal = (metals_i[a] + metals_j[b]) / 2
                chosen = [(i, code_i, sides_i[a]), (j, code_j, sides_j[b])]
                chosen += _more_ligands(packing, metal, chosen, positions)
                if best is None or len(chosen) > len(best.members):
                    best = Site(tuple((k, code, pos, _DONOR[code]) for k, code, pos in chosen), metal)
                break
        if best is not None and len(best.members) == 4:
            break
    return best


def _more_ligands(
    packing: ChainPacking,
    metal: Coords,
    chosen: list[tuple[int, str, Coords]],
    positions: Callable[[int, str], tuple[Coords, Coords]],
) -> list[tuple[int, str, Coords]]:
    taken = {i for i, _, _ in chosen}
    sides = [pos for _, _, pos in chosen]
    found: list[tuple[int, str, Coords]] = []
    for k in packing.resolved:
        if len(taken) == 4:
            break
        beta = packing.member.backbone[k, CB]
        if k in taken or packing.letters[k] in "GP" or ((beta - metal) ** 2).sum() > 7.5**2:
            continue
        for code in ("CYS", "HIS"):
            candidates, metals = positions(k, code)
            if not len(metals):
                continue
            best = int(np.argmin(((metals - metal) ** 2).sum(-1)))
            if ((metals[best] - metal) ** 2).sum() < 0.18**2 and _compatible([*sides, candidates[best]]):
                taken.add(k)
                sides.append(candidates[best])
                found.append((k, code, candidates[best]))
                break
    return found
