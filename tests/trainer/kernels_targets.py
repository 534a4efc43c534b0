"""Compiles kernels for GPUs that are not there, as launches would specialise them."""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, Final, NamedTuple

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, CompiledKernel, compile

from megafold.trainer.kernels.adaln import kernel as adaln
from megafold.trainer.kernels.adaln import tiles as adaln_tiles
from megafold.trainer.kernels.evoattention import kernel as attention
from megafold.trainer.kernels.evoattention import tiles as attention_tiles
from megafold.trainer.kernels.gated_output import kernel as output
from megafold.trainer.kernels.gated_output import tiles as output_tiles
from megafold.trainer.kernels.launch import OPTIONS
from megafold.trainer.kernels.layernorm import kernel as layernorm
from megafold.trainer.kernels.layernorm import tiles as layernorm_tiles
from megafold.trainer.kernels.layernorm_linear import kernel as linear
from megafold.trainer.kernels.layernorm_linear import tiles as linear_tiles
from megafold.trainer.kernels.tables import Family
from megafold.trainer.kernels.transition import kernel as transition
from megafold.trainer.kernels.transition import tiles as transition_tiles
from megafold.trainer.kernels.triangle_attention import kernel as projections
from megafold.trainer.kernels.triangle_attention import tiles as projection_tiles
from megafold.trainer.kernels.triangle_multiplication import backward as multiplication_backward
from megafold.trainer.kernels.triangle_multiplication import forward as multiplication_forward
from megafold.trainer.kernels.triangle_multiplication import tiles as multiplication_tiles
from megafold.trainer.kernels.triangle_multiplication import weights as multiplication_weights

# What tells a debugger the lines takes a quarter of the time.
triton.knobs.compilation.disable_line_info = True

TARGETS = {
    "cuda:80": GPUTarget("cuda", 80, 32),
    "cuda:90": GPUTarget("cuda", 90, 32),
    "hip:gfx90a": GPUTarget("hip", "gfx90a", 64),
    "hip:gfx942": GPUTarget("hip", "gfx942", 64),
}
#: The same, of which `make test` has one of each vendor.
ONE_EACH = [
    pytest.param(name, marks=pytest.mark.exhaustive) if name in ("cuda:80", "hip:gfx90a") else name
    for name in TARGETS
]
#: Bytes of shared memory that a program may have.
SHARED_MEMORY = {"cuda:80": 166912, "cuda:90": 232448, "hip:gfx90a": 65536, "hip:gfx942": 65536}

#: A kernel, the types of its tensors, and its constants.
Source = tuple[Any, dict[str, str], dict[str, Any]]

EPS: Final = 1e-5
HEADS: Final = 4
ATTENTION_KERNELS: Final = {
    "forward": attention.forward_kernel,
    "query": attention.query_gradient_kernel,
    "query_bias": attention.query_gradient_kernel,
    "key": attention.key_gradient_kernel,
    "bias": attention.bias_gradient_kernel,
}
PROJECTION_KERNELS: Final[dict[str, tuple[Any, dict[str, Any]]]] = {
    "project": (projections.project_kernel, {"SCALE": 1.44, "LIMIT": 0.0}),
    "input_gradient": (projections.input_gradient_kernel, {"HAS_RESIDUAL": True}),
    "weight_gradient": (projections.weight_gradient_kernel, {}),
}
OUTPUT_KERNELS: Final[dict[str, tuple[Any, dict[str, Any]]]] = {
    "forward": (output.forward_kernel, {"HAS_RESIDUAL": True, "HAS_KEEP": True}),
    "backward": (output.backward_kernel, {"HAS_KEEP": True}),
}
MULTIPLICATION_KERNELS: Final = {
    "project": multiplication_forward.project_kernel,
    "output": multiplication_forward.output_kernel,
    "output_gradient": multiplication_backward.output_gradient_kernel,
    "input_gradient": multiplication_backward.input_gradient_kernel,
    "weight_gradient": multiplication_weights.weight_gradient_kernel,
    "output_weight_gradient": multiplication_weights.output_weight_gradient_kernel,
}
#: Tensors of triangle multiplication in float32.
_MULTIPLICATION_WIDE: Final = (
    "offsets", "gate_offsets", "factors", "products", "sums", "gate_products", "gate_sums", "out_products",
    "out_sums", "in_shares", "out_shares", "in_dnorm", "out_dnorm", "in_weight", "in_bias", "out_weight",
    "out_bias",
)  # fmt: skip
#: And in the dtype of the call.
_MULTIPLICATION_NARROW: Final = (
    "z", "x", "dout", "keep", "ab", "standard", "summed", "packed", "closing", "gate_matrix", "out", "dx",
    "dgate", "dvalue", "dproduct", "normal", "dab", "dz", "projection", "gate", "output_gate", "output",
    "dinput", "doutput",
)  # fmt: skip
#: Tensors of triangle attention's projections and of the gated output.
_BLOCK_NARROW: Final = (
    "z", "weight", "projected", "bias", "dprojected", "dout", "dz", "x", "gate", "residual", "keep", "out",
    "dx", "dgate",
)  # fmt: skip
#: Parameters of the row-wise kernels that are neither tensors nor constants.
_ROW_NUMBERS: Final = frozenset(
    {"M", "x_row", "steps", "count", "splits", "groups", "earlier", "H", "R", "INNER", "a_row", "IN", "OUT"}
)
#: Their tensors in float32.
_ROW_WIDE: Final = frozenset({"norm_weight", "norm_bias", "norm_parts", "parts", "bias_parts"})


