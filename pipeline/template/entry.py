"""What templates need of a structure, wherever it was read from."""

from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

#: N, CA, C and pseudo-beta: the atoms of a template residue, in stored order.
ATOM_NAMES: Final = ("N", "CA", "C", "CB")


@dataclass(frozen=True, kw_only=True)
class TemplateChain:
    """One protein chain of a template entry.

    ``sequence``: canonical one-letter over the full SEQRES, length N. ``atom_pos`` float32 [N, 4, 3] in Å:
    N, CA, C and CB (CA for GLY) of the first model; NaN where missing.
    """

    label_asym_id: str
    auth_asym_id: str
    sequence: str
    atom_pos: NDArray[np.float32]


@dataclass(frozen=True, kw_only=True)
class TemplateEntry:
    """What templates need of one entry. ``release_date`` is an ISO date, None where the file has none."""

    entry: str
    digest: str
    release_date: str | None
    chains: tuple[TemplateChain, ...]

    def candidates(self, chain: str) -> list[TemplateChain]:
        """The chains a hit may mean by ``chain``: by author id first, then by label id."""
        by_author = [c for c in self.chains if c.auth_asym_id == chain]
        by_label = [c for c in self.chains if c.label_asym_id == chain and c.auth_asym_id != chain]
        return by_author + by_label
