"""Random alignments for hypothesis, how they are written, and what an MSA object of them has to be."""

import gzip
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import zstandard
from hypothesis import strategies as st
from hypothesis.strategies import DrawFn

from megafold.pipeline.schema import MolType

LETTERS: Final = {MolType.PROTEIN: "ACDEFGHIKLMNPQRSTVWY", MolType.RNA: "ACGU", MolType.DNA: "ACGT"}
UNKNOWN: Final = {MolType.PROTEIN: "X", MolType.RNA: "N", MolType.DNA: "N"}
#: Classes by letter, spelled out: AF3 SI table 13.
CLASSES: Final = {
    MolType.PROTEIN: {letter: place for place, letter in enumerate("ARNDCQEGHILKMFPSTWYVX")},
    MolType.RNA: {"A": 21, "G": 22, "C": 23, "U": 24, "N": 25},
    MolType.DNA: {"A": 26, "G": 27, "C": 28, "T": 29, "N": 30},
}
GAP: Final = 31
SPECIES: Final = ("HUMAN", "MOUSE", "YEAST", "")
MAX_DELETION: Final = 255


@dataclass(frozen=True)
class Row:
    """``aligned``: a letter or ``-`` for each of the query's; ``inserted``: what is before each, and last."""

    species: str
    aligned: str
    inserted: tuple[str, ...]


@dataclass(frozen=True)
class AlignmentDraft:
    """A query and its rows."""

    mol_type: MolType
    query: str
    rows: tuple[Row, ...]

    def header(self, index: int) -> str:
        """Name of a row; only UniProt's style tells a species."""
        species = self.rows[index].species
        return f"tr|A0A{index:04d}|A0A{index:04d}_{species}/1-9" if species else f"contig{index}"


@st.composite
def alignments(draw: DrawFn, query: str = "", mol_type: MolType | None = None) -> AlignmentDraft:
    """Rows with gaps, unknown letters, insertions (few of them long), repeated rows, rows of gaps alone."""
    kind = mol_type if mol_type is not None else draw(st.sampled_from(list(LETTERS)))
    letters = LETTERS[kind] + UNKNOWN[kind]
    text = query or draw(st.text(letters, min_size=1, max_size=9))
    rows: list[Row] = []
    for _ in range(draw(st.integers(0, 7))):
        if rows and draw(st.integers(0, 3)) == 0:
            rows.append(Row(draw(st.sampled_from(SPECIES)), rows[-1].aligned, rows[-1].inserted))
            continue
        near = draw(st.integers(0, 2)) == 0
        aligned = text if near else draw(st.text(letters + "---", min_size=len(text), max_size=len(text)))
        lengths = draw(
            st.lists(st.sampled_from([0, 0, 0, 1, 2, 300]), min_size=len(text) + 1, max_size=len(text) + 1)
        )
        rows.append(
            Row(draw(st.sampled_from(SPECIES)), aligned, tuple(letters[0] * length for length in lengths))
        )
    return AlignmentDraft(kind, text, tuple(rows))


def a3m(draft: AlignmentDraft) -> str:
    """Insertions in lower case."""
    lines = [">query", draft.query]
    for index, row in enumerate(draft.rows):
        lines += [f">{draft.header(index)}", "".join(_pieces(row, row.inserted))]
    return "\n".join(lines) + "\n"


def _pieces(row: Row, inserted: tuple[str, ...]) -> Iterator[str]:
    for before, letter in zip(inserted, (*row.aligned, ""), strict=True):
        yield before.lower() + letter


def _widths(draft: AlignmentDraft) -> list[int]:
    """Columns of insertions before each residue, and after the last."""
    places = range(len(draft.query) + 1)
    return [max((len(row.inserted[place]) for row in draft.rows), default=0) for place in places]


def a2m(draft: AlignmentDraft) -> str:
    """As A3M, with a ``.`` opposite each insertion."""
    widths = _widths(draft)
    query = "".join("." * width + letter for width, letter in zip(widths, (*draft.query, ""), strict=True))
    lines = [">query", query]
    for index, row in enumerate(draft.rows):
        padded = tuple(text.ljust(width, ".") for text, width in zip(row.inserted, widths, strict=True))
        lines += [f">{draft.header(index)}", "".join(_pieces(row, padded))]
    return "\n".join(lines) + "\n"


def stockholm(draft: AlignmentDraft, block: int) -> str:
    """Insertions in columns of their own; ``block`` columns at a time."""
    texts = [line for line in a2m(draft).split("\n") if line and not line.startswith(">")]
    names = ["query", *(draft.header(index) for index in range(len(draft.rows)))]
    lines = ["# STOCKHOLM 1.0", ""]
    for start in range(0, len(texts[0]), block):
        lines += [f"{name} {text[start : start + block]}" for name, text in zip(names, texts, strict=True)]
        lines.append("")
    return "\n".join([*lines, "//", ""])


def compressed(text: str, how: str) -> bytes:
    """The file's bytes: plain, gzip or Zstandard, whose suffixes are ``how``."""
    data = text.encode()
    if how == ".gz":  # two members, as bgzip writes
        half = len(data) // 2
        return gzip.compress(data[:half], mtime=0) + gzip.compress(data[half:], mtime=0)
    return zstandard.ZstdCompressor().compress(data) if how == ".zst" else data


@dataclass(frozen=True)
class Expected:
    """What the object of one file holds: [row, residue] classes and unclipped deletions, species by row."""

    classes: np.ndarray
    deletions: np.ndarray
    species: list[str]


def expected(draft: AlignmentDraft) -> Expected:
    """By hand: the query, then each row that has a residue and that no earlier row of its species equals."""
    table = CLASSES[draft.mol_type]
    classes, deletions, species = [[table[letter] for letter in draft.query]], [[0] * len(draft.query)], [""]
    seen = {(draft.query, "")}
    for row in draft.rows:
        if set(row.aligned) == {"-"} or (row.aligned, row.species) in seen:
            continue
        seen.add((row.aligned, row.species))
        classes.append([GAP if letter == "-" else table[letter] for letter in row.aligned])
        deletions.append([len(text) for text in row.inserted[:-1]])
        species.append(row.species)
    return Expected(np.array(classes), np.array(deletions), species)
