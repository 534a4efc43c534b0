"""A whole training step of AF3's network shared by GPUs, against one GPU; and what its atoms take.

    torchrun --nproc-per-node 2 benchmarks/parallel_step.py --json parallel_step.json
    torchrun --nproc-per-node 2 benchmarks/parallel_step.py --device cpu --preset tiny --lengths 16 --copies 2

A random protein with 8 atoms a residue, 512 rows of MSA, 4 templates, one cycle, 48 noised copies, bfloat16,
blocks recomputed. Whole steps of the loop (forward, loss, backward, gradients summed, Adam, average) are
timed on one rank alone and on all: median seconds, the same without any transfer, and the memory at its peak,
weights and their like included. Then come the parts that have atoms, forward and backward: those that every
rank repeats, as they are and as they would be if ranks shared their atoms (a P-th of the tokens, then a
gather of the result), and those that are shared with the noised copies. Last, the loss and every parameter's
gradient of a step of a shallow network are compared with eager ones in float32 on one GPU; in bfloat16
without dropout, whose masks on a GPU depend on the dtype.
"""

import argparse
import gc
import json
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from parallel import describe, device_name, distances, join, median_ms, rank_options, say, without_transfers
from steps import ATOMS_PER_TOKEN, Steps, network, sample, shallow
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from megafold.trainer import ops
from megafold.trainer.config import Precision, TrainConfig
from megafold.trainer.data_parallel import Ranks
from megafold.trainer.loop import Feed, LossOf, Trainer
from megafold.trainer.model.config import Backend, ModelConfig
from megafold.trainer.model.model import AlphaFold3
from megafold.trainer.parallel import collectives
from megafold.trainer.parallel.batches import shard_batch
from megafold.trainer.parallel.mesh import Peers
from megafold.trainer.parallel.training import SharedLoss
from megafold.trainer.presets.model import model_preset

PRECISIONS: Final[tuple[Precision, ...]] = ("fp32", "bf16")
GIB = 2**30


@dataclass(frozen=True)
class Setting:
    device: torch.device
    network: ModelConfig
    training: TrainConfig
    peers: Peers

    def alone(self) -> "Setting":
        """The same on one rank."""
        return replace(self, peers=Peers(), training=replace(self.training, sp=1))


@dataclass(frozen=True)
class Step:
    """Steps of the loop on so many ranks."""

    ranks: int
    length: int
    seconds: float
    without_transfers_s: float
    peak_gib: float
    loss: float


@dataclass(frozen=True)
class AtomPart:
    """A part of a step that has atoms, forward and backward, in milliseconds.

    ``shared_ms`` and ``gather_ms``: if its atoms were shared, computing and gathering; None where copies are.
    """

    name: str
    length: int
    milliseconds: float
    shared_ms: float | None = None
    gather_ms: float | None = None


def trainer_of(setting: Setting, folder: Path) -> Trainer:
    peers = setting.peers
    ranks = Ranks(peers.rank, peers.size, peers.rank, peers.size)
    loss_of: LossOf | None = SharedLoss(peers) if peers.size > 1 else None
    return Trainer(network_of(setting), setting.training, Feed(batches=[]), folder, ranks, loss_of)


def network_of(setting: Setting) -> AlphaFold3:
    return network(setting.network, setting.device, setting.training.backend)


# --------------------------------------------------------------------------------------------------
# Right


def gradients(setting: Setting, n: int, folder: Path) -> dict[str, Tensor]:
    """The loss of a step, and every parameter's gradient summed over the ranks."""
    trainer = trainer_of(setting, folder)
    peers = setting.peers
    batch = shard_batch(sample(n), peers) if peers.size > 1 else sample(n)
    trainer._clear_gradients()
    sums, _, _ = trainer._accumulate(iter([batch]))
    found = {"loss": sums["loss"].double()}
    for name, parameter in trainer.model.named_parameters():
        assert parameter.grad is not None
        found[name] = parameter.grad.double()
    if peers.size > 1:
        for value in found.values():
            dist.all_reduce(value, group=peers.group)
    return found


