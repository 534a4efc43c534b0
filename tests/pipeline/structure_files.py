"""Small mmCIF files for the structure tests, and named access to what was made of them."""

import gzip
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import biotite.structure.io.pdbx as pdbx
import numpy as np

from megafold.cache_store import Content
from megafold.pipeline.chemistry import Component, ComponentDictionary, load_dictionary
from megafold.pipeline.chemistry.elements import SYMBOLS
from megafold.pipeline.schema import STRUCTURE
from megafold.pipeline.structure import StructureOptions, featurize_structure

NO_FILTERS = StructureOptions(
    crystallisation_aids=frozenset(),
    remove_unknown_ligands=False,
    remove_unknown_chains=False,
    min_resolved_residues=0,
    max_ca_gap=0,
    clash_fraction=1,
    max_polymer_chains=0,
)

#: What a row of ``_struct_conn`` says of a bond without alternates, symmetry or a distance.
PARTNERS = (
    "id conn_type_id ptnr1_label_asym_id ptnr1_label_comp_id ptnr1_label_seq_id ptnr1_auth_seq_id "
    "ptnr1_label_atom_id ptnr2_label_asym_id ptnr2_label_comp_id ptnr2_label_seq_id ptnr2_auth_seq_id "
    "ptnr2_label_atom_id"
)


@cache
def dictionary() -> ComponentDictionary:
    return load_dictionary()


def definition(code: str) -> Component:
    """The dictionary's component."""
    component = dictionary().get(code)
    assert component is not None
    return component


@dataclass
class CifFile:
    """Rows of an mmCIF file under construction."""

    atoms: list[str] = field(default_factory=list)
    categories: list[str] = field(default_factory=list)

    def add(
        self, code, asym, seq=".", *, at=(0.0, 0.0, 0.0), alt=".", occ=1.0, auth=None, auth_asym=None,
        entity="1", skip=(), only=None, group=None, ins="?",
    ):  # fmt: skip
        """A residue at its ideal coordinates, moved; hydrogens and leaving atoms left out."""
        component = definition(code)
        kept = component.heavy & (~component.leaving | (only is not None))
        for index in np.flatnonzero(kept):
            name = component.atom_names[index]
            if name in skip or (only is not None and name not in only):
                continue
            pos = component.ideal_pos[index] + np.asarray(at)
            self.atom(
                name, code, asym, seq, pos, alt=alt, occ=occ, auth=auth, auth_asym=auth_asym,
                entity=entity, group=group, ins=ins, element=int(component.elements[index]),
            )  # fmt: skip
        return self

    def atom(
        self, name, code, asym, seq, pos, *, element=6, alt=".", occ=1.0, auth=None, auth_asym=None,
        entity="1", group=None, ins="?",
    ):  # fmt: skip
        symbols = {number: symbol.upper() for number, symbol in enumerate(SYMBOLS)}
        number = auth if auth is not None else (seq if seq != "." else 1)
        record = group or ("ATOM" if seq != "." else "HETATM")
        quoted = f'"{name}"' if "'" in name else name
        xyz = " ".join(f"{value:.3f}" for value in pos)
        self.atoms.append(
            f"{record} {len(self.atoms) + 1} {symbols[element]} {quoted} {alt} {code} {asym} {entity} {seq} "
            f"{ins} {xyz} {occ:.2f} 10.00 {number} {auth_asym or asym} 1"
        )
        return self

    def loop(self, category: str, items: str, *rows: str):
        """A category; ``items`` and rows are separated by spaces."""
        head = "\n".join(f"{category}.{item}" for item in items.split())
        self.categories.append("loop_\n" + head + "\n" + "\n".join(rows))
        return self

    def polymer(self, codes: str, *, entity="1", kind="'polypeptide(L)'"):
        """An entity with its sequence."""
        self.loop("_entity", "id type", f"{entity} polymer")
        self.loop("_entity_poly", "entity_id type", f"{entity} {kind}")
        rows = [f"{entity} {number} {code}" for number, code in enumerate(codes.split(), 1)]
        return self.loop("_entity_poly_seq", "entity_id num mon_id", *rows)

    def text(self) -> str:
        items = (
            "group_PDB id type_symbol label_atom_id label_alt_id label_comp_id label_asym_id label_entity_id "
            "label_seq_id pdbx_PDB_ins_code Cartn_x Cartn_y Cartn_z occupancy B_iso_or_equiv auth_seq_id "
            "auth_asym_id pdbx_PDB_model_num"
        )
        atoms = "loop_\n" + "\n".join(f"_atom_site.{item}" for item in items.split()) + "\n"
        # One category may come in several loops here; a CIF file has each once.
        return "\n#\n".join(["data_TEST", *_merged(self.categories), atoms + "\n".join(self.atoms)]) + "\n"

    def write(self, folder: Path, name: str = "test.cif") -> Path:
        path = folder / name
        path.write_text(self.text())
        return path


