"""How good a structure is: lDDT and RMSD, in float64."""

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

#: Distance errors up to which a pair counts as kept, Å (Mariani et al. 2013).
LDDT_THRESHOLDS = (0.5, 1.0, 2.0, 4.0)
#: Pairs closer than this in the true structure count, Å.
INCLUSION_RADIUS = 15.0
_ROWS_AT_ONCE = 1024


def lddt(
    predicted: ArrayLike,
    truth: ArrayLike,
    mask: ArrayLike | None = None,
    residue: ArrayLike | None = None,
    radius: float = INCLUSION_RADIUS,
) -> float:
    """Local distance difference test of a structure against the true one (Mariani et al. 2013).

    The share of pairs closer than ``radius`` in the true structure whose distance is off by less than 0.5,
    1, 2 and 4 Å, averaged over these four. Give Cα positions for lDDT-Cα. Equivalent atoms are not renamed.

    Args:
        predicted: positions [N, 3], Å.
        truth: true positions [N, 3], Å.
        mask: bool [N]; atoms that have true positions. None for all.
        residue: integers [N]; pairs within one residue do not count. None counts them.
        radius: Å.

    Returns:
        Between 0 and 1; NaN where no pair counts.
    """
    x, y, kept = _resolved(predicted, truth, mask)
    group = np.arange(len(x)) if residue is None else np.asarray(residue)[kept]
    preserved, pairs = 0, 0
    for start in range(0, len(x), _ROWS_AT_ONCE):
        rows = slice(start, start + _ROWS_AT_ONCE)
        true_distance = np.linalg.norm(y[rows, None] - y, axis=-1)
        distance = np.linalg.norm(x[rows, None] - x, axis=-1)
        counted = (true_distance < radius) & (group[rows, None] != group)
        error = np.abs(distance - true_distance)[counted]
        pairs += error.size
        preserved += sum(int(np.count_nonzero(error < threshold)) for threshold in LDDT_THRESHOLDS)
    return preserved / (len(LDDT_THRESHOLDS) * pairs) if pairs else float("nan")


def rmsd(predicted: ArrayLike, truth: ArrayLike, mask: ArrayLike | None = None) -> float:
    """Root mean square deviation after the best superposition by rotation and translation, Å.

    Args:
        predicted: positions [N, 3], Å.
        truth: true positions [N, 3], Å.
        mask: bool [N]; atoms that have true positions. None for all.

    Returns:
        NaN where there is no atom.
    """
    x, y, _ = _resolved(predicted, truth, mask)
    if not len(x):
        return float("nan")
    x, y = x - x.mean(axis=0), y - y.mean(axis=0)
    # Kabsch: the least squares need the singular values of the covariance alone; the least of them counts
    # negative when the best orthogonal map is a reflection.
    covariance = x.T @ y
    singular = np.linalg.svd(covariance, compute_uv=False)
    if np.linalg.det(covariance) < 0:
        singular[2] *= -1
    squares = (x**2).sum() + (y**2).sum() - 2 * singular.sum()
    return float(np.sqrt(max(squares, 0.0) / len(x)))


def _resolved(
    predicted: ArrayLike, truth: ArrayLike, mask: ArrayLike | None
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[Any]]:
    """Both structures in float64 without the atoms that the mask leaves out, and the mask."""
    x, y = np.asarray(predicted, np.float64), np.asarray(truth, np.float64)
    if x.shape != y.shape or x.ndim != 2 or x.shape[1] != 3:
        raise ValueError(f"structures must have the same shape [N, 3], not {x.shape} and {y.shape}")
    kept = np.ones(len(x), bool) if mask is None else np.asarray(mask, bool)
    return x[kept], y[kept], kept
