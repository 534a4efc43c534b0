"""Stockholm alignments whose first row is the query (jackhmmer, nhmmer, hhblits, Rfam and Pfam seeds).

Columns where the query has a residue are kept; what other rows hold elsewhere are insertions. Blocks may be
interleaved. ``#=GS … DE`` descriptions join the row's header, other annotation is skipped.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

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

    def text(self, name: str) -> tuple[list[bytes], NDArray[np.uint8]]:
        """Row names and the characters, uint8 [N_row, N_column].

        Raises:
            AlignmentError: a row of another length (``row-length``).
        """
        rows = [b"".join(chunks) for chunks in self.rows.values()]
        names = list(self.rows)
        width = len(rows[0])
        for label, row in zip(names, rows, strict=True):
            if len(row) != width:
                raise AlignmentError(
                    f"{name}: row {label.decode('utf-8', 'replace')} has {len(row)} columns where the first "
                    f"row has {width}; the file is cut off or a name occurs twice, make it again",
                    reason="row-length",
                )
        return names, np.frombuffer(b"".join(rows), np.uint8).reshape(len(rows), width)


def read_blocks(data: bytes, name: str) -> list[StockholmBlock]:
    """Split a Stockholm text into its alignments.

    Raises:
        AlignmentError: no alignment in it (``no-records``) or a line that is none (``bad-line``).
    """
    blocks, block = [], StockholmBlock()
    for number, line in enumerate(data.split(b"\n"), 1):
        if not line or line == b"\r":
            continue
        if line.startswith(b"#"):
            _read_annotation(line, block)
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


def _read_annotation(line: bytes, block: StockholmBlock) -> None:
    if line.startswith(b"#=GS "):
        words = line.split(None, 3)
        if len(words) == 4 and words[2] == b"DE":
            known = block.descriptions.get(words[1])
            text = words[3].rstrip()
            block.descriptions[words[1]] = text if known is None else known + b" " + text
    elif line.startswith(b"#=GC RF "):
        block.reference += line.split()[2]


def parse_stockholm(data: bytes, alphabet: Alphabet, name: str) -> list[Alignment]:
    """Parse all alignments of a Stockholm text; row 0 of each is its query.

    Args:
        data: the whole text.
        alphabet: which classes letters mean.
        name: the file's name, for messages.

    Raises:
        AlignmentError: as :func:`read_blocks` and :meth:`StockholmBlock.text`; ``bad-character`` where a
            row holds something else than letters and gaps; ``bad-query`` where the first row is all gaps.
    """
    return [_parse_block(block, alphabet, name) for block in read_blocks(data, name)]


def _parse_block(block: StockholmBlock, alphabet: Alphabet, name: str) -> Alignment:
    names, text = block.text(name)
    codes = np.frombuffer(text.tobytes().translate(alphabet.columns), np.uint8).reshape(text.shape)
    if codes.max() == INVALID:
        row, column = np.argwhere(codes == INVALID)[0]
        raise AlignmentError(
            f"{name}: row {names[row].decode('utf-8', 'replace')} holds {chr(text[row, column])!r}, "
            "which is no residue",
            reason="bad-character",
        )
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
    query = text[0, keep].tobytes().upper().decode("ascii")
    return Alignment(query=query, headers=headers, codes=kept, insertions=insertions)
