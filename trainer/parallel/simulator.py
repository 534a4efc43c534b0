"""Projects a training step on many GPUs from what was measured on one (``megafold simulate``).

Times of operators at a few lengths, bandwidths of links and bytes of memory come from a file, each with its
source; what the collectives move comes from the formulas of :mod:`~megafold.trainer.parallel.cost`, which
tests hold to counted bytes. No torch.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Final

import numpy as np
from scipy.optimize import nnls

from megafold.trainer.errors import ConfigError
from megafold.trainer.parallel import cost

GIB: Final = 2**30
_BF16, _FP32 = 2, 4


@dataclass(frozen=True, kw_only=True)
class Operator:
    """An operator of a pair block on one GPU.

    Attributes:
        source: where the figures are from.
        per_block: how often a block runs it.
        lengths: N, at least two.
        forward_ms: time of a forward pass at each length.
        both_ms: time of a forward and backward pass.
        hides_bias: runs while the bias of triangle attention is on its way.
    """

    source: str
    per_block: int
    lengths: tuple[int, ...]
    forward_ms: tuple[float, ...]
    both_ms: tuple[float, ...]
    hides_bias: bool = False

    def forward_at(self, n: int) -> float:
        """Milliseconds of a forward pass at length ``n``: a·N² + b·N³ through the measured ones."""
        return _fit(self.lengths, self.forward_ms, n)

    def both_at(self, n: int) -> float:
        """Milliseconds of a forward and backward pass."""
        return _fit(self.lengths, self.both_ms, n)


@dataclass(frozen=True, kw_only=True)
class Network:
    """Sizes; the defaults are AF3's. ``n_template_blocks`` counts a block once for each template.

    ``n_confidence`` blocks judge a structure that ``rollout_steps`` passes of the diffusion module predict.
    """

    n_pairformer: int = 48
    n_confidence: int = 4
    n_pde_bins: int = 64
    rollout_steps: int = 20
    n_msa: int = 4
    n_template_blocks: int = 8
    c_template: int = 64
    c_z: int = 128
    c_triangle: int = 128
    n_head: int = 4
    c_s: int = 384
    n_copies: int = 48
    mean_cycles: float = 2.5
    parameters_million: float = 368.4


@dataclass(frozen=True, kw_only=True)
class Links:
    """What a GPU sends per second, in GB: within a node of ``gpus_per_node``, and to other nodes."""

    source: str
    gpus_per_node: int
    within_node_gb_s: float
    between_nodes_gb_s: float
    latency_us: float


@dataclass(frozen=True, kw_only=True)
class Phase:
    """What a phase of a step holds for every pair of tokens.

    Attributes:
        source: where the figures are from.
        shared_bytes: divided by P.
        unshared_bytes: on every rank.
    """

    source: str
    shared_bytes: float
    unshared_bytes: float


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Memory of a GPU, and what a training step needs of it.

    Attributes:
        gpu_gib: of a GPU.
        fixed_gib: weights, gradients, optimizer, average.
        phases: the phases of a step that may need most, by name.
    """

    gpu_gib: float
    fixed_gib: float
    phases: Mapping[str, Phase]

    def needed(self, n: int, p: int) -> float:
        """GiB at length ``n`` on each of ``p`` ranks: of the phase that needs most."""
        pair = max(phase.shared_bytes / p + phase.unshared_bytes for phase in self.phases.values())
        return self.fixed_gib + n**2 * pair / GIB

    def longest(self, p: int) -> int:
        """The greatest length that fits on ``p`` ranks: a multiple of p, as others are padded to one."""
        low, high = 0, 1
        while self.needed(high, p) <= self.gpu_gib:
            high *= 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.needed(middle, p) <= self.gpu_gib else (low, middle)
        return low // p * p


