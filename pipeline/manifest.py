"""The manifest's rows: one entry and assembly each, with all the stream needs to choose and find samples.

A manifest is a snapshot of a data set (``megafold.cache_store.Manifest``: a table and a few attributes).
The cache store knows it as rows; this module says what the rows hold.

Digests are 64 hex digits, ``""`` where there is no such object. Rows are sorted by (entry, assembly).

Attributes of a manifest:

- ``format``: 1
- ``components``: digest of the component library
- ``ledger``: digest of the failures, or ``""``
- ``config``: the build's options
- ``versions``: ``{stage: version}``
- ``clusters``: how proteins were clustered (:mod:`megafold.pipeline.clusters`), ``{}`` where nothing is said
"""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from megafold.cache_store import Digest, Manifest
from megafold.pipeline.schema import MolType

MANIFEST_FORMAT: Final = 1
MSA_STATUSES: Final = ("ok", "none", "failed")

_CHAIN: Final = pa.struct(
    [
        ("label_asym_id", pa.string()),
        ("auth_asym_id", pa.string()),
        ("asym_id", pa.int32()),
        ("entity_id", pa.int32()),
        ("sym_id", pa.int32()),
        ("mol_type", pa.string()),  # protein, rna, dna, ligand
        ("n_residue", pa.int32()),
        ("n_token", pa.int32()),
        ("n_resolved", pa.int32()),  # residues with coordinates
        ("sequence_digest", pa.string()),  # SHA-256 of the sequence, "" for ligands
        ("msa", pa.string()),
        ("msa_depth", pa.int32()),
        ("msa_status", pa.string()),  # one of MSA_STATUSES
        ("template", pa.string()),
        ("n_template", pa.int32()),
        ("cluster", pa.string()),  # kind and name (megafold.pipeline.clusters), "" for none
    ]
)
# An interface without a cluster has the pair of its chains'.
_INTERFACE: Final = pa.struct([("chain_i", pa.int32()), ("chain_j", pa.int32()), ("cluster", pa.string())])
# A list of records, not an Arrow map: every Parquet reader has it, and its rows are plain JSON.
_RECIPE: Final = pa.struct([("stage", pa.string()), ("recipe", pa.string())])

MANIFEST_SCHEMA: Final = pa.schema(
    [
        ("entry", pa.string()),
        ("assembly", pa.string()),
        ("structure", pa.string()),
        ("pairing", pa.string()),
        ("recipes", pa.list_(_RECIPE)),  # sorted by stage; `msa:3`: the MSA of entity_id 3
        ("components", pa.list_(pa.string())),  # component keys that the structure uses
        ("source", pa.string()),  # relative path of the structure file
        ("source_digest", pa.string()),
        ("release_date", pa.string()),  # ISO, or null
        ("resolution", pa.float64()),  # Å, or null
        ("method", pa.string()),
        ("title", pa.string()),
        ("n_token", pa.int32()),
        ("n_atom", pa.int32()),
        ("n_residue", pa.int32()),
        ("n_chain_protein", pa.int32()),
        ("n_chain_rna", pa.int32()),
        ("n_chain_dna", pa.int32()),
        ("n_chain_ligand", pa.int32()),
        ("chains", pa.list_(_CHAIN)),
        ("interfaces", pa.list_(_INTERFACE)),
        ("warnings", pa.list_(pa.string())),
    ]
)
_CHAIN_FIELDS: Final = frozenset(field.name for field in _CHAIN)
_INTERFACE_FIELDS: Final = frozenset(field.name for field in _INTERFACE)
_COLUMNS: Final = frozenset(MANIFEST_SCHEMA.names)
_NULLABLE: Final = frozenset({"release_date", "resolution", "method", "title"})
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
#: Rows that are Python objects at a time: all of a large data set's would take gigabytes.
_ROWS_AT_A_TIME: Final = 4096
_ATTRIBUTES: Final = frozenset({"format", "components", "ledger", "config", "versions", "clusters"})


class ManifestError(ValueError):
    """Rows or attributes that do not fit :data:`MANIFEST_SCHEMA`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChainRow:
    """One chain of an entry; the order of an entry's chains is that of its structure object."""

    label_asym_id: str
    auth_asym_id: str
    asym_id: int
    entity_id: int
    sym_id: int
    mol_type: str
    n_residue: int
    n_token: int
    n_resolved: int
    sequence_digest: str
    msa: str
    msa_depth: int
    msa_status: str
    template: str
    n_template: int
    cluster: str


