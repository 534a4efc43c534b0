"""Triangle updates of a sharded pair representation (algorithms 12 to 15).

The parameters are the serial layers'.

Shapes: z [B, R, N, C_z], this rank's R of N rows (N is padded); mask [B, R, N] boolean. Residuals are the
caller's.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megafold.trainer import ops
from megafold.trainer.model.pairformer import PairUpdate
from megafold.trainer.model.triangle import TriangleAttention, TriangleMultiplication
from megafold.trainer.parallel.collectives import (
    Transfer,
    all_to_all,
    gather_operand,
    join,
    start_gather,
    sum_scatter,
    transpose,
    use,
)
from megafold.trainer.parallel.cost import TriangleScheme, choose_triangle_scheme
from megafold.trainer.parallel.mesh import Peers
from megafold.trainer.parallel.shards import Shards, dropped, shared_dropout

TO_CHANNELS = use("triangle_multiplication.to_channels", "both operands, rows to channels")
FROM_CHANNELS = use("triangle_multiplication.from_channels", "the product, channels to rows")
OPERAND = use("triangle_multiplication.operand", "one operand of the outgoing update, two ranks")
PRODUCT = use("triangle_multiplication.product", "parts of the product of the incoming update, two ranks")
BIAS = use("triangle_attention.bias", "rows of the attention's bias")
TO_COLUMNS = use("rotation.to_columns", "z, rows to columns")
TO_ROWS = use("rotation.to_rows", "z, columns to rows")


def triangle_multiplication(
    layer: TriangleMultiplication,
    z: Tensor,
    mask: Tensor,
    peers: Peers,
    scheme: TriangleScheme | None = None,
    *,
    keep: Tensor | None = None,
    residual: bool = False,
) -> Tensor:
    """[B, R, N, C_z] → [B, R, N, C_z].

    ``scheme`` None: the one that moves less; ``keep``: dropout's factors, broadcast against ``z``;
    ``residual``: add ``z``.
    """
    c = layer.linear_out.in_features
    if scheme is None:
        scheme = choose_triangle_scheme(z.shape[2], c, peers.size)
    of_channels = _by_channels if scheme == "channels" else _by_operand
    if residual and _has_kernels(peers):
        from megafold.trainer.kernels.triangle_multiplication.halves import multiply_rows, unsupported_rows

        if unsupported_rows(z, mask, layer.weights) is None:

            def product(ab: Tensor) -> Tensor:
                """[2, C, R, N] → [C, R, N]."""
                return of_channels(ab.unsqueeze(0), layer.outgoing, peers)[0]

            return multiply_rows(z, mask, layer.weights, product, keep)
    layers = (layer.linear_ab, layer.linear_ab_gate, layer.linear_gate)
    weight = torch.cat([each.weight for each in layers])
    projected = ops.layernorm_linear(z, layer.norm_in.weight, layer.norm_in.bias, weight)
    ab, ab_gate, gate = projected.split([each.out_features for each in layers], dim=-1)
    ab = torch.sigmoid(ab_gate) * ab * mask.unsqueeze(-1)
    a_and_b = ab.unflatten(-1, (2, c)).permute(0, 3, 4, 1, 2)  # [B, 2, C, R, N]
    x = of_channels(a_and_b, layer.outgoing, peers).movedim(1, -1)
    out = ops.layernorm_linear(x, layer.norm_out.weight, layer.norm_out.bias, layer.linear_out.weight)
    update = dropped(torch.sigmoid(gate) * out, keep)
    return z + update if residual else update


def _has_kernels(peers: Peers) -> bool:
    """Whether back end ``triton`` runs, whose kernels take rows and leave what other ranks hold to us."""
    return ops.active_backend() == "triton" and peers.size > 1


def _product(a: Tensor, b: Tensor, outgoing: bool) -> Tensor:
    """Σ_k a_ik b_jk or Σ_k a_ki b_kj, channels first."""
    return a @ b.transpose(-1, -2) if outgoing else a.transpose(-1, -2) @ b


def _by_channels(ab: Tensor, outgoing: bool, peers: Peers) -> Tensor:
    """Every rank multiplies whole matrices, of some of the channels. [B, 2, C, R, N] → [B, C, R, N]."""
    p, c = peers.size, ab.shape[2]
    ab = F.pad(ab, (0, 0, 0, 0, 0, -c % p))
    pieces = ab.unflatten(2, (p, -1)).movedim(2, 0)  # [P, B, 2, C/P, R, N]
    whole = join(all_to_all(pieces, peers, TO_CHANNELS), 3)  # [B, 2, C/P, N, N]
    x = _product(whole[:, 0], whole[:, 1], outgoing)
    pieces = x.unflatten(2, (p, -1)).movedim(2, 0)  # [P, B, C/P, R, N]
    return join(all_to_all(pieces, peers, FROM_CHANNELS), 1)[:, :c]


def _by_operand(ab: Tensor, outgoing: bool, peers: Peers) -> Tensor:
    """Every rank multiplies its rows, of all channels. [B, 2, C, R, N] → [B, C, R, N].

    Outgoing: the product's own rows need all of b. Incoming: the sum over k is what the ranks share, and
    the parts of the product are summed; this is the transposed case, and sends as much.
    """
    a, b = ab.unbind(1)
    if outgoing:
        return _product(a, join(gather_operand(b, peers, OPERAND), 2), outgoing)
    parts = _product(a, b, outgoing).unflatten(2, (peers.size, -1))  # [B, C, P, R, N]
    return sum_scatter(parts.movedim(2, 0), peers, PRODUCT)


def triangle_attention(
    layer: TriangleAttention,
    z: Tensor,
    mask: Tensor,
    peers: Peers,
    keep: Tensor | None = None,
    *,
    residual: bool = False,
) -> Tensor:
    """[B, R, N, C_z] → [B, R, N, C_z]: attention within each row.

    For the ending node give rows of the transposed matrix. The bias is on its way to the other ranks while
    queries, keys, values and gates are computed. ``keep``: dropout's factors, broadcast against ``z``;
    ``residual``: add ``z``.
    """
    if residual and _has_kernels(peers):
        from megafold.trainer.kernels.triangle_attention.halves import attend_rows, unsupported_rows

        if unsupported_rows(z, mask, layer.weights) is None:
            return attend_rows(z, mask, layer.weights, Transfer(peers, BIAS), keep)
    norm = layer.norm
    bias = ops.layernorm_linear(z, norm.weight, norm.bias, layer.linear_bias.weight)
    gathering = start_gather(bias.permute(0, 3, 1, 2), peers, BIAS)  # [B, H, R, N]
    layers = (layer.linear_qkv, layer.linear_gate)
    weight = torch.cat([each.weight for each in layers])
    projected = ops.layernorm_linear(z, norm.weight, norm.bias, weight)
    qkv, gate = projected.split([each.out_features for each in layers], dim=-1)
    # [B, R, N, 3·H·D] → three of [B, R, H, N, D]
    q, k, v = qkv.unflatten(-1, (3, layer.n_head, -1)).permute(3, 0, 1, 4, 2, 5)
    o = ops.evoattention(q, k, v, join(gathering.wait(widen=True), 2), mask)
    return ops.gated_output(
        o.transpose(2, 3).flatten(-2),
        gate,
        layer.linear_out.weight,
        keep=keep,
        residual=z if residual else None,
    )


def pair_update(block: PairUpdate, z: Tensor, pair_mask: Tensor, shards: Shards) -> Tensor:
    """[B, R, N, C_z] → [B, R, N, C_z], residuals included: algorithm 17, lines 2 to 6.

    ``pair_mask`` is symmetric: the same shard of it serves rows and columns.
    """
    peers = shards.peers
    first, second, third, fourth = shared_dropout(block.dropout, z, shards, 4)
    outgoing, incoming = block.multiplication_outgoing, block.multiplication_incoming
    z = triangle_multiplication(outgoing, z, pair_mask, peers, keep=first, residual=True)
    z = triangle_multiplication(incoming, z, pair_mask, peers, keep=second, residual=True)
    z = triangle_attention(block.attention_starting, z, pair_mask, peers, third, residual=True)
    z = transpose(z, peers, TO_COLUMNS)
    z = triangle_attention(block.attention_ending, z, pair_mask, peers, fourth, residual=True)
    return transpose(block.transition(z, residual=True), peers, TO_ROWS)
