"""A3M hit lists: hand-checked alignments, and the corpus' own against a walk over characters."""

import gzip
import re

import numpy as np
import pytest
from biotite.sequence.align import SubstitutionMatrix

from megafold.pipeline.errors import TemplateError
from megafold.pipeline.template.a3m_hits import read_a3m_hits
from megafold.pipeline.template.hit import Hit, Skipped
from megafold.pipeline.template.hits import hit_entries


def read(text, sequence):
    return read_a3m_hits(text.encode(), sequence, "x.a3m")


def aligned(hit):
    assert isinstance(hit, Hit)
    return hit.query_index.tolist(), hit.hit_index.tolist()


def test_columns_are_residues_of_the_query():
    first, second, third = read(
        ">1ABC_B2/11-14 [subseq from] mol:protein\nK\naVL-\n>2xyz_A\r\nMK--\r\n>UniRef90_X/2-5\nMKVL\n",
        "MKVL",
    ).items
    assert isinstance(first, Hit)
    assert (first.entry, first.chain, first.start, first.sequence) == ("1abc", "B2", 10, "KAVL")
    # K is column 1, A an insertion, V and L columns 2 and 3.
    assert aligned(first) == ([0, 1, 2], [0, 2, 3])
    assert isinstance(second, Hit)
    assert second.start == -1
    assert aligned(second) == ([0, 1], [0, 1])
    assert third == Skipped(reason="no-chain-id")


@pytest.mark.parametrize("label", ["query", "101", "query_A/1-4"])
def test_query_first_tells_the_columns(label):
    # The query has no residue in the third column: what the hit has there aligns to nothing.
    (hit,) = read(f"#A3M#\n>ss_pred\nCCCC\n>{label}\nMK-VL\n>1abc_A/3-7\nMKA-L\n", "MKVL").items
    assert aligned(hit) == ([0, 1, 3], [0, 1, 3])
    (hit,) = read(f">{label}\nMkVL\n>1abc_A/3-7\nMaVL\n", "MKVL").items  # no column for K
    assert aligned(hit) == ([0, 2, 3], [0, 2, 3])


def test_a_query_that_is_named_like_a_chain_is_a_hit_too():
    first, second = read(">7cnw_A\nMK-VL\n>1abc_A\nMKAV-\n", "MKVL").items
    assert isinstance(first, Hit)
    assert (first.entry, *aligned(first)) == ("7cnw", [0, 1, 2, 3], [0, 1, 2, 3])
    assert aligned(second) == ([0, 1, 2], [0, 1, 3])


def test_own_hit_tells_the_columns_of_a_profile_with_fewer():
    found = read(">1abc_B/3-7\nMR-aWA\n>1own_A/1-6\nMKVvLA\n", "MKVVLA")
    other, own = found.items
    assert aligned(own) == ([0, 1, 2, 4, 5], [0, 1, 2, 4, 5])
    assert aligned(other) == ([0, 1, 4, 5], [0, 1, 3, 4])
    (warning,) = found.warnings
    assert "x.a3m" in warning
    assert "1own_A (6 residues)" in warning


def test_rows_without_an_alignment_are_aligned_here():
    found = read(">1abc_A/7-12\nwkvlae\n>2abc_B\nMKVLAEWWC\n", "MMMKVLAEWW")
    first, second = found.items
    assert isinstance(first, Hit)
    assert first.start == 6
    assert aligned(first) == ([3, 4, 5, 6, 7], [1, 2, 3, 4, 5])
    assert aligned(second) == ([2, 3, 4, 5, 6, 7, 8, 9], [0, 1, 2, 3, 4, 5, 6, 7])
    assert "aligned to the query here" in found.warnings[0]


