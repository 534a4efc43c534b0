"""A3M and A2M: hand-checked arrays for every trait that files in the wild have, and a round trip."""

import gzip

import numpy as np
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from megafold.pipeline.errors import AlignmentError
from megafold.pipeline.msa.a3m import parse_a3m
from megafold.pipeline.msa.alphabet import Alphabet
from megafold.pipeline.msa.text import read_text
from megafold.pipeline.schema import RESTYPE_INDEX, RESTYPES, MolType

PROTEIN = Alphabet.of(MolType.PROTEIN)
LETTERS = dict(zip("ARNDCQEGHILKMFPSTWYV", RESTYPES[:20], strict=True)) | {"B": "ASP", "Z": "GLU"}


def classes(rows):
    """Aligned letters to classes, from the names in RESTYPES."""
    return [[RESTYPE_INDEX["-" if c == "-" else LETTERS.get(c, "UNK")] for c in row] for row in rows]


def parse(data, alphabet=PROTEIN):
    (alignment,) = parse_a3m(data, alphabet, "x.a3m")
    return alignment


def deletions(alignment):
    dense = np.zeros(alignment.codes.shape, int)
    found = alignment.insertions
    dense[found.row, found.column] = found.count
    return dense.tolist()


def test_insertions_count_for_the_column_to_their_right():
    alignment = parse(b">q\nMKV\n>a some thing\nMabK-\n>b\nxMKcVde\n")
    assert alignment.query == "MKV"
    assert list(alignment.headers) == [b"q", b"a some thing", b"b"]
    assert alignment.codes.tolist() == classes(["MKV", "MK-", "MKV"])
    # `de` lies right of the last column: no residue is there to carry it.
    assert deletions(alignment) == [[0, 0, 0], [0, 2, 0], [1, 0, 1]]


@pytest.mark.parametrize(
    "data",
    [
        b">q\r\nMK\r\nVL\r\n>a\r\nM-aV\r\nL\r\n",  # CRLF, wrapped
        b"\n\n>q\n\nMKVL\n\n\n>a\nM-aVL",  # empty lines, no last line end
        b">q\nMK VL\n>a\tb\t1.5\n\tM-aVL \n",  # blanks in rows, tabs in headers
        b">q\nM.K..VL\n>a\nM.-a.VL\n",  # A2M's dots opposite insertions
        b"#A3M#\n>q\nMKVL\n>a\nM-aVL\n",  # comment before the first record
        b"; from somewhere\n>q\nMKVL\n>a\nM-aVL\n",  # the oldest FASTA comment
        b">ss_pred\nHHCC\n>ss_conf\n9999\n>Consensus\nmkvl\n>q\nMKVL\n>a\nM-aVL\n",  # HH-suite's extra rows
        b">q\nMKVL\n>a\nM-aVL\n\0",  # NUL at the end
    ],
)
def test_layouts(data):
    alignment = parse(data)
    assert alignment.query == "MKVL"
    assert alignment.codes.tolist() == classes(["MKVL", "M-VL"])
    assert deletions(alignment) == [[0] * 4, [0, 0, 1, 0]]


def test_nul_separates_alignments():
    first, second = parse_a3m(b">101\nMK\n>a\nM-\n\0>102\nVLA\n>b\nV-A\n\0", PROTEIN, "x.a3m")
    assert (first.query, second.query) == ("MK", "VLA")
    assert second.codes.tolist() == classes(["VLA", "V-A"])


def test_lower_case_query_with_a_column_for_each_residue():
    alignment = parse(b">q\nmkVL\n>a\nMaKVL\n")
    assert alignment.query == "MKVL"
    assert alignment.codes.tolist() == classes(["MKVL", "MKVL"])
    assert deletions(alignment)[1] == [0, 1, 0, 0]


def test_lower_case_query_alone():
    assert parse(b">q\nmkvl\n").codes.tolist() == classes(["MKVL"])


def test_lower_case_query_residues_without_a_column():
    # Columns M, V and L; the query's K has none, so the other rows have a gap there.
    alignment = parse(b">q\nMkVL\n>a\nM-L\n>b\nMaaVL\n")
    assert alignment.query == "MKVL"
    assert alignment.codes.tolist() == classes(["MKVL", "M--L", "M-VL"])
    assert deletions(alignment) == [[0] * 4, [0] * 4, [0, 0, 2, 0]]


def test_columns_where_the_query_has_a_gap_become_insertions():
    alignment = parse(b">q\nM--KV\n>a\nMAC-V\n>b\nMA-KV\n>c\nM-aAKV\n")
    assert alignment.query == "MKV"
    assert alignment.codes.tolist() == classes(["MKV", "M-V", "MKV", "MKV"])
    assert deletions(alignment) == [[0] * 3, [0, 2, 0], [0, 1, 0], [0, 2, 0]]


def test_joined_alignment_tells_its_chains():
    alignment = parse(b"#3,2\t1,1\n>101\t102\nMKVLA\n>a\tb\nMKVL-\n")
    assert alignment.segments == ((0, 3), (3, 5))


