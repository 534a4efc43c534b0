"""Writes the sample corpus: structures, alignments, tables and a README."""

import gzip
import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from megafold.pipeline.errors import InputError
from megafold.pipeline.sample_corpus.alignments import (
    a3m,
    hmmsearch_stockholm,
    jackhmmer_stockholm,
    rna_rows,
    uniprot_rows,
    uniref_rows,
)
from megafold.pipeline.sample_corpus.assembling import MOST_ENTRIES
from megafold.pipeline.sample_corpus.mmcif import to_mmcif
from megafold.pipeline.sample_corpus.model import AlignedChain, Entry
from megafold.pipeline.sample_corpus.recipes import earlier_relatives, make_entry
from megafold.pipeline.sample_corpus.seeds import generator

_KINDS: Final = {"polypeptide(L)": "protein", "polydeoxyribonucleotide": "dna", "polyribonucleotide": "rna"}
_README: Final = """\
# A synthetic corpus

Written by `megafold sample-corpus` (seed {seed}, {entries} entries). No entry is a real structure and no
sequence a real protein: the chemistry is real, the molecules are not. Ids begin with 0, which the PDB has
never issued. The same seed gives the same files, and entry k is the same whatever the number of entries.

| path | what |
|---|---|
| `structures/*.cif.gz` | entries as PDBx/mmCIF |
| `alignments/<first 16 hex of the sequence's sha256>/` | alignments of that sequence, see below |
| `chains.tsv` | entry, entity, chains, kind, length, sequence sha256, alignments folder, sequence |
| `clusters.tsv` | the families of the proteins: chains of one family share a fold |
| `manifest.tsv` | every file: kind, entry, tags, bytes, sha256 |

Proteins have `uniref_hits.sto.gz` (as jackhmmer writes), `uniprot_hits.a3m.gz` (species in the names, for
pairing) and `hmmsearch_hits.sto.gz` (template hits among the entries); RNA has `rna_hits.sto.gz` and
`rnacentral_hits.a3m.gz`.

| kind of entry | entries |
|---|---|
{kinds}

Template hits name the entry itself, as real searches find it too, and earlier entries of its family, each
released at least 60 days before. A date cut-off leaves the earlier ones.
"""


@dataclass(frozen=True, kw_only=True)
class SampleCorpus:
    """What was written: the folders, and how many entries there are of each kind."""

    structures: Path
    alignments: Path
    counts: Mapping[str, int]


@dataclass
class _Tables:
    """Rows of the corpus's tables."""

    manifest: list[tuple[str, ...]] = field(default_factory=list)
    chains: list[tuple[str, ...]] = field(default_factory=list)
    clusters: dict[str, str] = field(default_factory=dict)
    representatives: dict[str, str] = field(default_factory=dict)


