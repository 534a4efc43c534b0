"""Collectives over real gloo ranks: values against indexing of the whole tensor, gradients by gradcheck."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megafold.trainer.parallel import collectives
from megafold.trainer.parallel.mesh import Peers
from tests.trainer.parallel_checks import gradcheck_over_ranks, peers_of, rand

NAME = "test"


#: Function of a rank's tensor, the shape of that, and its value in terms of all ranks' tensors.
Case = tuple[
    Callable[[Tensor, Peers], Tensor],
    Callable[[int], tuple[int, ...]],
    Callable[[list[Tensor], int], Tensor],
]

CASES: dict[str, Case] = {
    "all_to_all": (
        lambda x, peers: collectives.all_to_all(x, peers, NAME),
        lambda size: (size, 2),
        lambda all_x, rank: torch.stack([x[rank] for x in all_x]),
    ),
    "transpose": (
        lambda x, peers: collectives.transpose(x, peers, NAME),
        lambda size: (1, 2, 2 * size, 1),
        lambda all_x, rank: torch.cat(all_x, 1).transpose(1, 2)[:, 2 * rank : 2 * rank + 2],
    ),
    "all_gather": (
        lambda x, peers: collectives.all_gather(x, peers, NAME),
        lambda size: (2, 2),
        lambda all_x, rank: torch.stack(all_x),
    ),
    "gather_rows": (
        lambda x, peers: collectives.gather_rows(x, 1, peers, NAME),
        lambda size: (2, 2),
        lambda all_x, rank: torch.cat(all_x, 1),
    ),
    "gather_operand": (
        lambda x, peers: collectives.gather_operand(x, peers, NAME),
        lambda size: (2, 2),
        lambda all_x, rank: torch.stack(all_x),
    ),
    "sum_scatter": (
        lambda x, peers: collectives.sum_scatter(x, peers, NAME),
        lambda size: (size, 3),
        lambda all_x, rank: torch.stack([x[rank] for x in all_x]).sum(0),
    ),
}


def check_value(name: str, size: int) -> bool:
    peers = peers_of(size)
    if peers is None:
        return True
    function, shape, expected = CASES[name]
    inputs = [rand(*shape(size), seed=rank) for rank in range(size)]
    return torch.equal(function(inputs[peers.rank], peers), expected(inputs, peers.rank))


def check_gradient(name: str, size: int) -> bool:
    peers = peers_of(size)
    if peers is None:
        return True
    function, shape, _ = CASES[name]
    return gradcheck_over_ranks(lambda x: function(x, peers), rand(size, *shape(size)), peers)


def check_forgotten(name: str, size: int) -> str:
    """What gradcheck says when the backward pass is left out."""
    peers = peers_of(size)
    if peers is None:
        return "Jacobian mismatch"
    collectives.USES.setdefault(NAME, "")
    with collectives.leave_out_backward(NAME):
        try:
            check_gradient(name, size)
        except RuntimeError as error:
            return str(error)
    return ""


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("name", sorted(CASES))
def test_values_are_those_of_the_whole_tensor(rank_pool, name, size):
    assert all(rank_pool.run(check_value, name, size))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("name", sorted(CASES))
def test_gradients_are_those_of_all_ranks(rank_pool, name, size):
    assert all(rank_pool.run(check_gradient, name, size))


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_backward_that_forgets_the_others_is_noticed(rank_pool, name):
    assert all("Jacobian mismatch" in text for text in rank_pool.run(check_forgotten, name, 2))


def check_alike(size: int) -> tuple[bool, bool, bool]:
    """Rows gathered, changed by all alike, and used by each rank in another way."""
    peers = peers_of(size)
    if peers is None:
        return True, True, True
    rows = [rand(2, 3, seed=rank) for rank in range(size)]
    weights = [rand(2 * size, 3, seed=10 + rank) for rank in range(size)]

    own = rows[peers.rank].clone().requires_grad_()
    gathered = collectives.gather_alike(own, 0, peers, NAME)
    gathered.retain_grad()
    entered = collectives.enter_shards(gathered.sin(), peers, NAME)
    # One part of the loss is computed by all ranks alike, each counting a share.
    (weights[peers.rank] * entered).sum().add(gathered.cos().sum() / size).backward()

    whole = torch.cat(rows).requires_grad_()
    (sum(weights) * whole.sin()).sum().add(whole.cos().sum()).backward()
    assert own.grad is not None
    assert gathered.grad is not None
    assert whole.grad is not None
    return (
        torch.equal(gathered, torch.cat(rows)),
        torch.allclose(own.grad, whole.grad[2 * peers.rank : 2 * peers.rank + 2], rtol=1e-12, atol=1e-12),
        torch.allclose(gathered.grad * size, whole.grad, rtol=1e-12, atol=1e-12),
    )


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_what_all_ranks_compute_alike_has_equal_gradients(rank_pool, size):
    assert all(all(result) for result in rank_pool.run(check_alike, size))


def check_precision(size: int) -> list[str]:
    """Dtypes on the way back: sums in float32 for bfloat16, in float64 for float64."""
    peers = peers_of(size)
    if peers is None:
        return []
    seen = []
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        x = torch.ones(2, dtype=dtype, requires_grad=True)
        with collectives.record_traffic() as records:
            gathered = collectives.all_gather(x, peers, NAME)
            # 256 and 1 have no sum in bfloat16.
            gradient = torch.full_like(gathered, 256 if peers.rank else 1)
            gathered.backward(gradient)
        assert x.grad is not None
        assert x.grad.dtype == dtype
        forward, backward = records
        assert (forward.kind, backward.kind) == ("all_gather", "reduce_scatter")
        assert (forward.backward, backward.backward) == (False, True)
        width = max(4, dtype.itemsize)
        assert forward.sent == (size - 1) * 2 * dtype.itemsize
        assert backward.sent == (size - 1) * 2 * width
        seen.append(f"{dtype}: {float(x.grad[0])}")
    return seen


def test_gradients_are_summed_in_float32_at_least(rank_pool):
    bfloat16 = float(torch.tensor(513.0).to(torch.bfloat16))
    expected = [f"torch.bfloat16: {bfloat16}", "torch.float32: 513.0", "torch.float64: 513.0"]
    results = rank_pool.run(check_precision, 3)
    assert results == [expected, expected, expected, []]


def check_wide_parts(size: int) -> tuple[float, float]:
    """A bfloat16 tensor's gradient from parts that it cannot hold: summed as they are, or rounded first."""
    peers = peers_of(size)
    if peers is None:
        return 0.0, 0.0
    found = []
    for widen in (True, False):
        x = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
        gathered = collectives.start_gather(x, peers, NAME).wait(widen=widen)
        gathered.float().backward(torch.full((size, 2), 1 + 2**-8))
        assert x.grad is not None
        found.append(float(x.grad[0]))
    return found[0], found[1]


