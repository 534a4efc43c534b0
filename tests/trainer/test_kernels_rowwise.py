"""The row-wise kernels without a GPU: numbers in Triton's interpreter, code for each architecture."""

from pathlib import Path

import pytest
import torch
import triton

from megafold.trainer import ops
from megafold.trainer.kernels.layernorm import kernel as layernorm
from megafold.trainer.kernels.layernorm.operator import unsupported
from megafold.trainer.kernels.layernorm_linear import kernel as layernorm_linear
from megafold.trainer.kernels.transition import kernel as transition
from tests.trainer.kernels_interpreter import check_in_interpreter
from tests.trainer.kernels_targets import SHARED_MEMORY, TARGETS, compile_source, row_source

CHECKS = [Path(__file__).with_name(f"kernels_{name}.py") for name in ("judging", "rowwise", "vendors")]
compiles = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set")


def test_numbers_in_the_interpreter():
    check_in_interpreter(*CHECKS)


@compiles
@pytest.mark.parametrize("target", TARGETS)
def test_the_kernels_beside_the_tiled_ones_compile(target):
    sums = {"BN": 16, "C": 128, "H": 512, "WEIGHT_IN": True, "WEIGHT_OUT": True}
    parts = {"BP": 64, "BC": 16, "C": 384, "SCALE": True, "SHIFT": True}
    for source in (
        row_source(transition.sum_weights_kernel, sums, 2),
        row_source(transition.cast_kernel, {"BLOCK": 2048}, 2, "weight_in", "weight_out"),
        row_source(transition.activation_kernel, {"H": 1536, "BLOCK": 512}, 2),
        row_source(transition.activation_gradient_kernel, {"H": 1536, "BLOCK": 512}, 2),
        row_source(layernorm.sum_parts_kernel, parts, 2, "scale", "shift"),
        row_source(layernorm_linear.sum_splits_kernel, {"BP": 32, "BLOCK": 32}, 2),
    ):
        assert compile_source(target, source).metadata.shared <= SHARED_MEMORY[target], source[0]


def test_without_a_gpu_the_reference_runs_and_the_report_says_so():
    x = torch.randn(3, 64)
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set")
    assert unsupported(x) == "device cpu"
    with ops.use_backend("triton"):
        assert torch.equal(ops.layernorm(x), ops.layernorm.naive(x))
        assert "device cpu" in ops.backend_report()["layernorm"]
