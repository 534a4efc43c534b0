"""Pairing against a naive reference, written from the text of the AF3 and AlphaFold-Multimer supplements."""

import numpy as np
import pytest

from megafold.cache_store import LocalStore
from megafold.pipeline import schema
from megafold.pipeline.msa import PAIRING_VERSION, MsaRows, featurize_msa, pair_msas
from megafold.pipeline.msa.alphabet import Alphabet
from megafold.pipeline.msa.source import parse_alignment
from megafold.pipeline.msa.text import read_text
from megafold.pipeline.schema import MSA, MolType


def make(species, identity=None, coverage=None, sources=("uniprot_hits.sto",), source=None, digest="0" * 64):
    """A row table from one species name a row ('' for none); the query row is added."""
    names = sorted(set(species) - {""}, reverse=True)
    n = len(species)
    table = {
        "source": np.array([-1, *(source or [0] * n)]),
        "species": np.array([-1, *(names.index(s) if s else -1 for s in species)]),
        "identity": np.array([1000, *(identity or [500] * n)]),
        "coverage": np.array([1000, *(coverage or [1000] * n)]),
    }
    return MsaRows(
        digest=digest, sources=tuple(sources), species=tuple(names), rows=MSA.table("rows").pack(table)
    )


def naive(msas):
    """List of row tuples without the query's."""
    per_chain = []
    for msa in msas:
        source, species, identity, coverage = msa.rows.tolist()
        pairing = [k for k, name in enumerate(msa.sources) if "uniprot" in name or name.startswith("pair")]
        rows = [r for r in range(len(species)) if species[r] >= 0]
        named = [r for r in rows if source[r] in pairing]
        rows = named or rows
        groups: dict[str, list] = {}
        for position, r in enumerate(rows, 1):
            entry = (-identity[r] * coverage[r], r, position)
            groups.setdefault(msa.species[species[r]], []).append(entry)
        per_chain.append({name: sorted(group) for name, group in groups.items()})
    made = []
    for name in sorted(set().union(*per_chain)):
        chains = [c for c, groups in enumerate(per_chain) if name in groups]
        if len(chains) < 2 or any(len(per_chain[c][name]) > 600 for c in chains):
            continue
        for k in range(min(len(per_chain[c][name]) for c in chains)):
            row, product = [-1] * len(msas), 1
            for c in chains:
                _, row[c], position = per_chain[c][name][k]
                product *= position
            made.append((-len(chains), product, tuple(row)))
    return [row for _, _, row in sorted(made)][:8191]


def paired(msas):
    content = pair_msas(msas)
    return None if content is None else content.arrays["pairing"].tolist()


def test_by_hand():
    a = make(["HUMAN", "MOUSE", "HUMAN", "RAT"], identity=[600, 500, 900, 400])
    b = make(["RAT", "HUMAN", "", "MOUSE", "HUMAN"], identity=[500, 700, 999, 500, 800])
    c = make(["MOUSE", "YEAST"])
    # MOUSE is in all three: first. HUMAN pairs its best rows (3 and 5), then the others (1 and 2).
    assert paired([a, b, c]) == [
        [0, 0, 0],
        [2, 4, 1],
        [1, 2, -1],  # ranks among candidates 1·2
        [4, 1, -1],  # 4·1
        [3, 5, -1],  # 3·4
    ]


def test_golden_digest():
    """What the stage makes of these inputs. Where it changes, raise ``PAIRING_VERSION`` in pairing.py."""
    content = pair_msas([make(["X", "Y"], digest="0" * 64), make(["Y", "X", "X"], digest="1" * 64)])
    assert content is not None
    assert PAIRING_VERSION == 1
    assert str(content.digest()) == "60ee36b986b7152bb6a1a8df96dde18430ccb6e0257760b0e879d8167bd425ec"


def test_similarity_is_over_the_whole_query():
    # A short fragment that is identical where it aligns is less similar than a whole sequence at 90 %.
    a = make(["X", "X"], identity=[1000, 900], coverage=[200, 1000])
    b = make(["X"])
    assert paired([a, b]) == [[0, 0], [2, 1]]


def test_shorter_list_sets_the_number():
    a, b = make(["X"] * 5), make(["X"] * 3)
    assert paired([a, b]) == [[0, 0], [1, 1], [2, 2], [3, 3]]


@pytest.mark.parametrize(("count", "pairs"), [(600, 1), (601, 0)])
def test_species_with_too_many_rows_is_skipped(count, pairs):
    result = paired([make(["X"] * count), make(["X"])])
    assert (len(result) - 1 if result else 0) == pairs