def test_parts_of_a_gradient_are_not_rounded_before_they_are_summed(rank_pool):
    # 1 + 1/256 lies between two numbers of bfloat16 and goes to 1; three times it goes to 3 + 1/64.
    assert rank_pool.run(check_wide_parts, 3)[:3] == [(3 + 1 / 64, 3.0)] * 3


#: What moves without a gradient, outside of the collectives that have one: rows of a boolean matrix, and the
#: structure by which ranks choose alike.
WITHOUT_GRADIENT = {("training.py", "all_gather"), ("model.py", "broadcast")}


def test_what_has_a_gradient_is_sent_by_the_collectives_alone():
    """No other module names a function of torch.distributed that sends, so none goes round the registry."""
    sends = (
        "all_",
        "reduce",
        "broadcast",
        "scatter",
        "gather",
        "send",
        "recv",
        "isend",
        "irecv",
        "batch_isend",
    )
    folder = Path(collectives.__file__).parent
    found = set()
    for path in sorted(folder.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("torch.distributed"):
                found |= {(path.name, alias.name) for alias in node.names if alias.name.startswith(sends)}
            if isinstance(node, ast.Attribute) and node.attr.startswith(sends):
                owner = ast.unparse(node.value)
                if owner == "dist" or owner.startswith("torch.distributed"):
                    found.add((path.name, node.attr))
    assert {use for use in found if use[0] != "collectives.py"} == WITHOUT_GRADIENT
    assert ("collectives.py", "all_to_all_single") in found


def test_one_rank_sends_nothing():
    x = rand(1, 3, 3, 2)
    with collectives.record_traffic() as records:
        assert torch.equal(collectives.transpose(x, Peers(), NAME), x.transpose(1, 2))
        assert torch.equal(collectives.all_gather(x, Peers(), NAME), x[None])
        assert torch.equal(collectives.gather_rows(x, 1, Peers(), NAME), x)
        assert collectives.gather_alike(x, 1, Peers(), NAME) is x
        assert collectives.enter_shards(x, Peers(), NAME) is x
        assert torch.equal(collectives.sum_scatter(x, Peers(), NAME), x[0])
    assert records == []
