"""Whole training steps of AF3's network on one GPU, with CUDA graphs and without.

    python benchmarks/training_step.py --lengths 256 384 512 --json training_step.json
    python benchmarks/training_step.py --check
    python benchmarks/training_step.py --device cpu --preset tiny --lengths 16 --copies 2 --backends eager

A random protein with 8 atoms a residue, 512 rows of MSA, 4 templates, 48 noised copies, bfloat16, blocks
recomputed; one pass through the trunk (`--cycles`: 1 to so many), and a truth whose atoms may be exchanged,
for which a structure is predicted in 20 denoising steps (`--rollout 0`: none). A step is the loop's: forward,
loss, backward, norm, Adam, average. Prints of each length and setting the first step's seconds, the median
milliseconds of the next ones, memory at the peak (reserved in all; allocated in the steps after the first;
held by graphs, most of which counts as reserved alone), and the loss of every step. `--longest 20` profiles
one step more: how many kernels it runs, for how many milliseconds the GPU is busy, and what takes longest.
`--kinds` times each recording by itself, forward and backward (which computes the block anew).
`--parts` tells for how many milliseconds each part keeps the GPU busy: what `megafold simulate` starts from.

`--check` compares runs in deterministic mode after `--steps` steps: plain ones, replayed ones, and the
replayed ones again. Losses of all steps, parameters and averages after them must be equal bit by bit;
differences are printed.
"""

import argparse
import gc
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any, cast

import torch
from parallel import device_name, kernels_of, say_longest, synchronize, union
from steps import Steps, network, sample, shallow
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megafold.trainer.batches import Batch
from megafold.trainer.config import CudaGraphs, TrainConfig
from megafold.trainer.devices import autocast, to_device
from megafold.trainer.graphs import BlockGraphs
from megafold.trainer.loop import Feed, Trainer
from megafold.trainer.model.config import BACKENDS, Backend, ModelConfig
from megafold.trainer.model.model import AlphaFold3
from megafold.trainer.presets.model import MODEL_PRESETS, model_preset

GIB = 2**30
GRAPHS: tuple[CudaGraphs, ...] = ("off", "auto")


@dataclass(frozen=True)
class Row:
    """``busy_ms``: in which the GPU runs something; ``held_gib``: by recordings of blocks."""

    length: int
    backend: Backend
    graphs: CudaGraphs
    first_s: float
    step_ms: float
    reserved_gib: float
    allocated_gib: float
    held_gib: float
    recordings: int
    recording_s: float
    declined: list[str]
    losses: list[float]
    kernels: int = 0
    busy_ms: float = 0.0


@dataclass(frozen=True)
class Setting:
    network: ModelConfig
    training: TrainConfig

    def trainer(self, folder: Path) -> Trainer:
        """A new one, always with the same weights."""
        torch.use_deterministic_algorithms(self.training.deterministic, warn_only=True)
        model = network(self.network, torch.device(self.training.device), self.training.backend)
        return Trainer(model, self.training, Feed(batches=[]), folder)


def measure(
    setting: Setting, n: int, repeats: int, folder: Path, *, longest: int, kinds: bool, parts: bool
) -> Row:
    gc.collect()
    on_gpu = setting.training.device.startswith("cuda")
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    trainer = setting.trainer(folder)
    step = Steps(trainer, sample(n, symmetric=True))
    losses = []

    def timed() -> float:
        synchronize(trainer.device)
        began = time.perf_counter()
        losses.append(float(step()["loss"]))
        synchronize(trainer.device)
        return time.perf_counter() - began

    first = timed()
    reserved = torch.cuda.max_memory_reserved() if on_gpu else 0
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    times = [timed() for _ in range(repeats)]
    graphs = trainer.graphs
    row = Row(
        length=n,
        backend=setting.training.backend,
        graphs=setting.training.cuda_graphs,
        first_s=first,
        step_ms=1e3 * statistics.median(times),
        reserved_gib=max(reserved, torch.cuda.max_memory_reserved()) / GIB if on_gpu else 0.0,
        allocated_gib=torch.cuda.max_memory_allocated() / GIB if on_gpu else 0.0,
        held_gib=graphs.bytes / GIB if graphs else 0.0,
        recordings=len(graphs) if graphs else 0,
        recording_s=graphs.seconds if graphs else 0.0,
        declined=list(graphs.declined.values()) if graphs else [],
        losses=losses,
    )
    say(row)
    if kinds and graphs:
        say_kinds(graphs)
    if parts:
        say_parts(trainer, sample(n))
    if not longest:
        return row
    kernels = kernels_of(step)
    busy = busy_ms(kernels)
    print(f"        {len(kernels)} kernels; the GPU is busy for {busy:.0f} ms", flush=True)
    say_longest(kernels, longest)
    return replace(row, kernels=len(kernels), busy_ms=busy)


