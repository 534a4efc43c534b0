"""Filters over the manifest: SQL expressions, evaluated by DuckDB.

An expression sees one row an entry, with the columns of :data:`COLUMNS`. Where it is true the entry is used;
where it is false or unknown (a column it needs is null) it is not::

    resolution <= 4.5 AND release_date < '2021-10-01' AND n_token BETWEEN 50 AND 5000
    method = 'SOLUTION NMR' OR resolution IS NULL
    has_msa AND list_contains(chain_types, 'rna')

It is an expression alone: no queries within it, no files, nothing that is random or depends on the day.
"""

import json
from collections.abc import Iterator
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from megafold.pipeline.errors import InputError
from megafold.pipeline.manifest import chain_column

#: What an expression can ask of an entry, beside the manifest's own columns of numbers and text.
COLUMNS: Final = {
    "entry": "entry id",
    "assembly": "assembly id",
    "release_date": "date, or null",
    "resolution": "Å, or null",
    "method": "experimental method as in the file, or null",
    "title": "title, or null",
    "n_token": "tokens",
    "n_atom": "atoms",
    "n_residue": "residues",
    "n_chain": "chains",
    "n_chain_protein": "protein chains",
    "n_chain_rna": "RNA chains",
    "n_chain_dna": "DNA chains",
    "n_chain_ligand": "ligand chains",
    "n_interface": "pairs of chains in contact",
    "chain_types": "list of the kinds of chains there are: protein, rna, dna, ligand",
    "has_msa": "some chain has an MSA",
    "n_chain_msa": "chains with an MSA",
    "msa_depth": "rows of the deepest MSA, 0 without",
    "has_template": "some chain has template hits",
}


def matching_rows(table: pa.Table, where: str) -> NDArray[np.object_]:
    """For each row of a manifest: True, False, or None where the expression is unknown.

    Raises:
        InputError: the expression cannot be used; the message says why and names the columns there are.
    """
    try:
        import duckdb
    except ImportError as error:
        raise InputError(
            f"filters need duckdb ({error}): pip install duckdb", reason="stream-setting"
        ) from error

    # One thread, and closed again: nothing of it is left for a fork to inherit.
    connection = duckdb.connect(config={"threads": 1, "enable_external_access": False})
    try:
        _check_expression(connection, where)
        connection.register("manifest", _flat(table))
        query = f"SELECT CAST(matches AS BOOLEAN) FROM (SELECT place, ({where}\n) AS matches FROM manifest)"
        kind = connection.execute(f"DESCRIBE SELECT ({where}\n) FROM manifest").fetchall()[0][1]
        if kind != "BOOLEAN":
            raise _refusal(where, f"it gives {kind}, not true or false")
        found = connection.execute(f"{query} ORDER BY place").fetchall()
    except duckdb.Error as error:
        raise _refusal(where, str(error).split("\n\nLINE ")[0]) from error
    finally:
        connection.close()
    return np.array([row[0] for row in found], object)


def _check_expression(connection: Any, where: str) -> None:
    """Make sure that ``where`` is one expression whose value depends on its columns alone."""
    text = f"SELECT ({where}\n) FROM manifest"
    parsed = json.loads(connection.execute("SELECT json_serialize_sql(?)", [text]).fetchone()[0])
    if parsed["error"]:
        raise _refusal(where, parsed.get("error_message", "it cannot be parsed"))
    statements = [statement["node"] for statement in parsed["statements"]]
    if len(statements) != 1 or len(statements[0].get("select_list", ())) != 1:
        raise _refusal(where, "it is not one expression")
    volatile = {
        row[0]
        for row in connection.execute(
            # `+` is of one query, too, but for intervals alone.
            "SELECT function_name FROM duckdb_functions() GROUP BY 1 "
            "HAVING bool_and(coalesce(stability, 'CONSISTENT') <> 'CONSISTENT')"
        ).fetchall()
    }
    for node in _nodes(statements[0]["select_list"]):
        kind = node.get("class")
        if kind in ("SUBQUERY", "WINDOW", "STAR"):
            raise _refusal(where, f"a {kind.lower()} is not possible in a filter")
        # Some functions can be written like a column (`current_date`).
        name = node["function_name"] if kind == "FUNCTION" else (node.get("column_names") or [""])[-1]
        if kind in ("FUNCTION", "COLUMN_REF") and name.lower() in volatile:
            raise _refusal(
                where, f"{name}() does not depend on the entry alone, so samples would not be the same again"
            )


def _nodes(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
        value = list(value.values())
    if isinstance(value, list):
        for inner in value:
            yield from _nodes(inner)


def _refusal(where: str, why: str) -> InputError:
    columns = ", ".join(COLUMNS)
    return InputError(
        f"stream settings: sampling.where {where!r}: {why.strip()}. Columns: {columns}",
        reason="stream-setting",
    )


def _flat(table: pa.Table) -> pa.Table:
    """The manifest as expressions see it, and ``place``, the row's number."""
    lengths = pc.list_value_length(table["chains"]).to_numpy().astype(np.int64)
    msa, depths, template = (chain_column(table, name) for name in ("msa", "msa_depth", "template"))
    row = np.repeat(np.arange(len(lengths)), lengths)
    has_msa = pc.not_equal(msa, "").to_numpy().astype(bool)
    has_template = pc.not_equal(template, "").to_numpy().astype(bool)
    depth = np.zeros(len(lengths), np.int64)
    np.maximum.at(depth, row, np.where(has_msa, depths.to_numpy(), 0))
    n_msa = np.bincount(row[has_msa], minlength=len(lengths))
    kinds = {kind: table[f"n_chain_{kind}"].to_numpy() > 0 for kind in ("protein", "rna", "dna", "ligand")}
    derived = {
        "n_chain": lengths,
        "n_interface": pc.list_value_length(table["interfaces"]),
        "chain_types": [
            [kind for kind, there in zip(kinds, flags, strict=True) if there]
            for flags in zip(*kinds.values(), strict=True)
        ],
        "has_msa": n_msa > 0,
        "n_chain_msa": n_msa,
        "msa_depth": depth,
        "has_template": np.bincount(row[has_template], minlength=len(lengths)) > 0,
        "release_date": pc.cast(table["release_date"], pa.date32()),
    }
    columns = {
        name: derived.get(name, table[name] if name in table.column_names else None) for name in COLUMNS
    }
    columns["chain_types"] = pa.array(columns["chain_types"], pa.list_(pa.string()))
    return pa.table(columns | {"place": np.arange(len(lengths))})
