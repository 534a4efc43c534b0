"""Batches whose tensors travel as one piece of memory."""

import copy
import pickle

import pytest

torch = pytest.importorskip("torch")

from torch.utils.data import DataLoader, Dataset  # noqa: E402

from megafold.pipeline.stream.packed import PackedBatch  # noqa: E402


def some_tensors():
    """Of every dtype of a sample, sizes that are no multiples of anything, none, one number, a stride."""
    return {
        "mask": torch.tensor([[True, False, True]]),
        "counts": torch.arange(-3, 4, dtype=torch.int32).reshape(1, 7),
        "coords": torch.tensor([[[0.1, float("nan"), float("inf")]]]),
        "index": torch.arange(5),
        "none": torch.empty(1, 0, 3),
        "one": torch.tensor(2.5, dtype=torch.float64),
        "turned": torch.arange(6.0).reshape(2, 3).T,
    }


def assert_same(found, expected):
    assert list(found) == list(expected)
    for name, value in expected.items():
        assert found[name].dtype == value.dtype
        assert torch.equal(torch.nan_to_num(found[name]), torch.nan_to_num(value)), name
        assert torch.equal(found[name].isnan(), value.isnan())


class Batches(Dataset):
    def __len__(self):
        return 3

    def __getitem__(self, index):
        return index


def collate(indices):
    batch = PackedBatch(some_tensors())
    batch["recycles"] = {"msa": torch.full((2, 3), indices[0])}
    batch["meta"] = [{"entry": f"{index}abc"} for index in indices]
    return batch


def test_a_worker_hands_over_one_piece_of_memory():
    loader = DataLoader(Batches(), num_workers=1, collate_fn=collate, multiprocessing_context="fork")
    for index, batch in enumerate(loader):
        assert isinstance(batch, PackedBatch)
        assert batch.pop("meta") == [{"entry": f"{index}abc"}]
        assert batch["recycles"]["msa"].tolist() == [[index] * 3] * 2
        tensors = [*batch.pop("recycles").values(), *batch.values()]
        assert len({tensor.untyped_storage().data_ptr() for tensor in tensors}) == 1
        assert all(tensor.data_ptr() % 64 == 0 for tensor in tensors if tensor.numel())
        assert_same(batch, some_tensors())
        batch["mask"].fill_(False)  # its memory can be written, and is nothing else's
        assert torch.equal(batch["counts"], some_tensors()["counts"])


def test_what_was_added_and_what_cannot_be_packed_travels_too():
    batch = PackedBatch(some_tensors())
    batch["late"] = torch.ones(3)
    batch["weight"] = torch.nn.Parameter(torch.full((2,), 4.0))
    batch["sparse"] = torch.eye(3).to_sparse()
    del batch["one"]
    found = pickle.loads(pickle.dumps(batch))
    assert found["weight"].requires_grad
    assert found["weight"].tolist() == [4, 4]
    assert torch.equal(found["sparse"].to_dense(), torch.eye(3))
    assert "one" not in found
    assert found["late"].tolist() == [1, 1, 1]


def test_copies_share_their_tensors():
    batch = PackedBatch(some_tensors())
    for other in (copy.copy(batch), batch.copy()):
        assert isinstance(other, PackedBatch)
        assert all(other[name] is batch[name] for name in batch)
        other["more"] = 1
        assert "more" not in batch
    deep = copy.deepcopy(batch)
    deep["mask"].fill_(True)
    assert not batch["mask"].all()


def test_an_empty_batch():
    assert pickle.loads(pickle.dumps(PackedBatch())) == {}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pinned_memory_is_one_piece_too():
    batch = PackedBatch(some_tensors(), meta=["a"]).pin_memory()
    assert batch.pop("meta") == ["a"]
    assert all(tensor.is_pinned() for tensor in batch.values() if tensor.numel())
    assert len({tensor.untyped_storage().data_ptr() for tensor in batch.values()}) == 1
    assert_same(batch, some_tensors())
