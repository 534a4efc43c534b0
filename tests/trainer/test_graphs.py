"""Replayed blocks: on a CPU with a recorder that runs again what it recorded, on a GPU with CUDA graphs."""

import dataclasses
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from megafold.trainer import ops
from megafold.trainer.checkpoint import load_checkpoint
from megafold.trainer.errors import ConfigError
from megafold.trainer.graphs import BlockGraphs
from megafold.trainer.loop import Feed, Trainer, block_graphs
from megafold.trainer.model.primitives import run_block
from tests.trainer.batches import random_batch
from tests.trainer.fakes import FakeFeed, quick_config
from tests.trainer.networks import MINI_JUDGING, as_dtype, mini_model


class Rerun:
    """Runs a function again at each replay, as it was when it was recorded, into the memory it then gave."""

    def __init__(self) -> None:
        self.recorded = self.alone = 0
        self.bytes = 10**7

    def __call__(self, *passes, alone=False):
        self.recorded += 1
        self.alone += alone
        results = [run() for run in passes]
        return [self._rerun(run, own) for run, own in zip(passes, results, strict=True)]

    def _rerun(self, run, results):
        autocast, backend = torch.is_autocast_enabled("cpu"), ops.active_backend()
        own = [t.detach().clone().fill_(torch.nan) for t in results]

        def replay() -> None:
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast), ops.use_backend(backend):
                for memory, value in zip(own, run(), strict=True):
                    memory.copy_(value)

        return replay, own

    def random_state(self) -> Tensor:
        return torch.get_rng_state()

    def set_random_state(self, state: Tensor) -> None:
        torch.set_rng_state(state)

    def memory(self) -> int:
        return 1000 * self.recorded

    def size(self) -> int:
        return self.bytes


class Layer(nn.Module):
    """Dropout, a weight that has a gradient and one that has none."""

    def __init__(self, slope: float = 0.5) -> None:
        super().__init__()
        self.slope = slope
        self.linear = nn.Linear(6, 6).double()
        self.unused = nn.Parameter(torch.ones(2, dtype=torch.float64))
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor, mask: Tensor, extra: None = None) -> tuple[Tensor, Tensor]:
        y = self.dropout(torch.tanh(self.linear(x))) * mask
        return y + self.slope * x, x


def layers(n: int = 3) -> list[Layer]:
    torch.manual_seed(0)
    return [Layer() for _ in range(n)]


def weights(blocks: list[Layer]) -> list[nn.Parameter]:
    return [parameter for block in blocks for parameter in block.parameters()]


def inputs(rows: int = 4) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 6, generator=random, dtype=torch.float64)
    return x.requires_grad_(), torch.rand(rows, 1, generator=random) < 0.7


def results(
    blocks: list[Layer], x: Tensor, mask: Tensor, seed: int = 1, *, recompute: bool = True
) -> list[Tensor]:
    """Output, gradient of the input, gradients of all weights."""
    torch.manual_seed(seed)
    y, total = x, 0.0
    for block in blocks:
        y, unchanged = run_block(block, y, mask, None, recompute=recompute)
        total = total + unchanged.square().sum()
    leaves = [x, *weights(blocks)]
    grads = torch.autograd.grad(y.square().sum() + total, leaves, allow_unused=True)
    return [
        y.detach(),
        *(torch.zeros_like(t) if g is None else g for g, t in zip(grads, leaves, strict=True)),
    ]


def assert_equal(found: Sequence[Tensor | None], expected: Sequence[Tensor]) -> None:
    for value, right in zip(found, expected, strict=True):
        assert value is not None
        assert torch.equal(value, right)


both_ways = pytest.mark.parametrize("recompute", [True, False])


@both_ways
def test_replays_give_what_the_blocks_give(recompute):
    blocks, graphs = layers(), BlockGraphs(Rerun())
    for seed in (1, 1, 2):
        expected = results(blocks, *inputs(), seed, recompute=recompute)
        with graphs.active():
            assert_equal(results(blocks, *inputs(), seed, recompute=recompute), expected)
    assert graphs.replays == 3 * len(blocks)
    # What recomputes shares a recording, what keeps activations may not.
    assert len(graphs) == (1 if recompute else len(blocks))


