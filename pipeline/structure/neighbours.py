"""Chains that touch: which pairs have atoms within a distance, and how many atoms."""

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray
from scipy.spatial import cKDTree

#: Rows of the table of bounding boxes that are compared at once: bounds memory for thousands of chains.
_ROWS = 256


def candidate_pairs(coords: list[NDArray[np.float64]], distance: float) -> Iterator[tuple[int, int]]:
    """Pairs (i < j) of chains whose bounding boxes are within ``distance``.

    ``coords``: [N_i, 3] each, no NaN.
    """
    filled = np.array([index for index, points in enumerate(coords) if len(points)], np.int64)
    if len(filled) < 2:
        return
    low = np.stack([coords[index].min(axis=0) for index in filled])
    high = np.stack([coords[index].max(axis=0) for index in filled])
    for start in range(0, len(filled), _ROWS):
        rows = slice(start, start + _ROWS)
        apart = np.maximum(low[None] - high[rows, None], low[rows, None] - high[None]).max(axis=2)
        for i, j in np.argwhere(apart <= distance).tolist():
            if start + i < j:
                yield int(filled[start + i]), int(filled[j])


class ChainTrees:
    """Search trees and bounding boxes of chains; trees are made when first needed."""

    def __init__(self, coords: list[NDArray[np.float64]]) -> None:
        self._coords = coords
        self._axes = [np.ascontiguousarray(points.T) for points in coords]
        self._boxes = [(axes.min(axis=1), axes.max(axis=1)) if axes.size else None for axes in self._axes]
        self._trees: dict[int, cKDTree] = {}

    def _tree(self, index: int) -> cKDTree:
        if index not in self._trees:
            self._trees[index] = cKDTree(self._coords[index])
        return self._trees[index]

    def near(self, first: int, second: int, distance: float) -> NDArray[np.int64]:
        """Indices of the atoms of chain ``first`` that are within ``distance`` of one of chain ``second``."""
        box = self._boxes[second]
        inside = np.arange(len(self._coords[first]) if box is not None else 0)
        for axis in range(3):
            if box is not None and len(inside):
                values = self._axes[first][axis][inside]
                inside = inside[(values >= box[0][axis] - distance) & (values <= box[1][axis] + distance)]
        if not len(inside):
            return inside
        found, _ = self._tree(second).query(self._coords[first][inside], distance_upper_bound=distance)
        return inside[np.isfinite(found)]

    def touch(self, first: int, second: int, distance: float) -> bool:
        """Whether the chains have atoms within ``distance``."""
        return len(self.near(first, second, distance)) > 0


def interfaces(coords: list[NDArray[np.float64]], distance: float) -> NDArray[np.int64]:
    """[P, 2] pairs (i < j) of chains with atoms within ``distance``, sorted (AF3 SI 2.5.1)."""
    trees = ChainTrees(coords)
    pairs = [pair for pair in candidate_pairs(coords, distance) if trees.touch(*pair, distance)]
    return np.array(sorted(pairs), np.int64).reshape(-1, 2)
