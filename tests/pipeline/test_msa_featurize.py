"""The ``msa`` object: hand-checked arrays, what counts as a duplicate, and files that do not fit."""

import gzip
import pickle

import numpy as np
import pytest

from megafold.pipeline import schema
from megafold.pipeline.errors import AlignmentError
from megafold.pipeline.msa import VERSION, featurize_msa
from megafold.pipeline.schema import RESTYPE_INDEX, MolType

GAP = RESTYPE_INDEX["-"]


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        return path

    return write


def content_for(sequence, mol_type, files):
    """The object that the good files give."""
    return featurize_msa(sequence, mol_type, files).content


def test_small_object(write):
    path = write("hits.a3m", ">q\nMKV\n>a OX=1\nMabbbK-\n>b\n-RV\n>c OX=1\nMKV\n>d\nMKV\n")
    assert featurize_msa("MKV", MolType.PROTEIN, [path]).failures == ()
    content = content_for("MKV", MolType.PROTEIN, [path])
    schema.validate("msa", content.arrays, content.attributes)
    met, lys, arg, val = (RESTYPE_INDEX[name] for name in ("MET", "LYS", "ARG", "VAL"))
    # Row d equals the query and names no species: a duplicate. Row c equals it, too, but can be paired.
    assert content.arrays["msa"].T.tolist() == [
        [met, lys, val],
        [met, lys, GAP],
        [GAP, arg, val],
        [met, lys, val],
    ]
    assert content.arrays["deletion"].T.tolist() == [[0, 0, 0], [0, 4, 0], [0, 0, 0], [0, 0, 0]]
    assert content.arrays["deletion_mean"].tolist() == [0, 1, 0]
    profile = np.zeros((3, 32))
    profile[0, [met, GAP]] = [0.75, 0.25]
    profile[1, [lys, arg]] = [0.75, 0.25]
    profile[2, [val, GAP]] = [0.75, 0.25]
    assert content.arrays["profile"].tolist() == profile.tolist()
    assert content.arrays["rows"].tolist() == [
        [-1, 0, 0, 0],  # source
        [-1, 0, -1, 0],  # species
        [1000, 1000, 500, 1000],  # identity
        [1000, 667, 667, 1000],  # coverage
    ]
    assert content.attributes["species"] == ["1"]
    (source,) = content.attributes["sources"]
    assert (source["name"], source["rows"], source["kept"]) == ("hits.a3m", 4, 3)
    assert content.chunks["msa"] == (3, 4)


@pytest.mark.parametrize("n_hit", [8191, 8192])
def test_deep_alignment_is_counted_as_a_shallow_one(write, n_hit):
    letters, rng = np.array(list("ARNDCQEGHILKMFPSTWYV-")), np.random.default_rng(n_hit)
    query = "".join(letters[rng.integers(0, 20, 20)])
    rows = np.where(rng.random((n_hit, 20)) < 0.3, list(query), letters[rng.integers(0, 21, (n_hit, 20))])
    rows[rng.random(rows.shape) < 0.2] = "-"
    rows = np.unique(rows, axis=0)[::-1]
    text = "".join(f">{number}\n{''.join(row)}\n" for number, row in enumerate(rows))
    content = content_for(query, MolType.PROTEIN, [write("hits.a3m", f">q\n{query}\n{text}")])
    every = np.concatenate([[list(query)], rows])
    assert content.arrays["msa"].shape == (20, len(every)) == (20, n_hit + 1)
    profile = content.arrays["profile"].astype(np.float64)
    shares = (every[:, :, None] == letters).mean(axis=0)
    np.testing.assert_allclose(profile[:, :20], shares[:, :20], atol=1e-3)
    np.testing.assert_allclose(profile[:, GAP], shares[:, 20], atol=1e-3)
    np.testing.assert_allclose(profile.sum(axis=1), 1, atol=1e-3)
    equal, aligned = (every == list(query)).sum(axis=1), (every != "-").sum(axis=1)
    identity, coverage = content.arrays["rows"][2:]
    assert abs(identity - 1000 * equal / aligned).max() <= 0.5
    assert abs(coverage - 1000 * aligned / 20).max() <= 0.5


def test_golden_digest(write):
    """What the stage makes of these inputs. Where it changes, raise ``VERSION`` in featurize.py."""
    path = write("hits.a3m", ">q\nMKV\n>a OX=1\nMabbbK-\n>b\n-RV\n>c OX=1\nMKV\n>d\nMKV\n")
    content = content_for("MKV", MolType.PROTEIN, [path])
    assert VERSION == 3
    assert str(content.digest()) == "1644638f06c55abf9dfdff0d4a73a92bdfc7aabcc8da91c53b328d17be541487"


