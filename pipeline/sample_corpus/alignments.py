"""Alignment files: homologs as Stockholm and A3M, template hits as hmmsearch writes them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.random import Generator

from megafold.pipeline.sample_corpus.evolution import Homolog, homologs
from megafold.pipeline.sample_corpus.model import AlignedChain, Entry
from megafold.pipeline.sample_corpus.species import SPECIES

_WIDTH: Final = 200
_ALPHANUMERIC: Final = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
_PROTEIN_NAMES: Final = (
    "Uncharacterized protein",
    "Domain-containing protein",
    "Putative binding protein",
    "Conserved protein, isoform A",
)


@dataclass(frozen=True)
class AlignmentRow:
    """One row of an alignment: its name, what the file says of it, and the homolog."""

    name: str
    description: str
    homolog: Homolog


def _accession(rng: Generator) -> str:
    """A ten-character accession in UniProt's form, such as A0A0K3MEI0."""
    letter, alphanumeric = _ALPHANUMERIC[:26], _ALPHANUMERIC
    pattern = (alphanumeric, alphanumeric, "0123456789", letter, alphanumeric, alphanumeric, "0123456789")
    draws = rng.random(len(pattern))
    return "A0A" + "".join(kind[int(draw * len(kind))] for kind, draw in zip(pattern, draws, strict=True))


def _protein_name(rng: Generator) -> str:
    return _PROTEIN_NAMES[int(rng.integers(len(_PROTEIN_NAMES)))]


def uniprot_rows(rng: Generator, chain: AlignedChain, count: int) -> list[AlignmentRow]:
    """Homologs with UniProt names: most species once, some with paralogs."""
    known = [SPECIES[i] for i in rng.permutation(len(SPECIES))[: int(0.8 * len(SPECIES))]]
    chosen = (known + [known[i] for i in rng.integers(len(known), size=max(0, count - len(known)))])[:count]
    rows = []
    for homolog, (mnemonic, taxon, name) in zip(_sorted_homologs(rng, chain, count), chosen, strict=True):
        accession = _accession(rng)
        first = int(rng.integers(1, 200))
        rows.append(
            AlignmentRow(
                f"tr|{accession}|{accession}_{mnemonic}/{first}-{first + homolog.residue_count - 1}",
                f"{_protein_name(rng)} OS={name} OX={taxon} PE=4 SV=1",
                homolog,
            )
        )
    return rows


def uniref_rows(rng: Generator, chain: AlignedChain, count: int) -> list[AlignmentRow]:
    """Homologs with the names of UniRef90 clusters."""
    rows = []
    for homolog in _sorted_homologs(rng, chain, count):
        mnemonic, taxon, name = SPECIES[int(rng.integers(len(SPECIES)))]
        accession = _accession(rng)
        first = int(rng.integers(1, 200))
        rows.append(
            AlignmentRow(
                f"UniRef90_{accession}/{first}-{first + homolog.residue_count - 1}",
                f"[subseq from] {_protein_name(rng)} n={int(rng.integers(1, 40))} Tax={name} TaxID={taxon} "
                f"RepID={accession}_{mnemonic}",
                homolog,
            )
        )
    return rows


def rna_rows(rng: Generator, chain: AlignedChain, count: int) -> list[AlignmentRow]:
    """Homologs of an RNA, named as nucleotide database hits are."""
    rows = []
    for homolog in _sorted_homologs(rng, chain, count):
        _, taxon, name = SPECIES[int(rng.integers(len(SPECIES)))]
        accession = "".join(rng.choice(list(_ALPHANUMERIC[:26]), 2)) + f"{int(rng.integers(10**5, 10**6))}.1"
        first = int(rng.integers(1, 90000))
        rows.append(
            AlignmentRow(
                f"{accession}/{first}-{first + homolog.residue_count - 1}",
                f"[subseq from] {name} non-coding RNA, TaxID={taxon}",
                homolog,
            )
        )
    return rows


def _sorted_homologs(rng: Generator, chain: AlignedChain, count: int) -> list[Homolog]:
    """Homologs, the most similar first, as searches list them."""
    pairs = None if chain.pairs is None else list(chain.pairs)
    found = homologs(rng, chain.sequence, chain.rates, count, pairs)
    rows = np.frombuffer("".join(one.aligned for one in found).encode(), dtype="u1").reshape(count, -1)
    identical = (rows == np.frombuffer(chain.sequence.encode(), dtype="u1")).sum(axis=1)
    return [found[i] for i in np.argsort(-identical, kind="stable")]


def a3m(query: str, rows: Sequence[AlignmentRow]) -> str:
    """An A3M file: insertions in lower case, before the column they precede."""
    lines = [">query", query]
    for row in rows:
        lines.append(f">{row.name} {row.description}")
        text = list(row.homolog.aligned)
        for position, inserted in row.homolog.insertions.items():
            text[position] = inserted.lower() + text[position]
        lines.append("".join(text))
    return "\n".join(lines) + "\n"


