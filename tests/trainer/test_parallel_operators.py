"""Every operator of a sharded pair representation against the serial one, in float64 on gloo ranks.

Outputs, gradients of the inputs and of every parameter; lengths that do not divide by the number of ranks;
tokens that are absent; padding that holds rubbish.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megafold.trainer import ops
from megafold.trainer.model.confidence import ConfidenceHead
from megafold.trainer.model.msa import MSABlock, MSAPairWeightedAveraging, MSAUpdate, OuterProductMean
from megafold.trainer.model.outputs import ConfidenceLogits, TrunkOutputs
from megafold.trainer.model.pairformer import PairformerBlock, PairUpdate
from megafold.trainer.model.template import TemplateEmbedder
from megafold.trainer.model.transformer import SingleAttention
from megafold.trainer.model.triangle import TriangleAttention, TriangleMultiplication
from megafold.trainer.model.trunk import DistogramHead
from megafold.trainer.parallel import confidence, msa, pairformer, triangle, trunk
from megafold.trainer.parallel.batches import N_TOKEN, shard_batch
from megafold.trainer.parallel.collectives import join, start_gather, transpose
from megafold.trainer.parallel.mesh import Peers
from megafold.trainer.parallel.shards import Shards, pad_tokens
from tests.trainer.batches import random_batch
from tests.trainer.networks import MINI, MINI_JUDGING, as_dtype, fill_parameters
from tests.trainer.parallel_checks import error, peers_of, rand, summed

C_Z, C_S, C_M = MINI.c_z, MINI.c_s, MINI.c_m
TOLERANCE = 1e-10


@dataclass(frozen=True)
class Sample:
    """Inputs of all operators, whole."""

    n: int
    z: Tensor
    s: Tensor
    m: Tensor
    mask: Tensor
    msa_mask: Tensor
    batch: dict[str, Tensor]

    @property
    def pair_mask(self) -> Tensor:
        return self.mask[:, :, None] & self.mask[:, None]


def sample(n: int) -> Sample:
    mask = torch.ones(1, n, dtype=torch.bool)
    mask[0, 1] = False
    mask[0, n - 1] = n < 4
    msa_mask = torch.rand(1, 5, n, generator=torch.Generator().manual_seed(3)) > 0.3
    msa_mask[0, 2] = False
    return Sample(
        n=n,
        z=rand(1, n, n, C_Z),
        s=rand(1, n, C_S, seed=1),
        m=rand(1, 5, n, C_M, seed=2),
        mask=mask,
        msa_mask=msa_mask & mask[:, None],
        batch=as_dtype(random_batch(0, n, n_ligand=2)),
    )


@dataclass(frozen=True)
class Local:
    """A rank's inputs: padded with rubbish, cut to its rows."""

    shards: Shards
    z: Tensor
    s: Tensor
    m: Tensor
    mask: Tensor
    msa_mask: Tensor
    batch: dict[str, Tensor]

    @property
    def peers(self) -> Peers:
        return self.shards.peers

    @property
    def pair_mask(self) -> Tensor:
        return self.shards.pair_mask(self.mask)


def local(whole: Sample, shards: Shards) -> Local:
    def pad(x: Tensor, axis: int) -> Tensor:
        return pad_tokens(x.detach(), axis, shards.n_padded, False if x.dtype == torch.bool else 50.0)

    rows = shards.rows
    return Local(
        shards=shards,
        z=pad(pad(whole.z, 1), 2)[:, rows].clone().requires_grad_(),
        s=pad(whole.s, 1).requires_grad_(),
        m=pad(whole.m, 2)[:, :, rows].clone().requires_grad_(),
        mask=pad(whole.mask, 1),
        msa_mask=pad(whole.msa_mask, 2),
        batch=_padded(whole.batch, shards),
    )


def _padded(batch: dict[str, Tensor], shards: Shards) -> dict[str, Tensor]:
    cut = shard_batch(batch, shards.peers)
    assert cut.pop(N_TOKEN) == shards.n_token
    return cut


#: Where the axis of tokens is that an output is shared along: rows of z, tokens of m, or not at all.
Z_ROWS, M_TOKENS, ALIKE = 1, 2, None


