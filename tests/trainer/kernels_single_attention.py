"""Checks of the single attention; ``test_kernels_single_attention.py`` runs them in Triton's interpreter.

On a machine with a GPU they also run compiled: ``pytest tests/trainer/kernels_single_attention.py``.
"""

import functools
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megafold.trainer import ops
from megafold.trainer.kernels.single_attention import operator
from megafold.trainer.ops import SingleAttentionWeights
from tests.trainer.kernels_checks import DEVICE, DTYPES, HALF, relative, unpoisoned
from tests.trainer.kernels_checks import assert_as_exact_as_eager as judged

pytestmark = pytest.mark.usefixtures("poisoned_memory")

NAMES = ("s", "z", *SingleAttentionWeights._fields)
#: It moves all logits of a query alike: its gradient is nothing but rounding.
WITHOUT_EFFECT = "bias_norm_bias"


@dataclass
class Case:
    s: Tensor
    z: Tensor
    mask: Tensor
    weights: SingleAttentionWeights
    grad: Tensor
    residual: bool = True

    def results(self, function, dtype: torch.dtype | None = None, wanted=NAMES) -> dict[str, Tensor]:
        """Output and the ``wanted`` gradients of ``function``; ``dtype``: of everything, None: as it is."""
        leaves = {
            name: (t.detach() if dtype is None else t.detach().to(dtype)).requires_grad_(name in wanted)
            for name, t in zip(NAMES, (self.s, self.z, *self.weights), strict=True)
        }
        s, z, *weights = leaves.values()
        out = function(s, z, self.mask, SingleAttentionWeights(*weights), residual=self.residual)
        asked = [leaves[name] for name in wanted]
        gradients = torch.autograd.grad(out, asked, self.grad.to(out.dtype)) if asked else ()
        return {"out": out.detach()} | dict(zip(wanted, gradients, strict=True))


def make_case(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype = torch.float32, *, residual: bool = True
) -> Case:
    """``shape``: B, N, C, H, C_z. A fifth of the tokens is absent, the first among them."""
    b, n, c, h, c_z = shape
    torch.manual_seed(0)

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, device=DEVICE) * columns**-0.5).to(dtype)

    def near(mean: float, size: int) -> Tensor:
        return mean + 0.3 * torch.randn(size, device=DEVICE)

    mask = torch.rand(b, n, device=DEVICE) > 0.2
    mask[:, 0] = False
    weights = SingleAttentionWeights(
        near(1, c), near(0, c), matrix(c, c), near(0, c).to(dtype), matrix(2 * c, c), matrix(c, c),
        near(1, c_z), near(0, c_z), matrix(h, c_z), matrix(c, c),
    )  # fmt: skip
    s, z = torch.randn(b, n, c, device=DEVICE).to(dtype), torch.randn(b, n, n, c_z, device=DEVICE).to(dtype)
    return Case(s, z, mask, weights, torch.randn(b, n, c, device=DEVICE).to(dtype), residual)


def assert_as_exact_as_eager(case: Case, wanted=NAMES) -> None:
    naive = ops.single_attention.naive
    known = tuple(name for name in wanted if name != WITHOUT_EFFECT)

    def results_of_three(case: Case) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, Tensor]]:
        ours = case.results(operator.single_attention, wanted=known)
        return ours, case.results(naive, torch.float64, known), case.results(naive, wanted=known)

    judged(case, results_of_three)


@pytest.mark.parametrize(
    ("shape", "residual"), [((1, 19, 32, 2, 64), True), ((2, 8, 64, 4, 16), False), ((1, 1, 16, 1, 64), True)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_against_float64_stay_near_those_of_eager(shape, residual, dtype):
    assert_as_exact_as_eager(make_case(shape, dtype, residual=residual))


def test_what_moves_all_logits_alike_has_no_gradient():
    case = make_case((1, 19, 32, 2, 64))
    results = case.results(operator.single_attention)
    assert results[WITHOUT_EFFECT].abs().max() < 1e-5 * results["bias_norm_weight"].abs().max()


@pytest.mark.parametrize("wanted", [("s",), ("z", "bias"), ("q_bias", "output"), ("norm_weight", "gate"), ()])
def test_subsets_of_gradients(wanted):
    assert_as_exact_as_eager(make_case((1, 9, 32, 2, 16)), wanted)


def test_no_token_at_all():
    case = make_case((1, 9, 32, 2, 16), residual=False)
    case.mask[:] = False
    results = case.results(operator.single_attention)
    assert all(torch.count_nonzero(value) == 0 for value in results.values())


def test_strided_inputs():
    case = make_case((2, 9, 32, 2, 16))
    case.s, case.z = case.s.transpose(0, 1).contiguous().transpose(0, 1), case.z.transpose(1, 2)
    case.grad = torch.randn(1, 1, 32, device=DEVICE).expand_as(case.s)
    case.weights = case.weights._replace(kv=case.weights.kv.T.contiguous().T)
    assert_as_exact_as_eager(case)


def test_autocast_decides_the_dtype_of_all_but_the_residual():
    case = make_case((1, 9, 32, 2, 64))
    exact = case.results(ops.single_attention.naive, torch.float64)
    with torch.autocast(DEVICE, dtype=HALF):
        ours, eager = (case.results(f) for f in (operator.single_attention, ops.single_attention.naive))
        case.residual = False
        update = case.results(operator.single_attention, wanted=())["out"]
    assert (ours["out"].dtype, update.dtype) == (torch.float32, HALF)
    assert {value.dtype for value in ours.values()} == {torch.float32}
    for name in ("out", "s", "z", "kv", "output"):  # of others one draw is chance
        assert relative(ours[name], exact[name]) <= 1.3 * relative(eager[name], exact[name]), name


def test_recomputed_by_a_checkpoint():
    case = make_case((1, 9, 32, 2, 64))
    again = case.results(functools.partial(checkpoint, operator.single_attention, use_reentrant=False))
    for name, value in case.results(operator.single_attention).items():
        assert torch.equal(value, again[name]), name


def test_second_derivative_raises():
    case = make_case((1, 9, 32, 2, 16))
    out = operator.single_attention(case.s.requires_grad_(), case.z, case.mask, case.weights)
    (gradient,) = torch.autograd.grad(out.square().sum(), [case.s], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def test_one_graph_under_compile(monkeypatch):
    unpoisoned(monkeypatch)
    case = make_case((1, 9, 32, 2, 64))

    def scaled(*arguments, **settings):
        return ops.single_attention(*arguments, **settings) * 2

    torch._dynamo.reset()
    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager", dynamic=False)
    with ops.use_backend("triton"):
        ours, reference = case.results(compiled), case.results(scaled)
    for name in ours.keys() - {WITHOUT_EFFECT}:
        torch.testing.assert_close(ours[name], reference[name])


def test_registered_for_the_triton_back_end():
    case = make_case((1, 9, 32, 2, 64))
    with ops.use_backend("triton"):
        out = ops.single_attention(case.s, case.z, case.mask, case.weights)
        assert ops.backend_report()["single_attention"] == "triton"
    assert torch.equal(out, operator.single_attention(case.s, case.z, case.mask, case.weights))
    assert "float64" in str(operator.unsupported(case.s.double(), case.z, case.mask, case.weights))
