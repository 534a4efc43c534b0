"""What is kept of a component: its definition, a reference conformer and its automorphisms."""

import base64
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.schema import RefOrigin

#: Version of the chemistry stage: goes up whenever the same definition would give something else.
VERSION: Final = "1"

_MILLI: Final = 1000
_MISSING: Final = np.iinfo(np.int32).min


def stage_versions() -> dict[str, str]:
    """What a reference depends on beside the definition: this stage's version and RDKit's."""
    return {"chemistry": VERSION, "rdkit": version("rdkit")}


@dataclass(frozen=True, kw_only=True, eq=False)
class ReferenceComponent:
    """A component's definition and its reference conformer.

    Attributes:
        key: the component's key.
        digest: digest of the definition that it was made from.
        atom_names: [N_atom] names.
        elements: [N_atom] int16 atomic numbers.
        charges: [N_atom] int16 formal charges.
        leaving: [N_atom] bool.
        aromatic: [N_atom] bool.
        stereo: [N_atom] int8, 0 none, 1 R, 2 S.
        bonds: [N_bond, 2] int32.
        bond_orders: [N_bond] int8, 0 where unknown.
        bond_aromatic: [N_bond] bool.
        ref_pos: [N_atom, 3] float32 Å, centred on its heavy atoms, rounded to 1e-3, NaN where there is none.
        origin: where ``ref_pos`` comes from.
        failure: class of the reason why RDKit made no conformer, '' where it did.
        message: RDKit's own words for it, '' where it had none; not part of the library.
        automorphisms: [N_automorphism, N_heavy] int16, the identity first.
        capped: whether automorphisms were left out.
    """

    key: str
    digest: str
    atom_names: tuple[str, ...]
    elements: NDArray[np.int16]
    charges: NDArray[np.int16]
    leaving: NDArray[np.bool_]
    aromatic: NDArray[np.bool_]
    stereo: NDArray[np.int8]
    bonds: NDArray[np.int32]
    bond_orders: NDArray[np.int8]
    bond_aromatic: NDArray[np.bool_]
    ref_pos: NDArray[np.float32]
    origin: RefOrigin
    failure: str
    message: str
    automorphisms: NDArray[np.int16]
    capped: bool

    @property
    def ref_mask(self) -> NDArray[np.bool_]:
        """[N_atom] True where ``ref_pos`` is real."""
        return np.asarray(np.isfinite(self.ref_pos).all(axis=1))

    def to_json(self) -> dict[str, Any]:
        """A JSON mapping that :meth:`from_json` reads back exactly; arrays are packed."""
        milli = np.full(self.ref_pos.shape, _MISSING, np.int32)
        milli[self.ref_mask] = np.round(self.ref_pos[self.ref_mask].astype(np.float64) * _MILLI)
        return {
            "key": self.key,
            "digest": self.digest,
            "atom_names": list(self.atom_names),
            "atoms": _packed(np.stack([getattr(self, name) for name in _ATOM_COLUMNS]).astype(np.int16)),
            "bonds": _packed(np.column_stack([self.bonds, self.bond_orders, self.bond_aromatic])),
            "ref_pos": _packed(milli),
            "origin": self.origin.name,
            "failure": self.failure,
            "message": self.message,
            "automorphisms": _packed(self.automorphisms.astype(np.int16)),
            "automorphism_shape": list(self.automorphisms.shape),
            "capped": self.capped,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> "ReferenceComponent":
        """The reference that :meth:`to_json` wrote."""
        count = len(value["atom_names"])
        columns = _unpacked(value["atoms"], np.int16).reshape(len(_ATOM_COLUMNS), count)
        atoms = dict(zip(_ATOM_COLUMNS, columns, strict=True))
        bonds = _unpacked(value["bonds"], np.int32).reshape(-1, 4)
        milli = _unpacked(value["ref_pos"], np.int32).reshape(count, 3)
        pos = np.where(milli == _MISSING, np.nan, milli / _MILLI).astype(np.float32)
        return cls(
            key=value["key"],
            digest=value["digest"],
            atom_names=tuple(value["atom_names"]),
            elements=atoms["elements"],
            charges=atoms["charges"],
            leaving=atoms["leaving"] != 0,
            aromatic=atoms["aromatic"] != 0,
            stereo=atoms["stereo"].astype(np.int8),
            bonds=bonds[:, :2],
            bond_orders=bonds[:, 2].astype(np.int8),
            bond_aromatic=bonds[:, 3] != 0,
            ref_pos=pos,
            origin=RefOrigin[value["origin"]],
            failure=value["failure"],
            message=value["message"],
            automorphisms=_unpacked(value["automorphisms"], np.int16).reshape(value["automorphism_shape"]),
            capped=value["capped"],
        )


_ATOM_COLUMNS: Final = ("elements", "charges", "leaving", "aromatic", "stereo")


def _packed(array: NDArray[Any]) -> str:
    data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
    return base64.b85encode(zlib.compress(data, 6)).decode("ascii")


def _unpacked(text: str, dtype: type[np.integer[Any]]) -> NDArray[Any]:
    data = zlib.decompress(base64.b85decode(text))
    return np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).astype(dtype)