def busy_ms(kernels: list[Any]) -> float:
    """For how long at least one of them runs."""
    spans = union([(event.time_range.start, event.time_range.end) for event in kernels])
    return sum(stop - start for start, stop in spans) / 1e3


def say_parts(trainer: Trainer, batch: Batch) -> None:
    """Print what each part of the network keeps the GPU busy for, as the trainer runs it."""
    config, model = trainer.config, cast(AlphaFold3, trainer.model)
    batch = to_device(batch, trainer.device)

    def within(part: Callable[[], Any]) -> float:
        def run() -> None:
            replays = nullcontext() if trainer.graphs is None else trainer.graphs.active()
            with replays, autocast(trainer.device, config.precision):
                results = part()
            if results is not None:
                torch.autograd.backward(results, [torch.ones_like(result) for result in results])

        return busy_ms(kernels_of(run))

    with torch.no_grad(), autocast(trainer.device, config.precision):
        given = model.run_trunk(batch, n_cycles=1)

    def trunk() -> list[Tensor]:
        outputs = model.run_trunk(batch, n_cycles=1)
        return [outputs.s_trunk, outputs.z_trunk, outputs.distogram_logits]

    @torch.no_grad()
    def recycled() -> None:
        model.run_trunk(batch, n_cycles=1)

    @torch.no_grad()
    def rolled_out() -> None:
        model.rollout(batch, given, n_samples=1, n_steps=config.rollout_steps)

    def denoised() -> list[Tensor]:
        leaves = (x.detach().requires_grad_() for x in (given.s_inputs, given.s_trunk, given.z_trunk))
        leaf = replace(given, **dict(zip(("s_inputs", "s_trunk", "z_trunk"), leaves, strict=True)))
        return [model.denoise_copies(batch, leaf, n_copies=config.n_copies).denoised]

    parts: dict[str, Callable[[], Any]] = {
        "trunk, forward and backward": trunk,
        "trunk without gradients": recycled,
        f"{config.n_copies} copies, forward and backward": denoised,
        f"roll-out of {config.rollout_steps} steps": rolled_out,
    }
    for name, part in parts.items():
        print(f"        {within(part):8.1f} ms  {name}", flush=True)


def say_kinds(graphs: BlockGraphs) -> None:
    """Print what one replay takes of each kind and shape of blocks that are computed anew."""
    print("        milliseconds of a replay forward, backward, and the block's inputs", flush=True)
    for recording in graphs._recomputed.values():
        times = [gpu_ms(recording._replay), *(gpu_ms(replay) for replay, _ in recording.backwards.values())]
        shapes = " ".join(str(list(x.shape)) for x in recording.inputs)
        told = "".join(f"{ms:8.3f}" for ms in times) + ("" if len(times) > 1 else "       -")
        print(f"        {told}  {type(recording.block).__name__} {shapes}", flush=True)


def gpu_ms(replay: Callable[[], None], repeats: int = 5) -> float:
    """Median time on the GPU."""
    times = []
    for _ in range(repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay()
        stop.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(stop))
    return statistics.median(times)


def say(row: Row) -> None:
    print(
        f"{row.length:6d}  {row.backend:>8s}  {row.graphs:>6s}  {row.first_s:8.1f}  {row.step_ms:8.1f}"
        f"  {row.reserved_gib:13.2f}  {row.allocated_gib:9.2f}  {row.held_gib:5.2f}  {row.recordings:8d}"
        f"  {row.recording_s:5.1f}  " + " ".join(f"{loss:.6f}" for loss in row.losses),
        flush=True,
    )
    for reason in row.declined:
        print(f"        not recorded: {reason}", flush=True)


# --------------------------------------------------------------------------------------------------
# Right


