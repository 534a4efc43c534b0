"""Which tokens of an entry a sample holds (AF3 SI 2.7; the first two methods are AlphaFold-Multimer's).

Each method puts tokens in an order of preference; the crop is the longest beginning of that order which
holds to the token limit and the atom limit. So both limits hold whatever the tokens are (a modified
residue is many tokens, a nucleotide is one token of 20 atoms), and a crop has no stray tokens that were
small enough to fill a rest. The crop's tokens keep the entry's order.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megafold.pipeline.stream.config import CropConfig
from megafold.pipeline.stream.entry import EntryTables, ranges
from megafold.pipeline.stream.random_streams import RandomStreams

METHODS: Final = ("contiguous", "spatial", "interface")
_CONTIGUOUS_TRIES: Final = 10

Tokens = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Crop:
    """Token indices in the entry, ascending; the method that found them; the token it is centred on."""

    tokens: Tokens
    method: str
    center: int | None


def crop_entry(
    entry: EntryTables, config: CropConfig, streams: RandomStreams, interest: Sequence[int] = ()
) -> Crop:
    """Crop an entry around its chains of interest.

    Args:
        entry: the entry's tables.
        config: limits and probabilities.
        streams: where random numbers come from.
        interest: chain indices: one (a chain was drawn), two (an interface was drawn) or none. Crop
            centres are tokens of these chains; of an interface, tokens near the other chain.

    Returns:
        A crop of at least one token. It holds a resolved token if the entry has one. ``method`` says what
        was done: an interface crop without an interface is a spatial crop, a spatial crop of an entry
        without coordinates is a contiguous one.
    """
    pool = nearest_chains(entry, config, streams, interest)
    probabilities = (config.contiguous, config.spatial, config.interface)
    edges = np.cumsum(probabilities) / np.sum(probabilities)
    method = METHODS[int(np.searchsorted(edges, streams("crop.method").random(), side="right"))]
    if method == "contiguous":
        tokens = _resolved_contiguous(entry, pool, config, streams)
        if tokens is not None:
            return Crop(tokens=tokens, method="contiguous", center=None)
    center = None
    if method == "interface":
        center = random_interface_token(
            entry, pool, interest, config.interface_distance, streams("crop.interface")
        )
    method = "spatial" if center is None else "interface"
    if center is None:
        center = random_resolved_token(entry, pool, interest, streams("crop.spatial"))
    if center is None:  # nothing in the entry has coordinates
        order = contiguous_order(entry, pool, config.tokens, streams("crop.contiguous"))
        return Crop(tokens=_fit(entry, order, config), method="contiguous", center=None)
    order = spatial_order(entry.token_center, pool, center)
    return Crop(tokens=_fit(entry, order, config), method=method, center=center)


def _fit(entry: EntryTables, order: Tokens, config: CropConfig) -> Tokens:
    order = order[: config.tokens]
    atoms = np.cumsum(entry.tokens["atom_count"][order])
    fitting: Tokens = np.sort(order[: int(np.searchsorted(atoms, config.atoms, side="right"))])
    return fitting


def contiguous_order(entry: EntryTables, pool: Tokens, limit: int, rng: np.random.Generator) -> Tokens:
    """AlphaFold-Multimer's algorithm 1: one run of tokens of each chain, chains in random order.

    The lengths of the runs are drawn so that together they reach ``limit`` tokens, or all there are.
    """
    chains, starts, counts = np.unique(entry.token_chain[pool], return_index=True, return_counts=True)
    added, remaining = 0, len(pool)
    runs = []
    for index in rng.permutation(len(chains)):
        length = int(counts[index])
        remaining -= length
        most = min(limit - added, length)
        least = min(length, max(0, limit - (added + remaining)))
        size = int(rng.integers(least, most + 1))
        start = int(starts[index]) + int(rng.integers(0, length - size + 1))
        added += size
        runs.append((start, size))
    first, count = np.array(runs, np.int64).T
    return pool[ranges(first, count)]


def _resolved_contiguous(
    entry: EntryTables, pool: Tokens, config: CropConfig, streams: RandomStreams
) -> Tokens | None:
    """A contiguous crop with a resolved token: an unresolved tail alone would teach nothing."""
    resolved = entry.resolved
    rng = streams("crop.contiguous")
    for _ in range(_CONTIGUOUS_TRIES):
        tokens = _fit(entry, contiguous_order(entry, pool, config.tokens, rng), config)
        if resolved[tokens].any():
            return tokens
    return None


def spatial_order(token_center: NDArray[np.float32], pool: Tokens, center: int) -> Tokens:
    """AlphaFold-Multimer's algorithm 2: tokens of ``pool`` by distance from token ``center``.

    The centre itself comes first, whatever else lies in its place, so that every crop holds it. Equal
    distances keep the entry's order; tokens without coordinates come last.
    """
    distance = _squared_distances(token_center[[center]], token_center[pool])[0]
    distance[pool == center] = -1
    return pool[np.argsort(np.where(np.isnan(distance), np.inf, distance), kind="stable")]


def random_resolved_token(
    entry: EntryTables, pool: Tokens, interest: Sequence[int], rng: np.random.Generator
) -> int | None:
    """A random token with coordinates: of the chains of interest if they have one, else of ``pool``."""
    resolved = pool[entry.resolved[pool]]
    wanted = resolved[np.isin(entry.token_chain[resolved], interest)]
    candidates = wanted if len(wanted) else resolved
    return int(rng.choice(candidates)) if len(candidates) else None


def random_interface_token(
    entry: EntryTables,
    pool: Tokens,
    interest: Sequence[int],
    distance: float,
    rng: np.random.Generator,
) -> int | None:
    """A random token whose centre is within ``distance`` Å of a centre in another chain, or None.

    With two chains of interest the other chain is the other of the two; where they do not touch, or with
    one chain, it is any. All such tokens are equally likely.
    """
    resolved = pool[entry.resolved[pool]]
    chain = entry.token_chain[resolved]
    wanted = resolved[np.isin(chain, interest)] if len(interest) else resolved
    if len(interest) == 2:
        found = _first_in_contact(entry, wanted, wanted, distance, rng)
        if found is not None:
            return found
    return _first_in_contact(entry, wanted, resolved, distance, rng)


def _first_in_contact(
    entry: EntryTables, candidates: Tokens, partners: Tokens, distance: float, rng: np.random.Generator
) -> int | None:
    # The first of a random order that is in contact is a uniform draw of all that are, and finding it
    # mostly takes a few rows of the distance matrix, not all of it.
    order = rng.permutation(candidates)
    partner_chain = entry.token_chain[partners]
    if len(np.unique(partner_chain)) < 2:
        return None
    start, size = 0, 8
    while start < len(order):
        block = order[start : start + size]
        near = _squared_distances(entry.token_center[block], entry.token_center[partners]) < distance**2
        near &= entry.token_chain[block][:, None] != partner_chain
        hits = near.any(axis=1)
        if hits.any():
            return int(block[np.argmax(hits)])
        start, size = start + size, min(size * 4, 512)
    return None


def nearest_chains(
    entry: EntryTables, config: CropConfig, streams: RandomStreams, interest: Sequence[int]
) -> Tokens:
    """All tokens, or those of the ``max_chains`` chains nearest a random interface token (AF3 SI 2.5.4)."""
    everything = np.arange(entry.n_token)
    n_chain = len(entry.chains["asym_id"])
    if n_chain <= config.max_chains:
        return everything
    rng = streams("crop.chains")
    center = random_interface_token(entry, everything, interest, config.interface_distance, rng)
    if center is None:
        center = random_resolved_token(entry, everything, interest, rng)
    if center is None:
        kept = np.sort(rng.permutation(n_chain)[: config.max_chains])
        return everything[np.isin(entry.token_chain, kept)]
    distance = _squared_distances(entry.token_center[[center]], entry.token_center)[0]
    nearest = np.full(n_chain, np.inf)
    np.fmin.at(nearest, entry.token_chain, distance)
    kept = np.argsort(nearest, kind="stable")[: config.max_chains]
    return everything[np.isin(entry.token_chain, kept)]


def _squared_distances(a: NDArray[np.float32], b: NDArray[np.float32]) -> NDArray[np.float64]:
    """[len(a), len(b)], Å²; NaN where either is unresolved."""
    total = np.zeros((len(a), len(b)))
    for axis in range(3):
        total += np.square(np.subtract.outer(a[:, axis].astype(np.float64), b[:, axis].astype(np.float64)))
    return total
