import hashlib
import tracemalloc

import pyarrow as pa
import pytest

from megafold.pipeline import manifest as manifest_module
from megafold.pipeline.manifest import (
    MANIFEST_SCHEMA,
    EntryRow,
    ManifestError,
    chain_column,
    entry_rows,
    manifest_from_rows,
    referenced_digests,
)


def hexdigest(text):
    return hashlib.sha256(text.encode()).hexdigest()


def chain_row(label="A", **changes):
    row = {
        "label_asym_id": label,
        "auth_asym_id": label,
        "asym_id": 1,
        "entity_id": 1,
        "sym_id": 1,
        "mol_type": "protein",
        "n_residue": 10,
        "n_token": 10,
        "n_resolved": 9,
        "sequence_digest": hexdigest("sequence"),
        "msa": hexdigest("msa"),
        "msa_depth": 7,
        "msa_status": "ok",
        "template": "",
        "n_template": 0,
        "cluster": "",
    }
    return row | changes


def entry_row(entry="1abc", **changes):
    row = {
        "entry": entry,
        "assembly": "1",
        "structure": hexdigest(entry),
        "recipes": {"structure": hexdigest("recipe"), "msa": hexdigest("other")},
        "components": ["ALA", "GLY"],
        "source": f"structures/{entry}.cif",
        "source_digest": hexdigest("source"),
        "release_date": "2001-02-03",
        "resolution": 1.8,
        "method": "X-RAY DIFFRACTION",
        "n_token": 20,
        "n_atom": 160,
        "n_residue": 20,
        "n_chain_protein": 2,
        "n_chain_rna": 0,
        "n_chain_dna": 0,
        "n_chain_ligand": 0,
        "chains": [chain_row(), chain_row("B", sym_id=2, asym_id=2, template=hexdigest("template"))],
        "interfaces": [{"chain_i": 0, "chain_j": 1}],
        "warnings": [],
    }
    return row | changes


def attributes(**changes):
    return {"components": hexdigest("library"), "config": {"a": 1}, "versions": {"structure": 1}} | changes


def test_rows_are_sorted_and_come_back_typed():
    manifest = manifest_from_rows(
        [entry_row("2xyz"), entry_row("1abc", assembly="2"), entry_row("1abc")], attributes()
    )
    rows = list(entry_rows(manifest))
    assert [(row.entry, row.assembly) for row in rows] == [("1abc", "1"), ("1abc", "2"), ("2xyz", "1")]
    assert rows[0].chains[1].sym_id == 2
    assert rows[0].recipes == {"msa": hexdigest("other"), "structure": hexdigest("recipe")}
    assert rows[0].title is None
    assert manifest.table.schema.equals(MANIFEST_SCHEMA)
    assert manifest.attributes["format"] == 1
    assert manifest.attributes["ledger"] == ""


def test_order_of_rows_and_recipes_does_not_matter():
    reordered = entry_row() | {"recipes": dict(reversed(entry_row()["recipes"].items()))}
    one = manifest_from_rows([entry_row("2xyz"), entry_row()], attributes())
    other = manifest_from_rows([reordered, entry_row("2xyz")], attributes())
    assert one.table.equals(other.table)


def test_referenced_digests_are_all_objects_once():
    manifest = manifest_from_rows(
        [entry_row(pairing=hexdigest("pairing"))], attributes(ledger=hexdigest("x"))
    )
    assert {str(digest) for digest in referenced_digests(manifest)} == {
        hexdigest(text) for text in ("1abc", "msa", "template", "pairing", "library")
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"structure": "abc"}, "1abc assembly 1, structure: 'abc' is not a digest"),
        ({"extra": 1}, "unknown"),
        ({"n_atom": None}, "n_atom is null"),
        ({"n_atom": "many"}, "does not fit"),
        ({"resolution": float("nan")}, "leave it null"),
        ({"interfaces": [{"chain_i": 1, "chain_j": 2}]}, "of 2 chains"),
        ({"chains": [chain_row(mol_type="PROTEIN")]}, "chain A: mol_type"),
        ({"chains": [chain_row(msa_status="maybe")]}, "msa_status"),
        ({"chains": [chain_row(msa_depth=None)]}, "msa_depth is null"),
    ],
)
def test_malformed_rows_are_named(changes, message):
    with pytest.raises(ManifestError, match=message):
        manifest_from_rows([entry_row(**changes)], attributes())


def test_an_entry_twice_and_wrong_attributes_are_refused():
    with pytest.raises(ManifestError, match="two rows"):
        manifest_from_rows([entry_row(), entry_row()], attributes())
    with pytest.raises(ManifestError, match="unknown"):
        manifest_from_rows([], attributes(colour="red"))


def test_another_format_is_refused():
    manifest = manifest_from_rows([], attributes())
    newer = type(manifest)(table=manifest.table, attributes={**manifest.attributes, "format": 2})
    with pytest.raises(ManifestError, match="rebuild the cache"):
        list(entry_rows(newer))
    other = type(manifest)(table=pa.table({"entry": ["x"]}), attributes=manifest.attributes)
    with pytest.raises(ManifestError, match="rebuild the cache"):
        list(entry_rows(other))


def test_named_objects_are_found_without_a_row_in_python(monkeypatch):
    rows = [entry_row(f"{number}abc", pairing=hexdigest("pairing")) for number in range(3)]
    rows.append(entry_row("9lig", chains=[chain_row(msa="", mol_type="ligand")], interfaces=[]))
    manifest = manifest_from_rows(rows, attributes())
    monkeypatch.setattr(EntryRow, "from_mapping", None)
    expected = {hexdigest(name) for name in ("0abc", "1abc", "2abc", "9lig", "pairing", "msa", "template")}
    assert {str(digest) for digest in referenced_digests(manifest)} == {
        *expected,
        manifest.attributes["components"],
    }


def test_rows_are_objects_in_python_a_few_at_a_time(monkeypatch):
    monkeypatch.setattr(manifest_module, "_ROWS_AT_A_TIME", 2)
    titles = [f"{number}" * 100_000 for number in range(40)]
    rows = (entry_row(f"{number:02d}ab", title=title) for number, title in enumerate(titles))
    manifest = manifest_from_rows(rows, attributes())
    tracemalloc.start()
    try:
        found = [hexdigest(row.title) for row in entry_rows(manifest)]
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert found == [hexdigest(title) for title in titles]
    assert peak < sum(map(len, titles)) / 4


def test_parts_make_the_same_table(monkeypatch):
    rows = [entry_row(f"{number}abc") for number in range(7)]
    whole = manifest_from_rows(rows, attributes())
    monkeypatch.setattr(manifest_module, "_ROWS_AT_A_TIME", 3)
    parts = manifest_from_rows(reversed(rows), attributes())
    assert parts.digest() == whole.digest()
    assert parts.table.equals(whole.table)
    assert list(entry_rows(parts)) == list(entry_rows(whole))
    assert chain_column(parts.table, "msa").to_pylist() == [hexdigest("msa")] * 14
    with pytest.raises(ManifestError, match="3abc assembly 1: two rows"):
        manifest_from_rows([*rows, rows[3]], attributes())


def test_empty_manifest_names_the_component_library_alone():
    manifest = manifest_from_rows([], attributes())
    assert list(entry_rows(manifest)) == []
    assert {str(digest) for digest in referenced_digests(manifest)} == {manifest.attributes["components"]}