def test_deletions_are_clipped_but_their_mean_is_not(write):
    path = write("hits.a3m", f">q\nMK\n>a\nM{'a' * 700}R\n")
    content = content_for("MK", MolType.PROTEIN, [path])
    assert content.arrays["deletion"].T.tolist() == [[0, 0], [0, 255]]
    assert content.arrays["deletion_mean"].tolist() == [0, 350]


def test_duplicates_are_removed_within_a_file_alone(write):
    first = write("uniref.a3m", ">q\nMK\n>a\nMR\n>b\nMR\n>c\nMaR\n")
    second = write("mgnify.a3m", ">q\nMK\n>d\nMR\n")
    content = content_for("MK", MolType.PROTEIN, [first, second])
    kept = {source["name"]: source["kept"] for source in content.attributes["sources"]}
    assert kept == {"mgnify.a3m": 1, "uniref.a3m": 1}
    # Files go by name, whatever order they were given in.
    assert content.arrays["rows"][0].tolist() == [-1, 0, 1]
    swapped = content_for("MK", MolType.PROTEIN, [second, first])
    assert swapped.digest() == content.digest()


def test_equal_rows_of_other_species_stay(write):
    path = write("pairing.a3m", ">q\nMK\n>a OX=1\nMR\n>b OX=2\nMR\n>c OX=1\nMR\n>d OX=2\nMR\n>e\nMR\n")
    content = content_for("MK", MolType.PROTEIN, [path])
    names = content.attributes["species"]
    assert [names[k] if k >= 0 else "" for k in content.arrays["rows"][1, 1:]] == ["1", "2", ""]


def test_rows_without_residues_are_counted(write):
    path = write("hits.a3m", ">q\nMK\n>a\n--\n>b\n-aa-\n>c\nM-\n")
    content = content_for("MK", MolType.PROTEIN, [path])
    assert content.arrays["msa"].shape == (2, 2)
    assert content.attributes["warnings"] == ["hits.a3m: 2 rows without residues dropped"]


def test_the_same_bytes_count_once(write):
    text = ">q\nMK\n>a\nMR\n"
    files = [write("a.a3m", text), write("b.a3m", text)]
    content = content_for("MK", MolType.PROTEIN, files)
    assert content.digest() == content_for("MK", MolType.PROTEIN, files[::-1]).digest()
    assert content.arrays["msa"].shape == (2, 2)
    assert content.attributes["warnings"] == ["b.a3m: the same bytes as a.a3m, counted once"]


def test_query_alone_is_an_object(write):
    content = content_for("MK", MolType.PROTEIN, [write("a.a3m", ">q\nMK\n")])
    assert content.arrays["msa"].shape == (2, 1)


def test_no_files_no_object():
    result = featurize_msa("MK", MolType.PROTEIN, [])
    assert result.content is None
    assert result.failures == ()


@pytest.mark.parametrize(
    ("query", "sequence"),
    [
        ("MXV", "MKV"),
        ("MKV", "MXV"),
        ("MBV", "MNV"),
        ("MNV", "MBV"),
        ("mzv", "MQV"),
        ("MJV", "MLV"),
        ("MOV", "MXV"),
    ],
)
def test_unknown_and_ambiguous_letters_of_the_query_match_any(write, query, sequence):
    """As a row they count as one class all the same; row 0 is the chain's sequence."""
    result = featurize_msa(sequence, MolType.PROTEIN, [write("a.a3m", f">q\n{query}\n>a\nMRV\n")])
    assert result.failures == ()
    assert result.content is not None
    assert result.content.attributes["sequence"] == sequence


@pytest.mark.parametrize(
    ("query", "words"),
    [
        ("MKVL", "its query has 4 residues, the chain has 3"),
        ("MRV", "its query has R at residue 2, the chain has K"),
    ],
)
def test_a_file_of_another_chain_fails_alone(write, query, words):
    bad = write("bad.a3m", f">q\n{query}\n>a\n{query}\n")
    result = featurize_msa("MKV", MolType.PROTEIN, [bad])
    assert result.content is None
    (failure,) = result.failures
    assert failure.reason == "query-mismatch"
    assert words in str(failure)
    assert str(bad) in str(failure)
    assert pickle.loads(pickle.dumps(failure)).reason == "query-mismatch"
    good = write("good.a3m", ">q\nMKV\n>a\nMRV\n")
    result = featurize_msa("MKV", MolType.PROTEIN, [bad, good])
    assert len(result.failures) == 1
    content = content_for("MKV", MolType.PROTEIN, [bad, good])
    assert [source["name"] for source in content.attributes["sources"]] == ["good.a3m"]


