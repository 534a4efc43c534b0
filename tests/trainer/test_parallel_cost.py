"""What a rank sends and holds: counted, against formulas written from the design's table."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from megafold.trainer.model.config import PairformerConfig
from megafold.trainer.model.diffusion import DiffusionModule
from megafold.trainer.model.msa import OuterProductMean
from megafold.trainer.model.outputs import TrunkOutputs
from megafold.trainer.model.pairformer import PairformerStack
from megafold.trainer.model.primitives import Transition
from megafold.trainer.parallel import cost, msa
from megafold.trainer.parallel.collectives import record_traffic
from megafold.trainer.parallel.diffusion import prepare
from megafold.trainer.parallel.pairformer import pairformer
from megafold.trainer.parallel.shards import Shards
from tests.trainer.batches import random_batch
from tests.trainer.networks import MINI, as_dtype, fill_parameters
from tests.trainer.parallel_checks import peers_of

C_Z, C_S, N_HEAD = 16, 8, 2
WIDTHS = PairformerConfig(c_triangle=16, c_attention=4, n_head_pair=N_HEAD, n_head_single=2, n_transition=2)

#: (kind, backward) → calls and bytes.
Counts = dict[tuple[str, bool], tuple[int, int]]


def counts(records: list[Any]) -> Counts:
    calls, sent = Counter[tuple[str, bool]](), Counter[tuple[str, bool]]()
    for record in records:
        calls[record.kind, record.backward] += 1
        sent[record.kind, record.backward] += record.sent
    return {key: (calls[key], sent[key]) for key in calls}


def pairformer_inputs(n: int, shards: Shards, dtype: torch.dtype, c_z: int) -> tuple[Tensor, ...]:
    z = torch.ones(1, shards.size, shards.n_padded, c_z, dtype=dtype).requires_grad_()
    s = torch.ones(1, shards.n_padded, C_S, dtype=dtype).requires_grad_()
    mask = torch.arange(shards.n_padded)[None] < n
    return s, z, mask, shards.pair_mask(mask)


def count_block(size: int, n: int, low_precision: bool) -> Counts:
    """Collectives of a Pairformer block, forward and backward."""
    peers = peers_of(size)
    if peers is None:
        return {}
    shards = Shards(peers, n)
    stack = PairformerStack(C_S, C_Z, 1, WIDTHS, recompute=False)
    dtype = torch.bfloat16 if low_precision else torch.float32
    s, z, mask, pair_mask = pairformer_inputs(n, shards, dtype, C_Z)
    with record_traffic() as records:
        with torch.autocast("cpu", torch.bfloat16, enabled=low_precision):
            s, z = pairformer(stack, s, z, mask, pair_mask, shards)
        (s.sum() + z.sum()).backward()
    return counts(records)


def table_of_a_block(p: int, n: int, width: int) -> Counts:
    """The design's table, for one block of padded length n; numbers of ``width`` bytes, sums in four."""
    others = (p - 1) / p
    pair = n * n / p * others  # what a rank sends of one channel when a pair tensor changes its layout
    whole = n * n * others  # ... when its rows of one channel go to everybody
    single = n * C_S * others
    if p == 2:
        # One operand to all (outgoing), the parts of the product to their owners (incoming).
        multiplication = {"all_gather": (1, 16 * whole), "all_to_all": (1, 16 * whole)}
    else:
        # Twice: two operands token → channel, one product back.
        multiplication = {"all_gather": (0, 0), "all_to_all": (4, 2 * 3 * 16 * pair)}
    gathers, gathered = multiplication["all_gather"]
    exchanges, exchanged = multiplication["all_to_all"]
    return {
        # Two rotations of z; the bias of two attentions; the result of attention with pair bias.
        ("all_to_all", False): (exchanges + 2, round(width * (exchanged + 2 * C_Z * pair))),
        ("all_gather", False): (
            gathers + 3,
            round(width * (gathered + 2 * N_HEAD * whole + single)),
        ),
        # Mirrored. The operand's gradients are exchanged, the product's gathered.
        ("all_to_all", True): (exchanges + 2, round(width * (exchanged + 2 * C_Z * pair))),
        **({("all_gather", True): (gathers, round(width * gathered))} if gathers else {}),
        ("reduce_scatter", True): (2, round(4 * 2 * N_HEAD * whole)),
        ("all_reduce", True): (1, round(4 * 2 * single)),
    }


