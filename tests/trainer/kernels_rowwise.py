"""Checks of the operators that work on one row at a time; ``test_kernels_rowwise.py`` runs them in Triton's
interpreter.

On a machine with a GPU they also run compiled: ``pytest tests/trainer/kernels_rowwise.py``.
"""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megafold.trainer import ops
from megafold.trainer.kernels.adaln import operator as adaln
from megafold.trainer.kernels.layernorm import operator as layernorm
from megafold.trainer.kernels.layernorm_linear import operator as layernorm_linear
from megafold.trainer.kernels.transition import composed, fused
from megafold.trainer.kernels.transition import operator as transition
from megafold.trainer.ops.normalization import EPS
from megafold.trainer.ops.registry import Operator
from tests.trainer.kernels_checks import (
    DEVICE,
    DTYPES,
    HALF,
    OPCHECKS,
    ROUNDING_WIDE,
    Results,
    needs_gpu,
    unpoisoned,
)
from tests.trainer.kernels_checks import assert_as_exact_as_eager as judged

pytestmark = pytest.mark.usefixtures("poisoned_memory")


def parameter(*shape: int, dtype: torch.dtype = torch.float32, around: float = 0.0) -> Tensor:
    scale = 0.3 if len(shape) == 1 else shape[-1] ** -0.5
    return (around + scale * torch.randn(*shape, device=DEVICE)).to(dtype).requires_grad_()


def layernorm_inputs(shape: tuple[int, ...], dtype: torch.dtype) -> dict[str, Tensor]:
    c = shape[-1]
    x = (0.5 + 2 * torch.randn(*shape, device=DEVICE)).to(dtype).requires_grad_()
    return {"x": x, "weight": parameter(c, around=1.0), "bias": parameter(c)}


def swiglu_inputs(shape: tuple[int, ...], dtype: torch.dtype, expansion: int = 1) -> dict[str, Tensor]:
    c = shape[-1]
    return {
        "x": parameter(*shape[:-1], c, dtype=dtype),
        "weight_in": parameter(2 * expansion * c, c, dtype=dtype),
        "weight_out": parameter(c, expansion * c, dtype=dtype),
    }


def transition_inputs(shape: tuple[int, ...], dtype: torch.dtype, expansion: int = 1) -> dict[str, Tensor]:
    norm = layernorm_inputs(shape, dtype)
    products = swiglu_inputs(shape, dtype, expansion)
    return {
        "x": norm["x"], "norm_weight": norm["weight"], "norm_bias": norm["bias"],
        "weight_in": products["weight_in"], "weight_out": products["weight_out"],
    }  # fmt: skip


def layernorm_linear_inputs(
    shape: tuple[int, ...], dtype: torch.dtype, outputs: int = 21
) -> dict[str, Tensor]:
    norm = layernorm_inputs(shape, dtype)
    return {
        "x": norm["x"], "norm_weight": norm["weight"], "norm_bias": norm["bias"],
        "weight": parameter(outputs, shape[-1], dtype=dtype), "bias": parameter(outputs, dtype=dtype),
    }  # fmt: skip


def adaln_inputs(
    shape: tuple[int, ...], dtype: torch.dtype, s_shape: tuple[int, ...] | None = None
) -> dict[str, Tensor]:
    c = shape[-1]
    s = layernorm_inputs(s_shape or (*shape[:-1], 24), dtype)
    return {
        "a": layernorm_inputs(shape, dtype)["x"], "s": s["x"], "norm_weight": s["weight"],
        "scale_weight": parameter(c, s["x"].shape[-1], dtype=dtype), "scale_bias": parameter(c, dtype=dtype),
        "shift_weight": parameter(c, s["x"].shape[-1], dtype=dtype),
    }  # fmt: skip


@dataclass(frozen=True)
class Subject:
    """An operator under test; ``shape`` is the smallest of its inputs that does not fit its tiles."""

    ours: Callable[..., Tensor]
    reference: Operator[..., Tensor]
    inputs: Callable[..., dict[str, Tensor]]
    shape: tuple[int, ...]

    def case(
        self, shape: tuple[int, ...] | None = None, dtype: torch.dtype = torch.float32, **more: Any
    ) -> "Case":
        torch.manual_seed(0)
        inputs = self.inputs(shape or self.shape, dtype, **more)
        grad = torch.randn_like(self.reference.naive(**inputs))
        return Case(self, inputs, grad)