def test_broken_files_fail_with_their_path(write):
    files = [write("cut.a3m", ">q\nMKV\n>a\nMK"), write("cut.a3m.gz", gzip.compress(b">q\nMKV\n" * 9)[:-9])]
    result = featurize_msa("MKV", MolType.PROTEIN, files)
    assert result.content is None
    assert [failure.reason for failure in result.failures] == ["row-length", "broken-compression"]
    for failure, path in zip(result.failures, files, strict=True):
        assert isinstance(failure, AlignmentError)
        assert str(path) in str(failure)


@pytest.mark.parametrize(("query", "chain"), [("MXV", "MKV"), ("MKV", "MXV"), ("mkv", "MKV"), ("MBV", "MDV")])
def test_unknown_letters_match_anything(write, query, chain):
    content = content_for(chain, MolType.PROTEIN, [write("a.a3m", f">q\n{query}\n>a\nMKV\n")])
    assert content.attributes["sequence"] == chain


def test_an_unknown_query_residue_equals_nothing(write):
    content = content_for("MX", MolType.PROTEIN, [write("a.a3m", ">q\nMX\n>a OX=1\nMZ\n>b\n-Z\n")])
    assert content.arrays["rows"][2].tolist() == [500, 500, 0]


@pytest.mark.parametrize(
    ("mol_type", "sequence", "row", "names"),
    [
        (MolType.RNA, "ACGU", "ACNT", ["A", "C", "N", "U"]),
        (MolType.DNA, "ACGT", "RCGU", ["DN", "DC", "DG", "DT"]),
        (MolType.PROTEIN, "ACGT", "BUGO", ["ASP", "CYS", "GLY", "UNK"]),
    ],
)
def test_each_chain_has_its_own_alphabet(write, mol_type, sequence, row, names):
    content = content_for(sequence, mol_type, [write("a.a3m", f">q\n{sequence}\n>a\n{row}\n")])
    assert content.arrays["msa"][:, 1].tolist() == [RESTYPE_INDEX[name] for name in names]
    assert content.attributes["mol_type"] == mol_type.name.lower()


def test_nul_separated_file_gives_the_chain_its_alignment(write):
    path = write("unpaired.a3m", b">101\nMKV\n>a\nMRV\n\0>102\nACDE\n>b\nAC-E\n\0")
    for sequence, n_row in (("MKV", 2), ("ACDE", 2)):
        content = content_for(sequence, MolType.PROTEIN, [path])
        assert content.arrays["msa"].shape == (len(sequence), n_row)
    assert featurize_msa("MMM", MolType.PROTEIN, [path]).failures[0].reason == "query-mismatch"


def test_joined_alignment_gives_each_chain_its_columns(write):
    text = "#3,4\t1,1\n>101\t102\nMKVACDE\n>a\tb\nMRVaAC-E\n>c\n---AC-E\n>d\nMR-----\n"
    path = write("complex.a3m", text)
    first = content_for("MKV", MolType.PROTEIN, [path])
    second = content_for("ACDE", MolType.PROTEIN, [path])
    # Row c has nothing of the first chain, row d nothing of the second; row `a b` pairs the two.
    assert first.arrays["msa"].shape == (3, 3)
    assert second.arrays["msa"].shape == (4, 3)
    assert second.arrays["deletion"].T.tolist() == [[0] * 4, [1, 0, 0, 0], [0] * 4]
    for content in (first, second):
        assert content.attributes["species"] == ["row:1"]
        assert content.arrays["rows"][1].tolist() == [-1, 0, -1]


def test_paired_files_without_species_pair_by_row(write):
    content = content_for("MK", MolType.PROTEIN, [write("paired.a3m", ">q\nMK\n>a\nMR\n>b\nMR\n")])
    assert content.attributes["species"] == ["row:1", "row:2"]
    content = content_for("MK", MolType.PROTEIN, [write("unpaired.a3m", ">q\nMK\n>a\nMR\n")])
    assert content.attributes["species"] == []


def test_formats_and_compression_give_the_same_rows(write):
    a3m = ">q\nMKV\n>a\nMaR-\n>b\nM-V\n"
    sto = "# STOCKHOLM 1.0\nq M.KV\na MaR-\nb M.-V\n//\n"
    arrays = [
        content_for("MKV", MolType.PROTEIN, [path]).arrays
        for path in (write("a.a3m", a3m), write("a.sto", sto), write("b.a3m.gz", gzip.compress(a3m.encode())))
    ]
    for other in arrays[1:]:
        for name, array in arrays[0].items():
            np.testing.assert_array_equal(other[name], array)
