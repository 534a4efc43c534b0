"""CSV alignments with the columns ``key`` and ``sequence``, in either order (Boltz' own input format).

``sequence`` is written as in an A3M file, the query first. Rows of two chains that hold the same key pair; an
empty key, ``-1`` or ``nan`` pairs with nothing.
"""

import re
from typing import Final

import numpy as np

from megafold.pipeline.errors import AlignmentError
from megafold.pipeline.msa.a3m import Records, read_records
from megafold.pipeline.msa.alignment import Alignment, TextSlices, positions_of
from megafold.pipeline.msa.alphabet import Alphabet

#: The first line, upon which a file is told to be of this format.
MAGIC: Final = re.compile(rb"\s*\"?(key|sequence)\"?[ \t]*,[ \t]*\"?(key|sequence)\"?[ \t]*\r?(?:\n|$)", re.I)
_NO_KEYS: Final = (b"", b"-1", b"-1.0", b"nan", b"NaN", b"None")


def parse_keyed_csv(data: bytes, alphabet: Alphabet, name: str) -> list[Alignment]:
    """Parse a CSV file, which holds one alignment.

    Args:
        data: the whole text; CRLF line ends, quotes, empty lines and a missing last line end are fine.
        alphabet: which classes letters mean.
        name: the file's name, for messages.

    Raises:
        AlignmentError: a line without a comma (``bad-line``), no rows (``no-records``), or as
            :func:`megafold.pipeline.msa.a3m.parse_a3m`.
    """
    match = MAGIC.match(data)
    columns = [] if match is None else [column.lower() for column in match.groups()]
    if match is None or sorted(columns) != [b"key", b"sequence"]:
        raise AlignmentError(
            f"{name}: its first line is not key,sequence; write the two columns that it names",
            reason="bad-line",
        )
    text = data[match.end() :].replace(b'"', b"")
    buffer = np.frombuffer(text, np.uint8)
    ends = np.append(positions_of(buffer, ord("\n")), len(text))
    starts = np.append(0, ends[:-1] + 1)
    filled = np.array([bool(line.strip()) for line in TextSlices(text, starts, ends)], bool)
    starts, ends = starts[filled], ends[filled]
    if not len(starts):
        raise AlignmentError(
            f"{name}: no alignment in it, no row follows its first line", reason="no-records"
        )
    commas = positions_of(buffer, ord(","))
    first_comma = np.searchsorted(commas, starts)
    counts = np.searchsorted(commas, ends) - first_comma
    if (counts != 1).any():
        row = int(np.flatnonzero(counts != 1)[0])
        raise AlignmentError(
            f"{name}: row {row} has {counts[row] + 1} columns where its first line has 2; the file is "
            "cut off or no alignment",
            reason="bad-line",
        )
    comma = commas[first_comma]
    spans = {columns[0]: (starts, comma), columns[1]: (comma + 1, ends)}
    keys = [key.strip() for key in TextSlices(text, *spans[b"key"])]
    records = Records(
        name=name,
        text=text,
        headers=TextSlices(text, *spans[b"key"]),
        body=spans[b"sequence"][0],
        stop=spans[b"sequence"][1],
    )
    return [read_records(records, alphabet, keys=[b"" if key in _NO_KEYS else key for key in keys])]