def compile_for(
    target: str, function: Any, pointers: Mapping[str, str], constants: Mapping[str, Any], **options: int
) -> CompiledKernel:
    """``pointers``: types of the pointer arguments; arguments in neither mapping are integers of 32 bits.

    A constant None makes a float; strides along channels are 1, other strides and pointers are multiples of
    16, and for AMD GPUs tensors have less than 2 GiB, as in the model.
    """
    signature, fixed, known = {}, {}, {}
    multiple = ["tt.divisibility", 16]
    near = [["tt.pointer_range", 32]] if TARGETS[target].backend == "hip" else []
    for index, (name, parameter) in enumerate(zip(function.arg_names, function.params, strict=True)):
        if name in constants and constants[name] is None:
            signature[name] = "fp32"
        elif name in constants or name.endswith("_d"):
            signature[name] = "constexpr"
            fixed[(index,)] = constants.get(name, 1)
        elif name in pointers:
            signature[name] = pointers[name]
            known[(index,)] = [multiple, *near]
        else:
            signature[name] = "i32"
            if name != "H" and not parameter.do_not_specialize:
                known[(index,)] = [multiple]
    source = ASTSource(function, signature=signature, constexprs=fixed, attrs=known)
    return compile(source, target=TARGETS[target], options={**OPTIONS, **options})


def pointer(itemsize: int) -> str:
    """The type of a tensor with elements of so many bytes."""
    return {2: "*bf16", 4: "*fp32"}[itemsize]


def _attention_source(role: str, tile: Any, itemsize: int, channels: int, even: bool) -> Source:
    names = ("q", "k", "v", "bias", "bias_t", "out", "dout", "dq", "dk", "dv", "mask")
    pointers = dict.fromkeys(names, pointer(itemsize)) | dict.fromkeys(("lse", "delta", "dbias"), "*fp32")
    if role == "key":
        pointers["mask"] = "*u8"
    constants = {
        "BQ": tile.bq, "BK": tile.bk, "ROWS": tile.rows, "BIAS_GRADIENT": role == "query_bias",
        "D": channels, "DP": max(16, triton.next_power_of_2(channels)),
        "HAS_BIAS": True, "HAS_MASK": True, "EVEN": even, "PRECISION": "ieee",
        "scale": None, "unit_scale": None,
    }  # fmt: skip
    return ATTENTION_KERNELS[role], pointers, constants


