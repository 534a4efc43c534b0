"""Launches of the kernels of triangle multiplication, with room made for what they write."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from megafold.trainer.kernels.evoattention.tiles import architecture
from megafold.trainer.kernels.launch import Launch, blocks
from megafold.trainer.kernels.triangle_multiplication.backward import (
    held_input_gradient_kernel,
    input_gradient_kernel,
    output_gradient_kernel,
)
from megafold.trainer.kernels.triangle_multiplication.forward import (
    output_kernel,
    prepare_kernel,
    project_kernel,
)
from megafold.trainer.kernels.triangle_multiplication.tiles import Tile, Tiles, tiles
from megafold.trainer.kernels.triangle_multiplication.weights import (
    finish_kernel,
    output_weight_gradient_kernel,
    sum_shares_kernel,
    weight_gradient_kernel,
)
from megafold.trainer.ops.normalization import EPS
from megafold.trainer.ops.triangle import TriangleMultiplicationWeights

#: Rows of a, b, x and their gradients are padded to it: 16 bytes, which cuBLAS and wide loads ask for.
PAD: Final = 8
#: Rows of a matrix that a program prepares.
_RUN: Final = 8
#: Rows of the matrices that a program of one warp finishes, and how many parts it adds at a time.
FINISHED: Final = {"ROWS": 1, "BLOCK": 32}
#: Columns of the norms' gradients that a program finishes, and how many shares it adds at a time.
_SUMMED: Final = {"COLUMNS": 8, "BLOCK": 128}
#: Columns that are dealt together, and positions so many that as many channels have less than 2³² bytes.
_DEALT: Final = 32
_FAR: Final = 2**32 // (2 * _DEALT) - 1
#: Programs at a time in the interpreter, where there are no multiprocessors to fill.
_FEW: Final = 3


class Ending(NamedTuple):
    """What is done to the update, in the kernels' terms.

    Attributes:
        keep: dropout's factors [B, 1, N, Z] or [B, N, 1, Z], contiguous, or None.
        residual: z is added.
    """

    keep: Tensor | None
    residual: bool

    @property
    def dropped(self) -> int:
        """The axis that shares the factors; 0: there are none."""
        if self.keep is None:
            return 0
        return 1 if self.keep.shape[1] == 1 else 2


class Prepared(NamedTuple):
    """The matrices as ``prepare_kernel`` leaves them: packed [4·C + Z, Z], closing [2, Z, C], offsets."""

    packed: Tensor
    closing: Tensor
    offsets: Tensor

    def of_output(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """output_gate's matrix, output's, and their offsets."""
        _, c_z, c = self.closing.shape
        return self.packed[4 * c :], self.closing, self.offsets[4 * c :], self.offsets[4 * c + c_z :]


class Parts(NamedTuple):
    """What the gradients of matrices are made of: H [parts, rows, width] and S [parts, rows], float32, flat.

    Rows and width: 4·C and Z of projection and gate, Z and Z of output_gate, Z and C of output.
    """

    products: Tensor
    sums: Tensor
    gate_products: Tensor
    gate_sums: Tensor
    out_products: Tensor
    out_sums: Tensor


class WeightGradients(NamedTuple):
    """Of projection, gate and output_gate, stacked; of their norm [2, Z]; of output; of its norm [2, C]."""

    matrices_in: Tensor
    norm_in: Tensor
    output: Tensor
    norm_out: Tensor


@dataclass(frozen=True)
class Call:
    """What all kernels of one call share: sizes as the kernels name them, the dtype, the tiles.

    It keeps its launches, each made when it is first needed.
    """

    b: int
    n: int
    z: int
    c: int
    dtype: torch.dtype
    device: torch.device
    tf32: bool
    dropped: int
    residual: bool

    @cached_property
    def padded(self) -> int:
        """NP."""
        return blocks(self.n, PAD) * PAD

    @cached_property
    def positions(self) -> int:
        """R."""
        return self.b * self.padded * self.padded

    @cached_property
    def hidden(self) -> tuple[int, int, int]:
        """Shape of a, b and x."""
        return self.c * self.b, self.padded, self.padded

    @cached_property
    def shape(self) -> tuple[int, int, int, int]:
        """Of z and the output."""
        return self.b, self.n, self.n, self.z

    @cached_property
    def tiles(self) -> Tiles:
        """Of this architecture, dtype and width."""
        return tiles(architecture(self.device), self.dtype, max(self.z, self.c))

    @cached_property
    def parts(self) -> tuple[int, int]:
        """Of the gradients of projection and gate, and of output_gate and output; each fill the GPU once."""
        of_input, of_output = self.tiles.weight_gradient, self.tiles.output_weight_gradient
        slices = 2 * self.c // self._weight_block
        return self._parts(of_input, slices), self._parts(of_output, self.z // self._output_weight_block)

    @cached_property
    def part_sizes(self) -> list[int]:
        """Numbers of :class:`Parts`; each a multiple of 4, so that all begin at 16 bytes."""
        (parts, out_parts), z, c = self.parts, self.z, self.c
        of_input, of_output = 4 * c * parts, z * out_parts
        return [of_input * z, of_input, of_output * z, of_output, of_output * c, of_output]

    @property
    def _weight_block(self) -> int:
        return min(self.tiles.weight_gradient.channels, 2 * self.c)

    @property
    def _output_weight_block(self) -> int:
        return min(self.tiles.output_weight_gradient.channels, self.z)

    @property
    def _multiprocessors(self) -> int:
        if self.device.type == "cuda":
            return torch.cuda.get_device_properties(self.device).multi_processor_count
        return _FEW

    def _resident(self, tile: Tile) -> int:
        """Programs that run at a time."""
        return self._multiprocessors * tile.resident

    def _parts(self, tile: Tile, slices: int) -> int:
        return max(1, min(blocks(self.positions, tile.rows), self._resident(tile) // slices))

    def _launch(self, function: Any, tile: Tile, constants: dict[str, Any], *, eps: bool = False) -> Launch:
        """A launch with one program for each block of positions."""
        numbers = (*self._numbers, EPS) if eps else self._numbers
        programs = blocks(self.positions, tile.rows)
        return _launch(function, programs, numbers, constants | self._fixed(tile), tile)

    def _counting(
        self, function: Any, tile: Tile, constants: dict[str, Any], *numbers: float, held: bool
    ) -> Launch:
        """A launch that is told how many blocks there are.

        ``held``: with as many programs as are resident, which go through them all; else with one for each.
        """
        every = blocks(self.positions, tile.rows)
        programs = min(every, self._resident(tile)) if held else every
        return _launch(function, programs, (*self._numbers, every, *numbers), constants, tile)

    @property
    def _numbers(self) -> tuple[int, int, int]:
        """N, NP, Q."""
        return self.n, self.padded, self.positions // PAD**2

    def _fixed(self, tile: Tile) -> dict[str, Any]:
        """The constants that end every kernel's list."""
        return {"EVEN": self._even(tile), "PRECISION": "tf32" if self.tf32 else "ieee"}

    def _even(self, tile: Tile) -> bool:
        """Whether there is no padding, neither between the kernels nor after the last block's positions."""
        return self.n == self.padded and self.positions % tile.rows == 0

    @property
    def _dealt(self) -> bool:
        """Whether all columns can be dealt, and offsets of 32 bits reach over 32 of dab's channels."""
        whole = self.z % _DEALT == 0 and self.c % _DEALT == 0
        return self.dtype.itemsize == 2 and whole and self.positions <= _FAR

    def _whole(self, tile: Tile) -> bool:
        """Whether no block has positions of two lines."""
        return self.n == self.padded and self.n % tile.rows == 0

    @cached_property
    def prepare(self) -> Launch:
        """``prepare_kernel``."""
        runs = (4 * self.c + 2 * self.z) // _RUN
        return Launch(prepare_kernel, runs, (), {"Z": self.z, "C": self.c}, {})

    @cached_property
    def project(self) -> Launch:
        """``project_kernel``."""
        tile, c2 = self.tiles.project, 2 * self.c
        block = c2 // 4 if tile.held else min(tile.channels, c2)
        constants = {"Z": self.z, "C2": c2, "ROWS": tile.rows, "BLOCK": block, "HELD": tile.held}
        return self._counting(project_kernel, tile, constants | self._fixed(tile), EPS, held=tile.held)

    def _output(self, keep: bool) -> Launch:
        tile = self.tiles.output
        constants = {"Z": self.z, "C": self.c, "ROWS": tile.rows, "BLOCK": min(tile.channels, self.z)}
        constants |= {"KEEP": keep, "DROPPED": self.dropped, "RESIDUAL": self.residual}
        constants |= {"WHOLE": self._whole(tile), "FETCH": tile.fetch}
        return self._launch(output_kernel, tile, constants, eps=True)

    @cached_property
    def output(self) -> Launch:
        """``output_kernel``."""
        return self._output(False)

    @cached_property
    def output_and_keep(self) -> Launch:
        """``output_kernel`` that leaves x standardised."""
        return self._output(True)

    @cached_property
    def output_gradient(self) -> Launch:
        """``output_gradient_kernel``."""
        tile = self.tiles.output_gradient
        # Dropout along the other axis was slower so.
        held = tile.held and self.z == 4 * tile.channels and self.dropped != 2
        if held:
            tile = replace(tile, registers=None)
        if held and self.dropped:
            # Its factors leave shared memory for one program, which may be twice as large.
            tile = replace(tile, rows=2 * tile.rows, warps=2 * tile.warps, resident=1)
        constants = {"Z": self.z, "C": self.c, "ROWS": tile.rows, "BLOCK": min(tile.channels, self.z)}
        constants |= {"DROPPED": self.dropped, "WHOLE": self._whole(tile), "HELD": held, "FETCH": tile.fetch}
        return self._counting(output_gradient_kernel, tile, constants | self._fixed(tile), held=held)

    @cached_property
    def input_gradient(self) -> Launch:
        """``input_gradient_kernel`` or ``held_input_gradient_kernel``."""
        tile, c2 = self.tiles.input_gradient, 2 * self.c
        if tile.held and self._dealt:
            constants = {"Z": self.z, "C2": c2, "ROWS": tile.rows, "RESIDUAL": self.residual}
            constants["EVEN"] = self._even(tile)
            return self._counting(held_input_gradient_kernel, tile, constants, held=True)
        constants = {"Z": self.z, "C2": c2, "ROWS": tile.rows, "BLOCK": min(tile.channels, c2)}
        constants |= {"GATE_BLOCK": min(tile.channels, self.z), "RESIDUAL": self.residual}
        constants["FETCH"] = tile.fetch
        return self._launch(input_gradient_kernel, tile, constants)

    @cached_property
    def weight_gradient(self) -> Launch:
        """``weight_gradient_kernel``."""
        tile, block, parts = self.tiles.weight_gradient, self._weight_block, self.parts[0]
        numbers = (self._numbers[2], blocks(self.positions, tile.rows), parts)
        constants = {"Z": self.z, "C2": 2 * self.c, "ROWS": tile.rows, "BLOCK": block} | self._fixed(tile)
        programs = 2 * self.c // block * parts
        return _launch(weight_gradient_kernel, programs, numbers, constants, tile)

    def _output_weight_gradient(self, width: int) -> Launch:
        tile, block, parts = self.tiles.output_weight_gradient, self._output_weight_block, self.parts[1]
        numbers = (self._numbers[2], blocks(self.positions, tile.rows), parts)
        constants = {"Z": self.z, "WIDTH": width, "ROWS": tile.rows, "BLOCK": block} | self._fixed(tile)
        programs = self.z // block * parts
        return _launch(output_weight_gradient_kernel, programs, numbers, constants, tile)

    @cached_property
    def output_gate_gradient(self) -> Launch:
        """``output_weight_gradient_kernel`` of output_gate."""
        return self._output_weight_gradient(self.z)

    @cached_property
    def closing_gradient(self) -> Launch:
        """``output_weight_gradient_kernel`` of output."""
        return self._output_weight_gradient(self.c)

    @cached_property
    def finish(self) -> Launch:
        """``finish_kernel``."""
        constants = {"Z": self.z, "C": self.c, **FINISHED}
        programs = (4 * self.c + 2 * self.z) // FINISHED["ROWS"]
        return Launch(finish_kernel, programs, self.parts, constants, {"num_warps": 1})

    @cached_property
    def sum_shares(self) -> Launch:
        """``sum_shares_kernel``."""
        constants = {"Z": self.z, "C": self.c, "ROWS": FINISHED["ROWS"], **_SUMMED}
        programs = 2 * (self.z + self.c) // _SUMMED["COLUMNS"]
        return Launch(sum_shares_kernel, programs, (), constants, {})


