"""One alignment file, fitted to a chain: its rows over the chain's residues, duplicates removed."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.errors import AlignmentError
from megafold.pipeline.msa import keyed_csv
from megafold.pipeline.msa.a3m import parse_a3m
from megafold.pipeline.msa.alignment import Alignment, crop_columns
from megafold.pipeline.msa.alphabet import Alphabet
from megafold.pipeline.msa.distinct import DistinctRows, distinct_rows
from megafold.pipeline.msa.species import RowSpecies, species_of_rows
from megafold.pipeline.msa.stockholm import MAGIC, parse_stockholm
from megafold.pipeline.msa.text import AlignmentText, read_text
from megafold.pipeline.schema import GAP, MolType

_PAIRING_NAME = re.compile(r"(?<![a-z])(uniprot|pairing|paired)(?![a-z])")
_HEAD_BYTES: Final = 1024
_AMBIGUOUS: Final = str.maketrans("BZ", "XX")
_UNPAIRED_NAME = re.compile(r"(?<![a-z])(non|un|not)[-_]?pair")


@dataclass(frozen=True, kw_only=True)
class Source:
    """The rows one file gives a chain, without the query.

    ``parts`` are those of its alignments that are the chain's, most often one. ``species`` names all rows
    of all parts. ``n_rows`` counts the file's rows before duplicates and rows without residues (``n_empty``)
    were removed.
    """

    name: str
    digest: str
    n_rows: int
    n_empty: int
    parts: tuple[DistinctRows, ...]
    species: RowSpecies

    @property
    def n_kept(self) -> int:
        """How many rows are left."""
        return len(self.species.index)


def is_pairing_source(name: str) -> bool:
    """Whether a file is named as one that rows are paired from: ``uniprot…``, ``pairing…``, ``paired…``.

    >>> [is_pairing_source(n) for n in ("uniprot_hits.sto", "pairing.a3m", "non_pairing.a3m", "1.a3m")]
    [True, True, False, False]
    """
    name = name.lower()
    return bool(_PAIRING_NAME.search(name)) and not _UNPAIRED_NAME.search(name)


@dataclass(frozen=True, kw_only=True)
class _Format:
    """``start`` matches a file's first bytes that are no blanks; ``parse`` takes text, alphabet and name."""

    start: re.Pattern[bytes]
    parse: Callable[[bytes, Alphabet, str], list[Alignment]]


#: The first that matches is taken; A3M and A2M, whose parser says what is amiss, is for everything else.
_FORMATS: Final = (
    _Format(start=re.compile(re.escape(MAGIC)), parse=parse_stockholm),
    _Format(start=keyed_csv.MAGIC, parse=keyed_csv.parse_keyed_csv),
    _Format(start=re.compile(b""), parse=parse_a3m),
)


def parse_alignment(text: AlignmentText, alphabet: Alphabet) -> list[Alignment]:
    """Parse a file as what its content says it is: Stockholm, CSV with keys, or A3M and A2M.

    Raises:
        AlignmentError: the file is none of these, or broken.
    """
    head = text.data[:_HEAD_BYTES] if text.data[:1].strip() else text.data.lstrip()[:_HEAD_BYTES]
    return next(form for form in _FORMATS if form.start.match(head)).parse(text.data, alphabet, text.name)


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
    del alignments
    n_rows = sum(len(alignment.headers) - 1 for alignment, _ in fitted)
    named = [(alignment, _row_species(alignment, paired, name)) for alignment, paired in fitted]
    # With the headers goes the file's text.
    bare = [(replace(alignment, headers=()), species) for alignment, species in named]
    del fitted, named
    parts = []
    while bare:
        parts.append(distinct_rows(*bare.pop(0)))
    names = [[*part.species.names, ""] for part in parts]
    rows = [of[k] for part, of in zip(parts, names, strict=True) for k in part.species.index.tolist()]
    return Source(
        name=name,
        digest=digest,
        n_rows=n_rows,
        n_empty=sum(part.n_empty for part in parts),
        parts=tuple(parts),
        species=parts[0].species if len(parts) == 1 else RowSpecies.of(rows, len(rows)),
    )


def _mismatch(query: str, sequence: str, alphabet: Alphabet) -> str:
    """Why an alignment's query is not the chain's sequence, '' where it is. X, B, Z and such match any."""
    if len(query) != len(sequence):
        return f"its query has {len(query)} residues, the chain has {len(sequence)}"
    ours, theirs = (alphabet.encode(letters.upper().translate(_AMBIGUOUS)) for letters in (sequence, query))
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


def _row_species(alignment: Alignment, paired: NDArray[np.bool_] | None, name: str) -> RowSpecies:
    """Species of the rows. Files that pair chains row by row (ColabFold) give the row's number instead."""
    n_row = len(alignment.headers)
    if alignment.keys:
        keys = (f"key:{key.decode('utf-8', 'replace')}" if key else "" for key in alignment.keys[1:])
        return RowSpecies.of(chain([""], keys), n_row)
    species = species_of_rows(alignment.headers)
    species.index[0] = -1
    if (species.index >= 0).any():
        return species
    if paired is None and is_pairing_source(name):
        paired = np.ones(n_row, bool)
    if paired is None:
        return species
    return RowSpecies.of(("" if row == 0 or not paired[row] else f"row:{row}" for row in range(n_row)), n_row)
