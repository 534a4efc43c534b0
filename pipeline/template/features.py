"""From the hit files of one chain to its ``template`` object (AF3 SI 2.4, table 5).

All hits that parse and whose residues are in their structure are stored, in the order of the files. Which of
them a sample sees, by date, entry, identity and length, is the stream's choice.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megafold.cache_store import Content
from megafold.pipeline.content import make_content
from megafold.pipeline.errors import AlignmentError, TemplateError
from megafold.pipeline.msa.alphabet import Alphabet
from megafold.pipeline.msa.text import AlignmentText, read_text
from megafold.pipeline.schema import GAP, TEMPLATE, MolType
from megafold.pipeline.template.hit import Hit, HitList, NumberedHit, Skipped
from megafold.pipeline.template.hits import parse_hits
from megafold.pipeline.template.placing import place
from megafold.pipeline.template.structures import TemplateStructures

VERSION: Final = 3
#: A hit of fewer residues gives no frame-to-frame geometry worth a row.
MIN_ALIGNED: Final = 4


@dataclass(frozen=True, kw_only=True)
class TemplateResult:
    """What the hit files of a chain gave.

    ``content`` is None where no file could be read; a file whose hits were all skipped gives an object
    without hits, whose attributes count why. ``failures`` are hit files, and structure files of hits,
    that cannot be used.
    """

    content: Content | None
    failures: tuple[TemplateError, ...]


@dataclass(frozen=True, kw_only=True)
class _Template:
    """One usable hit: the schema's columns and arrays for it."""

    entry: str
    chain: str
    release_date: str | None
    columns: dict[str, int]
    restype: NDArray[np.int8]
    atom_pos: NDArray[np.float32]
    is_realigned: bool


def featurize_templates(
    sequence: str, hit_files: Sequence[Path], structures: TemplateStructures
) -> TemplateResult:
    """Make the ``template`` object of a protein chain.

    Reasons in ``skipped``: ``unsupported-hit-format`` (a whole file), ``no-chain-id`` (the name is no PDB
    chain), ``too-short`` (fewer than 4 aligned residues), ``no-structure``, ``unreadable`` (just now),
    ``unreadable-structure``, ``chain-not-found`` (no such protein chain in the entry), ``sequence-mismatch``
    (the hit's residues are not in the chain's sequence, or the query is not as alike to it as an M8 line
    says), ``other-query`` (an M8 line of another query), ``bad-range`` (an M8 line whose numbers cannot be),
    ``too-long-to-align``.
    Warnings name unsupported files, unreadable entries and how many hits were aligned again; they hold no
    path, for objects must not depend on where files lie.

    Two files with the same bytes count once, with a warning.

    Args:
        sequence: the query's canonical one-letter sequence over the full SEQRES.
        hit_files: hmmsearch Stockholm, HHR, A3M or M8 files, plain, gzip or Zstandard.
        structures: where the hits' entries are looked up.
    """
    texts: list[tuple[AlignmentText, Path]] = []
    failures: list[TemplateError] = []
    for path in hit_files:
        try:
            texts.append((read_text(path), path))
        except AlignmentError as error:
            failures.append(TemplateError(str(error), reason=error.reason))
    templates: list[_Template] = []
    listed: list[dict[str, str | int]] = []
    skipped: Counter[str] = Counter()
    warnings: list[str] = []
    unreadable: dict[str, TemplateError] = {}
    for text, path in sorted(texts, key=lambda item: (item[0].name, item[0].digest)):
        twin = next((source["name"] for source in listed if source["digest"] == text.digest), None)
        if twin is not None:
            warnings.append(f"{text.name}: the same bytes as {twin}, counted once")
            continue
        try:
            found = parse_hits(text, sequence)
        except TemplateError as error:
            failures.append(TemplateError(f"{path}: {error}", reason=error.reason))
            continue
        warnings += found.warnings
        kept = _use_hits(found, sequence, structures, skipped, unreadable)
        n_realigned = sum(template.is_realigned for template in kept)
        if n_realigned:
            warnings.append(f"{text.name}: {n_realigned} hits aligned to their structures' sequences here")
        listed.append({"name": text.name, "digest": text.digest, "hits": len(found.items), "kept": len(kept)})
        templates += kept
    if not listed:
        return TemplateResult(content=None, failures=tuple(failures))
    warnings += [f"{entry}: its structure file cannot be read" for entry in unreadable]
    failures += unreadable.values()
    content = _assemble(sequence, templates, listed, skipped, sorted(warnings))
    return TemplateResult(content=content, failures=tuple(failures))