def _launch(
    function: Any, programs: int, numbers: Sequence[int | float], constants: dict[str, Any], tile: Tile
) -> Launch:
    """With the constants of lengths that tiles cover evenly, and of those they do not."""
    flags = [{"EVEN": True, "WHOLE": True}, {"EVEN": True, "WHOLE": False}, {"EVEN": False, "WHOLE": False}]
    others: list[dict[str, Any]] = []
    for each in flags:
        other = constants | {name: flag for name, flag in each.items() if name in constants}
        if other not in (constants, *others):
            others.append(other)
    return Launch(function, programs, numbers, constants, tile.options(), others)


_call = cache(Call)


def call_for(b: int, n: int, output: Tensor, dtype: torch.dtype, ending: Ending) -> Call:
    """Of B sequences of N tokens; ``output`` [Z, C]: a weight, for its shape and device."""
    tf32 = dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32
    return _call(b, n, *output.shape, dtype, output.device, tf32, ending.dropped, ending.residual)


def prepare(call: Call, w: TriangleMultiplicationWeights) -> Prepared:
    """The matrices as the kernels read them."""
    packed = torch.empty((4 * call.c + call.z, call.z), dtype=call.dtype, device=call.device)
    closing = torch.empty((2, call.z, call.c), dtype=call.dtype, device=call.device)
    offsets = torch.empty(4 * call.c + 2 * call.z, dtype=torch.float32, device=call.device)
    call.prepare(
        w.projection, w.gate, w.output_gate, w.output, w.norm_in_weight, w.norm_in_bias, w.norm_out_weight,
        w.norm_out_bias, packed, closing, offsets,
    )  # fmt: skip
    return Prepared(packed, closing, offsets)


