"""Stockholm: hand-checked arrays."""

import numpy as np
import pytest

from megafold.pipeline.errors import AlignmentError
from megafold.pipeline.msa.alphabet import Alphabet
from megafold.pipeline.msa.stockholm import parse_stockholm
from megafold.pipeline.schema import RESTYPE_INDEX, RESTYPES, MolType

PROTEIN = Alphabet.of(MolType.PROTEIN)
LETTERS = dict(zip("ARNDCQEGHILKMFPSTWYV", RESTYPES[:20], strict=True))

INTERLEAVED = b"""# STOCKHOLM 1.0
#=GF AU jackhmmer (HMMER 3.3.2)

#=GS tr|A0A1|A0A1_RAT/3-9 DE [subseq from] Globin OS=Rattus norvegicus OX=10116
#=GS b/1-4                DE Second

query                 M.K-
tr|A0A1|A0A1_RAT/3-9  MaKl
#=GR tr|A0A1|A0A1_RAT/3-9 PP 9999
b/1-4                 -.-.
#=GC RF               x.x.

query                 .-VL
tr|A0A1|A0A1_RAT/3-9  vl--
#=GR tr|A0A1|A0A1_RAT/3-9 PP 9999
b/1-4                 ..V~
#=GC RF               ..xx
//
"""


def test_interleaved_blocks():
    (alignment,) = parse_stockholm(INTERLEAVED, PROTEIN, "x.sto")
    assert alignment.query == "MKVL"
    assert list(alignment.headers) == [
        b"query",
        b"tr|A0A1|A0A1_RAT/3-9 [subseq from] Globin OS=Rattus norvegicus OX=10116",
        b"b/1-4 Second",
    ]
    rows = ["MKVL", "MK--", "--V-"]
    expected = [[RESTYPE_INDEX["-" if c == "-" else LETTERS[c]] for c in row] for row in rows]
    assert alignment.codes.tolist() == expected
    # Columns: M . K - . - V L. The second row inserts `a` before K, and `l`, `v`, `l` before V.
    found = alignment.insertions
    assert np.array([found.row, found.column, found.count]).T.tolist() == [[1, 1, 1], [1, 2, 3]]


def test_query_residue_in_an_insert_column_is_kept():
    # jackhmmer writes the query in lower case where its profile has no match state.
    (alignment,) = parse_stockholm(b"# STOCKHOLM 1.0\nq Mk.V\na M-aV\n#=GC RF x..x\n//\n", PROTEIN, "x")
    assert alignment.query == "MKV"
    assert alignment.insertions.count.tolist() == [1]


def test_crlf_and_missing_end():
    (alignment,) = parse_stockholm(b"# STOCKHOLM 1.0\r\n\r\nq MK\r\na M-\r\n", PROTEIN, "x")
    assert alignment.query == "MK"
    assert list(alignment.headers) == [b"q", b"a"]


def test_several_alignments():
    data = b"# STOCKHOLM 1.0\nq MK\n//\n# STOCKHOLM 1.0\nr VLA\n//\n"
    assert [item.query for item in parse_stockholm(data, PROTEIN, "x")] == ["MK", "VLA"]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"# STOCKHOLM 1.0\n//\n", "no-records"),
        (b"# STOCKHOLM 1.0\nq MKV\na MK\n//\n", "row-length"),
        (b"# STOCKHOLM 1.0\nq MKV\na MKV extra\n//\n", "bad-line"),
        (b"# STOCKHOLM 1.0\nq MKV\n#=GC RF \n//\n", "bad-line"),
        (b"# STOCKHOLM 1.0\nq MKV\na M8V\n//\n", "bad-character"),
        (b"# STOCKHOLM 1.0\nq ...\na MKV\n//\n", "bad-query"),
    ],
)
def test_broken_files_are_named(data, reason):
    with pytest.raises(AlignmentError, match=r"x\.sto") as caught:
        parse_stockholm(data, PROTEIN, "x.sto")
    assert caught.value.reason == reason
