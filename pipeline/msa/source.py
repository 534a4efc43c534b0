"""One alignment file, fitted to a chain: its rows over the chain's residues, duplicates removed."""

import re
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.errors import AlignmentError
from megafold.pipeline.msa.a3m import parse_a3m
from megafold.pipeline.msa.alignment import Alignment, Insertions, crop_columns
from megafold.pipeline.msa.alphabet import Alphabet
from megafold.pipeline.msa.species import species_of_rows
from megafold.pipeline.msa.stockholm import MAGIC, parse_stockholm
from megafold.pipeline.msa.text import AlignmentText, read_text
from megafold.pipeline.schema import GAP, MolType

_PAIRING_NAME = re.compile(r"(?<![a-z])(uniprot|pairing|paired)(?![a-z])")
_UNPAIRED_NAME = re.compile(r"(?<![a-z])(non|un|not)[-_]?pair")


@dataclass(frozen=True, kw_only=True)
class Source:
    """The rows one file gives a chain, without the query.

    ``codes`` uint8 [N_row, N_residue]; ``insertions`` number the same rows; ``species`` holds one name a
    row, '' for none. ``n_rows`` counts the file's rows before duplicates and rows without residues
    (``n_empty``) were removed.
    """

    name: str
    digest: str
    n_rows: int
    n_empty: int
    codes: NDArray[np.uint8]
    insertions: Insertions
    species: list[str]


def is_pairing_source(name: str) -> bool:
    """Whether a file is named as one that rows are paired from: ``uniprot…``, ``pairing…``, ``paired…``.

    >>> [is_pairing_source(n) for n in ("uniprot_hits.sto", "pairing.a3m", "non_pairing.a3m", "1.a3m")]
    [True, True, False, False]
    """
    name = name.lower()
    return bool(_PAIRING_NAME.search(name)) and not _UNPAIRED_NAME.search(name)


def parse_alignment(text: AlignmentText, alphabet: Alphabet) -> list[Alignment]:
    """Parse a file as what its content says it is: Stockholm, or A3M and A2M.

    Raises:
        AlignmentError: the file is none of these, or broken.
    """
    start = text.data.lstrip() if text.data[:1].isspace() else text.data
    if start.startswith(MAGIC):
        return parse_stockholm(text.data, alphabet, text.name)
    return parse_a3m(text.data, alphabet, text.name)


def load_source(path: Path, sequence: str, mol_type: MolType) -> Source:
    """Read a file and fit it to a chain.

    Where a file holds several alignments, those whose query is the chain's sequence count.

    Raises:
        AlignmentError: the file is broken, or no alignment in it has the chain's sequence as its query
            (``query-mismatch``).
    """
    alphabet = Alphabet.of(mol_type)
    return fit_source(read_text(path), sequence, alphabet, str(path))


def fit_source(text: AlignmentText, sequence: str, alphabet: Alphabet, path: str) -> Source:
    """As :func:`load_source`, for a file that is in memory; ``path`` is for messages."""
    name, digest = text.name, text.digest
    try:
        alignments = parse_alignment(text, alphabet)
    except AlignmentError as error:
        raise AlignmentError(f"{path}: {error}", reason=error.reason) from None
    del text  # a deep file is large: what follows needs its rows alone
    fitted = _fit(alignments, sequence, alphabet, path)
    parts = [_distinct_rows(alignment, _row_species(alignment, paired, name)) for alignment, paired in fitted]
    first = np.cumsum([0, *(len(part.codes) for part in parts)]).astype(np.int32)
    return Source(
        name=name,
        digest=digest,
        n_rows=sum(len(alignment.headers) - 1 for alignment, _ in fitted),
        n_empty=sum(part.n_empty for part in parts),
        codes=parts[0].codes if len(parts) == 1 else np.concatenate([part.codes for part in parts]),
        insertions=Insertions(
            row=np.concatenate([part.insertions.row + first[k] for k, part in enumerate(parts)]),
            column=np.concatenate([part.insertions.column for part in parts]),
            count=np.concatenate([part.insertions.count for part in parts]),
        ),
        species=[item for part in parts for item in part.species],
    )


