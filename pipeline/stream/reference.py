"""Reference conformers of a crop's atoms (AF3 SI 2.8), gathered from the component library."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline import schema
from megafold.pipeline.stream.entry import Columns
from megafold.pipeline.stream.random_streams import random_rotations

#: Standard deviation of the random translation of each reference conformer, Å.
TRANSLATION = 1.0


@dataclass(frozen=True, kw_only=True)
class ReferenceTables:
    """The component library, laid out for gathering: all components' atoms and bonds in flat arrays.

    ``components``, ``atoms`` and ``bonds`` are the library's tables by column name; ``name_code``
    [N_component_atom] packs a name's four characters into one number (see :func:`name_code`).
    """

    index: Mapping[str, int]
    components: Columns
    atoms: Columns
    bonds: Columns
    ref_pos: NDArray[np.float32]
    name_chars: NDArray[np.int32]
    name_code: NDArray[np.int64]

    @classmethod
    def from_arrays(
        cls, arrays: Mapping[str, NDArray[Any]], attributes: Mapping[str, Any]
    ) -> "ReferenceTables":
        """View a component object."""
        tables = {
            name: schema.COMPONENT.table(name).unpack(arrays[name])
            for name in ("components", "atoms", "bonds")
        }
        chars = np.stack([tables["atoms"][f"name_{place}"] for place in range(4)], axis=1)
        return cls(
            index={key: place for place, key in enumerate(attributes["keys"])},
            **tables,
            ref_pos=arrays["ref_pos"],
            name_chars=(chars - 32).astype(np.int32),
            name_code=(chars.astype(np.int64) << np.array([0, 8, 16, 24])).sum(axis=1),
        )


def name_code(name: str) -> int:
    """An atom name of up to four characters as the number :class:`ReferenceTables` holds for it."""
    return sum(ord(character) << 8 * place for place, character in enumerate(name.ljust(4)))


def reference_features(
    tables: ReferenceTables,
    library_atom: NDArray[np.int64],
    ref_space_uid: NDArray[np.int32],
    rng: np.random.Generator | None,
) -> dict[str, NDArray[Any]]:
    """The reference features of a crop's atoms.

    Args:
        tables: the component library.
        library_atom: [N_atom] index of each atom in the library's atoms.
        ref_space_uid: [N_atom] 0-based number of each atom's residue, without gaps.
        rng: rotates and translates each residue's conformer at random; None leaves it as it is stored.
    """
    mask = tables.atoms["ref_mask"][library_atom].astype(bool)
    position = np.where(mask[:, None], tables.ref_pos[library_atom], np.float32(0))
    if rng is not None and len(position):
        n_space = int(ref_space_uid[-1]) + 1
        rotation = random_rotations(rng, n_space)
        shift = (TRANSLATION * rng.standard_normal((n_space, 3))).astype(np.float32)
        position = np.einsum("aij,aj->ai", rotation[ref_space_uid], position) + shift[ref_space_uid]
        position[~mask] = 0
    return {
        "atom_mask": np.ones(len(mask), bool),
        "ref_mask": mask,
        "ref_element": tables.atoms["element"][library_atom].astype(np.int32),
        "ref_charge": tables.atoms["charge"][library_atom].astype(np.float32),
        "ref_space_uid": ref_space_uid,
        "ref_pos": position,
        "ref_atom_name_chars": tables.name_chars[library_atom],
    }
