"""Every MSA file of the corpus against a slow parser written from the formats' definitions.

It walks the characters one by one and knows nothing of NumPy. Letters become classes through gemmi's
component names.
"""

import gzip
import tracemalloc
from pathlib import Path

import gemmi
import numpy as np
import pytest

from megafold.pipeline.alignments import file_kind
from megafold.pipeline.errors import AlignmentError
from megafold.pipeline.msa import featurize_msa
from megafold.pipeline.msa.alphabet import Alphabet
from megafold.pipeline.msa.source import parse_alignment
from megafold.pipeline.msa.text import read_text
from megafold.pipeline.schema import RESTYPES, MolType

pytestmark = pytest.mark.corpus
N_SAMPLED = 60
KINDS = {
    MolType.PROTEIN: gemmi.ResidueKind.AA,
    MolType.RNA: gemmi.ResidueKind.RNA,
    MolType.DNA: gemmi.ResidueKind.DNA,
}
UNKNOWN = {MolType.PROTEIN: "UNK", MolType.RNA: "N", MolType.DNA: "DN"}
RNA_FILES = ("rna", "rfam", "rf0", "rnasep", "trna")


def content_for(sequence, mol_type, files):
    """The object that the good files give."""
    return featurize_msa(sequence, mol_type, files).content


def class_of(letter, mol_type):
    """AF3's classes by component name; selenocysteine, B and Z, and T and U count as their kin."""
    if letter in "-.":
        return RESTYPES.index("-")
    letter = letter.upper()
    kin = {MolType.PROTEIN: {"U": "C", "B": "D", "Z": "E"}, MolType.RNA: {"T": "U"}, MolType.DNA: {"U": "T"}}
    name = gemmi.expand_one_letter(kin[mol_type].get(letter, letter), KINDS[mol_type])
    return RESTYPES.index(name if name in RESTYPES else UNKNOWN[mol_type])


def walk_a3m(text):
    """[(header, [aligned letter], [insertions left of it])], one character at a time."""
    records: list[tuple[str, list[str]]] = []
    for line in text.replace("\r", "").split("\n"):
        if line.startswith(">"):
            records.append((line[1:], []))
        elif records:
            records[-1][1].append(line)
    return records


def walk_a3m_row(lines):
    letters, counts, pending = [], [], 0
    for c in "".join(lines):
        if c == "." or c.isspace():
            continue
        if c.islower():
            pending += 1
        else:
            letters.append(c)
            counts.append(pending)
            pending = 0
    return letters, counts


def walk_stockholm(text):
    rows: dict[str, str] = {}
    for line in text.split("\n"):
        if line.startswith("//"):
            break
        if line.strip() and not line.startswith("#"):
            name, chunk = line.split()
            rows[name] = rows.get(name, "") + chunk
    return list(rows.items())


def walk_stockholm_row(query, row):
    letters, counts, pending = [], [], 0
    for q, c in zip(query, row, strict=True):
        if q in "-.":
            pending += c not in "-."
        else:
            letters.append(c)
            counts.append(pending)
            pending = 0
    return letters, counts


def mol_type_of(path):
    name = path.name.lower()
    if any(part in name for part in RNA_FILES) or "_dna" in name:
        return MolType.RNA  # the one file called DNA holds an RNA search's letters
    return MolType.PROTEIN


def msa_files(corpus_dir: Path):
    folders = ("alignments", "spare_alignments", "more/alignments", "more/spare_alignments")
    return sorted(p for f in folders for p in (corpus_dir / f).rglob("*.gz") if file_kind(p) == "msa")


def compare(path):
    """Compare a file's rows (a sample of them where there are many); returns how many."""
    mol_type = mol_type_of(path)
    (alignment,) = parse_alignment(read_text(path), Alphabet.of(mol_type))
    raw = gzip.decompress(path.read_bytes()).decode("utf-8", "replace")
    if raw.startswith("# STOCKHOLM"):
        records = walk_stockholm(raw)
        query = records[0][1]
        rows = {k: walk_stockholm_row(query, records[k][1]) for k in sample(len(records))}
    else:
        records = walk_a3m(raw)
        rows = {k: walk_a3m_row(records[k][1]) for k in sample(len(records))}
    assert len(alignment.headers) == len(records)
    classes = {c: class_of(c, mol_type) for letters, _ in rows.values() for c in set(letters)}
    found = alignment.insertions
    order = found.row.astype(np.int64) * alignment.codes.shape[1] + found.column
    assert (np.diff(order) > 0).all()
    for k, (letters, counts) in rows.items():
        assert alignment.codes[k].tolist() == [classes[c] for c in letters], (path.name, k)
        of_row = slice(*np.searchsorted(found.row, [k, k + 1]))
        inserted = dict(zip(found.column[of_row].tolist(), found.count[of_row].tolist(), strict=True))
        assert inserted == {column: n for column, n in enumerate(counts) if n}, (path.name, k)
        header = records[k][0]
        assert alignment.headers[k].decode("utf-8", "replace").startswith(header)
    return len(records)


