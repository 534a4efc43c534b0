"""Checks of EvoFlash-3D; ``test_kernels_evoattention.py`` runs them in Triton's interpreter.

On a machine with a GPU they also run compiled: ``pytest tests/trainer/kernels_evoattention.py``.
"""

import itertools
import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megafold.trainer import ops
from megafold.trainer.kernels.evoattention import launches, operator
from megafold.trainer.kernels.evoattention.tiles import Tile, Tiles
from tests.trainer.kernels_checks import (
    DEVICE,
    DTYPES,
    HALF,
    OPCHECKS,
    Results,
    in_order,
    needs_gpu,
    unpoisoned,
)
from tests.trainer.kernels_checks import assert_as_exact_as_eager as judged

pytestmark = pytest.mark.usefixtures("poisoned_memory")


@dataclass
class Case:
    inputs: dict[str, Any]
    grad: Tensor

    @property
    def leaves(self) -> dict[str, Tensor]:
        return {n: t for n, t in self.inputs.items() if t is not None and t.requires_grad}

    def results(self, function, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Output and gradients of ``function``; ``dtype``: of everything, None: as it is."""
        inputs = {
            name: t if t is None or t.dtype == torch.bool or dtype is None
            else t.detach().to(dtype).requires_grad_(t.requires_grad)
            for name, t in self.inputs.items()
        }  # fmt: skip
        leaves = {n: t for n, t in inputs.items() if t is not None and t.requires_grad}
        out = function(**inputs)
        gradients = torch.autograd.grad(out, list(leaves.values()), self.grad.to(out.dtype)) if leaves else ()
        return {"out": out.detach()} | dict(zip(leaves, gradients, strict=True))


def projected(b: int, r: int, n: int, h: int, d: int, dtype: torch.dtype) -> Tensor:
    """As a projection lays it out: [B, R, N, H, D] in memory, seen as [B, R, H, N, D]."""
    return torch.randn(b, r, n, h, d, device=DEVICE).to(dtype).transpose(2, 3).requires_grad_()


def make_case(
    shape: tuple[int, int, int, int, int, int],
    dtype: torch.dtype = torch.float32,
    *,
    bias: bool = True,
    mask: str = "rows",
    seed: int = 0,
) -> Case:
    """``shape``: B, R, H, I, J, D. Masked rows: the first has no key, the second none at first: of a tile, if
    it has more than one."""
    b, r, h, i, j, d = shape
    torch.manual_seed(seed)
    keys: Tensor | None = None
    if mask != "none":
        keys = torch.rand(b, r if mask == "rows" else 1, j, device=DEVICE) > 0.3
        keys[0, 0] = False
        if keys.shape[1] > 1:
            keys[:, 1, : 64 if j > 64 else j // 2] = False
    # A quarter of the logits' spread each; the bias in float32 whatever the rest is in.
    inputs: dict[str, Any] = {
        "q": projected(b, r, i, h, d, dtype),
        "k": projected(b, r, j, h, d, dtype),
        "v": projected(b, r, j, h, d, dtype),
        "bias": torch.randn(b, i, j, h, device=DEVICE).permute(0, 3, 1, 2).requires_grad_() if bias else None,
        "mask": keys,
    }
    return Case(inputs, projected(b, r, i, h, d, dtype).detach())


def assert_as_exact_as_eager(case: Case) -> None:
    """Output and every gradient, of the inputs as they are and of others like them."""
    judged(case, results_of_three)


def results_of_three(case: Case) -> tuple[Results, Results, Results]:
    """By the kernels, by the reference in float64, and by the reference."""
    naive = ops.evoattention.naive
    return case.results(operator.evoattention), case.results(naive, torch.float64), case.results(naive)


@pytest.mark.parametrize(
    ("shape", "options"),
    [
        ((1, 3, 2, 37, 37, 8), {}),
        ((2, 2, 1, 64, 64, 32), {}),
        ((1, 2, 1, 33, 131, 24), {}),
        ((2, 2, 2, 5, 20, 48), {"bias": False, "mask": "shared"}),
        ((1, 1, 1, 40, 17, 128), {"mask": "none"}),
        ((1, 2, 1, 9, 50, 16), {"bias": False, "mask": "none"}),
    ],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_against_float64_stay_near_those_of_eager(shape, options, dtype):
    assert_as_exact_as_eager(make_case(shape, dtype, **options))


def test_three_hundred_tokens():
    assert_as_exact_as_eager(make_case((1, 1, 1, 299, 300, 8), mask="none"))


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [24, 32, 64])
def test_random_lengths_up_to_300(channels, dtype):
    draw = random.Random(channels)
    for mask in ("rows", "shared", "none"):
        for bias in (True, False):
            # With one key alone a mask could leave nothing to check.
            i, j = draw.randrange(1, 300, 2), draw.randrange(3, 300, 2)
            # Where rows share a mask, the first of the batch has no key.
            shape = (2 if mask == "shared" else 1, draw.randint(3, 6), draw.randint(1, 4), i, j, channels)
            assert_as_exact_as_eager(make_case(shape, dtype, mask=mask, bias=bias, seed=i))


@needs_gpu
@pytest.mark.gpu
def test_offsets_beyond_32_bits():
    """Of tensors with more than 2³¹ elements the last rows are what they are alone."""
    rows, kept = 2**15 + 4, 4

    def draw() -> Tensor:
        drawn = torch.randn(1, rows, 128, 4, 128, device=DEVICE, dtype=torch.bfloat16)
        return drawn.transpose(2, 3).requires_grad_()

    torch.manual_seed(0)
    bias = torch.randn(1, 4, 128, 128, device=DEVICE)
    mask = torch.rand(1, rows, 128, device=DEVICE) > 0.3
    q, k, v, grad = (draw() for _ in range(4))
    assert grad.numel() > 2**31
    long = Case({"q": q, "k": k, "v": v, "bias": bias, "mask": mask}, grad.detach())
    ends = [t.detach()[:, -kept:].requires_grad_() for t in (q, k, v)]
    last = Case(
        dict(zip("qkv", ends, strict=True)) | {"bias": bias, "mask": mask[:, -kept:]}, grad[:, -kept:]
    )
    alone = last.results(operator.evoattention)
    for name, value in long.results(operator.evoattention).items():
        assert torch.equal(value[:, -kept:], alone[name]), name


def test_one_token():
    case = make_case((1, 2, 1, 1, 1, 16), mask="none")
    results = case.results(operator.evoattention)
    torch.testing.assert_close(results["out"], case.inputs["v"].detach())
    torch.testing.assert_close(results["v"], case.grad)
    for name in ("q", "k", "bias"):
        torch.testing.assert_close(results[name], torch.zeros_like(results[name]), rtol=0, atol=1e-5)


def test_rows_without_keys_give_zero_output_and_gradients():
    case = make_case((1, 2, 2, 35, 70, 16), mask="rows")
    results = case.results(operator.evoattention)
    for name in ("out", "q", "k", "v"):
        assert torch.count_nonzero(results[name][:, 0]) == 0, name
        assert torch.count_nonzero(results[name][:, 1]) > 0, name


def test_all_rows_without_keys():
    case = make_case((1, 2, 1, 20, 20, 16))
    case.inputs["mask"][:] = False
    for name, value in case.results(operator.evoattention).items():
        assert torch.count_nonzero(value) == 0, name


def test_what_absent_keys_hold_does_not_matter():
    case = make_case((1, 2, 1, 20, 40, 16))
    before = case.results(operator.evoattention)
    k, v, mask = (case.inputs[n] for n in ("k", "v", "mask"))
    absent = ~mask[:, :, None, :, None].expand_as(k)
    with torch.no_grad():
        k[absent] = 1e4
        v[absent] = -1e4
    for name, value in case.results(operator.evoattention).items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=0)


@pytest.mark.parametrize("wanted", [w for n in range(1, 5) for w in itertools.combinations("qkvb", n)])
def test_each_subset_of_gradients(wanted):
    case = make_case((1, 2, 1, 20, 18, 16))
    for name in ("q", "k", "v", "bias"):
        case.inputs[name].requires_grad_(name[0] in wanted)
    assert_as_exact_as_eager(case)


def test_expanded_and_strided_gradients_and_inputs():
    case = make_case((1, 3, 2, 20, 20, 16))
    q, k = case.inputs["q"], case.inputs["k"]
    case.grad = torch.randn(1, 1, 1, 20, 1, device=DEVICE).expand(1, 3, 2, 20, 16)
    case.inputs["q"] = torch.cat([q, q], -1).detach()[..., ::2].requires_grad_()
    case.inputs["k"] = k.detach()[:, :1].expand_as(k).requires_grad_()
    assert_as_exact_as_eager(case)


def test_bias_and_mask_that_broadcast():
    case = make_case((2, 2, 2, 20, 20, 16), mask="shared")
    case.inputs["bias"] = torch.randn(1, 1, 20, 20, device=DEVICE).expand(2, 2, 20, 20).requires_grad_()
    assert_as_exact_as_eager(case)
    case.inputs["bias"] = torch.randn(1, 2, 20, 20, device=DEVICE).requires_grad_()
    case.inputs["mask"] = torch.rand(1, 1, 20, device=DEVICE) > 0.5
    assert_as_exact_as_eager(case)


@pytest.mark.parametrize(("rows", "ordered"), [(2, False), (3, False), (2, True)])
def test_rows_taken_together(monkeypatch, rows, ordered):
    in_order(monkeypatch, ordered)
    together = Tile(32, 32, rows, 4, 1)
    launches.forget_plans()
    monkeypatch.setattr(
        launches,
        "tiles",
        lambda *_: Tiles(forward=together, query=together, query_bias=together, key=together, bias=together),
    )
    assert_as_exact_as_eager(make_case((1, 5, 1, 33, 40, 16)))
    assert_as_exact_as_eager(make_case((2, 1, 1, 32, 32, 24), HALF))
    launches.forget_plans()


def test_runs_are_bitwise_equal_in_deterministic_mode(monkeypatch):
    in_order(monkeypatch, True)
    case = make_case((1, 5, 1, 40, 70, 24))
    assert_as_exact_as_eager(case)
    first, second = (case.results(operator.evoattention) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_autocast_decides_the_dtype():
    case = make_case((1, 2, 1, 20, 20, 16))
    with torch.autocast(DEVICE, dtype=HALF):
        out = operator.evoattention(**case.inputs)
    assert out.dtype == HALF
    (gradient,) = torch.autograd.grad(out.float().sum(), [case.inputs["q"]])
    assert gradient.dtype == torch.float32


def test_second_derivative_raises():
    case = make_case((1, 1, 1, 16, 16, 16), mask="none")
    out = operator.evoattention(**case.inputs)
    (gradient,) = torch.autograd.grad(out.square().sum(), [case.inputs["q"]], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def test_second_derivative_of_the_custom_operator_raises():
    case = make_case((1, 1, 1, 16, 16, 16), mask="none")
    out, *_ = torch.ops.megafold.evoattention(*case.inputs.values())
    (gradient,) = torch.autograd.grad(out.square().sum(), [case.inputs["q"]], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        gradient.sum().backward()


def test_operator_check(monkeypatch):
    unpoisoned(monkeypatch)
    case = make_case((1, 2, 1, 16, 20, 16))
    q, k, v, bias, mask = case.inputs.values()
    for arguments in ((q, k, v, bias, mask), (q, k, v, None, None)):
        torch.library.opcheck(torch.ops.megafold.evoattention.default, arguments, test_utils=OPCHECKS)


def test_one_graph_under_compile(monkeypatch):
    unpoisoned(monkeypatch)
    case = make_case((1, 2, 1, 20, 20, 16))

    def scaled(**inputs):
        return operator.evoattention(**inputs) * 2

    torch._dynamo.reset()
    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager", dynamic=False)
    ours, reference = case.results(compiled), case.results(scaled)
    for name, value in ours.items():
        torch.testing.assert_close(value, reference[name], rtol=0, atol=0)


def test_registered_for_the_triton_back_end():
    case = make_case((1, 2, 1, 20, 20, 16))
    with ops.use_backend("triton"):
        out = ops.evoattention(**case.inputs)
        assert ops.backend_report()["evoattention"] == "triton"
    assert torch.equal(out, operator.evoattention(**case.inputs))


def test_what_the_kernels_do_not_take_is_said():
    q = torch.zeros(1, 1, 1, 4, 16, device=DEVICE)
    assert operator.unsupported(q, q, q) is None
    assert "float64" in str(operator.unsupported(q.double(), q.double(), q.double()))
    wide = q.expand(1, 1, 1, 4, 16).repeat(1, 1, 1, 1, 16)
    assert "256 channels" in str(operator.unsupported(wide, wide, wide))
    nothing = q[:, :0]
    assert "empty" in str(operator.unsupported(nothing, nothing, nothing))
