"""Clusters of chains: files, MMseqs2, identical sequences; and what changing them leaves alone."""

import gzip
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from megafold.cache_store import LocalStore, Manifest
from megafold.pipeline.builder import verify
from megafold.pipeline.builder.config import BuildConfig, Resources, Sources
from megafold.pipeline.builder.engine import Build, BuildReport
from megafold.pipeline.builder.progress import BuildProgress
from megafold.pipeline.clusters import (
    ClusterFile,
    IdenticalSequences,
    Mmseqs,
    assign_clusters,
    choose_clustering,
)
from megafold.pipeline.clusters.assign import Proteins
from megafold.pipeline.errors import InputError
from megafold.pipeline.manifest import EntryRow, entry_rows
from megafold.pipeline.stream.sampling import target_weights
from tests.pipeline.structure_files import CifFile

ROOT = Path(__file__).resolve().parents[2]
LETTERS = {"G": "GLY", "A": "ALA", "S": "SER"}


def digest(sequence: str) -> str:
    return hashlib.sha256(sequence.encode()).hexdigest()


def build(corpus: Path, cache: Path, clusters: str) -> BuildReport:
    config = BuildConfig(
        sources=Sources(corpus=corpus), cache=cache, resources=Resources(workers=0), clusters=clusters
    )
    return Build(config, BuildProgress(quiet=True)).run()


def rows(cache: Path) -> dict[str, EntryRow]:
    return {row.entry: row for row in entry_rows(LocalStore.at(cache).manifest())}


def clusters_of(cache: Path) -> dict[str, str]:
    """Cluster by ``entry:label_asym_id``."""
    return {
        f"{entry}:{chain.label_asym_id}": chain.cluster
        for entry, row in rows(cache).items()
        for chain in row.chains
    }


# -- a small corpus ------------------------------------------------------------------------------------

#: Entry → (label id, author's id, entity, sequence, kind) of its polymers.
CORPUS = {
    "1aaa": [("A", "X", "3", "GGGGGGGGGG", "protein"), ("B", "A", "5", "GGGGGAAAAA", "protein")],
    "1bbb": [("A", "A", "1", "GGGGGGGGGG", "protein"), ("B", "B", "2", "GGGGGGGGG", "protein")],
    "1ccc": [("A", "A", "1", "SSSSSSSSSS", "protein"), ("B", "B", "2", "CCCCC", "rna")],
    "1ddd": [("A", "A", "1", "CCCCC", "dna"), ("B", "B", "2", "CCCCC", "rna")],
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory) -> Path:
    """Chains of glycine, alanine and serine, of cytosine, and an ion in the first two."""
    folder = tmp_path_factory.mktemp("clusters")
    for entry, polymers in CORPUS.items():
        file = CifFile()
        for place, (label, author, entity, sequence, kind) in enumerate(polymers):
            codes = [
                LETTERS[letter] if kind == "protein" else {"rna": "C", "dna": "DC"}[kind]
                for letter in sequence
            ]
            name = {"protein": "'polypeptide(L)'", "rna": "polyribonucleotide"}.get(
                kind, "polydeoxyribonucleotide"
            )
            file.polymer(" ".join(codes), entity=entity, kind=name)
            step = 3.8 if kind == "protein" else 7.0
            for number, code in enumerate(codes, 1):
                at = (step * number, 15.0 * place, 0)
                file.add(code, label, number, at=at, auth_asym=author, entity=entity)
        if entry in ("1aaa", "1bbb"):
            file.add("ZN", "Z", at=(8, 4, 0), entity="9")
        file.write(folder, f"{entry}.cif")
    return folder


@pytest.fixture(scope="module")
def by_sequence(corpus, tmp_path_factory) -> tuple[Path, BuildReport]:
    cache = tmp_path_factory.mktemp("by_sequence") / "cache"
    return cache, build(corpus, cache, "none")


@pytest.fixture
def cache(by_sequence, tmp_path) -> Path:
    return Path(shutil.copytree(by_sequence[0], tmp_path / "cache"))


