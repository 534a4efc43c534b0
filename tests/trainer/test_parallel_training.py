"""The whole training step shared by ranks, in float64 on gloo ranks, against the serial one."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from typing import Any, ClassVar, cast

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megafold.pipeline.schema import SAMPLE
from megafold.trainer import ops
from megafold.trainer.losses import LossWeights, TrainingLoss, training_loss
from megafold.trainer.mini_rollout import MiniRollout
from megafold.trainer.model.config import ModelConfig
from megafold.trainer.model.model import AlphaFold3
from megafold.trainer.model.pairformer import PairformerBlock
from megafold.trainer.ops import registry
from megafold.trainer.parallel import collectives, pairformer, triangle
from megafold.trainer.parallel.batches import N_TOKEN, TOKEN_AXES, shard_batch
from megafold.trainer.parallel.mesh import ParallelMesh, Peers
from megafold.trainer.parallel.model import training_pass
from megafold.trainer.parallel.shards import Shards
from megafold.trainer.parallel.trunk import run_trunk
from tests.trainer.batches import random_batch
from tests.trainer.networks import MINI_JUDGING, as_dtype, mini_model
from tests.trainer.parallel_checks import all_summed, error, peers_of

WEIGHTS = LossWeights(bond=0.5, confidence=0.3, pae=0.8)
#: Nothing is exchanged.
ROLLOUT = MiniRollout((), n_steps=3, judged=True)
N_CYCLES = 2
TOLERANCE = 1e-10


def batch_of(n: int, seed: int = 0, samples: int = 1) -> dict[str, Tensor]:
    """Samples of ``n`` tokens; the first lacks one, and has a bond between a ligand and a polymer."""
    batch = as_dtype(random_batch(seed, n, n_ligand=2, n_msa=4, batch_size=samples))
    batch["token_bonds"][0, 0, n - 1] = batch["token_bonds"][0, n - 1, 0] = True
    batch["token_mask"][0, 2] = False
    atoms = batch["atom_to_token"][0] == 2
    batch["atom_mask"][0, atoms] = batch["coords_mask"][0, atoms] = False
    batch["msa_mask"][0, 1, 3:] = False
    return batch


def network(*, recompute: bool = False) -> AlphaFold3:
    return mini_model(config=replace(MINI_JUDGING, activation_checkpointing=recompute)).train()


def gradients(model: AlphaFold3) -> dict[str, Tensor]:
    """Copies of the gradients, which are then cleared."""
    found = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }
    model.zero_grad()
    return found


@cache
def serial_step(
    n: int, copies: int, seed: int = 0, samples: int = 1
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Values and gradients of a step of the serial model."""
    model, batch = network(), batch_of(n, seed, samples)
    torch.manual_seed(11)
    generator = torch.Generator().manual_seed(12)
    trunk = model.run_trunk(batch, n_cycles=N_CYCLES)
    batch, predicted = ROLLOUT.settle(
        batch, lambda steps: model.rollout(batch, trunk, n_samples=1, n_steps=steps, generator=generator)
    )
    outputs = model.denoise_copies(batch, trunk, n_copies=copies, generator=generator)
    outputs = replace(outputs, confidence=model.judge(batch, trunk, predicted))
    loss = training_loss(batch, outputs, WEIGHTS)
    loss.total.backward()
    return loss.values(), gradients(model)


def shared_loss(
    model: AlphaFold3, n: int, copies: int, peers: Peers, seed: int = 0, samples: int = 1
) -> TrainingLoss:
    """This rank's part of the loss of the same step."""
    batch = shard_batch(batch_of(n, seed, samples), peers)
    shards = Shards(peers, batch.pop(N_TOKEN))
    torch.manual_seed(11)
    generator = torch.Generator().manual_seed(12)
    settings: dict[str, Any] = {"n_cycles": N_CYCLES, "n_copies": copies, "generator": generator}
    own = training_pass(model, batch, shards, **settings, mini_rollout=ROLLOUT)
    # The loop gathers the rows of the bonds; here all ranks know them.
    bonds = shard_batch(batch_of(n, seed, samples), Peers(0, 1))["token_bonds"]
    missing = shards.n_padded - n
    batch["token_bonds"] = torch.nn.functional.pad(bonds, (0, missing, 0, missing))
    return training_loss(batch, own.outputs, WEIGHTS, own.share)


