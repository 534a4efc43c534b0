"""Checks of how kernels' errors are judged; ``test_kernels_rowwise.py`` runs them."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.trainer.kernels_checks import DEVICE, DRAWS, Results, assert_as_exact_as_eager, redrawn


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@dataclass
class Case:
    x: Tensor
    pair: Pair
    options: dict[str, Any]


def make_case() -> Case:
    torch.manual_seed(0)
    x = torch.randn(4, 6, device=DEVICE).requires_grad_()
    mask = torch.rand(4, 1, device=DEVICE) > 0.5
    pair = Pair(torch.randn(6, 4, device=DEVICE).T, torch.randn(1, 6, device=DEVICE).expand(4, 6))
    return Case(x, pair, {"mask": mask, "none": None, "rows": 4})


def with_errors(ours: float, eager: float, count: int):
    """Judges ``count`` numbers with random relative errors of these sizes, others for each call."""
    generator = torch.Generator().manual_seed(1)

    def judge(case: Case) -> tuple[Results, Results, Results]:
        exact = torch.randn(count, generator=generator, dtype=torch.float64)
        mine, theirs = (
            (exact + size * torch.randn(count, generator=generator, dtype=torch.float64)).float()
            for size in (ours, eager)
        )
        return {"out": mine}, {"out": exact}, {"out": theirs}

    return judge


@pytest.mark.parametrize("count", [3, 10, 1000])
def test_errors_alike_pass_however_few_the_numbers(count):
    judge = with_errors(1e-4, 1e-4, count)
    for _ in range(10):
        assert_as_exact_as_eager(make_case(), judge)


@pytest.mark.parametrize("count", [30, 1000])
def test_a_kernel_that_is_less_exact_fails(count):
    with pytest.raises(AssertionError, match=r"out: .* at least"):
        assert_as_exact_as_eager(make_case(), with_errors(1.8e-4, 1e-4, count))


def test_a_few_roundings_are_held_against_nobody_many_are():
    assert_as_exact_as_eager(make_case(), with_errors(6e-8, 0.0, 1000))
    with pytest.raises(AssertionError, match="out"):
        assert_as_exact_as_eager(make_case(), with_errors(2e-7, 0.0, 1000))


def test_results_that_check_nothing_are_refused():
    zeros = {"out": torch.zeros(3)}
    with pytest.raises(AssertionError, match="nothing is checked"):
        assert_as_exact_as_eager(make_case(), lambda _: (zeros, zeros, zeros))
    nan = {"out": torch.full((3,), torch.nan)}
    ones = {"out": torch.ones(3)}
    with pytest.raises(AssertionError, match="out"):
        assert_as_exact_as_eager(make_case(), lambda _: (nan, ones, ones))


def test_a_case_drawn_anew_is_laid_out_as_it_was():
    case = make_case()
    other = redrawn(case, 1)
    assert not torch.equal(other.x, case.x)
    assert other.x.requires_grad
    assert not other.pair.first.requires_grad
    for old, new in ((case.x, other.x), (case.pair.first, other.pair.first)):
        assert new.stride() == old.stride()
        assert torch.equal(new.flatten().sort().values, old.flatten().sort().values)
    assert other.pair.second.stride() == (0, 1)
    assert other.options == case.options
    assert len({redrawn(case, seed).x[0, 0].item() for seed in range(DRAWS)}) > 1
