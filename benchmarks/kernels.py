"""The hot operators on one GPU: ours, PyTorch, Inductor and, where they are installed, the field's kernels.

    python benchmarks/kernels.py --lengths 384 768 1024 --json kernels.json

Prints one line for each operator, length and rival: median milliseconds of the forward and of forward and
backward, and the memory that a step needs at its peak beyond its inputs and their gradients.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megafold.trainer import ops

DEVICE = "cuda"
GIB = 2**30
LOWEST = -1e9

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Row:
    operator: str
    length: int
    rival: str
    forward_ms: float
    both_ms: float
    peak_gib: float


@dataclass(frozen=True)
class Problem:
    """An operator's arguments; ``leaves`` are those whose gradient is wanted."""

    arguments: dict[str, Any]
    leaves: list[Tensor]


def leaf(*shape: int, dtype: torch.dtype = torch.bfloat16, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape, device=DEVICE) * scale).to(dtype).requires_grad_()


def attention_problem(length: int, heads: int = 4, channels: int = 32) -> Problem:
    """Triangle attention's core, laid out as the projections write it; 5 % of the keys masked."""
    base = [leaf(1, length, length, heads, channels) for _ in range(3)]
    bias = leaf(1, heads, length, length, dtype=torch.float32)
    arguments = dict(zip("qkv", (t.transpose(2, 3) for t in base), strict=True))
    arguments |= {
        "bias": bias,
        "mask": torch.rand(1, length, length, device=DEVICE) > 0.05,
    }
    return Problem(arguments, [*base, bias])


def transition_problem(length: int, channels: int = 128, expansion: int = 4) -> Problem:
    hidden = channels * expansion
    arguments = {
        "x": leaf(1, length, length, channels),
        "norm_weight": torch.ones(channels, device=DEVICE).requires_grad_(),
        "norm_bias": torch.zeros(channels, device=DEVICE).requires_grad_(),
        "weight_in": leaf(2 * hidden, channels, scale=channels**-0.5),
        "weight_out": leaf(channels, hidden, scale=hidden**-0.5),
    }
    return Problem(arguments, list(arguments.values()))


def layernorm_problem(length: int, channels: int = 128) -> Problem:
    arguments = {
        "x": leaf(1, length, length, channels),
        "weight": torch.ones(channels, device=DEVICE).requires_grad_(),
        "bias": torch.zeros(channels, device=DEVICE).requires_grad_(),
    }
    return Problem(arguments, list(arguments.values()))


def layernorm_linear_problem(length: int, channels: int = 128, outputs: int = 516) -> Problem:
    """As many outputs as q, k, v, gate and bias of triangle attention have together."""
    arguments = {
        "x": leaf(1, length, length, channels),
        "norm_weight": torch.ones(channels, device=DEVICE).requires_grad_(),
        "norm_bias": torch.zeros(channels, device=DEVICE).requires_grad_(),
        "weight": leaf(outputs, channels, scale=channels**-0.5),
    }
    return Problem(arguments, list(arguments.values()))


def swiglu_problem(length: int, channels: int = 768, expansion: int = 2, copies: int = 48) -> Problem:
    """The diffusion transformer's, on noised copies of the tokens."""
    hidden = channels * expansion
    arguments = {
        "x": leaf(1, copies, length, channels),
        "weight_in": leaf(2 * hidden, channels, scale=channels**-0.5),
        "weight_out": leaf(channels, hidden, scale=hidden**-0.5),
    }
    return Problem(arguments, list(arguments.values()))


def adaln_problem(length: int, channels: int = 768, c_s: int = 384, copies: int = 48) -> Problem:
    """The diffusion transformer's, on noised copies of the tokens, each with its own conditioning."""
    arguments = {
        "a": leaf(1, copies, length, channels),
        "s": leaf(1, copies, length, c_s),
        "norm_weight": torch.ones(c_s, device=DEVICE).requires_grad_(),
        "scale_weight": leaf(channels, c_s, scale=c_s**-0.5),
        "scale_bias": leaf(channels),
        "shift_weight": leaf(channels, c_s, scale=c_s**-0.5),
    }
    return Problem(arguments, list(arguments.values()))


