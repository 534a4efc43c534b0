"""Finding tiles by measuring: every candidate of every kernel, on the GPU at hand.

A kernel is timed alone, as a step of a training run calls it, with triangle attention's shapes: H = 4 heads,
one row for each token, 5 % of the keys masked. What does not compile, fit or launch is passed over.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, Final

import torch
import triton
from torch import Tensor

from megafold.trainer.errors import ConfigError
from megafold.trainer.kernels.evoattention import launches as attention
from megafold.trainer.kernels.evoattention.tiles import FAMILY as ATTENTION
from megafold.trainer.kernels.evoattention.tiles import Tile as AttentionTile
from megafold.trainer.kernels.evoattention.tiles import architecture
from megafold.trainer.kernels.evoattention.tiles import tiles as attention_tiles
from megafold.trainer.kernels.gated_output import launches as output
from megafold.trainer.kernels.gated_output.tiles import Tile as RowTile
from megafold.trainer.kernels.gated_output.tiles import tile_of, tiles_of
from megafold.trainer.kernels.tables import Entry, Table, fields, table, use_table
from megafold.trainer.kernels.triangle_attention import launches as triangle

HEADS: Final = 4
DTYPES: Final = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
#: Caps of a thread's registers that let two to four programs of 4 warps share a multiprocessor.
_REGISTERS: Final = (None, 168, 152, 128)
#: A tile that needs more than this of the fastest so far is not measured any longer.
_HOPELESS: Final = 3.0

Run = Callable[[], object]
Report = Callable[[str], None]


@dataclass(frozen=True)
class Problem:
    """One family on inputs of a size.

    Attributes:
        family: its name in the tables.
        dtype: of the inputs.
        channels: as the tables count them.
        length: N.
        runs: by role, what launches the role's kernel.
        candidates: by role, the tiles to try.
        current: by role, the tile in use.
    """

    family: str
    dtype: torch.dtype
    channels: int
    length: int
    runs: dict[str, Run]
    candidates: dict[str, Sequence[Any]]
    current: dict[str, Any]


def _device() -> torch.device:
    if not torch.cuda.is_available():
        raise ConfigError(
            "no GPU here: tiles are found by measuring, so run `megafold tune` where there is one"
        )
    return torch.device("cuda", torch.cuda.current_device())


def _attention_candidates(rows: Iterable[int], registers: Iterable[int | None]) -> list[AttentionTile]:
    shapes = product((32, 64, 128), (32, 64, 128), rows, (4, 8), (1, 2, 3), registers)
    return [AttentionTile(*shape) for shape in shapes if shape[0] * shape[1] <= 64 * 128]


def attention_problem(dtype: torch.dtype, channels: int, length: int) -> Problem:
    """The attention itself; ``channels`` of a head."""
    device = _device()
    caps: Sequence[int | None] = (None,) if torch.version.hip else _REGISTERS

    def draw() -> Tensor:
        return torch.randn(1, length, HEADS, length, channels, device=device).to(dtype)

    q, k, v, grad = (draw() for _ in range(4))
    bias = torch.randn(1, HEADS, length, length, device=device)
    mask = torch.rand(1, length, length, device=device) > 0.05
    wanted = attention.Wanted(plain=True, transposed=True, zeros=True)
    ready = attention.prepare(bias, mask, q, wanted, (length, length))
    out, lse = attention.attend(q, k, v, ready.plain, ready.masked)
    saved = attention.Saved(q, k, v, ready.masked, out, lse)
    dq, dk, dv = (torch.empty_like(q) for _ in range(3))
    none = ready.dbias.new_empty(0)
    delta, _ = attention.query_gradient(grad, saved, ready.plain, dq, none, needs_bias=False)
    padded = attention.padded_channels(channels)
    now = attention_tiles(architecture(device), dtype, padded, length)
    return Problem(
        ATTENTION, dtype, padded, length,
        {
            "forward": lambda: attention.attend(q, k, v, ready.plain, ready.masked),
            "query": lambda: attention.query_gradient(
                grad, saved, ready.plain, dq, none, needs_bias=False
            ),
            "query_bias": lambda: attention.query_gradient(
                grad, saved, ready.plain, dq, ready.dbias, needs_bias=True
            ),
            "key": lambda: attention.key_gradient(grad, saved, ready.transposed, delta, dk, dv),
            "bias": lambda: attention.bias_gradient(grad, saved, ready.plain, delta),
        },
        {
            "forward": _attention_candidates((1, 2), (None,)),
            "query": _attention_candidates((1,), (None,)),
            "query_bias": _attention_candidates((1, 2), caps),
            "key": _attention_candidates((1,), caps),
            "bias": _attention_candidates((1,), (None,)),
        },
        {role: getattr(now, role) for role in ("forward", "query", "query_bias", "key", "bias")},
    )  # fmt: skip


def _row_candidates(columns: Iterable[int], programs: Iterable[int]) -> list[RowTile]:
    shapes = product((16, 32, 64, 128), columns, (4, 8), (1, 2, 3), programs)
    return [RowTile(*shape) for shape in shapes]


def projection_problem(dtype: torch.dtype, channels: int, length: int) -> Problem:
    """Triangle attention's projections; ``channels`` of z, and of all heads together."""
    device = _device()
    sizes = triangle.Sizes(channels, HEADS, channels // HEADS)
    z = torch.randn(1, length, length, channels, device=device).to(dtype)
    norm = triangle.Norm(torch.ones(channels, device=device), torch.zeros(channels, device=device))
    weight = torch.randn(4 * sizes.hd + sizes.hp, channels, device=device).to(dtype)
    projected, prepared = triangle.project(z, norm, weight, sizes)
    dbias = torch.zeros(prepared.shape, dtype=torch.float32, device=device)
    dz = torch.empty_like(z)
    many = _multiprocessors(device)
    family = triangle.FAMILY
    return Problem(
        family, dtype, channels, length,
        {
            "project": lambda: triangle.project(z, norm, weight, sizes),
            "input_gradient": lambda: triangle.input_gradient(
                projected, dbias, z, z, norm, weight, sizes, dz
            ),
            "weight_gradient": lambda: triangle.weight_gradient(projected, z, norm, sizes),
        },
        {
            "project": _row_candidates((32, 64, 128), (1,)),
            "input_gradient": _row_candidates((32, 64, 128), (2 * many, 4 * many)),
            "weight_gradient": _row_candidates((64, 128), (many // 2, many)),
        },
        _current(family, ("project", "input_gradient", "weight_gradient"), device, dtype, channels),
    )  # fmt: skip


def output_problem(dtype: torch.dtype, channels: int, length: int) -> Problem:
    """The gated output; ``channels`` of the heads together, and of the result."""
    device = _device()
    shape = (1, length, HEADS, length, channels // HEADS)
    x, gate = (torch.randn(shape, device=device).to(dtype) for _ in range(2))
    residual = torch.randn(1, length, length, channels, device=device).to(dtype)
    keep = torch.ones(1, 1, length, channels, device=device).to(dtype)
    weight = torch.randn(channels, channels, device=device).to(dtype)
    layout, out = output.Layout(x, gate), torch.empty_like(residual)
    dx, dgate = torch.empty_like(x), torch.empty_like(gate)
    many = _multiprocessors(device)
    return Problem(
        output.FAMILY, dtype, channels, length,
        {
            "forward": lambda: output.gate_and_project(layout, weight, residual, keep, out),
            "backward": lambda: output.gated_gradients(residual, layout, weight, keep, dx, dgate),
        },
        {
            "forward": _row_candidates((channels,), (1,)),
            "backward": _row_candidates((channels,), (many, 2 * many)),
        },
        _current(output.FAMILY, ("forward", "backward"), device, dtype, channels),
    )  # fmt: skip


def _current(
    family: str, roles: Sequence[str], device: torch.device, dtype: torch.dtype, channels: int
) -> dict[str, RowTile]:
    return {role: tile_of(family, role, architecture(device), dtype, channels) for role in roles}


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count


#: By family: how its problem is made, and the channels that a table should have.
PROBLEMS: Final = {
    ATTENTION: (attention_problem, (16, 32, 64)),
    triangle.FAMILY: (projection_problem, (64, 128)),
    output.FAMILY: (output_problem, (64, 128)),
}


def tune(problem: Problem, seconds: float, report: Report) -> Entry:
    """The fastest tiles of a problem's kernels.

    ``seconds``: how long to try for each kernel; candidates come in an order that spreads over their space.
    ``report`` is given a line for each kernel.
    """
    target = architecture(_device())
    chosen = dict(problem.current)
    for role, candidates in problem.candidates.items():
        first = _timed(problem, chosen, target)
        before = first(role, chosen[role])
        best, tile = before, chosen[role]
        for candidate in _within(seconds, _spread(candidates)):
            time = first(role, candidate, give_up=_HOPELESS * best)
            if time < best:
                best, tile = time, candidate
        chosen[role] = tile
        report(
            f"{problem.family} {role} {problem.channels} channels, {problem.length} long: "
            f"{before:.3f} ms, now {best:.3f} ms with {tile}"
        )
    return Entry(
        bytes=problem.dtype.itemsize,
        channels=problem.channels,
        length=1 if problem.family != ATTENTION else _bucket(problem.length),
        tiles={role: fields(tile) for role, tile in chosen.items()},
    )


def _bucket(length: int) -> int:
    """Where the bucket of a measured length begins: halfway down to the half of it."""
    return max(17, length * 3 // 4)


def _timed(problem: Problem, chosen: dict[str, Any], target: str) -> Callable[..., float]:
    def time(role: str, tile: Any, give_up: float = float("inf")) -> float:
        trial = {name: fields(each) for name, each in (chosen | {role: tile}).items()}
        entry = Entry(bytes=problem.dtype.itemsize, channels=problem.channels, length=1, tiles=trial)
        with use_table(Table(target=target, kernels={problem.family: [entry]})):
            forget()
            try:
                problem.runs[role]()
                once: float = triton.testing.do_bench(problem.runs[role], warmup=1, rep=3)
                if once > give_up:
                    return once
                median: float = triton.testing.do_bench(
                    problem.runs[role], warmup=5, rep=40, return_mode="median"
                )
                return median
            except (RuntimeError, ValueError, AssertionError, triton.TritonError):
                return float("inf")
            finally:
                forget()

    return time


def forget() -> None:
    """Choose the tiles of all later launches anew."""
    for family in (attention, triangle, output):
        family.forget_plans()
    tiles_of.cache_clear()


def _spread(candidates: Sequence[Any]) -> list[Any]:
    """The candidates in an order that visits far ones early, always the same."""
    step = next((s for s in (37, 41, 43, 47, 53) if len(candidates) % s), 1)
    return [candidates[i * step % len(candidates)] for i in range(len(candidates))]


def _within(seconds: float, candidates: Iterable[Any]) -> Iterator[Any]:
    import time

    end = time.monotonic() + seconds
    for candidate in candidates:
        if time.monotonic() > end:
            return
        yield candidate


def with_entry(old: Table, family: str, entry: Entry) -> Table:
    """``old`` with ``entry`` in the place of the one for the same bytes, channels and length."""
    key = (entry.bytes, entry.channels, entry.length)
    kept = [e for e in old.kernels.get(family, []) if (e.bytes, e.channels, e.length) != key]
    entries = sorted([*kept, entry], key=lambda e: (e.bytes, e.channels, e.length))
    return replace(old, kernels={**old.kernels, family: entries})


def measured_on() -> dict[str, str]:
    """What a table says of where it was measured."""
    return {
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def tuned_table(
    families: Sequence[str], dtypes: Sequence[str], lengths: Sequence[int], seconds: float, report: Report
) -> Table:
    """This GPU's table, with new tiles for the given families, dtypes and lengths."""
    result = table(architecture(_device()))
    for family in families:
        make, widths = PROBLEMS[family]
        for dtype, channels in product(dtypes, widths):
            for length in lengths if family == ATTENTION else lengths[-1:]:
                entry = tune(make(DTYPES[dtype], channels, length), seconds, report)
                result = with_entry(result, family, entry)
                torch.cuda.empty_cache()
    return replace(result, tuned=measured_on())