def check(n: int, setting: Setting, folder: Path) -> bool:
    """Print how far the shared step and the serial one are off; whether sharing makes it no worse."""
    training = replace(setting.training, n_copies=3)
    setting = replace(setting, network=shallow(setting.network, 2), training=training)

    def run(now: Setting, precision: Precision, backend: Backend) -> dict[str, Tensor]:
        changed = replace(now.training, precision=precision, backend=backend)
        return gradients(replace(now, training=changed), n, folder)

    right = True
    for precision in PRECISIONS:
        if precision == "bf16":
            setting = without_dropout(setting)
        exact = run(setting.alone(), "fp32", "eager")
        worst = {}
        for name, now in {"serial": setting.alone(), "shared": setting}.items():
            off = distances(run(now, precision, training.backend), exact)
            names = sorted(off, key=lambda key: -off[key])[:2]
            worst[name] = off[names[0]]
            told = ", ".join(f"{key} {off[key]:.1e}" for key in names)
            say(f"{precision} N = {n}, P = {now.peers.size}, {name}: loss off by {off['loss']:.1e}, {told}")
        right &= worst["shared"] < max(2 * worst["serial"], 1e-3 if precision == "fp32" else 0.05)
    return right


def without_dropout(setting: Setting) -> Setting:
    sizes = setting.network
    pairformer, msa = replace(sizes.pairformer, dropout=0.0), replace(sizes.msa, dropout=0.0)
    return replace(setting, network=replace(sizes, pairformer=pairformer, msa=msa))


# --------------------------------------------------------------------------------------------------
# Times


def measure(n: int, setting: Setting, repeats: int, folder: Path) -> Step:
    gc.collect()
    trainer = trainer_of(setting, folder)
    batch = shard_batch(sample(n), setting.peers) if setting.peers.size > 1 else sample(n)
    step = Steps(trainer, batch)
    began = time.perf_counter()
    loss = step()["loss"]
    say(f"    first step on {setting.peers.size}: {time.perf_counter() - began:.1f} s")
    on_gpu = setting.device.type == "cuda"
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds = median_ms(step, setting.device, repeats) / 1e3
    peak = torch.cuda.max_memory_allocated() / GIB if on_gpu else float("nan")
    alone = seconds
    if setting.peers.size > 1:
        with without_transfers():
            alone = median_ms(step, setting.device, repeats) / 1e3
    return Step(setting.peers.size, n, seconds, alone, peak, loss)


