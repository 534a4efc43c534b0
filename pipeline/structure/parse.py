"""From the columns of an mmCIF file to a :class:`ParsedEntry`."""

import math
import re
from collections import defaultdict
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.errors import StructureError
from megafold.pipeline.structure.atom_sites import read_atom_sites
from megafold.pipeline.structure.cif import Block, read_cif
from megafold.pipeline.structure.definitions import FileDefinitions
from megafold.pipeline.structure.entry import (
    Connection,
    Entity,
    Generator,
    ParsedEntry,
    Partner,
    Report,
    SchemePosition,
)

_BOND_TYPES: Final = frozenset(
    {"covale", "covale_base", "covale_phosphate", "covale_sugar", "disulf", "metalc"}
)
_DATE: Final = re.compile(r"\d{4}-\d{2}-\d{2}")


def parse_structure(path: Path, entry: str, report: Report) -> ParsedEntry:
    """Read a structure file.

    Raises:
        StructureError: the file cannot be read, is not valid, or has no atoms.
    """
    blocks = read_cif(path)
    with_atoms = [
        block for block in blocks if block.text("_atom_site.id") or block.text("_atom_site.Cartn_x")
    ]
    if not with_atoms:
        raise StructureError(
            f"{path} (entry {entry}) has no _atom_site rows; give a file with coordinates", reason="no-atoms"
        )
    if len(with_atoms) > 1:
        report.warn(f"{len(with_atoms)} data blocks have atoms; only the first is used")
    block = with_atoms[0]
    try:
        sites = read_atom_sites(block, report)
        entities = _entities(block)
        asym_entity = _asym_entities(block, sites.asym_names, sites.entity_names, sites.asym, sites.entity)
        listed = [asym for asym in dict.fromkeys(block.text("_struct_asym.id")) if asym]
        return ParsedEntry(
            title=block.first("_struct.title") or None,
            method=_method(block),
            resolution=_resolution(block),
            release_date=_release_date(block),
            deposition_date=_date(
                block.first(
                    "_pdbx_database_status.recvd_initial_deposition_date", "_database_PDB_rev.date_original"
                )
            ),
            sites=sites,
            entities=entities,
            asym_entity=asym_entity,
            schemes=_schemes(block),
            branch_numbers=_branch_numbers(block),
            asym_order=list(dict.fromkeys(listed + sites.asym_names)),
            connections=_connections(block),
            tells_connections=bool(block.text("_struct_conn.conn_type_id")),
            generators=_generators(block),
            operators=_operators(block),
            is_expanded=bool(block.text("_pdbx_chain_remapping.label_asym_id")),
            definitions=FileDefinitions(blocks, block, report),
        )
    except (ValueError, OverflowError) as error:
        raise StructureError(
            f"{path} (entry {entry}) has a value that cannot be: {error}; correct it",
            reason="invalid-value",
        ) from error


def _date(text: str) -> str | None:
    match = _DATE.match(text)
    return match.group(0) if match else None


def _release_date(block: Block) -> str | None:
    """The first public revision; old files say it in ``_database_PDB_rev``. Never a guess."""
    dates = block.text("_pdbx_audit_revision_history.revision_date")
    dates = dates or block.text("_database_PDB_rev.date")
    return min((found for date in dates if (found := _date(date))), default=None)


def _method(block: Block) -> str | None:
    methods = [method for method in dict.fromkeys(block.text("_exptl.method")) if method]
    return "; ".join(methods) or None


def _resolution(block: Block) -> float | None:
    tags = ("_refine.ls_d_res_high", "_em_3d_reconstruction.resolution", "_reflns.d_resolution_high")
    for tag in tags:
        for text in block.text(tag):
            value = float(text) if re.fullmatch(r"[0-9.]+", text) else math.nan
            if math.isfinite(value) and value > 0:
                return value
    return None


def _entities(block: Block) -> dict[str, Entity]:
    types = {entity: kind.lower() for entity, kind in block.records("_entity", "id", "type")}
    polymers = {
        entity: (kind, re.sub(r"\s", "", canonical))
        for entity, kind, canonical in block.records(
            "_entity_poly", "entity_id", "type", "pdbx_seq_one_letter_code_can"
        )
    }
    sequences: dict[str, dict[int, list[str]]] = defaultdict(dict)
    for entity, number, code in block.records("_entity_poly_seq", "entity_id", "num", "mon_id"):
        sequences[entity].setdefault(int(number), []).append(code)
    links: dict[str, list[tuple[int, str, int, str, str]]] = defaultdict(list)
    for entity, first, first_atom, second, second_atom, order in block.records(
        "_pdbx_entity_branch_link",
        "entity_id",
        "entity_branch_list_num_1",
        "atom_id_1",
        "entity_branch_list_num_2",
        "atom_id_2",
        "value_order",
    ):
        links[entity].append((int(first), first_atom, int(second), second_atom, order))
    return {
        entity: Entity(
            type=types.get(entity, "polymer" if entity in sequences else ""),
            polymer_type=polymers.get(entity, ("", ""))[0],
            sequence=tuple(
                tuple(dict.fromkeys(codes)) for _, codes in sorted(sequences.get(entity, {}).items())
            ),
            canonical=polymers.get(entity, ("", ""))[1],
            links=tuple(links.get(entity, ())),
        )
        for entity in dict.fromkeys([*types, *polymers, *sequences, *links])
    }


