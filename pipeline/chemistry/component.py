"""The definition of one chemical component, whatever it was read from."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import ArrayLike, NDArray

from megafold.cache_store import Content
from megafold.pipeline.chemistry.elements import HYDROGEN
from megafold.pipeline.errors import ComponentError

#: Marks the key of a definition that an input brought along, so that no dictionary's code can clash with it.
OWN_PREFIX: Final = "~"
_KEY_DIGITS: Final = 12
#: A user's dictionary may have codes that begin with the mark alone.
_OWN_KEY: Final = re.compile(rf"{OWN_PREFIX}.+:[0-9a-f]{{{_KEY_DIGITS}}}", re.DOTALL)
_ATOM_DTYPES: Final[dict[str, type]] = {
    "elements": np.int16,
    "charges": np.int16,
    "leaving": np.bool_,
    "aromatic": np.bool_,
    "stereo": np.int8,
}

NO_STEREO: Final = 0
STEREO_R: Final = 1
STEREO_S: Final = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Component:
    """A chemical component: atoms and bonds in the definition's order, hydrogens and leaving atoms included.

    Construction brings the arrays into one form (dtypes, positions rounded to 1e-3 Å, each bond once with its
    lower atom first, bonds sorted) and makes them read-only, so that the same chemistry gives the same
    :attr:`digest` whatever it was read from.

    Attributes:
        key: the dictionary's code, or ``~CODE:digest12`` for a definition that an input brought along.
        code: the component's code.
        name: what it is called; not part of the digest.
        type: the dictionary's type in capitals, such as ``L-PEPTIDE LINKING``.
        one_letter: one-letter code, several letters where it stands for several residues, '' for none.
        parent: code of the standard component it is a modification of, '' for none; ``THR, TYR, GLY`` where
            it stands for several.
        atom_names: [N_atom] names, unique.
        alt_names: [N_atom] names that an older dictionary had, '' or the same where none; empty where no
            definition tells. Not part of the digest: no feature depends on them.
        elements: [N_atom] int16 atomic numbers, 0 for unknown.
        charges: [N_atom] int16 formal charges.
        leaving: [N_atom] bool, leaves when the component is linked.
        aromatic: [N_atom] bool.
        stereo: [N_atom] int8, 0 none, 1 R, 2 S.
        ideal_pos: [N_atom, 3] float32 idealised coordinates, Å, NaN where missing.
        model_pos: [N_atom, 3] float32 coordinates from an experimental model, Å, NaN where missing.
        bonds: [N_bond, 2] int32 atom indices.
        bond_orders: [N_bond] int8: 1, 2, 3; 0 where unknown.
        bond_aromatic: [N_bond] bool.

    Raises:
        ComponentError: arrays of different lengths, repeated atom names, bonds to atoms that are not there.
    """

    key: str
    code: str
    name: str = ""
    type: str = "NON-POLYMER"
    one_letter: str = ""
    parent: str = ""
    alt_names: tuple[str, ...] = ()
    atom_names: tuple[str, ...]
    elements: NDArray[np.int16]
    charges: NDArray[np.int16]
    leaving: NDArray[np.bool_]
    aromatic: NDArray[np.bool_]
    stereo: NDArray[np.int8]
    ideal_pos: NDArray[np.float32]
    model_pos: NDArray[np.float32]
    bonds: NDArray[np.int32]
    bond_orders: NDArray[np.int8]
    bond_aromatic: NDArray[np.bool_]

    def __post_init__(self) -> None:
        count = len(self.atom_names)
        if len(set(self.atom_names)) != count:
            raise self._error("repeats atom names; give each atom its own", "repeated-atom-name")
        for name, dtype in _ATOM_DTYPES.items():
            self._set(name, np.array(getattr(self, name), dtype=dtype), (count,))
        for name in ("ideal_pos", "model_pos"):
            self._set(name, _rounded(getattr(self, name)), (count, 3))
        bonds = np.array(self.bonds, dtype=np.int32).reshape(-1, 2)
        if len(bonds) and (bonds.min() < 0 or bonds.max() >= count or (bonds[:, 0] == bonds[:, 1]).any()):
            raise self._error("has a bond to an atom that is not there", "bad-bond")
        # np.unique sorts, and keeps the first of repeated bonds.
        bonds, first = np.unique(np.sort(bonds, axis=1), axis=0, return_index=True)
        self._set("bonds", bonds, (len(bonds), 2))
        self._set("bond_orders", np.array(self.bond_orders, dtype=np.int8)[first], (len(bonds),))
        self._set("bond_aromatic", np.array(self.bond_aromatic, dtype=bool)[first], (len(bonds),))

    def _set(self, name: str, array: NDArray[Any], shape: tuple[int, ...]) -> None:
        if array.shape != shape:
            raise self._error(f"has {name} of shape {array.shape}, not {shape}", "bad-definition")
        array.flags.writeable = False
        object.__setattr__(self, name, array)

    def _error(self, message: str, reason: str) -> ComponentError:
        return ComponentError(f"the definition of component {self.code!r} {message}", reason=reason)

    @classmethod
    def from_atoms(
        cls,
        code: str,
        names: Sequence[str],
        elements: ArrayLike,
        *,
        bonds: ArrayLike = (),
        bond_orders: ArrayLike | None = None,
        charges: ArrayLike | None = None,
        pos: ArrayLike | None = None,
    ) -> "Component":
        """A component whose definition an input brought along: its key is ``~CODE:digest12``.

        ``elements`` are atomic numbers [N_atom]; ``bonds`` atom indices [N_bond, 2]; ``bond_orders`` 1, 2, 3
        or 0 for unknown (default); ``charges`` formal charges (default 0); ``pos`` the input's coordinates
        [N_atom, 3] in Å, NaN where missing (default: none), which become ``model_pos``. For further fields
        use ``dataclasses.replace(component, parent="LYS").as_own()``.

        Raises:
            ComponentError: the arrays do not fit each other.
        """
        count, pairs = len(names), np.array(bonds, dtype=np.int32).reshape(-1, 2)
        absent = np.full((count, 3), np.nan, np.float32)
        orders = np.zeros(len(pairs), np.int8) if bond_orders is None else np.asarray(bond_orders, np.int8)
        return cls(
            key=code,
            code=code,
            atom_names=tuple(names),
            elements=np.asarray(elements, np.int16),
            charges=np.zeros(count, np.int16) if charges is None else np.asarray(charges, np.int16),
            leaving=np.zeros(count, bool),
            aromatic=np.zeros(count, bool),
            stereo=np.zeros(count, np.int8),
            ideal_pos=absent,
            model_pos=absent if pos is None else np.asarray(pos, np.float32),
            bonds=pairs,
            bond_orders=orders,
            bond_aromatic=np.zeros(len(pairs), bool),
        ).as_own()

    def as_own(self) -> "Component":
        """The same definition under the key ``~CODE:digest12``: an input's own."""
        return replace(self, key=f"{OWN_PREFIX}{self.code}:{self.digest[:_KEY_DIGITS]}")

    @cached_property
    def digest(self) -> str:
        """SHA-256 (hex) of what features can depend on: not the key, name, dates or descriptors."""
        arrays = {
            "elements": self.elements,
            "charges": self.charges,
            "leaving": self.leaving,
            "aromatic": self.aromatic,
            "stereo": self.stereo,
            "ideal_pos": self.ideal_pos,
            "model_pos": self.model_pos,
            "bonds": self.bonds,
            "bond_orders": self.bond_orders,
            "bond_aromatic": self.bond_aromatic,
        }
        attributes = {
            "type": self.type,
            "one_letter": self.one_letter,
            "parent": self.parent,
            "atom_names": list(self.atom_names),
        }
        return Content(arrays=arrays, attributes=attributes).digest().hex

    def bond_rows(self) -> list[tuple[int, int, int, bool]]:
        """Bonds as Python values: atom, atom, order, whether aromatic."""
        return list(
            zip(*self.bonds.T.tolist(), self.bond_orders.tolist(), self.bond_aromatic.tolist(), strict=True)
        )

    @cached_property
    def atom_index(self) -> dict[str, int]:
        """Atom index by name."""
        return {name: index for index, name in enumerate(self.atom_names)}

    @property
    def is_own(self) -> bool:
        """Whether an input brought the definition along."""
        return is_own_key(self.key)

    @cached_property
    def heavy(self) -> NDArray[np.bool_]:
        """[N_atom] True for atoms other than hydrogen."""
        return np.asarray(self.elements != HYDROGEN)

    def __len__(self) -> int:
        return len(self.atom_names)

    def __bool__(self) -> bool:
        """True: a component without atoms is a component, and not what a dictionary does not have."""
        return True

    def __repr__(self) -> str:
        return f"Component({self.key}, {self.type}, {len(self)} atoms, {len(self.bonds)} bonds)"


def is_own_key(key: str) -> bool:
    """Whether a component's key is that of a definition that an input brought along.

    >>> is_own_key("~LIG:0123456789ab"), is_own_key("~LIG"), is_own_key("ALA")
    (True, False, False)
    """
    return _OWN_KEY.fullmatch(key) is not None


def own_code(key: str) -> str:
    """The code that an input calls its own component by, from the component's key.

    >>> own_code("~LIG:0123456789ab")
    'LIG'
    """
    return key.removeprefix(OWN_PREFIX).rpartition(":")[0]


def _rounded(pos: ArrayLike) -> NDArray[np.float32]:
    """Coordinates at mmCIF's own precision; negative zero becomes zero, a half-missing atom missing."""
    rounded = np.round(np.asarray(pos, np.float64), 3) + 0.0
    if rounded.ndim == 2:
        rounded[~np.isfinite(rounded).all(axis=1)] = np.nan
    return rounded.astype(np.float32)
