"""From the alignment files of one chain to its ``msa`` object (AF3 SI 2.2, 2.3, table 5)."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megafold.cache_store import Content
from megafold.pipeline.content import make_content
from megafold.pipeline.errors import AlignmentError
from megafold.pipeline.msa.alignment import Insertions
from megafold.pipeline.msa.alphabet import Alphabet
from megafold.pipeline.msa.source import Source, load_source
from megafold.pipeline.msa.species import RowSpecies
from megafold.pipeline.msa.text import plain_name
from megafold.pipeline.schema import GAP, MSA, N_RESTYPE, MolType

VERSION: Final = 3
_MAX_DELETION: Final = 255
_ROW_BLOCK: Final = 1024
_RESIDUE_BLOCK: Final = 16  #: at most 255: sums over a block fit uint8, which NumPy adds fastest
_MIN_PAIRED_ROWS: Final = 8192


@dataclass(frozen=True, kw_only=True)
class MsaResult:
    """What the files of a chain gave: the object of the good ones, and why the others are not in it.

    ``content`` is None where no file was good: such a chain has no MSA, never a made-up one.
    """

    content: Content | None
    failures: tuple[AlignmentError, ...]


def featurize_msa(sequence: str, mol_type: MolType, files: Sequence[Path]) -> MsaResult:
    """Make the ``msa`` object of a chain.

    Row 0 is ``sequence``; then the rows of each file, in the order of the files' names. A file's own query
    row is dropped, since it is row 0. Duplicates are removed within a file, never across files: rows
    with the same residues and the same species. Rows without any residue are dropped and counted in a
    warning; two files with the same bytes count once, with a warning.

    Args:
        sequence: canonical one-letter sequence over the full SEQRES.
        mol_type: protein, RNA or DNA: which alphabet the letters belong to.
        files: A3M, A2M or Stockholm files, plain, gzip or Zstandard.

    Returns:
        The object (schema ``msa``) and the failures of files that are broken or whose query is not
        ``sequence`` (``X`` and its like match anything).
    """
    sources, failures, warnings = _load_sources(sequence, mol_type, files)
    content = _assemble(sequence, mol_type, sources, sorted(warnings)) if sources else None
    return MsaResult(content=content, failures=tuple(failures))


def _load_sources(
    sequence: str, mol_type: MolType, files: Sequence[Path]
) -> tuple[list[Source], list[AlignmentError], list[str]]:
    """The good files by name, why the others are not good, and what to tell a user about the good ones."""
    sources: list[Source] = []
    failures: list[AlignmentError] = []
    warnings: list[str] = []
    # By name, so that nothing depends on the order the files were found in.
    for path in sorted(files, key=lambda path: (plain_name(path), path)):
        try:
            source = load_source(path, sequence, mol_type)
        except AlignmentError as error:
            failures.append(error)
            continue
        twin = next((other.name for other in sources if other.digest == source.digest), None)
        if twin is not None:
            warnings.append(f"{source.name}: the same bytes as {twin}, counted once")
            continue
        sources.append(source)
    sources.sort(key=lambda source: (source.name, source.digest))
    warnings += [
        f"{source.name}: {source.n_empty} rows without residues dropped"
        for source in sources
        if source.n_empty
    ]
    return sources, failures, warnings


def _assemble(sequence: str, mol_type: MolType, sources: list[Source], warnings: list[str]) -> Content:
    query = Alphabet.of(mol_type).encode(sequence)
    n_kept = [source.n_kept for source in sources]
    names, species = _merge_species([source.species for source in sources])
    listed = [
        {"name": source.name, "digest": source.digest, "rows": source.n_rows, "kept": source.n_kept}
        for source in sources
    ]
    msa, deletion, deletion_sum = _stack(query, sources)
    n_row = msa.shape[1]
    identity, coverage = _similarity(msa, query, Alphabet.of(mol_type).unknown)
    rows: dict[str, NDArray[Any]] = {
        "source": np.repeat(np.arange(-1, len(n_kept)), [1, *n_kept]),
        "species": species,
        "identity": identity,
        "coverage": coverage,
    }
    arrays = {
        "msa": msa.view(np.int8),
        "deletion": deletion,
        "profile": (_class_counts(msa) / n_row).astype(np.float16),
        "deletion_mean": (deletion_sum / n_row).astype(np.float32),
        "rows": MSA.table("rows").pack(rows),
    }
    attributes = {
        "kind": "msa",
        "version": VERSION,
        "mol_type": mol_type.name.lower(),
        "sequence": sequence,
        "sources": listed,
        "species": names,
        "warnings": warnings,
    }
    return make_content("msa", arrays, attributes)


def _merge_species(sources: list[RowSpecies]) -> tuple[list[str], NDArray[np.int32]]:
    """All species in use, sorted, and the species of each row, the query's first; -1 for none."""
    used = [np.unique(source.index[source.index >= 0]) for source in sources]
    pairs = list(zip(sources, used, strict=True))
    names = sorted({source.names[index] for source, of in pairs for index in of.tolist()})
    position = {name: index for index, name in enumerate(names)}
    merged = [np.array([-1], np.int32)]
    for source, of in pairs:
        place = np.full(len(source.names) + 1, -1, np.int32)
        place[of] = [position[source.names[index]] for index in of.tolist()]
        merged.append(place[source.index])
    return names, np.concatenate(merged)