def _asym_entities(
    block: Block,
    asym_names: list[str],
    entity_names: list[str],
    asym: NDArray[np.int32],
    entity: NDArray[np.int32],
) -> dict[str, str]:
    """Entity by chain: what the atoms say, else ``_struct_asym``."""
    found = {row[0]: row[1] for row in block.records("_struct_asym", "id", "entity_id")}
    if len(asym):
        chains, first = np.unique(asym, return_index=True)
        for chain, row in zip(chains.tolist(), first.tolist(), strict=True):
            name = entity_names[int(entity[row])]
            if name:
                found[asym_names[chain]] = name
    return found


def _schemes(block: Block) -> dict[str, tuple[SchemePosition, ...]]:
    positions: dict[str, dict[int, tuple[list[str], str, str]]] = defaultdict(dict)
    for asym, number, code, auth_seq, ins_code in block.records(
        "_pdbx_poly_seq_scheme", "asym_id", "seq_id", "mon_id", "pdb_seq_num", "pdb_ins_code"
    ):
        if number:
            positions[asym].setdefault(int(number), ([], auth_seq, ins_code))[0].append(code)
    return {
        asym: tuple(
            SchemePosition(
                codes=tuple(dict.fromkeys(codes)) if len(codes) > 1 else (codes[0],),
                auth_seq=int(auth_seq) if auth_seq.removeprefix("-").isdecimal() else number,
                ins_code=ord(ins_code[0]) if ins_code else 0,
            )
            for number, (codes, auth_seq, ins_code) in sorted(numbered.items())
        )
        for asym, numbered in positions.items()
    }


def _branch_numbers(block: Block) -> dict[tuple[str, int], int]:
    rows = block.records("_pdbx_branch_scheme", "asym_id", "pdb_seq_num", "num")
    return {
        (asym, int(auth_seq)): int(number)
        for asym, auth_seq, number in rows
        if re.fullmatch(r"-?\d+", auth_seq) and number.isdigit()
    }


def _connections(block: Block) -> list[Connection]:
    def partners(side: str) -> list[Partner]:
        # `pdbx_` stands in front of the partner in the names of some of the items.
        items = (
            f"{side}_label_asym_id",
            f"{side}_label_comp_id",
            f"{side}_label_seq_id",
            f"{side}_auth_asym_id",
            f"{side}_auth_seq_id",
            f"pdbx_{side}_PDB_ins_code",
            f"{side}_label_atom_id",
            f"pdbx_{side}_label_alt_id",
            f"{side}_symmetry",
            f"{side}_auth_comp_id",
        )
        return [
            Partner(
                asym=row[0],
                comp=row[1] or row[9],
                label_seq=row[2],
                auth_asym=row[3],
                auth_seq=row[4],
                ins_code=row[5],
                atom=row[6],
                alt=row[7],
                symmetry=row[8],
            )
            for row in block.records("_struct_conn", *items)
        ]

    heads = block.records("_struct_conn", "conn_type_id", "pdbx_dist_value", "pdbx_value_order")
    # Without any item of the partners there is nothing to bond.
    return [
        Connection(
            type=kind.lower(),
            first=first,
            second=second,
            distance=float(distance) if distance else math.nan,
            order=order.lower(),
        )
        for (kind, distance, order), first, second in zip(
            heads, partners("ptnr1"), partners("ptnr2"), strict=False
        )
        if kind.lower() in _BOND_TYPES
    ]


def _generators(block: Block) -> list[Generator]:
    rows = block.records("_pdbx_struct_assembly_gen", "assembly_id", "oper_expression", "asym_id_list")
    return [
        Generator(
            assembly=assembly,
            expression=re.sub(r"\s", "", expression),
            asym_ids=tuple(asym for asym in re.split(r"[\s,]+", asym_ids) if asym),
        )
        for assembly, expression, asym_ids in rows
        if assembly
    ]


def _operators(block: Block) -> dict[str, NDArray[np.float64]]:
    items = [f"{name}[{i}]{column}" for i in (1, 2, 3) for name, column in _matrix_columns()]
    return {
        row[0]: np.array([float(value) if value else math.nan for value in row[1:]], np.float64).reshape(3, 4)
        for row in block.records("_pdbx_struct_oper_list", "id", *items)
    }


def _matrix_columns() -> list[tuple[str, str]]:
    return [("matrix", "[1]"), ("matrix", "[2]"), ("matrix", "[3]"), ("vector", "")]
