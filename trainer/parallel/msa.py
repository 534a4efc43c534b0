"""The MSA module over shards (algorithms 8 to 10).

Shapes: m [B, M, R, C_m], this rank's R of N tokens in all M rows of the MSA; z [B, R, N, C_z], the rows of
the same tokens; msa_mask [B, M, N], mask [B, N] and pair_mask [B, R, N] boolean. N is padded.
"""

from functools import partial
from typing import cast

import torch.nn.functional as F
from torch import Tensor

from megafold.trainer.model.msa import (
    MSABlock,
    MSAModule,
    MSAPairWeightedAveraging,
    MSAUpdate,
    OuterProductMean,
)
from megafold.trainer.model.primitives import run_block
from megafold.trainer.ops.precision import result_dtype
from megafold.trainer.parallel.collectives import all_to_all, gather_rows, join, use
from megafold.trainer.parallel.mesh import Peers
from megafold.trainer.parallel.shards import Shards, dropped, shared_dropout
from megafold.trainer.parallel.triangle import pair_update

OPERAND = use("outer_product_mean.operand", "the right operand of the outer product")
WEIGHTS = use("msa_averaging.weights", "rows of the averaging's weights")
TO_MSA_ROWS = use("msa_averaging.to_msa_rows", "m, tokens to rows of the MSA")
TO_TOKENS = use("msa_averaging.to_tokens", "the average, rows of the MSA to tokens")


def outer_product_mean(layer: OuterProductMean, m: Tensor, msa_mask: Tensor, shards: Shards) -> Tensor:
    """[B, M, R, C_m] → [B, R, N, C_z]."""
    own_mask = msa_mask[:, :, shards.rows]
    a, b = layer.operands(m, own_mask)
    return layer.mean(a, gather_rows(b, 2, shards.peers, OPERAND), own_mask, msa_mask)


def pair_weighted_averaging(
    layer: MSAPairWeightedAveraging, m: Tensor, z: Tensor, mask: Tensor, peers: Peers
) -> Tensor:
    """[B, M, R, C_m] → [B, M, R, C_m], without the residual.

    Each rank averages some rows of the MSA over all tokens: then the weights are what must be whole, and
    not the values, which have M·H·C numbers a token.
    """
    n_msa = m.shape[1]
    weights = layer.row_weights(z, mask).to(result_dtype(z))
    weights = gather_rows(weights, 1, peers, WEIGHTS)  # [B, N, N, H]
    rows = F.pad(m, (0, 0, 0, 0, 0, -n_msa % peers.size))
    pieces = rows.unflatten(1, (peers.size, -1)).movedim(1, 0)  # [P, B, M/P, R, C_m]
    out = layer.average(join(all_to_all(pieces, peers, TO_MSA_ROWS), 2), weights)  # [B, M/P, N, C_m]
    pieces = out.unflatten(2, (peers.size, -1)).movedim(2, 0)  # [P, B, M/P, R, C_m]
    return join(all_to_all(pieces, peers, TO_TOKENS), 1)[:, :n_msa]


def msa_update(update: MSAUpdate, m: Tensor, z: Tensor, mask: Tensor, shards: Shards) -> Tensor:
    """[B, M, R, C_m] → [B, M, R, C_m]."""
    averaged = pair_weighted_averaging(update.averaging, m, z, mask, shards.peers)
    (keep,) = shared_dropout(update.dropout, averaged, shards)
    m = m + dropped(averaged, None if keep is None else keep[:, :, shards.rows])
    return m + update.transition(m)


def msa_block(
    block: MSABlock, m: Tensor, z: Tensor, msa_mask: Tensor, mask: Tensor, pair_mask: Tensor, shards: Shards
) -> tuple[Tensor, Tensor]:
    """The next m [B, M, R, C_m] and z [B, R, N, C_z]: this rank's tokens and rows."""
    z = z + outer_product_mean(block.outer_product_mean, m, msa_mask, shards)
    if block.msa is not None:
        m = msa_update(block.msa, m, z, mask, shards)
    return m, pair_update(block.pair, z, pair_mask, shards)


def msa_module(
    module: MSAModule,
    batch: dict[str, Tensor],
    s_inputs: Tensor,
    z: Tensor,
    pair_mask: Tensor,
    shards: Shards,
) -> Tensor:
    """The next z [B, R, N, C_z]; ``z`` itself where the batch has no rows."""
    if batch["msa"].shape[1] == 0:
        return z
    m = module.embed(batch, s_inputs, shards.rows)
    for block in module.blocks:
        run = partial(msa_block, cast(MSABlock, block), shards=shards)
        masks = (batch["msa_mask"], batch["token_mask"], pair_mask)
        m, z = run_block(run, m, z, *masks, recompute=module.recompute)
    return z
