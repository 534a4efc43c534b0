"""Reads a hit list, whatever search program wrote it: the formats, told apart by their first bytes."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from megafold.pipeline.errors import AlignmentError, TemplateError
from megafold.pipeline.msa.stockholm import MAGIC
from megafold.pipeline.msa.text import AlignmentText, read_text
from megafold.pipeline.template.a3m_hits import a3m_names, read_a3m_hits
from megafold.pipeline.template.hhr_hits import hhr_names, read_hhr_hits
from megafold.pipeline.template.hit import HitList, HitRow, Skipped, chain_of
from megafold.pipeline.template.m8_hits import M8_LINE, m8_names, read_m8_hits
from megafold.pipeline.template.stockholm_hits import read_stockholm_hits, stockholm_names


@dataclass(frozen=True, kw_only=True)
class _Format:
    """A hit list format.

    ``start`` matches its first bytes that are no blanks. ``read`` takes the text, the query's sequence
    and the file's name; ``names`` the text alone, and gives the hits' names as the file writes them.
    """

    start: re.Pattern[bytes]
    read: Callable[[bytes, str, str], HitList]
    names: Callable[[bytes], list[bytes]]


_FORMATS: Final = (
    _Format(start=re.compile(re.escape(MAGIC)), read=read_stockholm_hits, names=stockholm_names),
    _Format(start=re.compile(rb"Query "), read=read_hhr_hits, names=hhr_names),
    _Format(start=re.compile(rb"(?:[#;][^\n]*\n\s*)*>"), read=read_a3m_hits, names=a3m_names),
    _Format(start=M8_LINE, read=read_m8_hits, names=m8_names),
)


def _format_of(data: bytes) -> _Format | None:
    return next((form for form in _FORMATS if form.start.match(data)), None)


def parse_hits(text: AlignmentText, sequence: str) -> HitList:
    """Parse a hit file.

    An empty file names no hits: so do searches that found nothing. A file of no known format gives one
    ``unsupported-hit-format``.

    Args:
        text: the file.
        sequence: the query's canonical one-letter sequence.

    Raises:
        TemplateError: the file is broken, or was searched with another query (``query-mismatch``).
    """
    data = text.data.lstrip()
    if not data:
        return HitList(items=())
    form = _format_of(data)
    if form is not None:
        return form.read(data, sequence, text.name)
    return HitList(
        items=(Skipped(reason="unsupported-hit-format"),),
        warnings=(f"{text.name}: neither Stockholm, HHR, A3M nor M8 (BLAST tabular), not read",),
    )


def hit_entries(path: Path) -> frozenset[str]:
    """The entries a hit file names, lower case: whose structures its template object is made from.

    Raises:
        TemplateError: the file cannot be read.
    """
    try:
        data = read_text(path).data.lstrip()
    except AlignmentError as error:
        raise TemplateError(str(error), reason=error.reason) from None
    form = _format_of(data)
    names = set() if form is None else set(form.names(data))
    chains = [chain_of(HitRow.name_of(name.decode("utf-8", "replace"))) for name in names]
    return frozenset(chain[0] for chain in chains if not isinstance(chain, Skipped))
