"""Triangle multiplication without a GPU: interpreted, and compiled for each architecture."""

from pathlib import Path

import pytest
import torch
import triton

from megafold.trainer import ops
from megafold.trainer.kernels.triangle_multiplication import operator
from megafold.trainer.kernels.triangle_multiplication.forward import prepare_kernel
from megafold.trainer.kernels.triangle_multiplication.tiles import tiles
from megafold.trainer.kernels.triangle_multiplication.weights import finish_kernel, sum_shares_kernel
from tests.trainer.kernels_interpreter import check_in_interpreter
from tests.trainer.kernels_targets import (
    ONE_EACH,
    SHARED_MEMORY,
    SOURCES,
    TARGETS,
    compile_for,
    compile_source,
    multiplication_pointers,
)

CHECKS = Path(__file__).with_name("kernels_triangle_multiplication.py")
compiles = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set")


@pytest.mark.slow
def test_numbers_in_the_interpreter():
    check_in_interpreter(CHECKS)


@compiles
@pytest.mark.parametrize("target", ONE_EACH)
def test_odd_lengths_compile(target):
    found = tiles(target, torch.bfloat16, 128)
    for role, tile in (("project", found.project), ("input_gradient", found.input_gradient)):
        source = SOURCES["triangle_multiplication"](role, tile, 2, 128, False)
        assert compile_source(target, source, **tile.options()).metadata.shared <= SHARED_MEMORY[target]


@compiles
@pytest.mark.parametrize("target", TARGETS)
def test_preparation_and_sums_compile(target):
    pointers = multiplication_pointers(2)
    sizes = {"Z": 128, "C": 128}
    compile_for(target, prepare_kernel, pointers, sizes)
    compile_for(target, finish_kernel, pointers, sizes | {"ROWS": 2, "BLOCK": 32})
    compile_for(target, sum_shares_kernel, pointers, sizes | {"ROWS": 2, "COLUMNS": 16, "BLOCK": 128})


def test_without_a_gpu_the_reference_runs_and_the_report_says_so():
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set")
    z, mask = torch.randn(1, 4, 4, 16), torch.ones(1, 4, 4, dtype=torch.bool)
    one, matrix = torch.ones(16), torch.randn(16, 16)
    stacked = torch.randn(32, 16)
    weights = ops.TriangleMultiplicationWeights(one, one, stacked, stacked, one, one, matrix, matrix)
    assert operator.unsupported(z, mask, weights, True) == "device cpu"
    with ops.use_backend("triton"):
        out = ops.triangle_multiplication(z, mask, weights, True)
        assert torch.equal(out, ops.triangle_multiplication.naive(z, mask, weights, True))
        assert "device cpu" in ops.backend_report()["triangle_multiplication"]
