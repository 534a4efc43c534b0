"""Crops and rows of MSAs against plain implementations of the papers' text, by thousands of draws.

The implementations here follow AlphaFold 3's supplement (2.5.4 and 2.7) and AlphaFold-Multimer's algorithms 1
and 2, token by token, with Python's own random numbers; they share nothing with the stream but the entry.
"""

import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from megafold.pipeline.schema import MolType
from megafold.pipeline.stream import CropConfig
from megafold.pipeline.stream.crop import crop_entry
from megafold.pipeline.stream.entry import EntryTables
from megafold.pipeline.stream.msa import plan_rows
from megafold.pipeline.stream.random_streams import RandomStreams
from tests.pipeline.stream_cache import Chain, structure

N_DRAW = 2000


class Reference:
    """An entry as lists, and the supplement's way to crop it."""

    def __init__(self, entry: EntryTables, config: CropConfig, interest):
        self.config, self.interest = config, set(interest)
        self.atoms = [int(count) for count in entry.tokens["atom_count"]]
        self.chain = [int(chain) for chain in entry.token_chain]
        self.center = [
            None if any(map(math.isnan, position)) else tuple(map(float, position))
            for position in entry.token_center
        ]

    def distance(self, a, b):
        if self.center[a] is None or self.center[b] is None:
            return math.inf
        return math.dist(self.center[a], self.center[b])

    def interface_tokens(self, pool):
        """Tokens of interest within 15 Å of another chain's; of an interface, of the other of the two."""
        wanted = [t for t in pool if not self.interest or self.chain[t] in self.interest]
        for partners in [wanted, pool] if len(self.interest) == 2 else [pool]:
            found = [
                a
                for a in wanted
                if any(self.chain[a] != self.chain[b] and self.distance(a, b) < 15 for b in partners)
            ]
            if found:
                return found
        return []

    def resolved_tokens(self, pool):
        resolved = [t for t in pool if self.center[t] is not None]
        return [t for t in resolved if self.chain[t] in self.interest] or resolved

    def nearest_chains(self, pool, rng):
        chains = sorted(set(self.chain))
        if len(chains) <= self.config.max_chains:
            return pool
        center = rng.choice(self.interface_tokens(pool) or self.resolved_tokens(pool))
        nearest = {c: min(self.distance(center, t) for t in pool if self.chain[t] == c) for c in chains}
        kept = sorted(chains, key=lambda c: (nearest[c], c))[: self.config.max_chains]
        return [t for t in pool if self.chain[t] in kept]

    def contiguous(self, pool, rng):
        chains = sorted({self.chain[t] for t in pool})
        rng.shuffle(chains)
        added, remaining, order = 0, len(pool), []
        for chain in chains:
            own = [t for t in pool if self.chain[t] == chain]
            remaining -= len(own)
            most = min(self.config.tokens - added, len(own))
            least = min(len(own), max(0, self.config.tokens - (added + remaining)))
            size = rng.randint(least, most)
            added += size
            start = rng.randint(0, len(own) - size)
            order += own[start : start + size]
        return order

    def cut(self, order):
        """The longest beginning within both limits."""
        kept, atoms = [], 0
        for token in order[: self.config.tokens]:
            atoms += self.atoms[token]
            if atoms > self.config.atoms:
                break
            kept.append(token)
        return frozenset(kept)

    def crop(self, rng):
        config = self.config
        pool = self.nearest_chains(list(range(len(self.chain))), rng)
        shares = [config.contiguous, config.spatial, config.interface]
        method = rng.choices(["contiguous", "spatial", "interface"], shares)[0]
        if method == "contiguous":
            for _ in range(10):
                tokens = self.cut(self.contiguous(pool, rng))
                if any(self.center[t] is not None for t in tokens):
                    return tokens
        candidates = self.interface_tokens(pool) if method == "interface" else []
        center = rng.choice(candidates or self.resolved_tokens(pool))
        return self.cut(sorted(pool, key=lambda t: (self.distance(center, t), t)))