def test_without_clusters_chains_of_one_sequence_and_kind_are_one(by_sequence):
    cache, report = by_sequence
    assert report.failures == []
    expected = {
        "1aaa:A": "protein:" + digest("GGGGGGGGGG")[:16],
        "1aaa:B": "protein:" + digest("GGGGGAAAAA")[:16],
        "1aaa:Z": "ligand:ZN",
        "1bbb:A": "protein:" + digest("GGGGGGGGGG")[:16],
        "1bbb:B": "peptide:" + digest("GGGGGGGGG")[:16],  # nine residues
        "1bbb:Z": "ligand:ZN",
        "1ccc:A": "protein:" + digest("SSSSSSSSSS")[:16],
        "1ccc:B": "rna:" + digest("CCCCC")[:16],
        "1ddd:A": "dna:" + digest("CCCCC")[:16],
        "1ddd:B": "rna:" + digest("CCCCC")[:16],
    }
    assert clusters_of(cache) == expected
    assert report.clusters == {
        "method": "identical-sequences",
        "proteins": 3,
        "clusters": 3,
        "unplaced": 0,
    }


PAIRS = {
    "by sequence": [
        (digest("GGGGGGGGGG"), digest("GGGGGGGGGG")),
        (digest("GGGGGGGGGG"), digest("GGGGGAAAAA")),
    ],
    "by the beginning of its digest": [
        ("one", digest("GGGGGGGGGG")[:16]),
        ("one", digest("GGGGGAAAAA")[:16]),
    ],
    # 1aaa's author calls A what the file calls B: the author's ids go first
    "by chain": [("1BBB_A", "1BBB_A"), ("1BBB_A", "1AAA_A")],
    "by the cluster's name": [("1aaa_X", "1aaa_A")],
    # no chain of 1aaa has B as its author's id
    "by the file's own chain id": [("one", "1aaa_B"), ("one", "1bbb_A")],
}


def assigned(cache: Path, setting: str) -> tuple[dict[str, str], dict]:
    """Clusters by ``entry:label_asym_id`` as a build would make them, and the manifest's attribute."""
    store = LocalStore.at(cache)
    made = store.manifest().table.to_pylist()
    attribute = assign_clusters(made, choose_clustering(setting)[0], store)
    found = {
        f"{row['entry']}:{chain['label_asym_id']}": chain["cluster"]
        for row in made
        for chain in row["chains"]
    }
    return found, attribute


@pytest.mark.parametrize("pairs", PAIRS.values(), ids=PAIRS.keys())
def test_pairs_join_proteins(by_sequence, tmp_path, pairs):
    file = tmp_path / "clusters.tsv"
    file.write_text("".join(f"{cluster}\t{member}\n" for cluster, member in pairs))
    found, attribute = assigned(by_sequence[0], str(file))
    assert found["1aaa:A"] == found["1aaa:B"] == found["1bbb:A"]
    assert len(set(found.values())) == len({*clusters_of(by_sequence[0]).values()}) - 1
    assert found["1ccc:A"] == "protein:" + digest("SSSSSSSSSS")[:16]
    assert attribute == {
        "method": "file",
        "format": "pairs",
        "digest": hashlib.sha256(file.read_bytes()).hexdigest(),
        "proteins": 3,
        "clusters": 2,
        "unplaced": 1,
        "contradicted": 0,
        "by_identity": 0,
    }


def test_other_clusters_rebuild_nothing_and_going_back_gives_the_same_snapshot(
    corpus, cache, by_sequence, tmp_path
):
    file = tmp_path / "clusters.tsv"
    file.write_text("one\t1aaa_X\none\t1aaa_A\n")
    before = rows(cache)
    report = build(corpus, cache, str(file))
    assert report.computed == {}
    assert report.manifest != by_sequence[1].manifest
    after = rows(cache)
    assert {row.structure for row in after.values()} == {row.structure for row in before.values()}
    assert clusters_of(cache) == assigned(by_sequence[0], str(file))[0]
    check_weights(cache)
    again = build(corpus, cache, "none")
    assert again.computed == {}
    assert again.manifest == by_sequence[1].manifest