def _use_hits(
    found: HitList,
    sequence: str,
    structures: TemplateStructures,
    skipped: Counter[str],
    unreadable: dict[str, TemplateError],
) -> list[_Template]:
    """The hits that can be used; counts the others in ``skipped``, keeps why an entry is ``unreadable``."""
    used = []
    for hit in found.items:
        if isinstance(hit, Skipped):
            skipped[hit.reason] += 1
            continue
        try:
            used.append(_template(hit, sequence, structures))
        except TemplateError as error:
            skipped[error.reason] += 1
            if error.reason in ("unreadable", "unreadable-structure"):
                unreadable[hit.entry] = error
    return used


def _template(hit: Hit | NumberedHit, sequence: str, structures: TemplateStructures) -> _Template:
    """Raises TemplateError with the reason the hit is skipped for."""
    _check_length(hit, len(hit.query_index) if isinstance(hit, Hit) else hit.n_aligned)
    entry = structures.load(hit.entry)
    if entry is None:
        raise TemplateError(f"{hit.entry}: no structure of this entry", reason="no-structure")
    placed = place(hit, sequence, entry)
    chain, query_index, index = placed.chain, placed.query_index, placed.chain_index
    n_aligned = len(query_index)
    _check_length(hit, n_aligned)
    alphabet = Alphabet.of(MolType.PROTEIN)
    residues = alphabet.encode(chain.sequence)[index]
    query = alphabet.encode(sequence)[query_index]
    restype = np.full(len(sequence), GAP, np.int8)
    restype[query_index] = residues
    atom_pos = np.full((len(sequence), *chain.atom_pos.shape[1:]), np.nan, np.float32)
    atom_pos[query_index] = chain.atom_pos[index]
    n_equal = int(((residues == query) & (query != alphabet.unknown)).sum())
    return _Template(
        entry=hit.entry,
        chain=hit.chain,
        release_date=entry.release_date,
        columns={
            "identity": (1000 * n_equal + n_aligned // 2) // n_aligned,
            "coverage": (1000 * n_aligned + len(sequence) // 2) // len(sequence),
            "aligned": n_aligned,
            "first": int(query_index[0]),
            "last": int(query_index[-1]),
        },
        restype=restype,
        atom_pos=atom_pos,
        is_realigned=placed.is_realigned,
    )


def _check_length(hit: Hit | NumberedHit, n_aligned: int) -> None:
    if n_aligned < MIN_ALIGNED:
        raise TemplateError(f"{hit.entry}_{hit.chain}: {n_aligned} aligned residues", reason="too-short")


def _assemble(
    sequence: str,
    templates: list[_Template],
    listed: list[dict[str, str | int]],
    skipped: Counter[str],
    warnings: list[str],
) -> Content:
    n_hit, n_residue = len(templates), len(sequence)
    restype = np.empty((n_hit, n_residue), np.int8)
    atom_pos = np.empty((n_hit, n_residue, 4, 3), np.float32)
    for index, template in enumerate(templates):
        restype[index], atom_pos[index] = template.restype, template.atom_pos
    table = TEMPLATE.table("hits")
    columns = {
        name: np.array([template.columns[name] for template in templates], np.int64)
        for name in table.column_names
    }
    attributes = {
        "kind": "template",
        "version": VERSION,
        "sequence": sequence,
        "sources": listed,
        "hits": {
            "entry": [template.entry for template in templates],
            "chain": [template.chain for template in templates],
            "release_date": [template.release_date for template in templates],
        },
        "skipped": dict(sorted(skipped.items())),
        "warnings": warnings,
    }
    arrays = {"hits": table.pack(columns), "template_restype": restype, "template_atom_pos": atom_pos}
    return make_content("template", arrays, attributes)
