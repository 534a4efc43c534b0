"""Operators against formulas written out in float64 from the supplement, with explicit loops or einsum."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from megafold.trainer import ops


def normal(*shape: int, seed: int = 0, dtype=torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def layer_norm_numpy(x: np.ndarray, weight=1.0, bias=0.0) -> np.ndarray:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + 1e-5) * weight + bias


def sigmoid(x: np.ndarray) -> np.ndarray:
    return 1 / (1 + np.exp(-x))


@pytest.fixture
def attention_inputs() -> dict[str, Tensor]:
    b, r, h, i, j, d = 2, 3, 2, 5, 7, 4
    mask = torch.rand(b, r, j, generator=torch.Generator().manual_seed(9)) > 0.4
    mask[0, 1] = False
    mask[:, 0, 0] = True
    return {
        "q": normal(b, r, h, i, d, seed=1),
        "k": normal(b, r, h, j, d, seed=2),
        "v": normal(b, r, h, j, d, seed=3),
        "bias": normal(b, h, i, j, seed=4),
        "mask": mask,
    }


def attention_by_loops(q, k, v, bias, mask) -> np.ndarray:
    q, k, v, bias, mask = (x.numpy() for x in (q, k, v, bias, mask))
    out = np.zeros(q.shape)
    for b, r, h, i in np.ndindex(*q.shape[:4]):
        keys = np.flatnonzero(mask[b, r])
        if len(keys) == 0:
            continue
        logits = k[b, r, h, keys] @ q[b, r, h, i] / math.sqrt(q.shape[-1]) + bias[b, h, i, keys]
        weights = np.exp(logits - logits.max())
        out[b, r, h, i] = weights / weights.sum() @ v[b, r, h, keys]
    return out


def test_evoattention_is_the_formula_and_zero_without_keys(attention_inputs):
    out = ops.evoattention(**attention_inputs)
    np.testing.assert_allclose(out.numpy(), attention_by_loops(**attention_inputs), atol=1e-12)
    assert torch.count_nonzero(out[0, 1]) == 0


def test_evoattention_ignores_what_is_masked(attention_inputs):
    expected = ops.evoattention(**attention_inputs)
    absent = ~attention_inputs["mask"][:, :, None, :, None]
    changed = attention_inputs | {
        "k": attention_inputs["k"].masked_fill(absent, 1e4),
        "v": attention_inputs["v"].masked_fill(absent, -1e4),
    }
    torch.testing.assert_close(ops.evoattention(**changed), expected, rtol=0, atol=1e-12)


def test_evoattention_rows_may_share_a_mask(attention_inputs):
    shared = attention_inputs | {"mask": attention_inputs["mask"][:, :1]}
    expanded = attention_inputs | {"mask": attention_inputs["mask"][:, :1].expand(-1, 3, -1)}
    torch.testing.assert_close(ops.evoattention(**shared), ops.evoattention(**expanded))


def test_evoattention_gradients(attention_inputs):
    tensors = [attention_inputs[name].requires_grad_() for name in ("q", "k", "v", "bias")]

    def run(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return ops.evoattention(q, k, v, bias, attention_inputs["mask"])

    assert torch.autograd.gradcheck(run, tensors)


@pytest.mark.parametrize("outgoing", [True, False])
def test_triangle_multiplication_is_algorithms_12_and_13(outgoing):
    n, c_z, c = 5, 6, 3
    z, mask = normal(1, n, n, c_z), torch.rand(1, n, n, generator=torch.Generator().manual_seed(3)) > 0.2
    shapes = [(c_z,), (c_z,), (2 * c, c_z), (2 * c, c_z), (c,), (c,), (c_z, c), (c_z, c_z)]
    weights = ops.TriangleMultiplicationWeights(
        *(normal(*shape, seed=10 + index) for index, shape in enumerate(shapes))
    )
    w = {name: value.numpy() for name, value in weights._asdict().items()}
    x = layer_norm_numpy(z[0].numpy(), w["norm_in_weight"], w["norm_in_bias"])
    ab = mask[0, ..., None].numpy() * sigmoid(x @ w["gate"].T) * (x @ w["projection"].T)
    a, b = ab[..., :c], ab[..., c:]
    summed = np.zeros((n, n, c))
    for i, j, k in np.ndindex(n, n, n):
        summed[i, j] += a[i, k] * b[j, k] if outgoing else a[k, i] * b[k, j]
    normed = layer_norm_numpy(summed, w["norm_out_weight"], w["norm_out_bias"])
    expected = sigmoid(x @ w["output_gate"].T) * (normed @ w["output"].T)
    out = ops.triangle_multiplication(z, mask, weights, outgoing)
    np.testing.assert_allclose(out[0].numpy(), expected, atol=1e-11)
    tensors = [tensor.requires_grad_() for tensor in (z, *weights)]

    def run(z: Tensor, *rest: Tensor) -> Tensor:
        return ops.triangle_multiplication(z, mask, ops.TriangleMultiplicationWeights(*rest), outgoing)

    assert torch.autograd.gradcheck(run, tensors, fast_mode=True)


def test_layernorm_and_layernorm_linear():
    x, w, b, linear, offset = normal(3, 4, 6), normal(6, seed=1), normal(6, seed=2), normal(5, 6), normal(5)
    normed = layer_norm_numpy(x.numpy(), w.numpy(), b.numpy())
    np.testing.assert_allclose(ops.layernorm(x, w, b), normed, atol=1e-12)
    np.testing.assert_allclose(ops.layernorm(x), layer_norm_numpy(x.numpy()), atol=1e-12)
    out = ops.layernorm_linear(x, w, b, linear, offset)
    np.testing.assert_allclose(out, normed @ linear.numpy().T + offset.numpy(), atol=1e-12)


def test_transition_is_algorithm_11():
    x, w, b, w_in, w_out = normal(3, 4), normal(4, seed=1), normal(4, seed=2), normal(16, 4), normal(4, 8)
    normed = layer_norm_numpy(x.numpy(), w.numpy(), b.numpy())
    gate, value = normed @ w_in.numpy()[:8].T, normed @ w_in.numpy()[8:].T
    expected = (gate * sigmoid(gate) * value) @ w_out.numpy().T
    np.testing.assert_allclose(ops.transition(x, w, b, w_in, w_out), expected, atol=1e-12)
    inputs = [tensor.requires_grad_() for tensor in (x, w, b, w_in, w_out)]
    assert torch.autograd.gradcheck(ops.transition, inputs)


def test_adaln_is_algorithm_26_and_broadcasts_its_conditioning():
    a, s = normal(2, 3, 4, 6), normal(2, 1, 4, 5, seed=1)
    w, scale, bias, shift = normal(5, seed=2), normal(6, 5, seed=3), normal(6, seed=4), normal(6, 5, seed=5)
    normed = layer_norm_numpy(s.numpy(), w.numpy())
    expected = (
        sigmoid(normed @ scale.numpy().T + bias.numpy()) * layer_norm_numpy(a.numpy())
        + normed @ shift.numpy().T
    )
    np.testing.assert_allclose(ops.adaln(a, s, w, scale, bias, shift), expected, atol=1e-12)
    inputs = [tensor.requires_grad_() for tensor in (a, s, w, scale, bias, shift)]
    assert torch.autograd.gradcheck(ops.adaln, inputs, fast_mode=True)


def test_autocast_gives_bfloat16_results_and_float32_statistics():
    x = normal(4, 64, dtype=torch.float32) + 300.0  # bfloat16's step is 2 there
    weight, bias = torch.ones(64), torch.zeros(64)
    with torch.autocast("cpu", torch.bfloat16):
        out = ops.layernorm(x, weight, bias)
    assert out.dtype == torch.bfloat16
    np.testing.assert_allclose(out.float(), layer_norm_numpy(x.double().numpy()), rtol=0.01, atol=0.01)


def test_bfloat16_attention_is_as_good_as_its_dtype(attention_inputs):
    exact = ops.evoattention(**attention_inputs)
    low = {
        name: value.bfloat16() if value.is_floating_point() else value
        for name, value in attention_inputs.items()
    }
    out = ops.evoattention(**low)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.double(), exact, rtol=0.05, atol=0.05)


@pytest.mark.slow
def test_compile_backend_equals_eager(attention_inputs):
    x, w, b, w_in, w_out = normal(3, 4), normal(4, seed=1), normal(4, seed=2), normal(16, 4), normal(4, 8)
    expected = ops.evoattention(**attention_inputs), ops.transition(x, w, b, w_in, w_out)
    with ops.use_backend("compile"):
        report = ops.backend_report()
        out = ops.evoattention(**attention_inputs), ops.transition(x, w, b, w_in, w_out)
    assert set(report.values()) == {"compile"}
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-10)
