"""Protein backbones: folds grown from secondary structure, and variants of a fold.

A backbone is an array [L, 5, 3] of N, CA, C, O and CB in Å. Every residue gets a CB here, so that glycine
is the only residue with nothing to place and any other residue fits at least as alanine.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.random import Generator
from numpy.typing import NDArray

from megafold.pipeline.sample_corpus.geometry import Coords, local_frame, place_atom, squared_distances, unit
from megafold.pipeline.sample_corpus.monomers import side_chain

# Bond lengths and angles: Engh & Huber, Acta Cryst. A47, 392 (1991); International Tables F, 18.3 (2001).
N_CA, CA_C, C_N, C_O = 1.458, 1.525, 1.329, 1.231
ANGLE_N_CA_C, ANGLE_CA_C_N, ANGLE_C_N_CA, ANGLE_CA_C_O = 111.0, 117.2, 121.7, 120.1

N, CA, C, O, CB = range(5)  # noqa: E741
_CENTROID_FROM_CA: Final = 2.6
#: Mean and spread of (phi, psi) in degrees, by state.
_BASINS: Final = {
    "H": (-62.0, -43.0, 3.0),
    "E": (-118.0, 134.0, 7.0),
    "b": (-110.0, 130.0, 14.0),
    "p": (-70.0, 148.0, 10.0),
    "a": (-68.0, -38.0, 10.0),
    "l": (58.0, 38.0, 6.0),
}
#: Turns that bring two strands side by side: types I' and II' (phi and psi of residues i+1 and i+2).
_HAIRPIN_TURNS: Final = (((55.0, 38.0), (78.0, 20.0)), ((60.0, -120.0), (-80.0, 0.0)))
_CANDIDATES: Final = 400
#: Side chains whose centroids are this near count as packed.
_PACKED: Final = 7.5
_GROW_ATTEMPTS: Final = 400
#: A variant may come a little closer to itself than the fold it is made from.
_VARIANT_SLACK: Final = 0.15
#: Spreads of a variant's torsions (degrees), tried in this order.
_SPREADS: Final = (0.9, 0.75, 0.6, 0.45, 0.3, 0.15)


@dataclass(frozen=True, eq=False)
class Fold:
    """A backbone with its torsions (degrees, [L]) and secondary structure (H, E or L for each residue)."""

    phi: Coords
    psi: Coords
    omega: Coords
    structure: str
    backbone: Coords

    def __len__(self) -> int:
        return len(self.structure)


def virtual_centroids(backbone: Coords) -> Coords:
    """Where the middle of a typical side chain is [..., L, 3]: along CA-CB."""
    ca, cb = backbone[..., CA, :], backbone[..., CB, :]
    return np.asarray(ca + _CENTROID_FROM_CA * unit(cb - ca))


def build_backbone(phi: Coords, psi: Coords, omega: Coords) -> Coords:
    """Backbones [..., L, 5, 3] from torsions [..., L] in degrees; ``omega[i]`` precedes residue i."""
    start = np.broadcast_to(_residue(), (*phi.shape[:-1], 3, 3))
    rest = extend(start, psi[..., 0], phi[..., 1:], psi[..., 1:], omega[..., 1:])
    head = _with_o_and_cb(start[..., None, :, :], psi[..., :1])
    return np.concatenate([head, rest], axis=-3)


def extend(tail: Coords, tail_psi: Coords, phi: Coords, psi: Coords, omega: Coords) -> Coords:
    """Residues [..., m, 5, 3] that follow one whose N, CA, C are ``tail`` [..., 3, 3].

    ``phi``, ``psi``, ``omega`` are [..., m]; ``tail_psi`` [...] is the psi of the residue before them.

    All residues have the same bond lengths and angles, so each is the same rigid body, moved from the one
    before it by a rotation and a shift that its torsions give: these are found for all residues at once, and
    only their product is sequential.
    """
    n, ca, c = _residue()
    here = local_frame(ca, n, c)
    before = np.concatenate([tail_psi[..., None], psi[..., :-1]], axis=-1)
    next_n = place_atom(n, ca, c, length=C_N, angle=ANGLE_CA_C_N, torsion=before)
    next_ca = place_atom(ca, c, next_n, length=N_CA, angle=ANGLE_C_N_CA, torsion=omega)
    next_c = place_atom(c, next_n, next_ca, length=CA_C, angle=ANGLE_N_CA_C, torsion=phi)
    turns = here.T @ local_frame(next_ca, next_n, next_c)
    shifts = (next_ca - ca) @ here
    rotation = local_frame(tail[..., 1, :], tail[..., 0, :], tail[..., 2, :])
    origin = tail[..., 1, :]
    frames, origins = [], []
    for i in range(phi.shape[-1]):
        origin = origin + (rotation @ shifts[..., i, :, None])[..., 0]
        rotation = rotation @ turns[..., i, :, :]
        frames.append(rotation)
        origins.append(origin)
    own = (np.stack([n, ca, c]) - ca) @ here
    trace = own @ np.swapaxes(np.stack(frames, axis=-3), -1, -2) + np.stack(origins, axis=-2)[..., None, :]
    return _with_o_and_cb(trace, psi)


def _residue() -> Coords:
    """N, CA and C [3, 3] of a residue with standard bond lengths and angle."""
    n, ca = np.zeros(3), np.array([N_CA, 0.0, 0.0])
    c = place_atom(np.array([0.0, 1.0, 0.0]), n, ca, length=CA_C, angle=ANGLE_N_CA_C, torsion=0.0)
    return np.stack([n, ca, c])


def _with_o_and_cb(trace: Coords, psi: Coords) -> Coords:
    n, ca, c = trace[..., 0, :], trace[..., 1, :], trace[..., 2, :]
    oxygen = place_atom(n, ca, c, length=C_O, angle=ANGLE_CA_C_O, torsion=psi + 180)
    beta = side_chain("ALA").rotamers[0, 0]
    carbon = local_frame(ca, n, c) @ beta + ca
    return np.concatenate([trace, oxygen[..., None, :], carbon[..., None, :]], axis=-2)


def has_clash(backbone: Coords, *, start: int = 0, slack: float = 0.0) -> bool:
    """Whether residues of one backbone [L, 5, 3] collide, or leave no room for side chains.

    Pairs are looked at of which one is residue ``start`` or later. ``slack`` (Å) is taken off the limits.
    """
    number = np.arange(len(backbone))
    gap = np.abs(number[start:, None] - number)
    ca, centroids = backbone[:, CA], virtual_centroids(backbone)
    for one, two, apart, limit in (
        (ca, ca, 2, 4.0),
        (centroids, centroids, 3, 3.8),
        (centroids, ca, 3, 3.8),
        (ca, centroids, 3, 3.8),
    ):
        if (squared_distances(one[start:], two)[gap >= apart] < (limit - slack) ** 2).any():
            return True
    atoms = backbone.reshape(-1, 3)
    squares = (
        squared_distances(atoms[5 * start :], atoms).reshape(len(gap), 5, len(backbone), 5).min(axis=(1, 3))
    )
    return bool(
        (squares[gap >= 2] < (2.7 - slack) ** 2).any() or (squares[gap >= 4] < (2.85 - slack) ** 2).any()
    )


def _sample_torsions(rng: Generator, states: NDArray[np.str_]) -> tuple[Coords, Coords]:
    """phi and psi, shaped as ``states`` (keys of ``_BASINS``)."""
    means = np.array([_BASINS[state] for state in states.ravel()]).reshape(*states.shape, 3)
    noise = rng.standard_normal((*states.shape, 2)) * means[..., 2:]
    return means[..., 0] + noise[..., 0], means[..., 1] + noise[..., 1]


def _fragment(rng: Generator, before: str, kind: str, length: int) -> tuple[Coords, Coords, str]:
    """Candidates for a loop and the element after it: phi, psi [candidates, m] and the structure [m]."""
    if before == "E" and kind == "E" and rng.random() < 0.7:
        turn = np.array(_HAIRPIN_TURNS[rng.integers(len(_HAIRPIN_TURNS))])
        phi, psi = _sample_torsions(rng, np.full((_CANDIDATES, length), "E"))
        spread = rng.standard_normal((2, _CANDIDATES, 2)) * 8
        phi = np.concatenate([turn[:, 0] + spread[0], phi], axis=1)
        psi = np.concatenate([turn[:, 1] + spread[1], psi], axis=1)
        return phi, psi, "LL" + "E" * length
    loop = int(rng.integers(3, 6))
    # Each candidate has its own loop, so that one round tries many directions for the next element.
    states = rng.choice(list("bpal"), (_CANDIDATES, loop), p=[0.34, 0.26, 0.32, 0.08])
    phi, psi = _sample_torsions(rng, np.concatenate([states, np.full((_CANDIDATES, length), kind)], axis=1))
    return phi, psi, "L" * loop + kind * length


def _best_candidate(chain: Coords, candidates: Coords) -> int | None:
    """The candidate [candidates, m, 5, 3] that packs best on ``chain``, among those that fit."""
    ca, centroids = chain[:, CA], virtual_centroids(chain)
    far = slice(0, max(0, len(chain) - 2))
    new_ca, new_centroids = candidates[:, :, CA], virtual_centroids(candidates)
    left = np.arange(len(candidates))
    for old, new, limit in (
        (ca, new_ca, 4.0),
        (ca, new_centroids, 3.9),
        (centroids, new_ca, 3.9),
        (centroids, new_centroids, 3.9),
    ):
        squares = squared_distances(new[left].astype(np.float32), old[far].astype(np.float32))
        fits = squares.min(axis=(1, 2), initial=np.inf) > limit**2
        left, squares = left[fits], squares[fits]
    contacts = (squares < _PACKED**2).sum(axis=(1, 2))
    candidates, new_ca = candidates[left], new_ca[left]
    whole = np.concatenate([np.broadcast_to(ca, (len(candidates), *ca.shape)), new_ca], axis=1)
    radius = np.sqrt(((whole - whole.mean(axis=1, keepdims=True)) ** 2).sum(-1).mean(-1))
    donors = np.concatenate([chain[far, N], chain[far, O]])
    acceptors = np.concatenate([candidates[:, 2:, O], candidates[:, 2:, N]], axis=1)
    bonds = (squared_distances(acceptors, donors) < 3.3**2).sum(axis=(1, 2)) if len(donors) else 0
    score = radius - 0.1 * contacts - 0.15 * np.minimum(bonds, 8)
    for index in np.argsort(score, kind="stable"):
        if not has_clash(np.concatenate([chain, candidates[index]]), start=len(chain)):
            return int(left[index])
    return None


def grow_fold(rng: Generator, kinds: str, length: int) -> Fold:
    """A self-avoiding, compact fold of about ``length`` residues.

    ``kinds`` is the order of secondary structure elements (H and E), repeated until the length is reached.
    Each element comes after a loop; of several candidates the one that keeps the chain most compact is
    taken, and where none fits the chain goes back by one element.

    Raises:
        RuntimeError: no fold was found; does not happen for lengths up to 150 residues in practice.
    """
    phi, psi = _sample_torsions(rng, np.array(["b", "p"]))
    steps: list[tuple[Coords, Coords, str, Coords]] = [
        (phi, psi, "LL", build_backbone(phi, psi, np.full(2, 180.0)))
    ]
    for _ in range(_GROW_ATTEMPTS):
        done = sum(len(step[2]) for step in steps)
        if done >= length:
            return _finish(steps)
        kind = kinds[(len(steps) - 1) % len(kinds)]
        size = int(rng.integers(8, 15)) if kind == "H" else int(rng.integers(4, 7))
        _, before_psi, structure, _ = steps[-1]
        new_phi, new_psi, new_structure = _fragment(rng, structure[-1], kind, size)
        chain = np.concatenate([step[3] for step in steps])
        candidates = extend(
            np.broadcast_to(chain[-1, :3], (_CANDIDATES, 3, 3)),
            np.full(_CANDIDATES, before_psi[-1]),
            new_phi,
            new_psi,
            np.full(new_phi.shape, 180.0),
        )
        best = _best_candidate(chain, candidates)
        if best is not None:
            steps.append((new_phi[best], new_psi[best], new_structure, candidates[best]))
        elif len(steps) > 1:
            steps.pop()
    raise RuntimeError(f"no fold of {length} residues after {_GROW_ATTEMPTS} attempts")


def _finish(steps: list[tuple[Coords, Coords, str, Coords]]) -> Fold:
    phi, psi = (np.concatenate([step[i] for step in steps]) for i in (0, 1))
    return Fold(
        phi=phi,
        psi=psi,
        omega=np.full(len(phi), 180.0),
        structure="".join(step[2] for step in steps),
        backbone=np.concatenate([step[3] for step in steps]),
    )


def vary_fold(rng: Generator, fold: Fold) -> Fold:
    """The fold with its torsions changed by normal noise, as much as it can be without a clash.

    Loops vary twice as much as secondary structure. Where even the least change clashes, the fold itself.
    """
    loop = np.where(np.array(list(fold.structure)) == "L", 2.0, 1.0)
    widths = np.array(_SPREADS)[:, None] * loop
    phi = fold.phi + rng.standard_normal(widths.shape) * widths
    psi = fold.psi + rng.standard_normal(widths.shape) * widths
    omega = fold.omega + np.clip(rng.standard_normal(widths.shape) * widths, -6, 6)
    backbones = build_backbone(phi, psi, omega)
    for k, backbone in enumerate(backbones):
        if not has_clash(backbone, slack=_VARIANT_SLACK):
            return Fold(phi=phi[k], psi=psi[k], omega=omega[k], structure=fold.structure, backbone=backbone)
    return fold


def neighbour_counts(backbone: Coords) -> NDArray[np.int64]:
    """How many side-chain centroids are within 10 Å of each residue's [L]: its burial."""
    centroids = virtual_centroids(backbone)
    return np.asarray((squared_distances(centroids, centroids) < 100.0).sum(axis=1) - 1)
