"""M8 hit lists: hand-checked numbers, CIGAR strings against biotite's reader, and how letters decide."""

import gzip

import numpy as np
import pytest
from biotite.sequence import ProteinSequence
from biotite.sequence.align import SubstitutionMatrix, align_optimal, read_alignment_from_cigar

from megafold.pipeline.errors import TemplateError
from megafold.pipeline.template import TemplateStructures, featurize_templates
from megafold.pipeline.template.entry import TemplateChain, TemplateEntry
from megafold.pipeline.template.hit import NumberedHit, Skipped
from megafold.pipeline.template.m8_hits import m8_names, read_m8_hits
from megafold.pipeline.template.placing import place
from megafold.pipeline.template.realign import align_pair


def line(target="1abc_A", mismatches=0, query=(1, 6), chain=(1, 6), columns=None, cigar="", name="101"):
    columns = columns or max(query[1] - query[0], chain[1] - chain[0]) + 1
    words = [name, target, "0.9", columns, mismatches, 0, *query, *chain, "1E-20", "90"]
    return "\t".join(map(str, words + ([cigar] if cigar else []))) + "\n"


def read(text, sequence="MKVLAE"):
    return read_m8_hits(text.encode(), sequence, "x.m8").items


def entry_of(*sequences):
    chains = [
        TemplateChain(
            label_asym_id=f"L{index}",
            auth_asym_id="A",
            sequence=sequence,
            atom_pos=np.zeros((len(sequence), 4, 3), np.float32),
        )
        for index, sequence in enumerate(sequences)
    ]
    return TemplateEntry(entry="1abc", digest="0" * 64, release_date=None, chains=tuple(chains))


def placed(item, sequence, *chains):
    assert isinstance(item, NumberedHit)
    found = place(item, sequence, entry_of(*chains))
    return found.query_index.tolist(), found.chain_index.tolist(), found.is_realigned


def test_columns_by_hand():
    text = "# BLASTP 2.14\n\n" + line("2DC3_A", 1, (2, 6), (11, 14), 6, "2M2I1D1M")
    (hit,) = read(text)
    assert isinstance(hit, NumberedHit)
    assert (hit.entry, hit.chain, hit.n_aligned, hit.n_identical) == ("2dc3", "A", 3, 2)
    assert (hit.query_start, hit.query_stop, hit.target_start, hit.target_stop) == (1, 6, 10, 14)
    assert hit.query_index is not None
    assert hit.target_index is not None
    # M: residues 2 and 3 with 11 and 12; I: 4 and 5 of the query; D: 13 of the target; M: 6 with 14.
    assert (hit.query_index.tolist(), hit.target_index.tolist()) == ([1, 2, 5], [10, 11, 13])


def test_without_a_cigar_string_the_number_of_pairs_is_known():
    # 5 and 4 residues in 6 columns: 3 pairs, 2 residues of the query and 1 of the target alone.
    for extra in ("", "not a cigar", "9M"):
        (hit,) = read(line("2DC3_A", 1, (2, 6), (11, 14), 6, extra))
        assert isinstance(hit, NumberedHit)
        assert (hit.n_aligned, hit.n_identical, hit.query_index) == (3, 2, None)


def test_lines_that_are_no_hits():
    assert read(line("sp|P01112|RASH_HUMAN")) == (Skipped(reason="no-chain-id"),)
    assert read(line(query=(5, 2))) == (Skipped(reason="bad-range"),)
    assert read(line(chain=(0, 5))) == (Skipped(reason="bad-range"),)
    assert read(line(columns=20)) == (Skipped(reason="bad-range"),)
    assert read(line(chain=(1, 10**30))) == (Skipped(reason="bad-range"),)
    (hit,) = read(line(cigar="99999999999999M"))
    assert isinstance(hit, NumberedHit)
    assert hit.query_index is None
    assert m8_names((line() + "# x\n" + line("2xyz_B")).encode()) == [b"1abc_A", b"2xyz_B"]


@pytest.mark.parametrize(
    ("text", "reason", "words"),
    [
        (line() + line()[:-12], "bad-line", "line 2"),
        (line(query=(1, 7), chain=(1, 7)), "query-mismatch", "residue 7 of its query, the chain has 6"),
    ],
)
def test_broken_files_are_named(text, reason, words):
    with pytest.raises(TemplateError, match=r"x\.m8") as caught:
        read(text)
    assert caught.value.reason == reason
    assert words in str(caught.value)


