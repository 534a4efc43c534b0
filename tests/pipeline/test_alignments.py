"""Where a chain's files are found, and what each of them is."""

import gzip
import hashlib
import os
import pickle

import pytest
import zstandard

from megafold.pipeline import alignments
from megafold.pipeline.alignments import AlignmentIndex, ChainAlignments, file_kind
from megafold.pipeline.errors import InputError

SEQUENCE = "MKV"
DIGEST = hashlib.sha256(SEQUENCE.encode()).hexdigest()
HMMSEARCH = b"# STOCKHOLM 1.0\n#=GF ID q-i1\n#=GF AU hmmsearch (HMMER 3.3.2)\n\n1abc_A/1-3 MKV\n//\n"
JACKHMMER = HMMSEARCH.replace(b"hmmsearch", b"jackhmmer")


@pytest.fixture
def root(tmp_path):
    return tmp_path / "alignments"


def find(root, *chain):
    """Index a root and look one chain up."""
    return AlignmentIndex(root).find(*chain)


def put(folder, *names, data=b">q\nMKV\n"):
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).write_bytes(data)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("uniref_hits.sto", "msa"),
        ("uniref90_hits.a3m.gz", "msa"),
        ("pairing.a3m", "msa"),
        ("non_pairing.a3m.zst", "msa"),
        ("1abc_A_protein.A3M", "msa"),
        ("x.a2m", "msa"),
        ("hmmsearch_hits.sto.gz", "hits"),
        ("9fm7_hmmsearch.a3m", "hits"),
        ("pdb70_hits.hhr", "hits"),
        ("anything.hhr.zst", "hits"),
        ("pdb100.m8", "hits"),
        ("template_hits.a3m", "hits"),
        ("pdb_hits.sto", "hits"),
        ("pdb_seqres_hits.sto", "hits"),
        ("README.md", None),
        ("features.pkl", None),
        ("scores.json.gz", None),
        (".hidden.a3m", None),
    ],
)
def test_kind_by_name(tmp_path, name, kind):
    put(tmp_path, name)
    assert file_kind(tmp_path / name) == kind


@pytest.mark.parametrize("pack", [bytes, gzip.compress, zstandard.compress])
def test_stockholm_kind_by_content(tmp_path, pack):
    put(tmp_path, "a.sto", data=pack(HMMSEARCH))
    put(tmp_path, "b.sto", data=pack(JACKHMMER))
    assert file_kind(tmp_path / "a.sto") == "hits"
    assert file_kind(tmp_path / "b.sto") == "msa"


@pytest.mark.parametrize("broken", [b"\x1f\x8b broken", gzip.compress(JACKHMMER)[:10] + b"\xff" * 20])
def test_a_broken_file_is_an_msa_that_will_fail(tmp_path, broken):
    put(tmp_path, "a.sto.gz", data=broken)
    assert file_kind(tmp_path / "a.sto.gz") == "msa"


def test_a_name_that_is_no_text(tmp_path):
    with pytest.raises(InputError, match=r"b'.*x\\xff\.a3m'.*rename it") as error:
        file_kind(tmp_path / os.fsdecode(b"x\xff.a3m"))
    assert error.value.reason == "bad-name"


def test_by_sequence(root):
    put(root / DIGEST[:16], "uniref_hits.sto", "pdb70_hits.hhr", "notes.txt")
    found = find(root, "1abc", "A", "H", DIGEST)
    assert found.source == "sequence"
    assert [path.name for path in found.msas] == ["uniref_hits.sto"]
    assert [path.name for path in found.hits] == ["pdb70_hits.hhr"]
    assert [path.name for path in found.ignored] == ["notes.txt"]
    assert find(root, "1abc", "A", "H", "0" * 64) is None


def test_label_goes_before_author_and_both_before_sequence(root):
    put(root / DIGEST[:16], "c.a3m")
    put(root / "1ABC_H", "b.a3m")
    assert find(root, "1abc", "A", "H", DIGEST).source == "author"
    put(root / "1abc_A", "a.a3m")
    found = find(root, "1abc", "A", "H", DIGEST)
    assert found.source == "label"
    assert [path.name for path in found.msas] == ["a.a3m"]


def test_queries_decide_between_label_and_author(root):
    # The folder 1abc_A is of the chain the author calls A, whose label is B; ours is A to the file, H to him.
    put(root / "1abc_A", "a.a3m", data=b">q\nWWW\n")
    put(root / "1abc_H", "b.a3m")
    assert find(root, "1abc", "A", "H", DIGEST).source == "author"
    put(root / "1abc_H", "b.a3m", data=b">q\nCCC\n")
    assert find(root, "1abc", "A", "H", DIGEST).source == "label"