@dataclass(frozen=True)
class Operator:
    make: Callable[[], nn.Module]
    serial: Callable[[Any, Sample], Tensor]
    sharded: Callable[[Any, Local], Tensor]
    shared_axis: int | None = Z_ROWS


def _multiplication(outgoing: bool, scheme: Any) -> Operator:
    return Operator(
        lambda: TriangleMultiplication(C_Z, 6, outgoing=outgoing),
        lambda layer, whole: layer(whole.z, whole.pair_mask),
        lambda layer, own: triangle.triangle_multiplication(
            layer, own.z, own.pair_mask, own.peers, scheme=scheme
        ),
    )


def _ending(layer: TriangleAttention, own: Local) -> Tensor:
    columns = transpose(own.z, own.peers, triangle.TO_COLUMNS)
    out = triangle.triangle_attention(layer, columns, own.pair_mask, own.peers)
    return transpose(out, own.peers, triangle.TO_ROWS)


def _averaging(layer: MSAPairWeightedAveraging, own: Local) -> Tensor:
    return msa.pair_weighted_averaging(layer, own.m, own.z, own.mask, own.peers)


def _head() -> ConfidenceHead:
    assert MINI_JUDGING.confidence is not None
    return ConfidenceHead(MINI_JUDGING, MINI_JUDGING.confidence)


def _trunk(given: "Sample | Local") -> TrunkOutputs:
    """What the head is given of the trunk; rubbish where ``given`` has padding."""
    s_inputs = rand(1, 20, MINI.c_s_inputs, seed=6)[:, : given.s.shape[1]]
    return TrunkOutputs(s_inputs=s_inputs, s_trunk=given.s, z_trunk=given.z, distogram_logits=given.z)


def _confidence(name: str) -> Operator:
    """The head's logits, those of atoms at the tokens' representative ones."""
    is_pair = name in ("pae", "pde")

    def of_tokens(logits: ConfidenceLogits, batch: dict[str, Tensor]) -> Tensor:
        found: Tensor = getattr(logits, name)
        return found if is_pair else found[:, batch["rep_atom"][0].long()]

    def serial(layer: ConfidenceHead, whole: Sample) -> Tensor:
        batch = {**whole.batch, "token_mask": whole.mask}
        return of_tokens(layer(batch, _trunk(whole), batch["coords"]), batch)

    def sharded(layer: ConfidenceHead, own: Local) -> Tensor:
        batch = {**own.batch, "token_mask": own.mask}
        return of_tokens(confidence.judge(layer, batch, _trunk(own), batch["coords"], own.shards), batch)

    return Operator(_head, serial, sharded, Z_ROWS if is_pair else ALIKE)


