"""The pair half of a block on back end ``triton`` over ranks, in Triton's interpreter, against eager's.

The kernels take a rank's rows; what other ranks hold comes from between them.
"""

import os
from collections import Counter
from collections.abc import Iterator

import pytest
import torch

from megafold.trainer import ops
from megafold.trainer.model.config import PairformerConfig
from megafold.trainer.model.pairformer import PairUpdate
from megafold.trainer.model.primitives import run_block
from megafold.trainer.parallel import collectives, triangle
from megafold.trainer.parallel.shards import Shards, pad_tokens
from tests.trainer.networks import fill_parameters
from tests.trainer.parallel_checks import error, peers_of, rand, summed
from tests.trainer.rank_pool import RankPool

C = 16
CONFIG = PairformerConfig(c_triangle=C, c_attention=16, n_head_pair=2, n_transition=2)


@pytest.fixture(scope="module")
def interpreting_pool() -> Iterator[RankPool]:
    """Ranks on which Triton interprets: it asks for that when it is imported."""
    pytest.importorskip("triton")
    before = os.environ.get("TRITON_INTERPRET")
    os.environ["TRITON_INTERPRET"] = "1"
    try:
        with RankPool(4) as pool:
            pool.run(peers_of, 1)
            yield pool
    finally:
        if before is None:
            del os.environ["TRITON_INTERPRET"]
        else:
            os.environ["TRITON_INTERPRET"] = before


def _quickly() -> None:
    """Each program costs the interpreter the same, however much it does."""
    from megafold.trainer.kernels.triangle_multiplication import launches
    from megafold.trainer.kernels.triangle_multiplication.tiles import Tile
    from tests.trainer.interpreter import hasten
    from tests.trainer.kernels_triangle_multiplication import use_tile

    hasten()
    use_tile(pytest.MonkeyPatch(), Tile(64, 32, 4, 1))
    launches.FINISHED["ROWS"] = 8


def check_pair_update(size: int, n: int, recompute: bool, left_out: str = "") -> dict[str, float]:
    """Errors of the output and all gradients in float32, and how often kernels took rows."""
    from megafold.trainer.kernels.triangle_attention import halves as attention
    from megafold.trainer.kernels.triangle_multiplication import halves as multiplication

    peers = peers_of(size)
    if peers is None:
        return {}
    _quickly()
    shards = Shards(peers, n)
    layer = PairUpdate(C, CONFIG)
    fill_parameters(layer)
    layer.float().train()
    mask = torch.ones(1, n, dtype=torch.bool)
    mask[0, 1] = False
    whole = rand(1, n, n, C).float().requires_grad_()
    weight = rand(1, n, n, C, seed=9).float()
    torch.manual_seed(5)
    expected = layer(whole, mask[:, :, None] & mask[:, None])
    (weight * expected).sum().backward()
    gradients = {key: p.grad for key, p in layer.named_parameters()}
    layer.zero_grad()

    padded = pad_tokens(pad_tokens(whole.detach(), 1, shards.n_padded, 50.0), 2, shards.n_padded, 50.0)
    own = padded[:, shards.rows].clone().requires_grad_()
    own_mask = shards.pair_mask(pad_tokens(mask, 1, shards.n_padded))
    calls = Counter[str]()
    before = attention.attend_rows, multiplication.multiply_rows

    def attend(*args):
        calls["attention"] += 1
        return before[0](*args)

    def multiply(*args):
        calls["multiplication"] += 1
        return before[1](*args)

    attention.attend_rows, multiplication.multiply_rows = attend, multiply
    try:
        torch.manual_seed(5)
        with ops.use_backend("triton"):
            out = run_block(
                lambda z: triangle.pair_update(layer, z, own_mask, shards), own, recompute=recompute
            )
        real = slice(0, max(0, min(n - shards.rows.start, shards.size)))
        rows = range(n)[shards.rows]
        mine = slice(rows.start, rows.stop)
        loss = (weight[:, mine] * out[:, real, :n]).sum()
        if left_out:
            with collectives.leave_out_backward(left_out):
                loss.backward()
        else:
            loss.backward()
    finally:
        attention.attend_rows, multiplication.multiply_rows = before
    assert own.grad is not None
    assert whole.grad is not None
    errors = {
        "out": error(out[:, real, :n], expected[:, mine]),
        "dz": error(own.grad[:, real, :n], whole.grad[:, mine]),
        "attention calls": calls["attention"],
        "multiplication calls": calls["multiplication"],
    }
    for key, parameter in layer.named_parameters():
        reference = gradients[key]
        assert parameter.grad is not None
        assert reference is not None
        errors[key] = error(summed(parameter.grad, peers), reference)
    return errors


#: A token of padding; rows that do not fit the kernels of the multiplication; more ranks.
CASES = [(2, 15, True, 4), (2, 13, False, 0), (4, 30, False, 2)]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "n", "recompute", "multiplications"), CASES)
def test_kernels_take_the_rows_of_a_rank(interpreting_pool, size, n, recompute, multiplications):
    results = interpreting_pool.run(check_pair_update, size, n, recompute)[:size]
    for result in results:
        assert result.pop("multiplication calls") == multiplications
        assert result.pop("attention calls") == (4 if recompute else 2)
        assert len(result) > 20
        assert {key: value for key, value in result.items() if not value < 2e-5} == {}


@pytest.mark.slow
@pytest.mark.parametrize("name", [triangle.BIAS, triangle.OPERAND, triangle.PRODUCT])
def test_a_backward_that_forgets_the_others_is_noticed(interpreting_pool, name):
    results = interpreting_pool.run(check_pair_update, 2, 15, False, name)[:2]
    assert max(value for result in results for key, value in result.items() if "calls" not in key) > 1e-3
