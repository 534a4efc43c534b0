"""The failures ledger: entries that did not make it, and why. A failure is a result."""

from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields

import pyarrow as pa

from megafold.cache_store.manifest import Manifest

_SCHEMA = pa.schema(
    [
        ("entry", pa.string()),
        ("stage", pa.string()),
        ("reason", pa.string()),
        ("message", pa.string()),
        ("inputs", pa.list_(pa.string())),
        ("attempts", pa.int32()),
    ]
)
_KIND = {"kind": "failures"}


@dataclass(frozen=True, kw_only=True, order=True)
class Failure:
    """An entry that could not be built.

    ``stage``: what failed. ``reason``: its class, a short stable slug. ``message``: for the user.
    ``inputs``: digests of the inputs that it failed with: as long as they are the same, trying again is in
    vain. ``attempts``: how often it was tried.
    """

    entry: str
    stage: str
    reason: str
    message: str
    inputs: tuple[str, ...] = ()
    attempts: int = 1


def ledger_table(failures: Iterable[Failure]) -> Manifest:
    """Failures as a table, in order of entry and stage: the order they happened in is no part of it."""
    rows = [asdict(failure) | {"inputs": list(failure.inputs)} for failure in sorted(failures)]
    return Manifest(pa.Table.from_pylist(rows, schema=_SCHEMA), _KIND)


def ledger_failures(table: Manifest) -> list[Failure]:
    """The failures in a table.

    Raises:
        ValueError: the table is no ledger.
    """
    expected = {item.name for item in fields(Failure)}
    if dict(table.attributes) != _KIND or set(table.table.column_names) != expected:
        raise ValueError("not a ledger of failures")
    return [Failure(**row | {"inputs": tuple(row["inputs"])}) for row in table.table.to_pylist()]