@dataclass(frozen=True, kw_only=True, slots=True)
class InterfaceRow:
    """Two chains (indices into the entry's chains) in contact.

    ``cluster`` is ``""`` where it is the pair of the chains' clusters.
    """

    chain_i: int
    chain_j: int
    cluster: str


@dataclass(frozen=True, kw_only=True, slots=True)
class EntryRow:
    """One row of a manifest."""

    entry: str
    assembly: str
    structure: str
    pairing: str
    recipes: Mapping[str, str]
    components: tuple[str, ...]
    source: str
    source_digest: str
    release_date: str | None
    resolution: float | None
    method: str | None
    title: str | None
    n_token: int
    n_atom: int
    n_residue: int
    n_chain_protein: int
    n_chain_rna: int
    n_chain_dna: int
    n_chain_ligand: int
    chains: tuple[ChainRow, ...]
    interfaces: tuple[InterfaceRow, ...]
    warnings: tuple[str, ...]

    @classmethod
    def from_mapping(cls, row: Mapping[str, Any]) -> "EntryRow":
        """View one row as it comes from ``table.to_pylist()``."""
        values = dict(row)
        values["recipes"] = {item["stage"]: item["recipe"] for item in row["recipes"]}
        values["chains"] = tuple(ChainRow(**chain) for chain in row["chains"])
        values["interfaces"] = tuple(InterfaceRow(**interface) for interface in row["interfaces"])
        values["components"] = tuple(row["components"])
        values["warnings"] = tuple(row["warnings"])
        return cls(**values)


def manifest_from_rows(rows: Iterable[Mapping[str, Any]], attributes: Mapping[str, Any]) -> Manifest:
    """Build a manifest.

    Args:
        rows: mappings with the columns of :data:`MANIFEST_SCHEMA`, in any order. ``recipes`` is
            ``{stage: digest}``. ``title``, ``method``, ``resolution`` and ``release_date`` may be absent
            or None; ``pairing`` and an interface's ``cluster`` may be absent. Everything else must be there.
        attributes: see the module's docstring; ``format`` is added.

    Raises:
        ManifestError: a column is missing, unknown or malformed, or an entry and assembly come twice.
    """
    ordered = sorted(rows, key=lambda row: (str(row.get("entry")), str(row.get("assembly"))))
    try:
        table = pa.Table.from_batches(
            [
                pa.RecordBatch.from_pylist(list(map(_canonical_row, some)), schema=MANIFEST_SCHEMA)
                for some in _parts(ordered)
            ],
            schema=MANIFEST_SCHEMA,
        )
    except (pa.ArrowInvalid, pa.ArrowTypeError) as error:
        raise ManifestError(f"a manifest row does not fit its columns: {error}") from error
    names = zip(table["entry"].to_pylist(), table["assembly"].to_pylist(), strict=True)
    for before, (entry, assembly) in itertools.pairwise(names):
        if before == (entry, assembly):
            raise ManifestError(f"{entry} assembly {assembly}: two rows")
    complete = {"ledger": "", "clusters": {}, **attributes, "format": MANIFEST_FORMAT}
    if set(complete) != _ATTRIBUTES:
        missing, extra = _ATTRIBUTES - set(complete), set(complete) - _ATTRIBUTES
        raise ManifestError(f"manifest attributes: missing {sorted(missing)}, unknown {sorted(extra)}")
    _check_digest(complete["components"], "attribute components")
    return Manifest(table=table, attributes=complete)


def _parts(rows: Sequence[Mapping[str, Any]]) -> Iterator[Sequence[Mapping[str, Any]]]:
    for first in range(0, len(rows), _ROWS_AT_A_TIME):
        yield rows[first : first + _ROWS_AT_A_TIME]


