"""The whole training step shared by ranks, in float64 on gloo ranks, against the serial one."""

from dataclasses import replace
from functools import cache

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from megafold.pipeline.schema import SAMPLE
from megafold.trainer.losses import LossWeights, TrainingLoss, training_loss
from megafold.trainer.model.model import AlphaFold3
from megafold.trainer.parallel import collectives, triangle
from megafold.trainer.parallel.batches import N_TOKEN, TOKEN_AXES, shard_batch
from megafold.trainer.parallel.mesh import ParallelMesh, Peers
from megafold.trainer.parallel.model import training_pass
from megafold.trainer.parallel.shards import Shards
from megafold.trainer.parallel.trunk import run_trunk
from tests.trainer.batches import random_batch
from tests.trainer.networks import MINI, as_dtype, mini_model
from tests.trainer.parallel_checks import error, peers_of, summed

WEIGHTS = LossWeights(bond=0.5)
N_CYCLES = 2
TOLERANCE = 1e-10


def batch_of(n: int, seed: int = 0) -> dict[str, Tensor]:
    """A sample of ``n`` tokens, one of them absent, with a bond between a ligand and a polymer."""
    batch = as_dtype(random_batch(seed, n, n_ligand=2, n_msa=4))
    batch["token_bonds"][0, 0, n - 1] = batch["token_bonds"][0, n - 1, 0] = True
    batch["token_mask"][0, 2] = False
    atoms = batch["atom_to_token"][0] == 2
    batch["atom_mask"][0, atoms] = batch["coords_mask"][0, atoms] = False
    batch["msa_mask"][0, 1, 3:] = False
    return batch


def network(*, recompute: bool = False) -> AlphaFold3:
    return mini_model(config=replace(MINI, activation_checkpointing=recompute)).train()


def gradients(model: AlphaFold3) -> dict[str, Tensor]:
    """Copies of the gradients, which are then cleared."""
    found = {
        name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
        for name, p in model.named_parameters()
    }
    model.zero_grad()
    return found


@cache
def serial_step(n: int, copies: int, seed: int = 0) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Values and gradients of a step of the serial model."""
    model, batch = network(), batch_of(n, seed)
    torch.manual_seed(11)
    generator = torch.Generator().manual_seed(12)
    outputs = model(batch, n_cycles=N_CYCLES, n_copies=copies, generator=generator)
    loss = training_loss(batch, outputs, WEIGHTS)
    loss.total.backward()
    return loss.values(), gradients(model)


def shared_loss(model: AlphaFold3, n: int, copies: int, peers: Peers, seed: int = 0) -> TrainingLoss:
    """This rank's part of the loss of the same step."""
    batch = shard_batch(batch_of(n, seed), peers)
    shards = Shards(peers, batch.pop(N_TOKEN))
    torch.manual_seed(11)
    generator = torch.Generator().manual_seed(12)
    own = training_pass(model, batch, shards, n_cycles=N_CYCLES, n_copies=copies, generator=generator)
    # The loop gathers the rows of the bonds; here all ranks know them.
    bonds = shard_batch(batch_of(n, seed), Peers(0, 1))["token_bonds"]
    missing = shards.n_padded - n
    batch["token_bonds"] = torch.nn.functional.pad(bonds, (0, missing, 0, missing))
    return training_loss(batch, own.outputs, WEIGHTS, own.share)


def check_step(
    size: int, n: int, copies: int, recompute: bool = False, left_out: str = ""
) -> dict[str, float]:
    """Errors of the parts of the loss and of every parameter's gradient."""
    peers = peers_of(size)
    if peers is None:
        return {}
    values, expected = serial_step(n, copies)
    model = network(recompute=recompute)
    loss = shared_loss(model, n, copies, peers)
    if left_out:
        with collectives.leave_out_backward(left_out):
            loss.total.backward()
    else:
        loss.total.backward()
    errors = {name: error(summed(value, peers), values[name]) for name, value in loss.values().items()}
    own = gradients(model)
    return errors | {name: error(summed(own[name], peers), expected[name]) for name in expected}


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


#: By operand only a few ranks multiply, by channels only more.
USES_OF_FOUR = {triangle.TO_CHANNELS, triangle.FROM_CHANNELS}


@pytest.mark.parametrize("name", sorted(collectives.USES))
def test_no_backward_can_be_left_out(rank_pool, name):
    results = rank_pool.run(check_step, 4 if name in USES_OF_FOUR else 2, 7, 3, False, name)
    assert max(worst(results).values()) > 1e-4


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
    own = gradients(model)
    return errors | {name: error(summed(own[name], peers), references[name]) for name in references}


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
    for name, gradient in gradients(model).items():
        dist.all_reduce(gradient)
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
