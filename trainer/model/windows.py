"""Sequence-local windows over the flat list of atoms (algorithm 7).

Window w holds the query atoms w·n_queries to (w+1)·n_queries - 1 and the n_keys atoms around their
middle. Places before the first and after the last atom are filled with zeros (False in a mask).
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class AtomWindows:
    """How ``n_atom`` atoms fall into windows. Atoms are the axis before the last of what it is given."""

    n_atom: int
    n_queries: int
    n_keys: int

    @property
    def n_window(self) -> int:
        """Number of windows, the last of which may be partly empty."""
        return -(-self.n_atom // self.n_queries)

    def queries(self, x: Tensor) -> Tensor:
        """[..., A, C] → [..., W, n_queries, C]."""
        x = F.pad(x, (0, 0, 0, self.n_window * self.n_queries - self.n_atom))
        return x.unflatten(-2, (self.n_window, self.n_queries))

    def keys(self, x: Tensor) -> Tensor:
        """[..., A, C] → [..., W, n_keys, C]."""
        margin = (self.n_keys - self.n_queries) // 2
        after = self.n_window * self.n_queries - self.n_atom + margin
        x = F.pad(x, (0, 0, margin, after))
        return x.unfold(-2, self.n_keys, self.n_queries).transpose(-1, -2)

    def atoms(self, x: Tensor) -> Tensor:
        """[..., W, n_queries, C] → [..., A, C]: the inverse of :meth:`queries`."""
        return x.flatten(-3, -2)[..., : self.n_atom, :]
