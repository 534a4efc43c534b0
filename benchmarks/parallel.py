"""Two blocks of the Pairformer shared by GPUs, against one GPU: right, how fast, how much memory.

    torchrun --nproc-per-node 2 benchmarks/parallel.py --json parallel.json
    torchrun --nproc-per-node 2 benchmarks/parallel.py --device cpu --lengths 32 --check-length 24

c_z 128, c_s 384, batch 1, dropout on, blocks recomputed in the backward pass. One rank alone and all together
are timed: median milliseconds of a forward and backward pass, the same without any transfer (what stays is
computation, the difference is exposed communication), how long the host takes to launch it, bytes that a rank
sends, and the memory at its peak beyond the inputs; on GPUs also how long the kernels of each collective ran,
and for how much of it no other kernel did (waiting for the other ranks included). Then comes the bandwidth of
collectives. Last, the shared blocks and the serial ones are compared with eager ones: outputs, gradients of
inputs and parameters; in float32, and in bfloat16 without dropout, whose masks on a GPU depend on the dtype.
"""

import argparse
import contextlib
import json
import os
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megafold.trainer import ops
from megafold.trainer.model.config import PairformerConfig
from megafold.trainer.model.pairformer import PairformerStack
from megafold.trainer.parallel import collectives
from megafold.trainer.parallel.mesh import ParallelMesh, Peers
from megafold.trainer.parallel.pairformer import pairformer
from megafold.trainer.parallel.shards import Shards, pad_tokens

C_S, C_Z, N_BLOCKS = 384, 128, 2
GIB = 2**30
SENT_MIB = (1, 8, 32, 128)


@dataclass(frozen=True)
class Row:
    """Forward and backward of the blocks; per block what is counted."""

    ranks: int
    length: int
    milliseconds: float
    without_transfers_ms: float
    host_ms: float
    sent_mib_per_block: float
    peak_gib: float
    collectives: dict[str, "Overlap"]


@dataclass(frozen=True)
class Setting:
    device: torch.device
    backend: str
    precision: torch.dtype
    peers: Peers


def network(device: torch.device) -> PairformerStack:
    torch.manual_seed(0)
    stack = PairformerStack(C_S, C_Z, N_BLOCKS, PairformerConfig(), recompute=True)
    with torch.no_grad():  # layers that start at zero would leave the others without gradients
        for parameter in stack.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return stack.to(device).train()


def whole_inputs(n: int, setting: Setting) -> tuple[Tensor, Tensor, Tensor]:
    """s, z and the mask of a sample, some of whose tokens are absent; equal on all ranks."""
    generator = torch.Generator().manual_seed(n)
    s = torch.randn(1, n, C_S, generator=generator).to(setting.device)
    z = torch.randn(1, n, n, C_Z, generator=generator).to(setting.device, setting.precision)
    mask = torch.rand(1, n, generator=generator).to(setting.device) > 0.05
    return s, z, mask


def own_inputs(n: int, setting: Setting, shards: Shards) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """s, this rank's rows of z, and the masks."""
    s, z, mask = whole_inputs(n, setting)
    z = pad_tokens(pad_tokens(z, 1, shards.n_padded), 2, shards.n_padded)[:, shards.rows].clone()
    mask = pad_tokens(mask, 1, shards.n_padded)
    return (
        pad_tokens(s, 1, shards.n_padded).requires_grad_(),
        z.requires_grad_(),
        mask,
        shards.pair_mask(mask),
    )


def autocast(setting: Setting) -> torch.autocast:
    enabled = setting.precision == torch.bfloat16
    return torch.autocast(setting.device.type, torch.bfloat16, enabled=enabled)