def test_dropout_differs_between_replays():
    blocks, graphs = layers(1), BlockGraphs(Rerun())
    seen = []
    for _ in range(2):
        with graphs.active(), torch.no_grad():
            seen += [run_block(blocks[0], *inputs(), None, recompute=True)[0]]
    assert graphs.replays == 2
    assert not torch.equal(*seen)


@both_ways
def test_a_replay_draws_what_a_call_draws(recompute):
    blocks, graphs = layers(1), BlockGraphs(Rerun())
    for _ in range(3):
        results(blocks, *inputs(), recompute=recompute)
        expected = torch.rand(3)
        with graphs.active():
            results(blocks, *inputs(), recompute=recompute)
        assert torch.equal(torch.rand(3), expected)


@both_ways
def test_backward_passes_may_wait_for_later_forward_passes(recompute):
    blocks, graphs = layers(2), BlockGraphs(Rerun())
    expected = [results(blocks[:1], *inputs(), seed)[1:] for seed in (1, 2)]
    with graphs.active():
        losses = []
        for seed in (1, 2):
            x, mask = inputs()
            torch.manual_seed(seed)
            y, unchanged = run_block(blocks[0], x, mask, None, recompute=recompute)
            losses.append((y.square().sum() + unchanged.square().sum(), x))
    for (loss, x), right in zip(reversed(losses), reversed(expected), strict=True):
        found = torch.autograd.grad(loss, [x, *blocks[0].linear.parameters()])
        assert_equal(list(found), [right[0], *right[2:]])  # without the unused weight


@both_ways
def test_gradients_of_later_replays_leave_earlier_ones_alone(recompute):
    blocks, graphs = layers(), BlockGraphs(Rerun())
    with graphs.active():
        torch.manual_seed(1)
        y, mask = inputs()
        for block in blocks:
            y, _ = run_block(block, y, mask, None, recompute=recompute)
        y.square().sum().backward()
    assert graphs.replays == len(blocks)
    found = [block.linear.weight.grad for block in blocks]
    torch.manual_seed(1)
    y, mask = inputs()
    for block in blocks:
        y, _ = run_block(block, y, mask, None, recompute=False)
    assert_equal(
        found, list(torch.autograd.grad(y.square().sum(), [block.linear.weight for block in blocks]))
    )


@both_ways
def test_weights_are_those_of_the_moment(recompute):
    blocks, graphs = layers(), BlockGraphs(Rerun())
    for _ in range(3):
        with torch.no_grad():
            for parameter in weights(blocks):
                parameter.mul_(0.9)
        expected = results(blocks, *inputs(), recompute=recompute)
        with graphs.active():
            assert_equal(results(blocks, *inputs(), recompute=recompute), expected)
    assert graphs.replays == 3 * len(blocks)


@both_ways
def test_parameters_may_be_exchanged(recompute):
    blocks, graphs = layers(), BlockGraphs(Rerun())
    for exchange in (True, False):
        with graphs.active():
            results(blocks, *inputs(), recompute=recompute)
        for block in blocks:
            state = {name: value * 0.9 for name, value in block.state_dict().items()}
            if exchange:
                block.load_state_dict(state, assign=True)
            else:  # as a module that is moved to another device and back
                for name, parameter in block.named_parameters():
                    parameter.data = state[name]
        expected = results(blocks, *inputs(), recompute=recompute)
        with graphs.active():
            assert_equal(results(blocks, *inputs(), recompute=recompute), expected)
    assert graphs.replays == 4 * len(blocks)
    assert len(graphs) == (1 if recompute else len(blocks))


