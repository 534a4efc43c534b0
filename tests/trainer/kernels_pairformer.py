"""A Pairformer block on back end ``triton``; ``test_kernels_triangle_attention.py`` runs it interpreted.

On a machine with a GPU it also runs compiled: ``pytest tests/trainer/kernels_pairformer.py``.
"""

import pytest
import torch
import triton
from torch import Tensor, nn

from megafold.trainer import ops
from megafold.trainer.kernels.ahead import compile_ahead
from megafold.trainer.model.config import PairformerConfig
from megafold.trainer.model.pairformer import PairformerBlock
from megafold.trainer.model.primitives import run_block
from megafold.trainer.rehearsal import rehearsal
from tests.trainer.kernels_checks import DEVICE, needs_gpu

C_S, C_Z = 32, 16
#: Channels of AF3's representations.
WIDE = (384, 128)


def make_block(dropout: float = 0.0, *, wide: bool = False) -> PairformerBlock:
    """Small, or as wide as AF3's."""
    torch.manual_seed(0)
    config = PairformerConfig(
        c_triangle=16, c_attention=8, n_head_pair=2, n_head_single=2, n_transition=2, dropout=dropout
    )
    if wide:
        config = PairformerConfig(dropout=dropout)
    block = PairformerBlock(*(WIDE if wide else (C_S, C_Z)), config).to(DEVICE).train()
    with torch.no_grad():
        for parameter in block.parameters():
            if parameter.ndim == 2:
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    return block


def make_inputs(length: int, *, wide: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(1)
    c_s, c_z = WIDE if wide else (C_S, C_Z)
    mask = torch.ones(1, length, dtype=torch.bool, device=DEVICE)
    mask[:, -1] = False
    s = torch.randn(1, length, c_s, device=DEVICE).requires_grad_()
    z = torch.randn(1, length, length, c_z, device=DEVICE).requires_grad_()
    return s, z, mask, mask[:, :, None] & mask[:, None]


def results(run, block: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """Both outputs and every gradient."""
    s, z = run(*inputs)
    leaves = [*inputs[:2], *block.parameters()]
    return [s.detach(), z.detach(), *torch.autograd.grad([s.square().sum() + z.square().sum()], leaves)]


def assert_alike(ours: list[Tensor], expected: list[Tensor]) -> None:
    """Within a thousandth of a tensor's largest number.

    Some gradients are sums that cancel: what is left are roundings of numbers as large as others are.
    """
    largest = max(right.abs().max().item() for right in expected)
    for value, right in zip(ours, expected, strict=True):
        allowed = 1e-3 * right.abs().max().item() + torch.finfo(torch.float32).eps * largest
        torch.testing.assert_close(value, right, rtol=1e-3, atol=allowed)


def test_block_agrees_with_the_reference():
    block, inputs = make_block(), make_inputs(4)
    expected = results(block, block, inputs)
    with ops.use_backend("triton"):
        ours = results(block, block, inputs)
    assert_alike(ours, expected)


def test_block_is_one_graph_under_compile():
    # Forward alone, for the time it takes here; each operator's own checks compile its backward too.
    block, inputs = make_block(), make_inputs(3)
    torch._dynamo.reset()
    with ops.use_backend("triton"), torch.no_grad():
        compiled = torch.compile(block, fullgraph=True, backend="aot_eager", dynamic=False)
        for value, right in zip(compiled(*inputs), block(*inputs), strict=True):
            torch.testing.assert_close(value, right, rtol=1e-5, atol=1e-5)


@needs_gpu
@pytest.mark.gpu
def test_compiled_block_has_the_gradients_of_the_block():
    block, inputs = make_block(), make_inputs(70)
    torch._dynamo.reset()
    with ops.use_backend("triton"):
        ours = results(torch.compile(block, fullgraph=True, dynamic=False), block, inputs)
        expected = results(block, block, inputs)
    assert_alike(ours, expected)


@needs_gpu
@pytest.mark.gpu
def test_what_was_compiled_ahead_serves_all_lengths_of_a_bucket(monkeypatch):
    block = make_block(wide=True)
    with ops.use_backend("triton"), compile_ahead(), rehearsal():
        run_block(block, *make_inputs(97, wide=True), recompute=False)
    compiled: list[str] = []
    hook = "jit_cache_hook"  # asked before anything is compiled
    monkeypatch.setattr(triton.knobs.runtime, hook, lambda **told: compiled.append(told["fn"].name))
    for n in (70, 97, 144):
        inputs = make_inputs(n, wide=True)
        expected = results(block, block, inputs)
        with ops.use_backend("triton"):
            ours = results(block, block, inputs)
        assert_alike(ours, expected)
    assert not compiled


@needs_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("length", [64, 101])
def test_cuda_graphs_of_the_block_replay(length):
    block = make_block()
    s, z, mask, pair_mask = make_inputs(length)

    class OnTriton(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = block

        def forward(self, s: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
            with ops.use_backend("triton"):
                result: tuple[Tensor, Tensor] = self.block(s, z, mask, pair_mask)
            return result

    plain = OnTriton()
    expected = results(plain, block, (s, z))
    graphed = torch.cuda.make_graphed_callables(OnTriton(), make_inputs(length)[:2])
    for _ in range(2):
        assert_alike(results(graphed, block, (s, z)), expected)


@needs_gpu
@pytest.mark.gpu
def test_dropout_differs_between_replays():
    block = make_block(dropout=0.5)
    s, z, mask, pair_mask = make_inputs(64)
    static = z.detach()
    graph = torch.cuda.CUDAGraph()
    with ops.use_backend("triton"), torch.no_grad():
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                block(s, static, mask, pair_mask)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            _, out = block(s, static, mask, pair_mask)
    seen = []
    for _ in range(2):
        graph.replay()
        seen.append(out.clone())
    assert torch.isfinite(seen[0]).all()
    assert not torch.equal(*seen)