def run(
    stack: PairformerStack, inputs: tuple[Tensor, ...], setting: Setting, shards: Shards
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(1)  # dropout
    with autocast(setting), ops.use_backend(setting.backend):
        s, z, mask, pair_mask = inputs
        if setting.peers.size == 1:
            alone: tuple[Tensor, Tensor] = stack(s, z, mask, pair_mask)
            return alone
        return pairformer(stack, s, z, mask, pair_mask, shards)


def serial(stack: PairformerStack, n: int, setting: Setting) -> dict[str, Tensor]:
    """Outputs and gradients of the serial blocks."""
    s, z, mask = whole_inputs(n, setting)
    s.requires_grad_()
    z.requires_grad_()
    pair_mask = mask[:, :, None] & mask[:, None]
    torch.manual_seed(1)
    enabled = setting.precision == torch.bfloat16
    with (
        torch.autocast(setting.device.type, torch.bfloat16, enabled=enabled),
        ops.use_backend(setting.backend),
    ):
        s_out, z_out = stack(s, z, mask, pair_mask)
    (projection(s_out).sum() + projection(z_out).sum()).backward()
    found = {"s": s_out, "z": z_out, "ds": s.grad, "dz": z.grad}
    found |= {name: parameter.grad for name, parameter in stack.named_parameters()}
    stack.zero_grad()
    return {name: value.detach().double() for name, value in found.items() if value is not None}


def projection(x: Tensor) -> Tensor:
    """Something whose gradient is not the same everywhere."""
    return torch.cos(x.float())


def shared(stack: PairformerStack, n: int, setting: Setting) -> dict[str, Tensor]:
    """The same from the shared blocks: rows are gathered, gradients of parameters summed."""
    peers, shards = setting.peers, Shards(setting.peers, n)
    inputs = own_inputs(n, setting, shards)
    s_out, z_out = run(stack, inputs, setting, shards)
    real = min(shards.size, max(0, n - shards.rows.start))
    # s is the same on all ranks: each counts a share of what comes from it.
    own = projection(s_out[:, :n]).sum() / peers.size + projection(z_out[:, :real, :n]).sum()
    own.backward()
    assert inputs[0].grad is not None
    assert inputs[1].grad is not None
    found = {"s": s_out[:, :n].detach().double(), "ds": peers.size * inputs[0].grad[:, :n].double()}
    for name, rows in (("z", z_out), ("dz", inputs[1].grad)):
        pieces = [torch.empty_like(rows) for _ in range(peers.size)]
        dist.all_gather(pieces, rows.detach().contiguous(), group=peers.group)
        found[name] = torch.cat(pieces, 1)[:, :n, :n].double()
    for name, parameter in stack.named_parameters():
        if parameter.grad is not None:
            gradient = parameter.grad.double()
            dist.all_reduce(gradient, group=peers.group)
            found[name] = gradient
    stack.zero_grad()
    return found


def check(n: int, setting: Setting) -> bool:
    """Print how far the shared blocks, and the serial ones, are from eager serial ones in float32.

    Returns:
        Whether sharing makes it no worse.
    """
    stack = network(setting.device)
    right = True
    for precision in (torch.float32, torch.bfloat16):
        stack.train(precision == torch.float32)
        exact = serial(stack, n, replace(setting, precision=torch.float32, backend="eager"))
        now = replace(setting, precision=precision)
        off = {
            "serial": distances(serial(stack, n, now), exact),
            "shared": distances(shared(stack, n, now), exact),
        }
        for name, errors in off.items():
            worst = sorted(errors, key=lambda key: -errors[key])[:3]
            told = ", ".join(f"{key} {errors[key]:.1e}" for key in worst)
            say(f"{precision!s:15s} N = {n}, P = {setting.peers.size}, {name}: off by {told}")
        limit = max(2 * max(off["serial"].values()), 1e-4 if precision == torch.float32 else 0.05)
        right &= max(off["shared"].values()) < limit
    return right


def distances(values: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, float]:
    """Norms of the differences relative to those of the expected.

    Some gradients are 0 but for rounding (a constant added to logits changes no softmax): none is taken to
    be less than a thousandth of the largest of a parameter.
    """
    least = 1e-3 * max(float(x.norm()) for name, x in expected.items() if "." in name)
    off = {}
    for name, x in expected.items():
        scale = float(x.norm())
        off[name] = float((values[name] - x).norm()) / (max(least, scale) if "." in name else scale)
    return off


@contextlib.contextmanager
def without_transfers() -> Iterator[None]:
    """Collectives return at once: what a rank would do if the network were infinitely fast.

    What would have come from others is this rank's own, or 0: finite, so that no step is left out.
    """

    class Done:
        def wait(self) -> None:
            pass

    def exchange(received: Tensor, x: Tensor, **_: Any) -> None:
        received.copy_(x)

    def arrive(buffer: Tensor, _: Tensor, **__: Any) -> Done:
        buffer.zero_()
        return Done()

    def reduce(*_: Any, **__: Any) -> None:
        pass

    gathers = collectives._gather_into, collectives._reduce_scatter_into
    before = dist.all_to_all_single, dist.all_reduce
    dist.all_to_all_single, dist.all_reduce = exchange, reduce
    collectives._gather_into = collectives._reduce_scatter_into = arrive
    try:
        yield
    finally:
        dist.all_to_all_single, dist.all_reduce = before
        collectives._gather_into, collectives._reduce_scatter_into = gathers


@dataclass(frozen=True)
class Overlap:
    """Kernels of one collective in a step: how many, how long they ran, and how much of it alone."""

    kernels: int
    milliseconds: float
    alone_ms: float


def kernels_of(step: Callable[[], Any]) -> list[Any]:
    """The kernels that a step runs on a GPU, as the profiler has them; none without a GPU."""
    if not torch.cuda.is_available():
        return []
    step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step()
        torch.cuda.synchronize()
    return [event for event in profiler.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def overlaps(events: list[Any]) -> dict[str, Overlap]:
    """By collective."""
    transfers: dict[str, list[tuple[float, float]]] = {}
    work = []
    for event in events:
        span = (event.time_range.start, event.time_range.end)
        if event.name.startswith("ncclDevKernel_"):
            transfers.setdefault(
                event.name.removeprefix("ncclDevKernel_").split("_")[0].split("(")[0], []
            ).append(span)
        elif not event.name.startswith("nccl"):  # neither a range that NCCL marks
            work.append(span)
    busy = union(work)
    found = {}
    for name, spans in sorted(transfers.items()):
        whole = sum(stop - start for start, stop in spans)
        hidden = sum(common(span, busy) for span in spans)
        found[name] = Overlap(len(spans), whole / 1e3, (whole - hidden) / 1e3)
    return found


def union(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same times as spans that do not touch, in order."""
    joined: list[tuple[float, float]] = []
    for start, stop in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], stop))
        else:
            joined.append((start, stop))
    return joined


def common(span: tuple[float, float], spans: list[tuple[float, float]]) -> float:
    """How much of ``span`` lies within the others, which do not touch."""
    return sum(max(0.0, min(span[1], stop) - max(span[0], start)) for start, stop in spans)


def median_ms(function: Callable[[], Any], device: torch.device | None, repeats: int) -> float:
    """Median time; without a device, of the host alone."""

    def once() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        began = time.perf_counter()
        function()
        if device is not None:
            synchronize(device)
        return 1e3 * (time.perf_counter() - began)

    once()
    return statistics.median(once() for _ in range(repeats))


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(n: int, setting: Setting, repeats: int, longest: int = 0) -> Row:
    stack, shards = network(setting.device), Shards(setting.peers, n)
    inputs = own_inputs(n, setting, shards)
    gradients = [torch.randn_like(x) for x in run(stack, inputs, setting, shards)]

    def step() -> None:
        for tensor in (inputs[0], inputs[1], *stack.parameters()):
            tensor.grad = None
        torch.autograd.backward(run(stack, inputs, setting, shards), gradients)

    with collectives.record_traffic() as records:
        step()
    synchronize(setting.device)
    peak = float("nan")
    if setting.device.type == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / GIB
    milliseconds = median_ms(step, setting.device, repeats)
    with without_transfers():
        alone = median_ms(step, setting.device, repeats)
    sent = sum(record.sent for record in records) / N_BLOCKS / 2**20
    host = median_ms(step, None, repeats)
    events = kernels_of(step)
    if longest:
        say_longest(events, longest)
    return Row(setting.peers.size, n, milliseconds, alone, host, sent, peak, overlaps(events))


def say_longest(events: list[Any], number: int) -> None:
    """Print what takes the GPU's time."""
    took = Counter[str]()
    count = Counter[str]()
    for event in events:
        took[event.name] += event.time_range.elapsed_us()
        count[event.name] += 1
    say(f"    {len(events)} kernels, {sum(took.values()) / 1e3:.2f} ms")
    for name, microseconds in took.most_common(number):
        say(f"    {microseconds / 1e3:7.3f} ms  {count[name]:4d} x  {name[:150]}")


def bandwidths(setting: Setting, repeats: int) -> dict[str, dict[str, float]]:
    """GB/s that a rank sends, by collective and by MiB that it sends."""
    peers = setting.peers
    if peers.size == 1:
        return {}
    speeds: dict[str, dict[str, float]] = {"all_to_all": {}, "all_gather": {}}
    for mib in SENT_MIB:
        sent = mib * 2**20
        x = torch.ones(peers.size, sent // 4 // (peers.size - 1), device=setting.device)
        calls: dict[str, Callable[[], Any]] = {
            "all_to_all": partial(collectives.all_to_all, x, peers, "bandwidth"),
            "all_gather": partial(collectives.all_gather, x[0], peers, "bandwidth"),
        }
        for name, call in calls.items():
            speeds[name][str(mib)] = sent / median_ms(call, setting.device, repeats) / 1e6
    return speeds


def say(text: str) -> None:
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(text, flush=True)


def rank_options(parser: argparse.ArgumentParser) -> None:
    """What :func:`join` reads, and ``--ranks``."""
    parser.add_argument("--ranks", type=int, nargs="+", help="times of so many; default 1 and all")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--backend", help="of operators; default triton on a GPU, eager on a CPU")


def join(arguments: argparse.Namespace) -> tuple[torch.device, str, Peers]:
    """Join torchrun's other ranks; this one's device, the back end, and the ranks, who share every sample."""
    device = torch.device(arguments.device)
    if device.type == "cuda":
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    peers = ParallelMesh.create(device, dist.get_world_size()).sp
    return device, arguments.backend or ("triton" if device.type == "cuda" else "eager"), peers


def device_name(device: torch.device) -> str:
    """The GPU's name, or CPU."""
    return torch.cuda.get_device_name() if device.type == "cuda" else "CPU"


def describe(peers: Peers, device: torch.device, backend: str) -> str:
    """A line on what is measured."""
    return f"{peers.size} x {device_name(device)}, torch {torch.__version__}, back end {backend}"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 768, 1024])
    parser.add_argument("--check-length", type=int, default=131, help="0: no comparison")
    rank_options(parser)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--longest", type=int, default=0, help="print so many kernels that take longest")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device, backend, peers = join(arguments)
    setting = Setting(device, backend, torch.bfloat16, peers)
    say(describe(peers, device, backend))
    rows = []
    say("ranks  length       ms  without transfers  host ms  sent MiB/block  peak GiB")
    for n in arguments.lengths:
        for ranks in arguments.ranks or (1, peers.size):
            if ranks == 1 and peers.rank > 0:
                dist.barrier()
                continue
            now = replace(setting, peers=Peers()) if ranks == 1 else setting
            row = measure(n, now, arguments.repeats, arguments.longest)
            rows.append(row)
            say(
                f"{row.ranks:5d}  {row.length:6d}  {row.milliseconds:7.1f}  {row.without_transfers_ms:17.1f}"
                f"  {row.host_ms:7.1f}  {row.sent_mib_per_block:14.1f}  {row.peak_gib:8.2f}"
            )
            for kind, seen in row.collectives.items():
                say(
                    f"       {kind}: {seen.kernels} kernels, {seen.milliseconds:.2f} ms, "
                    f"{seen.alone_ms:.2f} ms of them alone"
                )
            if ranks == 1:
                dist.barrier()
    speeds = bandwidths(setting, arguments.repeats)
    for kind, by_size in speeds.items():
        told = ", ".join(f"{size} MiB: {speed:.1f}" for size, speed in by_size.items())
        say(f"{kind}, GB/s of a rank that sends {told}")
    if arguments.json and dist.get_rank() == 0:
        result: dict[str, Any] = {"device": device_name(device), "torch": torch.__version__}
        result |= {"backend": backend, "bandwidth_gb_s": speeds}
        arguments.json.write_text(
            json.dumps(result | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        )
    right = not arguments.check_length or check(arguments.check_length, setting)
    dist.destroy_process_group()
    if not right:
        sys.exit("the shared blocks are further off than the serial ones")


if __name__ == "__main__":
    main()