def test_of_a_long_alignment_the_query_alone_is_read(root, monkeypatch):
    deep = b">q\nMK\nV\n" + b">row\nM-V\n" * 20000
    put(root / "1abc_A", "a.a3m.gz", data=gzip.compress(deep))
    put(root / "1abc_H", "b.a3m")
    with monkeypatch.context() as patch:
        patch.delattr(alignments, "read_text")
        assert find(root, "1abc", "A", "H", DIGEST).source == "label"
    # Where that is another one, a further alignment in the file may be of the chain.
    put(root / "1abc_A", "a.a3m.gz", data=gzip.compress(deep.replace(b"MK\n", b"WK\n") + b"\0>q\nMKV\n"))
    assert find(root, "1abc", "A", "H", DIGEST).source == "label"
    put(root / "1abc_A", "a.a3m.gz", data=gzip.compress(deep.replace(b"MK\n", b"WK\n")))
    assert find(root, "1abc", "A", "H", DIGEST).source == "author"


@pytest.mark.parametrize("rest", [b"", b"MK\n", b">row\nMKV\n"])
def test_a_query_that_goes_on_is_not_taken_for_its_beginning(root, monkeypatch, rest):
    """Lines after the bytes that are read first belong to it."""
    data = b">q\nMKV\n" + rest
    put(root / "1abc_A", "a.a3m", data=data)
    put(root / "1abc_H", "b.a3m", data=b">q\nMKV\n>row\nMKV\n")
    monkeypatch.setattr(alignments, "_QUERY_BYTES", 7)
    assert find(root, "1abc", "A", "H", DIGEST).source == ("author" if rest == b"MK\n" else "label")


def test_case_of_chains_and_underscores_in_entries(root):
    put(root / "my_model_a", "lower.a3m")
    put(root / "my_model_A", "upper.a3m")
    assert [path.name for path in find(root, "my_model", "A", "A", DIGEST).msas] == ["upper.a3m"]
    assert [path.name for path in find(root, "MY_MODEL", "a", "a", DIGEST).msas] == ["lower.a3m"]
    assert len(AlignmentIndex(root)) == 2


def test_files_one_folder_below_sorted_by_name(root):
    put(root / "1abc_A" / "a3m", "uniref90_hits.a3m", "bfd_hits.a3m")
    put(root / "1abc_A" / "hhr", "pdb70_hits.hhr")
    put(root / "1abc_A" / "a3m" / "old", "deeper.a3m")
    put(root / "1abc_A", "mgnify_hits.sto", data=JACKHMMER)
    found = find(root, "1abc", "A", "A", DIGEST)
    assert [path.name for path in found.msas] == ["bfd_hits.a3m", "mgnify_hits.sto", "uniref90_hits.a3m"]
    assert [path.name for path in found.hits] == ["pdb70_hits.hhr"]


def test_an_empty_folder_is_no_alignment(root):
    (root / "1abc_A").mkdir(parents=True)
    assert find(root, "1abc", "A", "A", DIGEST) is None


def test_explicit_files(tmp_path):
    put(tmp_path, "b.a3m", "a.a3m", "x.hhr")
    found = ChainAlignments.of_files([tmp_path / name for name in ("b.a3m", "x.hhr", "a.a3m")])
    assert found.source == "explicit"
    assert [path.name for path in found.msas] == ["a.a3m", "b.a3m"]
    assert [path.name for path in found.hits] == ["x.hhr"]
    assert pickle.loads(pickle.dumps(found)) == found


def test_a_root_that_is_not_there(tmp_path):
    with pytest.raises(InputError, match="no-folder") as caught:
        AlignmentIndex(tmp_path / "no-folder")
    assert caught.value.reason == "no-such-folder"


@pytest.mark.corpus
def test_corpus_folders(corpus_dir):
    index = AlignmentIndex(corpus_dir / "alignments")
    assert len(index) == len(list((corpus_dir / "alignments").iterdir()))
    lines = (corpus_dir / "chains.tsv").read_text().splitlines()
    header = lines[0].split("\t")
    n_found = 0
    for line in lines[1:]:
        row = dict(zip(header, line.split("\t"), strict=True))
        found = index.find(row["entry"], row["subchains"].split(",")[0], "?", row["sequence_sha256"])
        folder = corpus_dir / row["alignments"]
        names = sorted(path.name for path in folder.iterdir()) if row["alignments"] else []
        given = [path.name for path in (*found.msas, *found.hits, *found.ignored)] if found else []
        assert sorted(given) == names
        hits = [path.name for path in found.hits] if found else []
        assert hits == [name for name in names if name.startswith("hmmsearch")]
        n_found += found is not None
    assert n_found > 60