def _mismatch(query: str, sequence: str, alphabet: Alphabet) -> str:
    """Why an alignment's query is not the chain's sequence, '' where it is. Unknown letters match any."""
    if len(query) != len(sequence):
        return f"its query has {len(query)} residues, the chain has {len(sequence)}"
    ours, theirs = alphabet.encode(sequence), alphabet.encode(query)
    differs = (ours != theirs) & (ours != alphabet.unknown) & (theirs != alphabet.unknown)
    if not differs.any():
        return ""
    position = int(np.flatnonzero(differs)[0])
    return f"its query has {query[position]} at residue {position + 1}, the chain has {sequence[position]}"


def _fit(
    alignments: list[Alignment], sequence: str, alphabet: Alphabet, path: str
) -> list[tuple[Alignment, NDArray[np.bool_] | None]]:
    """The alignments of the chain, each with which of its rows pair it to other chains (if it can tell)."""
    fitted: list[tuple[Alignment, NDArray[np.bool_] | None]] = []
    for alignment in alignments:
        if not _mismatch(alignment.query, sequence, alphabet):
            fitted.append((alignment, None))
            continue
        for start, stop in alignment.segments:
            if not _mismatch(alignment.query[start:stop], sequence, alphabet):
                present = [(alignment.codes[:, a:b] != GAP).any(axis=1) for a, b in alignment.segments]
                paired = np.sum(present, axis=0) > 1
                fitted.append((crop_columns(alignment, start, stop), paired))
                break
    if not fitted:
        why = _mismatch(alignments[0].query, sequence, alphabet)
        raise AlignmentError(
            f"{path}: {why}; search again with the chain's sequence, or remove the file",
            reason="query-mismatch",
        )
    return fitted


def _row_species(alignment: Alignment, paired: NDArray[np.bool_] | None, name: str) -> list[str]:
    """Species of the rows. Files that pair chains row by row (ColabFold) give the row's number instead."""
    species = species_of_rows(alignment.headers)
    species[0] = ""
    if any(species):
        return species
    if paired is None and is_pairing_source(name):
        paired = np.ones(len(species), bool)
    if paired is not None:
        species[1:] = [f"row:{row}" if paired[row] else "" for row in range(1, len(species))]
    return species


@dataclass(frozen=True, kw_only=True)
class _Distinct:
    codes: NDArray[np.uint8]
    insertions: Insertions
    species: list[str]
    n_empty: int


def _distinct_rows(alignment: Alignment, species: list[str]) -> _Distinct:
    """Drop the query, rows without residues, and rows that equal an earlier one of the same species.

    Equal rows of different species stay: each can pair with rows of its own species.
    """
    codes = np.ascontiguousarray(alignment.codes)
    n_row, width = codes.shape
    empty = (codes == GAP).all(axis=1)
    text = codes.tobytes()
    first_species: dict[bytes, str] = {text[:width]: ""}
    others: set[tuple[bytes, str]] = set()
    kept = np.zeros(n_row, bool)
    for row in (np.flatnonzero(~empty[1:]) + 1).tolist():
        residues, name = text[row * width : (row + 1) * width], species[row]
        known = first_species.get(residues)
        if known is None:
            first_species[residues] = name
        elif known == name or (residues, name) in others:
            continue
        else:
            others.add((residues, name))
        kept[row] = True
    del text, first_species, others
    new_row = (np.cumsum(kept) - 1).astype(np.int32)
    inserted = alignment.insertions
    inside = kept[inserted.row]
    return _Distinct(
        codes=codes[kept],
        insertions=Insertions(
            row=new_row[inserted.row[inside]],
            column=inserted.column[inside],
            count=inserted.count[inside],
        ),
        species=[species[row] for row in np.flatnonzero(kept)],
        n_empty=int(empty.sum()),
    )
