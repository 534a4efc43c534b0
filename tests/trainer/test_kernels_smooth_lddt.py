"""Smooth lDDT's kernel without a GPU: its numbers in Triton's interpreter, its code for each architecture."""

from pathlib import Path

import pytest
import triton

from megafold.trainer.kernels.smooth_lddt import kernel
from tests.trainer.kernels_interpreter import check_in_interpreter
from tests.trainer.kernels_targets import TARGETS, compile_for


def test_numbers_in_the_interpreter():
    check_in_interpreter(Path(__file__).with_name("kernels_smooth_lddt.py"))


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set")
@pytest.mark.parametrize("target", TARGETS)
def test_it_compiles(target):
    tensors = ("predicted", "truth", "radius", "score", "count", "gradient")
    sizes = {"BM": 16, "BN": 16, "WITH_GRADIENT": True}
    compile_for(target, kernel.smooth_lddt_kernel, dict.fromkeys(tensors, "*fp32"), sizes, num_warps=2)
