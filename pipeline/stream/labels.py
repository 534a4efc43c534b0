"""The ground truth of a crop: centred, rotated and translated at random (AF3 SI 3.7.1)."""

from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.stream.random_streams import random_rotations

#: Standard deviation of the random translation, Å (AF3 SI algorithm 19).
TRANSLATION: Final = 1.0


@dataclass(frozen=True)
class Frame:
    """A rigid motion: ``x -> (x - center) @ rotation.T + shift``."""

    center: NDArray[np.float64]
    rotation: NDArray[np.float64]
    shift: NDArray[np.float64]

    def apply(self, coords: NDArray[np.float32]) -> NDArray[np.float64]:
        """Move [..., 3] coordinates; NaN stays NaN."""
        moved: NDArray[np.float64] = (coords.astype(np.float64) - self.center) @ self.rotation.T + self.shift
        return moved


def label_frame(
    coords: NDArray[np.float32], coords_mask: NDArray[np.bool_], rng: np.random.Generator | None
) -> Frame:
    """The frame of a crop: centred on its resolved atoms, then moved at random; None only centres."""
    center = coords[coords_mask].mean(axis=0, dtype=np.float64) if coords_mask.any() else np.zeros(3)
    if rng is None:
        return Frame(center, np.eye(3), np.zeros(3))
    return Frame(center, random_rotations(rng, 1)[0].astype(np.float64), TRANSLATION * rng.standard_normal(3))


def label_features(
    coords: NDArray[np.float32],
    b_factor: NDArray[np.float32],
    coords_mask: NDArray[np.bool_],
    rng: np.random.Generator | None,
) -> dict[str, NDArray[Any]]:
    """The label features of a crop's atoms.

    Args:
        coords: [N_atom, 3] in Å, NaN where unresolved.
        b_factor: [N_atom] in Å², NaN where unresolved.
        coords_mask: [N_atom] True: resolved.
        rng: as for :func:`label_frame`.
    """
    moved = label_frame(coords, coords_mask, rng).apply(coords)
    return {
        "coords": np.where(coords_mask[:, None], moved, 0).astype(np.float32),
        "coords_mask": coords_mask,
        "b_factor": np.where(coords_mask & np.isfinite(b_factor), b_factor, np.float32(0)),
    }