@pytest.mark.parametrize(
    ("text", "reason", "words"),
    [
        (">1abc_A\nM-V\n>2abc_A\nM-VL\n", "row-length", "row 2abc_A has 4 columns"),
        (">1abc_A\nM-V\n", "query-mismatch", "it has 3 columns, the chain has 4 residues"),
        (">1abc_A\nM-1L\n", "bad-character", "row 1abc_A holds '1'"),
    ],
)
def test_broken_files_are_named(text, reason, words):
    with pytest.raises(TemplateError, match=r"x\.a3m") as caught:
        read(text, "MKVL")
    assert caught.value.reason == reason
    assert words in str(caught.value)


def walk(path, insertions=True):
    """[(label, [(column, letter)], letters, number of columns)], one character at a time."""
    rows = []
    for part in gzip.decompress(path.read_bytes()).decode().split(">")[1:]:
        head, *lines = part.split("\n")
        column, pairs, letters = 0, [], ""
        for c in "".join(lines):
            if c.isupper() or (c.islower() and not insertions):
                pairs.append((column, len(letters)))
            if c.isalpha():
                letters += c.upper()
            column += not (c.islower() and insertions)
        rows.append((head.split()[0], pairs, letters, column))
    return rows


@pytest.mark.corpus
def test_a_list_that_hmmsearch_found(corpus_dir):
    """2 229 hits without the query, whose 291 columns are its residues."""
    path = corpus_dir / "spare_templates" / "9fm7_hmmsearch.a3m.gz"
    with gzip.open(
        corpus_dir / "spare_alignments" / "examples_with_template__9fm7__non_pairing.a3m.gz", "rt"
    ) as file:
        query = file.read(600).split("\n")[1]
    found = read_a3m_hits(gzip.decompress(path.read_bytes()), query, path.name)
    assert found.warnings == ()
    expected = walk(path)
    assert len(found.items) == len(expected) == 2229
    for item, (label, pairs, letters, n_column) in zip(found.items, expected, strict=True):
        assert n_column == len(query)
        assert isinstance(item, Hit)
        name, start, stop = re.fullmatch(r"(\w+)/(\d+)-(\d+)", label).groups()  # type: ignore[union-attr]
        assert f"{item.entry}_{item.chain}" == name
        assert item.sequence == letters
        assert (item.start, len(letters)) == (int(start) - 1, int(stop) - int(start) + 1)
        assert list(zip(*aligned(item), strict=True)) == pairs
    assert len(hit_entries(path)) == len({label[:4] for label, *_ in expected})


@pytest.mark.corpus
def test_aligned_and_unaligned_lists_of_the_same_hits(corpus_dir):
    """The corpus has two hits to one query, once aligned with the query first, once as sequences.

    The aligned list has lower-case letters that are columns: its rows have equally many characters.
    """
    folder = corpus_dir / "more" / "spare_templates"
    rows = walk(folder / "of3_a3m_no_realign.a3m.gz", insertions=False)
    query = rows[0][2]
    residue = {column: index for index, (column, _) in enumerate(rows[0][1])}
    stated, made = (
        read_a3m_hits(gzip.decompress((folder / name).read_bytes()), query, name).items
        for name in ("of3_a3m_no_realign.a3m.gz", "of3_a3m_realign.a3m.gz")
    )
    assert len(stated) == len(made) == 2
    for item, again, (_, pairs, letters, _) in zip(stated, made, rows[1:], strict=True):
        kept = [(residue[column], index) for column, index in pairs if column in residue]
        assert list(zip(*aligned(item), strict=True)) == kept
        assert isinstance(again, Hit)
        assert again.sequence == letters
        assert blast_score(query, letters, *aligned(again)) >= blast_score(query, letters, *aligned(item))


def blast_score(query, target, query_index, target_index):
    """BLOSUM62 over the pairs, less 11 and the length for each gap."""
    matrix = SubstitutionMatrix.std_protein_matrix()
    steps = [int(a + b - 2) for a, b in zip(np.diff(query_index), np.diff(target_index), strict=True)]
    pairs = zip(query_index, target_index, strict=True)
    return sum(matrix.get_score(query[i], target[j]) for i, j in pairs) - sum(11 + n for n in steps if n)
