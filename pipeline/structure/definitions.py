"""Component definitions that a structure file brings along: ``_chem_comp_atom`` and ``_chem_comp_bond``."""

from collections import defaultdict
from collections.abc import Iterable
from typing import Final

import numpy as np

from megafold.pipeline.chemistry import Component
from megafold.pipeline.chemistry.definition_rows import component_from_rows
from megafold.pipeline.chemistry.elements import atomic_number
from megafold.pipeline.errors import ComponentError
from megafold.pipeline.structure.cif import Block, DefinitionRows
from megafold.pipeline.structure.entry import Report

_CATEGORIES: Final = {
    "_chem_comp": ("id", "name", "type", "one_letter_code", "mon_nstd_parent_comp_id"),
    "_chem_comp_atom": (
        "comp_id",
        "atom_id",
        "type_symbol",
        "charge",
        "pdbx_aromatic_flag",
        "pdbx_leaving_atom_flag",
        "pdbx_stereo_config",
        "x",
        "y",
        "z",
        *(f"pdbx_model_Cartn_{axis}_ideal" for axis in "xyz"),
    ),
    "_chem_comp_bond": ("comp_id", "atom_id_1", "atom_id_2", "value_order", "type", "pdbx_aromatic_flag"),
}


class FileDefinitions:
    """Components that any of a file's blocks defines with bonds; single atoms need none.

    Where the file lists bonds but no atoms, the atoms are those of ``structure``'s ``_atom_site`` rows. A
    definition that contradicts itself is left out with a warning: the dictionary may have a better one. Each
    is read when it is asked for: many files list all standard residues, which nobody asks for.
    """

    def __init__(self, blocks: Iterable[Block], structure: Block, report: Report) -> None:
        self._structure = structure
        self._report = report
        self._known: dict[str, Component | None] = {}
        self._tables = [
            {
                name: {item: column for item in items if (column := block.text(f"{name}.{item}"))}
                for name, items in _CATEGORIES.items()
            }
            for block in blocks
        ]
        self._rows = [
            {
                name: _by_code(table.get("id" if name == "_chem_comp" else "comp_id", []))
                for name, table in tables.items()
            }
            for tables in self._tables
        ]

    def get(self, code: str) -> Component | None:
        """The file's definition of ``code``, None where it has none that can be used."""
        if code not in self._known:
            self._known[code] = self._read(code)
        return self._known[code]

    def _read(self, code: str) -> Component | None:
        for tables, rows in zip(self._tables, self._rows, strict=True):
            if code not in rows["_chem_comp_atom"] and code not in rows["_chem_comp_bond"]:
                continue
            parts = {name: DefinitionRows(tables[name], rows[name].get(code, [])) for name in _CATEGORIES}
            component = _component(code, parts, self._structure, self._report)
            if component is not None and (len(component.bonds) or component.heavy.sum() == 1):
                return component
        return None


def _by_code(codes: list[str]) -> dict[str, list[int]]:
    groups: dict[str, list[int]] = defaultdict(list)
    for row, code in enumerate(codes):
        groups[code].append(row)
    return groups


def _component(
    code: str, parts: dict[str, DefinitionRows], structure: Block, report: Report
) -> Component | None:
    header, atoms, bonds = (parts[name] for name in _CATEGORIES)
    try:
        if not len(atoms):
            atoms, bonds = _observed_atoms(code, structure, bonds)
        return component_from_rows(code, header, atoms, bonds) if len(atoms) else None
    except (ComponentError, ValueError) as error:
        report.warn(f"the file's own definition of component {code} cannot be used: {error}")
        return None


def _observed_atoms(
    code: str, structure: Block, bonds: DefinitionRows
) -> tuple[DefinitionRows, DefinitionRows]:
    """Atoms as ``_atom_site`` has them, and the bonds between those."""
    comp = structure.codes("_atom_site.label_comp_id")
    atom = structure.codes("_atom_site.label_atom_id")
    if comp is None or atom is None or code not in comp[1]:
        return DefinitionRows({}, []), DefinitionRows({}, [])
    sites = np.flatnonzero(comp[0] == comp[1].index(code))
    _, first = np.unique(atom[0][sites], return_index=True)
    rows = sites[np.sort(first)].tolist()
    names = [atom[1][int(atom[0][row])] for row in rows]
    columns = {"atom_id": names}
    for item, target in (("type_symbol", "type_symbol"), ("pdbx_formal_charge", "charge")):
        coded = structure.codes(f"_atom_site.{item}")
        if coded is not None:
            columns[target] = [coded[1][int(coded[0][row])] for row in rows]
    columns["type_symbol"] = [_known_symbol(text) for text in columns.get("type_symbol", [""] * len(names))]
    known = set(names)
    pairs = list(zip(bonds.text("atom_id_1"), bonds.text("atom_id_2"), strict=True))
    kept = [row for row, pair in enumerate(pairs) if known.issuperset(pair)]
    table = {
        item: [bonds.text(item)[row] for row in kept]
        for item in ("atom_id_1", "atom_id_2", "value_order", "type", "pdbx_aromatic_flag")
    }
    return DefinitionRows(columns, range(len(names))), DefinitionRows(table, range(len(kept)))


def _known_symbol(symbol: str) -> str:
    try:
        atomic_number(symbol)
    except KeyError:
        return "X"
    return symbol
