"""One entry's tables in memory: the structure object without its atoms."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline import schema

Columns = Mapping[str, NDArray[Any]]

#: What a sample reads of every structure; atoms are read for the crop alone.
ENTRY_ARRAYS: Final = ("chains", "residues", "tokens", "token_center", "bonds")


@dataclass(frozen=True, kw_only=True)
class EntryTables:
    """Chains, residues, tokens and bonds of one structure, by the schema's column names.

    ``token_chain`` [N_token] is each token's chain index, ``token_center`` [N_token, 3] in Å, NaN where
    unresolved.
    """

    chains: Columns
    residues: Columns
    tokens: Columns
    bonds: Columns
    token_center: NDArray[np.float32]
    token_chain: NDArray[np.int32]
    components: tuple[str, ...]

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, NDArray[Any]], attributes: Mapping[str, Any]) -> "EntryTables":
        """Name the columns of :data:`ENTRY_ARRAYS` as a structure object holds them."""
        tables = {
            name: schema.STRUCTURE.table(name).unpack(arrays[name])
            for name in ("chains", "residues", "tokens", "bonds")
        }
        return cls(
            **tables,
            token_center=arrays["token_center"],
            token_chain=tables["residues"]["chain"][tables["tokens"]["residue"]],
            components=tuple(attributes["components"]),
        )

    @property
    def n_token(self) -> int:
        """Number of tokens."""
        return len(self.token_chain)

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        tables = (self.chains, self.residues, self.tokens, self.bonds)
        columns = [column for table in tables for column in table.values()]
        return sum(column.nbytes for column in (*columns, self.token_center, self.token_chain))

    @cached_property
    def resolved(self) -> NDArray[np.bool_]:
        """[N_token] True: the token's centre atom has coordinates."""
        return present(self.token_center)


def present(positions: NDArray[np.float32]) -> NDArray[np.bool_]:
    """[...] True: the position [..., 3] has all its coordinates."""
    found: NDArray[np.bool_] = np.isfinite(positions).all(axis=-1)  # type: ignore[assignment]
    return found


def ranges(first: NDArray[Any], count: NDArray[Any]) -> NDArray[np.int64]:
    """Concatenate the ranges ``first[i] .. first[i] + count[i]``."""
    count = count.astype(np.int64)
    ends = np.cumsum(count)
    total = int(ends[-1]) if len(ends) else 0
    offsets = np.repeat(first.astype(np.int64) - (ends - count), count)
    found: NDArray[np.int64] = np.arange(total) + offsets
    return found