def check(setting: Setting, n: int, n_steps: int, folder: Path) -> bool:
    """Print how far plain and replayed runs are apart; whether they are equal."""
    exact = replace(setting, training=replace(setting.training, deterministic=True))
    runs = {}
    for name, graphs in (("plain", "off"), ("replayed", "auto"), ("replayed again", "auto")):
        training = replace(exact.training, cuda_graphs=graphs)
        gc.collect()
        runs[name] = run(replace(exact, training=training), n, n_steps, folder)
    right = True
    for name, values in runs.items():
        apart = {key: largest(value, runs["plain"][key]) for key, value in values.items()}
        worst = max(apart, key=lambda key: apart[key])
        unequal = [key for key, value in values.items() if not torch.equal(value, runs["plain"][key])]
        right &= not unequal
        losses = " ".join(f"{loss:.9f}" for loss in values["losses"].tolist())
        print(f"N = {n}, {name}: losses {losses}", flush=True)
        print(
            f"    {len(unequal)} of {len(values)} unequal; furthest {worst}: {apart[worst]:.1e}", flush=True
        )
    return right


def run(setting: Setting, n: int, n_steps: int, folder: Path) -> dict[str, Tensor]:
    """Losses of the steps, then parameters and their averages."""
    trainer = setting.trainer(folder)
    step = Steps(trainer, sample(n, symmetric=True))
    losses = [float(step()["loss"]) for _ in range(n_steps)]
    if trainer.graphs is not None:
        assert trainer.graphs.replays
        assert not trainer.graphs.declined
    found = {"losses": torch.tensor(losses, dtype=torch.float64)}
    found |= {name: value.detach().cpu() for name, value in trainer.model.named_parameters()}
    return found | {f"average of {name}": x.cpu() for name, x in trainer.average.state_dict().items()}


def largest(value: Tensor, expected: Tensor) -> float:
    """Difference, relative to the largest number."""
    scale = float(expected.double().abs().max()) or 1.0
    return float((value.double() - expected.double()).abs().max()) / scale


# --------------------------------------------------------------------------------------------------


def main() -> None:
    arguments = parsed()
    setting = setting_of(arguments)
    device = torch.device(arguments.device)
    print(f"{device_name(device)}, torch {torch.__version__}, preset {arguments.preset}", flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if arguments.check:
            right = [check(setting, n, arguments.steps, folder) for n in arguments.lengths]
            if not all(right):
                sys.exit("plain and replayed runs differ")
            return
        print(
            "length  back end  graphs  first, s  step, ms  GiB: reserved  allocated   held"
            "  recorded   in s  losses"
        )
        rows = []
        for n, backend, graphs in product(arguments.lengths, arguments.backends, arguments.graphs):
            training = replace(setting.training, backend=backend, cuda_graphs=graphs)
            now = replace(setting, training=training)
            profiled = {name: getattr(arguments, name) for name in ("longest", "kinds", "parts")}
            rows.append(measure(now, n, arguments.steps, folder, **profiled))
    if arguments.json:
        about = {"device": device_name(device), "torch": torch.__version__, "preset": arguments.preset}
        arguments.json.write_text(
            json.dumps(about | {"rows": [asdict(row) for row in rows]}, indent=1) + "\n"
        )


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="af3", choices=MODEL_PRESETS)
    parser.add_argument("--blocks", type=int, help="at most so many in each stack; default: the preset's")
    parser.add_argument("--lengths", type=int, nargs="+", default=[384])
    parser.add_argument("--backends", nargs="+", default=["triton"], choices=BACKENDS)
    parser.add_argument("--graphs", nargs="+", default=GRAPHS, choices=GRAPHS)
    parser.add_argument("--steps", type=int, default=5, help="after the first; of --check, in all")
    parser.add_argument("--copies", type=int, default=48)
    parser.add_argument("--cycles", type=int, default=1)
    parser.add_argument("--rollout", type=int, default=20)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--longest", type=int, default=0, help="profile, and print so many kernels")
    parser.add_argument("--kinds", action="store_true", help="time each recording by itself")
    parser.add_argument("--parts", action="store_true", help="profile the parts of a step")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def setting_of(arguments: argparse.Namespace) -> Setting:
    sizes = model_preset(arguments.preset)
    if not arguments.rollout:  # and so nothing to judge
        sizes = replace(sizes, confidence=None)
    if arguments.blocks:
        sizes = shallow(sizes, arguments.blocks)
    training = TrainConfig(
        preset=arguments.preset,
        n_copies=arguments.copies,
        n_cycles=arguments.cycles,
        rollout_steps=arguments.rollout,
        device=arguments.device,
        backend=arguments.backends[0],
        # So low a rate that random weights do not run away, and one at which wrong gradients would tell.
        warmup_steps=1_000 if arguments.check else 1_000_000,
    )
    return Setting(sizes, training)


if __name__ == "__main__":
    main()
