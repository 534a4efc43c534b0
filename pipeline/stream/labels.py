"""The ground truth of a crop: centred, rotated and translated at random (AF3 SI 3.7.1)."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.stream.random_streams import random_rotations

#: Standard deviation of the random translation, Å (AF3 SI algorithm 19).
TRANSLATION: Final = 1.0


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
        rng: rotates and translates; None only centres.
    """
    position = coords.astype(np.float64)
    if coords_mask.any():
        position -= position[coords_mask].mean(axis=0)
    if rng is not None:
        position = position @ random_rotations(rng, 1)[0].T + TRANSLATION * rng.standard_normal(3)
    return {
        "coords": np.where(coords_mask[:, None], position, 0).astype(np.float32),
        "coords_mask": coords_mask,
        "b_factor": np.where(coords_mask & np.isfinite(b_factor), b_factor, np.float32(0)),
    }
