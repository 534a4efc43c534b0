"""From the deposited chains to the tables of the assembly."""

from collections import defaultdict
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.structure.assembly import Copy
from megafold.pipeline.structure.connections import Link
from megafold.pipeline.structure.entry import Report
from megafold.pipeline.structure.unit import Unit

#: Å; how well the distance between two copies' atoms has to agree with what the file says of their bond.
_TOLERANCE: Final = 0.3
#: Å; longest bond where the file does not say.
_LONGEST: Final = 2.6
#: Å; atoms that are closer lie on each other.
_SAME_PLACE: Final = 0.5

_INDEX_COLUMNS: Final = {
    "residue": "residue",
    **dict.fromkeys(
        ("first_atom", "center_atom", "rep_atom", "frame_atom_0", "frame_atom_1", "frame_atom_2"), "atom"
    ),
}


class Expansion:
    """Which rows of the unit's tables make the assembly's, and by how much indices shift.

    ``first``: by table name, first row of each copy.
    """

    def __init__(self, unit: Unit, copies: list[Copy]) -> None:
        self._unit = unit
        self._copies = copies
        chains = np.array([copy.chain for copy in copies], np.int64)
        self.spans = {name: spans[chains] for name, spans in unit.spans.items()}
        self.first = {name: np.cumsum(spans[:, 1]) - spans[:, 1] for name, spans in self.spans.items()}
        self._rows = {name: _ranges(spans[:, 0], spans[:, 1]) for name, spans in self.spans.items()}

    def copy_of(self, table: str) -> NDArray[np.int64]:
        """The copy that each row of a table belongs to."""
        return np.repeat(np.arange(len(self._copies)), self.spans[table][:, 1])

    def columns(self, table: str, values: dict[str, NDArray[np.int64]]) -> dict[str, NDArray[np.int64]]:
        """Columns of a table (``residue``, ``token``, ``atom``) of the assembly; -1 stays -1."""
        copy = self.copy_of(table)
        expanded = {}
        for name, column in values.items():
            taken = column[self._rows[table]]
            target = _INDEX_COLUMNS.get(name) if table == "token" else None
            if target is not None:
                shift = (self.first[target] - self.spans[target][:, 0])[copy]
                taken = np.where(taken < 0, -1, taken + shift)
            expanded[name] = taken
        return expanded

    def rows(self, table: str, values: NDArray[Any]) -> NDArray[Any]:
        """An array along a table's rows, for the assembly."""
        return values[self._rows[table]]

    def atom(self, copy: int, atom: int) -> int:
        """The assembly's index of a unit's atom in a copy of its chain."""
        return int(self.first["atom"][copy] + atom - self.spans["atom"][copy, 0])


def move_copies(unit: Unit, copies: list[Copy]) -> list[NDArray[np.float64]]:
    """Coordinates of every copy, [N_i, 3] Å, NaN where unresolved."""
    return [
        copy.move(unit.coords[first : first + count])
        for copy in copies
        for first, count in (unit.spans["atom"][copy.chain].tolist(),)
    ]


def assembly_bonds(
    unit: Unit, copies: list[Copy], expansion: Expansion, coords: list[NDArray[np.float64]], report: Report
) -> list[tuple[int, int, int, int]]:
    """Bonds of the assembly as (atom, atom, order, kind), sorted, each once.

    A bond within the deposited coordinates exists in every copy, between that copy's atoms. One that reaches
    into a symmetry mate exists between the copies that are as far apart as the file says; where the assembly
    lacks the mate it does not exist.
    """
    by_chain: dict[int, dict[str, int]] = defaultdict(dict)
    for index, copy in enumerate(copies):
        by_chain[copy.chain][copy.operator] = index
    atom_chain = np.repeat(np.arange(len(unit.chains)), unit.spans["atom"][:, 1])
    bonds: dict[tuple[int, int], tuple[int, int]] = {}
    lost = 0
    for link in unit.links:
        first, second = (by_chain[int(atom_chain[atom])] for atom in (link.first, link.second))
        pairs = [(first[name], second[name]) for name in first if name in second] if not link.across else []
        if not pairs:
            pairs = list(_near_pairs(unit, link, list(first.values()), list(second.values()), coords))
        lost += bool(first and second and not pairs)
        for a, b in pairs:
            i, j = sorted((expansion.atom(a, link.first), expansion.atom(b, link.second)))
            bonds.setdefault((i, j), (link.order, int(link.kind)))
    report.remove("bonds_out_of_assembly", lost)
    return [(*atoms, *bonds[atoms]) for atoms in sorted(bonds)]


def _near_pairs(
    unit: Unit, link: Link, first: list[int], second: list[int], coords: list[NDArray[np.float64]]
) -> Iterator[tuple[int, int]]:
    """Copies of the link's two chains whose atoms are a bond apart."""
    if not first or not second:
        return
    own = _positions(unit, link.first, first, coords)
    other = _positions(unit, link.second, second, coords)
    distance = np.linalg.norm(own[:, None] - other[None], axis=-1)
    if np.isfinite(link.distance):
        fits = np.abs(distance - link.distance) <= _TOLERANCE
    else:
        fits = distance <= _LONGEST
    for a, b in np.argwhere(fits & (distance > _SAME_PLACE)).tolist():
        yield first[a], second[b]


def _positions(
    unit: Unit, atom: int, copies: list[int], coords: list[NDArray[np.float64]]
) -> NDArray[np.float64]:
    chain = int(np.searchsorted(unit.spans["atom"][:, 0], atom, side="right") - 1)
    return np.stack([coords[copy][atom - int(unit.spans["atom"][chain, 0])] for copy in copies])


def _ranges(first: NDArray[np.int64], count: NDArray[np.int64]) -> NDArray[np.int64]:
    """All of first[i], first[i] + 1, … count[i] items, one after the other."""
    ends = np.cumsum(count)
    return np.arange(ends[-1] if len(ends) else 0) + np.repeat(first - (ends - count), count)