def test_entities_are_those_of_the_files(by_sequence, tmp_path):
    """1aaa's entities are 3 and 5: those of the file, not their order."""
    file = tmp_path / "clusters.txt.gz"
    text = b"9ZZZ_1 1CCC_1 AF_AFP12345F1_1\n1AAA_5 1BBB_1\n1BBB_2 1CCC_2\n"
    file.write_bytes(gzip.compress(text))
    found, attribute = assigned(by_sequence[0], str(file))
    assert found["1aaa:B"] == found["1bbb:A"] == found["1aaa:A"] == "protein:1aaa_5"
    assert found["1ccc:A"] == "protein:9zzz_1"
    assert found["1bbb:B"] == "peptide:" + digest("GGGGGGGGG")[:16]
    assert attribute == {
        "method": "file",
        "format": "entities",
        "digest": hashlib.sha256(text).hexdigest(),
        "proteins": 3,
        "clusters": 2,
        "unplaced": 0,
        "contradicted": 0,
        "by_identity": 2,  # a peptide and an RNA chain
    }


def test_structures_are_opened_for_their_entities_once(by_sequence, tmp_path, monkeypatch):
    """What a file of entities said of the same structures stands in the last snapshot."""
    file = tmp_path / "clusters.txt"
    file.write_text("9ZZZ_1 1CCC_1\n1AAA_5 1BBB_1\n")
    clustering = choose_clustering(str(file))[0]
    store = LocalStore.at(by_sequence[0])
    plain = store.manifest()
    made = plain.table.to_pylist()
    attributes = {**plain.attributes, "clusters": assign_clusters(made, clustering, store, plain)}
    before = Manifest(pa.Table.from_pylist(made, schema=plain.table.schema), attributes)
    opened: list[str] = []
    honest = Proteins._entities

    def told(proteins: Proteins, structure: str) -> list:
        opened.append(structure)
        return honest(proteins, structure)

    monkeypatch.setattr(Proteins, "_entities", told)
    again = plain.table.to_pylist()[::-1]
    assert assign_clusters(again, clustering, store, before) == attributes["clusters"]
    assert again[::-1] == made
    assert opened == []
    fewer = plain.table.to_pylist()[1:]
    assert assign_clusters(fewer, clustering, store, before)["proteins"] == 2
    assert len(opened) == 3
    # The same proteins in an entry of another name, which the file may place otherwise.
    renamed = [{**row, "entry": f"9{row['entry'][1:]}"} for row in plain.table.to_pylist()]
    assert assign_clusters(renamed, clustering, store, before)["unplaced"] == 3
    assert len(opened) == 7
    file.write_text("9ZZZ_1 1CCC_1\n")
    assert assign_clusters(again, choose_clustering(str(file))[0], store, before)["unplaced"] == 2
    assert len(opened) == 11


def test_chains_of_one_sequence_stay_together_where_a_file_parts_them(by_sequence, tmp_path):
    file = tmp_path / "clusters.tsv"
    file.write_text("one\t1aaa_X\ntwo\t1bbb_A\n")
    found, attribute = assigned(by_sequence[0], str(file))
    assert found["1aaa:A"] == found["1bbb:A"] == "protein:one"
    assert attribute["contradicted"] == 1


def check_weights(cache: Path) -> None:
    """By hand: β / cluster size · Σ α; interfaces are clustered by the pair of their chains."""
    table = LocalStore.at(cache).manifest().table
    targets = target_weights(table, np.arange(table.num_rows))
    entries = table["entry"].to_pylist()
    labels = [[chain["label_asym_id"] for chain in chains] for chains in table["chains"].to_pylist()]
    weights = {
        (entries[row], *(labels[row][chain] for chain in pair if chain >= 0)): weight
        for row, *pair, weight in zip(
            targets.row, targets.chain_i, targets.chain_j, targets.weight, strict=True
        )
    }
    # proteins: three of ten residues are one cluster, the peptide and serine are alone
    assert weights["1aaa", "A"] == weights["1aaa", "B"] == weights["1bbb", "A"] == pytest.approx(0.5 * 3 / 3)
    assert weights["1bbb", "B"] == weights["1ccc", "A"] == pytest.approx(0.5 * 3)
    assert weights["1ccc", "B"] == weights["1ddd", "B"] == pytest.approx(0.5 * 3 / 2)
    assert weights["1ddd", "A"] == pytest.approx(0.5 * 3)
    assert weights["1aaa", "Z"] == pytest.approx(0.5 * 1 / 2)
    # zinc is near chain A of both entries and no other chain
    assert {key for key in weights if len(key) == 3} == {("1aaa", "A", "Z"), ("1bbb", "A", "Z")}
    assert weights["1aaa", "A", "Z"] == weights["1bbb", "A", "Z"] == pytest.approx((3 + 1) / 2)


