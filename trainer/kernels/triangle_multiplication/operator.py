"""Triangle multiplication as a torch operator with its backward, registered for the back end ``triton``."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from megafold.trainer.kernels.evoattention.tiles import architecture
from megafold.trainer.kernels.launch import Launcher, blocks
from megafold.trainer.kernels.triangle_multiplication import kernel
from megafold.trainer.kernels.triangle_multiplication.tiles import Tile, Tiles, tiles
from megafold.trainer.ops.normalization import EPS
from megafold.trainer.ops.precision import result_dtype
from megafold.trainer.ops.registry import register
from megafold.trainer.ops.triangle import TriangleMultiplicationWeights

_DTYPES: Final = (torch.bfloat16, torch.float16, torch.float32)
_CHANNELS: Final = (16, 32, 64, 128)
#: Rows of a, b, x and their gradients are padded to it: 16 bytes, which cuBLAS and wide loads ask for.
_PAD: Final = 8
#: Positions are counted in 32 bits.
_MOST_POSITIONS: Final = 2**31 - 256
#: Rows of the matrices that a program of the summing kernels finishes, and how many parts it adds at a time;
#: columns of the norm's gradient, and how many shares.
_FINISHED: Final = {"ROWS": 2, "BLOCK": 32}
_SUMMED: Final = {"COLUMNS": 16, "BLOCK": 128}
#: Programs at a time in the interpreter, where there are no multiprocessors to fill.
_FEW: Final = 3
#: Triton runs on the CPU.
_INTERPRETED: Final = bool(triton.knobs.runtime.interpret)

_launch_project = Launcher(kernel.project_kernel)
_launch_output = Launcher(kernel.output_kernel)
_launch_output_gradient = Launcher(kernel.output_gradient_kernel)
_launch_input_gradient = Launcher(kernel.input_gradient_kernel)
_launch_weight_gradient = Launcher(kernel.weight_gradient_kernel)
_launch_finish = Launcher(kernel.finish_kernel)
_launch_sum_shares = Launcher(kernel.sum_shares_kernel)


@dataclass(frozen=True)
class _Call:
    """What all kernels of one call share: sizes as the kernels name them, the dtype, the tiles."""

    b: int
    n: int
    padded: int
    z: int
    c: int
    dtype: torch.dtype
    tiles: Tiles
    multiprocessors: int

    @property
    def positions(self) -> int:
        return self.b * self.padded * self.padded

    @property
    def numbers(self) -> tuple[int, int, int]:
        return self.n, self.padded, self.positions // _PAD**2

    @property
    def hidden(self) -> tuple[int, int, int, int]:
        """Shape of a, b and x."""
        return self.c, self.b, self.padded, self.padded

    def fixed(self, tile: Tile) -> dict[str, Any]:
        """The constants that end every kernel's list."""
        even = self.n == self.padded and self.positions % tile.rows == 0
        tf32 = self.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
        return {"EVEN": even, "PRECISION": "tf32" if tf32 else "ieee"}

    def parts(self, tile: Tile, programs: int) -> int:
        """How many parts fill the GPU where each has ``programs`` programs."""
        return max(
            1, min(blocks(self.positions, tile.rows), self.multiprocessors * tile.resident // programs)
        )


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _FEW


def _call(z: Tensor, projection: Tensor, dtype: torch.dtype) -> _Call:
    b, n, _n, c_z = z.shape
    c = projection.shape[0] // 2
    chosen = tiles(architecture(z.device), dtype, max(c_z, c))
    return _Call(b, n, blocks(n, _PAD) * _PAD, c_z, c, dtype, chosen, _multiprocessors(z.device))


def _prepared(weights: Sequence[Tensor], dtype: torch.dtype) -> TriangleMultiplicationWeights:
    """The weights as the kernels read them: the matrices in ``dtype``."""
    given = TriangleMultiplicationWeights(*(w.contiguous() for w in weights))
    return given._replace(
        projection=given.projection.to(dtype),
        gate=given.gate.to(dtype),
        output=given.output.to(dtype),
        output_gate=given.output_gate.to(dtype),
    )


def _product(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Of matrices [C, B, NP, NP]; given ``out``, autocast leaves it alone."""
    torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out=out.flatten(0, 1))


def _forward(
    z: Tensor, mask: Tensor, weights: Sequence[Tensor], outgoing: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output; for the backward: ab [2, C, B, NP, NP], x [C, B, NP, NP], statistics of z and x."""
    w = _prepared(weights, dtype)
    call = _call(z, w.projection, dtype)
    z, mask = z.contiguous(), mask.contiguous().view(torch.uint8)
    ab = torch.empty((2, *call.hidden), dtype=dtype, device=z.device)
    x = torch.empty(call.hidden, dtype=dtype, device=z.device)
    out = torch.empty(z.shape, dtype=dtype, device=z.device)
    statistics = torch.empty((2, 2, call.positions), dtype=torch.float32, device=z.device)
    tile = call.tiles.project
    _launch_project(
        blocks(call.positions, tile.rows),
        (z, mask, w.norm_in_weight, w.norm_in_bias, w.projection, w.gate, ab, statistics),
        (*call.numbers, EPS),
        {"Z": call.z, "C2": 2 * call.c, "ROWS": tile.rows, "BLOCK": min(tile.channels, 2 * call.c)}
        | call.fixed(tile),
        tile.options(),
    )
    a, b = ab.unbind()
    if outgoing:
        _product(a, b.mT, x)
    else:
        _product(a.mT, b, x)
    tile = call.tiles.output
    _launch_output(
        blocks(call.positions, tile.rows),
        (z, x, statistics, w.norm_in_weight, w.norm_in_bias, w.norm_out_weight, w.norm_out_bias, w.output,
         w.output_gate, out),
        (*call.numbers, EPS),
        {"Z": call.z, "C": call.c, "ROWS": tile.rows, "BLOCK": min(tile.channels, call.z)}
        | call.fixed(tile),
        tile.options(),
    )  # fmt: skip
    return out, ab, x, statistics


def _output_gradient(
    call: _Call, grad: Tensor, z: Tensor, x: Tensor, statistics: Tensor, w: TriangleMultiplicationWeights
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dx; the gradient of the gate's product [Z, R]; H [parts, Z, C] and S [parts, Z] of ``output``."""
    tile = call.tiles.output_gradient
    parts = call.parts(tile, 1)
    dx = torch.empty_like(x)
    dgate = torch.empty((call.z, call.positions), dtype=x.dtype, device=x.device)
    products = torch.empty((parts, call.z, call.c), dtype=torch.float32, device=x.device)
    sums = torch.empty((parts, call.z), dtype=torch.float32, device=x.device)
    _launch_output_gradient(
        parts,
        (z, x, grad, statistics, w.norm_in_weight, w.norm_in_bias, w.norm_out_weight, w.norm_out_bias,
         w.output, w.output_gate, dx, dgate, products, sums),
        (*call.numbers, blocks(call.positions, tile.rows), parts),
        {"Z": call.z, "C": call.c, "ROWS": tile.rows} | call.fixed(tile),
        tile.options(),
    )  # fmt: skip
    return dx, dgate, products, sums


def _input_gradient(
    call: _Call, z: Tensor, mask: Tensor, dab: Tensor, dgate: Tensor, statistics: Tensor,
    w: TriangleMultiplicationWeights,
) -> Tensor:  # fmt: skip
    """dz, in the dtype of z."""
    dz = torch.empty_like(z)
    tile = call.tiles.input_gradient
    _launch_input_gradient(
        blocks(call.positions, tile.rows),
        (z, mask, dab, dgate, statistics, w.norm_in_weight, w.norm_in_bias, w.projection, w.gate,
         w.output_gate, dz),
        call.numbers,
        {"Z": call.z, "C2": 2 * call.c, "ROWS": tile.rows, "BLOCK": min(tile.channels, 2 * call.c),
         "GATE_BLOCK": min(tile.channels, call.z)} | call.fixed(tile),
        tile.options(),
    )  # fmt: skip
    return dz


def _weight_gradient(
    call: _Call, z: Tensor, mask: Tensor, dab: Tensor, dgate: Tensor, statistics: Tensor,
    w: TriangleMultiplicationWeights,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """H [parts, 4·C + Z, Z] and S [parts, 4·C + Z] of the matrices that multiply z."""
    tile = call.tiles.weight_gradient
    block, gate_block = min(tile.channels, 2 * call.c), min(2 * tile.channels, call.z)
    slices = 2 * call.c // block + call.z // gate_block
    parts = call.parts(tile, slices)
    rows = 4 * call.c + call.z
    products = torch.empty((parts, rows, call.z), dtype=torch.float32, device=z.device)
    sums = torch.empty((parts, rows), dtype=torch.float32, device=z.device)
    _launch_weight_gradient(
        slices * parts,
        (z, mask, dab, dgate, statistics, w.norm_in_weight, w.norm_in_bias, w.projection, w.gate, products,
         sums),
        (*call.numbers, blocks(call.positions, tile.rows), parts),
        {"Z": call.z, "C2": 2 * call.c, "ROWS": tile.rows, "BLOCK": block, "GATE_BLOCK": gate_block}
        | call.fixed(tile),
        tile.options(),
    )  # fmt: skip
    return products, sums


def _finish(
    products: Tensor, sums: Tensor, matrices: Sequence[Tensor], norm: Sequence[Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradients [rows, width] of the stacked matrices, in ``dtype``, and [2, width] of the norm before them.

    ``products`` and ``sums``: parts of H and S; ``norm``: scale and offset.
    """
    parts, rows, width = products.shape
    dmatrices = torch.empty((rows, width), dtype=dtype, device=products.device)
    programs = rows // _FINISHED["ROWS"]
    shares = torch.empty((programs, 2, width), dtype=torch.float32, device=products.device)
    dnorm = torch.empty((2, width), dtype=torch.float32, device=products.device)
    first = len(matrices[0])
    second = first + len(matrices[1]) if len(matrices) > 1 else rows
    _launch_finish(
        programs,
        (products, sums, matrices[0], matrices[-2 % len(matrices)], matrices[-1], *norm, dmatrices, shares),
        (rows, parts, first, second),
        {"WIDTH": width, **_FINISHED},
        {},
    )
    _launch_sum_shares(
        2 * width // _SUMMED["COLUMNS"], (shares, dnorm), (programs,), {"WIDTH": 2 * width, **_SUMMED}, {}
    )
    return dmatrices, dnorm


def _common(*tensors: Tensor) -> torch.dtype:
    """The dtype of all of them, float32 where they differ."""
    return tensors[0].dtype if len({t.dtype for t in tensors}) == 1 else torch.float32


def _backward(
    grad: Tensor, z: Tensor, mask: Tensor, weights: Sequence[Tensor], ab: Tensor, x: Tensor,
    statistics: Tensor, outgoing: bool, wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dz; gradients of projection, gate and output_gate, stacked, and of norm_in; of output and norm_out.

    ``wanted``: dz, those of the input's parameters, those of the output's. What is not wanted is empty.
    """
    given = TriangleMultiplicationWeights(*weights)
    w = _prepared(weights, x.dtype)
    call = _call(z, w.projection, x.dtype)
    z, mask, grad = z.contiguous(), mask.contiguous().view(torch.uint8), grad.contiguous()
    dx, dgate, products, sums = _output_gradient(call, grad, z, x, statistics, w)
    nothing = dx.new_empty((0,), dtype=torch.float32)
    doutput, dnorm_out = nothing, nothing.clone()
    if wanted[2]:
        norm = (w.norm_out_weight, w.norm_out_bias)
        doutput, dnorm_out = _finish(products, sums, [w.output], norm, given.output.dtype)
    a, b = ab.unbind()
    dab = torch.empty_like(ab)
    da, db = dab.unbind()
    if outgoing:
        _product(dx, b, da)
        _product(dx.mT, a, db)
    else:
        _product(b, dx.mT, da)
        _product(a, dx, db)
    del dx
    dz, dinput, dnorm_in = nothing.clone(), nothing.clone(), nothing.clone()
    if wanted[0]:
        dz = _input_gradient(call, z, mask, dab, dgate, statistics, w)
    if wanted[1]:
        products, sums = _weight_gradient(call, z, mask, dab, dgate, statistics, w)
        dtype = _common(given.projection, given.gate, given.output_gate)
        norm = (w.norm_in_weight, w.norm_in_bias)
        dinput, dnorm_in = _finish(products, sums, [w.projection, w.gate, w.output_gate], norm, dtype)
    return dz, dinput, dnorm_in, doutput, dnorm_out


def _wanted(needs_z: bool, needs_weights: Sequence[bool]) -> list[bool]:
    """As :func:`_backward` takes it."""
    needs = TriangleMultiplicationWeights(*needs_weights)
    of_input = (needs.norm_in_weight, needs.norm_in_bias, needs.projection, needs.gate, needs.output_gate)
    return [needs_z, any(of_input), any((needs.norm_out_weight, needs.norm_out_bias, needs.output))]


def _weight_gradients(
    weights: Sequence[Tensor], needs: Sequence[bool], gradients: Sequence[Tensor]
) -> list[Tensor | None]:
    """What :func:`_backward` returns after dz, taken apart, in each weight's dtype."""
    w = TriangleMultiplicationWeights(*weights)
    dinput, dnorm_in, doutput, dnorm_out = gradients
    first, second = len(w.projection), len(w.projection) + len(w.gate)
    apart: dict[str, Tensor] = {}
    if dinput.numel():
        apart |= {"norm_in_weight": dnorm_in[0], "norm_in_bias": dnorm_in[1], "projection": dinput[:first],
                  "gate": dinput[first:second], "output_gate": dinput[second:]}  # fmt: skip
    if doutput.numel():
        apart |= {"norm_out_weight": dnorm_out[0], "norm_out_bias": dnorm_out[1], "output": doutput}
    return [
        apart[name].to(weight.dtype) if needed else None
        for name, weight, needed in zip(w._fields, w, needs, strict=True)
    ]


class _TriangleMultiplication(torch.autograd.Function):
    """The operator outside of ``torch.compile``, where a custom operator's dispatch costs 0.1 ms more."""

    @staticmethod
    def forward(
        ctx: Any, z: Tensor, mask: Tensor, outgoing: bool, dtype: torch.dtype, *weights: Tensor
    ) -> Tensor:
        out, ab, x, statistics = _forward(z, mask, weights, outgoing, dtype)
        ctx.save_for_backward(z, mask, ab, x, statistics, *weights)
        ctx.outgoing = outgoing
        ctx.set_materialize_grads(False)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        z, mask, ab, x, statistics, *weights = ctx.saved_tensors
        needs_z, _mask, _outgoing, _dtype, *needs = ctx.needs_input_grad
        wanted = _wanted(needs_z, needs)
        dz, *rest = _backward(grad, z, mask, weights, ab, x, statistics, ctx.outgoing, wanted)
        return dz if needs_z else None, None, None, None, *_weight_gradients(weights, needs, rest)


_operator = torch.library.custom_op("megafold::triangle_multiplication", _forward, mutates_args=())
_operator_backward = torch.library.custom_op(
    "megafold::triangle_multiplication_backward", _backward, mutates_args=()
)


@_operator.register_fake
def _(
    z: Tensor, mask: Tensor, weights: Sequence[Tensor], outgoing: bool, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    b, n, _n, _c_z = z.shape
    padded = blocks(n, _PAD) * _PAD
    c = TriangleMultiplicationWeights(*weights).projection.shape[0] // 2
    return (
        torch.empty(z.shape, dtype=dtype, device=z.device),
        torch.empty((2, c, b, padded, padded), dtype=dtype, device=z.device),
        torch.empty((c, b, padded, padded), dtype=dtype, device=z.device),
        torch.empty((2, 2, b * padded * padded), dtype=torch.float32, device=z.device),
    )


@_operator_backward.register_fake
def _(
    grad: Tensor, z: Tensor, mask: Tensor, weights: Sequence[Tensor], ab: Tensor, x: Tensor,
    statistics: Tensor, outgoing: bool, wanted: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    w = TriangleMultiplicationWeights(*weights)
    c_z, c = w.output.shape

    def made(needed: bool, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(
            shape if needed else (0,), dtype=dtype if needed else torch.float32, device=z.device
        )

    return (
        made(wanted[0], tuple(z.shape), z.dtype),
        made(wanted[1], (4 * c + c_z, c_z), _common(w.projection, w.gate, w.output_gate)),
        made(wanted[1], (2, c_z), torch.float32),
        made(wanted[2], (c_z, c), w.output.dtype),
        made(wanted[2], (2, c), torch.float32),
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    z, mask, weights, outgoing, _dtype = inputs
    _out, ab, x, statistics = output
    ctx.save_for_backward(z, mask, ab, x, statistics, *weights)
    ctx.outgoing = outgoing
    ctx.set_materialize_grads(False)


def _operator_gradients(ctx: Any, grad: Tensor | None, *_others: None) -> tuple[Any, ...]:
    z, mask, ab, x, statistics, *weights = ctx.saved_tensors
    needs_z, _mask, needs, *_rest = ctx.needs_input_grad
    if grad is None:
        return None, None, [None] * len(weights), None, None
    wanted = _wanted(needs_z, needs)
    dz, *rest = _operator_backward(grad, z, mask, weights, ab, x, statistics, ctx.outgoing, wanted)
    return dz if needs_z else None, None, _weight_gradients(weights, needs, rest), None, None


def _no_second_derivative(ctx: Any, *grads: Any) -> None:
    raise RuntimeError(
        "triangle_multiplication cannot be differentiated twice; use the eager back end for it"
    )


_operator.register_autograd(_operator_gradients, setup_context=_setup_context)
_operator_backward.register_autograd(_no_second_derivative)


def unsupported(
    z: Tensor, mask: Tensor, weights: TriangleMultiplicationWeights, outgoing: bool
) -> str | None:
    """Why the kernels cannot take these arguments; None: they can."""
    if z.device.type != "cuda" and not _INTERPRETED:
        return f"device {z.device.type}"
    if result_dtype(z) not in _DTYPES or any(t.dtype not in _DTYPES for t in (z, *weights)):
        return f"dtypes {z.dtype}, {', '.join(sorted({str(t.dtype) for t in weights}))}"
    if mask.dtype != torch.bool:
        return f"mask of {mask.dtype}"
    c_z, c = weights.output.shape
    if c_z not in _CHANNELS or c not in _CHANNELS:
        return f"{c_z} and {c} channels"
    if z.numel() == 0:
        return "empty"
    if z.shape[0] * (z.shape[1] + _PAD) ** 2 > _MOST_POSITIONS:
        return f"{z.shape[0]} times {z.shape[1]} tokens"
    return None


@register("triangle_multiplication", "triton", supports=unsupported)
def triangle_multiplication(
    z: Tensor, mask: Tensor, weights: TriangleMultiplicationWeights, outgoing: bool
) -> Tensor:
    """See :func:`megafold.trainer.ops.triangle.triangle_multiplication`."""
    dtype = result_dtype(z)
    mask = mask.expand(z.shape[:-1])
    if torch.compiler.is_compiling():
        out, *_ = _operator(z, mask, list(weights), outgoing, dtype)
        return out
    result: Tensor = _TriangleMultiplication.apply(z, mask, outgoing, dtype, *weights)
    return result
