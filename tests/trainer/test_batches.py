"""The place in the data is that of the batches used, however far workers have read ahead."""

import itertools

import pytest
import torch
from torch.utils.data import Dataset

from megafold.trainer.batches import BatchStream, EpochOrder, TrainingData
from megafold.trainer.data_parallel import Ranks
from megafold.trainer.errors import DataError
from tests.trainer.fakes import quick_config


class Numbers(Dataset):
    """Samples that hold nothing but their index."""

    def __init__(self, length=7):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        return index


def as_batch(samples):
    return {"index": torch.tensor(samples)}


def make_stream(ranks=Ranks(), length=7, **changes):  # noqa: B008
    return BatchStream(
        TrainingData(dataset=Numbers(length), collate=as_batch), quick_config(**changes), ranks
    )


def take(stream, count):
    return [tuple(map(tuple, next(stream)["index"].tolist())) for _ in range(count)]


def test_order_by_hand():
    order = iter(EpochOrder(5, seed=3, rank=1, world=2))
    assert [next(order) for _ in range(5)] == [(0, 1), (0, 3), (1, 0), (1, 2), (1, 4)]
    assert [next(iter(EpochOrder(1, rank=rank, world=3))) for rank in range(3)] == [(0, 0), (1, 0), (2, 0)]


def test_any_number_of_ranks_goes_through_the_same_sequence():
    whole = list(itertools.islice(EpochOrder(7), 50))
    state, found = {"seed": 0, "epoch": 0, "position": 0}, []
    for world in (1, 3, 8, 2, 8, 3):
        orders = [EpochOrder(7, rank=rank, world=world) for rank in range(world)]
        for order in orders:
            order.load_state_dict(state)
        iterators = [iter(order) for order in orders]
        found += [next(iterator) for _ in range(2) for iterator in iterators]
        states = [order.state_dict() for order in orders]
        assert all(other == states[0] for other in states)
        state = states[0]
    assert found == whole


def test_ranks_share_an_epoch():
    orders = [iter(EpochOrder(8, rank=rank, world=4)) for rank in range(4)]
    first_epoch = [next(order) for _ in range(2) for order in orders]
    assert first_epoch == [(0, i) for i in range(8)]


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_repeats_nothing_and_leaves_nothing_out(workers):
    whole = take(make_stream(batch_size=2), 8)
    stream = make_stream(batch_size=2, num_workers=workers, worker_start="fork")
    assert take(stream, 3) == whole[:3]
    state = stream.state_dict()
    assert state == {"seed": 0, "epoch": 0, "position": 6}
    assert take(stream, 1) == whole[3:4]
    stream.close()
    other = make_stream(batch_size=2, num_workers=workers, worker_start="fork")
    other.load_state_dict(state)
    assert other.state_dict() == state
    assert take(other, 5) == whole[3:]
    # Going back on a stream that has read ahead:
    other.load_state_dict(state)
    assert take(other, 2) == whole[3:5]
    other.close()
    assert take(other, 1) == whole[5:6]


@pytest.mark.slow
@pytest.mark.parametrize("start", ["forkserver", "spawn"])
def test_workers_start_in_every_way(start):
    stream = make_stream(num_workers=1, worker_start=start)
    assert take(stream, 3) == [((0, 0),), ((0, 1),), ((0, 2),)]
    stream.close()


class OneEpoch:
    """A sampler that ends after each epoch of three."""

    def __init__(self, length=3):
        self.length = length
        self.epoch = self.position = 0

    def __iter__(self):
        if self.position == self.length:
            self.epoch, self.position = self.epoch + 1, 0
        while self.position < self.length:
            self.position += 1
            yield self.epoch, self.position - 1

    def state_dict(self):
        return {"seed": 0, "epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state):
        self.epoch, self.position = state["epoch"], state["position"]


def test_a_sampler_may_end_its_epochs():
    data = TrainingData(dataset=Numbers(), collate=as_batch, sampler=OneEpoch())
    stream = BatchStream(data, quick_config(batch_size=2), Ranks())
    assert take(stream, 4) == [((0, 0), (0, 1)), ((0, 2),), ((1, 0), (1, 1)), ((1, 2),)]
    assert stream.state_dict() == {"seed": 0, "epoch": 1, "position": 3}


def test_no_samples_is_an_error():
    with pytest.raises(DataError, match="0 samples"):
        make_stream(length=0)
    data = TrainingData(dataset=Numbers(), collate=as_batch, sampler=OneEpoch(0))
    with pytest.raises(DataError, match="no sample"):
        next(BatchStream(data, quick_config(), Ranks()))