BROKEN = {
    "three columns": ("a\tb\nc\td\te\n", r"clusters\.tsv, line 2: 3 columns"),
    "one column": ("a\tb\nc\n", r"clusters\.tsv, line 2: 1 columns"),
    "an empty member": ("# a remark\na\tb\n\nc\t\n", r"clusters\.tsv, line 4: 1 columns"),
    "two clusters": (
        "a\t1abc_A\nb\t1ABC_A\n",
        r"clusters\.tsv, line 2: 1abc_A is in cluster b here and in a on line 1",
    ),
    "no entity": (
        "4HHB_1 4HHB_2\n1ABC_1 2ABC_B\n",
        r"clusters\.tsv, line 2: '2ABC_B' is no <entry>_<entity>",
    ),
    "entity twice": ("1ABC_1 2ABC_1\n1ABC_2 2abc_1\n", r"line 2: 2abc_1 is in cluster 1abc_2 here"),
    "nothing": ("\n# nothing\n", r"clusters\.tsv has no clusters"),
}


@pytest.mark.parametrize(("text", "message"), BROKEN.values(), ids=BROKEN.keys())
def test_broken_files_name_file_and_line(tmp_path, text, message):
    path = tmp_path / "clusters.tsv"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        ClusterFile.read(path)


def test_files_that_are_no_text_or_cut_off_are_named(tmp_path):
    path = tmp_path / "clusters.tsv"
    path.write_bytes(b"\xff\xfe\x00a")
    with pytest.raises(InputError, match=r"clusters\.tsv is not text"):
        ClusterFile.read(path)
    path.write_bytes(gzip.compress(b"a\tb\n" * 1000)[:-20])
    with pytest.raises(InputError, match=r"clusters\.tsv"):
        ClusterFile.read(path)


def test_headings_and_compression_do_not_count(tmp_path):
    plain, packed = tmp_path / "a.tsv", tmp_path / "b.tsv.gz"
    text = f"cluster\tsequence_sha256\n{digest('A')}\t{digest('G')}\n"
    plain.write_text(text)
    packed.write_bytes(gzip.compress(text.encode()))
    first, second = ClusterFile.read(plain), ClusterFile.read(packed)
    assert first.identity == second.identity
    assert first.members == {digest("G")[:16]: digest("A")[:16], digest("A")[:16]: digest("A")[:16]}


# -- MMseqs2 -------------------------------------------------------------------------------------------

#: Clusters sequences by their first letter; leaves out those of serine; notes each call.
FAKE = """#!{python}
import sys
with open({log!r}, "a") as log:
    print(*sys.argv[1:], file=log)
if sys.argv[1] == "version":
    print("15-6f452")
    sys.exit()
{fault}
lines = open(sys.argv[2]).read().split()
found = {{}}
for name, sequence in zip(lines[::2], lines[1::2]):
    if sequence[0] != "S":
        representative = found.setdefault(sequence[0], name[1:])
        with open(sys.argv[3] + "_cluster.tsv", "a") as file:
            print(representative, name[1:], sep="\\t", file=file)
"""


@pytest.fixture
def fake_mmseqs(tmp_path, monkeypatch):
    """Puts a made-up binary on the PATH, with a fault if wanted; returns its log."""
    folder, log = tmp_path / "bin", tmp_path / "calls.log"
    folder.mkdir()

    def install(fault: str = "") -> Path:
        path = folder / "mmseqs"
        path.write_text(FAKE.format(python=sys.executable, log=str(log), fault=fault))
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(folder), prepend=os.pathsep)
        return log

    return install


