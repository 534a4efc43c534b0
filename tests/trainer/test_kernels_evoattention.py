"""EvoFlash-3D without a GPU: its numbers in Triton's interpreter, its code for each architecture."""

from pathlib import Path

import pytest
import torch
import triton

from megafold.trainer import ops
from megafold.trainer.kernels.evoattention import kernel, operator
from megafold.trainer.kernels.evoattention.tiles import Tile, known_tiles, tiles
from tests.trainer.kernels_interpreter import check_in_interpreter
from tests.trainer.kernels_targets import SHARED_MEMORY, TARGETS, compile_for

CHECKS = Path(__file__).with_name("kernels_evoattention.py")
compiles = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set")
KERNELS = {
    "forward": kernel.forward_kernel,
    "query": kernel.query_gradient_kernel,
    "query_bias": kernel.query_gradient_kernel,
    "key": kernel.key_gradient_kernel,
    "bias": kernel.bias_gradient_kernel,
}


def test_numbers_in_the_interpreter():
    check_in_interpreter(CHECKS)


def compiled(target: str, name: str, tile: Tile, dtype: str, channels: int, even: bool):
    wide = f"*{dtype}"
    pointers = dict.fromkeys(("q", "k", "v", "bias", "bias_t", "out", "dout", "dq", "dk", "dv"), wide)
    pointers |= {"mask": "*u8" if name == "key" else wide}
    pointers |= {"lse": "*fp32", "delta": "*fp32", "dbias": "*fp32"}
    constants = {
        "BQ": tile.bq, "BK": tile.bk, "ROWS": tile.rows, "BIAS_GRADIENT": name == "query_bias",
        "D": channels, "DP": max(16, triton.next_power_of_2(channels)),
        "HAS_BIAS": True, "HAS_MASK": True, "EVEN": even, "PRECISION": "ieee",
        "scale": None, "unit_scale": None,
    }  # fmt: skip
    function = KERNELS[name]
    constants = {k: v for k, v in constants.items() if k in function.arg_names}
    return compile_for(target, function, pointers, constants, num_warps=tile.warps, num_stages=tile.stages)


@compiles
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("target", TARGETS)
def test_every_tile_compiles_and_fits(target, name):
    for item_size, padded, chosen in known_tiles(target):
        dtype = {2: "bf16", 4: "fp32"}[item_size]
        if dtype == "fp32" and target == "cuda:90":
            continue  # its products in full precision take ten seconds each to compile
        made = compiled(target, name, getattr(chosen, name), dtype, padded, even=True)
        assert made.metadata.shared <= SHARED_MEMORY[target], (dtype, padded)


@compiles
@pytest.mark.parametrize("target", TARGETS)
def test_bias_and_mask_preparation_compile(target):
    pointers = {"bias": "*fp32", "mask": "*u8", "dbias": "*fp32"}
    pointers |= dict.fromkeys(("prepared", "transposed", "masked"), "*bf16")
    constants = {"SCALE": 1.44, "LIMIT": 0.0, "BLOCK": 64, "PLAIN": True, "TRANSPOSED": True, "ZEROS": True}
    made = compile_for(target, kernel.prepare_kernel, pointers, constants)
    assert made.metadata.shared <= SHARED_MEMORY[target]


@compiles
@pytest.mark.parametrize("target", TARGETS)
def test_odd_lengths_and_channels_compile(target):
    for name in ("forward", "key"):
        tile = getattr(tiles(target, torch.bfloat16, 32, 391), name)
        assert compiled(target, name, tile, "bf16", 24, even=False).metadata.shared <= SHARED_MEMORY[target]


def test_without_a_gpu_the_reference_runs_and_the_report_says_so():
    q = torch.randn(1, 1, 1, 4, 8)
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set")
    assert operator.unsupported(q, q, q) == "device cpu"
    with ops.use_backend("triton"):
        assert torch.equal(ops.evoattention(q, q, q), ops.evoattention.naive(q, q, q))
        assert "device cpu" in ops.backend_report()["evoattention"]
