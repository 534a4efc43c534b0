"""Trunk blocks against formulas written out from the supplement, in float64."""

from typing import TypeVar

import numpy as np
import pytest
import torch
from torch import nn

from megafold.trainer.model.msa import MSAModule, MSAPairWeightedAveraging, OuterProductMean
from megafold.trainer.model.primitives import Dropout, Linear, run_block
from megafold.trainer.model.transformer import AttentionPairBias
from megafold.trainer.model.triangle import TriangleAttention
from megafold.trainer.model.windows import AtomWindows
from tests.trainer.batches import random_batch
from tests.trainer.networks import MINI, as_dtype, fill_parameters

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def filled(module: ModuleT) -> ModuleT:
    fill_parameters(module)
    return module.double().eval()


def rand(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def softmax(x: np.ndarray, axis: int) -> np.ndarray:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


@pytest.mark.parametrize("starting", [True, False])
def test_triangle_attention_is_algorithms_14_and_15(starting):
    n, c_z, c, heads = 5, 6, 4, 2
    layer = filled(TriangleAttention(c_z, c, heads, starting=starting))
    z = rand(1, n, n, c_z)
    x = layer.norm(z)[0].detach().numpy()

    def project(linear: nn.Linear) -> np.ndarray:
        return x @ linear.weight.detach().numpy().T

    q, k, v = np.moveaxis(project(layer.linear_qkv).reshape(n, n, 3, heads, c), 2, 0)
    b, g = project(layer.linear_bias), 1 / (1 + np.exp(-project(layer.linear_gate)))
    o = np.zeros((n, n, heads, c))
    for i, j, h in np.ndindex(n, n, heads):
        if starting:
            weights = softmax(k[i, :, h] @ q[i, j, h] / np.sqrt(c) + b[j, :, h], 0)
            o[i, j, h] = weights @ v[i, :, h]
        else:
            weights = softmax(k[:, j, h] @ q[i, j, h] / np.sqrt(c) + b[:, i, h], 0)
            o[i, j, h] = weights @ v[:, j, h]
    expected = (g * o.reshape(n, n, -1)) @ layer.linear_out.weight.detach().numpy().T
    out = layer(z, torch.ones(1, n, n, dtype=torch.bool))[0].detach()
    np.testing.assert_allclose(out, expected, atol=1e-11)


@pytest.mark.parametrize("n_atom", [5, 24, 37])
def test_windowed_attention_is_masked_dense_attention(n_atom):
    c, c_pair, heads, n_queries, n_keys = 8, 3, 2, 8, 16
    layer = filled(AttentionPairBias(c, c_pair, heads, c_s=c))
    a, s, z = rand(1, 2, n_atom, c), rand(1, 1, n_atom, c, seed=1), rand(1, n_atom, n_atom, c_pair, seed=2)
    mask = torch.rand(1, n_atom, generator=torch.Generator().manual_seed(3)) > 0.2
    windows = AtomWindows(n_atom=n_atom, n_queries=n_queries, n_keys=n_keys)
    index = torch.arange(n_atom)[:, None]
    query, key = windows.queries(index)[..., 0], windows.keys(index)[..., 0]
    out = layer(a, s, z[:, query[:, :, None], key[:, None, :]], mask, windows)

    # Dense: algorithm 7's β as a mask, one query at a time.
    normed = layer.norm(a, s)
    bias = layer.bias(z)[0]
    q = layer.linear_q(normed).unflatten(-1, (heads, -1))
    k, v = (x.unflatten(-1, (heads, -1)) for x in layer.linear_kv(normed).chunk(2, dim=-1))
    o = torch.zeros_like(q)
    for atom in range(n_atom):
        start = atom // n_queries * n_queries - (n_keys - n_queries) // 2
        seen = [m for m in range(max(0, start), min(n_atom, start + n_keys)) if mask[0, m]]
        if seen:
            logits = torch.einsum("bshd,bskhd->bshk", q[:, :, atom], k[:, :, seen]) * (c // heads) ** -0.5
            weights = torch.softmax(logits + bias[atom, seen].T, dim=-1)
            o[:, :, atom] = torch.einsum("bshk,bskhd->bshd", weights, v[:, :, seen])
    expected = layer.linear_out(torch.sigmoid(layer.linear_gate(normed)) * o.flatten(-2))
    assert layer.gate is not None
    torch.testing.assert_close(out, layer.gate(expected, s), rtol=1e-10, atol=1e-10)


def test_outer_product_mean_is_algorithm_9():
    m_rows, n, c_m, c_z, c = 4, 3, 6, 5, 2
    layer = filled(OuterProductMean(c_m, c_z, c))
    m = rand(1, m_rows, n, c_m)
    mask = torch.ones(1, m_rows, n, dtype=torch.bool)
    mask[0, 2, 1] = mask[0, 3] = False
    ab = layer.projection(m)[0].detach().numpy()
    w, offset = layer.linear_out.weight.detach().numpy(), layer.linear_out.bias.detach().numpy()
    for i, j in np.ndindex(n, n):
        rows = np.flatnonzero(mask[0, :, i] & mask[0, :, j])
        outer = np.mean([np.outer(ab[r, i, :c], ab[r, j, c:]).ravel() for r in rows], axis=0)
        np.testing.assert_allclose(layer(m, mask)[0, i, j].detach(), w @ outer + offset, atol=1e-12)


def test_pair_weighted_averaging_is_algorithm_10():
    rows, n, c_m, c_z, c, heads = 3, 4, 6, 5, 2, 2
    layer = filled(MSAPairWeightedAveraging(c_m, c_z, c, heads))
    m, z, mask = rand(1, rows, n, c_m), rand(1, n, n, c_z, seed=1), torch.tensor([[True, True, False, True]])
    x, b = layer.norm(m)[0].detach().numpy(), layer.weights(z)[0].detach().numpy()
    v = (x @ layer.linear_v.weight.detach().numpy().T).reshape(rows, n, heads, c)
    g = 1 / (1 + np.exp(-x @ layer.linear_gate.weight.detach().numpy().T))
    keys = np.flatnonzero(mask[0])
    o = np.einsum("ijh,sjhc->sihc", softmax(b[:, keys], 1), v[:, keys]).reshape(rows, n, -1)
    expected = (g * o) @ layer.linear_out.weight.detach().numpy().T
    np.testing.assert_allclose(layer(m, z, mask)[0].detach(), expected, atol=1e-12)


def test_order_of_the_msa_rows_does_not_matter():
    module = filled(MSAModule(MINI))
    batch = as_dtype(random_batch(0, n_msa=6))
    n = batch["restype"].shape[1]
    mask, s, z = torch.ones(1, n, dtype=torch.bool), rand(1, n, MINI.c_s_inputs), rand(1, n, n, MINI.c_z)
    pair_mask = mask[:, :, None] & mask[:, None]
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    shuffled = batch | {
        name: batch[name][:, order] for name in ("msa", "has_deletion", "deletion_value", "msa_mask")
    }
    torch.testing.assert_close(
        module(shuffled, s, z, mask, pair_mask), module(batch, s, z, mask, pair_mask), rtol=1e-11, atol=1e-11
    )


@pytest.mark.parametrize(("shared", "axis"), [("row", 1), ("column", 2)])
def test_dropout_shares_its_mask_along_one_axis(shared, axis):
    layer = Dropout(0.25, shared)
    zeros, x = torch.zeros(2, 50, 60, 8), torch.ones(2, 50, 60, 8)
    assert torch.equal(layer.eval().add(zeros, x), x)
    torch.manual_seed(0)
    out = layer.train().add(zeros, x)
    torch.testing.assert_close(out, out.narrow(axis, 0, 1).expand_as(out))
    values, counts = torch.unique(out, return_counts=True)
    torch.testing.assert_close(values, torch.tensor([0.0, 1 / 0.75]))
    assert abs(counts[0] / counts.sum() - 0.25) < 0.05


def test_initial_values():
    torch.manual_seed(0)
    lecun, he = Linear(400, 500).weight, Linear(400, 500, init="relu").weight
    assert abs(lecun.std() * 400**0.5 - 1) < 0.02
    assert abs(he.std() * 200**0.5 - 1) < 0.02
    assert lecun.abs().max() <= 2 * 400**-0.5 / 0.8796 * 1.001
    assert torch.count_nonzero(Linear(4, 4, init="final").weight) == 0


def test_recomputed_block_gives_the_same_gradients_and_back_end():
    seen = []

    def block(x: torch.Tensor) -> torch.Tensor:
        from megafold.trainer.ops import active_backend

        seen.append(active_backend())
        return (x.sin() * x).sum()

    grads = []
    for recompute in (False, True):
        x = rand(4).requires_grad_()
        run_block(block, x, recompute=recompute).backward()
        grads.append(x.grad)
    assert grads[0] is not None
    assert grads[1] is not None
    assert torch.equal(grads[0], grads[1])
    assert seen == ["eager"] * 3
