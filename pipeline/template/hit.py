"""What every hit list parser returns, and what they share.

A hit is read as text alone: which residues of the query align to which residues of the hit, and the hit's
letters or numbers. Whether these are in the structure is for
:mod:`megafold.pipeline.template.placing` to say.
"""

import re
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.errors import TemplateError

#: ``1abc_A``, ``pdb_00001abc_A``; the chain may have several letters.
_CHAIN_NAME: Final = re.compile(r"([0-9][0-9A-Za-z]{3}|pdb_[0-9a-zA-Z]{8})_([0-9A-Za-z.-]+)")
_RANGE: Final = re.compile(r"(.+?)/(\d+)-(\d+)(?:/.*)?")
GAPS: Final = b"-._~"


@dataclass(frozen=True, kw_only=True)
class Hit:
    """One hit: a stretch of a template chain's sequence, and which residues of it align.

    ``entry`` is lower case; ``chain`` as the file writes it (most often the author's id). ``sequence`` holds
    the hit's residues without gaps (upper case), the first of which the file places at ``start`` (0-based) in
    the chain's sequence, -1 where it does not say. ``query_index`` (0-based residues of the query) and
    ``hit_index`` (into ``sequence``) are int32 [N_aligned], ascending.
    """

    entry: str
    chain: str
    start: int
    sequence: str
    query_index: NDArray[np.int32]
    hit_index: NDArray[np.int32]


@dataclass(frozen=True, kw_only=True)
class NumberedHit:
    """One hit of a list that has numbers and no letters.

    Residues ``query_start`` to ``query_stop`` of the query (0-based, half-open) align to ``target_start`` to
    ``target_stop`` of the chain's sequence, ``n_aligned`` pairs of which ``n_identical`` are identical.
    ``query_index`` and ``target_index``, int32 [N_aligned], say which, None where the file does not.
    ``is_certain`` is False where the file lists hits of several queries: then the letters have to tell
    whose this one is.
    """

    entry: str
    chain: str
    query_start: int
    query_stop: int
    target_start: int
    target_stop: int
    n_aligned: int
    n_identical: int
    query_index: NDArray[np.int32] | None
    target_index: NDArray[np.int32] | None
    is_certain: bool


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A hit that is not used, and why: a slug such as ``no-chain-id``."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class HitList:
    """The hits of one file, in the order of its rows, and what to tell a user about how they were read."""

    items: tuple[Hit | NumberedHit | Skipped, ...]
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class HitRow:
    """One row of an aligned hit list: name without range, 0-based start (-1 for none), residues."""

    name: str
    start: int
    sequence: str

    @classmethod
    def of(cls, label: str, residues: NDArray[np.uint8]) -> "HitRow":
        """From a row's label and its letters without gaps."""
        ranged = _RANGE.fullmatch(label)
        return cls(
            name=ranged[1] if ranged else label,
            start=int(ranged[2]) - 1 if ranged else -1,
            sequence=residues.tobytes().decode("ascii", "replace").upper(),
        )

    @staticmethod
    def name_of(label: str) -> str:
        """A label without its range."""
        ranged = _RANGE.fullmatch(label)
        return ranged[1] if ranged else label

    def length_in(self, sequence: str) -> int:
        """How many residues it has if they are, where the row says, the query's own; else 0."""
        here = sequence[self.start : self.start + len(self.sequence)] if self.start >= 0 else ""
        same = len(here) == len(self.sequence) and same_letters(self.sequence, here)
        return len(self.sequence) if same else 0


def chain_of(name: str) -> tuple[str, str] | Skipped:
    """Entry (lower case) and chain of a hit's name; skipped where it is no PDB chain's."""
    match = _CHAIN_NAME.fullmatch(name)
    return (match[1].lower(), match[2]) if match else Skipped(reason="no-chain-id")


def same_letters(first: str, second: str) -> bool:
    """Whether two sequences of equal length agree; X matches any letter."""
    a = np.frombuffer(first.encode("ascii", "replace"), np.uint8)
    b = np.frombuffer(second.encode("ascii", "replace"), np.uint8)
    return bool(((a == b) | (a == ord("X")) | (b == ord("X"))).all())


def query_mismatch(name: str, why: str) -> TemplateError:
    """The error of a file that was searched with another query."""
    return TemplateError(
        f"{name}: {why}; search again with the chain's sequence, or remove the file", reason="query-mismatch"
    )
