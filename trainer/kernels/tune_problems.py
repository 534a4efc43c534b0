"""What ``megafold tune`` measures: each family's kernels, their inputs, and the tiles to try.

The shapes are a model's: pair matrices with one row for each token and 128 or 64 channels, H = 4 heads, 5 %
of the keys masked; 48 noised copies of the tokens for adaptive layer norm.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor

from megafold.trainer.errors import ConfigError
from megafold.trainer.kernels.adaln import operator as adaln
from megafold.trainer.kernels.adaln import tiles as adaln_tiles
from megafold.trainer.kernels.evoattention import launches as attention
from megafold.trainer.kernels.evoattention import tiles as attention_tiles
from megafold.trainer.kernels.gated_output import launches as output
from megafold.trainer.kernels.gated_output import tiles as output_tiles
from megafold.trainer.kernels.layernorm import operator as layernorm
from megafold.trainer.kernels.layernorm import tiles as layernorm_tiles
from megafold.trainer.kernels.layernorm_linear import launches as linear
from megafold.trainer.kernels.layernorm_linear import tiles as linear_tiles
from megafold.trainer.kernels.tables import Family
from megafold.trainer.kernels.transition import fused
from megafold.trainer.kernels.transition import tiles as transition_tiles
from megafold.trainer.kernels.triangle_attention import launches as triangle
from megafold.trainer.kernels.triangle_attention import tiles as triangle_tiles
from megafold.trainer.kernels.triangle_multiplication import launches as multiplication
from megafold.trainer.kernels.triangle_multiplication import tiles as multiplication_tiles
from megafold.trainer.ops.triangle import TriangleMultiplicationWeights

HEADS: Final = 4
#: Noised copies of a sample that the diffusion transformer takes at once.
COPIES: Final = 48
EXPANSION: Final = 4
#: Outputs of the linear layer: of triangle attention's q, k, v, gate and bias together, and of a pair bias.
OUTPUTS: Final = 516
FEW_OUTPUTS: Final = 16
#: Caps of a thread's registers that let two to four programs of 4 warps share a multiprocessor.
_REGISTERS: Final = (None, 168, 152, 128)

Run = Callable[[], object]


@dataclass(frozen=True)
class Problem:
    """One family on inputs of a size.

    Attributes:
        family: whose tiles are sought.
        dtype: of the inputs.
        channels: as the tables count them.
        length: N.
        runs: by role, makes what launches the role's kernel, with the tiles of that moment.
        candidates: by role, the tiles to try.
    """

    family: Family[Any]
    dtype: torch.dtype
    channels: int
    length: int
    runs: Mapping[str, Callable[[], Run]]
    candidates: Mapping[str, Sequence[Any]]


def gpu() -> torch.device:
    """The GPU at hand.

    Raises:
        ConfigError: there is none.
    """
    if not torch.cuda.is_available():
        raise ConfigError(
            "no GPU here: tiles are found by measuring, so run `megafold tune` where there is one"
        )
    return torch.device("cuda", torch.cuda.current_device())


def _caps() -> Sequence[int | None]:
    """Caps of registers, which AMD's compiler does not know."""
    return (None,) if torch.version.hip else _REGISTERS


def _warps() -> Sequence[int]:
    """Warps to try: AMD's have twice the threads, so two of them do what four do elsewhere."""
    return (2, 4, 8) if torch.version.hip else (4, 8)


def _with_instructions(tiles: Iterable[Any]) -> list[Any]:
    """Each tile, on AMD GPUs with either size of the matrix instructions."""
    sizes = (None, 16) if torch.version.hip else (None,)
    return [replace(tile, instruction=size) for tile in tiles for size in sizes]


def _fetches() -> bool:
    """Whether the GPU has an instruction that fetches into the cache."""
    return not torch.version.hip


def _normal(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, device=gpu()).to(dtype)


def _norm(channels: int) -> tuple[Tensor, Tensor]:
    return torch.ones(channels, device=gpu()), torch.zeros(channels, device=gpu())


