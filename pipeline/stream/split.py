"""Training and validation parts of one manifest, by release date and by cluster.

By date, everything before it is for training. By cluster, a share of the clusters of polymers is held out: an
entry is for training if it has none of them, for validation if it has no others, and for neither if it
has both, as it would show the model what it is to be tested on.
"""

import hashlib
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.typing import NDArray

from megafold.pipeline.stream.config import SplitConfig

_POLYMERS: Final = ("protein", "rna", "dna")


def part_reasons(table: pa.Table, split: SplitConfig) -> NDArray[np.str_]:
    """For each row of a manifest why it is not in the part asked for; ``""`` where it is.

    ``split-date``: on the other side of the date. ``split-cluster``: of clusters of the other part alone.
    ``split-mixed``: of clusters of both parts.
    """
    reasons = np.full(table.num_rows, "", "U16")
    if split.part == "all":
        return reasons
    is_training = split.part == "train"
    if split.held_out:
        held, free = _held_and_free(table, split)
        reasons[held & free] = "split-mixed"
        reasons[(held & ~free) if is_training else ~held] = "split-cluster"
    if split.date is not None:
        late = pc.greater_equal(table["release_date"], split.date)
        late = pc.fill_null(late, False).to_numpy().astype(bool)
        reasons[late if is_training else ~late] = "split-date"
    return reasons


def training_rows(table: pa.Table, split: SplitConfig) -> NDArray[np.int64]:
    """Rows of the training part, whatever other filters say of them."""
    training = SplitConfig(part="train", date=split.date, held_out=split.held_out, salt=split.salt)
    return np.flatnonzero(part_reasons(table, training) == "")


def _held_and_free(table: pa.Table, split: SplitConfig) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
    """Whether each row has polymers of held-out clusters, and whether it has polymers of others."""
    lengths = pc.list_value_length(table["chains"]).to_numpy().astype(np.int64)
    row = np.repeat(np.arange(table.num_rows), lengths)
    chains = pa.concat_arrays([chunk.flatten() for chunk in table["chains"].chunks])
    is_polymer = pc.is_in(chains.field("mol_type"), pa.array(_POLYMERS)).to_numpy(zero_copy_only=False)
    # A chain without a cluster is a cluster with those of its sequence.
    given = chains.field("cluster")
    name = pc.if_else(pc.equal(given, ""), chains.field("sequence_digest"), given).dictionary_encode()
    chosen = np.array([_is_held_out(text, split) for text in name.dictionary.to_pylist()], bool)
    is_held = chosen[name.indices.to_numpy(zero_copy_only=False)] if len(chosen) else np.empty(0, bool)
    held, free = np.zeros(table.num_rows, bool), np.zeros(table.num_rows, bool)
    held[row[is_polymer & is_held]] = True
    free[row[is_polymer & ~is_held]] = True
    return held, free


def _is_held_out(cluster: str, split: SplitConfig) -> bool:
    digest = hashlib.sha256(f"{split.salt}\n{cluster}".encode()).digest()
    return int.from_bytes(digest[:8], "little") < split.held_out * 2**64
