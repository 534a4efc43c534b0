"""Checks of triangle multiplication; ``test_kernels_triangle_multiplication.py`` interprets them.

On a machine with a GPU they also run compiled: ``pytest tests/trainer/kernels_triangle_multiplication.py``.
"""

import functools
from dataclasses import dataclass, fields
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megafold.trainer import ops
from megafold.trainer.kernels.triangle_multiplication import launches, operator
from megafold.trainer.kernels.triangle_multiplication.backward import held_input_gradient_kernel
from megafold.trainer.kernels.triangle_multiplication.tiles import Tile, Tiles
from megafold.trainer.ops import TriangleMultiplicationWeights
from tests.trainer.kernels_checks import (
    DEVICE,
    DTYPES,
    HALF,
    Results,
    needs_gpu,
    relative,
    unpoisoned,
)
from tests.trainer.kernels_checks import assert_as_exact_as_eager as judged

pytestmark = pytest.mark.usefixtures("poisoned_memory")

NAMES = ("z", *TriangleMultiplicationWeights._fields)


def use_tile(monkeypatch: pytest.MonkeyPatch, tile: Tile) -> None:
    """For all kernels of the test."""
    alike = Tiles(**{field.name: tile for field in fields(Tiles)})
    monkeypatch.setattr(launches, "tiles", lambda *_: alike)
    monkeypatch.setattr(launches, "_call", functools.cache(launches.Call))


