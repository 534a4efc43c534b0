"""That float32 products of tiles are summed in the parts that they are written in."""

import re
from typing import Any

import pytest
import triton
import triton.language as tl

from megafold.trainer.kernels.products import add_product, add_product_kept, product, product_t
from tests.trainer.kernels_targets import TARGETS, compile_for

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set")


@triton.jit
def parts_kernel(a, b, out, TURNED: tl.constexpr):
    row, channel = tl.arange(0, 16)[:, None], tl.arange(0, 128)[None, :]
    place = row * 128 + channel
    left, right = tl.load(a + place), tl.load(b + place)
    total = product_t(left, right, "ieee") if TURNED else product(left, tl.trans(right), "ieee")
    tl.store(out + row * 16 + tl.arange(0, 16)[None, :], total)


@triton.jit
def running_kernel(a, b, out, blocks, KEPT: tl.constexpr):
    place = tl.arange(0, 16)[:, None] * 16 + tl.arange(0, 16)[None, :]
    total = tl.zeros([16, 16], tl.float32)
    lost = tl.zeros([16, 16], tl.float32)
    for block in range(blocks):
        left, right = tl.load(a + block * 256 + place), tl.load(b + block * 256 + place)
        if KEPT:
            total, lost = add_product_kept(total, lost, left, right, "ieee")
        else:
            total = add_product(total, left, right, "ieee")
    tl.store(out + place, total)


def accumulators(target: str, kernel: Any, pointer: str, **constants: Any) -> list[bool]:
    """Of each product in the compiled kernel, whether it begins with zeros and not with another sum."""
    made = compile_for(target, kernel, {"a": pointer, "b": pointer, "out": "*fp32"}, constants)
    code = made.asm["ttgir"]
    zeros = set(re.findall(r"(%[\w]+) = arith\.constant dense<0\.0+e\+00>", code))
    return [name in zeros for name in re.findall(r"dot %[\w#]+, %[\w#]+, (%[\w#]+)", code)]


@pytest.mark.parametrize("turned", [True, False])
@pytest.mark.parametrize("target", TARGETS)
def test_a_wide_product_is_eight_chains(target, turned):
    assert accumulators(target, parts_kernel, "*fp32", TURNED=turned) == [True] * 8


@pytest.mark.parametrize("kept", [True, False])
@pytest.mark.parametrize("target", TARGETS)
def test_a_running_sum_is_not_one_chain(target, kept):
    # The last pass of a loop may stand by itself.
    assert set(accumulators(target, running_kernel, "*fp32", KEPT=kept)) == {True}


@pytest.mark.parametrize("kept", [True, False])
def test_of_two_bytes_it_is_the_matrix_units(kept):
    assert accumulators("cuda:80", running_kernel, "*bf16", KEPT=kept) == [False]
