"""Stockholm alignments whose first row is the query (jackhmmer, nhmmer, hhblits, Rfam and Pfam seeds).

Columns where the query has a residue are kept; what other rows hold elsewhere are insertions. Blocks may be
interleaved. ``#=GS … DE`` descriptions join the row's header, other annotation is skipped.
"""

import io
from dataclasses import dataclass, field

import numpy as np

from megafold.pipeline.errors import AlignmentError
from megafold.pipeline.msa.alignment import Alignment, keep_columns
from megafold.pipeline.msa.alphabet import INVALID, Alphabet
from megafold.pipeline.schema import GAP

MAGIC = b"# STOCKHOLM 1."


@dataclass(kw_only=True)
class StockholmBlock:
    """One alignment of a Stockholm file as text.

    ``rows`` maps names, in order, to the aligned text of all blocks; ``descriptions`` names to their
    ``#=GS … DE``; ``reference`` is the ``#=GC RF`` line, empty where there is none.
    """

    rows: dict[bytes, list[bytes]] = field(default_factory=dict)
    descriptions: dict[bytes, bytes] = field(default_factory=dict)
    reference: bytes = b""

    def take_rows(self, name: str) -> tuple[list[bytes], list[bytes]]:
        """Row names and the rows' characters over all columns. The block gives them up: do not ask twice.

        Raises:
            AlignmentError: a row of another length (``row-length``).
        """
        rows = []
        for chunks in self.rows.values():
            rows.append(b"".join(chunks))
            chunks.clear()
        names, width = list(self.rows), len(rows[0])
        for label, row in zip(names, rows, strict=True):
            if len(row) != width:
                raise AlignmentError(
                    f"{name}: row {label.decode('utf-8', 'replace')} has {len(row)} columns where the first "
                    f"row has {width}; the file is cut off or a name occurs twice, make it again",
                    reason="row-length",
                )
        return names, rows


def read_blocks(data: bytes, name: str) -> list[StockholmBlock]:
    """Split a Stockholm text into its alignments.

    Raises:
        AlignmentError: no alignment in it (``no-records``) or a line that is none (``bad-line``).
    """
    blocks, block = [], StockholmBlock()
    for number, line in enumerate(io.BytesIO(data), 1):
        if line.startswith(b"#"):
            _read_annotation(line, block, f"{name}: line {number}")
        elif line.startswith(b"//"):
            blocks.append(block)
            block = StockholmBlock()
        else:
            words = line.split()
            if len(words) == 2:
                block.rows.setdefault(words[0], []).append(words[1])
            elif words:
                raise AlignmentError(
                    f"{name}: line {number} has {len(words)} words where a Stockholm row has a name and an "
                    "aligned sequence",
                    reason="bad-line",
                )
    blocks.append(block)
    blocks = [block for block in blocks if block.rows]
    if not blocks:
        raise AlignmentError(f"{name}: no alignment in it", reason="no-records")
    return blocks


def _read_annotation(line: bytes, block: StockholmBlock, where: str) -> None:
    if line.startswith(b"#=GS "):
        words = line.split(None, 3)
        if len(words) == 4 and words[2] == b"DE":
            known = block.descriptions.get(words[1])
            text = words[3].rstrip()
            block.descriptions[words[1]] = text if known is None else known + b" " + text
    elif line.startswith(b"#=GC RF "):
        words = line.split()
        if len(words) != 3:
            raise AlignmentError(
                f"{where} has {len(words)} words where a #=GC RF line has three; make the file again",
                reason="bad-line",
            )
        block.reference += words[2]


def parse_stockholm(data: bytes, alphabet: Alphabet, name: str) -> list[Alignment]:
    """Parse all alignments of a Stockholm text; row 0 of each is its query.

    Args:
        data: the whole text.
        alphabet: which classes letters mean.
        name: the file's name, for messages.

    Raises:
        AlignmentError: as :func:`read_blocks` and :meth:`StockholmBlock.take_rows`; ``bad-character`` where a
            row holds something else than letters and gaps; ``bad-query`` where the first row is all gaps.
    """
    return [_parse_block(block, alphabet, name) for block in read_blocks(data, name)]


def _parse_block(block: StockholmBlock, alphabet: Alphabet, name: str) -> Alignment:
    names, rows = block.take_rows(name)
    query_row = rows[0]
    valid = bytes(code for code in range(256) if alphabet.columns[code] != INVALID)
    codes = np.empty((len(rows), len(query_row)), np.uint8)
    for index, row in enumerate(rows):
        if invalid := row.translate(None, valid):
            raise AlignmentError(
                f"{name}: row {names[index].decode('utf-8', 'replace')} holds {chr(invalid[0])!r}, "
                "which is no residue",
                reason="bad-character",
            )
        codes[index] = np.frombuffer(row.translate(alphabet.columns), np.uint8)
        rows[index] = b""  # a large alignment must not be in memory twice
    keep = codes[0] != GAP
    if not keep.any():
        raise AlignmentError(
            f"{name}: the first row, {names[0].decode('utf-8', 'replace')}, is all gaps; put the query there",
            reason="bad-query",
        )
    kept, insertions = keep_columns(codes, keep, None)
    headers = [
        label + b" " + block.descriptions[label] if label in block.descriptions else label for label in names
    ]
    query = bytes(code for code, is_kept in zip(query_row, keep, strict=True) if is_kept)
    return Alignment(query=query.upper().decode("ascii"), headers=headers, codes=kept, insertions=insertions)