def project(call: Call, z: Tensor, mask: Tensor, prepared: Prepared) -> tuple[Tensor, Tensor, Tensor]:
    """z standardised [R, Z]; a and b [2, C·B, NP, NP]; factors [3, R], those of x not yet."""
    factors = torch.empty((3, call.positions), dtype=torch.float32, device=call.device)
    standard = torch.empty((call.positions, call.z), dtype=call.dtype, device=call.device)
    ab = torch.empty((2, *call.hidden), dtype=call.dtype, device=call.device)
    call.project(z, mask, prepared.packed, prepared.offsets, ab, standard, factors)
    return standard, ab, factors


def contract(ab: Tensor, outgoing: bool) -> Tensor:
    """x [C·B, NP, NP] of a and b."""
    a, b = ab.unbind()
    x = torch.empty_like(a)
    # Given ``out``, autocast leaves a product alone.
    if outgoing:
        torch.bmm(a, b.mT, out=x)
    else:
        torch.bmm(a.mT, b, out=x)
    return x


def contract_gradient(dx: Tensor, ab: Tensor, outgoing: bool) -> Tensor:
    """The gradient of a and b."""
    a, b = ab.unbind()
    dab = torch.empty_like(ab)
    da, db = dab.unbind()
    if outgoing:
        torch.bmm(dx, b, out=da)
        torch.bmm(dx.mT, a, out=db)
    else:
        torch.bmm(b, dx.mT, out=da)
        torch.bmm(a, dx, out=db)
    return dab


