"""Which entry and chains a sample is about.

What index ``i`` of epoch ``e`` is depends on ``(seed, e, i)`` and the manifest alone. Ranks and workers only
share out the indices (``order.py``).
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from megafold.cache_store import Manifest
from megafold.pipeline.errors import InputError
from megafold.pipeline.stream.config import SamplingConfig
from megafold.pipeline.stream.entry import ranges
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
    tables = _chains_and_interfaces(table, rows)
    chains, interfaces = tables.chains, tables.interfaces
    alpha_of = np.array([*TYPE_WEIGHT.values()])
    kinds = pc.index_in(chains["mol_type"], pa.array(list(TYPE_WEIGHT))).to_numpy(zero_copy_only=False)
    alpha = alpha_of[kinds]
    cluster = _chain_clusters(chains, tables.chain_row)
    resolved = chains["n_resolved"].to_numpy() > 0

    i, j = tables.ends("chain_i"), tables.ends("chain_j")
    pair = np.sort(np.stack([cluster[i], cluster[j]], axis=1), axis=1)
    pair_cluster = _prefer_given(interfaces["cluster"], pair[:, 0] * (len(cluster) + 1) + pair[:, 1])

    is_new, is_new_pair = resolved, resolved[i] & resolved[j]
    if known is not None:
        names, pair_names = tables.cluster_names()
        old, old_pairs = _chains_and_interfaces(table, known).cluster_names()
        is_new = is_new & ~_is_in(names, old)
        is_new_pair = is_new_pair & ~_is_in(pair_names, old_pairs)
    usable_i = np.flatnonzero(is_new)
    usable_pair = np.flatnonzero(is_new_pair)
    chain_weight = CHAIN_WEIGHT * alpha[usable_i] / _cluster_sizes(cluster[usable_i])
    pair_weight = (alpha[i] + alpha[j])[usable_pair] / _cluster_sizes(pair_cluster[usable_pair])
    pair_i, pair_j = (interfaces[side].to_numpy()[usable_pair] for side in ("chain_i", "chain_j"))
    chain_row, interface_row = tables.chain_row[usable_i], tables.interface_row[usable_pair]
    return Targets(
        row=rows[np.concatenate([chain_row, interface_row])],
        chain_i=np.concatenate([usable_i - tables.chain_first[chain_row], pair_i]).astype(np.int64),
        chain_j=np.concatenate([np.full(len(usable_i), -1), pair_j]).astype(np.int64),
        weight=np.concatenate([chain_weight, INTERFACE_WEIGHT * pair_weight]),
    )


@dataclass(frozen=True)
class _ChainsAndInterfaces:
    """Chains and interfaces of rows of a manifest, by field: those few that weights need.

    ``chain_row``, ``interface_row``: each one's row, a place among the rows asked for; ``chain_first``: each
    row's first chain.
    """

    chains: Mapping[str, pa.Array]
    chain_row: NDArray[np.int64]
    chain_first: NDArray[np.int64]
    interfaces: Mapping[str, pa.Array]
    interface_row: NDArray[np.int64]

    def ends(self, side: str) -> NDArray[np.int64]:
        """The chain at one side of each interface."""
        found: NDArray[np.int64] = self.chain_first[self.interface_row] + self.interfaces[side].to_numpy()
        return found

    def cluster_names(self) -> tuple[pa.Array, pa.Array]:
        """Names of the clusters of all chains and of all interfaces, comparable between rows.

        A chain without a cluster has its sequence's name, an interface the two of its chains. Ligands without
        a cluster share one name: they never are what is new about a structure.
        """
        given, own = self.chains["cluster"], self.interfaces["cluster"]
        names = pc.if_else(pc.equal(given, ""), self.chains["sequence_digest"], given)
        ends = [names.take(pa.array(self.ends(side))) for side in ("chain_i", "chain_j")]
        pairs = pc.binary_join_element_wise(pc.min_element_wise(*ends), pc.max_element_wise(*ends), "|")
        return names, pc.if_else(pc.equal(own, ""), pairs, own)


def _chains_and_interfaces(table: pa.Table, rows: NDArray[np.int64]) -> _ChainsAndInterfaces:
    names = ("mol_type", "n_resolved", "cluster", "sequence_digest", "entity_id")
    chains, chain_row, chain_first = _flatten(table["chains"], names, rows)
    interfaces, interface_row, _ = _flatten(table["interfaces"], ("chain_i", "chain_j", "cluster"), rows)
    return _ChainsAndInterfaces(chains, chain_row, chain_first, interfaces, interface_row)


def _flatten(
    column: pa.ChunkedArray, names: Sequence[str], rows: NDArray[np.int64]
) -> tuple[dict[str, pa.Array], NDArray[np.int64], NDArray[np.int64]]:
    """Fields of lists in some rows, an array each; each item's row, and each row's first item."""
    lengths = pc.list_value_length(column).to_numpy().astype(np.int64)
    kind = column.type.value_type
    items = {
        name: _joined([chunk.flatten().field(name) for chunk in column.chunks], kind.field(name).type)
        for name in names
    }
    if len(rows) < len(lengths):
        chosen = pa.array(ranges((np.cumsum(lengths) - lengths)[rows], lengths[rows]))
        items, lengths = {name: item.take(chosen) for name, item in items.items()}, lengths[rows]
    return items, np.repeat(np.arange(len(lengths)), lengths), np.cumsum(lengths) - lengths


def _joined(chunks: Sequence[pa.Array], kind: pa.DataType) -> pa.Array:
    if len(chunks) == 1:
        return chunks[0]
    return pa.concat_arrays(chunks) if chunks else pa.array([], kind)


def _is_in(names: pa.Array, known: pa.Array) -> NDArray[np.bool_]:
    found: NDArray[np.bool_] = pc.is_in(names, known).to_numpy(zero_copy_only=False).astype(bool)
    return found


def _chain_clusters(chains: Mapping[str, pa.Array], chain_row: NDArray[np.int64]) -> NDArray[np.int64]:
    """A number for each chain; chains of one cluster share it."""
    sequence = chains["sequence_digest"]
    has_none = pc.equal(sequence, "").to_numpy(zero_copy_only=False).astype(bool)
    entity = chains["entity_id"].to_numpy().astype(np.int64)
    copies = _renumber(chain_row * (int(entity.max(initial=0)) + 1) + entity)
    codes = np.where(has_none, -1 - copies, _codes(sequence))
    return _renumber(_prefer_given(chains["cluster"], codes))


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
