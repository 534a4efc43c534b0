"""Which entry and chains a sample is about.

What index ``i`` of epoch ``e`` is depends on ``(seed, e, i)`` and the manifest alone. Ranks and workers only
share out the indices (``order.py``).
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from megafold.cache_store import Manifest
from megafold.pipeline.errors import InputError
from megafold.pipeline.stream.config import SamplingConfig
from megafold.pipeline.stream.filters import matching_rows
from megafold.pipeline.stream.random_streams import RandomStreams
from megafold.pipeline.stream.split import part_reasons, training_rows

#: AF3 SI 2.5.1: the weight of each molecule type in a chain or interface.
TYPE_WEIGHT: Final = {"protein": 3.0, "rna": 3.0, "dna": 3.0, "ligand": 1.0}
CHAIN_WEIGHT: Final = 0.5
INTERFACE_WEIGHT: Final = 1.0


@dataclass(frozen=True)
class Draw:
    """What a sample is about: a row of the manifest, and its chains of interest (none, one or two)."""

    row: int
    interest: tuple[int, ...]


@dataclass(frozen=True)
class Targets:
    """Chains and interfaces that can be drawn.

    ``row`` [N] manifest row; ``chain_i``, ``chain_j`` [N] chain indices, ``chain_j`` -1 for a chain alone;
    ``weight`` [N], not normalised.
    """

    row: NDArray[np.int64]
    chain_i: NDArray[np.int64]
    chain_j: NDArray[np.int64]
    weight: NDArray[np.float64]


class TargetSampler:
    """Draws entries and chains of interest from a manifest.

    ``rows`` are the manifest rows that pass the filters; ``filtered`` counts the others by reason.
    ``selection`` may be given where it has been found before.

    Raises:
        InputError: no entry passes, or an entry that was asked for is not in the manifest.
    """

    def __init__(
        self, manifest: Manifest, config: SamplingConfig, selection: "Selection | None" = None
    ) -> None:
        self.config = config
        chosen = selection or Selection.of(manifest.table, config)
        self.rows, self.filtered = chosen.rows, chosen.filtered
        if not len(self.rows):
            raise InputError(
                f"no entry of the manifest passes the filter ({self.filtered}): relax sampling settings",
                reason="no-entries",
            )
        self._order: tuple[RandomStreams, NDArray[np.int64]] | None = None
        if config.weights == "af3":
            new = config.split.part == "validation" and config.split.new_clusters
            self.targets = target_weights(
                manifest.table, self.rows, training_rows(manifest.table, config.split) if new else None
            )
            total = np.cumsum(self.targets.weight)
            if not len(total):
                raise InputError("no chain of the selected entries has coordinates", reason="no-entries")
            self._edges = total / total[-1]

    @property
    def epoch_size(self) -> int:
        """Samples in an epoch."""
        return self.config.epoch_size or len(self.rows)

    def draw(self, epoch: int, index: int, seed: int = 0, attempt: int = 0) -> Draw:
        """What sample ``index`` of ``epoch`` is about; ``attempt`` counts those that failed before it."""
        streams = RandomStreams(seed, epoch, index, attempt)
        if self.config.weights == "uniform" and attempt:
            return Draw(int(streams("target").choice(self.rows)), ())
        if self.config.weights == "uniform":
            repeat, place = divmod(index, len(self.rows))
            return Draw(int(self._permutation(RandomStreams(seed, epoch, repeat))[place]), ())
        number = streams("target").random()
        chosen = int(np.searchsorted(self._edges, number, side="right"))
        chains = (int(self.targets.chain_i[chosen]), int(self.targets.chain_j[chosen]))
        return Draw(int(self.targets.row[chosen]), chains if chains[1] >= 0 else chains[:1])

    def _permutation(self, streams: RandomStreams) -> NDArray[np.int64]:
        # The last one is remembered: samples of an epoch mostly ask for the same.
        if self._order is None or self._order[0] != streams:
            self._order = (streams, streams("entries").permutation(self.rows))
        return self._order[1]


@dataclass(frozen=True)
class Selection:
    """``rows``: manifest rows that pass the filters; ``filtered``: how many do not, by reason."""

    rows: NDArray[np.int64]
    filtered: dict[str, int]

    @classmethod
    def of(cls, table: pa.Table, config: SamplingConfig) -> "Selection":
        """Apply all filters; an entry counts under the first reason that applies.

        Raises:
            InputError: ``entries`` are not there, or the expression cannot be used.
        """
        reasons = part_reasons(table, config.split)
        if config.where:
            matches = matching_rows(table, config.where)
            for value, reason in ((False, "where"), (None, "where-unknown")):
                reasons[(reasons == "") & (matches == value)] = reason
        simple = _limit_reasons(table, config)
        reasons = np.where(simple != "", simple, reasons)
        if config.split.part == "validation" and config.split.new_clusters:
            rows = np.flatnonzero(reasons == "")
            new = target_weights(table, rows, training_rows(table, config.split)).row
            reasons[np.setdiff1d(rows, new)] = "split-no-new-cluster"
        counts = Counter(reasons[reasons != ""].tolist())
        return cls(np.flatnonzero(reasons == ""), dict(counts))


def _limit_reasons(table: pa.Table, config: SamplingConfig) -> NDArray[np.str_]:
    columns = {
        name: table[name].to_pylist() for name in ("entry", "release_date", "resolution", "method", "n_token")
    }
    wanted = set(config.entries)
    absent = sorted(wanted - set(columns["entry"]))
    if absent:
        raise InputError(
            f"entries not in the manifest: {', '.join(absent[:10])}; build them or leave them out",
            reason="no-entries",
        )
    return np.array(
        [
            _reject_reason({name: column[row] for name, column in columns.items()}, wanted, config)
            for row in range(table.num_rows)
        ],
        "U24",
    )


def _reject_reason(row: Mapping[str, Any], wanted: set[str], config: SamplingConfig) -> str:
    date, resolution = row["release_date"], row["resolution"]
    if wanted and row["entry"] not in wanted:
        return "not-listed"
    if date is not None and config.released_from is not None and date < config.released_from:
        return "released-too-early"
    if date is not None and config.released_before is not None and date >= config.released_before:
        return "released-too-late"
    if resolution is not None and config.max_resolution is not None and resolution > config.max_resolution:
        return "resolution"
    if config.max_tokens is not None and row["n_token"] > config.max_tokens:
        return "too-many-tokens"
    if config.methods and row["method"] not in config.methods:
        return "method"
    return ""


def target_weights(
    table: pa.Table, rows: NDArray[np.int64], known: NDArray[np.int64] | None = None
) -> Targets:
    """Every resolved chain, and every interface of two such, with its weight (AF3 SI 2.5.1).

    weight = β / cluster size · Σ over its chains of α, with β 0.5 for chains and 1 for interfaces, α 3 for
    polymers and 1 for ligands. Cluster sizes count chains or interfaces of the selected rows. A chain
    without a cluster is clustered with chains of the same sequence or, a ligand, with the copies of its
    entity in the entry (a capsid's hundreds of ions would outweigh everything else); an interface without
    one, with those between the same two clusters of chains.

    Of clusters that the rows ``known`` have, too, nothing can be drawn: no chain, and no interface if theirs
    are between the same two.
    """
    everything = table
    table = table.take(pa.array(rows))
    chains, chain_row, chain_first = _flatten(table, "chains")
    interfaces, interface_row, _ = _flatten(table, "interfaces")
    alpha_of = np.array([*TYPE_WEIGHT.values()])
    kinds = pc.index_in(chains.field("mol_type"), pa.array(list(TYPE_WEIGHT))).to_numpy(zero_copy_only=False)
    alpha = alpha_of[kinds]
    cluster = _chain_clusters(chains, chain_row)
    resolved = chains.field("n_resolved").to_numpy() > 0

    i = chain_first[interface_row] + interfaces.field("chain_i").to_numpy()
    j = chain_first[interface_row] + interfaces.field("chain_j").to_numpy()
    pair = np.sort(np.stack([cluster[i], cluster[j]], axis=1), axis=1)
    pair_cluster = _prefer_given(interfaces.field("cluster"), pair[:, 0] * (len(cluster) + 1) + pair[:, 1])

    is_new, is_new_pair = resolved, resolved[i] & resolved[j]
    if known is not None:
        names, pair_names = cluster_names(table)
        old, old_pairs = cluster_names(everything.take(pa.array(known)))
        is_new = is_new & ~np.isin(names, old)
        is_new_pair = is_new_pair & ~np.isin(pair_names, old_pairs)
    usable_i = np.flatnonzero(is_new)
    usable_pair = np.flatnonzero(is_new_pair)
    chain_weight = CHAIN_WEIGHT * alpha[usable_i] / _cluster_sizes(cluster[usable_i])
    pair_weight = (alpha[i] + alpha[j])[usable_pair] / _cluster_sizes(pair_cluster[usable_pair])
    return Targets(
        row=rows[np.concatenate([chain_row[usable_i], interface_row[usable_pair]])],
        chain_i=np.concatenate(
            [
                usable_i - chain_first[chain_row[usable_i]],
                interfaces.field("chain_i").to_numpy()[usable_pair],
            ]
        ).astype(np.int64),
        chain_j=np.concatenate(
            [np.full(len(usable_i), -1), interfaces.field("chain_j").to_numpy()[usable_pair]]
        ).astype(np.int64),
        weight=np.concatenate([chain_weight, INTERFACE_WEIGHT * pair_weight]),
    )


def cluster_names(table: pa.Table) -> tuple[NDArray[np.str_], NDArray[np.str_]]:
    """Names of the clusters of all chains and of all interfaces, comparable between tables.

    A chain without a cluster has its sequence's name, an interface the two of its chains. Ligands without a
    cluster share one name: they never are what is new about a structure.
    """
    chains, _, chain_first = _flatten(table, "chains")
    interfaces, interface_row, _ = _flatten(table, "interfaces")
    given = chains.field("cluster")
    names = pc.if_else(pc.equal(given, ""), chains.field("sequence_digest"), given)
    chain_names = np.array(names.to_pylist(), str)
    ends = np.stack(
        [
            chain_names[chain_first[interface_row] + interfaces.field(side).to_numpy()]
            for side in ("chain_i", "chain_j")
        ]
    )
    ends.sort(axis=0)
    pairs = np.char.add(np.char.add(ends[0], "|"), ends[1])
    own = np.array(interfaces.field("cluster").to_pylist(), str)
    return chain_names, np.where(own == "", pairs, own)


def _flatten(table: pa.Table, name: str) -> tuple[pa.StructArray, NDArray[np.int64], NDArray[np.int64]]:
    """A column of lists as one array, with each item's row and each row's first item."""
    column = table[name].combine_chunks()
    if isinstance(column, pa.ChunkedArray):  # what combining no chunks gives
        column = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    lengths = pc.list_value_length(column).to_numpy(zero_copy_only=False).astype(np.int64)
    return column.flatten(), np.repeat(np.arange(len(lengths)), lengths), np.cumsum(lengths) - lengths


def _chain_clusters(chains: pa.StructArray, chain_row: NDArray[np.int64]) -> NDArray[np.int64]:
    """A number for each chain; chains of one cluster share it."""
    sequence = chains.field("sequence_digest")
    has_none = pc.equal(sequence, "").to_numpy(zero_copy_only=False).astype(bool)
    entity = chains.field("entity_id").to_numpy().astype(np.int64)
    copies = _renumber(chain_row * (int(entity.max(initial=0)) + 1) + entity)
    codes = np.where(has_none, -1 - copies, _codes(sequence))
    return _renumber(_prefer_given(chains.field("cluster"), codes))


def _prefer_given(given: pa.Array, fallback: NDArray[np.int64]) -> NDArray[np.int64]:
    """Codes of the given cluster names; where the name is empty, the fallback's, kept apart from them."""
    empty = pc.equal(given, "").to_numpy(zero_copy_only=False).astype(bool)
    return np.where(empty, _renumber(fallback), -1 - _codes(given))


def _codes(strings: pa.Array) -> NDArray[np.int64]:
    found: NDArray[np.int64] = (
        strings.dictionary_encode().indices.to_numpy(zero_copy_only=False).astype(np.int64)
    )
    return found.copy()


def _renumber(codes: NDArray[np.int64]) -> NDArray[np.int64]:
    found: NDArray[np.int64] = np.unique(codes, return_inverse=True)[1].astype(np.int64)
    return found


def _cluster_sizes(cluster: NDArray[np.int64]) -> NDArray[np.int64]:
    _, inverse, counts = np.unique(cluster, return_inverse=True, return_counts=True)
    found: NDArray[np.int64] = counts[inverse]
    return found