def close(
    call: Call, z: Tensor, keep: Tensor | None, standard: Tensor, x: Tensor, prepared: Prepared,
    factors: Tensor, *, backward: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The output [B, N, N, Z] and, for the ``backward``, x standardised [R, C], whose factors are filled."""
    out = torch.empty(call.shape, dtype=call.dtype, device=call.device)
    summed = torch.empty((call.positions if backward else 0, call.c), dtype=call.dtype, device=call.device)
    launch = call.output_and_keep if backward else call.output
    launch(standard, x, *prepared.of_output(), z, z if keep is None else keep, out, summed, factors)
    return out, summed


def output_gradient(
    call: Call, grad: Tensor, keep: Tensor | None, standard: Tensor, summed: Tensor, prepared: Prepared,
    factors: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """dx; the gradients [2, R, Z] of the gate's product and output's."""
    dx = torch.empty(call.hidden, dtype=call.dtype, device=call.device)
    dproducts = torch.empty((2, call.positions, call.z), dtype=call.dtype, device=call.device)
    kept = grad if keep is None else keep
    call.output_gradient(
        standard, summed, grad, kept, *prepared.of_output(), factors, dx, *dproducts.unbind()
    )
    return dx, dproducts


def input_gradient(
    call: Call, grad: Tensor, standard: Tensor, dab: Tensor, dproducts: Tensor, prepared: Prepared,
    factors: Tensor, dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    """dz [B, N, N, Z] in ``dtype``."""
    dz = torch.empty(call.shape, dtype=dtype, device=call.device)
    call.input_gradient(standard, dab, dproducts[0], prepared.packed, prepared.offsets, factors, grad, dz)
    return dz


def weight_gradient(
    call: Call, standard: Tensor, summed: Tensor, dab: Tensor, dproducts: Tensor, prepared: Prepared,
    factors: Tensor,
) -> Parts:  # fmt: skip
    """The parts of the gradients of all matrices."""

    sizes = call.part_sizes
    parts = Parts(*torch.empty(sum(sizes), dtype=torch.float32, device=call.device).split(sizes))
    matrices = prepared.packed, prepared.offsets
    call.weight_gradient(standard, dab, *matrices, factors, parts.products, parts.sums)
    call.output_gate_gradient(standard, dproducts[0], parts.gate_products, parts.gate_sums)
    call.closing_gradient(summed, dproducts[1], parts.out_products, parts.out_sums)
    return parts


def finish(call: Call, parts: Parts, w: TriangleMultiplicationWeights) -> WeightGradients:
    """The gradients of the matrices in their dtype, which is one, those of the norms in float32."""

    def room(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=call.device)

    rows, z, c = 4 * call.c + call.z, call.z, call.c
    made = WeightGradients(
        room(rows, z, dtype=w.projection.dtype),
        room(2, z),
        room(z, c, dtype=w.output.dtype),
        room(2, c),
    )
    shares = [rows // FINISHED["ROWS"] * 2 * z, z // FINISHED["ROWS"] * 2 * c]
    in_shares, out_shares = room(sum(shares)).split(shares)
    call.finish(
        *parts, w.projection, w.gate, w.output_gate, w.output, w.norm_in_weight, w.norm_in_bias,
        w.norm_out_weight, w.norm_out_bias, made.matrices_in, made.output, in_shares, out_shares,
    )  # fmt: skip
    call.sum_shares(in_shares, out_shares, made.norm_in, made.norm_out)
    return made