def _stack(
    query: NDArray[np.uint8], sources: list[Source]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.float64]]:
    """All rows residue-major, their clipped deletions, and the unclipped deletions summed over rows.

    Empties ``sources`` as it goes, so that the rows are not in memory twice.
    """
    n_residue, n_row = len(query), 1 + sum(source.n_kept for source in sources)
    msa = np.empty((n_residue, n_row), np.uint8)
    msa[:, 0] = query
    insertions: list[tuple[int, Insertions]] = []
    first = 1
    while sources:
        for part in sources.pop(0).parts:
            for start in range(0, len(part.row), _ROW_BLOCK):
                block = part.codes[part.row[start : start + _ROW_BLOCK]]
                msa[:, first + start : first + start + len(block)] = block.T
            insertions.append((first, part.insertions))
            first += len(part.row)
        del part
    deletion = np.zeros((n_residue, n_row), np.uint8)
    deletion_sum = np.zeros(n_residue)
    for first, inserted in insertions:
        deletion[inserted.column, first + inserted.row] = np.minimum(inserted.count, _MAX_DELETION)
        deletion_sum += np.bincount(inserted.column, weights=inserted.count, minlength=n_residue)
    return msa, deletion, deletion_sum


def _class_counts(msa: NDArray[np.uint8]) -> NDArray[np.int64]:
    """How often each class occurs at each residue, int64 [N_residue, 32]."""
    n_row = msa.shape[1]
    n_single = n_row if n_row < _MIN_PAIRED_ROWS else n_row % 2
    counts = np.empty((len(msa), N_RESTYPE), np.int64)
    for residue, column in enumerate(msa):
        counts[residue] = np.bincount(column[:n_single], minlength=N_RESTYPE)
        if n_single < n_row:
            # Two rows at a time, as one number: half as many to count.
            pairs = column[n_single:].copy().view(np.uint16)
            table = np.bincount(pairs, minlength=N_RESTYPE << 8).reshape(N_RESTYPE, -1)[:, :N_RESTYPE]
            counts[residue] += table.sum(axis=0) + table.sum(axis=1)
    return counts


def _similarity(
    msa: NDArray[np.uint8], query: NDArray[np.uint8], unknown: int
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Identity over aligned columns and coverage of each row, rounded per mille.

    An unknown residue of the query equals nothing.
    """
    aligned = np.zeros(msa.shape[1], np.int64)
    equal = np.zeros(msa.shape[1], np.int64)
    for start in range(0, len(msa), _RESIDUE_BLOCK):
        block, letters = msa[start : start + _RESIDUE_BLOCK], query[start : start + _RESIDUE_BLOCK, None]
        aligned += (block != GAP).view(np.uint8).sum(axis=0, dtype=np.uint8)
        known = letters[:, 0] != unknown
        same = block[known] == letters[known]
        equal += same.view(np.uint8).sum(axis=0, dtype=np.uint8)
    identity = (1000 * equal + aligned // 2) // np.maximum(aligned, 1)
    coverage = (1000 * aligned + len(msa) // 2) // len(msa)
    return identity, coverage
