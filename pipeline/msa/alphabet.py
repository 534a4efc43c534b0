"""Letters to classes of ``restype``, one alphabet for each polymer type (AF3 SI table 13).

Parsers turn alignment text into classes with one :meth:`bytes.translate`. Besides the 32 classes the tables
hold three marks that no class uses.
"""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.schema import (
    AMINO_ACID_LETTERS,
    GAP,
    RESTYPE_INDEX,
    UNKNOWN_RESTYPE,
    MolType,
)

INSERTION: Final = 64  #: a lower-case letter
SEPARATOR: Final = 128  #: ``>``: the end of a row in joined text
INVALID: Final = 255  #: a byte that no alignment row holds

#: Bytes that stand for nothing in A3M and A2M rows: blanks, line ends and the gaps opposite insertions.
IGNORED: Final = b" \t\n\v\f\r."
_UPPER: Final = b"ABCDEFGHIJKLMNOPQRSTUVWXYZ"
_SUBSTITUTES: Final[dict[MolType, dict[str, str]]] = {
    # As in AF3's published code: U (selenocysteine) is cysteine, B (D or N) and Z (E or Q) count as the
    # acid; O (pyrrolysine) and J (I or L) are unknown.
    MolType.PROTEIN: {"U": "C", "B": "D", "Z": "E"},
    MolType.RNA: {"T": "U"},
    MolType.DNA: {"U": "T"},
}


def _letters(mol_type: MolType) -> dict[str, int]:
    if mol_type is MolType.PROTEIN:
        known = {letter: index for index, letter in enumerate(AMINO_ACID_LETTERS)}
    elif mol_type is MolType.RNA:
        known = {letter: RESTYPE_INDEX[letter] for letter in "AGCU"}
    else:
        known = {letter: RESTYPE_INDEX[f"D{letter}"] for letter in "AGCT"}
    for letter, substitute in _SUBSTITUTES[mol_type].items():
        known[letter] = known[substitute]
    return known


@dataclass(frozen=True, kw_only=True)
class Alphabet:
    """The tables of one polymer type.

    ``a3m`` maps upper-case letters and ``-`` to classes, lower-case letters to :data:`INSERTION`, ``>`` to
    :data:`SEPARATOR`. ``columns`` maps letters of either case to classes and all gap characters
    to the gap, for formats whose columns are explicit. ``unknown`` is the class of every other letter.
    """

    mol_type: MolType
    a3m: bytes
    columns: bytes
    unknown: int

    @classmethod
    def of(cls, mol_type: MolType) -> "Alphabet":
        """The alphabet of a polymer type: one object for each, made once. Ligands have none: KeyError."""
        return _ALPHABETS[mol_type]

    def encode(self, sequence: str) -> NDArray[np.uint8]:
        """Classes of an ungapped sequence, uint8 [N]; case is ignored, a foreign character is unknown."""
        codes = np.frombuffer(sequence.encode("ascii", "replace").translate(self.columns), np.uint8)
        return np.where(codes < GAP, codes, self.unknown).astype(np.uint8)


def _alphabet(mol_type: MolType) -> Alphabet:
    known = _letters(mol_type)
    unknown = int(UNKNOWN_RESTYPE[mol_type])
    a3m = bytearray([INVALID] * 256)
    columns = bytearray([INVALID] * 256)
    for code in _UPPER:
        letter_class = known.get(chr(code), unknown)
        a3m[code] = columns[code] = columns[code + 32] = letter_class
        a3m[code + 32] = INSERTION
    # A stop codon translated into a database sequence is a residue nobody knows.
    a3m[ord("*")] = columns[ord("*")] = unknown
    a3m[ord("-")] = a3m[ord("_")] = GAP
    a3m[ord(">")] = SEPARATOR
    for gap in b"-._~":
        columns[gap] = GAP
    return Alphabet(mol_type=mol_type, a3m=bytes(a3m), columns=bytes(columns), unknown=unknown)


_ALPHABETS: Final = {
    mol_type: _alphabet(mol_type) for mol_type in (MolType.PROTEIN, MolType.RNA, MolType.DNA)
}
