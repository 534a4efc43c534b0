"""The row-wise kernels without a GPU: numbers in Triton's interpreter, code for each architecture."""

from pathlib import Path
from typing import Any

import pytest
import torch
import triton

from megafold.trainer import ops
from megafold.trainer.kernels.adaln import kernel as adaln
from megafold.trainer.kernels.layernorm import kernel as layernorm
from megafold.trainer.kernels.layernorm.operator import unsupported
from megafold.trainer.kernels.layernorm.tiles import tile
from megafold.trainer.kernels.layernorm_linear import kernel as layernorm_linear
from megafold.trainer.kernels.layernorm_linear import tiles as layernorm_linear_tiles
from megafold.trainer.kernels.transition import kernel as transition
from megafold.trainer.kernels.transition.tiles import known_tiles
from tests.trainer.kernels_interpreter import check_in_interpreter
from tests.trainer.kernels_targets import SHARED_MEMORY, TARGETS, compile_for

CHECKS = Path(__file__).with_name("kernels_rowwise.py")
#: Parameters that are neither tensors nor constants.
NUMBERS = ("M", "x_row", "rows", "steps", "count", "H", "R", "INNER", "a_row")
compiles = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set")


def test_numbers_in_the_interpreter():
    check_in_interpreter(CHECKS)


def compile_kernel(
    target: str, function: Any, constants: dict[str, Any], floats: tuple[str, ...], dtype: str, **options: int
) -> None:
    pointers = {
        name: "*fp32" if name in floats else f"*{dtype}" for name in function.arg_names
        if name not in constants and name not in NUMBERS
    }  # fmt: skip
    made = compile_for(target, function, pointers, constants, **options)
    assert made.metadata.shared <= SHARED_MEMORY[target], (function.__name__, constants)


@compiles
@pytest.mark.parametrize("target", TARGETS)
def test_layernorm_compiles_and_fits(target):
    chosen = tile(384)
    sizes = {"BM": chosen.rows, "C": 384, "CP": 512, "EPS": 1e-5}
    floats = ("weight", "bias", "parts", "scale", "shift")
    forward = sizes | {"HAS_WEIGHT": True, "HAS_BIAS": True}
    compile_kernel(target, layernorm.forward_kernel, forward, floats, "bf16", num_warps=chosen.warps)
    backward = sizes | {"HAS_WEIGHT": True, "INPUT": True, "SUMS": True}
    compile_kernel(target, layernorm.backward_kernel, backward, floats, "bf16", num_warps=chosen.warps)
    parts = {"GROUPS": 1, "BP": 64, "BC": 16, "C": 384, "SCALE": True, "SHIFT": True}
    compile_kernel(target, layernorm.sum_parts_kernel, parts, floats, "bf16")


@compiles
@pytest.mark.parametrize("target", TARGETS)
def test_every_tile_of_the_transition_compiles_and_fits(target):
    floats = ("norm_weight", "norm_bias", "norm_parts", "parts")
    dtype = "bf16"
    for (_, _, channels), chosen in known_tiles(target).items():
        fixed: dict[str, Any] = {"C": channels, "H": 4 * channels}
        rows = fixed | {"NORM": True, "EPS": 1e-5}
        at = chosen.forward
        constants = {"BM": at.rows, "BH": at.hidden, "HELD": at.held} | rows
        compile_kernel(target, transition.forward_kernel, constants, floats, dtype, **at.options())
        at = chosen.input
        constants = {"BM": at.rows, "BH": at.hidden, "HELD": at.held} | rows
        constants |= {"INPUT": True, "WEIGHTS": True}
        compile_kernel(target, transition.input_gradient_kernel, constants, floats, dtype, **at.options())
        at = chosen.weights
        constants = {"BN": at.hidden, "BK": at.rows, "FIRST": False, "SPLITS": 4} | fixed
        compile_kernel(target, transition.weight_gradient_kernel, constants, floats, dtype, **at.options())


@compiles
@pytest.mark.parametrize("target", TARGETS)
def test_every_tile_of_the_linear_layer_compiles_and_fits(target):
    floats = ("norm_weight", "norm_bias", "norm_parts", "parts", "bias_parts")
    for (_, _, narrow), chosen in layernorm_linear_tiles.known_tiles(target).items():
        fixed = {"C": 128, "OUT": 16 if narrow else 516, "EPS": 1e-5}
        biases = {"HAS_NORM_BIAS": True, "HAS_BIAS": True}
        at = chosen.forward
        constants = {"BM": at.rows, "BO": at.outputs} | fixed | biases
        compile_kernel(target, layernorm_linear.forward_kernel, constants, floats, "bf16", **at.options())
        at = chosen.input
        constants = {"BM": at.rows, "BO": at.outputs, "INPUT": True, "SUMS": True} | fixed
        kernel = layernorm_linear.input_gradient_kernel
        compile_kernel(target, kernel, constants, floats, "bf16", **at.options())
        at = chosen.weight
        constants = {"BM": at.rows, "BO": at.outputs, "SPLITS": 4} | fixed | biases
        kernel = layernorm_linear.weight_gradient_kernel
        compile_kernel(target, kernel, constants, floats, "bf16", **at.options())
    constants = {"SPLITS": 40, "BP": 32, "BLOCK": 32}
    compile_kernel(target, layernorm_linear.sum_splits_kernel, constants, floats, "bf16")


@compiles
@pytest.mark.parametrize("target", TARGETS)
def test_adaln_compiles_and_fits(target):
    sizes = {"BM": 2, "C": 768, "CP": 1024, "EPS": 1e-5}
    compile_kernel(target, adaln.forward_kernel, sizes, (), "bf16")
    compile_kernel(target, adaln.backward_kernel, sizes | {"INPUT": True, "CONDITIONING": True}, (), "bf16")


@compiles
@pytest.mark.parametrize("target", TARGETS)
def test_the_transitions_other_kernels_compile(target):
    constants = {"BN": 16, "C": 128, "H": 512, "SPLITS": 4, "WEIGHT_IN": True, "WEIGHT_OUT": True}
    compile_kernel(target, transition.sum_weights_kernel, constants, ("parts",), "bf16")
    for function in (transition.activation_kernel, transition.activation_gradient_kernel):
        compile_kernel(target, function, {"H": 1536, "BLOCK": 512}, (), "bf16")


def test_without_a_gpu_the_reference_runs_and_the_report_says_so():
    x = torch.randn(3, 64)
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set")
    assert unsupported(x) == "device cpu"
    with ops.use_backend("triton"):
        assert torch.equal(ops.layernorm(x), ops.layernorm.naive(x))
        assert "device cpu" in ops.backend_report()["layernorm"]
