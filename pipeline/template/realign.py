"""Aligns two protein sequences where a hit list says that they are alike, but not how.

biotite aligns: affine gaps (Gotoh 1982) over BLOSUM62, 11 to open a gap and 1 to extend it, as in BLAST.
"""

from functools import cache
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.errors import TemplateError

_GAP_PENALTY: Final = (-12, -1)  # biotite's first number is a gap's first residue: opening and extension
_MAX_CELLS: Final = 1 << 25  #: of the table that the alignment fills: half a gigabyte
_LETTERS: Final = "ACDEFGHIKLMNPQRSTVWYBZX"
_KIN: Final = {"U": "C", "O": "K"}


@cache
def _matrix() -> Any:
    # Here, because importing it takes longer than everything else that template hits need.
    from biotite.sequence.align import SubstitutionMatrix

    return SubstitutionMatrix.std_protein_matrix()


def align_pair(query: str, target: str, *, whole: bool) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """Which residues of two sequences align.

    The first of equally good alignments in biotite's order, which is fixed.

    Args:
        query: one-letter codes; letters other than amino acids count as X.
        target: likewise.
        whole: align both from end to end; else the stretches that align best (local).

    Returns:
        Indices into each, int32 [N_aligned], ascending; empty where nothing aligns.

    Raises:
        TemplateError: both are so long that the memory would not do (``too-long-to-align``).
    """
    none = np.empty(0, np.int32)
    if not query or not target:
        return none, none
    if len(query) * len(target) > _MAX_CELLS:
        raise TemplateError(
            f"{len(query)} and {len(target)} residues are too many to align; give a list with alignments",
            reason="too-long-to-align",
        )
    from biotite.sequence import ProteinSequence
    from biotite.sequence.align import align_optimal

    pair = [ProteinSequence("".join(map(_known, text))) for text in (query, target)]
    found = align_optimal(*pair, _matrix(), gap_penalty=_GAP_PENALTY, local=not whole, max_number=1)
    if not found:
        return none, none
    trace = found[0].trace
    trace = trace[(trace >= 0).all(axis=1)].astype(np.int32)
    return trace[:, 0], trace[:, 1]


def _known(letter: str) -> str:
    letter = _KIN.get(letter, letter)
    return letter if letter in _LETTERS else "X"
