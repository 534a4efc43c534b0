"""Hit lists: hand-checked alignments, and a walk over the corpus from the formats' definitions."""

import gzip
import re

import numpy as np
import pytest

from megafold.pipeline.errors import TemplateError
from megafold.pipeline.msa.text import AlignmentText, read_text
from megafold.pipeline.template.hit import Hit, HitList, Skipped
from megafold.pipeline.template.hits import hit_entries, parse_hits

STOCKHOLM = """# STOCKHOLM 1.0
#=GF AU hmmsearch (HMMER 3.3.2)
#=GS 1ABC_B2/11-14 DE [subseq from] mol:protein length:30

1ABC_B2/11-14      -Kav-
#=GR 1ABC_B2/11-14 PP .999.
AF-P01112-F1/1-2   MK---
2xyz_A             MK---
#=GC RF            xx.xx

1ABC_B2/11-14      L
AF-P01112-F1/1-2   .
2xyz_A             -
#=GC RF            x
//
"""

HHR = """Query         query
Match_columns 6
No_of_seqs    1 out of 1
Command       hhsearch -i query.a3m

 No Hit                             Prob E-value P-value  Score    SS Cols Query HMM  Template HMM
  1 1ABC_A SOME PROTEIN             99.8 2.1E-25 2.3E-30  158.4   0.0    4    2-6      8-12 (20)
  2 2wga   ; lectin (agglutinin);   99.9 1.1E-30 1.4E-34  190.4   0.0    2    1-2      1-2  (9)

No 1
>1ABC_A SOME PROTEIN; 3.09A {Anser anser}
Probab=99.84  E-value=2.1e-25  Score=158.41  Aligned_cols=4  Identities=71%

Q ss_pred             CCC
Q query             2 KV-L    4 (6)
Q Consensus         2 kv-l    4 (6)
                      || .
T Consensus         8 ~~~~   11 (20)
T 1ABC_A            8 KVAL   11 (20)
T ss_dssp             CCCC
T ss_pred             CCCC
Confidence            4444

Q query             5 AE    6 (6)
Q Consensus         5 ae    6 (6)
                      +
T Consensus        12 -~   12 (20)
T 1ABC_A           12 -E   12 (20)
T ss_dssp             -C
Confidence             4


No 2
>2wga   ; lectin (agglutinin); NMR {}
Probab=99.9

Q query             1 MK    2 (6)
T 2wga              1 MK    2 (9)


"""


def text(data, name="hits"):
    return AlignmentText(name=name, digest="0" * 64, data=data.encode())


def read(data, sequence, name="hits"):
    """The items of a hit list."""
    return parse_hits(text(data, name), sequence).items


def read_file(path, sequence):
    """The items of a hit list on disk."""
    return parse_hits(read_text(path), sequence).items


def aligned(hit):
    assert isinstance(hit, Hit)
    return hit.query_index.tolist(), hit.hit_index.tolist()


def test_stockholm():
    first, second, third = read(STOCKHOLM, "MKVLL")
    assert (first.entry, first.chain, first.start, first.sequence) == ("1abc", "B2", 10, "KAVL")
    # Match columns are 1, 2, 4, 5 and 6: K, V and L align, A is an insertion.
    assert aligned(first) == ([1, 2, 4], [0, 2, 3])
    assert second == Skipped(reason="no-chain-id")
    assert (third.entry, third.chain, third.start) == ("2xyz", "A", -1)
    assert aligned(third) == ([0, 1], [0, 1])


def test_stockholm_of_another_query():
    with pytest.raises(TemplateError, match="profile has 5 columns, the chain has 9") as caught:
        parse_hits(text(STOCKHOLM), "WWWWWWWWW")
    assert caught.value.reason == "query-mismatch"


def test_profile_without_all_residues_is_read_through_the_chains_own_hit():
    # The profile has no state for the query's second V; the chain's own row tells which residues it has.
    data = "# STOCKHOLM 1.0\n1own_A/1-6 MKVvLA\n1abc_B/3-7 MR-aWA\n#=GC RF    xxx.xx\n//\n"
    found = parse_hits(text(data, "x.sto"), "MKVVLA")
    own, other = read(data, "MKVVLA", "x.sto")
    assert aligned(own) == ([0, 1, 2, 4, 5], [0, 1, 2, 4, 5])
    assert other.sequence == "MRAWA"
    assert aligned(other) == ([0, 1, 4, 5], [0, 1, 3, 4])
    (warning,) = found.warnings
    assert "x.sto" in warning
    assert "5 columns, the chain has 6 residues" in warning
    assert "1own_A/1-6" in warning