@pytest.fixture(autouse=True)
def _quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program costs the interpreter the same, however much it does."""
    if DEVICE == "cpu":
        use_tile(monkeypatch, Tile(64, 32, 4, 1))
        monkeypatch.setitem(launches.FINISHED, "ROWS", 8)


@dataclass
class Case:
    z: Tensor
    mask: Tensor
    weights: TriangleMultiplicationWeights
    outgoing: bool
    grad: Tensor

    def results(self, function, dtype: torch.dtype | None = None, wanted=NAMES) -> dict[str, Tensor]:
        """Output and the ``wanted`` gradients of ``function``; ``dtype``: of everything, None: as it is."""
        leaves = {
            name: (t.detach() if dtype is None else t.detach().to(dtype)).requires_grad_(name in wanted)
            for name, t in zip(NAMES, (self.z, *self.weights), strict=True)
        }
        z, *weights = leaves.values()
        out = function(z, self.mask, TriangleMultiplicationWeights(*weights), self.outgoing)
        asked = [leaves[name] for name in wanted]
        gradients = torch.autograd.grad(out, asked, self.grad.to(out.dtype)) if asked else ()
        return {"out": out.detach()} | dict(zip(wanted, gradients, strict=True))


def make_case(
    shape: tuple[int, int, int, int],
    dtype: torch.dtype = torch.float32,
    *,
    outgoing: bool = True,
    seed: int = 0,
) -> Case:
    """``shape``: B, N, C_z, C. A third of the pairs is masked, all pairs of the first token among them."""
    b, n, c_z, c = shape
    torch.manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        return (torch.randn(rows, columns, device=DEVICE) * columns**-0.5).to(dtype)

    def near(mean: float, size: int) -> Tensor:
        return mean + 0.3 * torch.randn(size, device=DEVICE)

    mask = torch.rand(b, n, n, device=DEVICE) > 0.3
    mask[:, 0] = False
    weights = TriangleMultiplicationWeights(
        near(1, c_z), near(0, c_z), matrix(2 * c, c_z), matrix(2 * c, c_z), near(1, c), near(0, c),
        matrix(c_z, c), matrix(c_z, c_z),
    )  # fmt: skip
    z = (0.5 + 2 * torch.randn(b, n, n, c_z, device=DEVICE)).to(dtype)
    return Case(z, mask, weights, outgoing, torch.randn(b, n, n, c_z, device=DEVICE).to(dtype))


def assert_as_exact_as_eager(case: Case, wanted=NAMES, **ending: Any) -> None:
    """Output and the ``wanted`` gradients, of the inputs as they are and of others like them."""
    kernels = functools.partial(operator.triangle_multiplication, **ending)
    naive = functools.partial(ops.triangle_multiplication.naive, **ending)

    def results_of_three(case: Case) -> tuple[Results, Results, Results]:
        ours = case.results(kernels, wanted=wanted)
        return ours, case.results(naive, torch.float64, wanted), case.results(naive, wanted=wanted)

    judged(case, results_of_three)


@pytest.mark.parametrize(
    ("shape", "outgoing"), [((1, 13, 32, 16), True), ((2, 8, 16, 32), False), ((1, 5, 16, 16), False)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_errors_against_float64_stay_near_those_of_eager(shape, outgoing, dtype):
    assert_as_exact_as_eager(make_case(shape, dtype, outgoing=outgoing))


@pytest.mark.parametrize("n", [7, 16])
def test_tiles_that_are_dealt(n):
    """Both widths multiples of 32, in 2 bytes; with padding and without."""
    case = make_case((1, n, 64, 32), HALF, outgoing=n == 7)
    keep = (torch.rand(1, 1, n, 64, device=DEVICE) > 0.25).to(HALF) / 0.75
    assert_as_exact_as_eager(case, keep=keep, residual=True)


@pytest.mark.parametrize(("n", "dtype", "rows"), [(13, torch.float32, 32), (16, HALF, 32), (16, HALF, 128)])
def test_matrices_that_stay_in_shared_memory(n, dtype, rows, monkeypatch):
    use_tile(monkeypatch, Tile(rows, 32, 4, 1, held=True))
    assert_as_exact_as_eager(make_case((1, n, 16, 32), dtype), ("z", "gate"))


@pytest.mark.parametrize(
    ("n", "width", "dtype", "dropped"),
    [(7, 128, HALF, False), (32, 128, HALF, True), (13, 128, HALF, True), (13, 64, torch.float32, True)],
)
def test_output_gradient_whose_matrices_stay_in_shared_memory(n, width, dtype, dropped, monkeypatch):
    """Dealt and not; blocks within a line or not; with padding and without."""
    use_tile(monkeypatch, Tile(16, width // 4, 4, 1, held=True, fetch=True))
    keep = (torch.rand(1, 1, n, width, device=DEVICE) > 0.25).to(dtype) / 0.75 if dropped else None
    assert_as_exact_as_eager(make_case((1, n, width, 32), dtype), ("z", "output", "gate"), keep=keep)


@pytest.mark.parametrize("shape", [(2, 13, 32, 32), (1, 16, 64, 32), (1, 7, 32, 64)])
@pytest.mark.parametrize("residual", [False, True])
def test_input_gradient_whose_matrices_stay_in_shared_memory(shape, residual, monkeypatch):
    use_tile(monkeypatch, Tile(32, 32, 4, 1, held=True))
    case, (b, n, c_z, c) = make_case(shape, HALF), shape
    call = launches.Call(b, n, c_z, c, HALF, case.z.device, False, 0, residual)
    assert call.input_gradient._kernel is held_input_gradient_kernel
    assert_as_exact_as_eager(case, ("z",), residual=residual)


@needs_gpu  # it takes the interpreter minutes
@pytest.mark.parametrize("n", [1, 2, 31, 64, 77, 128, 200, 299])
@pytest.mark.parametrize("channels", [(128, 128), (64, 128), (64, 64), (32, 32)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_all_lengths_widths_and_dtypes(n, channels, dtype):
    assert_as_exact_as_eager(make_case((1, n, *channels), dtype, outgoing=n % 2 == 0, seed=n))


def test_one_token():
    for masked in (False, True):
        case = make_case((1, 1, 16, 16))
        case.mask[:] = not masked
        ours = case.results(operator.triangle_multiplication)
        exact = case.results(ops.triangle_multiplication.naive, torch.float64)
        for name, value in ours.items():
            torch.testing.assert_close(value.double(), exact[name], rtol=1e-4, atol=1e-5)


def test_all_masked():
    case = make_case((1, 9, 16, 16))
    case.mask[:] = False
    results = case.results(operator.triangle_multiplication)
    exact = case.results(ops.triangle_multiplication.naive, torch.float64)
    for name, value in results.items():
        torch.testing.assert_close(value.double(), exact[name], rtol=1e-4, atol=1e-5)
    for name in ("projection", "gate"):
        assert torch.count_nonzero(results[name]) == 0


def test_what_masked_pairs_project_does_not_matter():
    case = make_case((1, 9, 16, 16))
    before = case.results(operator.triangle_multiplication, wanted=())["out"]
    case.z = torch.where(case.mask[..., None], case.z, torch.randn_like(case.z))
    after = case.results(operator.triangle_multiplication, wanted=())["out"]
    assert torch.equal(before[case.mask], after[case.mask])


@pytest.mark.parametrize(
    "wanted", [("z",), ("norm_in_bias", "output_gate"), ("norm_out_weight",), ("output", "gate"), ()]
)
def test_subsets_of_gradients(wanted):
    assert_as_exact_as_eager(make_case((1, 8, 16, 16)), wanted)


@pytest.mark.parametrize("outgoing", [True, False])
def test_expanded_and_strided_inputs(outgoing):
    case = make_case((2, 10, 16, 16), outgoing=outgoing)
    case.z = case.z.transpose(1, 2)
    case.mask = case.mask[:1].transpose(1, 2)
    case.grad = torch.randn(1, 1, 10, 1, device=DEVICE).expand(2, 10, 10, 16)
    w = case.weights
    case.weights = w._replace(
        projection=w.projection.T.contiguous().T,
        norm_in_bias=torch.stack([w.norm_in_bias, w.norm_in_bias], -1)[:, 0],
    )
    assert_as_exact_as_eager(case)


@pytest.mark.parametrize(("dtype", "wanted"), [(torch.float32, NAMES), (HALF, ("z", "output"))])
@pytest.mark.parametrize("shared", [(1, 3), (2, 3), (1, 8), (2, 8), None])
def test_dropout_and_residual(shared, dtype, wanted):
    axis, n = shared or (None, 8)
    case = make_case((2, n, 16, 16), dtype, outgoing=n == 3)
    keep = None
    if axis is not None:
        size = [2, n, n, 16]
        size[axis] = 1
        keep = (torch.rand(size, device=DEVICE) > 0.25).to(dtype) / 0.75
        assert_as_exact_as_eager(case, ("z", "gate"), keep=keep)
    assert_as_exact_as_eager(case, wanted, keep=keep, residual=True)


@pytest.mark.parametrize("axis", [1, 2])
def test_dropout_of_blocks_within_a_line(axis, monkeypatch):
    use_tile(monkeypatch, Tile(16, 16, 4, 1))
    case = make_case((2, 16, 16, 16))
    size = [2, 16, 16, 16]
    size[axis] = 1
    keep = (torch.rand(size, device=DEVICE) > 0.25).float() / 0.75
    assert_as_exact_as_eager(case, ("z", "gate"), keep=keep, residual=True)


def test_dropout_and_residual_that_are_left_to_pytorch():
    case = make_case((1, 8, 16, 16))
    keep = (torch.rand(1, 8, 8, 16, device=DEVICE) > 0.25).float()
    assert_as_exact_as_eager(case, keep=keep, residual=True)
    with torch.autocast(DEVICE, dtype=HALF):
        ended = functools.partial(operator.triangle_multiplication, residual=True)
        out = case.results(ended, wanted=())["out"]
        update = case.results(operator.triangle_multiplication, wanted=())["out"]
    assert out.dtype == torch.float32
    torch.testing.assert_close(out, case.z + update, rtol=0, atol=0)


def test_tiles_of_many_programs(monkeypatch):
    use_tile(monkeypatch, Tile(32, 16, 4, 1, 6))
    assert_as_exact_as_eager(make_case((1, 11, 32, 32), HALF, outgoing=False))


def test_runs_are_bitwise_equal():
    case = make_case((1, 11, 16, 16), HALF)
    first, second = (case.results(operator.triangle_multiplication) for _ in range(2))
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def test_autocast_decides_the_dtype():
    case = make_case((1, 8, 16, 16))
    exact = case.results(ops.triangle_multiplication.naive, torch.float64)
    with torch.autocast(DEVICE, dtype=HALF):
        ours = case.results(operator.triangle_multiplication)
        eager = case.results(ops.triangle_multiplication.naive)
    assert ours["out"].dtype == HALF
    for name, value in ours.items():
        assert value.dtype == eager[name].dtype, name
        assert relative(value, exact[name]) <= 1.3 * relative(eager[name], exact[name]), name


def test_activation_checkpointing():
    case = make_case((1, 8, 16, 16))

    def kept(*arguments):
        return checkpoint(operator.triangle_multiplication, *arguments, use_reentrant=False)

    again, before = case.results(kept), case.results(operator.triangle_multiplication)
    for name, value in again.items():
        assert torch.equal(value, before[name]), name


def test_second_derivative_raises():
    case = make_case((1, 8, 16, 16))
    case.z.requires_grad_()
    out = operator.triangle_multiplication(case.z, case.mask, case.weights, True)
    (gradient,) = torch.autograd.grad(out.square().sum(), [case.z], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiate twice"):
        gradient.sum().backward()


def test_second_derivative_of_the_custom_operator_raises():
    case = make_case((1, 8, 16, 16))
    case.z.requires_grad_()
    out, *_ = torch.ops.megafold.triangle_multiplication(
        case.z, case.mask, list(case.weights), None, True, False, torch.float32
    )
    (gradient,) = torch.autograd.grad(out.square().sum(), [case.z], create_graph=True)
    with pytest.raises(RuntimeError, match="differentiated twice"):
        gradient.sum().backward()


def test_operator_check():
    case = make_case((1, 9, 16, 32))
    weights = [w.requires_grad_() for w in case.weights]
    keep = torch.ones(1, 1, 9, 16, device=DEVICE)
    torch.library.opcheck(
        torch.ops.megafold.triangle_multiplication.default,
        (case.z.requires_grad_(), case.mask, weights, keep, True, True, torch.float32),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"),
    )


@pytest.mark.parametrize("wanted", [NAMES, ("gate", "output")])
def test_one_graph_under_compile(wanted, monkeypatch):
    unpoisoned(monkeypatch)
    case = make_case((1, 9, 16, 16))

    def scaled(*arguments):
        return operator.triangle_multiplication(*arguments) * 2

    torch._dynamo.reset()
    compiled = torch.compile(scaled, fullgraph=True, backend="aot_eager", dynamic=False)
    ours, reference = case.results(compiled, wanted=wanted), case.results(scaled, wanted=wanted)
    for name, value in ours.items():
        torch.testing.assert_close(value, reference[name], rtol=0, atol=0)


@needs_gpu
def test_a_graph_of_it_replays():
    case = make_case((1, 64, 128, 128), torch.bfloat16)
    torch.use_deterministic_algorithms(False)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        case.results(operator.triangle_multiplication)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = case.results(operator.triangle_multiplication)
    case.z.copy_(torch.randn_like(case.z))
    graph.replay()
    for name, value in case.results(operator.triangle_multiplication).items():
        assert torch.equal(value, captured[name]), name


def test_registered_for_the_triton_back_end():
    case = make_case((1, 8, 16, 16))
    arguments = (case.z, case.mask, case.weights, True)
    with ops.use_backend("triton"):
        out = ops.triangle_multiplication(*arguments)
        assert ops.backend_report()["triangle_multiplication"] == "triton"
    assert torch.equal(out, operator.triangle_multiplication(*arguments))


def test_what_the_kernels_do_not_take_is_said():
    case = make_case((1, 8, 16, 16))
    assert operator.unsupported(case.z, case.mask, case.weights, True) is None
    assert "float64" in str(operator.unsupported(case.z.double(), case.mask, case.weights, True))
    assert "mask of" in str(operator.unsupported(case.z, case.mask.float(), case.weights, True))
    assert "empty" in str(operator.unsupported(case.z[:, :0, :0], case.mask, case.weights, True))
    several = case.weights._replace(gate=case.weights.gate.to(HALF))
    assert "several dtypes" in str(operator.unsupported(case.z, case.mask, several, True))
    odd = make_case((1, 8, 24, 16))
    assert "24 and 16 channels" in str(operator.unsupported(odd.z, odd.mask, odd.weights, True))
    # The last of three rows of factors, 8 tokens wider, begins below 2³¹: at 2 · 32 767², not at 2 · 32 768².
    for tokens, said in ((32_759, None), (32_760, "1 times 32760 tokens")):
        many = case.z[:, :1, :1].expand(1, tokens, tokens, -1)
        assert operator.unsupported(many, case.mask, case.weights, True) == said