@both_ways
def test_frozen_weights_and_inputs_without_gradients(recompute):
    blocks, graphs = layers(2), BlockGraphs(Rerun())
    blocks[0].requires_grad_(False)
    for _ in range(3):
        with graphs.active():
            x, mask = inputs()
            torch.manual_seed(1)
            y, _ = run_block(blocks[0], x.detach(), mask, None, recompute=recompute)
            assert not y.requires_grad
            z, _ = run_block(blocks[1], y, mask, None, recompute=recompute)
            found = torch.autograd.grad(z.square().sum(), list(blocks[1].linear.parameters()))
    torch.manual_seed(1)
    z, _ = blocks[1](blocks[0](x.detach(), mask)[0], mask)
    assert graphs.replays == 6
    assert_equal(
        list(found), list(torch.autograd.grad(z.square().sum(), list(blocks[1].linear.parameters())))
    )


def test_modules_stay_as_they_are():
    blocks, graphs = layers(), BlockGraphs(Rerun())
    before = [{name: value.clone() for name, value in block.state_dict().items()} for block in blocks]
    for _ in range(2):
        with graphs.active():
            results(blocks, *inputs())
    assert graphs.replays
    for block, state in zip(blocks, before, strict=True):
        assert list(block.state_dict()) == list(state)
        assert_equal(list(block.state_dict().values()), list(state.values()))
    assert all(parameter.requires_grad for parameter in weights(blocks))


def plain_calls(graphs: BlockGraphs, block, *arguments, turns: int = 3, **options) -> None:
    options = {"recompute": True, **options}
    for _ in range(turns):
        with graphs.active():
            run_block(block, *arguments, **options)


def test_activations_in_use_are_left_alone():
    blocks, graphs = layers(1), BlockGraphs(Rerun())
    for again in (False, True):
        with graphs.active():
            x, mask = inputs()
            first, _ = run_block(blocks[0], x, mask, None, recompute=False)
            assert graphs.replays == 1 + again
            run_block(blocks[0], x, mask, None, recompute=False)
        assert graphs.replays == 1 + again  # plainly: the first one's backward pass is to come
        if not again:
            torch.autograd.grad(first.sum(), x)
        del first  # or nobody can ask for it any more


def test_a_second_backward_pass_is_refused():
    blocks, graphs = layers(1), BlockGraphs(Rerun())
    x, mask = inputs()
    with graphs.active():
        y, _ = run_block(blocks[0], x, mask, None, recompute=False)
    torch.autograd.grad(y.sum(), x, retain_graph=True)
    with pytest.raises(RuntimeError, match="once"):
        torch.autograd.grad(y.sum(), x)


def test_recordings_have_so_much_room():
    for share, recompute in ((4, True), (2, False)):
        recorder, blocks = Rerun(), [Layer(slope) for slope in (0.1, 0.2, 0.3, 0.4, 0.5)]
        recorder.bytes = share * 3500  # each pass that is recorded is said to take 1000
        graphs = BlockGraphs(recorder)
        expected = results(blocks, *inputs(), recompute=recompute)
        with graphs.active(), pytest.warns(RuntimeWarning, match="others run without"):
            assert_equal(results(blocks, *inputs(), recompute=recompute), expected)
        # A pass back goes with the pass forward that has been recorded.
        assert (len(graphs), graphs.bytes) == ((2, 4000) if recompute else (4, 4000))


def test_functions_run_plainly():
    graphs = BlockGraphs(Rerun())
    block = layers(1)[0]
    plain_calls(graphs, lambda x, mask: block(x, mask), *inputs())
    assert graphs.replays == 0


def test_hooked_modules_run_plainly():
    graphs, block = BlockGraphs(Rerun()), layers(1)[0]
    block.linear.register_forward_hook(lambda *_: None)
    plain_calls(graphs, block, *inputs())
    assert graphs.replays == 0


