"""Launches of the kernels of triangle multiplication, with room made for what they write."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from megafold.trainer.kernels.evoattention.tiles import architecture
from megafold.trainer.kernels.launch import Launcher, blocks
from megafold.trainer.kernels.triangle_multiplication import kernel
from megafold.trainer.kernels.triangle_multiplication.tiles import Tile, Tiles, tiles
from megafold.trainer.ops.normalization import EPS
from megafold.trainer.ops.triangle import TriangleMultiplicationWeights

#: Rows of a, b, x and their gradients are padded to it: 16 bytes, which cuBLAS and wide loads ask for.
PAD: Final = 8
#: Rows of a matrix that a program prepares.
_RUN: Final = 8
#: Rows of the matrices that a program finishes, and how many parts it adds at a time.
FINISHED: Final = {"ROWS": 2, "BLOCK": 32}
#: Columns of the norm's gradient that a program finishes, and how many shares it adds at a time.
_SUMMED: Final = {"COLUMNS": 16, "BLOCK": 128}
#: Programs at a time in the interpreter, where there are no multiprocessors to fill.
_FEW: Final = 3

_launch_prepare = Launcher(kernel.prepare_kernel)
_launch_project = Launcher(kernel.project_kernel)
_launch_output = Launcher(kernel.output_kernel)
_launch_output_gradient = Launcher(kernel.output_gradient_kernel)
_launch_input_gradient = Launcher(kernel.input_gradient_kernel)
_launch_weight_gradient = Launcher(kernel.weight_gradient_kernel)
_launch_finish = Launcher(kernel.finish_kernel)
_launch_sum_shares = Launcher(kernel.sum_shares_kernel)


@dataclass(frozen=True)
class Call:
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
        """R."""
        return self.b * self.padded * self.padded

    @property
    def numbers(self) -> tuple[int, int, int]:
        """N, NP, Q."""
        return self.n, self.padded, self.positions // PAD**2

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


class Prepared(NamedTuple):
    """The matrices as ``prepare_kernel`` leaves them: packed [4·C + Z, Z], closing [Z, C], offsets."""

    packed: Tensor
    closing: Tensor
    offsets: Tensor

    def of_output(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """output_gate's matrix, output's, and their offsets."""
        c_z, c = self.closing.shape
        return self.packed[4 * c :], self.closing, self.offsets[4 * c :], self.offsets[4 * c + c_z :]


class Parts(NamedTuple):
    """What the gradients of matrices are made of: H [parts, rows, width] and S [parts, rows], float32."""

    products: Tensor
    sums: Tensor


def _parts(parts: int, rows: int, width: int, device: torch.device) -> Parts:
    products = torch.empty((parts, rows, width), dtype=torch.float32, device=device)
    return Parts(products, torch.empty((parts, rows), dtype=torch.float32, device=device))


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else _FEW


def call_for(b: int, n: int, output: Tensor, dtype: torch.dtype) -> Call:
    """Of B sequences of N tokens; ``output`` [Z, C]: a weight, for its shape and device."""
    c_z, c = output.shape
    device = output.device
    chosen = tiles(architecture(device), dtype, max(c_z, c))
    return Call(b, n, blocks(n, PAD) * PAD, c_z, c, dtype, chosen, _multiprocessors(device))


def prepare(call: Call, w: TriangleMultiplicationWeights) -> Prepared:
    """The matrices as the kernels read them."""
    device = w.output.device
    packed = torch.empty((4 * call.c + call.z, call.z), dtype=call.dtype, device=device)
    closing = torch.empty((call.z, call.c), dtype=call.dtype, device=device)
    offsets = torch.empty(4 * call.c + 2 * call.z, dtype=torch.float32, device=device)
    _launch_prepare(
        (4 * call.c + 2 * call.z) // _RUN,
        (w.projection, w.gate, w.output_gate, w.output, w.norm_in_weight, w.norm_in_bias, w.norm_out_weight,
         w.norm_out_bias, packed, closing, offsets),
        (),
        {"Z": call.z, "C": call.c},
        {},
    )  # fmt: skip
    return Prepared(packed, closing, offsets)


def project(call: Call, z: Tensor, mask: Tensor, prepared: Prepared, scales: Tensor) -> tuple[Tensor, Tensor]:
    """z standardised [R, Z]; a and b [2, C, B, NP, NP]. Fills ``scales`` [R]."""
    standard = torch.empty((call.positions, call.z), dtype=call.dtype, device=z.device)
    ab = torch.empty((2, *call.hidden), dtype=call.dtype, device=z.device)
    tile = call.tiles.project
    _launch_project(
        blocks(call.positions, tile.rows),
        (z, mask, prepared.packed, prepared.offsets, ab, standard, scales),
        (*call.numbers, EPS),
        {"Z": call.z, "C2": 2 * call.c, "ROWS": tile.rows, "BLOCK": min(tile.channels, 2 * call.c)}
        | call.fixed(tile),
        tile.options(),
    )
    return standard, ab


def contract(a: Tensor, b: Tensor, out: Tensor) -> None:
    """Matrix products of [C, B, NP, NP]; given ``out``, autocast leaves them alone."""
    torch.bmm(a.flatten(0, 1), b.flatten(0, 1), out=out.flatten(0, 1))


def close(
    call: Call, standard: Tensor, x: Tensor, prepared: Prepared, scales: Tensor, *, keep: bool
) -> Tensor:
    """The output [B, N, N, Z]. With ``keep``, x is standardised in its place and ``scales`` [R] filled."""
    out = torch.empty((call.b, call.n, call.n, call.z), dtype=call.dtype, device=x.device)
    tile = call.tiles.output
    _launch_output(
        blocks(call.positions, tile.rows),
        (standard, x, *prepared.of_output(), out, scales),
        (*call.numbers, EPS),
        {"Z": call.z, "C": call.c, "ROWS": tile.rows, "BLOCK": min(tile.channels, call.z), "KEEP": keep}
        | call.fixed(tile),
        tile.options(),
    )
    return out


def output_gradient(
    call: Call, grad: Tensor, standard: Tensor, x: Tensor, prepared: Prepared, scales: Tensor
) -> tuple[Tensor, Tensor, Parts]:
    """dx; the gradient of the gate's product [Z, R]; the parts of ``output``'s gradient."""
    tile = call.tiles.output_gradient
    parts = call.parts(tile, 1)
    dx = torch.empty_like(x)
    dgate = torch.empty((call.z, call.positions), dtype=x.dtype, device=x.device)
    made = _parts(parts, call.z, call.c, x.device)
    _launch_output_gradient(
        parts,
        (standard, x, grad, *prepared.of_output(), scales, dx, dgate, *made),
        (*call.numbers, blocks(call.positions, tile.rows), parts),
        {"Z": call.z, "C": call.c, "ROWS": tile.rows} | call.fixed(tile),
        tile.options(),
    )
    return dx, dgate, made


def input_gradient(
    call: Call, standard: Tensor, mask: Tensor, dab: Tensor, dgate: Tensor, prepared: Prepared,
    scales: Tensor, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """dz [B, N, N, Z] in ``dtype``."""
    dz = torch.empty((call.b, call.n, call.n, call.z), dtype=dtype, device=dab.device)
    tile = call.tiles.input_gradient
    _launch_input_gradient(
        blocks(call.positions, tile.rows),
        (standard, mask, dab, dgate, prepared.packed, prepared.offsets, scales, dz),
        call.numbers,
        {"Z": call.z, "C2": 2 * call.c, "ROWS": tile.rows, "BLOCK": min(tile.channels, 2 * call.c),
         "GATE_BLOCK": min(tile.channels, call.z)} | call.fixed(tile),
        tile.options(),
    )  # fmt: skip
    return dz


def weight_gradient(
    call: Call, standard: Tensor, mask: Tensor, dab: Tensor, dgate: Tensor, prepared: Prepared
) -> Parts:
    """The parts of the gradients of the matrices that multiply z, in the order of ``packed``."""
    tile = call.tiles.weight_gradient
    block, gate_block = min(tile.channels, 2 * call.c), min(2 * tile.channels, call.z)
    slices = 2 * call.c // block + call.z // gate_block
    parts = call.parts(tile, slices)
    made = _parts(parts, 4 * call.c + call.z, call.z, dab.device)
    _launch_weight_gradient(
        slices * parts,
        (standard, mask, dab, dgate, prepared.packed, prepared.offsets, *made),
        (*call.numbers, blocks(call.positions, tile.rows), parts),
        {"Z": call.z, "C2": 2 * call.c, "ROWS": tile.rows, "BLOCK": block, "GATE_BLOCK": gate_block}
        | call.fixed(tile),
        tile.options(),
    )
    return made


def finish(
    made: Parts, matrices: Sequence[Tensor], norm: Sequence[Tensor], dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Gradients [rows, width] of the stacked matrices, in ``dtype``, and [2, width] of the norm before them.

    ``matrices``: projection, gate and output_gate, or output thrice; ``norm``: scale and offset.
    """
    parts, rows, width = made.products.shape
    dmatrices = torch.empty((rows, width), dtype=dtype, device=made.sums.device)
    programs = rows // FINISHED["ROWS"]
    shares = torch.empty((programs, 2, width), dtype=torch.float32, device=made.sums.device)
    dnorm = torch.empty((2, width), dtype=torch.float32, device=made.sums.device)
    _launch_finish(
        programs,
        (*made, *matrices, *norm, dmatrices, shares),
        (rows, parts, len(matrices[0])),
        {"WIDTH": width, **FINISHED, "PACKED": matrices[0] is not matrices[1]},
        {},
    )
    _launch_sum_shares(
        2 * width // _SUMMED["COLUMNS"], (shares, dnorm), (programs,), {"WIDTH": 2 * width, **_SUMMED}, {}
    )
    return dmatrices, dnorm
