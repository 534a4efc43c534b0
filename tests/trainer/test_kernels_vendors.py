"""What kernels do in another way on AMD GPUs, in the compiled code of each architecture."""

import re
from typing import Any

import pytest
import triton
import triton.language as tl

from megafold.trainer.kernels.vendors import narrowed, quotient
from tests.trainer.kernels_targets import TARGETS, compile_for

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set")


@triton.jit
def quotient_kernel(x, y, out, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out + n, quotient(tl.load(x + n), tl.load(y + n)))


@triton.jit
def narrowing_kernel(x, out, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out + n, narrowed(tl.load(x + n), out.dtype.element_ty))


def instructions(target: str, kernel: Any, **pointers: str) -> list[str]:
    """Names of the instructions, of one number a thread."""
    constants = {"N": TARGETS[target].warp_size}
    made = compile_for(target, kernel, pointers, constants, num_warps=1)
    return re.findall(
        r"^\s+(?:@\S+ )?([a-z]\w+[\w.]*)", made.asm["ptx" if "cuda" in target else "amdgcn"], re.M
    )


@pytest.mark.parametrize("target", TARGETS)
def test_a_quotient_is_an_approximate_instruction(target):
    found = instructions(target, quotient_kernel, x="*fp32", y="*fp32", out="*fp32")
    if target.startswith("cuda"):
        assert found.count("div.full.f32") == 1
    else:
        assert sum(name.startswith("v_rcp_f32") for name in found) == 1
        assert not any(name.startswith("v_div") for name in found)


@pytest.mark.parametrize("target", TARGETS)
def test_to_bfloat16_is_one_sum_on_amd_and_an_instruction_elsewhere(target):
    found = instructions(target, narrowing_kernel, x="*fp32", out="*bf16")
    if target == "cuda:80":
        assert "cvt.rn.bf16x2.f32" in found or "cvt.rn.bf16.f32" in found
    elif target == "cuda:90":
        assert "cvt.rn.bf16.f32" in found
    else:
        assert not any(name.startswith(("v_cmp_o", "v_cmp_u", "v_cndmask")) for name in found)


@pytest.mark.parametrize("target", TARGETS)
def test_other_dtypes_are_rounded_by_the_hardware(target):
    found = instructions(target, narrowing_kernel, x="*fp32", out="*fp16")
    assert any("cvt" in name and "f16" in name for name in found)