def write_sample_corpus(
    directory: Path,
    *,
    entries: int = 24,
    seed: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> SampleCorpus:
    """Write a small, chemically real corpus to a new directory.

    Each block of 24 entries holds every kind: protein monomers, hetero- and homodimers, complexes with DNA
    and RNA, glycoproteins, disulfides, zinc sites, modified residues, ligands and haem. The same ``seed``
    gives the same bytes, and an entry does not depend on how many there are. ``progress`` is told the number
    of entries done and wanted after each.

    Raises:
        InputError: the directory holds something already, or the number of entries is out of range.
    """
    if not 1 <= entries <= MOST_ENTRIES:
        raise InputError(
            f"cannot write {entries} entries: ask for 1 to {MOST_ENTRIES}", reason="bad-number-of-entries"
        )
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise InputError(
            f"{directory} is not an empty directory: give a new one, or remove what it holds",
            reason="directory-not-empty",
        )
    structures, alignments = directory / "structures", directory / "alignments"
    structures.mkdir(parents=True)
    alignments.mkdir()
    tables, counts = _Tables(), Counter[str]()
    for index in range(entries):
        entry = make_entry(seed, index)
        _write_entry(directory, seed, entry, tables)
        counts[entry.kind] += 1
        if progress is not None:
            progress(index + 1, entries)
    _write_tables(directory, tables)
    kinds = "\n".join(f"| {kind} | {count} |" for kind, count in sorted(counts.items()))
    readme = _README.format(seed=seed, entries=entries, kinds=kinds)
    (directory / "README.md").write_text(readme, encoding="utf-8")
    return SampleCorpus(structures=structures, alignments=alignments, counts=dict(sorted(counts.items())))


def _write_entry(directory: Path, seed: int, entry: Entry, tables: _Tables) -> None:
    path = directory / "structures" / f"{entry.id}.cif.gz"
    data = _write_gzip(path, to_mmcif(entry))
    tables.manifest.append(_manifest_row(directory, path, "structure", entry.id, ",".join(entry.tags), data))
    folders = {}
    for chain in entry.aligned:
        digest = _digest(chain.sequence)
        folder = directory / "alignments" / digest[:16]
        folder.mkdir(exist_ok=True)
        for name, text in _alignment_files(seed, entry, chain).items():
            kind = "template-hits" if name.startswith("hmmsearch") else "msa"
            data = _write_gzip(folder / name, text)
            tags = "a3m" if ".a3m" in name else "stockholm"
            tables.manifest.append(_manifest_row(directory, folder / name, kind, entry.id, tags, data))
        folders[chain.entity] = f"alignments/{digest[:16]}"
        if chain.pairs is None:
            tables.clusters[digest] = tables.representatives.setdefault(chain.family, digest)
    tables.chains.extend(_chain_rows(entry, folders))


def _alignment_files(seed: int, entry: Entry, chain: AlignedChain) -> dict[str, str]:
    """The text of a chain's alignment files by name."""
    rng = generator(seed, "alignments", entry.index, chain.entity)
    query = chain.sequence
    deep, shallow = int(rng.integers(60, 200)), int(rng.integers(50, 120))
    if chain.pairs is not None:
        return {
            "rna_hits.sto.gz": jackhmmer_stockholm(
                query, rna_rows(rng, chain, shallow), "nhmmer (HMMER 3.3.2)"
            ),
            "rnacentral_hits.a3m.gz": a3m(query, rna_rows(rng, chain, shallow)),
        }
    relatives = earlier_relatives(seed, entry.index, chain.family)
    return {
        "uniref_hits.sto.gz": jackhmmer_stockholm(
            query, uniref_rows(rng, chain, deep), "jackhmmer (HMMER 3.3.2)"
        ),
        "uniprot_hits.a3m.gz": a3m(query, uniprot_rows(rng, chain, shallow)),
        "hmmsearch_hits.sto.gz": hmmsearch_stockholm(chain, [(entry, chain), *relatives]),
    }


def _chain_rows(entry: Entry, folders: Mapping[int, str]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for number, entity in enumerate(entry.entities):
        if entity.polymer_type is None:
            continue
        labels = ",".join(chain.label for chain in entry.chains if chain.entity == number)
        rows.append(
            (entry.id, str(number + 1), labels, _KINDS[entity.polymer_type], str(len(entity.letters)))
            + (_digest(entity.letters), folders.get(number, ""), entity.letters)
        )
    return rows


def _write_tables(directory: Path, tables: _Tables) -> None:
    for name, head, rows in (
        ("manifest.tsv", "path kind pdb_id tags bytes sha256", sorted(tables.manifest)),
        (
            "chains.tsv",
            "entry entity subchains kind length sequence_sha256 alignments sequence",
            tables.chains,
        ),
        (
            "clusters.tsv",
            "cluster sequence_sha256",
            [(cluster, one) for one, cluster in tables.clusters.items()],
        ),
    ):
        lines = ["\t".join(row) for row in [tuple(head.split()), *rows]]
        (directory / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def _manifest_row(
    directory: Path, path: Path, kind: str, entry: str, tags: str, data: bytes
) -> tuple[str, ...]:
    digest = hashlib.sha256(data).hexdigest()
    return (path.relative_to(directory).as_posix(), kind, entry, tags, str(len(data)), digest)


def _digest(sequence: str) -> str:
    return hashlib.sha256(sequence.encode()).hexdigest()


def _write_gzip(path: Path, text: str) -> bytes:
    """Write compressed text, without a time in it, and return the bytes."""
    data = gzip.compress(text.encode(), compresslevel=6, mtime=0)
    path.write_bytes(data)
    return data