def test_mmseqs_clusters_are_taken_and_made_once(corpus, cache, fake_mmseqs):
    log = fake_mmseqs()
    report = build(corpus, cache, "auto")
    assert report.computed == {}
    found = clusters_of(cache)
    representative = min(digest("GGGGGGGGGG"), digest("GGGGGAAAAA"))[:16]
    assert found["1aaa:A"] == found["1aaa:B"] == found["1bbb:A"] == f"protein:{representative}"
    assert found["1ccc:A"] == "protein:" + digest("SSSSSSSSSS")[:16]
    assert report.clusters == {
        "method": "mmseqs2",
        "version": "15-6f452",
        "options": ["--min-seq-id", "0.4", "-c", "0.8", "--cov-mode", "0"],
        "proteins": 3,
        "clusters": 2,
        "unplaced": 1,
    }
    calls = log.read_text().splitlines()
    assert [call.split()[0] for call in calls] == ["version", "easy-cluster"]
    assert "--min-seq-id 0.4 -c 0.8 --cov-mode 0 --threads 1" in calls[1]
    again = build(corpus, cache, "mmseqs2")
    assert again.manifest == report.manifest
    assert log.read_text().count("easy-cluster") == 1
    # one protein less: they are made again
    (corpus_copy := cache.parent / "fewer").mkdir()
    for path in sorted(corpus.glob("*.cif"))[1:]:
        shutil.copy(path, corpus_copy)
    fewer = build(corpus_copy, cache, "mmseqs2")
    assert fewer.clusters["proteins"] == 2
    assert log.read_text().count("easy-cluster") == 2


FAULTS = {
    "fails": ("print('Input is bad'); sys.exit(3)", "exit status 3: Input is bad"),
    "writes nothing": ("sys.exit(0)", "wrote no clusters"),
    "writes something else": (
        "open(sys.argv[3] + '_cluster.tsv', 'w').write('a\\tb\\n'); sys.exit(0)",
        r"line 1 of its clusters is 'a\\tb'",
    ),
}


@pytest.mark.parametrize(("fault", "message"), FAULTS.values(), ids=FAULTS.keys())
def test_a_binary_that_fails_is_told(by_sequence, fake_mmseqs, fault, message):
    fake_mmseqs(fault)
    with pytest.raises(InputError, match=message) as caught:
        assigned(by_sequence[0], "auto")
    assert "`--clusters FILE` or `none`" in str(caught.value)


def test_a_binary_that_does_not_say_its_version_is_told(fake_mmseqs, tmp_path):
    fake_mmseqs()
    (tmp_path / "bin" / "mmseqs").write_text("#!/bin/sh\nexit 1\n")
    with pytest.raises(InputError, match="mmseqs version: exit status 1"):
        choose_clustering("auto")


