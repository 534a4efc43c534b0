"""Fused triangle attention without a GPU: its numbers in the interpreter, its code for each architecture."""

from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from megafold.trainer import ops
from megafold.trainer.kernels.dropout_add import kernel as dropout_kernel
from megafold.trainer.kernels.gated_output import kernel as gated
from megafold.trainer.kernels.gated_output.tiles import tile_of
from megafold.trainer.kernels.triangle_attention import kernel, operator
from tests.trainer.kernels_interpreter import check_in_interpreter
from tests.trainer.kernels_targets import SHARED_MEMORY, TARGETS, compile_for

CHECKS = [
    Path(__file__).with_name(f"kernels_{name}.py")
    for name in ("triangle_attention", "gated_output", "pairformer")
]
compiles = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set")
C, H, D = 128, 4, 32
WIDTHS = {"C": C, "CP": C, "H": H, "D": D, "HP": 16, "KP": H * D, "EPS": 1e-5, "PRECISION": "ieee"}
#: Family, role, kernel, and its constants beside the tile's.
KERNELS: dict[str, tuple[str, str, Any, dict[str, Any]]] = {
    "project": ("triangle_attention", "project", kernel.project_kernel, {"SCALE": 1.44, "LIMIT": 0.0}),
    "input_gradient": (
        "triangle_attention", "input_gradient", kernel.input_gradient_kernel, {"HAS_RESIDUAL": True}
    ),
    "weight_gradient": ("triangle_attention", "weight_gradient", kernel.weight_gradient_kernel, {}),
    "output": ("gated_output", "forward", gated.forward_kernel, {"HAS_RESIDUAL": True, "HAS_KEEP": True}),
    "output_gradient": ("gated_output", "backward", gated.backward_kernel, {"HAS_KEEP": True}),
}  # fmt: skip
WIDE = ("parts", "dbias", "norm_weight", "norm_bias")
NARROW = ("z", "weight", "projected", "bias", "dprojected", "dout", "dz", "x", "gate", "residual", "keep",
          "out", "dx", "dgate")  # fmt: skip


def test_numbers_in_the_interpreter():
    check_in_interpreter(*CHECKS)


@compiles
@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles_and_fits(target, name):
    family, role, function, own = KERNELS[name]
    tile = tile_of(family, role, target, torch.bfloat16, C)
    pointers = dict.fromkeys(NARROW, "*bf16") | dict.fromkeys(WIDE, "*fp32")
    constants = WIDTHS | own | {"BM": tile.rows, "BN": tile.columns}
    constants = {k: v for k, v in constants.items() if k in function.arg_names}
    made = compile_for(target, function, pointers, constants, **tile.options())
    assert made.metadata.shared <= SHARED_MEMORY[target]


@compiles
@pytest.mark.parametrize("target", TARGETS)
def test_small_kernels_compile(target):
    wide = dict.fromkeys(("first", "second", "third", "fourth"), "*fp32")
    compile_for(target, kernel.pack_kernel, wide | {"out": "*bf16"}, {"BLOCK": 1024})
    compile_for(target, kernel.sum_kernel, wide | {"out": "*fp32"}, {"BLOCK": 256, "STEP": 16})
    narrow = dict.fromkeys(("x", "gate", "out", "dout", "dx", "dgate", "residual", "keep"), "*bf16")
    compile_for(target, gated.gate_kernel, narrow, {"BM": 8, "BC": 128})
    compile_for(target, gated.gate_gradient_kernel, narrow, {"BM": 8, "BC": 128})
    sizes = {"C": 128, "CP": 128, "BM": 32, "HAS_RESIDUAL": True}
    compile_for(target, dropout_kernel.dropout_add_kernel, narrow, sizes)


def test_without_a_gpu_the_reference_runs_and_the_report_says_so():
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set")
    z, mask = torch.randn(1, 4, 4, 16), torch.ones(1, 4, 4, dtype=torch.bool)
    w = torch.randn
    weights = ops.TriangleAttentionWeights(w(16), w(16), w(48, 16), w(16, 16), w(2, 16), w(16, 16))
    assert operator.unsupported(z, mask, weights, starting=True) == "device cpu"
    with ops.use_backend("triton"):
        out = ops.triangle_attention(z, mask, weights, starting=True)
    assert torch.equal(out, ops.triangle_attention.naive(z, mask, weights, starting=True))