def test_no_hits():
    assert parse_hits(text("# STOCKHOLM 1.0\n//\n"), "MKV").items == ()
    assert parse_hits(text(HHR[: HHR.index("  1 1ABC")]), "MKVLAE").items == ()


def test_hhr():
    first, second = read(HHR, "MKVLAE")
    assert (first.entry, first.chain, first.start, first.sequence) == ("1abc", "A", 7, "KVALE")
    # Q: K2 V3 - L4 A5 E6; T: K8 V9 A10 L11 - E12.
    assert aligned(first) == ([1, 2, 3, 5], [0, 1, 3, 4])
    assert second == Skipped(reason="no-chain-id")


@pytest.mark.parametrize(
    ("sequence", "words"),
    [("MKVLAEE", "query has 6 columns, the chain has 7"), ("MKWLAE", "has V at residue 3, the chain has W")],
)
def test_hhr_of_another_query(sequence, words):
    with pytest.raises(TemplateError, match=words) as caught:
        parse_hits(text(HHR), sequence)
    assert caught.value.reason == "query-mismatch"


def test_hhr_cut_off():
    with pytest.raises(TemplateError, match="1ABC_A") as caught:
        parse_hits(text(HHR[: HHR.index("T 1ABC_A           12")]), "MKVLAE")
    assert caught.value.reason == "row-length"


@pytest.mark.parametrize("columns", ["", "Feb", "²"])
def test_hhr_that_does_not_say_how_long_its_query_is(columns):
    with pytest.raises(TemplateError, match="line 2 does not say how many columns") as caught:
        parse_hits(text(HHR.replace("Match_columns 6", f"Match_columns {columns}")), "MKVLAE")
    assert caught.value.reason == "bad-line"


@pytest.mark.parametrize("data", ["101\t4g3x_A\t1.000\t166\n", "<html>\n"])
def test_other_formats_are_counted(data):
    found = parse_hits(text(data, "x.m8"), "MKV")
    assert found.items == (Skipped(reason="unsupported-hit-format"),)
    assert "x.m8" in found.warnings[0]


@pytest.mark.parametrize("data", ["", "\n \n", "# BLASTP 2.14\n# 0 hits found\n"])
def test_a_search_that_found_nothing(data):
    assert parse_hits(text(data, "x.m8"), "MKV") == HitList(items=())


@pytest.mark.parametrize(
    ("data", "entries"),
    [
        (STOCKHOLM, {"1abc", "2xyz"}),
        (HHR, {"1abc"}),
        ("101\t4g3x_A\n", set()),
        ("101\t4G3X_A\t1.0\t9\t0\t0\t1\t9\t1\t9\t1E-5\t20\n", {"4g3x"}),
        ("\n>query\nMKV\n>1abc_A/1-3 x\nMKV\n>UniRef90_X\nMKV\n", {"1abc"}),
        ("", set()),
    ],
)
def test_entries(tmp_path, data, entries):
    path = tmp_path / "hits"
    path.write_text(data)
    assert hit_entries(path) == entries


def test_entries_of_a_missing_file(tmp_path):
    with pytest.raises(TemplateError, match="none") as caught:
        hit_entries(tmp_path / "none")
    assert caught.value.reason == "unreadable"


def walk_hhr(raw):
    """[(name, [(query residue, template residue, template letter)])], 1-based, character by character."""
    hits = []
    for part in re.split(r"^No \d+ *$", raw, flags=re.M)[1:]:
        name = part.strip().split("\n")[0][1:].split()[0]
        rows: dict[str, list] = {"Q": [], "T": []}
        for line in part.split("\n"):
            match = re.match(r"([QT]) (\S+) +(\d+) (\S+) +(\d+) \((\d+)\)", line)
            if match and match[2] != "Consensus":
                rows[match[1]].append((int(match[3]), match[4]))
        pairs = []
        for (q, q_row), (t, t_row) in zip(rows["Q"], rows["T"], strict=True):
            for a, b in zip(q_row, t_row, strict=True):
                if a != "-" and b != "-":
                    pairs.append((q, t, b))
                q, t = q + (a != "-"), t + (b != "-")
        hits.append((name, pairs))
    return hits