OPERATORS = {
    **{
        f"multiplication_{direction}_{scheme}": _multiplication(direction == "outgoing", scheme)
        for direction in ("outgoing", "incoming")
        for scheme in ("channels", "operand")
    },
    "attention_starting": Operator(
        lambda: TriangleAttention(C_Z, 4, 2, starting=True),
        lambda layer, whole: layer(whole.z, whole.pair_mask),
        lambda layer, own: triangle.triangle_attention(layer, own.z, own.pair_mask, own.peers),
    ),
    "attention_ending": Operator(
        lambda: TriangleAttention(C_Z, 4, 2, starting=False),
        lambda layer, whole: layer(whole.z, whole.pair_mask),
        _ending,
    ),
    "pair_update": Operator(
        lambda: PairUpdate(C_Z, MINI.pairformer),
        lambda layer, whole: layer(whole.z, whole.pair_mask),
        lambda layer, own: triangle.pair_update(layer, own.z, own.pair_mask, own.shards),
    ),
    "outer_product_mean": Operator(
        lambda: OuterProductMean(C_M, C_Z, 4),
        lambda layer, whole: layer(whole.m, whole.msa_mask),
        lambda layer, own: msa.outer_product_mean(layer, own.m, own.msa_mask, own.shards),
    ),
    "pair_weighted_averaging": Operator(
        lambda: MSAPairWeightedAveraging(C_M, C_Z, 3, 2),
        lambda layer, whole: layer(whole.m, whole.z, whole.mask),
        _averaging,
        M_TOKENS,
    ),
    "msa_update": Operator(
        lambda: MSAUpdate(MINI),
        lambda layer, whole: layer(whole.m, whole.z, whole.mask),
        lambda layer, own: msa.msa_update(layer, own.m, own.z, own.mask, own.shards),
        M_TOKENS,
    ),
    "msa_block": Operator(
        lambda: MSABlock(MINI, last=False),
        lambda layer, whole: layer(whole.m, whole.z, whole.msa_mask, whole.mask, whole.pair_mask)[1],
        lambda layer, own: msa.msa_block(
            layer, own.m, own.z, own.msa_mask, own.mask, own.pair_mask, own.shards
        )[1],
    ),
    "template_embedder": Operator(
        lambda: TemplateEmbedder(MINI),
        lambda layer, whole: layer(whole.batch, whole.z, whole.pair_mask),
        lambda layer, own: trunk.template_embedder(layer, own.batch, own.z, own.pair_mask, own.shards),
    ),
    "attention_pair_bias": Operator(
        lambda: SingleAttention(C_S, C_Z, 4),
        lambda layer, whole: layer(whole.s, whole.z, whole.mask),
        lambda layer, own: pairformer.attention_pair_bias(layer, own.s[:, None], own.z, own.mask, own.shards)[
            :, 0
        ],
        ALIKE,
    ),
    "pairformer_block_z": Operator(
        lambda: PairformerBlock(C_S, C_Z, MINI.pairformer),
        lambda layer, whole: layer(whole.s, whole.z, whole.mask, whole.pair_mask)[1],
        lambda layer, own: pairformer.pairformer_block(
            layer, own.s, own.z, own.mask, own.pair_mask, own.shards
        )[1],
    ),
    "pairformer_block_s": Operator(
        lambda: PairformerBlock(C_S, C_Z, MINI.pairformer),
        lambda layer, whole: layer(whole.s, whole.z, whole.mask, whole.pair_mask)[0],
        lambda layer, own: pairformer.pairformer_block(
            layer, own.s, own.z, own.mask, own.pair_mask, own.shards
        )[0],
        ALIKE,
    ),
    **{f"confidence_{name}": _confidence(name) for name in ("pae", "pde", "plddt", "resolved")},
    "distogram": Operator(
        lambda: DistogramHead(C_Z, 5),
        lambda layer, whole: layer(whole.z),
        lambda layer, own: trunk.distogram_head(layer, own.z, own.peers),
    ),
}


def real_rows(x: Tensor, axis: int, shards: Shards) -> tuple[slice, Tensor]:
    """The tokens of this rank that are no padding, and ``x`` at them."""
    start = min(shards.rows.start, shards.n_token)
    stop = min(shards.rows.stop, shards.n_token)
    return slice(start, stop), x.narrow(axis, 0, stop - start)