def jackhmmer_stockholm(query: str, rows: Sequence[AlignmentRow], program: str) -> str:
    """A Stockholm file as jackhmmer and nhmmer write it: the query first, all capitals, every gap a dash."""
    widths = _insert_widths([row.homolog for row in rows])
    texts = [_spread(Homolog(query), widths, gap="-", lower=False)]
    texts += [_spread(row.homolog, widths, gap="-", lower=False) for row in rows]
    reference = _spread(Homolog("x" * len(query)), widths, gap=".", lower=False)
    names = ["query", *(row.name for row in rows)]
    head = ["# STOCKHOLM 1.0", "#=GF ID query-i1", f"#=GF AU {program}"]
    return _stockholm(head, names, ["", *(row.description for row in rows)], texts, reference)


def hmmsearch_stockholm(chain: AlignedChain, hits: Sequence[tuple[Entry, AlignedChain]]) -> str:
    """Template hits as hmmsearch writes them: no query row, RF marks its residues, insertions lower case."""
    rows = [(entry, hit, *_hit_alignment(chain, hit)) for entry, hit in hits]
    widths = _insert_widths([homolog for _, _, homolog, _, _ in rows])
    return _stockholm(
        ["# STOCKHOLM 1.0", "#=GF ID query-i1", "#=GF AU hmmsearch (HMMER 3.3.2)"],
        [f"{entry.id}_{hit.chain}/{first}-{last}" for entry, hit, _, first, last in rows],
        [f"[subseq from] mol:protein length:{len(hit.sequence)}" for _, hit, *_ in rows],
        [_spread(homolog, widths, gap=".", lower=True) for _, _, homolog, _, _ in rows],
        _spread(Homolog("x" * len(chain.sequence)), widths, gap=".", lower=False),
    )


def _hit_alignment(chain: AlignedChain, hit: AlignedChain) -> tuple[Homolog, int, int]:
    """A relative aligned to the query by the family's columns; its first and last aligned residue, from 1."""
    at = {column: i for i, column in enumerate(chain.columns) if column >= 0}
    if hit is chain:
        matches = [(i, i) for i in range(len(chain.sequence))]
    else:
        matches = [(at[column], i) for i, column in enumerate(hit.columns) if column >= 0 and column in at]
    aligned = ["-"] * len(chain.sequence)
    insertions: dict[int, str] = {}
    before: tuple[int, int] | None = None
    for position, i in matches:
        aligned[position] = hit.sequence[i]
        if before is not None and i > before[1] + 1:
            insertions[position] = hit.sequence[before[1] + 1 : i]
        before = position, i
    return Homolog("".join(aligned), insertions), matches[0][1] + 1, matches[-1][1] + 1


def _insert_widths(rows: Sequence[Homolog]) -> dict[int, int]:
    """Columns that insertions need, by the query's residue that they precede, in order."""
    widths: dict[int, int] = {}
    for row in rows:
        for position, inserted in row.insertions.items():
            widths[position] = max(widths.get(position, 0), len(inserted))
    return dict(sorted(widths.items()))


def _spread(row: Homolog, widths: dict[int, int], *, gap: str, lower: bool) -> str:
    """The row with columns for insertions: residues to the left, then gaps."""
    parts, done = [], 0
    for position, width in widths.items():
        inserted = row.insertions.get(position, "")
        parts += [row.aligned[done:position], (inserted.lower() if lower else inserted).ljust(width, gap)]
        done = position
    return "".join([*parts, row.aligned[done:]])


def _posteriors(texts: list[str]) -> list[str]:
    """Posterior probabilities of rows: certain but for the ends of each aligned stretch."""
    letters = np.array([list(text) for text in texts])
    present = (letters != "-") & (letters != ".")
    ends = present & (~np.roll(present, 1, axis=1) | ~np.roll(present, -1, axis=1))
    return ["".join(row) for row in np.where(ends, "8", np.where(present, "*", "."))]


def _stockholm(
    head: list[str], names: list[str], descriptions: list[str], texts: list[str], reference: str
) -> str:
    width = max(map(len, names))
    lines = [*head, ""]
    lines += [
        f"#=GS {name:<{width}} DE {text}" for name, text in zip(names, descriptions, strict=True) if text
    ]
    label = width + len("#=GR  PP")
    posteriors = _posteriors(texts)
    for start in range(0, len(reference), _WIDTH):
        part = slice(start, start + _WIDTH)
        lines.append("")
        for name, text, posterior, description in zip(names, texts, posteriors, descriptions, strict=True):
            lines.append(f"{name:<{label}} {text[part]}")
            # The query's own row has none.
            if description:
                lines.append(f"{f'#=GR {name:<{width}} PP':<{label}} {posterior[part]}")
        lines.append(f"{'#=GC RF':<{label}} {reference[part]}")
    return "\n".join([*lines, "//", ""])
