"""Atom names of another version of the dictionary: which atom of the definition each atom of the file is.

Dictionaries rename atoms now and then, and files written before keep the old names. The bonds that the
coordinates
show then tell which atom is which: they have to be a part of the definition's bonds, element by element.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.chemistry import Component

#: Covalent radii in Å (Cordero et al. 2008) of the elements whose bonds geometry can tell.
_RADII: Final = {
    5: 0.84,
    6: 0.76,
    7: 0.71,
    8: 0.66,
    9: 0.57,
    14: 1.11,
    15: 1.07,
    16: 1.05,
    17: 1.02,
    34: 1.20,
    35: 1.20,
    53: 1.39,
}
_SLACK: Final = 0.3  # Å, by which a bond may be longer than the sum of the radii
_MAX_STEPS: Final = 20_000


def match_names(
    component: Component, names: Sequence[str], elements: Sequence[int], coords: NDArray[np.float64]
) -> dict[str, str] | None:
    """The definition's name of each of one residue's heavy atoms, or None where the bonds do not fit.

    ``coords`` [N, 3] Å. Of several ways to fit, names that stay the same are preferred, then the definition's
    order.
    """
    if not names or not set(elements) <= set(_RADII) or not np.isfinite(coords).all():
        return None
    radii = np.array([_RADII[element] for element in elements])
    distances = np.linalg.norm(coords[:, None] - coords[None], axis=-1)
    bonded = (distances < radii[:, None] + radii[None] + _SLACK) & ~np.eye(len(names), dtype=bool)
    search = _Search(component, list(names), list(elements), bonded)
    found = search.run()
    if found is None:
        return None
    return {name: component.atom_names[target] for name, target in zip(names, found, strict=True)}


class _Search:
    """Backtracking search for the observed graph within the definition's."""

    def __init__(
        self, component: Component, names: list[str], elements: list[int], bonded: NDArray[np.bool_]
    ) -> None:
        self._names = names
        self._elements = elements
        self._bonded = bonded
        self._component = component
        size = len(component)
        self._target = np.zeros((size, size), bool)
        if len(component.bonds):
            self._target[component.bonds[:, 0], component.bonds[:, 1]] = True
            self._target |= self._target.T
        self._order = self._connected_order()
        self._steps = 0

    def run(self) -> list[int] | None:
        images = [-1] * len(self._names)
        return images if self._extend(0, images) else None

    def _connected_order(self) -> list[int]:
        """Atoms so that each comes, where it can, after one it is bonded to."""
        order: list[int] = []
        waiting = list(range(len(self._names)))
        while waiting:
            placed = [atom for atom in waiting if any(self._bonded[atom, other] for other in order)]
            atom = (placed or waiting)[0]
            waiting.remove(atom)
            order.append(atom)
        return order

    def _extend(self, depth: int, images: list[int]) -> bool:
        if depth == len(self._order):
            return True
        self._steps += 1
        if self._steps > _MAX_STEPS:
            return False
        atom = self._order[depth]
        placed = self._order[:depth]
        for target in self._candidates(atom, placed, images):
            images[atom] = target
            if self._extend(depth + 1, images):
                return True
            images[atom] = -1
        return False

    def _candidates(self, atom: int, placed: list[int], images: list[int]) -> list[int]:
        used = set(images)
        fitting = [
            target
            for target in np.flatnonzero(self._component.elements == self._elements[atom]).tolist()
            if target not in used
            and all(self._bonded[atom, other] == self._target[target, images[other]] for other in placed)
        ]
        name = self._names[atom]
        return sorted(fitting, key=lambda target: self._component.atom_names[target] != name)
