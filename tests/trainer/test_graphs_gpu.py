"""Blocks and training steps as CUDA graphs."""

import dataclasses
import math
import os
import subprocess
import sys
import textwrap
import warnings

import pytest
import torch
from torch import Tensor, nn

from megafold.trainer import ops
from megafold.trainer.checkpoint import load_checkpoint
from megafold.trainer.data_parallel import Ranks
from megafold.trainer.graphs import BlockGraphs, CudaRecorder
from megafold.trainer.loop import Feed, Trainer
from megafold.trainer.model.config import PairformerConfig
from megafold.trainer.model.model import AlphaFold3
from megafold.trainer.model.pairformer import PairformerStack
from megafold.trainer.model.primitives import run_block
from megafold.trainer.presets.model import TINY
from tests.trainer.fakes import FakeFeed, quick_config
from tests.trainer.test_data_parallel import ROOT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
C_S, C_Z, LENGTH = 32, 16, 70


def make_stack(n_block: int = 2, *, recompute: bool = True) -> PairformerStack:
    torch.manual_seed(0)
    config = PairformerConfig(c_triangle=16, c_attention=16, n_head_pair=2, n_head_single=2, dropout=0.25)
    stack = PairformerStack(C_S, C_Z, n_block, config, recompute=recompute).cuda().train()
    with torch.no_grad():
        for parameter in stack.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return stack


def results(stack: PairformerStack, seed: int) -> list[Tensor]:
    """Both outputs, the gradients of both inputs and of all weights."""
    torch.manual_seed(seed)
    s = torch.randn(1, LENGTH, C_S, device="cuda").requires_grad_()
    z = torch.randn(1, LENGTH, LENGTH, C_Z, device="cuda", dtype=torch.bfloat16).requires_grad_()
    mask = torch.ones(1, LENGTH, dtype=torch.bool, device="cuda")
    with torch.autocast("cuda", torch.bfloat16), ops.use_backend("triton"):
        out = stack(s, z, mask, mask[:, :, None] & mask[:, None])
    loss = sum(t.float().square().mean() for t in out)
    return [t.detach() for t in (*out, *torch.autograd.grad(loss, [s, z, *stack.parameters()]))]


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("recompute", [True, False])
def test_replays_are_bit_equal_to_calls(deterministic, recompute):
    stack, graphs = make_stack(recompute=recompute), BlockGraphs(recorder())
    for seed in (1, 2, 2):
        expected = results(stack, seed)
        with graphs.active():
            found = results(stack, seed)
        for value, right in zip(found, expected, strict=True):
            assert torch.equal(value, right)
    assert not graphs.declined
    assert (len(graphs), graphs.replays) == (1 if recompute else 2, 6)
    assert graphs.bytes > 0


def test_replays_differ_by_their_dropout():
    stack, graphs = make_stack(1), BlockGraphs(recorder())
    with graphs.active():
        first, again, other = (results(stack, seed)[1] for seed in (3, 3, 4))
        inputs = [t.clone() for t in (first.new_zeros(1, LENGTH, C_S, dtype=torch.float32), first)]
        mask = torch.ones(1, LENGTH, dtype=torch.bool, device="cuda")
        with torch.no_grad(), torch.autocast("cuda", torch.bfloat16), ops.use_backend("triton"):
            drawn = [stack(*inputs, mask, mask[:, :, None] & mask[:, None])[1] for _ in range(2)]
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not torch.equal(*drawn)


class Synchronising(nn.Module):
    """Asks the GPU for a number, which no recording can."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, device="cuda"))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x * float(x.sum())


def recorder() -> CudaRecorder:
    return CudaRecorder(torch.device("cuda", 0))


def test_what_cannot_be_recorded_runs_plainly_and_harms_no_one(deterministic):
    graphs, block, stack = BlockGraphs(recorder()), Synchronising(), make_stack()
    expected_before, expected_after = results(stack, 1), results(stack, 2)
    with graphs.active():
        before = results(stack, 1)
    replays = graphs.replays
    x = torch.rand(4, 8, device="cuda").requires_grad_()
    expected = torch.autograd.grad(block(x).sum(), [x, block.weight])
    stream = torch.cuda.current_stream()
    for recompute in (True, False):
        torch.manual_seed(3)
        with graphs.active(), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = torch.autograd.grad(run_block(block, x, recompute=recompute).sum(), [x, block.weight])
        assert ["without CUDA graphs" in str(w.message) for w in caught].count(True) == recompute
        for value, right in zip(found, expected, strict=True):
            assert torch.equal(value, right)
        drawn = torch.rand(3, device="cuda")
        torch.manual_seed(3)
        assert torch.equal(drawn, torch.rand(3, device="cuda"))
    assert torch.cuda.current_stream() == stream
    assert graphs.replays == replays
    # What was recorded before, and what is recorded after.
    with graphs.active():
        after = results(stack, 2)
    assert graphs.replays == 2 * replays
    for value, right in zip([*before, *after], [*expected_before, *expected_after], strict=True):
        assert torch.equal(value, right)
    linear = nn.Linear(8, 8, device="cuda")
    with graphs.active():
        torch.testing.assert_close(run_block(linear, x, recompute=True), linear(x))
    assert graphs.replays == 2 * replays + 1


class Greedy(nn.Module):
    """Wants more memory than there is, while it is recorded."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, device="cuda"))
        self.greedy = True

    def forward(self, x: Tensor) -> Tensor:
        if self.greedy and torch.cuda.is_current_stream_capturing():
            x.new_empty(torch.cuda.get_device_properties(0).total_memory)
        return self.weight * x


