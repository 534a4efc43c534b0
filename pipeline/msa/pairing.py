"""Which rows of an entry's MSAs belong together: pairing by species (AF3 SI 2.3).

As in AlphaFold-Multimer: within a species, the rows of each chain are ranked by similarity to their
query, and the k-th of one chain pairs with the k-th of the others, up to the smallest number any of them
has. Species that all chains have come first, then those that fewer have. A species with more than 600
rows in some chain is skipped: so many paralogues pair by chance.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from megafold.cache_store import Content, Digest, Store
from megafold.pipeline.content import make_content
from megafold.pipeline.msa.source import is_pairing_source
from megafold.pipeline.schema import MSA

PAIRING_VERSION: Final = 1
MAX_PAIRED_ROWS: Final = 8191  #: without the query row
MAX_ROWS_PER_SPECIES: Final = 600


@dataclass(frozen=True, kw_only=True)
class MsaRows:
    """What pairing needs of one ``msa`` object: its row table, not its rows.

    ``digest`` is the object's; ``rows`` int32 [4, N_row] the schema's ``msa.rows``.
    """

    digest: str
    sources: tuple[str, ...]
    species: tuple[str, ...]
    rows: NDArray[np.int32]

    @classmethod
    def of(cls, digest: str, attributes: Mapping[str, Any], rows: NDArray[np.int32]) -> "MsaRows":
        """From an open object: its attributes and its ``rows`` array."""
        return cls(
            digest=digest,
            sources=tuple(source["name"] for source in attributes["sources"]),
            species=tuple(attributes["species"]),
            rows=rows,
        )

    @classmethod
    def from_store(cls, store: Store, digest: str) -> "MsaRows":
        """From a stored object, reading its row table alone."""
        with store.open(Digest(digest)) as reader:
            return cls.of(digest, reader.attributes, reader.read({"rows": None})["rows"])

    @classmethod
    def from_content(cls, content: Content) -> "MsaRows":
        """From an object in memory."""
        return cls.of(str(content.digest()), content.attributes, content.arrays["rows"])


@dataclass(frozen=True, kw_only=True)
class _Candidates:
    """The rows of one chain that can pair, grouped by species, best first within each."""

    names: list[str]
    start: NDArray[np.int64]
    count: NDArray[np.int64]
    row: NDArray[np.int64]
    rank: NDArray[np.int64]


def pair_msas(msas: Sequence[MsaRows]) -> Content | None:
    """Pair the MSAs of an entry's distinct protein sequences.

    A chain's rows come from its files named ``uniprot…``, ``pairing…`` or ``paired…`` where such a file
    names a species, else from all its files. Similarity is identical residues over the query's length.
    Among species that equally many chains have, rows go by the product of their ranks among their
    chains' candidate rows (searches list the best hits first), ties by row numbers.

    Args:
        msas: one item a distinct sequence, in the order of the result's columns. Copies of one sequence
            share a column, and so do not pair with themselves.

    Returns:
        The ``pairing`` object: the query row, then at most 8 191 paired rows; -1 where a chain has no
        row. None where nothing pairs.
    """
    if len(msas) < 2:
        return None
    candidates = [_candidates(msa) for msa in msas]
    names = sorted({name for chain in candidates for name in chain.names})
    position = {name: index for index, name in enumerate(names)}
    count = np.zeros((len(names), len(msas)), np.int64)
    start = np.zeros((len(names), len(msas)), np.int64)
    for chain, items in enumerate(candidates):
        species = np.array([position[name] for name in items.names], np.int64)
        count[species, chain] = items.count
        start[species, chain] = items.start
    usable = ((count > 0).sum(axis=1) > 1) & (count.max(axis=1, initial=0) <= MAX_ROWS_PER_SPECIES)
    count, start = count[usable], start[usable]
    if not len(count):
        return None
    n_pairs = np.where(count > 0, count, np.iinfo(np.int64).max).min(axis=1)
    species = np.repeat(np.arange(len(n_pairs)), n_pairs)
    nth = np.arange(len(species)) - np.repeat(np.cumsum(n_pairs) - n_pairs, n_pairs)
    paired = np.full((len(species), len(msas)), -1, np.int32)
    rank = np.ones((len(species), len(msas)), np.int64)
    for chain, items in enumerate(candidates):
        present = count[species, chain] > 0
        index = start[species[present], chain] + nth[present]
        paired[present, chain] = items.row[index]
        rank[present, chain] = items.rank[index]
    order = _order(paired, rank)[:MAX_PAIRED_ROWS]
    pairing = np.concatenate([np.zeros((1, len(msas)), np.int32), paired[order]])
    attributes = {"kind": "pairing", "version": PAIRING_VERSION, "msas": [msa.digest for msa in msas]}
    return make_content("pairing", {"pairing": pairing}, attributes)


def _candidates(msa: MsaRows) -> _Candidates:
    table = MSA.table("rows").unpack(msa.rows)
    source, species = table["source"], table["species"]
    eligible = species >= 0
    named = np.array([is_pairing_source(name) for name in msa.sources], bool)
    from_named = eligible & (source >= 0) & named[source]
    row = np.flatnonzero(from_named if from_named.any() else eligible)
    similarity = table["identity"][row].astype(np.int64) * table["coverage"][row]
    order = np.lexsort((row, -similarity, species[row]))
    present, start, count = np.unique(species[row][order], return_index=True, return_counts=True)
    return _Candidates(
        names=[msa.species[index] for index in present],
        start=start.astype(np.int64),
        count=count.astype(np.int64),
        row=row[order],
        rank=order + 1,
    )


def _order(paired: NDArray[np.int32], rank: NDArray[np.int64]) -> list[int]:
    """Most chains first, then the smallest product of ranks, then row numbers."""
    n_chain = (paired >= 0).sum(axis=1).tolist()
    # Python's integers: a product over many chains needs more than 64 bits, and rounding must not order rows.
    product = [math.prod(item) for item in rank.tolist()]
    rows = paired.tolist()
    return sorted(range(len(rows)), key=lambda index: (-n_chain[index], product[index], rows[index]))
