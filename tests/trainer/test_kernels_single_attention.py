"""The single attention without a GPU: its numbers in Triton's interpreter, its code for each architecture."""

from pathlib import Path

import pytest
import triton

from megafold.trainer.kernels.single_attention import kernel
from tests.trainer.kernels_interpreter import check_in_interpreter
from tests.trainer.kernels_targets import TARGETS, compile_for


def test_numbers_in_the_interpreter():
    check_in_interpreter(Path(__file__).with_name("kernels_single_attention.py"))


@pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set")
@pytest.mark.parametrize("target", TARGETS)
def test_packing_compiles(target):
    sources = dict.fromkeys(("q", "kv", "gate", "output", "bias", "offset"), "*fp32")
    compile_for(target, kernel.pack_kernel, sources | {"packed": "*bf16"}, {"BLOCK": 1024})