def sample(n_row):
    if n_row <= 2 * N_SAMPLED:
        return range(n_row)
    rng = np.random.default_rng(n_row)
    return sorted({0, 1, n_row - 1, *rng.choice(n_row, N_SAMPLED, replace=False).tolist()})


def test_every_file(corpus_dir):
    files = msa_files(corpus_dir)
    assert len(files) > 150
    rows = {path: compare(path) for path in files}
    assert rows[corpus_dir / "more/spare_alignments/3en2_A.a3m.gz"] == 38955
    assert sum(rows.values()) > 280_000


def read_whole(path, sequence, mol_type):
    """One file's features from the definitions: dict of plain Python values."""
    raw = gzip.decompress(path.read_bytes()).decode()
    if raw.startswith("# STOCKHOLM"):
        records = walk_stockholm(raw)
        rows = [walk_stockholm_row(records[0][1], row) for _, row in records]
    else:
        rows = [walk_a3m_row(lines) for _, lines in walk_a3m(raw)]
    cache = {c: class_of(c, mol_type) for letters, _ in rows for c in set(letters)}
    query = [class_of(c, mol_type) for c in sequence]
    kept = [(tuple(query), [0] * len(query))]
    seen = {tuple(cache[c] for c in rows[0][0])}
    gap, unknown = RESTYPES.index("-"), RESTYPES.index(UNKNOWN[mol_type])
    for letters, counts in rows[1:]:
        row = tuple(cache[c] for c in letters)
        if row not in seen and any(code != gap for code in row):
            seen.add(row)
            kept.append((row, counts))
    identity, coverage = [], []
    for codes, _ in kept:
        aligned = sum(code != gap for code in codes)
        equal = sum(code == q and q != unknown for code, q in zip(codes, query, strict=True))
        identity.append(1000 * equal / aligned)
        coverage.append(1000 * aligned / len(query))
    columns = list(zip(*(codes for codes, _ in kept), strict=True))
    counts = list(zip(*(count for _, count in kept), strict=True))
    return {
        "msa": columns,
        "deletion": [[min(n, 255) for n in column] for column in counts],
        "profile": [[column.count(k) / len(kept) for k in range(32)] for column in columns],
        "deletion_mean": [sum(column) / len(column) for column in counts],
        "identity": identity,
        "coverage": coverage,
    }


@pytest.mark.parametrize(
    ("name", "mol_type"),
    [
        ("more/spare_alignments/7wux_1_non_pairing.a3m.gz", MolType.PROTEIN),
        ("spare_alignments/afdb_data__data_caches__train__1a2y_B__a3m__mgnify_hits.a3m.gz", MolType.PROTEIN),
        ("spare_alignments/inference_data__protein_monomer__test.a3m.gz", MolType.PROTEIN),
        ("more/spare_alignments/9gmw_2_rna.a3m.gz", MolType.RNA),
        ("more/spare_alignments/RF00005_tRNA.sto.gz", MolType.RNA),
        ("more/spare_alignments/of_mgnify_hits.sto.gz", MolType.PROTEIN),
    ],
)
def test_objects(corpus_dir, name, mol_type):
    """Whole objects of files whose rows name no species: there, equal rows are duplicates."""
    path = corpus_dir / name
    sequence = parse_alignment(read_text(path), Alphabet.of(mol_type))[0].query
    result = featurize_msa(sequence, mol_type, [path])
    assert result.failures == ()
    content, expected = content_for(sequence, mol_type, [path]), read_whole(path, sequence, mol_type)
    np.testing.assert_array_equal(content.arrays["msa"], expected["msa"])
    np.testing.assert_array_equal(content.arrays["deletion"], expected["deletion"])
    np.testing.assert_array_equal(content.arrays["profile"], np.array(expected["profile"], np.float16))
    np.testing.assert_allclose(content.arrays["deletion_mean"], expected["deletion_mean"], rtol=1e-6)
    rows = content.arrays["rows"]
    np.testing.assert_allclose(rows[2], expected["identity"], atol=0.5001)
    np.testing.assert_allclose(rows[3], expected["coverage"], atol=0.5001)
    assert content.attributes["species"] == []


