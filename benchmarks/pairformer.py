"""One whole Pairformer block on one GPU, forward and backward: ours and, if installed, Boltz's own layer.

    python benchmarks/pairformer.py --lengths 384 768 --json pairformer.json

c_z 128, c_s 384, bfloat16 autocast, dropout on, batch 1. Two rows take the host's part away by CUDA graphs,
as the trainer does: "triton graphed" keeps its activations as "triton" does, "triton recomputed" computes the
forward anew in its backward, as with activation checkpointing. What graphs hold counts as memory of the step.
The rival is `PairformerLayer` of the published package `boltz` (2.2.1): as it is, compiled, and with
cuEquivariance's kernels. Prints for each the median milliseconds, the memory that a step needs at its peak
beyond its inputs and their gradients, and how many GPU kernels a step launches; then the ratios of our back
end `triton` to the others.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import triton
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megafold.trainer import ops
from megafold.trainer.graphs import BlockGraphs, CudaRecorder
from megafold.trainer.model.config import PairformerConfig
from megafold.trainer.model.pairformer import PairformerBlock
from megafold.trainer.model.primitives import run_block

DEVICE = "cuda"
C_S, C_Z = 384, 128
GIB = 2**30
OURS = ("triton", "triton graphed", "triton recomputed", "compile", "eager")
BOLTZ = ("boltz", "boltz compiled", "boltz cuequivariance")

Block = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass
class Made:
    """A block; ``held``: bytes that its CUDA graphs hold, known once it has run forward and backward."""

    module: nn.Module
    run: Block
    held: Callable[[], int] = lambda: 0


@dataclass(frozen=True)
class Row:
    name: str
    length: int
    forward_ms: float
    both_ms: float
    peak_gib: float
    kernels: int


def our_block(name: str, length: int) -> Made:
    backend = name.split()[0]
    block = PairformerBlock(C_S, C_Z, PairformerConfig()).to(DEVICE).train()
    randomise(block.parameters())
    mask = torch.ones(1, length, dtype=torch.bool, device=DEVICE)
    pair_mask = torch.ones(1, length, length, dtype=torch.bool, device=DEVICE)
    recorder = CudaRecorder(torch.device(DEVICE, torch.cuda.current_device()))
    graphs = BlockGraphs(recorder, largest=sys.maxsize)
    recompute = name == "triton recomputed"
    replayed = graphs.active if recompute or name == "triton graphed" else nullcontext

    def run(s: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
        with ops.use_backend(backend), replayed():
            result: tuple[Tensor, Tensor] = run_block(block, s, z, mask, pair_mask, recompute=recompute)
        return result

    return Made(block, run, lambda: graphs.bytes)


def inputs(length: int) -> tuple[Tensor, Tensor]:
    s = torch.randn(1, length, C_S, device=DEVICE).requires_grad_()
    z = torch.randn(1, length, length, C_Z, device=DEVICE, dtype=torch.bfloat16).requires_grad_()
    return s, z


def boltz_layer(name: str, length: int) -> Made:
    from boltz.model.layers.pairformer import PairformerLayer

    layer = PairformerLayer(C_S, C_Z, v2=True).to(DEVICE).train()
    randomise(layer.parameters())
    mask = torch.ones(1, length, device=DEVICE)
    pair_mask = torch.ones(1, length, length, device=DEVICE)
    called = torch.compile(layer, dynamic=False) if name == "boltz compiled" else layer
    options = {"use_kernels": True} if name == "boltz cuequivariance" else {}
    return Made(layer, lambda s, z: called(s, z, mask, pair_mask, **options))


def randomise(parameters: Iterable[nn.Parameter]) -> None:
    """Layers that start at zero would leave the others without gradients."""
    with torch.no_grad():
        for parameter in parameters:
            if parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)


def measure(name: str, length: int, milliseconds: int) -> Row:
    torch.manual_seed(0)
    torch.cuda.empty_cache()
    made = boltz_layer(name, length) if name in BOLTZ else our_block(name, length)
    s, z = inputs(length)
    leaves = [s, z, *made.module.parameters()]

    def forward() -> tuple[Tensor, Tensor]:
        with torch.autocast(DEVICE, torch.bfloat16):
            return made.run(s, z)

    grads = [torch.randn_like(t) for t in forward()]

    def step() -> None:
        for t in leaves:
            t.grad = None
        torch.autograd.backward(forward(), grads)

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    # The gradients of inputs and parameters are there already; the step frees them and makes them anew.
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    # What graphs hold is there before the step, and serves no one else.
    peak = (torch.cuda.max_memory_allocated() - before + made.held()) / GIB
    with torch.set_grad_enabled(name == "triton graphed"):
        forward_ms = median_ms(forward, milliseconds // 3)
    return Row(name, length, forward_ms, median_ms(step, milliseconds), peak, count_kernels(step))


def median_ms(function: Callable[[], object], milliseconds: int) -> float:
    """Median of as many runs as take so long."""
    warmup = milliseconds // 10
    median: float = triton.testing.do_bench(function, warmup=warmup, rep=milliseconds, return_mode="median")
    return median


def count_kernels(step: Callable[[], None]) -> int:
    """Kernels, copies and fills that one step puts on the GPU."""
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        step()
        torch.cuda.synchronize()
    return sum(
        event.count
        for event in profiled.key_averages()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )


def run(names: Sequence[str], lengths: Sequence[int], milliseconds: int) -> list[Row]:
    rows = []
    for length in lengths:
        for name in names:
            torch._dynamo.reset()
            try:
                row = measure(name, length, milliseconds)
            except ImportError as error:
                print(f"{length:5d} {name:21s} not measured: {error}", flush=True)
                continue
            except torch.cuda.OutOfMemoryError:
                row = Row(name, length, math.nan, math.nan, math.nan, 0)
            rows.append(row)
            print(
                f"{length:5d} {name:21s} forward {row.forward_ms:8.2f} ms   forward and backward "
                f"{row.both_ms:8.2f} ms   peak {row.peak_gib:6.2f} GiB   {row.kernels} kernels",
                flush=True,
            )
    return rows


def ratios(rows: Sequence[Row]) -> list[str]:
    """Lines on what `triton` needs of the others' time and memory."""
    lines = []
    for length in sorted({row.length for row in rows}):
        found = {row.name: row for row in rows if row.length == length}
        ours = [found.pop(name) for name in OURS[:3] if name in found]
        for name, row in found.items():
            for own in ours:
                lines.append(
                    f"{length}: {own.name} needs {own.both_ms / row.both_ms:.2f} of the time of {name} and "
                    f"{own.peak_gib / row.peak_gib:.2f} of its peak"
                )
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    names = (*OURS, *BOLTZ)
    parser.add_argument("--blocks", nargs="+", choices=names, default=names, help="default: all")
    parser.add_argument("--lengths", nargs="+", type=int, default=[384, 768])
    parser.add_argument("--milliseconds", type=int, default=500, help="how long a step is repeated")
    parser.add_argument("--calling-thread", action="store_true", help="run the backward on this thread")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    device = torch.cuda.get_device_name()
    print(f"torch {torch.__version__}, triton {triton.__version__}, {device}", flush=True)
    with torch.autograd.set_multithreading_enabled(not args.calling_thread):
        rows = run(args.blocks, args.lengths, args.milliseconds)
    for line in ratios(rows):
        print(line)
    if args.json is not None:
        versions = {"torch": torch.__version__, "triton": triton.__version__, "device": device}
        args.json.write_text(json.dumps({**versions, "rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
