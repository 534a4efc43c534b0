"""CSV alignments: hand-checked rows and keys, against the same alignment as A3M, and pairing by key."""

import csv
import io

import numpy as np
import pytest

from megafold.pipeline.alignments import file_kind
from megafold.pipeline.errors import AlignmentError
from megafold.pipeline.msa import MsaRows, featurize_msa, pair_msas
from megafold.pipeline.msa.a3m import parse_a3m
from megafold.pipeline.msa.alphabet import Alphabet
from megafold.pipeline.msa.keyed_csv import parse_keyed_csv
from megafold.pipeline.schema import MolType

PROTEIN = Alphabet.of(MolType.PROTEIN)
ROWS = [("0", "MKVL"), ("7", "M-aaV-"), ("-1", "MRVL"), ("", "MKVW"), ("nan", "--VL"), ("7", "xMKVL")]


def written(rows, columns=("key", "sequence"), **dialect):
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, lineterminator="\n", **dialect)
    writer.writeheader()
    writer.writerows({"key": key, "sequence": sequence} for key, sequence in rows)
    return file.getvalue().encode()


@pytest.mark.parametrize(
    "data",
    [
        written(ROWS),
        written(ROWS, columns=("sequence", "key")),
        written(ROWS, quoting=csv.QUOTE_ALL),
        written(ROWS).replace(b"\n", b"\r\n"),
        b"\n" + written(ROWS)[:-1],
        written(ROWS).replace(b"\n", b"\n\n"),
        written(ROWS).replace(b"key", b"Key"),
    ],
)
def test_as_the_same_rows_in_an_a3m_file(data):
    (found,) = parse_keyed_csv(data, PROTEIN, "x.csv")
    (expected,) = parse_a3m("".join(f">{k}\n{s}\n" for k, s in ROWS).encode(), PROTEIN, "x.a3m")
    assert found.query == "MKVL"
    np.testing.assert_array_equal(found.codes, expected.codes)
    for name in ("row", "column", "count"):
        np.testing.assert_array_equal(getattr(found.insertions, name), getattr(expected.insertions, name))
    assert found.keys == [b"0", b"7", b"", b"", b"", b"7"]


@pytest.mark.parametrize(
    ("data", "reason", "words"),
    [
        (b"key,sequence\n", "no-records", "x.csv"),
        (b"key,key\n1,MKV\n", "bad-line", "x.csv"),
        (b"key,sequence\n0,MKV\nMKV\n", "bad-line", "row 1 has 1 columns"),
        (b"key,sequence\n0,MKV\n1,MKV,3\n", "bad-line", "row 1 has 3 columns"),
        (b"key,sequence\n0,MKV\n1,MKV\n\n,,\n", "bad-line", "row 2 has 3 columns"),
        (b"key,sequence\n0,MKV\n1,MK\n", "row-length", "row 1 (1) has 2 columns"),
        (b"key,sequence\n0,MKV\n1,M1V\n", "bad-character", "row 1 (1) holds '1'"),
        (b"key,sequence\n0,---\n", "bad-query", "row 0 (0)"),
    ],
)
def test_broken_files_are_named(data, reason, words):
    with pytest.raises(AlignmentError, match=r"x\.csv") as caught:
        parse_keyed_csv(data, PROTEIN, "x.csv")
    assert caught.value.reason == reason
    assert words in str(caught.value)


def test_rows_of_one_key_pair(tmp_path):
    contents = []
    for name, sequence, rows in (
        ("a", "MKV", [("0", "MKV"), ("1", "MRV"), ("2", "MAV"), ("-1", "MWV")]),
        ("b", "ACDE", [("0", "ACDE"), ("2", "A-DE"), ("5", "ACDW"), ("1", "AC-E"), ("", "AAAA")]),
    ):
        path = tmp_path / f"{name}.csv"
        path.write_bytes(written(rows))
        assert file_kind(path) == "msa"
        result = featurize_msa(sequence, MolType.PROTEIN, [path])
        assert result.failures == ()
        assert result.content is not None
        contents.append(result.content)
    assert contents[0].attributes["species"] == ["key:1", "key:2"]
    assert contents[0].arrays["rows"][1].tolist() == [-1, 0, 1, -1]
    pairing = pair_msas([MsaRows.from_content(content) for content in contents])
    assert pairing is not None
    assert sorted(pairing.arrays["pairing"].tolist()) == [[0, 0], [1, 3], [2, 1]]


def test_other_tables_are_no_alignments(tmp_path):
    path = tmp_path / "scores.csv"
    path.write_text("name,score\na,1\n")
    assert file_kind(path) is None
