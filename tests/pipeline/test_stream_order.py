"""The order of samples over ranks and workers, in real processes, and what it is resumed from."""

import multiprocessing

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megafold.pipeline.errors import InputError
from megafold.pipeline.stream import (
    CropConfig,
    SamplerState,
    SamplingConfig,
    Stream,
    StreamConfig,
    find_sampler_state,
)
from tests.pipeline import stream_cache as fake
from tests.pipeline.stream_cache import Chain

torch = pytest.importorskip("torch")

from megafold.pipeline.stream.torch_dataset import RankSampler, StreamDataset  # noqa: E402

WORLDS = (1, 2, 3, 8)
WORKERS = (0, 1, 4)
EPOCH_SIZE = 29  # goes round for none of the worlds but one
CONFIG = StreamConfig(
    crop=CropConfig(tokens=6, atoms=60), sampling=SamplingConfig(epoch_size=EPOCH_SIZE), seed=4
)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    path = tmp_path_factory.mktemp("order") / "cache"
    entries = []
    for number in range(4):
        chains = [Chain(["ALA", "GLY", "LYS"] * 4, origin=(0, number, 0))]
        entries.append((fake.structure(f"{number}abc", chains), chains, ""))
    fake.publish(path, entries)
    return path


def fingerprint(sample):
    """What tells a sample from all others: where it is from, and its rotated coordinates to the bit."""
    meta, coords = sample.meta, sample.features["coords"]
    return meta["epoch"], meta["index"], meta["entry"], float(coords.sum()), float(coords[0, 0])