def triangle_problem(length: int, channels: int = 128) -> Problem:
    def ones() -> Tensor:
        return torch.ones(channels, device=DEVICE).requires_grad_()

    def matrix(rows: int) -> Tensor:
        return leaf(rows, channels, scale=channels**-0.5)

    weights = ops.TriangleMultiplicationWeights(
        ones(), ones(), matrix(2 * channels), matrix(2 * channels), ones(), ones(),
        matrix(channels), matrix(channels),
    )  # fmt: skip
    z = leaf(1, length, length, channels)
    mask = torch.ones(1, length, length, dtype=torch.bool, device=DEVICE)
    return Problem({"z": z, "mask": mask, "weights": weights, "outgoing": True}, [z, *weights])


PROBLEMS: dict[str, Callable[[int], Problem]] = {
    "evoattention": attention_problem,
    "transition": transition_problem,
    "triangle_multiplication": triangle_problem,
    "layernorm": layernorm_problem,
    "layernorm_linear": layernorm_linear_problem,
    "swiglu": swiglu_problem,
    "adaln": adaln_problem,
}


def of_backend(backend: str) -> Callable[[str, Problem], Step]:
    def make(operator: str, problem: Problem) -> Step:
        def step() -> Tensor:
            with ops.use_backend(backend):
                result: Tensor = getattr(ops, operator)(**problem.arguments)
            return result

        if backend != "eager":
            with ops.use_backend(backend):
                pass
            if not ops.backend_report(backend)[operator].startswith(backend):
                raise ImportError(f"no {backend} implementation")
        return step

    return make


def sdpa(operator: str, problem: Problem) -> Step:
    q, k, v, bias, mask = problem.arguments.values()

    def step() -> Tensor:
        length = q.shape[1]
        added = bias.to(q.dtype).masked_fill(~mask[0, :, None, None, :], LOWEST)
        return F.scaled_dot_product_attention(q[0], k[0], v[0], added.expand(length, -1, -1, -1))

    return step


def flex(operator: str, problem: Problem) -> Step:
    """FlexAttention over the rows as batch, the bias captured, on contiguous inputs, which it prefers."""
    from torch.nn.attention.flex_attention import flex_attention

    q, k, v = (problem.arguments[n][0].detach().contiguous().requires_grad_() for n in "qkv")
    bias = problem.arguments["bias"][0].detach().contiguous().requires_grad_()
    mask = problem.arguments["mask"][0]
    problem.leaves[:] = [q, k, v, bias]
    compiled = torch.compile(flex_attention, dynamic=False)

    def score(value: Tensor, row: Tensor, head: Tensor, i: Tensor, j: Tensor) -> Tensor:
        return torch.where(mask[row, j], value + bias[head, i, j], LOWEST)

    return lambda: compiled(q, k, v, score_mod=score)


def trifast(operator: str, problem: Problem) -> Step:
    from trifast import triangle_attention

    # [batch, head, row, column, channel], the mask True where a key is absent.
    q, k, v = (problem.arguments[n].transpose(1, 2).detach().contiguous().requires_grad_() for n in "qkv")
    bias = problem.arguments["bias"].detach().to(q.dtype).contiguous().requires_grad_()
    absent = ~problem.arguments["mask"]
    problem.leaves[:] = [q, k, v, bias]
    return lambda: triangle_attention(q, k, v, bias, absent)


def cuequivariance(operator: str, problem: Problem) -> Step:
    from cuequivariance_ops_torch import triangle_attention

    q, k, v = (problem.arguments[n].detach().contiguous().requires_grad_() for n in "qkv")
    bias = problem.arguments["bias"].detach()[:, None].contiguous().requires_grad_()
    mask = problem.arguments["mask"][:, :, None, None, :]
    problem.leaves[:] = [q, k, v, bias]
    return lambda: triangle_attention(q, k, v, bias, mask)


def cuequivariance_multiplication(operator: str, problem: Problem) -> Step:
    """The norms' weights and the mask in the dtype of all the rest, which it prefers."""
    from cuequivariance_ops_torch import triangle_multiplicative_update

    z, mask, weights, outgoing = problem.arguments.values()
    narrow = type(weights)(*[w.detach().to(z.dtype).requires_grad_() for w in weights])
    problem.leaves[:] = [z, *narrow]
    arguments = {
        "direction": "outgoing" if outgoing else "incoming",
        "mask": mask.to(z.dtype),
        "norm_in_weight": narrow.norm_in_weight,
        "norm_in_bias": narrow.norm_in_bias,
        "p_in_weight": narrow.projection,
        "g_in_weight": narrow.gate,
        "norm_out_weight": narrow.norm_out_weight,
        "norm_out_bias": narrow.norm_out_bias,
        "p_out_weight": narrow.output,
        "g_out_weight": narrow.output_gate,
    }
    return lambda: triangle_multiplicative_update(z, **arguments)