def test_beyond_so_many_shapes_blocks_run_plainly():
    graphs, block = BlockGraphs(Rerun()), layers(1)[0]
    for rows in range(1, 65):
        plain_calls(graphs, block, *inputs(rows), turns=1)
    with pytest.warns(RuntimeWarning, match="64 kinds and shapes of blocks .* others run without"):
        plain_calls(graphs, block, *inputs(65), turns=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain_calls(graphs, block, *inputs(66), turns=1)
    assert len(graphs) == graphs.replays == 64
    plain_calls(graphs, block, *inputs(2), turns=1)
    assert graphs.replays == 65


def test_large_inputs_run_plainly():
    graphs, block = BlockGraphs(Rerun(), largest=4 * 6 * 8), layers(1)[0]
    plain_calls(graphs, block, *inputs(5))
    assert graphs.replays == 0
    plain_calls(graphs, block, *inputs(4))
    assert graphs.replays == 3


def test_blocks_that_compute_something_else_are_told_apart():
    graphs = BlockGraphs(Rerun())
    blocks = [Layer(0.5), Layer(0.25), Layer(0.5)]
    for _ in range(2):
        expected = results(blocks, *inputs())
        with graphs.active():
            assert_equal(results(blocks, *inputs()), expected)
    assert len(graphs) == 2


def test_evaluating_blocks_drop_nothing():
    graphs, blocks = BlockGraphs(Rerun()), layers(2)
    for _ in range(2):
        with graphs.active():
            results(blocks, *inputs())
    for block in blocks:
        block.eval()
    expected = results(blocks, *inputs())
    with graphs.active():
        assert_equal(results(blocks, *inputs()), expected)


def test_a_failed_recording_says_so_once_and_runs_plainly():
    class Failing(Rerun):
        def __call__(self, *passes, alone=False):
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    blocks, graphs = layers(1), BlockGraphs(Failing())
    expected = results(blocks, *inputs())
    with graphs.active(), pytest.warns(RuntimeWarning, match="without CUDA graphs: operation not permitted"):
        assert_equal(results(blocks, *inputs()), expected)
    with graphs.active(), warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_equal(results(blocks, *inputs()), expected)
    assert graphs.replays == 0
    assert len(graphs.declined) == 1


@pytest.mark.parametrize(("autocast", "recompute"), [(False, False), (False, True), (True, True)])
def test_the_network_is_the_same_with_replays(autocast, recompute):
    config = dataclasses.replace(MINI_JUDGING, activation_checkpointing=recompute)
    model = mini_model(config=config, dtype=torch.float32 if autocast else torch.float64).train()
    batch = random_batch(0)
    if not autocast:
        batch = as_dtype(batch)
    graphs = BlockGraphs(Rerun())

    def step(seed: int) -> list[Tensor]:
        model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        noise = torch.Generator().manual_seed(seed)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            outputs = model(batch, n_cycles=2, n_copies=2, generator=noise)
            judged = model.judge(batch, outputs.trunk, batch["coords"])
        loss = outputs.denoised.square().mean() + outputs.trunk.distogram_logits.float().square().mean()
        for logits in (judged.plddt, judged.resolved, judged.pae, judged.pde):
            loss = loss + logits.float().square().mean()
        loss.backward()
        assert all(p.grad is not None for p in model.parameters())
        return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]

    for seed in (1, 2):
        expected = step(seed)
        with graphs.active():
            found = step(seed)
        assert_equal(found, expected)
    # Two Pairformer blocks and one of templates, two of the MSA, twice; two of tokens, two of atoms; one of
    # the confidence head.
    assert graphs.replays > 10
    assert not graphs.declined


@pytest.mark.parametrize(
    ("device", "settings", "expected"),
    [
        ("cuda", {"cuda_graphs": "auto"}, True),
        ("cuda", {"cuda_graphs": "off"}, False),
        ("cuda", {"cuda_graphs": "auto", "sp": 2}, False),
        ("cpu", {"cuda_graphs": "auto"}, False),
    ],
)
def test_which_runs_have_graphs(device, settings, expected):
    graphs = block_graphs(quick_config(**settings), torch.device(device))
    assert (graphs is not None) == expected


def test_other_settings_are_refused():
    with pytest.raises(ConfigError, match="cuda_graphs must be one of auto, off, not 'on'"):
        quick_config(cuda_graphs="on")


