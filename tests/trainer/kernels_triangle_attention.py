"""Checks of fused triangle attention; ``test_kernels_triangle_attention.py`` runs them in the interpreter.

On a machine with a GPU they also run compiled: ``pytest tests/trainer/kernels_triangle_attention.py``.
"""

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from megafold.trainer import ops
from megafold.trainer.kernels.triangle_attention import operator
from tests.trainer.kernels_checks import (
    DEVICE,
    DTYPES,
    HALF,
    OPCHECKS,
    Results,
    in_order,
    needs_gpu,
    relative,
    unpoisoned,
)
from tests.trainer.kernels_checks import assert_as_exact_as_eager as judged

NAMES = ("out", "z", *ops.TriangleAttentionWeights._fields)
pytestmark = pytest.mark.usefixtures("poisoned_memory")


@dataclass
class Case:
    """Arguments of the operator and the gradient of its result."""

    z: Tensor
    mask: Tensor
    weights: list[Tensor]
    starting: bool
    keep: Tensor | None
    residual: bool
    grad: Tensor

    def results(self, function, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Output and gradients of ``function``; ``dtype``: of everything, None: as it is."""

        def typed(t: Tensor) -> Tensor:
            return t.detach().to(dtype or t.dtype)

        z = typed(self.z).requires_grad_(self.z.requires_grad)
        weights = [typed(w).requires_grad_(w.requires_grad) for w in self.weights]
        out = function(
            z,
            self.mask,
            ops.TriangleAttentionWeights(*weights),
            starting=self.starting,
            keep=None if self.keep is None else typed(self.keep),
            residual=self.residual,
        )
        leaves = {n: t for n, t in zip(NAMES[1:], (z, *weights), strict=True) if t.requires_grad}
        gradients = torch.autograd.grad(out, list(leaves.values()), self.grad.to(out.dtype))
        return {"out": out.detach()} | dict(zip(leaves, gradients, strict=True))


def make_case(
    shape: tuple[int, int, int, int, int],
    dtype: torch.dtype,
    *,
    starting: bool = True,
    keep: bool = True,
    residual: bool = True,
    seed: int = 0,
) -> Case:
    """``shape``: B, N, C, H, D. The first row and column are absent; z's channels differ in mean."""
    b, n, c, h, d = shape
    torch.manual_seed(seed)

    def draw(*size: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(*size, device=DEVICE) * scale).to(dtype).requires_grad_()

    mask = torch.rand(b, n, n, device=DEVICE) > 0.2
    mask[0, 0] = mask[0, :, 0] = False
    kept = (b, 1, n, c) if starting else (b, n, 1, c)
    return Case(
        z=(torch.randn(b, n, n, c, device=DEVICE) * 1.3 + torch.linspace(-1, 1, c, device=DEVICE))
        .to(dtype)
        .requires_grad_(),
        mask=mask,
        weights=[
            (1 + draw(c, scale=0.2)).detach().requires_grad_(),
            draw(c, scale=0.2),
            draw(3 * h * d, c, scale=c**-0.5),
            draw(h * d, c, scale=c**-0.5),
            draw(h, c, scale=c**-0.5),
            draw(c, h * d, scale=(h * d) ** -0.5),
        ],
        starting=starting,
        keep=(torch.rand(kept, device=DEVICE) > 0.25).to(dtype) / 0.75 if keep else None,
        residual=residual,
        grad=torch.randn(b, n, n, c, device=DEVICE).to(dtype),
    )


def assert_as_exact_as_eager(case: Case) -> None:
    """Output and every gradient, of the inputs as they are and of others like them."""
    judged(case, results_of_three)


def results_of_three(case: Case) -> tuple[Results, Results, Results]:
    """By the kernels, by the reference in float64, and by the reference."""
    naive = ops.triangle_attention.naive
    return case.results(operator.triangle_attention), case.results(naive, torch.float64), case.results(naive)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((2, 5, 24, 3, 12), {"starting": False}),
        ((1, 18, 16, 1, 16), {"keep": False}),
        ((1, 4, 64, 1, 24), {"residual": False}),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_against_float64_stay_near_those_of_eager(shape, options, dtype):
    assert_as_exact_as_eager(make_case(shape, dtype, **options))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("c", "heads", "channels"), [(128, 4, 32), (64, 4, 16)])
def test_random_lengths_up_to_300(c, heads, channels, dtype):
    draw = random.Random(c)
    for n in (1, draw.randrange(3, 64, 2), draw.randrange(65, 200, 2), 299):
        options = {name: draw.random() < 0.5 for name in ("starting", "keep", "residual")}
        case = make_case((1, n, c, heads, channels), dtype, **options, seed=n)
        if n == 1:
            case.mask[:] = True
        assert_as_exact_as_eager(case)