def check_step(
    size: int, n: int, copies: int, recompute: bool = False, left_out: str = "", samples: int = 1
) -> dict[str, float]:
    """Errors of the parts of the loss and of every parameter's gradient."""
    peers = peers_of(size)
    if peers is None:
        return {}
    values, expected = serial_step(n, copies, samples=samples)
    model = network(recompute=recompute)
    loss = shared_loss(model, n, copies, peers, samples=samples)
    if left_out:
        with collectives.leave_out_backward(left_out):
            loss.total.backward()
    else:
        loss.total.backward()
    errors = {name: error(value, values[name]) for name, value in all_summed(loss.values(), peers).items()}
    own = all_summed(gradients(model), peers)
    return errors | {name: error(own[name], expected[name]) for name in expected}


def worst(results: list[dict[str, float]]) -> dict[str, float]:
    return {key: value for result in results for key, value in result.items() if not value < TOLERANCE}


@pytest.mark.parametrize(
    ("size", "n", "copies", "recompute"),
    [(1, 7, 3, False), (2, 7, 3, False), (2, 7, 3, True), (3, 7, 4, False), (4, 7, 3, True)],
)
def test_a_step_is_that_of_the_serial_model(rank_pool, size, n, copies, recompute):
    """Tokens and copies that do not divide by the ranks, dropout, absent tokens; recomputed or not."""
    results = rank_pool.run(check_step, size, n, copies, recompute)
    assert len(results[0]) > 300
    assert worst(results) == {}


def test_a_step_of_two_samples_is_that_of_the_serial_model(rank_pool):
    results = rank_pool.run(check_step, 3, 7, 2, True, "", 2)
    assert len(results[0]) > 300
    assert worst(results) == {}


def check_compiled(size: int, n: int, copies: int) -> dict[str, float]:
    """A recomputed step on back end ``compile``, traced by Dynamo as there, run without the C++ compiler."""
    peers = peers_of(size)
    if peers is None:
        return {}
    model = mini_model(config=replace(shallow(1), activation_checkpointing=True)).train()

    def step() -> tuple[TrainingLoss, dict[str, Tensor]]:
        loss = shared_loss(model, n, copies, peers)
        loss.total.backward()
        return loss, gradients(model)

    eager, expected = step()
    model.backend = "compile"
    with ops.use_backend("compile"):
        pass  # its implementations register themselves
    compiled = {
        name: torch.compile(op.naive, backend="eager", dynamic=False)
        for name, op in registry.operators().items()
    }
    before = dict(registry._implementations)
    ran = Counter[str]()

    def counted(name: str) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            ran[name] += 1
            return compiled[name](*args, **kwargs)

        return run

    for name in compiled:
        registry._implementations[name, "compile"] = registry._Implementation(counted(name), None)
    try:
        loss, own = step()
    finally:
        registry._implementations.clear()
        registry._implementations.update(before)
    assert ran.keys() >= {"evoattention", "transition", "layernorm_linear"}
    errors = {name: error(value, eager.values()[name]) for name, value in loss.values().items()}
    return errors | {name: error(own[name], expected[name]) for name in expected}


@pytest.mark.slow
@pytest.mark.exhaustive
def test_a_step_on_compiled_operators_is_that_of_the_eager_ones(rank_pool):
    results = rank_pool.run(check_compiled, 2, 7, 3)
    assert len(results[0]) > 250
    assert worst(results) == {}


#: By operand only a few ranks multiply, by channels only more.
USES_OF_FOUR = {triangle.TO_CHANNELS, triangle.FROM_CHANNELS}


@pytest.mark.parametrize("name", sorted(collectives.USES))
def test_no_backward_can_be_left_out(rank_pool, name):
    results = rank_pool.run(check_step, 4 if name in USES_OF_FOUR else 2, 7, 3, False, name)
    assert max(worst(results).values()) > 1e-4


def shallow(n_block: int) -> ModelConfig:
    """So many blocks of the Pairformer and of the MSA module; one of the diffusion module."""
    diffusion = replace(MINI_JUDGING.diffusion, n_block=1)
    return replace(MINI_JUDGING, n_pairformer=n_block, n_msa=n_block, diffusion=diffusion)


