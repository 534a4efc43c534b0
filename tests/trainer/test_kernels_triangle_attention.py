"""Fused triangle attention without a GPU: its numbers in the interpreter, its code for each architecture."""

from pathlib import Path

import pytest
import torch
import triton

from megafold.trainer import ops
from megafold.trainer.kernels.dropout_add import kernel as dropout_kernel
from megafold.trainer.kernels.gated_output import kernel as gated
from megafold.trainer.kernels.gated_output import launches as gated_launches
from megafold.trainer.kernels.gated_output import tiles as gated_tiles
from megafold.trainer.kernels.triangle_attention import kernel, operator
from tests.trainer.kernels_interpreter import check_in_interpreter
from tests.trainer.kernels_targets import SHARED_MEMORY, SOURCES, TARGETS, compile_for, compile_source

CHECKS = [
    Path(__file__).with_name(f"kernels_{name}.py")
    for name in ("triangle_attention", "gated_output", "pairformer")
]
compiles = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set")


def test_numbers_in_the_interpreter():
    check_in_interpreter(*CHECKS)


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


@pytest.mark.parametrize(
    ("target", "itemsize", "width", "held"),
    [
        ("hip:gfx90a", 2, 128, True),
        ("hip:gfx90a", 2, 256, False),
        ("cuda:80", 2, 256, True),
        ("cuda:80", 4, 128, True),
        ("cuda:90", 4, 256, False),
    ],
)
def test_weights_wider_than_shared_memory_are_left_to_a_product(monkeypatch, target, itemsize, width, held):
    monkeypatch.setattr(gated_launches, "shared_memory", lambda _: SHARED_MEMORY[target])
    dtype = {2: torch.bfloat16, 4: torch.float32}[itemsize]
    assert gated_launches.holds(width, width, dtype, torch.device("cuda", 0)) == held
    if held and not triton.knobs.runtime.interpret:
        tile = gated_tiles.tiles(target, dtype, width).backward
        source = SOURCES["gated_output"]("backward", tile, itemsize, width, True)
        assert compile_source(target, source, **tile.options()).metadata.shared <= SHARED_MEMORY[target]


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