def assert_same_distribution(ours: Counter, reference: Counter):
    """Two samples of equal size: χ² of the outcomes, rare ones put together."""
    pooled = ours + reference
    common = [outcome for outcome, count in pooled.items() if count >= 20]
    rows = [(ours[outcome], reference[outcome]) for outcome in common]
    rest = [
        sum(counter.values()) - sum(row[i] for row in rows) for i, counter in enumerate((ours, reference))
    ]
    rows += [(rest[0], rest[1])] if sum(rest) else []
    chi_square = sum((a - b) ** 2 / (a + b) for a, b in rows)
    degrees = len(rows) - 1
    assert degrees >= 2
    assert chi_square < degrees + 5 * math.sqrt(2 * degrees)


def small_entry():
    """Two chains in contact, with atomised and unresolved residues; a ligand; a strand on its own."""
    return [
        Chain(["ALA", "GLY", "MSE", "LYS", "ALA", "ALA"], unresolved={1}),
        Chain(["GLY", "ALA", "ALA", "LYS"], entity=2, origin=(2, 9, 0), unresolved={3}),
        Chain(["LGD"], MolType.LIGAND, entity=3, origin=(-6, 0, 5)),
        Chain(["U", "U"], MolType.RNA, entity=4, origin=(60, 0, 0)),
    ]


def many_chains():
    """Seven dimers' worth of chains in a bent row, of which three are kept."""
    return [
        Chain(
            ["ALA"] * 2 if i % 2 else ["GLY"] * 3, entity=1 + i % 2, sym=i + 1, origin=(0.3 * i * i, 9 * i, 0)
        )
        for i in range(7)
    ]


CASES: dict[str, Any] = {
    "all methods, a chain": (small_entry, (1,), {}),
    "all methods, an interface": (small_entry, (0, 1), {}),
    "all methods, nothing in particular": (small_entry, (), {}),
    "an interface that is none": (small_entry, (0, 3), {"contiguous": 0.0, "spatial": 0.2, "interface": 0.8}),
    "contiguous, atoms bind": (
        small_entry,
        (0,),
        {"contiguous": 1.0, "spatial": 0, "interface": 0, "atoms": 24},
    ),
    "interface, few chains kept": (many_chains, (3,), {"max_chains": 3}),
    "contiguous, few chains kept": (
        many_chains,
        (2, 3),
        {"max_chains": 3, "contiguous": 1.0, "spatial": 0, "interface": 0},
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_crops_are_distributed_as_the_supplement_says(case):
    make, interest, changes = CASES[case]
    content = structure("test", make())
    entry = EntryTables.from_arrays(content.arrays, content.attributes)
    config = CropConfig(**{"tokens": 7, "atoms": 60, **changes})
    ours = Counter(
        frozenset(crop_entry(entry, config, RandomStreams(1, 2, index), interest).tokens.tolist())
        for index in range(N_DRAW)
    )
    reference, rng = Reference(entry, config, interest), random.Random(case)
    assert_same_distribution(ours, Counter(reference.crop(rng) for _ in range(N_DRAW)))


def naive_rows(depths, pairs, limit, rng):
    """The query, at most half of the room paired (more where others cannot fill it), the rest unpaired."""
    used = [{pair[block] for pair in pairs} for block in range(len(depths))]
    unpaired = [
        (block, row)
        for block, depth in enumerate(depths)
        for row in range(1, depth)
        if row not in used[block]
    ]
    room = limit - 1
    n_paired = min(len(pairs), max(room // 2, room - len(unpaired)))
    chosen = rng.sample(range(len(pairs)), n_paired)
    rest = rng.sample(unpaired, min(len(unpaired), room - n_paired))
    return frozenset([("pair", place) for place in chosen] + rest)


def test_msa_rows_are_distributed_as_in_a_plain_implementation():
    depths, pairs, limit = (5, 4), [(1, 2), (3, -1), (-1, 3)], 5
    pairing = np.array([(0, 0), *pairs], np.int32)
    rng = random.Random(3)

    def ours(seed):
        plan = plan_rows(depths, pairing, limit, np.random.default_rng(seed))
        paired = [("pair", pairs.index(tuple(row))) for row in plan.paired.tolist()]
        own = [(block, row) for block, rows in enumerate(plan.unpaired) for row in rows.tolist()]
        return frozenset(paired + own)

    assert_same_distribution(
        Counter(ours(seed) for seed in range(N_DRAW)),
        Counter(naive_rows(depths, pairs, limit, rng) for _ in range(N_DRAW)),
    )