def test_recording_without_memory_gives_all_of_it_back(deterministic):
    graphs, block, stack = BlockGraphs(recorder()), Greedy(), make_stack()
    expected = results(stack, 1)
    torch.cuda.empty_cache()
    reserved = torch.cuda.memory_reserved()
    with graphs.active():
        results(stack, 1)
    assert graphs.bytes > 0
    x = torch.rand(4, 8, device="cuda").requires_grad_()
    with graphs.active(), pytest.warns(RuntimeWarning, match="too little memory"):
        y = run_block(block, x, recompute=True)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), block.weight)[0], x.sum(0))
    with graphs.active():
        found = results(stack, 1)
    assert len(graphs) == graphs.bytes == 0
    for value, right in zip(found, expected, strict=True):
        assert torch.equal(value, right)
    del y, value, right, found
    torch.cuda.empty_cache()
    # A stream's working memory of cuBLAS stays, as it does without graphs.
    assert torch.cuda.memory_reserved() < reserved + 100 * 2**20
    again = BlockGraphs(recorder())
    with again.active():
        results(stack, 1)
    assert again.replays


def make_trainer(folder, *, recompute: bool = True, ranks: Ranks | None = None, **changes) -> Trainer:
    settings = {"device": "cuda", "precision": "bf16", "deterministic": True}
    config = quick_config(**{**settings, "learning_rate": 1e-3, "rollout_steps": 0, **changes})
    torch.manual_seed(0)
    model = AlphaFold3(dataclasses.replace(TINY, activation_checkpointing=recompute))
    model.backend = config.backend
    feed = FakeFeed(rank=0 if ranks is None else ranks.rank)
    return Trainer(model, config, Feed(batches=feed, sampler=feed), folder, ranks)


@pytest.mark.parametrize(("backend", "recompute"), [("eager", False), ("eager", True), ("triton", True)])
def test_a_graphed_run_equals_the_plain_one(tmp_path, backend, recompute):
    losses = {}
    for graphs in ("off", "auto"):
        trainer = make_trainer(
            tmp_path / graphs, steps=5, recompute=recompute, cuda_graphs=graphs, backend=backend
        )
        losses[graphs] = trainer.run().values["loss"]
        if graphs == "off":
            assert trainer.graphs is None
        else:
            assert trainer.graphs is not None
            assert trainer.graphs.replays > 30
            assert not trainer.graphs.declined
    assert math.isfinite(losses["auto"])
    assert losses["auto"] == losses["off"]


def test_a_resumed_graphed_run_is_bit_equal(tmp_path):
    make_trainer(tmp_path / "whole", steps=6, cuda_graphs="auto").run()
    first = make_trainer(tmp_path / "parts", steps=3, cuda_graphs="auto").run()
    torch.manual_seed(99)
    second = make_trainer(tmp_path / "parts", steps=6, cuda_graphs="auto")
    assert first.checkpoint is not None
    second.resume(first.checkpoint)
    second.run()
    states = [
        load_checkpoint(tmp_path / name / "checkpoints/step-00000006.pt") for name in ("whole", "parts")
    ]
    for part in ("model", "average"):
        for name, value in states[0][part].items():
            assert torch.equal(value, states[1][part][name]), name


#: Two ranks with samples of their own, with graphs and without; says whether both runs' weights are the same
#: everywhere.
RANKS = textwrap.dedent(
    """
    import sys
    from pathlib import Path

    import torch
    import torch.distributed as dist

    from megafold.trainer.data_parallel import Ranks
    from tests.trainer.test_graphs_gpu import make_trainer

    ranks = Ranks.from_environment()
    torch.cuda.set_device(ranks.local_rank)
    ranks.start(torch.device("cuda", ranks.local_rank))
    weights = []
    for graphs in ("off", "auto"):
        folder = Path(sys.argv[1]) / graphs
        trainer = make_trainer(folder, ranks=ranks, steps=4, cuda_graphs=graphs, backend="triton")
        trainer.run()
        weights.append(torch.cat([p.detach().flatten() for p in trainer.parameters]))
    of_all = [torch.empty_like(weights[0]) for _ in range(ranks.world)]
    dist.all_gather(of_all, weights[0])
    same = all(torch.equal(other, weights[1]) for other in of_all)
    print(f"rank {ranks.rank}: {trainer.graphs.replays > 30} {same}", flush=True)
    dist.destroy_process_group()
    """
)


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_ranks_with_graphs_equal_those_without(tmp_path):
    script = tmp_path / "ranks.py"
    script.write_text(RANKS)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    result = subprocess.run(
        [*command, script, tmp_path],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    for rank in (0, 1):
        assert f"rank {rank}: True True" in result.stdout
