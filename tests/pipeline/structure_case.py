"""A file of the corpus as gemmi's CIF parser reads it, beside the objects made of it."""

from collections import Counter
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import gemmi
import numpy as np

from megafold.pipeline.schema import MolType
from megafold.pipeline.structure import StructureOptions
from tests.pipeline.structure_files import NO_FILTERS, Made, make

WATERS = ("HOH", "DOD", "WAT")

#: A bond, by the places of its two atoms.
Bond = frozenset[tuple[float, ...]]


class Case:
    """A file of the corpus: its categories as gemmi reads them, and the objects made of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.block = gemmi.cif.read(str(path))[0]

    def column(self, tag: str) -> list[str]:
        return ["" if gemmi.cif.is_null(v) else gemmi.cif.as_string(v) for v in self.block.find_values(tag)]

    def rows(self, category: str, *items: str) -> list[tuple[str, ...]]:
        columns = [self.column(f"_{category}.{item}") for item in items]
        count = max(map(len, columns))
        return list(zip(*(column or [""] * count for column in columns), strict=True))

    def mapping(self, category: str, key: str, value: str) -> dict[str, str]:
        """One item of a category by another."""
        return {row[0]: row[1] for row in self.rows(category, key, value)}

    @cached_property
    def sites(self) -> dict[str, np.ndarray]:
        """Columns of ``atom_site``, all rows."""
        names = (
            "type_symbol label_alt_id label_comp_id label_asym_id label_entity_id label_seq_id auth_seq_id "
            "pdbx_PDB_ins_code pdbx_PDB_model_num Cartn_x Cartn_y Cartn_z occupancy B_iso_or_equiv"
        ).split()
        columns = {name: self.column(f"_atom_site.{name}") for name in names}
        count = len(columns["Cartn_x"])
        return {name: np.array(column or [""] * count) for name, column in columns.items()}

    @cached_property
    def first_model(self) -> np.ndarray:
        return self.sites["pdbx_PDB_model_num"] == self.sites["pdbx_PDB_model_num"][0]

    @cached_property
    def kept(self) -> np.ndarray:
        """Rows of the first model, neither water nor hydrogen."""
        light = np.isin(self.sites["type_symbol"], ["H", "D"])
        return self.first_model & ~light & ~np.isin(self.sites["label_comp_id"], WATERS)

    def coords(self, rows: np.ndarray) -> np.ndarray:
        """Coordinates, rounded as the object's are."""
        columns = [self.sites[f"Cartn_{axis}"] for axis in "xyz"]
        xyz = np.stack(
            [np.where(column[rows] == "", "nan", column[rows]).astype(float) for column in columns]
        )
        return np.asarray(np.round(xyz.T, 3) + 0.0)

    @cached_property
    def made(self) -> Made:
        """Assembly 1 without filters."""
        return make(self.path, NO_FILTERS)

    @cached_property
    def asym(self) -> Made:
        """The coordinates as they are, without filters."""
        return make(self.path, replace(NO_FILTERS, assembly="asym"))

    @cached_property
    def filtered(self) -> Made:
        """With the default options."""
        return make(self.path, StructureOptions())

    @cached_property
    def asym_of_entity_type(self) -> dict[str, list[str]]:
        """``label_asym_id`` of the chains with atoms, by the type of their entity."""
        types = self.mapping("entity", "id", "type")
        found: dict[str, list[str]] = {}
        pairs = zip(self.sites["label_asym_id"].tolist(), self.sites["label_entity_id"].tolist(), strict=True)
        for asym, entity in dict.fromkeys(pairs):
            found.setdefault(types.get(entity, ""), []).append(asym)
        return found

    @cached_property
    def operators(self) -> dict[str, list[str]]:
        """Operators of assembly 1 by chain; only single operators and commas."""
        found: dict[str, list[str]] = {}
        generators = self.rows("pdbx_struct_assembly_gen", "assembly_id", "oper_expression", "asym_id_list")
        for assembly, expression, asyms in generators:
            if assembly == "1":
                for asym in asyms.replace(" ", "").split(","):
                    found.setdefault(asym, []).extend(expression.split(","))
        return found

    @cached_property
    def sequences(self) -> dict[str, list[str]]:
        """Component of each position of each chain of a polymer, the first of several."""
        by_entity: dict[str, dict[int, str]] = {}
        for entity, number, code in self.rows("entity_poly_seq", "entity_id", "num", "mon_id"):
            by_entity.setdefault(entity, {}).setdefault(int(number), code)
        entity_of = self.mapping("struct_asym", "id", "entity_id")
        return {
            asym: list(by_entity[entity_of[asym]].values())
            for asym in self.asym_of_entity_type.get("polymer", ())
            if entity_of.get(asym) in by_entity
        }

    def told_bonds(self, *types: str) -> list[set[Bond]]:
        """Rows of ``struct_conn`` within the deposited coordinates, by the places of their atoms.

        Several bonds where alternates make the atoms several.
        """
        places: dict[tuple[str, ...], list[tuple[float, ...]]] = {}
        names = self.column("_atom_site.label_atom_id")
        coords = self.coords(np.arange(len(names)))
        seq = self.sites["auth_seq_id"] if self.sites["auth_seq_id"].any() else self.sites["label_seq_id"]
        for row in np.flatnonzero(self.kept).tolist():
            keys = [self.sites[name][row] for name in ("label_asym_id", "label_comp_id")]
            key = (*keys, seq[row], self.sites["pdbx_PDB_ins_code"][row], names[row])
            places.setdefault(key, []).append(tuple(coords[row].tolist()))
        items = ["conn_type_id", "ptnr1_symmetry", "ptnr2_symmetry"]
        for side in ("ptnr1", "ptnr2"):
            items += [f"{side}_label_asym_id", f"{side}_label_comp_id", f"{side}_auth_seq_id"]
            items += [f"pdbx_{side}_PDB_ins_code", f"{side}_label_atom_id"]
        found = []
        for kind, symmetry, other, *ends in self.rows("struct_conn", *items):
            first, second = (places.get(tuple(ends[i : i + 5]), []) for i in (0, 5))
            if kind in types and symmetry == other and first and second:
                found.append({frozenset((a, b)) for a in first for b in second})
        return found

    def found_bonds(self) -> dict[Bond, int]:
        table = self.asym.tables["bonds"]
        coords = np.round(self.asym.coords.astype(float), 3)
        return {
            frozenset((tuple(coords[i].tolist()), tuple(coords[j].tolist()))): int(kind)
            for i, j, kind in zip(table["atom_i"], table["atom_j"], table["kind"], strict=True)
        }

    def polymer_kinds(self) -> Counter[MolType]:
        """Polymer entities of ours by type."""
        kinds = (MolType(entity["mol_type"]) for entity in self.asym.attributes["entities"])
        return Counter(kind for kind in kinds if kind != MolType.LIGAND)

    def residue_codes(self) -> list[str]:
        """Component of every residue of the asymmetric unit, without the mark of an input's own."""
        return [code.removeprefix("~").rsplit(":", code.startswith("~"))[0] for code in self.asym.codes]