def test_query_with_x_matches_the_chain(corpus_dir):
    """3en2's deep alignment has X for selenomethionine, where the chain's canonical sequence has M."""
    path = corpus_dir / "more/spare_alignments/3en2_A.a3m.gz"
    structure = gemmi.read_structure(str(corpus_dir / "more/variants/3en2-atomworks.cif.gz"))
    structure.setup_entities()
    (polymer,) = (e for e in structure.entities if e.entity_type == gemmi.EntityType.Polymer)
    names = [gemmi.Entity.first_mon(item) for item in polymer.full_sequence]
    sequence = "".join(gemmi.find_tabulated_residue(name).one_letter_code.upper() for name in names)
    with gzip.open(path, "rt") as file:
        query = file.read(1000).split("\n")[1]
    differ = [(q, c) for q, c in zip(query, sequence, strict=True) if q != c]
    assert set(differ) == {("X", "M")}
    content = content_for(sequence, MolType.PROTEIN, [path])
    assert content.attributes["sequence"] == sequence
    query_row = content.arrays["msa"][:, 0].tolist()
    assert query_row == [class_of(c, MolType.PROTEIN) for c in sequence]
    # Every header has a TaxID.
    assert (content.arrays["rows"][1, 1:] >= 0).all()


@pytest.mark.parametrize(
    "name",
    [
        "more/spare_alignments/3en2_A.a3m.gz",
        "spare_alignments/7st3__msa__2__pairing.a3m.gz",
        "alignments/c01ba18b1378712e/1.a3m.gz",
        "more/alignments/f93383c092af9d3c/uniref_hits.sto.gz",
    ],
)
def test_memory(corpus_dir, name):
    """From the file to the object in less than three times the text, the text itself included."""
    path = corpus_dir / name
    size = len(read_text(path).data)
    query = parse_alignment(read_text(path), Alphabet.of(MolType.PROTEIN))[0].query
    featurize_msa(query, MolType.PROTEIN, [path])  # what is imported late does not count
    tracemalloc.start()
    try:
        assert content_for(query, MolType.PROTEIN, [path]) is not None
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 3 * size


def test_alignment_of_a_longer_chain_is_refused(corpus_dir):
    """5vht_A's query is four residues longer than the chain of variants/5vht-atomworks."""
    path = corpus_dir / "more/spare_alignments/5vht_A.a3m.gz"
    structure = gemmi.read_structure(str(corpus_dir / "more/variants/5vht-atomworks.cif.gz"))
    structure.setup_entities()
    (polymer,) = (e for e in structure.entities if e.entity_type == gemmi.EntityType.Polymer)
    names = [gemmi.Entity.first_mon(item) for item in polymer.full_sequence]
    sequence = gemmi.one_letter_code(names)
    result = featurize_msa(sequence, MolType.PROTEIN, [path])
    assert result.content is None
    (failure,) = result.failures
    assert isinstance(failure, AlignmentError)
    assert failure.reason == "query-mismatch"
    assert f"103 residues, the chain has {len(sequence)}" in str(failure)
    assert "5vht_A.a3m.gz" in str(failure)


def test_every_chain_of_the_corpus_gets_its_alignments(corpus_dir):
    """Alignment folders are named after sequences: each file in them must fit its sequence."""
    table = (corpus_dir / "chains.tsv").read_text().splitlines()
    header = table[0].split("\t")
    done = set()
    for line in table[1:]:
        row = dict(zip(header, line.split("\t"), strict=True))
        if not row["alignments"] or row["alignments"] in done:
            continue
        done.add(row["alignments"])
        files = [p for p in sorted((corpus_dir / row["alignments"]).iterdir()) if file_kind(p) == "msa"]
        small = [path for path in files if path.stat().st_size < 100_000]
        result = featurize_msa(row["sequence"], MolType[row["kind"].upper()], small)
        assert result.failures == ()
        assert (result.content is None) == (not small)
    assert len(done) > 50
