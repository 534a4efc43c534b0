"""EvoFlash-3D without a GPU: its numbers in Triton's interpreter, its code for each architecture."""

from pathlib import Path

import pytest
import torch
import triton

from megafold.trainer import ops
from megafold.trainer.kernels.evoattention import kernel, launches, operator
from megafold.trainer.kernels.evoattention.tiles import tiles
from tests.trainer.kernels_interpreter import check_in_interpreter
from tests.trainer.kernels_targets import (
    ONE_EACH,
    SHARED_MEMORY,
    SOURCES,
    TARGETS,
    compile_for,
    compile_source,
)

CHECKS = Path(__file__).with_name("kernels_evoattention.py")
compiles = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set")


def test_numbers_in_the_interpreter():
    check_in_interpreter(CHECKS)


@compiles
@pytest.mark.parametrize("target", TARGETS)
def test_bias_and_mask_preparation_compile(target):
    pointers = {"bias": "*fp32", "mask": "*u8", "dbias": "*fp32"}
    pointers |= dict.fromkeys(("prepared", "transposed", "masked"), "*bf16")
    constants = {"SCALE": 1.44, "LIMIT": 0.0, "BLOCK": 64, "MASK_ROWS": 16, "PREPARED": False}
    constants |= {"PLAIN": True, "TRANSPOSED": True, "ZEROS": True}
    made = compile_for(target, kernel.prepare_kernel, pointers, constants)
    assert made.metadata.shared <= SHARED_MEMORY[target]


@compiles
@pytest.mark.parametrize("target", ONE_EACH)
def test_odd_lengths_and_channels_compile(target):
    for name in ("forward", "key"):
        tile = getattr(tiles(target, torch.bfloat16, 32, 391), name)
        source = SOURCES["evoattention"](name, tile, 2, 24, False)
        made = compile_source(target, source, **tile.options())
        assert made.metadata.shared <= SHARED_MEMORY[target]


def test_without_a_gpu_the_reference_runs_and_the_report_says_so():
    q = torch.randn(1, 1, 1, 4, 8)
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set")
    assert operator.unsupported(q, q, q) == "device cpu"
    with ops.use_backend("triton"):
        assert torch.equal(ops.evoattention(q, q, q), ops.evoattention.naive(q, q, q))
        assert "device cpu" in ops.backend_report()["evoattention"]


@compiles
@pytest.mark.parametrize("target", [name for name in TARGETS if name.startswith("hip")])
def test_nothing_is_added_by_loops_that_compare_and_swap(target, monkeypatch):
    tile = tiles(target, torch.bfloat16, 32, 384).query_bias
    source = SOURCES["evoattention"]("query_bias", tile, 2, 32, True)
    code = compile_source(target, source, **tile.options()).asm["amdgcn"]
    monkeypatch.setattr(launches, "architecture", lambda _: target)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: False)
    assert launches.adds_bias_gradient(torch.device("cuda")) == ("cmpswap" not in code)