def _merged(categories: list[str]) -> list[str]:
    heads: dict[str, list[str]] = {}
    for loop in categories:
        lines = loop.split("\n")
        count = sum(line.startswith("_") for line in lines)
        heads.setdefault("\n".join(lines[: count + 1]), []).extend(lines[count + 1 :])
    return [head + "\n" + "\n".join(rows) for head, rows in heads.items()]


TWO_FOLD = (
    "_pdbx_struct_oper_list",
    "id matrix[1][1] matrix[1][2] matrix[1][3] vector[1] matrix[2][1] matrix[2][2] matrix[2][3] vector[2] "
    "matrix[3][1] matrix[3][2] matrix[3][3] vector[3]",
    "1 1 0 0 0 0 1 0 0 0 0 1 0",
    "2 -1 0 0 0 0 -1 0 0 0 0 1 0",
)


class Made:
    """A structure object with its tables by name."""

    def __init__(self, content: Content, own=()):
        self.content = content
        self.own = own
        self.attributes: dict[str, Any] = dict(content.attributes)
        self.tables = {
            name: STRUCTURE.table(name).unpack(content.arrays[name])
            for name in ("chains", "residues", "tokens", "atoms", "bonds", "interfaces")
        }
        self.coords = content.arrays["atom_coords"]
        self.occupancy = content.arrays["atom_occupancy_b"][:, 0]
        self.atom_token = np.repeat(
            np.arange(len(self.tables["tokens"]["residue"])), self.tables["tokens"]["atom_count"]
        )
        self.atom_residue = self.tables["tokens"]["residue"][self.atom_token]
        self.atom_chain = self.tables["residues"]["chain"][self.atom_residue]

    @property
    def labels(self) -> list[str]:
        return self.attributes["chains"]["label_asym_id"]

    @property
    def codes(self) -> list[str]:
        """Component key of every residue."""
        return [self.attributes["components"][index] for index in self.tables["residues"]["component"]]

    def names(self, residue: int) -> list[str]:
        """Names of a residue's atoms, by the dictionary."""
        component = definition(self.codes[residue])
        rows = np.flatnonzero(self.atom_residue == residue)
        return [component.atom_names[index] for index in self.tables["atoms"]["component_atom"][rows]]

    def atom(self, chain: int, seq: int, name: str) -> int:
        """Index of an atom."""
        residues = self.tables["residues"]
        residue = np.flatnonzero((residues["chain"] == chain) & (residues["label_seq_id"] == seq))[0]
        return int(np.flatnonzero(self.atom_residue == residue)[self.names(residue).index(name)])

    def bonds(self) -> list[tuple[str, str, int]]:
        """Bonds as (``chain:code.atom``, ``chain:code.atom``, kind), each end's chain by position."""
        table = self.tables["bonds"]
        return [
            (self._spell(i), self._spell(j), int(kind))
            for i, j, kind in zip(table["atom_i"], table["atom_j"], table["kind"], strict=True)
        ]

    def _spell(self, atom: int) -> str:
        residue = self.atom_residue[atom]
        name = definition(self.codes[residue]).atom_names[self.tables["atoms"]["component_atom"][atom]]
        return f"{self.atom_chain[atom]}:{self.codes[residue]}.{name}"


def make(path: Path, options: StructureOptions = NO_FILTERS, entry: str | None = None) -> Made:
    result = featurize_structure(path, entry or path.name.split(".")[0], dictionary(), options)
    return Made(result.content, result.own_components)


def write_binary(source: Path, target: Path) -> None:
    """Write an mmCIF file, plain or gzip, as the BinaryCIF file that biotite makes of it."""
    data = source.read_bytes()
    lines = (gzip.decompress(data) if source.suffix == ".gz" else data).decode()
    text = pdbx.CIFFile.deserialize(lines)
    block = pdbx.BinaryCIFBlock(
        {
            name: pdbx.BinaryCIFCategory({item: _binary_column(column) for item, column in category.items()})
            for name, category in text.block.items()
        }
    )
    plain = target.with_name("plain.bcif")
    pdbx.compress(pdbx.BinaryCIFFile({"X": block})).write(plain)
    packed = plain.read_bytes()
    plain.unlink()
    target.write_bytes(gzip.compress(packed) if target.suffix == ".gz" else packed)


def _binary_column(column: Any) -> pdbx.BinaryCIFColumn:
    """A column of text as biotite would type it, with its mask."""
    text = column.as_array(str)
    missing = np.isin(text, [".", "?"])
    mask = pdbx.BinaryCIFData(np.where(missing, 2, 0).astype(np.uint8)) if missing.any() else None
    for kind in (int, float):
        try:
            return pdbx.BinaryCIFColumn(np.where(missing, "0", text).astype(kind), mask)
        except ValueError:
            continue
    return pdbx.BinaryCIFColumn(text, mask)