def test_one_token():
    case = make_case((1, 1, 16, 2, 16), torch.float32)
    case.mask[:] = True
    ours = case.results(operator.triangle_attention)
    reference = case.results(ops.triangle_attention.naive)
    for name, value in ours.items():
        torch.testing.assert_close(value, reference[name], rtol=1e-5, atol=1e-5)


def test_nothing_present_leaves_the_residual_alone():
    case = make_case((1, 4, 16, 1, 8), torch.float32)
    case.mask[:] = False
    results = case.results(operator.triangle_attention)
    assert torch.equal(results["out"], case.z)
    assert torch.equal(results["z"], case.grad)
    assert all(torch.count_nonzero(results[name]) == 0 for name in NAMES[2:])


def test_strided_input_and_gradient():
    case = make_case((1, 4, 16, 1, 8), torch.float32)
    case.z = case.z.detach().transpose(1, 2).requires_grad_()
    case.grad = torch.randn(1, 1, 4, 1, device=DEVICE).expand(1, 4, 4, 16)
    assert_as_exact_as_eager(case)
    case.z = torch.cat([case.z, case.z], -1).detach()[..., ::2].requires_grad_()
    assert_as_exact_as_eager(case)


@pytest.mark.parametrize("wanted", NAMES[1:])
def test_one_gradient_alone(wanted):
    case = make_case((1, 4, 16, 1, 8), torch.float32)
    for name, tensor in zip(NAMES[1:], (case.z, *case.weights), strict=True):
        tensor.requires_grad_(name == wanted)
    assert_as_exact_as_eager(case)


def test_autocast_takes_parameters_in_float32():
    case = make_case((1, 4, 16, 1, 8), torch.float32)
    case.z = case.z.detach().to(HALF).requires_grad_()
    case.grad = case.grad.to(HALF)
    assert case.keep is not None
    case.keep = case.keep.to(HALF)

    def under_autocast(function):
        def run(*args, **kwargs):
            with torch.autocast(DEVICE, dtype=HALF):
                return function(*args, **kwargs)

        return run

    ours = case.results(under_autocast(operator.triangle_attention))
    reference = case.results(under_autocast(ops.triangle_attention.naive))
    for name, value in ours.items():
        assert value.dtype == reference[name].dtype == (HALF if name in ("out", "z") else torch.float32), name
        assert relative(value, reference[name].double()) < 0.02, name


def test_runs_are_bitwise_equal_in_deterministic_mode(monkeypatch):
    in_order(monkeypatch, True)
    case = make_case((1, 5, 16, 1, 8), HALF)
    first, second = (case.results(operator.triangle_attention) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def arguments(case: Case) -> tuple:
    w = case.weights
    return (case.z, case.mask, *w[:2], w[2], w[3], w[4], w[5], case.keep, case.starting, case.residual,
            case.z.dtype)  # fmt: skip


@pytest.mark.parametrize("starting", [True, False])
def test_operator_check(starting, monkeypatch):
    unpoisoned(monkeypatch)
    case = make_case((1, 4, 16, 1, 8), torch.float32, starting=starting, keep=starting)
    torch.library.opcheck(
        torch.ops.megafold.triangle_attention.default,
        arguments(case),
        test_utils=OPCHECKS,
    )


def test_second_derivative_raises():
    case = make_case((1, 4, 16, 2, 8), torch.float32)
    out, *_ = torch.ops.megafold.triangle_attention(*arguments(case))
    (gradient,) = torch.autograd.grad(out.square().sum(), [case.z], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        gradient.sum().backward()


def test_one_graph_under_compile(monkeypatch):
    unpoisoned(monkeypatch)
    case = make_case((1, 4, 16, 1, 8), torch.float32, starting=False)

    def scaled(*args, **kwargs):
        return operator.triangle_attention(*args, **kwargs) * 2

    torch._dynamo.reset()
    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager", dynamic=False)
    ours, reference = case.results(compiled), case.results(scaled)
    for name, value in ours.items():
        torch.testing.assert_close(value, reference[name], rtol=0, atol=0)


def test_registered_for_the_triton_back_end():
    case = make_case((1, 4, 16, 1, 8), torch.float32)
    with ops.use_backend("triton"):
        out = case.results(ops.triangle_attention)["out"]
        assert ops.backend_report()["triangle_attention"] == "triton"
    assert torch.equal(out, case.results(operator.triangle_attention)["out"])