def test_stated_alignment_that_the_letters_agree_with():
    (hit,) = read(line(query=(2, 5), chain=(3, 6), cigar="4M"))
    assert placed(hit, "MKVLAE", "WWKVLAEW") == ([1, 2, 3, 4], [2, 3, 4, 5], False)
    # X of a modified residue is any letter; the second chain of the name has the letters, the first not.
    assert placed(hit, "MKVLAE", "WWGGGGEW", "WWKXLAEW") == ([1, 2, 3, 4], [2, 3, 4, 5], False)


def test_numbers_of_another_scheme_are_found_by_the_letters():
    sequence = "MKVLAERTWC"
    (hit,) = read(line(query=(1, 10), chain=(101, 110), cigar="10M"), sequence)
    assert placed(hit, sequence, "GG" + sequence) == (list(range(10)), list(range(2, 12)), True)


def test_realigned_between_the_stated_ends():
    # The chain has WW after V; the file says that there is a gap of two, not where.
    sequence, chain = "MKVLAERTHC", "GGMKVWWLAERTHCGG"
    (hit,) = read(line(query=(1, 10), chain=(3, 14), columns=12), sequence)
    assert placed(hit, sequence, chain) == (list(range(10)), [2, 3, 4, *range(7, 14)], True)


def test_a_chain_less_alike_than_stated_is_refused():
    (hit,) = read(line(cigar="6M"))
    with pytest.raises(TemplateError, match="not as alike") as caught:
        placed(hit, "MKVLAE", "GPGPGPGP")
    assert caught.value.reason == "sequence-mismatch"
    with pytest.raises(TemplateError) as caught:
        place(hit, "MKVLAE", TemplateEntry(entry="1abc", digest="", release_date=None, chains=()))
    assert caught.value.reason == "chain-not-found"


def test_of_several_queries_the_letters_tell_the_chains_own():
    text = line(cigar="6M") + line(query=(1, 4), chain=(1, 4), cigar="4M", name="102")
    found = read_m8_hits((text + line(query=(1, 9), name="102")).encode(), "MKVLAE", "x.m8")
    own, other, longer = found.items
    assert placed(own, "MKVLAE", "MKVLAE")[2] is False
    with pytest.raises(TemplateError) as caught:
        placed(other, "MKVLAE", "GGGG")
    assert caught.value.reason == "other-query"
    assert longer == Skipped(reason="other-query")
    assert "hits of 2 queries" in found.warnings[0]


@pytest.mark.parametrize("whole", [True, False])
def test_gaps_cost_what_blast_takes(whole):
    """The score of the pairs under BLOSUM62 with 11 + length for a gap is the best one biotite finds."""
    rng = np.random.default_rng(0)
    matrix = SubstitutionMatrix.std_protein_matrix()
    for _ in range(5):
        letters = np.array(list("ACDEFGHIKLMNPQRSTVWY"))
        target = "".join(letters[rng.integers(0, 20, 40)])
        query = target[:12] + "".join(letters[rng.integers(0, 20, 3)]) + target[15:30] + target[33:]
        pair = [ProteinSequence(text) for text in (query, target)]
        best = align_optimal(*pair, matrix, gap_penalty=(-12, -1), local=not whole, max_number=1)[0]
        query_index, target_index = align_pair(query, target, whole=whole)
        gaps = [
            int(a + b - 2)
            for a, b in zip(np.diff(query_index), np.diff(target_index), strict=True)
            if a + b > 2
        ]
        pairs = sum(
            matrix.get_score(query[i], target[j]) for i, j in zip(query_index, target_index, strict=True)
        )
        assert pairs - sum(11 + gap for gap in gaps) == best.score


def test_letters_that_blosum_lacks_are_unknown():
    assert [index.tolist() for index in align_pair("MKUO*VLAEWW", "MKCKXVLAEWW", whole=True)] == [
        [*range(11)]
    ] * 2
    assert [len(index) for index in align_pair("", "MKV", whole=False)] == [0, 0]
    assert [len(index) for index in align_pair("WWW", "GGG", whole=False)] == [0, 0]