def test_absent_binary_is_said_and_never_silent(corpus, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    clustering, remark = choose_clustering("auto")
    assert isinstance(clustering, IdenticalSequences)
    assert "not on the PATH" in remark
    assert choose_clustering("none")[1] == ""
    with pytest.raises(InputError, match="no `mmseqs` on the PATH"):
        choose_clustering("mmseqs2")
    with pytest.raises(InputError, match=r"--clusters nowhere\.tsv: there is no such file"):
        choose_clustering("nowhere.tsv")
    command = [
        sys.executable,
        "-m",
        "megafold",
        "cache",
        "build",
        corpus,
        tmp_path / "cache",
        "--workers",
        "0",
    ]
    shown = subprocess.run(
        [*command, "--clusters", "mmseqs2"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert shown.returncode == 2
    assert "no `mmseqs` on the PATH" in shown.stderr
    assert "Traceback" not in shown.stderr
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "is not on the PATH" in shown.stderr.replace("\n", " ")
    assert "3 distinct proteins in 3 clusters (identical-sequences)" in shown.stdout
    info = [sys.executable, "-m", "megafold", "cache", "info", tmp_path / "cache", "--json"]
    facts = json.loads(subprocess.run(info, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert facts["clusters"]["method"] == "identical-sequences"


def test_verify_says_when_clusters_are_others(cache, tmp_path):
    manifest = LocalStore.at(cache).manifest()
    assert verify.check_clusters(manifest, "none") == []
    file = tmp_path / "clusters.tsv"
    file.write_text("one\t1aaa_A\n")
    (finding,) = verify.check_clusters(manifest, str(file))
    assert (finding.level, finding.kind) == ("stale", "clusters")
    assert "method is identical-sequences, now file" in finding.message


# -- real proteins -------------------------------------------------------------------------------------

HAEMOGLOBINS = {"2hhb": "structures", "4hhb": "more/structures", "1hda": "more/structures"}


@pytest.fixture(scope="module")
def haemoglobins(corpus_dir, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("haemoglobins")
    for entry, place in HAEMOGLOBINS.items():
        shutil.copy(corpus_dir / place / f"{entry}.cif.gz", folder)
    return folder


@pytest.fixture(scope="module")
def haemoglobin_cache(haemoglobins, tmp_path_factory) -> Path:
    cache = tmp_path_factory.mktemp("haemoglobin") / "cache"
    build(haemoglobins, cache, "none")
    return cache


def protein_clusters(cache: Path) -> Counter[str]:
    return Counter(
        chain.cluster for row in rows(cache).values() for chain in row.chains if chain.mol_type == "protein"
    )


@pytest.mark.corpus
def test_haemoglobins_by_sequence(haemoglobin_cache):
    """Human and bovine alpha and beta chains; 2hhb and 4hhb are the same protein."""
    assert sorted(protein_clusters(haemoglobin_cache).values()) == [2, 2, 4, 4]


@pytest.mark.corpus
@pytest.mark.parametrize(
    "file", ["more/tables/rcsb-clusters-by-entity-40.txt.gz", "more/clusters.tsv"], ids=["entities", "pairs"]
)
def test_haemoglobins_are_one_cluster_at_40_percent(
    haemoglobins, haemoglobin_cache, corpus_dir, tmp_path, file
):
    """Alpha and beta chains share 43 % of their residues. Weights by hand: β / cluster size · α."""
    cache = Path(shutil.copytree(haemoglobin_cache, tmp_path / "cache"))
    report = build(haemoglobins, cache, str(corpus_dir / file))
    assert report.computed == {}
    assert list(protein_clusters(cache).values()) == [12]
    assert (report.clusters["proteins"], report.clusters["clusters"]) == (4, 1)
    assert report.clusters["unplaced"] == report.clusters["contradicted"] == 0
    table = LocalStore.at(cache).manifest().table
    targets = target_weights(table, np.arange(3))
    chains = table["chains"].to_pylist()
    kinds = [
        tuple(chains[row][chain]["cluster"].partition(":")[0::2] for chain in pair if chain >= 0)
        for row, *pair in zip(targets.row, targets.chain_i, targets.chain_j, strict=True)
    ]
    by_kind: dict[tuple, list[float]] = {}
    for kind, weight in zip(kinds, targets.weight, strict=True):
        by_kind.setdefault(tuple(sorted(kind)), []).append(weight)
    (protein,) = {part for kind in by_kind for part in kind if part[0] == "protein"}
    haem = ("ligand", "HEM")
    assert by_kind[(protein,)] == pytest.approx([0.5 * 3 / 12] * 12)
    assert by_kind[(haem,)] == pytest.approx([0.5 * 1 / 12] * 12)
    for kind, total in (((protein, protein), 6), ((haem, protein), 4)):
        assert len(by_kind[kind]) >= 12
        assert by_kind[kind] == pytest.approx([total / len(by_kind[kind])] * len(by_kind[kind]))


@pytest.mark.corpus
@pytest.mark.slow
@pytest.mark.skipif(shutil.which("mmseqs") is None, reason="needs the mmseqs binary on the PATH")
def test_mmseqs_itself_agrees_with_the_clusters_of_the_corpus(corpus_dir):
    """``more/clusters.tsv`` was made with MMseqs2 of sequences with X for each modified residue."""
    lines = [path.read_text().splitlines() for path in corpus_dir.glob("**/chains.tsv")]
    heads = [table[0].split("\t") for table in lines]
    chains = [
        dict(zip(head, line.split("\t"), strict=False))
        for head, table in zip(heads, lines, strict=True)
        for line in table[1:]
    ]
    sequences = {chain["sequence_sha256"]: chain["sequence"] for chain in chains}
    pairs = [line.split("\t") for line in (corpus_dir / "more/clusters.tsv").read_text().splitlines()[1:]]
    expected: dict[str, set[str]] = {}
    for cluster, member in pairs:
        if member in sequences:
            expected.setdefault(cluster, set()).add(member)
    known = {member: sequences[member] for members in expected.values() for member in members}
    mmseqs = Mmseqs.find(threads=2)
    assert mmseqs is not None
    found: dict[str, set[str]] = {}
    for member, cluster in mmseqs.cluster(known).items():
        found.setdefault(cluster, set()).add(member)
    assert len(known) > 170
    ours, theirs = ({frozenset(members) for members in clusters.values()} for clusters in (found, expected))
    assert len(ours ^ theirs) <= 4  # set cover is not unique, and versions differ
    assert Mmseqs(mmseqs.binary, mmseqs.version, 1).cluster(known) == mmseqs.cluster(known)
