import datetime
import hashlib
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from megafold.cache_store import ContentError, Manifest
from megafold.cache_store import manifest as manifest_module
from tests.cache_store.store_conformance import small_manifest

DAY = datetime.date(2020, 2, 29)
ROWS: list[dict[str, Any]] = [
    {
        "entry": "1abc",
        "resolution": 1.5,
        "released": DAY,
        "monomer": True,
        "tokens": 12,
        "chains": [{"id": "A", "msa": None, "depths": [1, 2]}, {"id": "B", "msa": "ü", "depths": []}],
    },
    {"entry": "2xyz", "resolution": None, "released": None, "monomer": False, "tokens": -3, "chains": []},
]
SCHEMA = pa.schema(
    [
        ("entry", pa.string()),
        ("resolution", pa.float64()),
        ("released", pa.date32()),
        ("monomer", pa.bool_()),
        ("tokens", pa.int32()),
        (
            "chains",
            pa.list_(
                pa.struct([("id", pa.string()), ("msa", pa.string()), ("depths", pa.list_(pa.int16()))])
            ),
        ),
    ]
)


def table(rows: list[dict] = ROWS, schema: pa.Schema = SCHEMA) -> pa.Table:
    return pa.Table.from_pylist(rows, schema=schema)


def test_golden_digest():
    """The digest of a small manifest, spelled out byte by byte. It may never change."""
    stream = "\n".join(
        [
            "megafold manifest 1",
            '{"chains":[{"depths":["int"],"id":"string","msa":"string"}],"entry":"string","monomer":"bool",'
            '"released":"date","resolution":"float","tokens":"int"}',
            '{"chains":[{"depths":[1,2],"id":"A","msa":null},{"depths":[],"id":"B","msa":"ü"}],"entry":"1abc",'
            '"monomer":true,"released":"2020-02-29","resolution":1.5,"tokens":12}',
            '{"chains":[],"entry":"2xyz","monomer":false,"released":null,"resolution":null,"tokens":-3}',
            'attributes\n{"components":"ab","settings":{"a":1}}',
        ]
    )
    manifest = Manifest(table(), {"settings": {"a": 1}, "components": "ab"})
    assert str(manifest.digest()) == hashlib.sha256(stream.encode()).hexdigest()


def test_what_is_written_comes_back():
    manifest = Manifest(table(), {"ledger": "ab", "list": [1, None]})
    found, digest = Manifest.from_parquet(manifest.to_parquet())
    assert found.table.equals(table())
    assert found.table.schema.equals(SCHEMA)
    assert found.attributes == manifest.attributes
    assert digest == found.digest() == manifest.digest()
    assert pickle.loads(pickle.dumps(manifest)).digest() == manifest.digest()


def test_any_parquet_reader_reads_it(tmp_path):
    (tmp_path / "m.parquet").write_bytes(Manifest(table(), {"a": 1}).to_parquet())
    found = pq.read_table(tmp_path / "m.parquet")
    assert found.to_pylist() == ROWS
    assert b'"a":1' in found.schema.metadata[b"megafold"]
    assert (
        pq.read_table(tmp_path / "m.parquet", columns=["entry"], filters=[("tokens", ">", 0)]).num_rows == 1
    )


def test_how_it_is_written_does_not_count():
    digest = Manifest(table()).digest()
    wide = SCHEMA.set(0, pa.field("entry", pa.large_string())).set(4, pa.field("tokens", pa.int64()))
    encoded = table().set_column(0, "entry", table()["entry"].dictionary_encode())
    parts = pa.concat_tables([table(ROWS[:1]), table(ROWS[1:])])
    with_metadata = table().replace_schema_metadata({"pandas": "x"})
    for other in (
        table(schema=wide),
        table().select(list(reversed(SCHEMA.names))),
        encoded,
        parts,
        with_metadata,
    ):
        assert Manifest(other).digest() == digest
    assert Manifest(with_metadata).table.schema.metadata is None


def test_what_counts():
    others = [
        Manifest(table()),
        Manifest(table(), {"a": 1}),
        Manifest(table(ROWS[::-1])),
        Manifest(table(ROWS[:1])),
        Manifest(table().rename_columns(["id", *SCHEMA.names[1:]])),
        Manifest(table([{**ROWS[0], "resolution": 1.25}, ROWS[1]])),
        Manifest(table().set_column(2, "released", pa.array(["2020-02-29", None]))),
        Manifest(table().set_column(4, "tokens", pa.array([12.0, -3.0]))),
        Manifest(table([]), {}),
    ]
    assert len({manifest.digest() for manifest in others}) == len(others)


def test_many_rows_are_the_same_in_any_batches():
    numbers = pa.table({"n": np.arange(10_000)})
    parts = pa.concat_tables([numbers.slice(0, 3), numbers.slice(3, 7000), numbers.slice(7003)])
    assert Manifest(numbers).digest() == Manifest(parts).digest()


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"x": pa.array([b"a"])}, "column x: type binary"),
        ({"x": pa.array([[b"a"]])}, r"column x\[\]: type binary"),
        ({"x": pa.array([{"y": datetime.timedelta(1)}])}, r"column x\.y: type duration"),
        ({"x": pa.array([[("k", 1)]], pa.map_(pa.string(), pa.int8()))}, "column x: type map"),
    ],
)
def test_types_that_are_not_stored(columns, message: str):
    with pytest.raises(ContentError, match=message):
        Manifest(pa.table(columns))


def test_values_that_are_not_stored():
    with pytest.raises(ContentError, match=r"row 1 .*null"):
        Manifest(pa.table({"x": [0.0, float("nan")]})).digest()
    with pytest.raises(ContentError, match="two columns"):
        Manifest(pa.Table.from_arrays([pa.array([1]), pa.array([1])], names=["x", "x"]))
    with pytest.raises(ContentError, match="is nan"):
        Manifest(pa.table({"x": [1]}), {"a": float("nan")})


def test_files_that_are_no_manifests(tmp_path):
    pq.write_table(pa.table({"x": [1]}), tmp_path / "other.parquet")
    for data in (b"", b"PAR1", b"x" * 300, (tmp_path / "other.parquet").read_bytes()):
        with pytest.raises(ValueError, match="no seal"):
            Manifest.from_parquet(data)


@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="counts threads as Linux tells them")
def test_reading_starts_no_thread(tmp_path: Path):
    """Arrow's own threads abort the process now and then, where they outlive the interpreter."""
    path = tmp_path / "manifest.parquet"
    path.write_bytes(small_manifest().to_parquet())
    code = (
        "import os, sys\n"
        "from megafold.cache_store import Manifest\n"
        "before = len(os.listdir('/proc/self/task'))\n"
        "Manifest.from_parquet(open(sys.argv[1], 'rb').read())\n"
        "print(len(os.listdir('/proc/self/task')) - before)\n"
    )
    shown = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=True)
    assert shown.stdout == "0\n"


def test_another_format_is_told(monkeypatch: pytest.MonkeyPatch):
    written = manifest_module.canonical_json

    def later(value):
        return written({**value, "format": 2} if "format" in value else value)

    monkeypatch.setattr(manifest_module, "canonical_json", later)
    data = Manifest(pa.table({"a": [1]}), {}).to_parquet()
    with pytest.raises(ValueError, match="it has format 2, and this version of megafold reads format 1"):
        Manifest.from_parquet(data)