def test_giants_are_not_aligned():
    (hit,) = read(line(query=(1, 30_000), chain=(1, 30_000)), "M" * 30_000)
    with pytest.raises(TemplateError, match="30000 residues") as caught:
        placed(hit, "M" * 30_000, "M" * 30_000)
    assert caught.value.reason == "too-long-to-align"


@pytest.mark.parametrize("seed", range(4))
def test_mutated_lists_give_hits_or_a_named_failure(tmp_path, seed):
    """Bytes changed, dropped, doubled and cut off, in three formats."""
    rng = np.random.default_rng(seed)
    sequence, path = "MKVLAERTHCDEWW", tmp_path / "hits"
    texts = [
        line(query=(2, 13), chain=(1, 11), columns=12, cigar="5M1I6M")
        + line("2xyz_B", name="102")
        + "# end\n",
        f">q\n{sequence}\n>1abc_A/1-9\nMKVaLA---HC--WW\n>2xyz_B\n{'-' * 14}\n",
        f"# STOCKHOLM 1.0\n1abc_A/1-9 MKVLA---HC--WW\n#=GC RF {'x' * 14}\n//\n",
    ]
    (tmp_path / "pdb").mkdir()
    structures = TemplateStructures([tmp_path / "pdb"])
    n_used = 0
    for text in texts * 60:
        data = bytearray(text.encode())
        for _ in range(int(rng.integers(1, 4))):
            at = int(rng.integers(0, len(data)))
            match int(rng.integers(0, 4)):
                case 0:
                    data[at] = int(rng.integers(0, 256))
                case 1:
                    del data[at : at + int(rng.integers(1, 9))]
                case 2:
                    data[at:at] = data[at : at + 9]
                case 3:
                    del data[max(1, at) :]
            data = data or bytearray(b"x")
        path.write_bytes(bytes(data))
        result = featurize_templates(sequence, [path], structures)
        assert (result.content is None) == bool(result.failures)
        n_used += result.content is not None
    assert n_used > 20


@pytest.mark.corpus
def test_cigar_strings_of_the_corpus_as_biotite_reads_them(corpus_dir):
    n_line = 0
    for name in ("spare_templates/721p_A_pdball.m8.gz", "more/spare_templates/protenix_pdb70_220313.m8.gz"):
        data = gzip.decompress((corpus_dir / name).read_bytes())
        lines = [text.split("\t") for text in data.decode().splitlines()]
        items = read_m8_hits(data, "X" * 400, name).items
        assert len(items) == len(lines)
        for item, words in zip(items[::7], lines[::7], strict=True):
            query = ProteinSequence("A" * int(words[7]))
            target = ProteinSequence("A" * int(words[9]))
            # In SAM terms the target is the reference and the query the segment.
            expected = read_alignment_from_cigar(
                words[12], int(words[8]) - 1, target, query[int(words[6]) - 1 :]
            ).trace
            expected = expected[(expected >= 0).all(axis=1)]
            assert isinstance(item, NumberedHit)
            assert item.target_index is not None
            assert item.query_index is not None
            assert item.target_index.tolist() == expected[:, 0].tolist()
            assert item.query_index.tolist() == (expected[:, 1] + int(words[6]) - 1).tolist()
            assert abs(item.n_identical - float(words[2]) * int(words[3])) <= 1.01
            n_line += 1
    assert n_line > 100


@pytest.mark.corpus
def test_a_file_of_four_queries_serves_the_chain(corpus_dir, tmp_path):
    """ColabFold's hits for four queries: 1k1a's own structure and 5eil's are here."""
    structures = TemplateStructures([corpus_dir / "structures", corpus_dir / "more" / "structures"])
    entry = structures.load("1k1a")
    assert entry is not None
    sequence = entry.chains[0].sequence
    path = corpus_dir / "more" / "spare_templates" / "protenix_pdb70_220313.m8.gz"
    result = featurize_templates(sequence, [path], structures)
    assert result.failures == ()
    assert result.content is not None
    assert result.content.attributes["hits"] == {
        "entry": ["1k1a", "5eil"],
        "chain": ["A", "B"],
        "release_date": ["2001-11-21", "2016-11-16"],
    }
    # 1K1A_A: 241 of 241 alike. 5EIL_B: 54M4I34M34I64M, 101 of 152 pairs differ, residues 50 to 239.
    assert result.content.arrays["hits"].T.tolist() == [
        [1000, 1000, 241, 0, 240],
        [336, 631, 152, 49, 238],
    ]