def check_each_left_out(size: int, n_block: int, uses: set[str]) -> dict[str, list[float]]:
    """How far gradients are off when one collective's backward is left out, each of the step's in turn."""
    peers = peers_of(size)
    if peers is None:
        return {}
    model = mini_model(config=shallow(n_block)).train()
    seen: dict[str, Tensor] = {}

    # What the first block gives back of s: parts that add up without its all_reduce, but must be alike.
    def keep(_: Any, __: Any, gradients: Any) -> None:
        seen["ds"] = gradients[0].clone()

    def keep_of_head(_: Any, __: Any, gradients: Any) -> None:
        seen["ds of the head"] = gradients[0].clone()

    model.trunk.linear_s_init.register_full_backward_hook(keep)
    # Which gives nothing back: what its first block would have given of the s that it normalised.
    head = model.confidence
    assert head is not None
    first = cast(PairformerBlock, head.pairformer.blocks[0])
    first.attention.norm.register_full_backward_hook(keep_of_head)

    loss = shared_loss(model, 6, 2, peers)

    def step(name: str = "", turn: int = 0) -> tuple[dict[str, Tensor], Counter[str]]:
        left_out = collectives.leave_out_backward(name, turn) if name else nullcontext()
        with collectives.record_traffic() as records, left_out:
            loss.total.backward(retain_graph=True)
        return all_summed(gradients(model), peers) | seen, Counter(record.use for record in records)

    right, calls = step()
    calls[pairformer.RESULT] = n_block + 1  # whose backward sends nothing
    off = {
        name: [max(error(x, right[key]) for key, x in step(name, turn)[0].items()) for turn in range(number)]
        for name, number in sorted(calls.items())
        if name in uses
    }
    assert max(error(x, right[key]) for key, x in step()[0].items()) < TOLERANCE
    return off


@pytest.mark.slow
@pytest.mark.parametrize(("size", "n_block"), [(2, 2), (4, 1)])
def test_no_single_backward_can_be_left_out(rank_pool, size, n_block):
    """Not of both attentions, not of all blocks: of one call."""
    uses = collectives.USES.keys() - USES_OF_FOUR if size == 2 else USES_OF_FOUR
    off = rank_pool.run(check_each_left_out, size, n_block, set(uses))[0]
    assert off.keys() == uses
    triangles = 2 * n_block + MINI_JUDGING.n_template + 1  # that of the confidence head
    expected = {triangle.BIAS: 2 * triangles, pairformer.KEYS_VALUES: n_block + 1}
    expected |= {triangle.OPERAND: triangles, triangle.PRODUCT: triangles}
    expected |= dict.fromkeys(USES_OF_FOUR, 2 * triangles)
    for name in expected.keys() & uses:
        assert len(off[name]) == expected[name]
    unnoticed = {(name, turn) for name, each in off.items() for turn, x in enumerate(each) if not x > 1e-6}
    assert unnoticed == set()


class Seen(TorchDispatchMode):
    """Every collective that is called within, through whatever function."""

    KINDS: ClassVar[dict[str, str]] = {
        "alltoall_base_": "all_to_all",
        "_allgather_base_": "all_gather",
        "_reduce_scatter_base_": "reduce_scatter",
        "allreduce_": "all_reduce",
    }

    def __init__(self) -> None:
        super().__init__()
        self.kinds: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = function.overloadpacket.__name__
        # The judged structure is sent to all without a gradient.
        if "c10d" in function.namespace and name != "broadcast_":
            self.kinds.append(self.KINDS.get(name, name))
        return function(*args, **(kwargs or {}))


def check_all_are_registered(size: int) -> tuple[list[str], list[str]]:
    """What a step calls, and what is recorded of it."""
    peers = peers_of(size)
    if peers is None:
        return [], []
    model = network(recompute=True)
    with collectives.record_traffic() as records, Seen() as seen:
        shared_loss(model, 7, 3, peers).total.backward()
    return seen.kinds, [record.kind for record in records]


@pytest.mark.parametrize("size", [2, 4])
def test_no_collective_goes_round_the_registry(rank_pool, size):
    """A new one without a use would be in no test that leaves backwards out."""
    for called, recorded in rank_pool.run(check_all_are_registered, size)[:size]:
        assert called == recorded
        assert len(called) > 50