SUBJECTS = {
    "layernorm": Subject(layernorm.layernorm, ops.layernorm, layernorm_inputs, (3, 7, 48)),
    "layernorm_linear": Subject(
        layernorm_linear.layernorm_linear, ops.layernorm_linear, layernorm_linear_inputs, (3, 29, 64)
    ),
    "adaln": Subject(adaln.adaln, ops.adaln, adaln_inputs, (2, 3, 7, 48)),
    "transition": Subject(transition.transition, ops.transition, transition_inputs, (3, 15, 64)),
    "swiglu": Subject(transition.swiglu, ops.swiglu, swiglu_inputs, (3, 5, 64)),
}
each_operator = pytest.mark.parametrize("name", SUBJECTS)


@dataclass
class Case:
    subject: Subject
    inputs: dict[str, Any]
    grad: Tensor

    def results(
        self, function: Callable[..., Tensor] | None = None, dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Output and gradients of ``function`` (ours); ``dtype``: of everything, None: as it is."""
        inputs = {
            name: t if t is None or dtype is None else t.detach().to(dtype).requires_grad_(t.requires_grad)
            for name, t in self.inputs.items()
        }
        leaves = {n: t for n, t in inputs.items() if t is not None and t.requires_grad}
        out = (function or self.subject.ours)(**inputs)
        gradients = torch.autograd.grad(out, list(leaves.values()), self.grad.to(out.dtype)) if leaves else ()
        return {"out": out.detach()} | dict(zip(leaves, gradients, strict=True))

    def of_three(self) -> tuple[Results, Results, Results]:
        """Results by the kernels, by the reference in float64, and by the reference."""
        naive = self.subject.reference.naive
        return self.results(), self.results(naive, torch.float64), self.results(naive)

    def assert_as_exact_as_eager(self) -> None:
        """Output and every gradient, of the inputs as they are and of others like them."""
        # Fused in float32 in the interpreter alone, where NumPy adds rows one after the other, and products
        # of 128 channels are off by up to three epsilons on some CPUs.
        fused_wide = DEVICE == "cpu" and self.grad.dtype == torch.float32 and "norm_bias" in self.inputs
        judged(self, Case.of_three, 2.5 if fused_wide else ROUNDING_WIDE)


@each_operator
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_against_float64_stay_near_those_of_eager(name, dtype):
    SUBJECTS[name].case(dtype=dtype).assert_as_exact_as_eager()


@each_operator
def test_one_row(name):
    # Not in float32, where the rounding of one sum is chance.
    SUBJECTS[name].case((1, SUBJECTS[name].shape[-1]), HALF).assert_as_exact_as_eager()


def added(**inputs: Tensor) -> Tensor:
    """The reference of a transition with its residual."""
    return ops.transition.naive(**inputs, residual=True)


@pytest.mark.parametrize(("channels", "few"), [(64, 0), (48, 0), (48, 100)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_transition_with_its_residual(channels, few, dtype, monkeypatch):
    monkeypatch.setattr(transition, "FEW_ROWS", few)
    ours = functools.partial(transition.transition, residual=True)
    subject = Subject(ours, Operator(added), transition_inputs, (3, 15, channels))
    subject.case(dtype=dtype).assert_as_exact_as_eager()


@pytest.mark.parametrize("channels", [1, 3, 130, 384])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layernorm_of_any_width(channels, dtype):
    if channels > 1:
        return SUBJECTS["layernorm"].case((21, channels), dtype).assert_as_exact_as_eager()
    case = SUBJECTS["layernorm"].case((21, channels), dtype)
    # One channel is its own mean: what is left is the offset, and x has no gradient but for the rounding of
    # weight · grad, which is multiplied by 1 / √(epsilon of the norm).
    results = case.results()
    roundings = torch.finfo(torch.float32).eps * (case.inputs["weight"] * case.grad).abs() * EPS**-0.5
    assert (results["x"].abs() <= roundings).all()
    torch.testing.assert_close(results["out"], case.inputs["bias"].detach().to(dtype).expand(21, 1))
    return None


@pytest.mark.parametrize("parameters", [(), ("weight",), ("bias",)])
def test_layernorm_without_weight_or_bias(parameters):
    case = SUBJECTS["layernorm"].case(dtype=HALF)
    for name in ("weight", "bias"):
        if name not in parameters:
            case.inputs[name] = None
    case.assert_as_exact_as_eager()


@pytest.mark.parametrize(("channels", "outputs"), [(64, 16), (64, 1), (64, 70), (48, 21)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_layernorm_linear_fused_or_composed(channels, outputs, dtype):
    case = SUBJECTS["layernorm_linear"].case((70, channels), dtype, outputs=outputs)
    case.assert_as_exact_as_eager()
    if dtype == HALF:
        case.inputs["bias"] = None
        case.inputs["norm_bias"] = None
        case.assert_as_exact_as_eager()


@pytest.mark.parametrize("s_shape", [(2, 1, 7, 24), (1, 1, 7, 24), (7, 24), (24,), (1, 3, 1, 24)])
def test_conditioning_that_copies_share(s_shape):
    SUBJECTS["adaln"].case(dtype=HALF, s_shape=s_shape).assert_as_exact_as_eager()
    SUBJECTS["adaln"].case(s_shape=s_shape).assert_as_exact_as_eager()


@pytest.mark.parametrize(("shape", "expansion"), [((9, 48), 2), ((9, 64), 2), ((5, 128), 1), ((3, 96), 1)])
@pytest.mark.parametrize("few", [0, 100])
@pytest.mark.parametrize("dtype", DTYPES)
def test_transition_fused_composed_or_of_few_rows(shape, expansion, few, dtype, monkeypatch):
    monkeypatch.setattr(transition, "FEW_ROWS", few)
    SUBJECTS["transition"].case(shape, dtype, expansion=expansion).assert_as_exact_as_eager()


@pytest.mark.parametrize("shape", [(300, 64), (300, 48)])
def test_transition_in_several_strips(monkeypatch, shape):
    monkeypatch.setattr(transition, "FEW_ROWS", 0)
    monkeypatch.setattr(fused, "LEAST_SCRATCH_BYTES", 1)
    monkeypatch.setattr(fused, "SCRATCH_BYTES", 150_000)
    monkeypatch.setattr(composed, "SCRATCH_BYTES", 150_000)
    SUBJECTS["transition"].case(shape).assert_as_exact_as_eager()


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        (name, wanted)
        for name in SUBJECTS
        for n in (0, 1, 2)
        for wanted in itertools.combinations(SUBJECTS[name].case().inputs, n)
    ],
)
def test_each_subset_of_gradients(name, wanted):
    case = SUBJECTS[name].case((5, SUBJECTS[name].shape[-1]))
    for other, tensor in case.inputs.items():
        tensor.requires_grad_(other in wanted)
    case.assert_as_exact_as_eager()


@each_operator
def test_strided_inputs_and_expanded_gradients(name):
    subject = SUBJECTS[name]
    channels = subject.shape[-1]
    case = subject.case((4, 6, channels))
    first = next(iter(case.inputs))
    x = case.inputs[first].detach()
    case.grad = torch.randn(1, 1, case.grad.shape[-1], device=DEVICE).expand_as(case.grad)
    for strided in (
        x.transpose(0, 1).contiguous().transpose(0, 1),
        torch.stack([torch.cat([x, x], -1)[..., :channels]] * 2, -1)[..., 0],
        x[:1].expand_as(x),
    ):
        case.inputs[first] = strided.requires_grad_()
        case.assert_as_exact_as_eager()
    case.grad = torch.randn_like(case.grad).transpose(0, 1).contiguous().transpose(0, 1)
    case.assert_as_exact_as_eager()


@each_operator
def test_runs_are_bitwise_equal(name):
    case = SUBJECTS[name].case((70, SUBJECTS[name].shape[-1]))
    first, second = (case.results() for _ in range(2))
    for key, value in first.items():
        assert torch.equal(value, second[key]), key


@each_operator
def test_autocast_decides_the_dtype(name):
    case = SUBJECTS[name].case()
    with torch.autocast(DEVICE, dtype=HALF):
        out = SUBJECTS[name].ours(**case.inputs)
    assert out.dtype == HALF
    gradients = torch.autograd.grad(out.float().sum(), list(case.inputs.values()))
    assert {g.dtype for g in gradients} == {torch.float32}


@each_operator
def test_second_derivative_raises(name):
    case = SUBJECTS[name].case()
    out = SUBJECTS[name].ours(**case.inputs)
    (gradient,) = torch.autograd.grad(
        out.square().sum(), [next(iter(case.inputs.values()))], create_graph=True
    )
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()
    out = getattr(torch.ops.megafold, name)(*case.inputs.values(), torch.float32)
    (gradient,) = torch.autograd.grad(
        out.square().sum(), [next(iter(case.inputs.values()))], create_graph=True
    )
    with pytest.raises(RuntimeError, match=f"{name} cannot be differentiated twice"):
        gradient.sum().backward()


@each_operator
def test_operator_check(name, monkeypatch):
    unpoisoned(monkeypatch)
    case = SUBJECTS[name].case((5, SUBJECTS[name].shape[-1]))
    torch.library.opcheck(
        getattr(torch.ops.megafold, name).default,
        (*case.inputs.values(), torch.float32),
        test_utils=OPCHECKS,
    )


@each_operator
def test_one_graph_under_compile(name, monkeypatch):
    unpoisoned(monkeypatch)
    case = SUBJECTS[name].case()

    def scaled(**inputs):
        return SUBJECTS[name].ours(**inputs) * 2

    torch._dynamo.reset()
    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager", dynamic=False)
    ours, reference = case.results(compiled), case.results(scaled)
    for key, value in ours.items():
        torch.testing.assert_close(value, reference[key], rtol=0, atol=0)


@each_operator
def test_recomputed_by_a_checkpoint(name):
    case = SUBJECTS[name].case()

    def again(**inputs):
        return torch.utils.checkpoint.checkpoint(SUBJECTS[name].ours, **inputs, use_reentrant=False)

    ours, reference = case.results(again), case.results()
    for key, value in ours.items():
        assert torch.equal(value, reference[key]), key


@each_operator
def test_registered_for_the_triton_back_end(name):
    # In half precision: in float32 a GPU's fused products are left to cuBLAS. As wide as the tiles ask for.
    wide: dict[str, Any] = {"expansion": 4} if name in ("transition", "swiglu") else {}
    case = SUBJECTS[name].case(dtype=HALF, **wide)
    with ops.use_backend("triton"):
        out = getattr(ops, name)(**case.inputs)
        assert ops.backend_report()[name] == "triton"
    assert torch.equal(out, SUBJECTS[name].ours(**case.inputs))


def test_what_the_kernels_do_not_take_is_said():
    x = torch.zeros(2, 64, device=DEVICE)
    assert layernorm.unsupported(x) is None
    assert "float64" in str(layernorm.unsupported(x.double()))
    assert "16384 channels" in str(layernorm.unsupported(x.new_zeros(1, 16384)))
    assert "empty" in str(layernorm.unsupported(x[:0]))
    assert "float64" in str(transition.unsupported(x, x.double(), x))
    wide = torch.zeros(2, 384, device=DEVICE)
    assert "2 rows of 384 channels" in str(layernorm_linear.unsupported(wide, wide[0], None, wide))
    assert "2 rows of 384 channels" in str(transition.unsupported(wide, wide, wide))


@needs_gpu
@each_operator
def test_a_cuda_graph_replays(name):
    case = SUBJECTS[name].case(dtype=HALF)
    leaves = list(case.inputs.values())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        reference = case.results()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = SUBJECTS[name].ours(**case.inputs)
        gradients = torch.autograd.grad(out, leaves, case.grad)
    graph.replay()
    torch.cuda.synchronize()
    for ours, expected in zip((out, *gradients), reference.values(), strict=True):
        assert torch.equal(ours, expected)


@needs_gpu
@pytest.mark.parametrize("name", SUBJECTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_many_row_counts_on_the_gpu(name, dtype):
    for rows in (1, 2, 63, 64, 65, 257, 1000):
        for channels in (64, 128, 256, 384):
            SUBJECTS[name].case((rows, channels), dtype).assert_as_exact_as_eager()


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["layernorm", "transition"])
def test_offsets_beyond_32_bits(name):
    """Of more than 2³¹ elements the last rows are what they are alone."""
    subject, kept = SUBJECTS[name], 8
    x = torch.randn(2**24 + kept, 128, device=DEVICE, dtype=torch.bfloat16)
    grad = torch.randn_like(x)
    assert x.numel() > 2**31
    torch.manual_seed(0)
    parameters = subject.inputs((1, 128), torch.bfloat16)
    ours, alone = (
        Case(subject, parameters | {"x": x[rows].requires_grad_()}, grad[rows]).results()
        for rows in (slice(None), slice(-kept, None))
    )
    for key in ("out", "x"):
        torch.testing.assert_close(ours[key][-kept:], alone[key], rtol=0.02, atol=0.02)