@dataclass(frozen=True, kw_only=True)
class Diffusion:
    """The diffusion module on one GPU.

    Attributes:
        source: where the figures are from.
        lengths: N, at least two.
        copies_ms: all noised copies forward, forward again and backward, at each length.
        rollout_step_ms: one copy forward.
        replicated_share: the part of ``copies_ms`` that all ranks do alike, whatever their copies.
    """

    source: str
    lengths: tuple[int, ...]
    copies_ms: tuple[float, ...]
    rollout_step_ms: tuple[float, ...]
    replicated_share: float

    def copies_at(self, n: int) -> float:
        """Milliseconds at length ``n``: a + b·N + c·N² through the measured ones."""
        return _fit(self.lengths, self.copies_ms, n, powers=(0, 1, 2))

    def rollout_step_at(self, n: int) -> float:
        """Milliseconds of a step."""
        return _fit(self.lengths, self.rollout_step_ms, n, powers=(0, 1, 2))


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """All that a projection rests on. Without operators and links only lengths are projected."""

    name: str
    memory: Memory
    baseline_length: int | None = None
    network: Network = Network()
    operators: Mapping[str, Operator] | None = None
    links: Links | None = None
    diffusion: Diffusion | None = None


@dataclass(frozen=True, kw_only=True)
class Projection:
    """A training step of one sample of ``tokens`` on ``sp`` GPUs, and of ``dp`` samples at once.

    Attributes:
        gpus: sp · dp.
        sp: ranks that share a sample.
        tokens: N.
        memory_gib: on each GPU.
        compute_s: without any transfer.
        exposed_s: transfers that no computation hides, gradients between groups included.
        sent_gib: what a rank sends for its sample.
    """

    gpus: int
    sp: int
    tokens: int
    memory_gib: float
    compute_s: float
    exposed_s: float
    sent_gib: float

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        return self.compute_s + self.exposed_s

    @property
    def samples_per_s(self) -> float:
        """Of all groups."""
        return self.gpus // self.sp / self.step_s


def _fit(lengths: Sequence[int], values: Sequence[float], n: int, powers: tuple[int, ...] = (2, 3)) -> float:
    terms = np.array([[float(length) ** power for power in powers] for length in lengths])
    # Relative errors count, or the longest length would be all that is fitted.
    weights = 1 / np.array(values, dtype=float)
    factors, _ = nnls(terms * weights[:, None], np.ones(len(values)))
    return float(factors @ np.array([float(n) ** power for power in powers]))