def _multiprocessors() -> int:
    return torch.cuda.get_device_properties(gpu()).multi_processor_count


def _attention_candidates(rows: Iterable[int], registers: Iterable[int | None]) -> list[attention_tiles.Tile]:
    shapes = product((32, 64, 128), (32, 64, 128), rows, _warps(), (1, 2, 3), registers)
    return _with_instructions(
        attention_tiles.Tile(*shape) for shape in shapes if shape[0] * shape[1] <= 64 * 128
    )


def attention_problem(dtype: torch.dtype, channels: int, length: int) -> Problem:
    """The attention itself; ``channels`` of a head."""
    q, k, v, grad = (_normal(1, length, HEADS, length, channels, dtype=dtype) for _ in range(4))
    bias = _normal(1, HEADS, length, length)
    mask = torch.rand(1, length, length, device=gpu()) > 0.05
    wanted = attention.Wanted(plain=True, transposed=True, zeros=True)
    ready = attention.prepare(bias, mask, q, wanted, (length, length))
    out, lse = attention.attend(q, k, v, ready.plain, ready.masked)
    saved = attention.Saved(q, k, v, ready.masked, out, lse)
    dq, dk, dv = (torch.empty_like(q) for _ in range(3))
    none = ready.dbias.new_empty(0)
    delta, _ = attention.query_gradient(grad, saved, ready.plain, dq, none, needs_bias=False)
    runs: dict[str, Run] = {
        "forward": lambda: attention.attend(q, k, v, ready.plain, ready.masked),
        "query": lambda: attention.query_gradient(grad, saved, ready.plain, dq, none, needs_bias=False),
        "query_bias": lambda: attention.query_gradient(
            grad, saved, ready.plain, dq, ready.dbias, needs_bias=True
        ),
        "key": lambda: attention.key_gradient(grad, saved, ready.transposed, delta, dk, dv),
        "bias": lambda: attention.bias_gradient(grad, saved, ready.plain, delta),
    }
    return Problem(
        attention_tiles.FAMILY, dtype, attention.padded_channels(channels), length, _as_they_are(runs),
        {
            "forward": _attention_candidates((1, 2), (None,)),
            "query": _attention_candidates((1,), (None,)),
            "query_bias": _attention_candidates((1, 2), _caps()),
            "key": _attention_candidates((1,), _caps()),
            "bias": _attention_candidates((1,), (None,)),
        },
    )  # fmt: skip


def _as_they_are(runs: Mapping[str, Run]) -> dict[str, Callable[[], Run]]:
    """For launches that look their tiles up themselves."""
    return {role: partial(_same, run) for role, run in runs.items()}


def _same(run: Run) -> Run:
    return run


def _position_candidates(
    columns: Iterable[int], programs: Iterable[int], *, fetch: bool = False
) -> list[output_tiles.Tile]:
    shapes = product((16, 32, 64, 128), columns, _warps(), (1, 2, 3), programs)
    return _with_instructions(output_tiles.Tile(*shape, fetch) for shape in shapes)


