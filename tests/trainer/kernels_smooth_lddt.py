"""Smooth lDDT's kernel against the reference in float64: on a GPU, or with TRITON_INTERPRET=1 on a CPU."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megafold.trainer import ops
from megafold.trainer.kernels.smooth_lddt import operator
from tests.trainer.kernels_checks import DEVICE, Results, assert_as_exact_as_eager


@dataclass(frozen=True)
class Case:
    predicted: Tensor
    truth: Tensor
    radius: Tensor
    grad: Tensor


def case(n: int, samples: int = 1, copies: int = 2, spread: float = 8.0) -> Case:
    """Atoms of which some are absent, some nucleotides', and some further apart than any radius."""
    generator = torch.Generator().manual_seed(n)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    truth = spread * normal(samples, n, 3)
    predicted = truth[:, None] + 1.5 * normal(samples, copies, n, 3)
    kinds = torch.tensor([0.0, 15.0, 15.0, 15.0, 30.0])
    radius = kinds[torch.randint(len(kinds), (samples, n), generator=generator)]
    radius[:, 0] = 15.0
    grad = normal(samples, copies)
    return Case(*(t.to(DEVICE) for t in (predicted, truth, radius, grad)))


def results(function: object, at: Case, dtype: torch.dtype) -> Results:
    predicted = at.predicted.to(dtype).requires_grad_()
    out = function(predicted, at.truth.to(dtype), at.radius.to(dtype))  # type: ignore[operator]
    (gradient,) = torch.autograd.grad(out, predicted, at.grad.to(dtype))
    return {"out": out.detach(), "gradient": gradient}


def judged(at: Case) -> tuple[Results, Results, Results]:
    exact = results(ops.smooth_lddt.naive, at, torch.float64)
    eager = results(ops.smooth_lddt.naive, at, torch.float32)
    return results(operator.smooth_lddt_in_one, at, torch.float32), exact, eager


@pytest.mark.parametrize(
    ("n", "samples", "copies", "spread"),
    [(2, 1, 1, 5.0), (31, 1, 2, 8.0), (32, 2, 3, 8.0), (70, 1, 2, 12.0), (100, 2, 1, 40.0)],
)
def test_errors_stay_near_those_of_eager(n, samples, copies, spread):
    assert_as_exact_as_eager(case(n, samples, copies, spread), judged)


def test_absent_atoms_do_not_matter_whatever_they_are():
    at = case(40)
    absent = at.radius == 0
    assert absent.any()
    spoilt = Case(
        at.predicted.masked_fill(absent[:, None, :, None], torch.nan),
        at.truth.masked_fill(absent[..., None], torch.inf),
        at.radius,
        at.grad,
    )
    expected = results(operator.smooth_lddt_in_one, at, torch.float32)
    found = results(operator.smooth_lddt_in_one, spoilt, torch.float32)
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    assert not expected["gradient"].movedim(1, 0)[:, absent].any()


def test_no_pair_coinciding_atoms_and_far_ones():
    truth = torch.tensor([[[0.0, 0, 0], [100, 0, 0]], [[0, 0, 0], [3, 0, 0]]], device=DEVICE)
    radius = torch.full((2, 2), 15.0, device=DEVICE)
    predicted = torch.tensor([[[0.0, 0, 0], [0, 0, 0]], [[1, 2, 3], [1e6, 2, 3]]], device=DEVICE)
    predicted = predicted.expand(2, 2, 2, 3).clone().requires_grad_()
    out = operator.smooth_lddt_in_one(predicted, truth, radius)
    (gradient,) = torch.autograd.grad(out.sum(), predicted)
    assert out[0].tolist() == [1, 1]  # no pair counts
    # Off by 3 Å where the atoms coincide: sigmoids at 0.5 - 3, 1 - 3, 2 - 3 and 4 - 3.
    expected = torch.sigmoid(torch.tensor([-2.5, -2.0, -1.0, 1.0])).mean().item()
    assert out[1].tolist() == pytest.approx([expected, 0])
    assert not gradient.any()


def test_without_a_gradient_and_from_strided_tensors():
    at = case(50)
    with torch.no_grad():
        value = operator.smooth_lddt_in_one(at.predicted, at.truth, at.radius)
    turned = at.predicted.movedim(-1, 0).contiguous().movedim(0, -1)
    assert not turned.is_contiguous()
    assert torch.equal(operator.smooth_lddt_in_one(turned, at.truth, at.radius), value)
    torch.testing.assert_close(value, ops.smooth_lddt.naive(at.predicted, at.truth, at.radius))


def test_what_it_does_not_take():
    at = case(5)
    assert operator.unsupported(at.predicted, at.truth, at.radius) is None
    assert "float64" in str(operator.unsupported(at.predicted.double(), at.truth, at.radius))
    assert operator.unsupported(at.predicted[:, :0], at.truth, at.radius) == "empty"
    with ops.use_backend("triton"):
        wide = ops.smooth_lddt(at.predicted.double(), at.truth.double(), at.radius.double())
        assert wide.dtype == torch.float64