def atom_parts(n: int, setting: Setting, repeats: int) -> list[AtomPart]:
    """The parts that have atoms; every rank runs all of them at the same time, as in a step."""
    model, peers, sizes = network_of(setting), setting.peers, setting.network
    whole, part = (Atoms(model, length, setting) for length in (n, n // peers.size))

    def ms(function: Callable[[], Any]) -> float:
        return median_ms(function, setting.device, repeats)

    atoms = n // peers.size * ATOMS_PER_TOKEN
    of_tokens = gathers([n // peers.size * sizes.c_s], setting)
    of_atoms = gathers([atoms * sizes.c_atom, atoms * sizes.atom.n_keys * sizes.c_atompair], setting)
    with torch.autocast(setting.device.type, torch.bfloat16), ops.use_backend(model.backend):
        return [
            AtomPart("input embedder", n, ms(whole.embed), ms(part.embed), ms(of_tokens)),
            AtomPart("conditioner", n, ms(whole.condition), ms(part.condition), ms(of_atoms)),
            *(
                AtomPart(f"encoder and decoder, {copies} copies", n, ms(whole.denoise(copies)))
                for copies in (setting.training.n_copies, setting.training.n_copies // peers.size)
            ),
        ]


class Atoms:
    """The parts with atoms of a sample of ``n`` tokens."""

    def __init__(self, model: AlphaFold3, n: int, setting: Setting) -> None:
        device, sizes = setting.device, setting.network
        self._model, self._n, self._device = model, n, device
        self._batch = {name: value.to(device) for name, value in sample(n).items()}
        self._s = torch.randn(1, n, sizes.c_s, device=device, requires_grad=True)
        self._z = torch.randn(1, n, n, sizes.c_z, device=device, dtype=torch.bfloat16, requires_grad=True)
        self._tokens = sizes.c_token

    def embed(self) -> None:
        """The input embedder."""
        self._model.trunk.input_embedder(self._batch).float().sum().backward()

    def condition(self) -> None:
        """The conditioning of the atoms, which noised copies share."""
        atoms = self._model.diffusion.encoder.conditioner(self._batch, self._s, self._z)
        (atoms.c.float().sum() + atoms.p.float().sum()).backward()

    def denoise(self, copies: int) -> Callable[[], None]:
        """Encoder and decoder of so many noised copies."""
        diffusion = self._model.diffusion
        with torch.no_grad():
            atoms = diffusion.encoder.conditioner(self._batch, self._s, self._z)
        c, p = atoms.c.detach().requires_grad_(), atoms.p.detach().requires_grad_()
        atoms = replace(atoms, c=c, p=p)
        positions = torch.randn(1, copies, self._n * ATOMS_PER_TOKEN, 3, device=self._device)
        tokens = torch.randn(1, copies, self._n, self._tokens, device=self._device, requires_grad=True)

        def run() -> None:
            a, q = diffusion.encoder(atoms, positions)
            update = diffusion.decoder(tokens, q, atoms)
            (a.float().sum() + update.float().sum()).backward()

        return run


def gathers(sizes: list[int], setting: Setting) -> Callable[[], None]:
    """Gather a rank's shares of so many numbers, and the gradients' way back."""
    shares = [
        torch.ones(size, device=setting.device, dtype=torch.bfloat16, requires_grad=True) for size in sizes
    ]

    def run() -> None:
        for share in shares:
            collectives.all_gather(share, setting.peers, "atoms").sum().backward()

    return run


# --------------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--preset", default="af3")
    parser.add_argument("--blocks", type=int, help="at most so many in each stack; default: the preset's")
    parser.add_argument("--lengths", type=int, nargs="*", default=[512, 768])
    parser.add_argument("--copies", type=int, default=48)
    parser.add_argument("--check-length", type=int, default=67, help="0: no comparison")
    rank_options(parser)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device, backend, peers = join(arguments)
    training = TrainConfig(
        preset=arguments.preset,
        sp=peers.size,
        n_copies=arguments.copies,
        n_cycles=1,
        device=str(device),
        backend=backend,
        rollout_steps=0,
        cuda_graphs="off",  # ranks that share a sample have none
        warmup_steps=1_000_000,  # rates near 0: random weights must not run away
    )
    sizes = replace(model_preset(arguments.preset), confidence=None)  # which judges roll-outs
    if arguments.blocks:
        sizes = shallow(sizes, arguments.blocks)
    setting = Setting(device, sizes, training, peers)
    say(f"{describe(peers, device, backend)}, preset {arguments.preset}")
    with tempfile.TemporaryDirectory() as folder:
        ranks = arguments.ranks or [1, peers.size]
        steps = timed_steps(arguments.lengths, ranks, setting, arguments.repeats, Path(folder))
    parts = [part for n in arguments.lengths for part in atom_parts(n, setting, arguments.repeats)]
    say("length                           part       ms  shared, ms  its gather, ms")
    for part in parts:
        more = "" if part.shared_ms is None else f"  {part.shared_ms:10.2f}  {part.gather_ms:14.2f}"
        say(f"{part.length:6d}  {part.name:>27s}  {part.milliseconds:7.2f}{more}")
    if arguments.json and dist.get_rank() == 0:
        rows = {"steps": [asdict(step) for step in steps], "atoms": [asdict(part) for part in parts]}
        about = {"device": device_name(device), "torch": torch.__version__}
        about |= {"backend": backend, "preset": arguments.preset}
        arguments.json.write_text(json.dumps(about | rows, indent=1) + "\n")
    with tempfile.TemporaryDirectory() as folder:
        right = not arguments.check_length or check(arguments.check_length, setting, Path(folder))
    dist.destroy_process_group()
    if not right:
        sys.exit("the shared step is further off than the serial one")


def timed_steps(
    lengths: list[int], ranks: list[int], setting: Setting, repeats: int, folder: Path
) -> list[Step]:
    steps = []
    say("ranks  length       s  without transfers  peak GiB     loss")
    for n in lengths:
        for number in ranks:
            now = setting.alone() if number == 1 else setting
            if number == 1 and setting.peers.rank > 0:
                dist.barrier()
                continue
            step = measure(n, now, repeats, folder)
            steps.append(step)
            say(
                f"{step.ranks:5d}  {step.length:6d}  {step.seconds:6.3f}  {step.without_transfers_s:17.3f}"
                f"  {step.peak_gib:8.2f}  {step.loss:7.3f}"
            )
            if number == 1:
                dist.barrier()
    return steps


if __name__ == "__main__":
    main()