def projection_problem(dtype: torch.dtype, channels: int, length: int) -> Problem:
    """Triangle attention's projections; ``channels`` of z, and of all heads together."""
    sizes = triangle.Sizes(channels, HEADS, channels // HEADS)
    z = _normal(1, length, length, channels, dtype=dtype)
    norm = triangle.Norm(*_norm(channels))
    weight = _normal(4 * sizes.hd + sizes.hp, channels, dtype=dtype)
    projected, prepared = triangle.project(z, norm, weight, sizes)
    dbias = torch.zeros(prepared.shape, dtype=torch.float32, device=z.device)
    dz = torch.empty_like(z)
    many = _multiprocessors()
    runs: dict[str, Run] = {
        "project": lambda: triangle.project(z, norm, weight, sizes),
        "input_gradient": lambda: triangle.input_gradient(projected, dbias, z, z, norm, weight, sizes, dz),
        "weight_gradient": lambda: triangle.weight_gradient(projected, z, norm, sizes),
    }
    return Problem(
        triangle_tiles.FAMILY, dtype, channels, length, _as_they_are(runs),
        {
            "project": _position_candidates((32, 64, 128), (1,)),
            "input_gradient": _position_candidates((32, 64, 128), (2 * many, 4 * many)),
            "weight_gradient": _position_candidates((64, 128), (many // 2, many)),
        },
    )  # fmt: skip


def output_problem(dtype: torch.dtype, channels: int, length: int) -> Problem:
    """The gated output; ``channels`` of the heads together, and of the result."""
    x, gate = (_normal(1, length, HEADS, length, channels // HEADS, dtype=dtype) for _ in range(2))
    residual = _normal(1, length, length, channels, dtype=dtype)
    keep = torch.ones(1, 1, length, channels, device=x.device, dtype=dtype)
    weight = _normal(channels, channels, dtype=dtype)
    layout, out = output.Layout(x, gate), torch.empty_like(residual)
    dx, dgate = torch.empty_like(x), torch.empty_like(gate)
    many = _multiprocessors()
    runs: dict[str, Run] = {
        "forward": lambda: output.gate_and_project(layout, weight, residual, keep, out),
        "backward": lambda: output.gated_gradients(residual, layout, weight, keep, dx, dgate),
    }
    return Problem(
        output_tiles.FAMILY, dtype, channels, length, _as_they_are(runs),
        {
            "forward": _position_candidates((channels,), (1,)),
            "backward": _position_candidates((32, 64, channels), (many, 2 * many), fetch=_fetches()),
        },
    )  # fmt: skip


def _transition_candidates(
    hidden: Iterable[int], registers: Iterable[int | None], held: Iterable[bool], resident: Iterable[int]
) -> list[transition_tiles.Tile]:
    shapes = product((64, 128), hidden, _warps(), (1, 2, 3, 4), held, registers, resident)
    return _with_instructions(transition_tiles.Tile(*shape) for shape in shapes)


def transition_problem(dtype: torch.dtype, channels: int, length: int) -> Problem:
    """Of pairs, expansion 4. The kernels of the backward are timed together: one feeds the other."""
    hidden = EXPANSION * channels
    x, grad = (_normal(1, length, length, channels, dtype=dtype) for _ in range(2))
    parameters = fused.Parameters(
        *_norm(channels), _normal(2 * hidden, channels, dtype=dtype), _normal(channels, hidden, dtype=dtype)
    )

    def backward() -> object:
        return fused.backward(grad, x, parameters, [True] * 5)

    held = (False,) if torch.version.hip else (True, False)
    return Problem(
        transition_tiles.FAMILY, dtype, channels, length,
        _as_they_are({
            "forward": lambda: fused.forward(x, parameters, dtype), "input": backward, "weights": backward
        }),
        {
            "forward": _transition_candidates((32, 64), _caps(), held, (2,)),
            "input": _transition_candidates((32, 64), _caps(), held, (1, 2, 3)),
            "weights": _transition_candidates((64, 128), (None,), (False,), (2,)),
        },
    )  # fmt: skip


def _multiplication_candidates(
    resident: Iterable[int], columns: Iterable[int] = (32, 64, 128), *, fetch: bool = False
) -> list[multiplication_tiles.Tile]:
    shapes = product((32, 64, 128), columns, _warps(), (1, 2, 3, 4), resident, _caps())
    return _with_instructions(multiplication_tiles.Tile(*shape, fetch=fetch) for shape in shapes)


def multiplication_problem(dtype: torch.dtype, channels: int, length: int) -> Problem:
    """Triangle multiplication with ``channels`` of z and of a and b, dropout and residual included."""
    device = gpu()

    def matrix(rows: int) -> Tensor:
        return _normal(rows, channels, dtype=dtype)

    weights = TriangleMultiplicationWeights(
        *_norm(channels), matrix(2 * channels), matrix(2 * channels), *_norm(channels), matrix(channels),
        matrix(channels),
    )  # fmt: skip
    z, grad = (_normal(1, length, length, channels, dtype=dtype) for _ in range(2))
    mask = torch.ones(1, length, length, dtype=torch.bool, device=device)
    keep = torch.ones(1, 1, length, channels, dtype=dtype, device=device)
    ending = multiplication.Ending(keep, True)

    def call() -> multiplication.Call:
        # Not a remembered one, which has the tiles of another moment.
        shape = (1, length, channels, channels)
        return multiplication.Call(*shape, dtype, device, False, ending.dropped, ending.residual)

    prepared = multiplication.prepare(call(), weights)
    standard, ab, factors = multiplication.project(call(), z, mask, prepared)
    x = multiplication.contract(ab, True)
    closing = (z, keep, standard, x, prepared, factors)
    _, summed = multiplication.close(call(), *closing, backward=True)
    opening = (grad, keep, standard, summed, prepared, factors)
    dx, dproducts = multiplication.output_gradient(call(), *opening)
    dab = multiplication.contract_gradient(dx, ab, True)

    held = [multiplication_tiles.Tile(rows, 32, 8, 1, held=True) for rows in (64, 128)]
    held_input = held[1:]
    held_output = [multiplication_tiles.Tile(64, channels // 4, 4, 2, resident=2, held=True, fetch=True)]
    if dtype.itemsize != 2:
        held_input = held_output = []
    if torch.version.hip:
        # Only those of float32 compile, with the matrices in registers, of which there are too few.
        held = held_input = held_output = []

    def weight_gradient() -> Run:
        return partial(
            multiplication.weight_gradient, call(), standard, summed, dab, dproducts, prepared, factors
        )

    return Problem(
        multiplication_tiles.FAMILY, dtype, channels, length,
        {
            "project": lambda: partial(multiplication.project, call(), z, mask, prepared),
            "output": lambda: partial(multiplication.close, call(), *closing, backward=True),
            "output_gradient": lambda: partial(multiplication.output_gradient, call(), *opening),
            "input_gradient": lambda: partial(
                multiplication.input_gradient, call(), grad, standard, dab, dproducts, prepared, factors,
                dtype,
            ),
            "weight_gradient": weight_gradient,
            "output_weight_gradient": weight_gradient,
        },
        {
            "project": [*_multiplication_candidates((1,)), *held],
            "output": _multiplication_candidates((1,), fetch=_fetches()),
            "output_gradient": [*_multiplication_candidates((1,), fetch=_fetches()), *held_output],
            "input_gradient": [*_multiplication_candidates((1,), fetch=_fetches()), *held_input],
            "weight_gradient": _multiplication_candidates((2, 3, 4), (32, 64)),
            "output_weight_gradient": _multiplication_candidates((1, 2, 3), (32, 64)),
        },
    )  # fmt: skip


def layernorm_problem(dtype: torch.dtype, channels: int, length: int) -> Problem:
    """Of the pair matrix up to 128 channels, of 48 copies of the tokens beyond."""
    x, grad = (_normal(*_rows(channels, length), channels, dtype=dtype) for _ in range(2))
    weight, bias = _norm(channels)
    shapes = list(product((1, 2, 4, 8, 16, 32, 64), (1, 2, 4, 8)))
    return Problem(
        layernorm_tiles.FAMILY, dtype, layernorm_tiles.padded(channels), length,
        _as_they_are({
            "forward": lambda: layernorm.normalise(x, weight, bias, dtype),
            "backward": lambda: layernorm.normalise_backward(grad, x, weight, True, True),
        }),
        {
            "forward": [layernorm_tiles.Tile(*s) for s in _held_by_warps(shapes, channels)],
            "backward": [layernorm_tiles.Tile(*s, programs) for s in _held_by_warps(shapes, channels)
                         for programs in (4, 8, 12, 16)],
        },
    )  # fmt: skip


def _rows(channels: int, length: int) -> tuple[int, int, int]:
    return (1, length, length) if channels <= 128 else (1, COPIES, length)


def _held_by_warps(shapes: Iterable[tuple[int, int]], channels: int) -> list[tuple[int, int]]:
    """Rows and warps of tiles whose warps have between 8 and 128 numbers in a thread."""
    return [(rows, warps) for rows, warps in shapes if 8 <= rows * channels / (32 * warps) <= 128]


def linear_problem(
    outputs: int, family: Family[Any], dtype: torch.dtype, channels: int, length: int
) -> Problem:
    """The linear layer of the pair matrix's normalised rows; ``channels`` of these."""
    x = _normal(1, length, length, channels, dtype=dtype)
    grad = _normal(1, length, length, outputs, dtype=dtype)
    norm_weight, norm_bias = _norm(channels)
    parameters = linear.Parameters(norm_weight, norm_bias, _normal(outputs, channels, dtype=dtype), None)
    of_input, of_weight = [True, True, True, False, False], [False, False, False, True, False]
    blocks = (16,) if outputs <= linear_tiles.NARROW else (32, 64, 128, 256)
    shapes = list(product((32, 64, 128), blocks, (1, 2, 4, 8), (1, 2, 3, 4)))
    return Problem(
        family, dtype, channels, length,
        _as_they_are({
            "forward": lambda: linear.forward(x, parameters, dtype),
            "input": lambda: linear.backward(grad, x, parameters, of_input),
            "weight": lambda: linear.backward(grad, x, parameters, of_weight),
        }),
        {
            "forward": _with_instructions(linear_tiles.Tile(*shape) for shape in shapes),
            "input": _with_instructions(linear_tiles.Tile(*shape) for shape in shapes),
            "weight": _with_instructions(
                linear_tiles.Tile(*shape, programs) for shape in shapes for programs in (1, 2, 4)
            ),
        },
    )  # fmt: skip


def adaln_problem(dtype: torch.dtype, channels: int, length: int) -> Problem:
    """Of 48 copies of the tokens, each with its own conditioning, after its products."""
    a, scale, shift, grad = (_normal(COPIES * length, channels, dtype=dtype) for _ in range(4))
    bias = _normal(channels, dtype=dtype)
    sharing = adaln.Sharing(1, 1, COPIES * length)
    shapes = [adaln_tiles.Tile(*s)
              for s in _held_by_warps(product((1, 2, 4, 8, 16, 32), (1, 2, 4, 8)), channels)]  # fmt: skip
    return Problem(
        adaln_tiles.FAMILY, dtype, layernorm_tiles.padded(channels), length,
        _as_they_are({
            "forward": lambda: adaln.modulate(a, scale, shift, bias, sharing, dtype),
            "backward": lambda: adaln.modulate_backward(
                grad, a, scale, bias, sharing, want_input=True, want_conditioning=True
            ),
        }),
        {"forward": shapes, "backward": shapes},
    )  # fmt: skip


#: By family's name: how its problem is made, and the channels that a table should have.
PROBLEMS: Final[Mapping[str, tuple[Callable[[torch.dtype, int, int], Problem], tuple[int, ...]]]] = {
    attention_tiles.FAMILY.name: (attention_problem, (16, 32, 64)),
    triangle_tiles.FAMILY.name: (projection_problem, (64, 128)),
    output_tiles.FAMILY.name: (output_problem, (64, 128)),
    transition_tiles.FAMILY.name: (transition_problem, (64, 128)),
    multiplication_tiles.FAMILY.name: (multiplication_problem, (64, 128)),
    linear_tiles.FAMILY.name: (partial(linear_problem, OUTPUTS, linear_tiles.FAMILY), (64, 128)),
    linear_tiles.FAMILY_NARROW.name: (
        partial(linear_problem, FEW_OUTPUTS, linear_tiles.FAMILY_NARROW), (64, 128)
    ),
    layernorm_tiles.FAMILY.name: (layernorm_problem, (64, 128, 256, 384, 768)),
    adaln_tiles.FAMILY.name: (adaln_problem, (128, 384, 768)),
}  # fmt: skip
#: Families whose tiles depend on the length.
BY_LENGTH: Final = frozenset({attention_tiles.FAMILY.name})


def forget() -> None:
    """Choose the tiles of all later launches anew."""
    for family in (attention, triangle, output):
        family.forget_plans()