def make_trainer(folder: Path, steps: int, *, replay: bool = True, bad: int = 0, **settings: Any) -> Trainer:
    sizes = dataclasses.replace(MINI_JUDGING, activation_checkpointing=True)
    model = mini_model(config=sizes, dtype=torch.float32)
    config = quick_config(steps=steps, rollout_steps=1, n_copies=2, learning_rate=1e-3, **settings)
    feed = FakeFeed(bad=frozenset({bad}))
    trainer = Trainer(model, config, Feed(batches=feed, sampler=feed), folder)
    if replay:
        trainer.graphs = BlockGraphs(Rerun())
    return trainer


def test_a_run_equals_the_plain_one_and_a_resumed_one(tmp_path):
    make_trainer(tmp_path / "plain", 4, replay=False).run()
    whole = make_trainer(tmp_path / "whole", 4)
    whole.run()
    assert whole.graphs is not None
    assert whole.graphs.replays > 40
    first = make_trainer(tmp_path / "parts", 2).run()
    second = make_trainer(tmp_path / "parts", 4)
    assert first.checkpoint is not None
    second.resume(first.checkpoint)
    second.run()
    whole_state, *states = [
        load_checkpoint(tmp_path / name / "checkpoints/step-00000004.pt")
        for name in ("whole", "parts", "plain")
    ]
    for name, value in whole_state["model"].items():
        for state in states:
            assert torch.equal(value, state["model"][name]), name


def test_a_step_that_is_not_finite_leaves_no_trace_in_replays(tmp_path):
    expected, replayed = (
        make_trainer(tmp_path / name, 4, replay=name == "replayed", bad=2) for name in ("plain", "replayed")
    )
    assert expected.run().skipped == replayed.run().skipped == 1
    for parameter, right in zip(replayed.parameters, expected.parameters, strict=True):
        assert torch.equal(parameter, right)
    averages = (trainer.average.state_dict() for trainer in (replayed, expected))
    assert_equal(*(list(average.values()) for average in averages))


def test_a_step_without_memory_begins_anew_without_graphs(tmp_path):
    expected = make_trainer(tmp_path / "plain", 3, replay=False, accumulate=2)
    expected.run()
    trainer = make_trainer(tmp_path / "short", 3, accumulate=2)
    loss_of = trainer._loss_of
    calls = []

    def short_of_memory(*arguments):
        loss = loss_of(*arguments)
        assert trainer.graphs is not None
        calls.append(len(trainer.graphs))
        if len(calls) == 4:  # the second batch of the second step
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss

    trainer._loss_of = short_of_memory
    with pytest.warns(RuntimeWarning, match="too little memory: .* without CUDA graphs from now on"):
        trainer.run()
    # The mini roll-out, whose biases are known, makes two of them: blocks of atoms, and blocks of tokens. The
    # confidence head's block is of the trunk's kind.
    assert calls == [9, 9, 9, 9, 0, 0, 0, 0]
    for parameter, right in zip(trainer.parameters, expected.parameters, strict=True):
        assert torch.equal(parameter, right)


def test_memory_that_is_short_without_graphs_is_an_error(tmp_path):
    trainer = make_trainer(tmp_path, 1)

    def short_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    trainer._loss_of = short_of_memory
    with pytest.raises(torch.OutOfMemoryError):
        trainer.run()


def test_recording_without_memory_gives_up_all_recordings():
    class Short(Rerun):
        def __call__(self, *passes, alone=False):
            if self.recorded == 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return super().__call__(*passes, alone=alone)

    blocks, graphs = [Layer(0.5), Layer(0.25)], BlockGraphs(Short())
    expected = results(blocks, *inputs())
    with graphs.active(), pytest.warns(RuntimeWarning, match="too little memory"):
        assert_equal(results(blocks, *inputs()), expected)  # the first block's backward pass was recorded
    with graphs.active():
        assert_equal(results(blocks, *inputs()), expected)
    assert graphs.replays == 1
    assert (len(graphs), graphs.bytes, graphs.released) == (0, 0, True)


def test_a_run_says_what_it_recorded(tmp_path, capsys):
    make_trainer(tmp_path, 3).run()
    lines = [line for line in capsys.readouterr().out.splitlines() if "CUDA graphs" in line]
    assert len(lines) == 1
    assert lines[0].startswith("CUDA graphs: 9 kinds and shapes of blocks recorded in ")