def query_of_hhr(raw):
    """The query's letters, X where no hit shows them."""
    letters = ["X"] * int(re.findall(r"^Match_columns\s+(\d+)", raw, flags=re.M)[0])
    for start, row in re.findall(r"^Q (?!Consensus|ss_)\S+ +(\d+) (\S+) +\d+ \(", raw, flags=re.M):
        residues = row.replace("-", "")
        letters[int(start) - 1 : int(start) - 1 + len(residues)] = residues
    return "".join(letters)


@pytest.mark.corpus
def test_every_hhr_file(corpus_dir):
    files = sorted(corpus_dir.glob("spare_templates/*.hhr.gz")) + sorted(
        corpus_dir.glob("more/spare_templates/*.hhr.gz")
    )
    assert len(files) >= 12
    n_hit = 0
    for path in files:
        raw = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
        items = read_file(path, query_of_hhr(raw))
        expected = walk_hhr(raw)
        assert len(items) == len(expected)
        for item, (name, pairs) in zip(items, expected, strict=True):
            if isinstance(item, Skipped):
                assert not re.fullmatch(r"[0-9]\w{3}_\w+", name)
                continue
            assert f"{item.entry}_{item.chain}".upper() == name.upper()
            assert item.query_index.tolist() == [q - 1 for q, _, _ in pairs]
            assert (item.start + item.hit_index).tolist() == [t - 1 for _, t, _ in pairs]
            assert [item.sequence[k] for k in item.hit_index] == [letter.upper() for _, _, letter in pairs]
            n_hit += 1
    assert n_hit > 1000


@pytest.mark.corpus
def test_every_hmmsearch_file(corpus_dir):
    """Rows against the RF line, character by character; the range in a name counts the row's residues."""
    lines = (corpus_dir / "chains.tsv").read_text().splitlines()
    header = lines[0].split("\t")
    n_hit = 0
    for line in lines[1:]:
        row = dict(zip(header, line.split("\t"), strict=True))
        path = corpus_dir / row["alignments"] / "hmmsearch_hits.sto.gz"
        if not row["alignments"] or not path.exists():
            continue
        rows: dict[str, str] = {}
        reference = ""
        for text_line in gzip.decompress(path.read_bytes()).decode().split("\n"):
            if text_line.startswith("#=GC RF"):
                reference += text_line.split()[2]
            elif text_line and text_line[0] not in "#/":
                name, chunk = text_line.split()
                rows[name] = rows.get(name, "") + chunk
        items = read_file(path, row["sequence"])
        assert len(items) == len(rows)
        for item, (name, chunk) in zip(items, rows.items(), strict=True):
            query, hit, pairs = -1, -1, []
            for mark, letter in zip(reference, chunk, strict=True):
                query += mark == "x"
                hit += letter not in "-."
                if mark == "x" and letter not in "-.":
                    pairs.append((query, hit))
            assert aligned(item) == tuple(map(list, zip(*pairs, strict=True)))
            first, last = map(int, name.rpartition("/")[2].split("-"))
            assert (item.start, len(item.sequence)) == (first - 1, last - first + 1)
            n_hit += 1
    assert n_hit > 500


@pytest.mark.corpus
def test_hmmalign_names_the_query_first(corpus_dir):
    """The first row has no range: it is the query itself, and all its residues align to it."""
    path = corpus_dir / "spare_templates" / "sto_hmmalign.sto.gz"
    raw = gzip.decompress(path.read_bytes()).decode()
    query = "".join(re.findall(r"^7cnw_A +(\S+)$", raw, flags=re.M)).replace(".", "").replace("-", "").upper()
    items = read_file(path, query)
    assert aligned(items[0]) == (list(range(len(query))), list(range(len(query))))
    assert [item.entry for item in items] == ["7cnw", "2jsf", "4ut6", "5jno"]
    assert np.all(np.diff(items[3].query_index) > 0)
