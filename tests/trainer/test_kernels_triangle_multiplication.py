"""Triangle multiplication without a GPU: interpreted, and compiled for each architecture."""

from pathlib import Path

import pytest
import torch
import triton

from megafold.trainer import ops
from megafold.trainer.kernels.triangle_multiplication import kernel, operator
from megafold.trainer.kernels.triangle_multiplication.tiles import Tile, known_tiles
from tests.trainer.kernels_interpreter import check_in_interpreter
from tests.trainer.kernels_targets import SHARED_MEMORY, TARGETS, compile_for

CHECKS = Path(__file__).with_name("kernels_triangle_multiplication.py")
compiles = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set")
KERNELS = {
    "project": kernel.project_kernel,
    "output": kernel.output_kernel,
    "output_gradient": kernel.output_gradient_kernel,
    "input_gradient": kernel.input_gradient_kernel,
    "weight_gradient": kernel.weight_gradient_kernel,
    "output_weight_gradient": kernel.output_weight_gradient_kernel,
}
#: Tensors in the dtype of the call; the others are in float32, the mask in bytes.
NARROW = (
    "z", "x", "dout", "ab", "standard", "summed", "packed", "closing", "gate_matrix", "out", "dx",
    "dproducts", "normal", "dab", "dz", "projection", "gate", "output_gate", "output", "dinput", "doutput",
)  # fmt: skip
WIDE = (
    "offsets", "gate_offsets", "factors", "products", "sums", "gate_products", "gate_sums", "out_products",
    "out_sums", "in_shares", "out_shares", "in_dnorm", "out_dnorm", "in_weight", "in_bias", "out_weight",
    "out_bias",
)  # fmt: skip


@pytest.mark.slow
def test_numbers_in_the_interpreter():
    check_in_interpreter(CHECKS)


def compiled(target: str, name: str, tile: Tile, dtype: str, channels: int, even: bool):
    function = KERNELS[name]
    pointers = dict.fromkeys(NARROW, f"*{dtype}") | dict.fromkeys(WIDE, "*fp32") | {"mask": "*u8"}
    constants = {
        "Z": channels, "C": channels, "C2": 2 * channels, "WIDTH": channels, "ROWS": tile.rows,
        "BLOCK": min(tile.channels, channels), "GATE_BLOCK": min(tile.channels, channels), "EVEN": even,
        "PRECISION": "ieee", "KEEP": True, "eps": None,
    }  # fmt: skip
    constants = {k: v for k, v in constants.items() if k in function.arg_names}
    return compile_for(target, function, pointers, constants, num_warps=tile.warps, num_stages=tile.stages)


@compiles
@pytest.mark.slow
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("target", TARGETS)
def test_every_tile_compiles_and_fits(target, name):
    seen = set()
    # Where widths share a tile, the widest needs the most.
    for (_, item_size, channels), chosen in sorted(known_tiles(target).items(), key=lambda i: -i[0][2]):
        dtype, tile = {2: "bf16", 4: "fp32"}[item_size], getattr(chosen, name)
        if dtype == "fp32" and target != "hip:gfx942":
            continue  # they take long to compile; this target is one of the two with the least shared memory
        if (dtype, tile) in seen:
            continue
        seen.add((dtype, tile))
        made = compiled(target, name, tile, dtype, channels, even=True)
        assert made.metadata.shared <= SHARED_MEMORY[target], (dtype, channels)


@compiles
@pytest.mark.parametrize("target", TARGETS)
def test_odd_lengths_and_sums_compile(target):
    (_, _, channels), chosen = next(iter(known_tiles(target).items()))
    made = compiled(target, "project", chosen.project, "bf16", channels, even=False)
    assert made.metadata.shared <= SHARED_MEMORY[target]
    pointers = dict.fromkeys(NARROW, "*bf16") | dict.fromkeys(WIDE, "*fp32")
    sizes = {"Z": 128, "C": 128}
    compile_for(target, kernel.prepare_kernel, pointers, sizes)
    compile_for(target, kernel.finish_kernel, pointers, sizes | {"ROWS": 2, "BLOCK": 32})
    compile_for(target, kernel.sum_shares_kernel, pointers, sizes | {"ROWS": 2, "COLUMNS": 16, "BLOCK": 128})


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