@pytest.mark.parametrize(("size", "n"), [(2, 7), (2, 8), (4, 8), (4, 10)])
@pytest.mark.parametrize("low_precision", [False, True])
def test_a_block_calls_and_sends_what_the_table_says(rank_pool, size, n, low_precision):
    expected = table_of_a_block(size, -(-n // size) * size, 2 if low_precision else 4)
    for result in rank_pool.run(count_block, size, n, low_precision)[:size]:
        assert result == expected


def count_rest(size: int) -> dict[str, Counts]:
    """Collectives of a transition, an outer product mean and the diffusion's preparation."""
    peers = peers_of(size)
    if peers is None:
        return {}
    n, rows = 8, 4
    shards = Shards(peers, n)
    found = {}
    with record_traffic() as records:
        Transition(4, 2)(torch.ones(1, shards.size, n, 4, requires_grad=True)).sum().backward()
    found["transition"] = counts(records)
    layer = OuterProductMean(6, 5, 3)
    m = torch.ones(1, rows, shards.size, 6, requires_grad=True)
    with record_traffic() as records:
        msa.outer_product_mean(layer, m, torch.ones(1, rows, n, dtype=torch.bool), shards).sum().backward()
    found["outer_product_mean"] = counts(records)
    module = DiffusionModule(MINI)
    fill_parameters(module)
    batch = as_dtype(random_batch(0, n), torch.float32)
    z = torch.ones(1, shards.size, n, MINI.c_z, requires_grad=True)
    s = torch.ones(1, n, MINI.c_s, requires_grad=True)
    trunk = TrunkOutputs(s_inputs=torch.ones(1, n, MINI.c_s_inputs), s_trunk=s, z_trunk=z, distogram_logits=z)
    with record_traffic() as records:
        context = prepare(module, batch, trunk, shards)
        (context.z.sum() + context.s.sum()).backward()
    found["diffusion"] = counts(records)
    return found


def test_other_operators_send_what_the_table_says(rank_pool):
    p, n = 4, 8
    others = (p - 1) / p
    operand, pair, single = 4 * n * 3 * others, n * n * MINI.c_z * others, n * MINI.c_s * others
    expected = {
        "transition": {},
        "outer_product_mean": {
            ("all_gather", False): (1, round(4 * operand)),
            ("reduce_scatter", True): (1, round(4 * operand)),
        },
        "diffusion": {
            ("all_gather", False): (1, round(4 * pair)),
            ("reduce_scatter", True): (1, round(4 * pair)),
            ("all_reduce", True): (1, round(4 * 2 * single)),
        },
    }
    assert rank_pool.run(count_rest, p) == [expected] * p


def test_an_operand_is_gathered_for_two_ranks_alone():
    assert [cost.choose_triangle_scheme(384, 128, p) for p in (2, 3, 4, 8)] == [
        "operand",
        "channels",
        "channels",
        "channels",
    ]
    # Channels that do not divide are padded, for which three ranks would pay with few of them.
    assert cost.choose_triangle_scheme(384, 8, 3) == "operand"


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors that operations have made and that are still there: now, and at most."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._bytes = 0
        self._live: dict[StorageWeakRef, int] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(out):
            if isinstance(tensor, Tensor):
                reference = StorageWeakRef(tensor.untyped_storage())
                if reference not in self._live:
                    self._live[reference] = tensor.untyped_storage().nbytes()
                    self._bytes += self._live[reference]
        if self._bytes > self.peak:  # what has gone since is still among them
            self._live = {key: size for key, size in self._live.items() if not key.expired()}
            self._bytes = sum(self._live.values())
            self.peak = max(self.peak, self._bytes)
        return out


def peak_of_pair_stack(size: int, n: int, recompute: bool) -> int:
    """Most bytes that two blocks of the Pairformer hold at once in a forward and backward pass."""
    peers = peers_of(size)
    if peers is None:
        return 0
    shards = Shards(peers, n)
    # AF3's proportions: a head for every 32 channels of z.
    widths = replace(WIDTHS, c_triangle=32, c_attention=32, n_head_pair=1, n_transition=4)
    stack = PairformerStack(C_S, 32, 2, widths, recompute=recompute).requires_grad_(False).train()
    s, z, mask, pair_mask = pairformer_inputs(n, shards, torch.float32, 32)
    with LiveBytes() as memory:
        s, z = pairformer(stack, s, z, mask, pair_mask, shards)
        (s.sum() + z.sum()).backward()
    return memory.peak


@pytest.mark.parametrize("recompute", [False, True])
def test_memory_of_the_pair_stack_falls_with_the_ranks(rank_pool, recompute):
    n = 32
    peaks = {size: max(rank_pool.run(peak_of_pair_stack, size, n, recompute)) for size in (1, 2, 4)}
    assert peaks[1] > 20 * n * n * 32 * 4
    ratios = {size: peaks[size] * size / peaks[1] for size in (2, 4)}
    assert all(0.85 < ratio < 1.15 for ratio in ratios.values()), ratios
