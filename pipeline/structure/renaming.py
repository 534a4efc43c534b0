"""Atom names of another version of the dictionary: which atom of the definition each atom of the file is.

Dictionaries rename atoms now and then, and files written before keep the old names (``O1P``, ``C5*``). The
dictionary lists the names that an atom had before; other programs' names of the standard residues are few.
Where neither helps, the bonds that the coordinates show tell which atom is which: they have to be a part of
the definition's bonds, element by element.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.chemistry import Component
from megafold.pipeline.schema import AMINO_ACIDS, DNA_BASES, RNA_BASES
from megafold.pipeline.structure.elements import COVALENT_RADII, NON_METALS

#: Names that simulation programs give to atoms of amino acids, and those of nucleotides before 2007.
_AMINO_ACID_NAMES: Final = {
    **dict.fromkeys(("OT1", "OC1", "O1"), "O"),
    **dict.fromkeys(("OT2", "OC2", "O2", "OT"), "OXT"),
}
_NUCLEOTIDE_NAMES: Final = {"O1P": "OP1", "O2P": "OP2", "O3P": "OP3"}
_NUCLEOTIDES: Final = frozenset((*RNA_BASES, *DNA_BASES, "N", "DN"))

_SLACK: Final = 0.3  # Å, by which a bond may be longer than the sum of the radii
_MAX_STEPS: Final = 20_000


def older_names(component: Component, observed: Mapping[str, int]) -> dict[str, str]:
    """The definition's names of those atoms of a file that go by older ones.

    ``observed``: atomic number (0 for unknown) by name, of all heavy atoms that the file has of this
    component. Where all of them are names of the older dictionary, they are read so, even those that now mean
    another atom; otherwise a name that means something now means just that.
    """
    current = component.atom_index
    if set(observed) <= set(current):
        return {}
    counts = Counter(component.alt_names)
    pairs = zip(component.alt_names, component.atom_names, strict=False)
    older = {(old or name): name for old, name in pairs if counts[old] == 1 or not old}

    def fits(name: str, target: str | None) -> bool:
        return target in current and observed[name] in (0, component.elements[current[target]])

    if all(fits(name, older.get(name)) for name in observed):
        return {name: older[name] for name in observed if older[name] != name}
    found: dict[str, str] = {}
    for name in observed:
        if name not in current:
            target = older.get(name) or _usual_name(component.code, name)
            if target and fits(name, target) and target not in observed and target not in found.values():
                found[name] = target
    return found


def _usual_name(code: str, name: str) -> str:
    """The dictionary's name of an atom of a standard residue by another program's, '' for none."""
    if code in AMINO_ACIDS:
        return "CD1" if (code, name) == ("ILE", "CD") else _AMINO_ACID_NAMES.get(name, "")
    if code in _NUCLEOTIDES:
        return _NUCLEOTIDE_NAMES.get(name, name.replace("*", "'"))
    return ""


def match_names(
    component: Component, names: Sequence[str], elements: Sequence[int], coords: NDArray[np.float64]
) -> dict[str, str] | None:
    """The definition's name of each of one residue's heavy atoms, or None where the bonds do not fit.

    ``coords`` [N, 3] Å. Of several ways to fit, names that stay the same are preferred, then the definition's
    order.
    """
    if not names or not NON_METALS.issuperset(elements) or not np.isfinite(coords).all():
        return None
    radii = COVALENT_RADII[list(elements)]
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
