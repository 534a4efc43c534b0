"""Which species a row comes from, read from its header: what rows are paired by across chains.

Header styles, in the order they are tried:

1. a taxonomy id: ``OX=9606`` (UniProt), ``TaxID=9606`` (UniRef), ``UniRef100_A0A2H1A674_498019/`` (pairing
   files of searches over UniRef100 with the id appended);
2. the mnemonic of a UniProt entry name: ``tr|A0A146SKV9|A0A146SKV9_FUNHE``, ``sp|P0C2N4|YSCX_YEREN/64-85``;
3. the mnemonic of a UniRef representative, ``RepID=HBA_PAPAN``, where the header has no taxonomy id;
4. the name in ``Tax=`` or ``OS=``.

A UniRef cluster's taxonomy id is that of its members' common ancestor. Mnemonics that begin with 9 stand for
a group of organisms; they count, as they do in AlphaFold-Multimer.
"""

import re
from collections.abc import Sequence
from typing import Final

_APPENDED_ID = re.compile(rb"UniRef\d+_[A-Z0-9-]+_(\d+)(?:/|\s|$)")
_ENTRY_NAME = re.compile(
    rb"(?:[^\s|]+\|)*(?:sp|tr)\|[A-Z0-9]+(?:[-_.]\d+)?\|[A-Z0-9]{1,11}_([A-Z0-9]{1,5})(?![A-Z0-9])"
)
_REPRESENTATIVE = re.compile(rb"\bRepID=[A-Z0-9]{1,11}_([A-Z0-9]{1,5})(?![A-Z0-9])")
_NAME = re.compile(rb"\b(?:Tax|OS)=(.+?)(?=\s+[A-Za-z]+=|\s*$)")
_ID_TAGS: Final = (b"TaxID=", b"OX=")


def species_of(header: bytes) -> str:
    """The species of one header, '' where it names none.

    >>> species_of(b"UniRef90_P63111/2-142 Hemoglobin n=8 Tax=Catarrhini TaxID=9526 RepID=HBA_PAPAN")
    '9526'
    >>> species_of(b"tr|A0A1K0GGD5|A0A1K0GGD5_RAT Globin d1 GN=Glnd1")
    'RAT'
    >>> species_of(b"SRR5579864_7281666")
    ''
    """
    for tag in _ID_TAGS:
        start = header.find(tag)
        if start >= 0:
            words = header[start + len(tag) :].split(None, 1)
            if words and words[0].isdigit():
                return words[0].decode()
    if header.startswith(b"UniRef") and (match := _APPENDED_ID.match(header)):
        return match[1].decode()
    if b"|" in header and (match := _ENTRY_NAME.match(header)):
        return match[1].decode()
    if b"=" not in header:
        return ""
    match = _REPRESENTATIVE.search(header) or _NAME.search(header)
    return match[1].decode("utf-8", "replace").strip() if match else ""


def species_of_rows(headers: Sequence[bytes]) -> list[str]:
    """The species of each header, '' where it names none."""
    # Species recur: one string object for each keeps a deep alignment's list small.
    names: dict[str, str] = {}
    return [names.setdefault(name, name) for name in map(species_of, headers)]