def check_trunk(size: int, n: int) -> dict[str, float]:
    """Outputs of a trunk of two blocks, and gradients of its parameters from all three."""
    peers = peers_of(size)
    if peers is None:
        return {}
    model, whole = network(), batch_of(n)
    torch.manual_seed(4)
    expected = model.run_trunk(whole, n_cycles=N_CYCLES)
    (expected.z_trunk.cos().sum() + expected.s_trunk.sin().sum()).backward()
    references = gradients(model)

    batch = shard_batch(whole, peers)
    shards = Shards(peers, batch.pop(N_TOKEN))
    torch.manual_seed(4)
    out = run_trunk(model.trunk, batch, N_CYCLES, shards)
    rows = slice(shards.rows.start, min(n, shards.rows.stop))
    z, logits = (x[:, : len(range(n)[rows]), :n] for x in (out.z_trunk, out.distogram_logits))
    (z.cos().sum() + out.s_trunk[:, :n].sin().sum() / size).backward()
    errors = {
        "z": error(z, expected.z_trunk[:, rows]),
        "s": error(out.s_trunk[:, :n], expected.s_trunk),
        "distogram": error(logits, expected.distogram_logits[:, rows]),
    }
    own = all_summed(gradients(model), peers)
    return errors | {name: error(own[name], references[name]) for name in references}


@pytest.mark.parametrize(("size", "n"), [(1, 6), (2, 7), (3, 5), (4, 6)])
def test_a_trunk_of_two_blocks_is_the_serial_one(rank_pool, size, n):
    assert worst(rank_pool.run(check_trunk, size, n)) == {}


def check_two_by_two(n: int, copies: int) -> dict[str, float]:
    """DP × SP = 2 × 2: the gradient is the mean of two samples', each summed over two ranks."""
    mesh = ParallelMesh.create(torch.device("cpu"), 2)
    assert (mesh.dp, mesh.sp.size) == (2, 2)
    assert dist.get_rank() == 2 * mesh.dp_rank + mesh.sp.rank
    model = network()
    shared_loss(model, n + mesh.dp_rank, copies, mesh.sp, seed=mesh.dp_rank).total.backward()
    errors = {}
    samples = [serial_step(n + seed, copies, seed)[1] for seed in range(2)]
    everyone = Peers(dist.get_rank(), 4, dist.group.WORLD)
    for name, gradient in all_summed(gradients(model), everyone).items():
        errors[name] = error(gradient / 2, (samples[0][name] + samples[1][name]) / 2)
    return errors


def test_two_groups_of_two_ranks(rank_pool):
    results = rank_pool.run(check_two_by_two, 6, 3)
    assert len(results[3]) > 300
    assert worst(results) == {}


def check_order(size: int) -> list[tuple[str, str, bool, int]]:
    """The collectives of a step with recomputation, in their order."""
    peers = peers_of(size)
    if peers is None:
        return []
    model = network(recompute=True)
    with collectives.record_traffic() as records:
        shared_loss(model, 7, 3, peers).total.backward()
    return [(r.use, r.kind, r.backward, r.sent) for r in records]


def test_ranks_call_the_same_collectives_in_the_same_order(rank_pool):
    """Recomputed ones too; of every use there is one in each direction."""
    first, *others = rank_pool.run(check_order, 4)
    assert all(other == first for other in others)
    backward = [name for name, _, backwards, _ in first if backwards]
    forward = [name for name, _, backwards, _ in first if not backwards]
    assert len(backward) > len(forward) / N_CYCLES
    assert set(forward) | set(backward) == set(collectives.USES) - {triangle.OPERAND, triangle.PRODUCT}


def test_token_features_are_those_of_the_schema():
    expected = {}
    for feature in SAMPLE:
        axes = tuple(1 + place for place, axis in enumerate(feature.axes) if axis == "N_token")
        if axes:
            expected[feature.name] = axes
    assert dict(TOKEN_AXES) == expected


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_a_batch_is_cut_into_rows(size):
    batch = batch_of(7)
    parts = [shard_batch(batch, Peers(rank, size)) for rank in range(size)]
    padded = -(-7 // size) * size
    bonds = torch.cat([part["token_bonds"] for part in parts], 1)
    assert bonds.shape == (1, padded, padded)
    assert torch.equal(bonds[:, :7, :7], batch["token_bonds"])
    assert bonds.sum() == batch["token_bonds"].sum()
    for part in parts:
        assert part[N_TOKEN] == 7
        assert part["token_bonds"].untyped_storage().nbytes() == padded * padded // size
        assert part["token_mask"].shape == (1, padded)
        assert torch.equal(part["coords"], batch["coords"])
        assert part["msa"].shape == (1, 4, padded)
        assert not part["token_mask"][:, 7:].any()
        assert not part["msa_mask"][:, :, 7:].any()