BACKENDS = {name: of_backend(name) for name in ("triton", "eager", "compile")}
RIVALS: dict[str, dict[str, Callable[[str, Problem], Step]]] = {
    "evoattention": BACKENDS
    | {"flex": flex, "sdpa": sdpa, "trifast": trifast, "cuequivariance": cuequivariance},
    "transition": BACKENDS,
    "triangle_multiplication": BACKENDS | {"cuequivariance": cuequivariance_multiplication},
    "layernorm": BACKENDS,
    "layernorm_linear": BACKENDS,
    "swiglu": BACKENDS,
    "adaln": BACKENDS,
}


def measure(
    make: Callable[[str, Problem], Step], operator: str, length: int, milliseconds: int
) -> tuple[float, float, float]:
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    problem = PROBLEMS[operator](length)
    forward = make(operator, problem)
    grad = torch.randn_like(forward())

    def step() -> None:
        for t in problem.leaves:
            t.grad = None
        forward().backward(grad)

    step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    peak = (torch.cuda.max_memory_allocated() - before) / GIB
    bench = triton.testing.do_bench
    with torch.no_grad():
        forward_ms = bench(forward, warmup=30, rep=milliseconds, return_mode="median")
    both_ms = bench(step, warmup=30, rep=milliseconds, return_mode="median")
    return forward_ms, both_ms, peak


def run(
    operators: Sequence[str], lengths: Sequence[int], rivals: Sequence[str], milliseconds: int = 250
) -> list[Row]:
    rows = []
    for operator in operators:
        for length in lengths:
            for name, make in RIVALS[operator].items():
                if rivals and name not in rivals:
                    continue
                torch._dynamo.reset()
                try:
                    forward_ms, both_ms, peak = measure(make, operator, length, milliseconds)
                except ImportError as error:
                    print(f"{operator:24s} {length:5d} {name:16s} not measured: {error}", flush=True)
                    continue
                except torch.cuda.OutOfMemoryError:
                    forward_ms = both_ms = peak = math.nan
                rows.append(Row(operator, length, name, forward_ms, both_ms, peak))
                print(
                    f"{operator:24s} {length:5d} {name:16s} forward {forward_ms:8.3f} ms   "
                    f"forward and backward {both_ms:8.3f} ms   peak {peak:7.3f} GiB",
                    flush=True,
                )
    return rows


def ratios(rows: Sequence[Row]) -> list[str]:
    """What our kernels need of each rival's time and memory."""
    ours = {(row.operator, row.length): row for row in rows if row.rival == "triton"}
    lines = []
    for row in rows:
        own = ours.get((row.operator, row.length))
        if own is not None and own is not row:
            forward, both = own.forward_ms / row.forward_ms, own.both_ms / row.both_ms
            lines.append(
                f"{row.operator} {row.length}, of {row.rival}: forward {forward:.2f}, forward and backward "
                f"{both:.2f}, peak {own.peak_gib / row.peak_gib:.2f}"
            )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--operators", nargs="+", choices=sorted(PROBLEMS), default=list(PROBLEMS))
    parser.add_argument("--lengths", nargs="+", type=int, default=[384, 768])
    parser.add_argument("--rivals", nargs="+", default=[], help="default: all that can be imported")
    parser.add_argument("--milliseconds", type=int, default=250, help="that each is repeated for")
    parser.add_argument("--calling-thread", action="store_true", help="run the backward on this thread")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    print(
        f"torch {torch.__version__}, triton {triton.__version__}, {torch.cuda.get_device_name()}", flush=True
    )
    with torch.autograd.set_multithreading_enabled(not args.calling_thread):
        rows = run(args.operators, args.lengths, args.rivals, args.milliseconds)
    print("\n".join(ratios(rows)), flush=True)
    if args.json is not None:
        device = torch.cuda.get_device_name()
        versions = {"torch": torch.__version__, "triton": triton.__version__, "device": device}
        args.json.write_text(json.dumps({**versions, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
