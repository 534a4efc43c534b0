"""The Pairformer over shards (algorithms 17 and 24).

Shapes: s [B, N, C_s], the same on all ranks; z [B, R, N, C_z], this rank's rows; mask [B, N] and pair_mask
[B, R, N] boolean. N is padded.
"""

from functools import partial
from typing import cast

from torch import Tensor

from megafold.trainer import ops
from megafold.trainer.model.pairformer import PairformerBlock, PairformerStack
from megafold.trainer.model.primitives import run_block
from megafold.trainer.model.transformer import SingleAttention
from megafold.trainer.parallel.collectives import enter_shards, gather_alike, use
from megafold.trainer.parallel.shards import Shards
from megafold.trainer.parallel.triangle import pair_update

KEYS_VALUES = use("attention_pair_bias.keys_values", "gradient of what keys, values and queries come from")
RESULT = use("attention_pair_bias.result", "rows of the attention's result")


def attention_pair_bias(layer: SingleAttention, a: Tensor, z: Tensor, mask: Tensor, shards: Shards) -> Tensor:
    """[B, 1, N, C_a] → [B, 1, N, C_a], without the residual: this rank's queries, all keys, then all rows."""
    peers, n_head = shards.peers, layer.n_head

    def heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (n_head, -1)).transpose(-2, -3)

    a = enter_shards(layer.norm(a), peers, KEYS_VALUES)
    own = a[:, :, shards.rows]
    k, v = layer.linear_kv(a).chunk(2, dim=-1)
    bias = layer.bias(z).permute(0, 3, 1, 2)  # [B, H, R, N]
    o = ops.evoattention(heads(layer.linear_q(own)), heads(k), heads(v), bias, mask[:, None])
    o = o.transpose(-2, -3).flatten(-2)
    out = ops.gated_output(o, layer.linear_gate(own), layer.linear_out.weight)
    return gather_alike(out, 2, peers, RESULT)


def pairformer_block(
    block: PairformerBlock, s: Tensor, z: Tensor, mask: Tensor, pair_mask: Tensor, shards: Shards
) -> tuple[Tensor, Tensor]:
    """The next s [B, N, C_s], on all ranks alike, and this rank's rows of z [B, R, N, C_z]."""
    z = pair_update(block.pair, z, pair_mask, shards)
    s = s + attention_pair_bias(block.attention, s[:, None], z, mask, shards)[:, 0]
    return s + block.transition(s), z


def pairformer(
    stack: PairformerStack, s: Tensor, z: Tensor, mask: Tensor, pair_mask: Tensor, shards: Shards
) -> tuple[Tensor, Tensor]:
    """The last block's s and z, as :func:`pairformer_block` gives them."""
    for block in stack.blocks:
        run = partial(pairformer_block, cast(PairformerBlock, block), shards=shards)
        s, z = run_block(run, s, z, mask, pair_mask, recompute=stack.recompute)
    return s, z