def test_no_more_than_8191_rows():
    names = [f"S{k}" for k in range(9000)]
    result = np.array(paired([make(names), make(names)]))
    assert result.shape == (8192, 2)
    assert result[-1].tolist() == [8191, 8191]


def test_nothing_to_pair():
    assert pair_msas([]) is None
    assert pair_msas([make(["X"])]) is None
    assert pair_msas([make(["X"]), make(["Y"])]) is None
    assert pair_msas([make([""]), make(["Y"])]) is None
    assert pair_msas([make([]), make([])]) is None


def test_pairing_files_go_before_others():
    sources = ("mgnify_hits.sto", "uniprot_hits.sto", "uniref90_hits.sto")
    a = make(["X", "X", "Y"], identity=[900, 500, 900], sources=sources, source=[2, 1, 2])
    b = make(["X", "Y"], sources=("uniref90_hits.sto",))
    # Chain a has a UniProt file: its UniRef rows (1 and 3) do not count. Chain b has none: all its rows do.
    assert paired([a, b]) == [[0, 0], [2, 1]]
    nothing = make(["X", ""], sources=("uniref90_hits.sto", "pairing.a3m"), source=[0, 1])
    assert paired([nothing, b]) == [[0, 0], [1, 1]]


@pytest.mark.parametrize("seed", range(6))
def test_against_the_reference(seed):
    rng = np.random.default_rng(seed)
    n_chain = int(rng.integers(2, 6))
    msas = []
    for _ in range(n_chain):
        n = int(rng.integers(0, 300))
        species = [f"S{k}" if k else "" for k in rng.zipf(1.4, n).clip(0, 60).tolist()]
        identity, coverage = rng.integers(0, 6, (2, n)) * 200
        source = rng.integers(0, 2, n).tolist()
        sources = [("uniref.a3m", "uniprot.sto"), ("a.a3m", "b.a3m")][int(rng.integers(0, 2))]
        msas.append(make(species, identity.tolist(), coverage.tolist(), sources, source))
    expected = naive(msas)
    assert paired(msas) == ([[0] * n_chain, *map(list, expected)] if expected else None)


def test_a_row_pairs_once():
    rng = np.random.default_rng(0)
    msas = [make([f"S{k}" for k in rng.integers(0, 40, 200)]) for _ in range(3)]
    result = np.array(paired(msas))
    for column in result.T:
        used = column[column >= 0]
        assert len(set(used.tolist())) == len(used)


def content_of(path):
    query = parse_alignment(read_text(path), Alphabet.of(MolType.PROTEIN))[0].query
    return featurize_msa(query, MolType.PROTEIN, [path]).content


@pytest.mark.corpus
def test_real_pairing_files(corpus_dir):
    """Two chains of one complex, searched by the same project: species are taxonomy ids in both."""
    folder = corpus_dir / "more" / "spare_alignments"
    contents = [content_of(folder / f"7wux_{k}_pairing.a3m.gz") for k in (1, 2)]
    msas = [MsaRows.from_content(content) for content in contents]
    content = pair_msas(msas)
    assert content is not None
    schema.validate("pairing", content.arrays, content.attributes)
    assert content.attributes["msas"] == [str(item.digest()) for item in contents]
    result = content.arrays["pairing"]
    assert result.tolist() == [[0, 0], *map(list, naive(msas))]
    assert len(result) > 100
    names = [item.attributes["species"] for item in contents]
    species = [item.arrays["rows"][1] for item in contents]
    for first, second in result[1:]:
        assert names[0][species[0][first]] == names[1][species[1][second]]


@pytest.mark.corpus
def test_files_paired_row_by_row(corpus_dir):
    """ColabFold's paired files name no species: the k-th row of one belongs to the k-th of the other."""
    folder = corpus_dir / "more" / "spare_alignments"
    msas = [
        MsaRows.from_content(content_of(folder / f"colabfold_3g5o_paired_{chain}.a3m.gz")) for chain in "AB"
    ]
    n_row = msas[0].rows.shape[1]
    assert n_row > 10
    assert sorted(paired(msas)) == [[k, k] for k in range(n_row)]


@pytest.mark.corpus
def test_rows_from_a_store(corpus_dir, tmp_path):
    content = content_of(corpus_dir / "more" / "spare_alignments" / "7wux_1_pairing.a3m.gz")
    store = LocalStore.create(tmp_path / "cache")
    digest = store.put(content)
    stored, made = MsaRows.from_store(store, str(digest)), MsaRows.from_content(content)
    assert (stored.digest, stored.sources, stored.species) == (made.digest, made.sources, made.species)
    np.testing.assert_array_equal(stored.rows, made.rows)
