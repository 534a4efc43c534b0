"""From the rows of the ``chem_comp`` categories, text or binary, to a :class:`Component`."""

from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.chemistry.component import NO_STEREO, STEREO_R, STEREO_S, Component
from megafold.pipeline.chemistry.elements import atomic_number
from megafold.pipeline.errors import ComponentError

#: Bond orders by the first four letters: the CCD's ``value_order`` and monomer libraries' ``type``.
#: Aromatic and delocalised bonds that are not written as single and double have an unknown order.
_ORDERS: Final = {"SING": 1, "DOUB": 2, "TRIP": 3}
_AROMATIC_ORDERS: Final = frozenset({"AROM", "DELO"})
_STEREO: Final = {"R": STEREO_R, "S": STEREO_S}


class Rows(Protocol):
    """Rows of one category that belong to one component."""

    def __len__(self) -> int: ...

    def text(self, column: str) -> list[str]:
        """The column as text, '' where missing or where there is no such column."""
        ...

    def numbers(self, column: str) -> NDArray[np.float64]:
        """The column as float64, NaN where missing or where there is no such column."""
        ...


def component_from_rows(code: str, header: Rows, atoms: Rows, bonds: Rows) -> Component:
    """The component that the rows of ``chem_comp``, ``chem_comp_atom`` and ``chem_comp_bond`` define.

    ``header`` has one row or none. Understands the CCD's columns and those of monomer libraries
    (``x``, ``y``, ``z``, bond ``type``).

    Raises:
        ComponentError: an unknown element, a bond to an atom that is not there, a number that is none.
    """
    names = tuple(atoms.text("atom_id"))
    index = {name: position for position, name in enumerate(names)}
    try:
        pairs = [
            (index[a], index[b])
            for a, b in zip(bonds.text("atom_id_1"), bonds.text("atom_id_2"), strict=True)
        ]
        elements = [atomic_number(symbol) for symbol in atoms.text("type_symbol")]
    except KeyError as error:
        raise ComponentError(
            f"the definition of component {code!r} names an unknown element or bonded atom: {error}",
            reason="bad-definition",
        ) from error
    orders = [order[:4].upper() for order in _first_filled(bonds, "value_order", "type")]
    return Component(
        key=code,
        code=code,
        name=_single(header, "name"),
        type=_single(header, "type").upper() or "NON-POLYMER",
        one_letter=_single(header, "one_letter_code"),
        parent=_single(header, "mon_nstd_parent_comp_id"),
        alt_names=tuple(atoms.text("alt_atom_id")),
        atom_names=names,
        elements=np.array(elements, np.int16),
        charges=np.nan_to_num(atoms.numbers("charge")).round().astype(np.int16),
        leaving=_flags(atoms, "pdbx_leaving_atom_flag"),
        aromatic=_flags(atoms, "pdbx_aromatic_flag"),
        stereo=np.array([_STEREO.get(text, NO_STEREO) for text in atoms.text("pdbx_stereo_config")], np.int8),
        ideal_pos=_ideal(atoms),
        model_pos=_positions(atoms, "model_Cartn_x", "model_Cartn_y", "model_Cartn_z"),
        bonds=np.array(pairs, np.int32).reshape(-1, 2),
        bond_orders=np.array([_ORDERS.get(order, 0) for order in orders], np.int8),
        bond_aromatic=_flags(bonds, "pdbx_aromatic_flag")
        | np.array([order in _AROMATIC_ORDERS for order in orders], bool),
    )


def _single(header: Rows, column: str) -> str:
    return header.text(column)[0].strip() if len(header) else ""


def _first_filled(rows: Rows, *columns: str) -> list[str]:
    texts: list[str] = []
    for column in columns:
        texts = rows.text(column)
        if any(texts):
            break
    return texts


def _flags(rows: Rows, column: str) -> NDArray[np.bool_]:
    return np.array([text.upper() in ("Y", "YES", "1") for text in rows.text(column)], bool)


def _positions(atoms: Rows, *columns: str) -> NDArray[np.float32]:
    return np.stack([atoms.numbers(column) for column in columns], axis=1).astype(np.float32)


def _ideal(atoms: Rows) -> NDArray[np.float32]:
    """Idealised coordinates; a monomer library's only coordinates are its ideal ones."""
    ideal = _positions(atoms, *(f"pdbx_model_Cartn_{axis}_ideal" for axis in "xyz"))
    return ideal if np.isfinite(ideal).any() else _positions(atoms, "x", "y", "z")
