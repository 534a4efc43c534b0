"""Which species a row comes from, read from its header: what rows are paired by across chains.

Header styles, in the order they are tried:

1. a taxonomy id: ``OX=9606`` (UniProt), ``TaxID=9606`` (UniRef), ``UniRef100_A0A2H1A674_498019/`` (pairing
   files of searches over UniRef100 with the id appended);
2. the mnemonic of a UniProt entry name: ``tr|A0A146SKV9|A0A146SKV9_FUNHE``, ``sp|P0C2N4|YSCX_YEREN/64-85``,
   or alone with a range, ``PIM1_HUMAN/38-290`` (Pfam);
3. the mnemonic of a UniRef representative, ``RepID=HBA_PAPAN``, where the header has no taxonomy id;
4. the name in ``Tax=`` or ``OS=``.

HMMER puts a number before names that occur twice: ``01|UniRef100_UPI0019543253_47969//5-72``.

A UniRef cluster's taxonomy id is that of its members' common ancestor. Mnemonics that begin with 9 stand for
a group of organisms; they count, as they do in AlphaFold-Multimer.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.msa.alignment import TextSlices, positions_of

_APPENDED_ID = re.compile(rb"(?:\d+\|)?UniRef\d+_[A-Z0-9-]+_(\d+)(?:/|\s|$)")
_ENTRY_NAME = re.compile(
    rb"(?:[^\s|]+\|)*(?:sp|tr)\|[A-Z0-9]+(?:[-_.]\d+)?\|[A-Z0-9]{1,11}_([A-Z0-9]{1,5})(?![A-Z0-9])"
)
#: A mnemonic has a letter, or numbered contigs would look like entries.
_BARE_ENTRY_NAME = re.compile(rb"(?:\d+\|)?[A-Z0-9]{1,11}_(?=[0-9]{0,4}[A-Z])([A-Z0-9]{3,5})/\d+-\d+")
_REPRESENTATIVE = re.compile(rb"\bRepID=[A-Z0-9]{1,11}_([A-Z0-9]{1,5})(?![A-Z0-9])")
_NAME = re.compile(rb"\b(?:Tax|OS)=(.+?)(?=\s+[A-Za-z]+=|\s*$)")
_ID_TAGS: Final = (b"TaxID=", b"OX=")
_MAX_ID_DIGITS: Final = 9


def species_of(header: bytes) -> str:
    """The species of one header, '' where it names none.

    >>> species_of(b"UniRef90_P63111/2-142 Hemoglobin n=8 Tax=Catarrhini TaxID=9526 RepID=HBA_PAPAN")
    '9526'
    >>> species_of(b"tr|A0A1K0GGD5|A0A1K0GGD5_RAT Globin d1 GN=Glnd1")
    'RAT'
    >>> species_of(b"SRR5579864_7281666")
    ''
    """
    has_tags = b"=" in header
    for tag in _ID_TAGS if has_tags else ():
        if (start := header.find(tag)) >= 0:
            words = header[start + len(tag) :].split(None, 1)
            if words and words[0].isdigit():
                return words[0].decode()
    if b"UniRef" in header and (match := _APPENDED_ID.match(header)):
        return match[1].decode()
    if b"|" in header and (match := _ENTRY_NAME.match(header)):
        return match[1].decode()
    if b"/" in header and (match := _BARE_ENTRY_NAME.match(header)):
        return match[1].decode()
    if not has_tags:
        return ""
    match = _REPRESENTATIVE.search(header) or _NAME.search(header)
    return match[1].decode("utf-8", "replace").strip() if match else ""


@dataclass(frozen=True, kw_only=True)
class RowSpecies:
    """The species of rows: ``names[index[k]]`` is that of row k; ``index`` int32 [N_row], -1 for none."""

    names: tuple[str, ...]
    index: NDArray[np.int32]

    @classmethod
    def of(cls, names: Iterable[str], n_row: int) -> "RowSpecies":
        """From one name a row, '' for none."""
        known = {"": -1}
        index = np.fromiter((known.setdefault(name, len(known) - 1) for name in names), np.int32, n_row)
        return cls(names=tuple(name for name in known if name), index=index)


def species_of_rows(headers: Sequence[bytes]) -> RowSpecies:
    """The species of each header."""
    if not isinstance(headers, TextSlices):
        return RowSpecies.of(map(species_of, headers), len(headers))
    ids = _tagged_ids(headers)
    others = np.flatnonzero(ids < 0)
    rest = RowSpecies.of(
        _names(TextSlices(headers.text, headers.start[others], headers.stop[others])), len(others)
    )
    values, place = np.unique(ids[ids >= 0], return_inverse=True)
    names = {name: index for index, name in enumerate(map(str, values.tolist()))}
    index = np.full(len(headers), -1, np.int32)
    index[ids >= 0] = place
    index[others] = np.array([*(names.setdefault(name, len(names)) for name in rest.names), -1])[rest.index]
    return RowSpecies(names=tuple(names), index=index)


def _names(headers: TextSlices) -> Iterator[str]:
    """As :func:`species_of`; the commonest style without tags is told without cutting the header out."""
    text = headers.text
    for start, stop in headers.spans():
        match = _APPENDED_ID.match(text, start, stop)
        if match and text.find(b"=", start, stop) < 0:
            yield match[1].decode()
        else:
            yield species_of(text[start:stop])


def _tagged_ids(headers: TextSlices) -> NDArray[np.int64]:
    """The number after the first ``TaxID=`` of each header, -1 where none is, or none of 1 to 9 digits alone.

    All headers at once: most deep alignments name all rows' species so.
    """
    text = np.frombuffer(headers.text, np.uint8)
    tag = _ID_TAGS[0]
    end = positions_of(text, tag[-1])
    end = end[end >= len(tag) - 1]
    for back, letter in enumerate(reversed(tag)):
        end = end[text[end - back] == letter]
    row = np.searchsorted(headers.start, end, "right") - 1
    inside = (row >= 0) & (end - len(tag) + 1 >= headers.start[row]) & (end < headers.stop[row])
    end, row = end[inside], row[inside]
    is_first = np.append(True, row[1:] != row[:-1])[: len(row)]
    end, row = end[is_first], row[is_first]
    value, n_digit = np.zeros(len(row), np.int64), np.zeros(len(row), np.int64)
    reading = np.ones(len(row), bool)
    for step in range(1, _MAX_ID_DIGITS + 2):
        at = np.minimum(end + step, len(text) - 1)
        letter_here = np.where(end + step < headers.stop[row], text[at], ord(" "))
        digit = letter_here.astype(np.int64) - ord("0")
        value[reading & (letter_here != ord(" ")) & ((digit < 0) | (digit > 9))] = -1
        reading &= (digit >= 0) & (digit <= 9)
        value[reading] = 10 * value[reading] + digit[reading]
        n_digit += reading
    plain = (value > 0) & ~reading & (value >= 10 ** np.maximum(n_digit - 1, 0))
    ids = np.full(len(headers), -1, np.int64)
    ids[row[plain]] = value[plain]
    return ids