def whole_order(cache, count):
    stream = Stream(cache, CONFIG)
    return [fingerprint(stream.sample(i % EPOCH_SIZE, epoch=i // EPOCH_SIZE)) for i in range(count)]


def run_rank(cache, state, rank, world, workers, turns, pipe):
    """A training process: takes ``turns`` samples through a plain DataLoader, epoch after epoch."""
    torch.set_num_threads(1)
    dataset = StreamDataset(cache, CONFIG)
    sampler = RankSampler(len(dataset), state, rank, world)
    got: list = []
    while len(got) < turns:
        loader = torch.utils.data.DataLoader(
            dataset,
            batch_size=None,
            sampler=sampler,
            num_workers=workers,
            multiprocessing_context="fork" if workers else None,
            collate_fn=fingerprint,
        )
        for item in loader:
            got.append(item)
            if len(got) == turns:
                break
    pipe.send((got, state.advanced(turns * world, EPOCH_SIZE)))


def run_world(cache, state, world, workers, turns):
    """All ranks at once, each a process; returns the global order and the state that every rank ends with."""
    context = multiprocessing.get_context("fork")
    ranks = []
    for rank in range(world):
        receive, send = context.Pipe(duplex=False)
        arguments = (cache, state, rank, world, workers, turns, send)
        process = context.Process(target=run_rank, args=arguments)
        process.start()
        send.close()
        ranks.append((process, receive))
    results = []
    for process, receive in ranks:
        results.append(receive.recv())
        process.join()
        assert process.exitcode == 0
    states = {state for _, state in results}
    assert len(states) == 1
    return [item for turn in zip(*(got for got, _ in results), strict=True) for item in turn], states.pop()


@pytest.mark.slow
@pytest.mark.parametrize("workers", WORKERS)
def test_the_global_order_is_the_same_on_any_number_of_ranks_and_workers(cache, workers):
    expected = whole_order(cache, 24)
    assert len(set(expected)) == 24
    for world in WORLDS:
        got, state = run_world(cache, SamplerState(4), world, workers, 24 // world)
        assert got == expected
        assert state == SamplerState(4, 0, 24)


@pytest.mark.slow
def test_a_run_resumed_on_other_ranks_and_workers_goes_on_exactly(cache):
    # Every number of ranks and of workers hands over to another, within epochs and across their ends.
    plan = [(3, 4, 2), (1, 0, 2), (8, 1, 1), (2, 1, 3), (3, 0, 1), (8, 0, 2), (1, 4, 3)]
    expected = whole_order(cache, sum(world * turns for world, _, turns in plan))
    state, found = SamplerState(4), []
    for world, workers, turns in plan:
        got, state = run_world(cache, state, world, workers, turns)
        found += got
    assert found == expected
    assert (state.epoch, state.position) == divmod(len(expected), EPOCH_SIZE)


@settings(max_examples=100, deadline=None)
@given(
    size=st.integers(1, 40),
    plan=st.lists(st.tuples(st.integers(1, 50), st.integers(0, 4)), max_size=8),
    start=st.integers(0, 200),
)
def test_any_plan_of_ranks_gives_each_index_once_and_in_order(size, plan, start):
    state = SamplerState(0, 0, 0).advanced(start, size)
    found: list = []
    for world, turns in plan:
        samplers = [RankSampler(size, state, rank, world) for rank in range(world)]
        took = 0
        while took < turns:
            assert len({len(sampler) for sampler in samplers}) == 1
            for turn in zip(*samplers, strict=True):
                found += turn
                took += 1
                if took == turns:
                    break
        state = state.advanced(turns * world, size)
    assert found == [divmod(i, size) for i in range(start, start + len(found))]


def test_a_sampler_counts_what_it_hands_out_and_begins_the_next_epoch_by_itself():
    sampler = RankSampler(5, SamplerState(2, 0, 1), rank=1, world_size=3)
    assert len(sampler) == 2
    indices = iter(sampler)
    assert next(indices) == (0, 2)
    assert sampler.state_dict() == {"seed": 2, "epoch": 0, "position": 4}
    assert list(indices) == [(1, 0)]
    assert sampler.state_dict() == {"seed": 2, "epoch": 1, "position": 2}
    assert list(sampler) == [(1, 3)]
    sampler.load_state_dict({"seed": 2, "epoch": 0, "position": 4})
    assert list(sampler) == [(1, 0)]


@pytest.mark.parametrize("state", [{}, {"epoch": 1}, {"seed": 0, "epoch": 0, "position": -1}])
def test_states_that_are_none_are_refused(state):
    with pytest.raises(InputError, match=r"seed, epoch and position|negative"):
        RankSampler(5).load_state_dict(state)
    with pytest.raises(InputError, match="rank 3 of 3"):
        RankSampler(5, rank=3, world_size=3)


def batches_of(loader, count):
    return [[tuple(item) for item in batch] for _, batch in zip(range(count), loader, strict=False)]


def as_list(samples):
    return [fingerprint(sample) for sample in samples]


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 2])
def test_the_stateful_data_loader_goes_on_exactly(cache, workers):
    pytest.importorskip("torchdata")
    from torchdata.stateful_dataloader import StatefulDataLoader

    dataset = StreamDataset(cache, CONFIG)
    expected = whole_order(cache, 60)

    def make(state=None, count=workers):
        sampler = RankSampler(EPOCH_SIZE, state)
        options = {"multiprocessing_context": "fork"} if count else {}
        loader = StatefulDataLoader(
            dataset, batch_size=2, sampler=sampler, num_workers=count, collate_fn=as_list, **options
        )
        return loader

    def check(loader, position):
        got = []
        for batches in (100, 3):  # the rest of this epoch, then some of the next
            got += [item for batch in batches_of(loader, batches) for item in batch]
        assert got == expected[position : EPOCH_SIZE + 6]

    for count in (3, 13):
        loader = make()
        seen = [item for batch in batches_of(loader, count) for item in batch]
        assert seen == expected[: 2 * count]
        checkpoint = loader.state_dict()
        assert find_sampler_state(checkpoint) == SamplerState(0, 0, 2 * count)
        resumed = make()
        resumed.load_state_dict(checkpoint)
        check(resumed, 2 * count)
        # With another number of workers, and with another loader, from the sampler's own state.
        check(make(find_sampler_state(checkpoint), 1 - min(workers, 1)), 2 * count)


def test_states_are_found_in_nested_checkpoints_if_there_is_one():
    state = SamplerState(1, 2, 3)
    assert find_sampler_state({"a": {"b": state.to_dict()}, "c": [1], "d": state.to_dict()}) == state
    with pytest.raises(InputError, match="0 states"):
        find_sampler_state({"a": np.zeros(3)})
    with pytest.raises(InputError, match="2 states"):
        find_sampler_state({"a": state.to_dict(), "b": SamplerState(1, 2, 4).to_dict()})