@pytest.mark.parametrize(
    ("mol_type", "letters", "names"),
    [
        (MolType.PROTEIN, "UOBZJX*", ["CYS", "UNK", "ASP", "GLU", "UNK", "UNK", "UNK"]),
        (MolType.RNA, "ACGUTNRYX", ["A", "C", "G", "U", "U", "N", "N", "N", "N"]),
        (MolType.DNA, "ACGTUNRYX", ["DA", "DC", "DG", "DT", "DT", "DN", "DN", "DN", "DN"]),
    ],
)
def test_alphabets(mol_type, letters, names):
    alphabet = Alphabet.of(mol_type)
    expected = [RESTYPE_INDEX[name] for name in names]
    assert alphabet.encode(letters).tolist() == expected
    assert alphabet.encode(letters.lower()).tolist() == expected
    assert parse(f">q\n{letters}\n>a\n{letters}\n".encode(), alphabet).codes[1].tolist() == expected


def test_ligands_have_no_alphabet():
    with pytest.raises(KeyError):
        Alphabet.of(MolType.LIGAND)


@pytest.mark.parametrize(
    ("data", "reason", "words"),
    [
        (b"", "no-records", "x.a3m"),
        (b"\n\0\n", "no-records", "x.a3m"),
        (b"MKVL\n", "no-records", "begins with"),
        (b">q\n", "bad-query", "row 0 (q)"),
        (b">q\n---\n", "bad-query", "row 0 (q)"),
        (b">q\nM1K\n", "bad-query", "row 0 (q)"),
        (b">q\nMKV\n>a\nMKV\n>short one\nMK", "row-length", "row 2 (short) has 2 columns"),
        (b">q\nMKV\n>a\n", "row-length", "row 1 (a) has 0 columns"),
        (b">q\nMKV\n>a\nM7V\n", "bad-character", "row 1 (a) holds '7'"),
        (b">q\nMKV\n>a\nMK>V\n", "bad-character", "row 1 (a) holds '>'"),
    ],
)
def test_broken_files_are_named(data, reason, words):
    with pytest.raises(AlignmentError, match=r"x\.a3m") as caught:
        parse_a3m(data, PROTEIN, "x.a3m")
    assert caught.value.reason == reason
    assert words in str(caught.value)


ROW = st.tuples(
    st.text("ABCDEFGHIKLMNPQRSTVWXYZ-", min_size=5, max_size=5),
    st.lists(st.text("acdefgy", max_size=3), min_size=5, max_size=5),
)


@settings(max_examples=60, deadline=None)
@given(
    query=st.text("ACDEFGHIKLMNPQRSTVWY", min_size=5, max_size=5),
    rows=st.lists(ROW, max_size=6),
    width=st.integers(1, 12),
    line_end=st.sampled_from(["\n", "\r\n", "\n\n"]),
)
def test_round_trip(query, rows, width, line_end):
    written = [query] + [
        "".join(ins + letter for letter, ins in zip(letters, inserts, strict=True))
        for letters, inserts in rows
    ]
    text = "".join(
        f">row{index}{line_end}"
        + line_end.join(row[start : start + width] for start in range(0, len(row), width))
        + line_end
        for index, row in enumerate(written)
    )
    alignment = parse(text.encode())
    assert alignment.query == query
    assert alignment.codes.tolist() == classes([query, *(letters for letters, _ in rows)])
    assert deletions(alignment) == [[0] * 5, *([len(item) for item in inserts] for _, inserts in rows)]


def test_many_rows_cross_the_chunks():
    # More text than one chunk holds: rows must not shift where chunks meet.
    rng = np.random.default_rng(0)
    letters = np.array(list("ACDEFGHIKLMNPQRSTVWY-"))[rng.integers(0, 21, (6000, 90))]
    rows = ["".join(row) for row in letters]
    inserted = rng.integers(0, 90, 6000)
    body = "".join(
        f">r{k}\n{row[:at]}{'a' * (k % 4)}{row[at:]}\n"
        for k, (row, at) in enumerate(zip(rows, inserted.tolist(), strict=True))
    )
    alignment = parse(f">q\n{'M' * 90}\n{body}".encode())
    assert alignment.codes[1:].tolist() == classes(rows)
    expected = np.zeros((6000, 90), int)
    expected[np.arange(6000), inserted] = np.arange(6000) % 4
    assert deletions(alignment)[1:] == expected.tolist()


def test_compression_is_told_by_content(tmp_path):
    data = b">q\nMKVL\n" * 3
    half = len(data) // 2
    variants = {
        "a.a3m": data,
        "a.a3m.gz": gzip.compress(data),
        "b.a3m.gz": gzip.compress(data[:half]) + gzip.compress(data[half:]) + b"\0" * 16,
        "a.a3m.zst": zstandard.compress(data),
        "b.a3m.zst": zstandard.compress(data[:half]) + zstandard.compress(data[half:]),
        "c.a3m": gzip.compress(data),
    }
    for name, raw in variants.items():
        (tmp_path / name).write_bytes(raw)
        text = read_text(tmp_path / name)
        assert text.data == data, name
        assert text.name == name[:5]


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_cut_files_are_refused(tmp_path, compress):
    rng = np.random.default_rng(0)
    raw = compress(b">q\n" + rng.integers(65, 90, 5000, np.uint8).tobytes())
    path = tmp_path / "cut.a3m.gz"
    path.write_bytes(raw[:-20])
    with pytest.raises(AlignmentError, match=r"cut\.a3m\.gz") as caught:
        read_text(path)
    assert caught.value.reason == "broken-compression"


def test_missing_file(tmp_path):
    with pytest.raises(AlignmentError, match=r"none\.a3m") as caught:
        read_text(tmp_path / "none.a3m")
    assert caught.value.reason == "unreadable"
