"""Building in space: atoms from internal coordinates, local frames, rotations, rigid contact.

Coordinates are float64 in Å, angles in degrees, the last axis is x, y, z. Functions work on any leading axes.
"""

from typing import Any

import numpy as np
from numpy.random import Generator
from numpy.typing import ArrayLike, NDArray

Coords = NDArray[np.float64]


def unit(vector: NDArray[Any]) -> Coords:
    """Vectors [..., 3] scaled to length 1."""
    return np.asarray(vector / np.sqrt(np.sum(vector * vector, -1, keepdims=True)))


def cross(a: Coords, b: Coords) -> Coords:
    """Cross products [..., 3]; several times faster than NumPy's on few vectors."""
    ax, ay, az = a[..., 0], a[..., 1], a[..., 2]
    bx, by, bz = b[..., 0], b[..., 1], b[..., 2]
    return np.stack([ay * bz - az * by, az * bx - ax * bz, ax * by - ay * bx], axis=-1)


def place_atom(
    a: Coords, b: Coords, c: Coords, *, length: ArrayLike, angle: ArrayLike, torsion: ArrayLike
) -> Coords:
    """The atom d [..., 3] at ``length`` from c, with the angle b-c-d and the torsion a-b-c-d (NeRF).

    Source: Parsons et al., J. Comput. Chem. 26, 1063 (2005).
    """
    theta, phi = np.radians(angle), np.radians(torsion)
    axis = unit(c - b)
    normal = unit(cross(b - a, axis))
    side = cross(normal, axis)
    along = -np.cos(theta)
    out = np.sin(theta)[..., None] * (np.cos(phi)[..., None] * side + np.sin(phi)[..., None] * normal)
    return np.asarray(c + np.asarray(length)[..., None] * (along[..., None] * axis + out))


def torsion_angle(a: Coords, b: Coords, c: Coords, d: Coords) -> Coords:
    """Torsion a-b-c-d in degrees, [...]; positive clockwise looking along b-c (IUPAC)."""
    axis = unit(c - b)
    first, last = a - b, d - c
    first = first - np.sum(first * axis, -1, keepdims=True) * axis
    last = last - np.sum(last * axis, -1, keepdims=True) * axis
    sine = np.sum(cross(axis, first) * last, -1)
    return np.asarray(np.degrees(np.arctan2(sine, np.sum(first * last, -1))))


def bond_angle(a: Coords, b: Coords, c: Coords) -> Coords:
    """Angle a-b-c in degrees, [...]."""
    cosine = np.sum(unit(a - b) * unit(c - b), -1)
    return np.asarray(np.degrees(np.arccos(np.clip(cosine, -1, 1))))


def local_frame(origin: Coords, on_x: Coords, in_plane: Coords) -> Coords:
    """Rotations [..., 3, 3] whose columns are x (origin to ``on_x``), y (towards ``in_plane``) and z."""
    x = unit(on_x - origin)
    z = unit(cross(x, in_plane - origin))
    return np.stack([x, cross(z, x), z], axis=-1)


def rotation_about(axis: Coords, angle: ArrayLike) -> Coords:
    """Rotations [..., 3, 3] by ``angle`` about the vector ``axis`` [3] (Rodrigues)."""
    x, y, z = unit(axis)
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    theta = np.radians(np.asarray(angle, dtype=float))[..., None, None]
    return np.asarray(np.eye(3) + np.sin(theta) * cross + (1 - np.cos(theta)) * (cross @ cross))


def random_rotation(rng: Generator) -> Coords:
    """A rotation [3, 3] drawn uniformly (from a random quaternion)."""
    w, x, y, z = unit(rng.standard_normal(4))
    return np.array(
        [
            [1 - 2 * (y * y + z * z), 2 * (x * y - w * z), 2 * (x * z + w * y)],
            [2 * (x * y + w * z), 1 - 2 * (x * x + z * z), 2 * (y * z - w * x)],
            [2 * (x * z - w * y), 2 * (y * z + w * x), 1 - 2 * (x * x + y * y)],
        ]
    )


def squared_distances(a: NDArray[Any], b: NDArray[Any]) -> NDArray[Any]:
    """All squared distances [..., N_a, N_b] between points [..., N_a, 3] and [..., N_b, 3]."""
    cross = a @ np.swapaxes(b, -1, -2)
    squares = np.sum(a * a, -1)[..., :, None] + np.sum(b * b, -1)[..., None, :]
    return np.asarray(np.maximum(squares - 2 * cross, 0))


def closest(a: NDArray[Any], b: NDArray[Any]) -> float:
    """Least distance between two sets of points; infinity where one is empty."""
    if len(a) == 0 or len(b) == 0:
        return float("inf")
    return float(np.sqrt(squared_distances(a, b).min()))


def first_contact(fixed: Coords, moving: Coords, direction: Coords, distance: float) -> float | None:
    """How far ``moving`` must be shifted along ``direction`` to stand at ``distance`` from ``fixed``.

    It comes from infinity, against ``direction``: the largest shift t at which the closest pair of
    ``fixed`` [N, 3] and ``moving + t * direction`` [M, 3] is at ``distance``. None where the two pass each
    other without meeting. Exact: each pair meets at a root of a quadratic equation.
    """
    direction = unit(direction)
    along = (moving @ direction)[None, :] - (fixed @ direction)[:, None]
    squares = squared_distances(fixed, moving)
    reach = distance**2 - (squares - along**2)
    if not (reach > 0).any():
        return None
    return float((np.sqrt(np.maximum(reach, 0)) - along)[reach > 0].max())