def check_operator(name: str, size: int, n: int) -> dict[str, float]:
    """Errors of output, input gradients and parameter gradients."""
    peers = peers_of(size)
    if peers is None:
        return {}
    operator, shards = OPERATORS[name], Shards(peers, n)
    layer = operator.make()
    fill_parameters(layer)
    layer.double().train()
    whole = sample(n)
    inputs = {"z": whole.z.requires_grad_(), "s": whole.s.requires_grad_(), "m": whole.m.requires_grad_()}
    torch.manual_seed(5)
    expected = operator.serial(layer, whole)
    weight = rand(*expected.shape, seed=9)
    (weight * expected).sum().backward()
    gradients = {key: p.grad for key, p in layer.named_parameters()}
    layer.zero_grad()

    own = local(whole, shards)
    torch.manual_seed(5)
    out = operator.sharded(layer, own)
    errors = {}
    axis = operator.shared_axis
    if axis is None:  # the ranks agree on s, and each counts a share of what depends on it
        out = out[:, :n]
        errors["out"] = error(out, expected)
        (weight * out).sum().div(size).backward()
    else:
        tokens, out = real_rows(out, axis, shards)
        if out.ndim == 4 and axis == Z_ROWS:
            out = out[:, :, :n]
        index = (slice(None),) * axis + (tokens,)
        errors["out"] = error(out, expected[index])
        (weight[index] * out).sum().backward()
    for key, axis_of in (("z", 1), ("m", 2)):
        gradient, reference = getattr(own, key).grad, inputs[key].grad
        assert (gradient is None) == (reference is None)
        if gradient is not None and reference is not None:
            tokens, gradient = real_rows(gradient, axis_of, shards)
            gradient = gradient[:, :, :n] if key == "z" else gradient
            errors[f"d{key}"] = error(gradient, reference[(slice(None),) * axis_of + (tokens,)])
    if whole.s.grad is not None:
        assert own.s.grad is not None
        errors["ds"] = error(own.s.grad[:, :n] * size, whole.s.grad)
    for key, parameter in layer.named_parameters():
        reference = gradients[key]
        assert (parameter.grad is None) == (reference is None)
        if parameter.grad is not None and reference is not None:
            errors[key] = error(summed(parameter.grad, peers), reference)
    return errors


def worst(results: list[dict[str, float]]) -> dict[str, float]:
    return {key: value for result in results for key, value in result.items() if not value < TOLERANCE}


@pytest.mark.parametrize(("size", "n"), [(1, 5), (2, 7), (3, 7), (4, 5)])
@pytest.mark.parametrize("name", sorted(OPERATORS))
def test_an_operator_is_that_of_the_serial_model(rank_pool, name, size, n):
    results = rank_pool.run(check_operator, name, size, n)
    assert len(results[0]) > 2
    assert worst(results) == {}


def check_attention_bias(size: int, n: int) -> dict[str, float]:
    """dBias, dQ, dK, dV of attention whose rows and bias rows are shared."""
    peers = peers_of(size)
    if peers is None:
        return {}
    shards = Shards(peers, n)
    shape, rows = (1, n, 2, n, 3), partial(real_rows, shards=shards)
    q, k, v, bias = (*(rand(*shape, seed=i) for i in range(3)), rand(1, 2, n, n, seed=3))
    mask = torch.rand(1, n, n, generator=torch.Generator().manual_seed(4)) > 0.3
    mask[0, 0] = False
    whole = [x.clone().requires_grad_() for x in (q, k, v, bias)]
    weight = rand(*shape, seed=5)
    (weight * ops.evoattention(whole[0], whole[1], whole[2], whole[3], mask)).sum().backward()

    def cut(x: Tensor, axis: int, other: int) -> Tensor:
        padded = pad_tokens(pad_tokens(x, axis, shards.n_padded), other, shards.n_padded)
        return padded.movedim(axis, 0)[shards.rows].movedim(0, axis)

    own = [cut(x, 1, 3).clone().requires_grad_() for x in (q, k, v)]
    own.append(cut(bias, 2, 3).clone().requires_grad_())
    gathered = join(start_gather(own[3], peers, triangle.BIAS).wait(), 2)
    out = ops.evoattention(own[0], own[1], own[2], gathered, cut(mask, 1, 2))
    tokens, out = rows(out[..., :n, :], 1)
    (weight[:, tokens] * out).sum().backward()
    errors = {}
    for name, mine, theirs, axis in zip(("dQ", "dK", "dV", "dBias"), own, whole, (1, 1, 1, 2), strict=True):
        assert mine.grad is not None
        assert theirs.grad is not None
        _, gradient = rows(mine.grad, axis)
        gradient = gradient.narrow(3, 0, n)
        errors[name] = error(gradient, theirs.grad.narrow(axis, tokens.start, tokens.stop - tokens.start))
    return errors


@pytest.mark.parametrize(("size", "n"), [(1, 5), (2, 7), (3, 7), (4, 5)])
def test_the_gradient_of_the_bias_is_that_of_all_rows(rank_pool, size, n):
    results = rank_pool.run(check_attention_bias, size, n)
    assert results[0].keys() == {"dQ", "dK", "dV", "dBias"}
    assert worst(results) == {}
