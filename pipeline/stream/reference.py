"""Reference conformers of a crop's atoms (AF3 SI 2.8), gathered from the component library."""

from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.chemistry.library import ComponentLibrary
from megafold.pipeline.stream.random_streams import random_rotations

#: Standard deviation of the random translation of each reference conformer, Å.
TRANSLATION: Final = 1.0

_NAME_SHIFTS: Final = np.array([0, 8, 16, 24])


def name_code(name: str) -> int:
    """An atom name of up to four characters as one number, to compare names by."""
    return sum(ord(character) << 8 * place for place, character in enumerate(name.ljust(4)))


def name_codes(library: ComponentLibrary, library_atom: NDArray[np.int64]) -> NDArray[np.int64]:
    """[N_atom] :func:`name_code` of each atom's name."""
    chars = library.atom_name_chars[library_atom].astype(np.int64)
    found: NDArray[np.int64] = (chars << _NAME_SHIFTS).sum(axis=1)
    return found


def reference_features(
    library: ComponentLibrary,
    library_atom: NDArray[np.int64],
    ref_space_uid: NDArray[np.int32],
    rng: np.random.Generator | None,
) -> dict[str, NDArray[Any]]:
    """The reference features of a crop's atoms.

    Args:
        library: the component library.
        library_atom: [N_atom] index of each atom in the library's atoms.
        ref_space_uid: [N_atom] 0-based number of each atom's residue, without gaps.
        rng: rotates and translates each residue's conformer at random; None leaves it as it is stored.
    """
    mask = library.ref_mask[library_atom]
    position = np.where(mask[:, None], library.ref_pos[library_atom], np.float32(0))
    if rng is not None and len(position):
        n_space = int(ref_space_uid[-1]) + 1
        rotation = random_rotations(rng, n_space)
        shift = (TRANSLATION * rng.standard_normal((n_space, 3))).astype(np.float32)
        position = np.einsum("aij,aj->ai", rotation[ref_space_uid], position) + shift[ref_space_uid]
        position[~mask] = 0
    return {
        "atom_mask": np.ones(len(mask), bool),
        "ref_mask": mask,
        "ref_element": library.elements[library_atom],
        "ref_charge": library.charges[library_atom].astype(np.float32),
        "ref_space_uid": ref_space_uid,
        "ref_pos": position,
        "ref_atom_name_chars": library.atom_name_chars[library_atom] - 32,
    }
