"""Template hits as hhsearch and hhblits list them: HHR, pairwise alignments in blocks of lines."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from megafold.pipeline.errors import TemplateError
from megafold.pipeline.template.hit import GAPS, Hit, HitList, Skipped, chain_of, query_mismatch, same_letters


@dataclass(kw_only=True)
class _HhrHit:
    """The lines of one HHR hit, joined over its blocks. Starts are 1-based as in the file, 0 for none."""

    title: str
    query_start: int = 0
    query: str = ""
    template_start: int = 0
    template: str = ""


def read_hhr_hits(data: bytes, sequence: str, name: str) -> HitList:
    """Read a hit list.

    Raises:
        TemplateError: the file is broken, or was searched with another query (``query-mismatch``).
    """
    lines = data.decode("utf-8", "replace").splitlines()
    for number, line in enumerate(lines, 1):
        if line.startswith("Match_columns"):
            words = line.split()
            if len(words) < 2 or not words[1].isdecimal():
                raise _bad_line(name, number, "does not say how many columns the query has")
            length = int(words[1])
            if length != len(sequence):
                raise query_mismatch(
                    name, f"its query has {length} columns, the chain has {len(sequence)} residues"
                )
            break
    return HitList(items=tuple(_finish_hhr(item, sequence, name) for item in _collect_hhr(lines, name)))


def hhr_names(data: bytes) -> list[bytes]:
    """The hits' names."""
    lines = data.split(b"\n")
    return [line[1:].split(None, 1)[0] for line in lines if line.startswith(b">") and line[1:].strip()]


def _bad_line(name: str, number: int, what: str) -> TemplateError:
    return TemplateError(f"{name}: line {number} {what}; make the file again", reason="bad-line")


def _collect_hhr(lines: list[str], name: str) -> Iterator[_HhrHit]:
    """Join the alignment lines of each hit. Consensus, secondary structure and confidence are skipped."""
    current: _HhrHit | None = None
    for number, line in enumerate(lines, 1):
        if line.startswith(">"):
            if current is not None:
                yield current
            current = _HhrHit(title=line[1:].strip())
        elif current is not None and line.startswith(("Q ", "T ")):
            words = line.split()
            if len(words) < 5 or words[1] == "Consensus" or words[1].startswith("ss_"):
                continue
            if not (words[2].isdecimal() and words[4].isdecimal()):
                raise _bad_line(name, number, "is not an alignment line of an HHR file")
            if words[0] == "Q":
                current.query_start = current.query_start or int(words[2])
                current.query += words[3]
            else:
                current.template_start = current.template_start or int(words[2])
                current.template += words[3]
    if current is not None:
        yield current


def _finish_hhr(item: _HhrHit, sequence: str, name: str) -> Hit | Skipped:
    if not item.query or len(item.query) != len(item.template):
        raise TemplateError(
            f"{name}: hit {item.title[:20]!r} aligns {len(item.query)} columns of the query with "
            f"{len(item.template)} of the template; the file is cut off, make it again",
            reason="row-length",
        )
    query = np.frombuffer(item.query.encode("ascii", "replace"), np.uint8)
    template = np.frombuffer(item.template.encode("ascii", "replace"), np.uint8)
    gaps = np.frombuffer(GAPS, np.uint8)
    in_query, in_template = ~np.isin(query, gaps), ~np.isin(template, gaps)
    letters = query[in_query].tobytes().decode("ascii").upper()
    stretch = sequence[item.query_start - 1 :][: len(letters)].ljust(len(letters), "?")
    if not same_letters(letters, stretch):
        theirs, ours, at = next(
            (a, b, at)
            for at, (a, b) in enumerate(zip(letters, stretch, strict=True), item.query_start)
            if a != b and "X" not in (a, b)
        )
        raise query_mismatch(name, f"its query has {theirs} at residue {at}, the chain has {ours}")
    chain = chain_of(item.title.split(None, 1)[0] if item.title else "")
    if isinstance(chain, Skipped):
        return chain
    aligned = in_query & in_template
    query_index = np.cumsum(in_query, dtype=np.int32) - 1 + (item.query_start - 1)
    hit_index = np.cumsum(in_template, dtype=np.int32) - 1
    return Hit(
        entry=chain[0],
        chain=chain[1],
        start=item.template_start - 1,
        sequence=template[in_template].tobytes().decode("ascii", "replace").upper(),
        query_index=query_index[aligned].astype(np.int32),
        hit_index=hit_index[aligned],
    )