def _block_source(
    kernels: Mapping[str, tuple[Any, dict[str, Any]]],
    role: str,
    tile: Any,
    itemsize: int,
    channels: int,
    even: bool,
) -> Source:
    function, own = kernels[role]
    wide = ("parts", "dbias", "norm_weight", "norm_bias")
    pointers = dict.fromkeys(_BLOCK_NARROW, pointer(itemsize)) | dict.fromkeys(wide, "*fp32")
    sizes = {"C": channels, "CP": channels, "H": HEADS, "D": channels // HEADS, "HP": 16, "KP": channels}
    blocks = {
        "BM": tile.rows, "BN": tile.columns, "BK": min(tile.columns, channels), "FETCH": tile.fetch
    }  # fmt: skip
    return function, pointers, sizes | blocks | {"EPS": EPS, "PRECISION": "ieee"} | own


def multiplication_pointers(itemsize: int) -> dict[str, str]:
    """Types of the tensors of triangle multiplication's kernels."""
    narrow = dict.fromkeys(_MULTIPLICATION_NARROW, pointer(itemsize))
    return narrow | dict.fromkeys(_MULTIPLICATION_WIDE, "*fp32") | {"mask": "*u8"}


def _multiplication_source(role: str, tile: Any, itemsize: int, channels: int, even: bool) -> Source:
    block, held = min(tile.channels, channels), tile.held
    if held and role == "project":
        block = channels // 2
    elif held:
        held = channels == 4 * block
    constants = {
        "HELD": held, "FETCH": tile.fetch, "Z": channels, "C": channels, "C2": 2 * channels,
        "WIDTH": channels, "ROWS": tile.rows,
        "BLOCK": block, "GATE_BLOCK": block, "EVEN": even, "PRECISION": "ieee", "KEEP": True,
        "DROPPED": 1, "RESIDUAL": True, "WHOLE": even, "eps": None,
    }  # fmt: skip
    function = MULTIPLICATION_KERNELS[role]
    if role == "input_gradient" and tile.held:
        function = multiplication_backward.held_input_gradient_kernel
    return function, multiplication_pointers(itemsize), constants


def row_source(function: Any, constants: dict[str, Any], itemsize: int, *wide: str) -> Source:
    """A kernel that works row by row; ``wide``: tensors in float32 beside those that always are."""
    names = [n for n in function.arg_names if n not in constants and n not in _ROW_NUMBERS]
    all_wide = _ROW_WIDE.union(wide)
    types = {name: "*fp32" if name in all_wide else pointer(itemsize) for name in names}
    return function, types, constants


def _transition_source(role: str, tile: Any, itemsize: int, channels: int, even: bool) -> Source:
    fixed: dict[str, Any] = {"C": channels, "H": 4 * channels}
    if role == "weights":
        constants = {"BN": tile.hidden, "BK": tile.rows} | fixed
        return row_source(transition.weight_gradient_kernel, constants, itemsize)
    constants = {"BM": tile.rows, "BH": tile.hidden, "HELD": tile.held, "NORM": True, "EPS": EPS} | fixed
    constants["RESIDUAL"] = True
    if role == "forward":
        return row_source(transition.forward_kernel, constants, itemsize)
    constants |= {"INPUT": True, "WEIGHTS": True}
    return row_source(transition.input_gradient_kernel, constants, itemsize)


def _linear_source(outputs: int, role: str, tile: Any, itemsize: int, channels: int, even: bool) -> Source:
    fixed = {"BM": tile.rows, "BO": tile.outputs, "C": channels, "OUT": outputs, "EPS": EPS}
    biases = {"HAS_NORM_BIAS": True, "HAS_BIAS": True}
    if role == "forward":
        return row_source(linear.forward_kernel, fixed | biases, itemsize)
    if role == "input":
        return row_source(linear.input_gradient_kernel, fixed | {"INPUT": True, "SUMS": True}, itemsize)
    return row_source(linear.weight_gradient_kernel, fixed | biases, itemsize)


def _layernorm_source(role: str, tile: Any, itemsize: int, channels: int, even: bool) -> Source:
    # One channel less than the power of two: padding takes what it takes.
    sizes = {"BM": tile.rows, "C": channels - 1, "CP": channels, "EPS": EPS}
    wide = ("weight", "bias", "scale", "shift")
    if role == "forward":
        constants = sizes | {"HAS_WEIGHT": True, "HAS_BIAS": True}
        return row_source(layernorm.forward_kernel, constants, itemsize, *wide)
    constants = sizes | {"HAS_WEIGHT": True, "HAS_RESIDUAL": True, "INPUT": True, "SUMS": True}
    return row_source(layernorm.backward_kernel, constants, itemsize, *wide)


def _adaln_source(role: str, tile: Any, itemsize: int, channels: int, even: bool) -> Source:
    sizes = {"BM": tile.rows, "C": channels - 1, "CP": channels, "EPS": EPS}
    if role == "forward":
        return row_source(adaln.forward_kernel, sizes, itemsize)
    return row_source(adaln.backward_kernel, sizes | {"INPUT": True, "CONDITIONING": True}, itemsize)


#: By family: how a role's kernel is called with a tile, for elements of so many bytes and so many channels.
SOURCES: Final[dict[str, Callable[[str, Any, int, int, bool], Source]]] = {
    attention_tiles.FAMILY.name: _attention_source,
    projection_tiles.FAMILY.name: partial(_block_source, PROJECTION_KERNELS),
    output_tiles.FAMILY.name: partial(_block_source, OUTPUT_KERNELS),
    transition_tiles.FAMILY.name: _transition_source,
    multiplication_tiles.FAMILY.name: _multiplication_source,
    linear_tiles.FAMILY.name: partial(_linear_source, 516),
    linear_tiles.FAMILY_NARROW.name: partial(_linear_source, 16),
    layernorm_tiles.FAMILY.name: _layernorm_source,
    adaln_tiles.FAMILY.name: _adaln_source,
}
#: The families, and the widest inputs that their safe tiles have to hold, by bytes of an element.
_WIDEST: Final[tuple[tuple[Family[Any], dict[int, tuple[int, ...]]], ...]] = (
    (attention_tiles.FAMILY, {2: (64, 128), 4: (128,)}),
    (projection_tiles.FAMILY, {2: (128, 256), 4: (256,)}),
    (output_tiles.FAMILY, {2: (128,), 4: (128,)}),
    (transition_tiles.FAMILY, {2: (128,)}),
    (multiplication_tiles.FAMILY, {2: (128,), 4: (128,)}),
    (linear_tiles.FAMILY, {2: (128,)}),
    (linear_tiles.FAMILY_NARROW, {2: (128,)}),
    (layernorm_tiles.FAMILY, {2: (8192,), 4: (8192,)}),
    (adaln_tiles.FAMILY, {2: (8192,), 4: (8192,)}),
)
FAMILIES: Final = {family.name: (family, widest) for family, widest in _WIDEST}


class Residence(NamedTuple):
    """Registers of a thread, bytes that it spills, and how many waves share a SIMD."""

    registers: int
    spilled: int
    waves: float


def residence(made: CompiledKernel) -> Residence:
    """By what the compiled code says of itself, on gfx90a and gfx942.

    A SIMD has 512 registers a thread, which go to waves in eights, and room for 8 waves; four share 64 KiB.
    """
    about = re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s*(\d+)", made.asm["amdgcn"])
    found = {name: int(value) for name, value in about}
    registers, warps, shared = found["vgpr_count"], made.metadata.num_warps, made.metadata.shared
    by_registers = min(8, 512 // (-(-max(registers, 1) // 8) * 8)) * 4 // warps
    programs = min(by_registers, 65536 // shared if shared else by_registers)
    return Residence(registers, found["private_segment_fixed_size"], programs * warps / 4)


def compile_source(target: str, source: Source, **options: int) -> CompiledKernel:
    """A kernel as a launch compiles it."""
    function, pointers, constants = source
    return compile_for(
        target, function, pointers, {k: v for k, v in constants.items() if k in function.arg_names}, **options
    )


def every_tile(family: str, target: str) -> Iterator[tuple[int, int, str, Any]]:
    """Bytes of an element, channels, role and tile of all that an architecture may run; each once.

    The safe tiles are left to the architectures with the least shared memory.
    """
    found, widest = FAMILIES[family]
    those = found.known(target)
    if SHARED_MEMORY[target] == min(SHARED_MEMORY.values()):
        those += _safe(found, widest)
    return _each_once(found, those)


def some_tiles(family: str, target: str) -> Iterator[tuple[int, int, str, Any]]:
    """Fewer of them: of each table each role's widest.

    So of the safe ones: of two bytes on gfx90a, of four on gfx942; they have as much memory.
    """
    found, widest = FAMILIES[family]
    safe_bytes = {"hip:gfx90a": 2, "hip:gfx942": 4}.get(target)
    yield from _each_once(found, found.known(target), every=False)
    safe = [each for each in _safe(found, widest) if each[0] == safe_bytes]
    yield from _each_once(found, safe, every=False)


def _safe(found: Family[Any], widest: Mapping[int, tuple[int, ...]]) -> list[tuple[int, int, Any]]:
    return [(itemsize, channels, found.safe(itemsize, channels))
            for itemsize, several in widest.items() for channels in several]  # fmt: skip


def _each_once(
    found: Family[Any], those: list[tuple[int, int, Any]], *, every: bool = True
) -> Iterator[tuple[int, int, str, Any]]:
    """``every``: not only a role's tile for the widest input."""
    seen = set()
    # Where widths share a tile, the widest needs the most.
    for itemsize, channels, tiles in sorted(those, key=lambda each: -each[1]):
        for role in found.roles:
            tile = getattr(tiles, role)
            if (itemsize, role, tile if every else None) not in seen:
                seen.add((itemsize, role, tile if every else None))
                yield itemsize, channels, role, tile
