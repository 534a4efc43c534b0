"""The component library: many references in one object, and the views that the stream reads. NumPy alone."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megafold.cache_store import Content
from megafold.pipeline.chemistry.elements import HYDROGEN
from megafold.pipeline.chemistry.reference import VERSION, ReferenceComponent
from megafold.pipeline.chemistry.symmetry import AUTOMORPHISM_CAP
from megafold.pipeline.content import make_content
from megafold.pipeline.schema import COMPONENT, RefOrigin

_NAME_LENGTH = 4
_NAME_COLUMNS = tuple(f"name_{place}" for place in range(_NAME_LENGTH))


def library_content(refs: Sequence[ReferenceComponent]) -> Content:
    """The library object of these components, in the order of their keys.

    The same reference may occur several times.

    Raises:
        ValueError: two different definitions under one key.
    """
    by_key: dict[str, ReferenceComponent] = {}
    for ref in refs:
        if by_key.setdefault(ref.key, ref).digest != ref.digest:
            raise ValueError(f"two definitions of {ref.key}: {by_key[ref.key].digest}, {ref.digest}")
    ordered = [by_key[key] for key in sorted(by_key)]
    arrays = {
        "components": COMPONENT.table("components").pack(_component_columns(ordered)),
        "atoms": COMPONENT.table("atoms").pack(_atom_columns(ordered)),
        "ref_pos": _joined([ref.ref_pos for ref in ordered], np.float32, 3),
        "bonds": COMPONENT.table("bonds").pack(_bond_columns(ordered)),
        "automorphisms": _joined([ref.automorphisms.ravel() for ref in ordered], np.int16),
    }
    attributes = {
        "kind": COMPONENT.kind,
        "version": VERSION,
        "keys": [ref.key for ref in ordered],
        "digests": [ref.digest for ref in ordered],
        "automorphism_cap": AUTOMORPHISM_CAP,
        "capped": [ref.key for ref in ordered if ref.capped],
        "failures": {ref.key: ref.failure for ref in ordered if ref.failure},
    }
    return make_content(COMPONENT.kind, arrays, attributes)


def _joined(parts: Sequence[NDArray[Any]], dtype: type[np.generic], *tail: int) -> NDArray[Any]:
    return np.concatenate([np.empty((0, *tail), dtype), *parts]).astype(dtype)


def _component_columns(refs: Sequence[ReferenceComponent]) -> dict[str, NDArray[Any]]:
    atoms = np.array([len(ref.atom_names) for ref in refs], np.int64)
    bonds = np.array([len(ref.bonds) for ref in refs], np.int64)
    rows = np.array([len(ref.automorphisms) for ref in refs], np.int64)
    heavy = np.array([ref.automorphisms.shape[1] for ref in refs], np.int64)
    return {
        "first_atom": np.cumsum(atoms) - atoms,
        "atom_count": atoms,
        "first_bond": np.cumsum(bonds) - bonds,
        "bond_count": bonds,
        "first_automorphism": np.cumsum(rows * heavy) - rows * heavy,
        "automorphism_count": rows,
        "heavy_count": heavy,
        "ref_origin": np.array([ref.origin for ref in refs], np.int64),
    }


def _atom_columns(refs: Sequence[ReferenceComponent]) -> dict[str, NDArray[Any]]:
    names = _name_chars([name for ref in refs for name in ref.atom_names])
    return {
        **dict(zip(_NAME_COLUMNS, names.T, strict=True)),
        "element": _joined([ref.elements for ref in refs], np.int16),
        "charge": _joined([ref.charges for ref in refs], np.int16),
        "leaving": _joined([ref.leaving for ref in refs], np.bool_),
        "aromatic": _joined([ref.aromatic for ref in refs], np.bool_),
        "chirality": _joined([ref.stereo for ref in refs], np.int8),
        "ref_mask": _joined([ref.ref_mask for ref in refs], np.bool_),
    }


def _bond_columns(refs: Sequence[ReferenceComponent]) -> dict[str, NDArray[Any]]:
    bonds = _joined([ref.bonds for ref in refs], np.int32, 2)
    return {
        "atom_i": bonds[:, 0],
        "atom_j": bonds[:, 1],
        "order": _joined([ref.bond_orders for ref in refs], np.int8),
        "aromatic": _joined([ref.bond_aromatic for ref in refs], np.bool_),
    }


def _name_chars(names: Sequence[str]) -> NDArray[np.int32]:
    """[N_atom, 4] code points; AF3 knows the 64 characters from the space to ``_``, and four of them.

    Longer names are cut; small letters become capitals, any other character becomes ``_``.
    """
    text = "".join(name.upper()[:_NAME_LENGTH].ljust(_NAME_LENGTH) for name in names)
    chars = np.array([ord(char) for char in text], np.int32).reshape(-1, _NAME_LENGTH)
    return np.where((chars >= ord(" ")) & (chars <= ord("_")), chars, ord("_")).astype(np.int32)


@dataclass(frozen=True, kw_only=True, eq=False)
class LibraryComponent:
    """One component of a library; its arrays are views, do not change them.

    Attributes:
        key: the component's key.
        atom_name_chars: [N_atom, 4] int32 code points, 32 where there is none.
        elements, charges: [N_atom] int32.
        leaving, aromatic, ref_mask, heavy: [N_atom] bool.
        stereo: [N_atom] int32, 0 none, 1 R, 2 S.
        ref_pos: [N_atom, 3] float32 Å, NaN where masked.
        bonds: [N_bond, 2] int32.
        bond_orders: [N_bond] int32, 0 where unknown.
        bond_aromatic: [N_bond] bool.
        automorphisms: [N_automorphism, N_heavy] int16 indices into the component's atoms, the identity first.
        origin: where ``ref_pos`` comes from.
    """

    key: str
    atom_name_chars: NDArray[np.int32]
    elements: NDArray[np.int32]
    charges: NDArray[np.int32]
    leaving: NDArray[np.bool_]
    aromatic: NDArray[np.bool_]
    stereo: NDArray[np.int32]
    ref_pos: NDArray[np.float32]
    ref_mask: NDArray[np.bool_]
    heavy: NDArray[np.bool_]
    bonds: NDArray[np.int32]
    bond_orders: NDArray[np.int32]
    bond_aromatic: NDArray[np.bool_]
    automorphisms: NDArray[np.int16]
    origin: RefOrigin

    @cached_property
    def atom_names(self) -> tuple[str, ...]:
        """Names as stored: capitals, at most four characters."""
        return tuple("".join(map(chr, chars)).strip() for chars in self.atom_name_chars.tolist())

    @property
    def heavy_atoms(self) -> NDArray[np.int16]:
        """[N_heavy] indices of the heavy atoms: the identity automorphism."""
        return self.automorphisms[0]


class ComponentLibrary(Mapping[str, LibraryComponent]):
    """Components by key, and all of them as whole arrays.

    The whole arrays join the components' in the order of ``keys``; component ``n`` has the atoms
    ``first_atom[n] : first_atom[n] + atom_count[n]``, and likewise for bonds. Columns that a
    :class:`LibraryComponent` names mean the same here.
    """

    def __init__(self, content: Content) -> None:
        keys, digests = content.attributes["keys"], content.attributes["digests"]
        arrays = content.arrays
        self.keys_in_order: tuple[str, ...] = tuple(keys)  # type: ignore[arg-type]
        self.digests: tuple[str, ...] = tuple(digests)  # type: ignore[arg-type]
        self.index: dict[str, int] = {key: number for number, key in enumerate(self.keys_in_order)}
        self._components = COMPONENT.table("components").unpack(arrays["components"])
        atoms = COMPONENT.table("atoms").unpack(arrays["atoms"])
        bonds = COMPONENT.table("bonds").unpack(arrays["bonds"])
        self.first_atom, self.atom_count = self._components["first_atom"], self._components["atom_count"]
        self.first_bond, self.bond_count = self._components["first_bond"], self._components["bond_count"]
        self.ref_origin = self._components["ref_origin"]
        self.atom_name_chars = np.ascontiguousarray(arrays["atoms"][:_NAME_LENGTH].T)
        self.elements, self.charges, self.stereo = atoms["element"], atoms["charge"], atoms["chirality"]
        self.leaving, self.aromatic = atoms["leaving"] != 0, atoms["aromatic"] != 0
        self.ref_pos, self.ref_mask = arrays["ref_pos"], atoms["ref_mask"] != 0
        self.heavy = self.elements != HYDROGEN
        self.bonds = np.ascontiguousarray(arrays["bonds"][:2].T)
        self.bond_orders, self.bond_aromatic = bonds["order"], bonds["aromatic"] != 0
        self.automorphisms = arrays["automorphisms"]
        self._views: dict[str, LibraryComponent] = {}

    @classmethod
    def from_content(cls, content: Content) -> "ComponentLibrary":
        """The library that :func:`library_content` made."""
        return cls(content)

    def __getitem__(self, key: str) -> LibraryComponent:
        if key not in self._views:
            self._views[key] = self._view(key)
        return self._views[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys_in_order)

    def __len__(self) -> int:
        return len(self.keys_in_order)

    def _view(self, key: str) -> LibraryComponent:
        row = {name: int(column[self.index[key]]) for name, column in self._components.items()}
        atoms = slice(row["first_atom"], row["first_atom"] + row["atom_count"])
        bonds = slice(row["first_bond"], row["first_bond"] + row["bond_count"])
        size = row["automorphism_count"] * row["heavy_count"]
        flat = self.automorphisms[row["first_automorphism"] : row["first_automorphism"] + size]
        return LibraryComponent(
            key=key,
            atom_name_chars=self.atom_name_chars[atoms],
            elements=self.elements[atoms],
            charges=self.charges[atoms],
            leaving=self.leaving[atoms],
            aromatic=self.aromatic[atoms],
            stereo=self.stereo[atoms],
            ref_pos=self.ref_pos[atoms],
            ref_mask=self.ref_mask[atoms],
            heavy=self.heavy[atoms],
            bonds=self.bonds[bonds],
            bond_orders=self.bond_orders[bonds],
            bond_aromatic=self.bond_aromatic[bonds],
            automorphisms=flat.reshape(row["automorphism_count"], row["heavy_count"]),
            origin=RefOrigin(row["ref_origin"]),
        )
