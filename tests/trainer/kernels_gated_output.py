"""Checks of the gated output, and of dropout and residual.

``test_kernels_triangle_attention.py`` runs them in the interpreter.

On a machine with a GPU they also run compiled: ``pytest tests/trainer/kernels_gated_output.py``.
"""

import itertools
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megafold.trainer import ops
from megafold.trainer.kernels.dropout_add import operator as dropout_add
from megafold.trainer.kernels.gated_output import operator
from tests.trainer.kernels_checks import (
    DEVICE,
    DTYPES,
    OPCHECKS,
    Results,
    assert_as_exact_as_eager,
    needs_gpu,
    unpoisoned,
)

NAMES = ("out", "x", "gate", "weight")
pytestmark = pytest.mark.usefixtures("poisoned_memory")


def make_inputs(rows: int, c: int, c_out: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x and gate are halves of one projection, as in the model."""
    torch.manual_seed(0)
    x, gate = torch.randn(2, rows, 2 * c, device=DEVICE).to(dtype).chunk(2, dim=-1)
    return x, gate, (torch.randn(c_out, c, device=DEVICE) * c**-0.5).to(dtype)


def results(
    function: Callable[..., Tensor],
    inputs: tuple[Tensor, ...],
    dtype: torch.dtype | None = None,
    wanted: tuple[str, ...] = NAMES[1:],
) -> dict[str, Tensor]:
    """Output and the ``wanted`` gradients; that of the output is expanded along its rows."""
    leaves = {
        name: t.detach().to(dtype or t.dtype).requires_grad_(name in wanted)
        for name, t in zip(NAMES[1:], inputs, strict=True)
    }
    out = function(*leaves.values())
    grad = torch.linspace(-1, 1, out.shape[-1], device=DEVICE).to(out.dtype).expand(out.shape)
    gradients = torch.autograd.grad(out, [leaves[name] for name in wanted], grad) if wanted else ()
    return {"out": out.detach(), **dict(zip(wanted, gradients, strict=True))}


def assert_exact(inputs: tuple[Tensor, ...], wanted: tuple[str, ...] = NAMES[1:]) -> None:
    """Output and the ``wanted`` gradients, of the inputs as they are and of others like them."""
    naive, ours = ops.gated_output.naive, operator.gated_output

    def of_three(inputs: tuple[Tensor, ...]) -> tuple[Results, Results, Results]:
        return (
            results(ours, inputs, wanted=wanted),
            results(naive, inputs, torch.float64, wanted),
            results(naive, inputs, wanted=wanted),
        )

    assert_as_exact_as_eager(inputs, of_three)


@pytest.mark.parametrize(("rows", "c", "c_out"), [(7, 16, 16), (33, 24, 40), (5, 130, 260)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_against_float64_stay_near_those_of_eager(rows, c, c_out, dtype):
    assert_exact(make_inputs(rows, c, c_out, dtype))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("c", "c_out"), [(16, 16), (128, 128), (96, 384)])
def test_random_row_counts_on_the_gpu(c, c_out, dtype):
    for rows in (1, 31, 128, 299, 1000):
        assert_exact(make_inputs(rows, c, c_out, dtype))


@pytest.mark.parametrize("wanted", [w for n in range(3) for w in itertools.combinations(NAMES[1:], n)])
def test_each_subset_of_gradients(wanted):
    assert_exact(make_inputs(9, 16, 24, torch.float32), wanted)


def test_strided_inputs():
    x, gate, weight = make_inputs(9, 32, 24, torch.float32)
    assert_exact((x[..., ::2], gate.transpose(0, 1)[:, :, :16].transpose(0, 1), weight[:, ::2]))
    assert_exact((x[:1, :, :16].expand(2, 9, 16), gate[..., 16:], weight.T[:16].T))


def test_dropout_and_residual():
    x, gate, weight = make_inputs(9, 16, 16, torch.float32)
    keep = (torch.rand(2, 1, 16, device=DEVICE) > 0.5).float() * 2
    residual = torch.randn(2, 9, 16, device=DEVICE)
    ours = operator.gated_output(x, gate, weight, keep=keep, residual=residual)
    expected = ops.gated_output.naive(x, gate, weight, keep=keep, residual=residual)
    torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-5)


def test_operator_check(monkeypatch):
    unpoisoned(monkeypatch)
    inputs = [t.requires_grad_() for t in make_inputs(5, 16, 16, torch.float32)]
    torch.library.opcheck(
        torch.ops.megafold.gated_output.default,
        (*inputs, torch.float32),
        test_utils=OPCHECKS,
    )


def test_what_the_kernels_do_not_take_is_said():
    x, gate, weight = make_inputs(5, 16, 16, torch.float32)
    assert operator.unsupported(x, gate, weight) is None
    assert "float64" in str(operator.unsupported(x.double(), gate, weight))
    assert "shapes" in str(operator.unsupported(x, gate[:1], weight))
    assert operator.unsupported(x[:0], gate[:0], weight) == "empty"


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dropout_added(axis, dtype):
    torch.manual_seed(0)
    shape = [2, 5, 5, 24]
    residual, x = (torch.randn(shape, device=DEVICE).to(dtype).requires_grad_() for _ in range(2))
    shape[axis] = 1
    keep = (torch.rand(shape, device=DEVICE) > 0.5).to(dtype) * 2
    results = []
    for function in (dropout_add.dropout_add, ops.dropout_add.naive):
        out = function(residual, x, keep)
        grad = torch.linspace(-1, 1, out.numel(), device=DEVICE).view(out.shape).to(dtype)
        results.append([out, *torch.autograd.grad(out, [residual, x], grad)])
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference)
    assert dropout_add.unsupported(residual, x, keep) is None
    assert "shapes" in str(dropout_add.unsupported(residual, x[:1], keep))