def _canonical_row(row: Mapping[str, Any]) -> dict[str, Any]:
    where = f"{row.get('entry')} assembly {row.get('assembly')}"
    values: dict[str, Any] = {"pairing": "", **dict.fromkeys(_NULLABLE), **row}
    _check_keys(values, _COLUMNS, where)
    for name in set(values) - _NULLABLE:
        if values[name] is None:
            raise ManifestError(f"{where}: column {name} is null")
    resolution = values["resolution"]
    if resolution is not None and not math.isfinite(resolution):
        raise ManifestError(f"{where}: resolution {resolution} is not a number; leave it null")
    _check_digest(values["structure"], f"{where}, structure")
    _check_digest(values["source_digest"], f"{where}, source_digest", optional=True)
    _check_digest(values["pairing"], f"{where}, pairing", optional=True)
    values["recipes"] = [{"stage": key, "recipe": value} for key, value in sorted(values["recipes"].items())]
    values["chains"] = [_canonical_chain(chain, where) for chain in values["chains"]]
    values["interfaces"] = [{"cluster": "", **interface} for interface in values["interfaces"]]
    for interface in values["interfaces"]:
        _check_keys(interface, _INTERFACE_FIELDS, where)
        if not 0 <= interface["chain_i"] < interface["chain_j"] < len(values["chains"]):
            raise ManifestError(
                f"{where}: interface {interface} names no two of {len(values['chains'])} chains"
            )
    values["components"] = list(values["components"])
    values["warnings"] = list(values["warnings"])
    return values


def _canonical_chain(chain: Mapping[str, Any], where: str) -> dict[str, Any]:
    _check_keys(chain, _CHAIN_FIELDS, f"{where}, a chain")
    where = f"{where}, chain {chain['label_asym_id']}"
    for name, value in chain.items():
        if value is None:
            raise ManifestError(f"{where}: {name} is null")
    if chain["mol_type"].upper() not in MolType.__members__ or chain["mol_type"] != chain["mol_type"].lower():
        raise ManifestError(f"{where}: mol_type {chain['mol_type']!r} is none of protein, rna, dna, ligand")
    if chain["msa_status"] not in MSA_STATUSES:
        raise ManifestError(f"{where}: msa_status {chain['msa_status']!r} is none of {MSA_STATUSES}")
    for name in ("sequence_digest", "msa", "template"):
        _check_digest(chain[name], f"{where}, {name}", optional=True)
    return dict(chain)


def _check_keys(values: Mapping[str, Any], expected: Set[str], where: str) -> None:
    if values.keys() != expected:
        missing, extra = sorted(expected - set(values)), sorted(set(values) - expected)
        raise ManifestError(f"{where}: missing {missing}, unknown {extra}")


def _check_digest(value: Any, where: str, *, optional: bool = False) -> None:
    if optional and value == "":
        return
    if not isinstance(value, str) or not _DIGEST.fullmatch(value):
        raise ManifestError(f"{where}: {value!r} is not a digest of 64 lower-case hex digits")


def entry_rows(manifest: Manifest) -> Iterator[EntryRow]:
    """The manifest's rows as typed views, in stored order, made as they are asked for.

    Raises:
        ManifestError: the manifest was written in another format.
    """
    for batch in _checked(manifest).to_batches(max_chunksize=_ROWS_AT_A_TIME):
        for row in batch.to_pylist():
            yield EntryRow.from_mapping(row)


def chain_column(table: pa.Table, name: str) -> pa.ChunkedArray:
    """A field of all chains of a manifest's table, in the order of rows and chains."""
    column = table["chains"]
    kind = column.type.value_type.field(name).type
    return pa.chunked_array([chunk.flatten().field(name) for chunk in column.chunks], kind)


def _checked(manifest: Manifest) -> pa.Table:
    found = manifest.attributes.get("format")
    if found != MANIFEST_FORMAT or set(manifest.table.schema.names) != _COLUMNS:
        raise ManifestError(
            f"the manifest has format {found}, this version reads format {MANIFEST_FORMAT}: rebuild the cache"
        )
    return manifest.table


def referenced_digests(manifest: Manifest) -> set[Digest]:
    """Every object that the manifest needs: structures, pairings, MSAs, templates and the component library.

    The failures ledger is no object and is not among them.
    """
    table = _checked(manifest)
    columns = [
        table["structure"],
        table["pairing"],
        chain_column(table, "msa"),
        chain_column(table, "template"),
    ]
    found = {str(manifest.attributes["components"])}
    for column in columns:
        found.update(pc.unique(column).to_pylist())
    return {Digest.parse(text) for text in found if text}