def project(inputs: Inputs, *, gpus: int, sp: int, tokens: int) -> Projection:
    """A step with recomputed blocks, as the network's presets have them.

    Raises:
        ConfigError: the inputs have no times or links, or ``sp`` does not divide ``gpus``.
    """
    if inputs.operators is None or inputs.links is None or inputs.diffusion is None:
        raise ConfigError(f"{inputs.name}: no operators, links and diffusion, so no times can be projected")
    if sp < 1 or gpus % sp:
        raise ConfigError(f"sp is {sp}, which does not divide {gpus} GPUs")
    network = inputs.network
    n = sp * -(-tokens // sp)
    blocks = network.n_pairformer + network.n_msa
    # A narrower block of a template is taken to cost what its channels say.
    blocks_in_all = blocks + network.n_template_blocks * network.c_template / network.c_z
    forward = sum(op.per_block * op.forward_at(n) for op in inputs.operators.values()) / sp
    both = sum(op.per_block * op.both_at(n) for op in inputs.operators.values()) / sp
    # Blocks with gradients run forward, forward again, and backward; those of other cycles forward.
    learning = blocks_in_all + network.n_confidence
    once = blocks_in_all * (network.mean_cycles - 1)
    blocks_ms = once * forward + learning * (forward + both)
    compute_s = (blocks_ms + _diffusion_ms(inputs.diffusion, network, n, sp)) / 1e3

    exposed, sent = _block_transfers(inputs, n, sp)
    exposed_ms, sent_bytes = (
        once * by["forward"] + learning * (2 * by["forward"] + by["backward"]) for by in (exposed, sent)
    )
    pair = network.c_z * n**2 * (sp - 1) / sp
    pde = cost.rotation(n, network.n_pde_bins, sp) if network.n_confidence else 0.0
    # z to the diffusion module and its gradient back, z to the roll-out, PDE's logits and their gradient.
    others = [
        pair * _BF16,
        pair * _FP32,
        *([pair * _BF16] if network.rollout_steps else []),
        *[pde * _BF16] * 2,
    ]
    for size in others:
        exposed_ms += transfer_ms(inputs.links, size, sp, 1)
        sent_bytes += size
    gradients = 2 * network.parameters_million * 1e6 * _FP32 * (gpus - 1) / gpus
    exposed_ms += transfer_ms(inputs.links, gradients, gpus, 2)
    return Projection(
        gpus=gpus,
        sp=sp,
        tokens=tokens,
        memory_gib=inputs.memory.needed(n, sp),
        compute_s=compute_s,
        exposed_s=exposed_ms / 1e3,
        sent_gib=sent_bytes / GIB,
    )


def _diffusion_ms(diffusion: Diffusion, network: Network, n: int, sp: int) -> float:
    """All noised copies forward, again, and backward, and the one of the roll-out forward, on every rank."""
    copies = -(-network.n_copies // sp) / network.n_copies
    share = diffusion.replicated_share + (1 - diffusion.replicated_share) * copies
    return diffusion.copies_at(n) * share + network.rollout_steps * diffusion.rollout_step_at(n)


def block_bytes(network: Network, n: int, p: int) -> dict[str, dict[str, float]]:
    """Bytes that a rank sends in one Pairformer block in bfloat16: by direction, then by use."""
    if p == 1:
        return {"forward": {}, "backward": {}}
    if cost.choose_triangle_scheme(n, network.c_triangle, p) == "operand":
        multiplication = 2 * cost.operand_gather(n, network.c_triangle, p)
    else:
        multiplication = 2 * cost.channel_exchange(n, network.c_triangle, p)
    bias = 2 * cost.bias_gather(n, network.n_head, p)
    single = n * network.c_s * (p - 1) / p
    both = {
        "multiplication": _BF16 * multiplication,
        "rotation": _BF16 * 2 * cost.rotation(n, network.c_z, p),
    }
    return {
        "forward": {**both, "bias": _BF16 * bias, "single": _BF16 * single},
        "backward": {**both, "bias": _FP32 * bias, "single": _FP32 * 2 * single},
    }


#: Collectives of a block in each direction, by use.
_CALLS: Final = {"multiplication": 4, "rotation": 2, "bias": 2, "single": 1}


def _block_transfers(inputs: Inputs, n: int, p: int) -> tuple[dict[str, float], dict[str, float]]:
    """Exposed milliseconds, and bytes sent, of a block's forward and backward."""
    assert inputs.links is not None
    assert inputs.operators is not None
    hiding = [op for op in inputs.operators.values() if op.hides_bias]
    work = {
        "forward": sum(op.per_block * op.forward_at(n) for op in hiding) / p,
        "backward": sum(op.per_block * (op.both_at(n) - op.forward_at(n)) for op in hiding) / p,
    }
    exposed, sent = {}, {}
    for direction, uses in block_bytes(inputs.network, n, p).items():
        times = {use: transfer_ms(inputs.links, size, p, _CALLS[use]) for use, size in uses.items()}
        if "bias" in times:
            times["bias"] = max(0.0, times["bias"] - work[direction])
        exposed[direction], sent[direction] = sum(times.values()), sum(uses.values())
    return exposed, sent


def transfer_ms(links: Links, sent: float, p: int, calls: int) -> float:
    """Time of collectives among ``p`` ranks of which each sends ``sent`` bytes."""
    if p == 1:
        return 0.0
    within = min(p, links.gpus_per_node)
    # Of p - 1 partners so many are on other nodes; both kinds of link work at once.
    away = (p - within) / (p - 1)
    seconds = max(sent * (1 - away) / links.within_node_gb_s, sent * away / links.between_nodes_gb_s) / 1e9
    return 1e3 * seconds + calls * links.latency_us / 1e3


def longest(memory: Memory, gpus: int) -> tuple[int, int]:
    """The longest sample that up to ``gpus`` GPUs hold, and on how many: a power of two of them, or all.

    Padding to a multiple of P can make fewer GPUs hold more.

    Returns:
        Tokens, and P.
    """
    candidates = [2**power for power in range(gpus.bit_length())] + [gpus]
    tokens, negative = max((memory.longest(p), -p) for p in candidates if p <= gpus)
    return tokens, -negative


def smallest_sp(inputs: Inputs, tokens: int, gpus: int) -> int | None:
    """The least power of two of ranks on which ``tokens`` fit; None: not on ``gpus``."""
    sp = 1
    while sp <= gpus:
        if inputs.memory.needed(sp * -(-tokens // sp), sp) <= inputs.memory.gpu_gib:
            return sp
        sp *= 2
    return None


# --------------------------------------------------------------------------------------------------
# Files


def bundled() -> dict[str, Path]:
    """The inputs that come with the package, by name."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "inputs").glob("*.json"))}


def read_inputs(path: Path) -> Inputs:
    """Inputs from a JSON file; see the bundled ones for its form.

    Raises:
        ConfigError: it cannot be read, or an entry is missing, unknown or wrong; the message names it.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no readable JSON ({error})") from error
    values = _object(values, str(path))
    groups = {"network": Network, "links": Links}
    made: dict[str, Any] = {key: value for key, value in values.items() if key not in groups}
    for name, group in groups.items():
        if name in values:
            made[name] = _make(group, values[name], f"{path}: {name}")
    if "memory" in values:
        memory = _object(values["memory"], f"{path}: memory")
        phases = {
            name: _make(Phase, value, f"{path}: memory.phases.{name}")
            for name, value in _object(memory.get("phases", {}), f"{path}: memory.phases").items()
        }
        if not phases:
            raise ConfigError(f"{path}: memory.phases: give one phase at least")
        made["memory"] = _make(Memory, {**memory, "phases": phases}, f"{path}: memory")
    if "operators" in values:
        made["operators"] = {
            name: _measured(Operator, value, f"{path}: operators.{name}", ("forward_ms", "both_ms"))
            for name, value in _object(values["operators"], f"{path}: operators").items()
        }
    if "diffusion" in values:
        made["diffusion"] = _measured(
            Diffusion, values["diffusion"], f"{path}: diffusion", ("copies_ms", "rollout_step_ms")
        )
    return _make(Inputs, made, str(path))


def _measured(group: Any, values: Any, where: str, times: tuple[str, str]) -> Any:
    """A group that has ``times`` at ``lengths``."""
    read = {
        key: tuple(value) if isinstance(value, list) else value
        for key, value in _object(values, where).items()
    }
    made = _make(group, read, where)
    columns = [getattr(made, name) for name in ("lengths", *times)]
    positive = all(
        isinstance(column, tuple) and all(_is_number(number) and number > 0 for number in column)
        for column in columns
    )
    if not positive or len(made.lengths) < 2 or len({*map(len, columns)}) > 1:
        raise ConfigError(f"{where}: give positive {' and '.join(times)} for each of two lengths or more")
    return made


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _object(values: Any, where: str) -> dict[str, Any]:
    if not isinstance(values, dict):
        raise ConfigError(f"{where}: give an object, not {values!r}")
    return values


def _make(group: Any, values: Any, where: str) -> Any:
    values = _object(values, where)
    known = {item.name: item for item in fields(group)}
    unknown = sorted(set(values) - set(known))
    missing = [name for name, item in known.items() if item.default is MISSING and name not in values]
    if unknown or missing:
        wrong = [f"{', '.join(unknown)} is unknown"] if unknown else []
        wrong += [f"{', '.join(missing)} is missing"] if missing else []
        raise ConfigError(f"{where}: {'; '.join(wrong)}; it takes {', '.join(known)}")
    for name, value in values.items():
        if known[name].type in (int, float) and not _is_number(value):
            raise ConfigError(f"{where}: {name} is {value!r}: give a number")
    return group(**values)
