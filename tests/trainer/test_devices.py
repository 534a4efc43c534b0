"""Devices by name, and batches on them."""

import pytest
import torch

from megafold.trainer.data_parallel import Ranks
from megafold.trainer.devices import resolve_device, to_device
from megafold.trainer.errors import ConfigError, DataError
from tests.trainer.fakes import FakeFeed


@pytest.mark.parametrize("name", ["gpu", "cuda:99", "cuda"])
def test_a_device_that_is_not_there_is_named(name, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match=name):
        resolve_device(name, Ranks())
    assert resolve_device("auto", Ranks()) == torch.device("cpu")


def test_a_batch_keeps_its_tensors_alone_and_lacks_none_that_is_needed():
    batch = FakeFeed().batch(1)
    assert to_device({**batch, "meta": [{}]}, torch.device("cpu")).keys() == batch.keys()
    del batch["coords_mask"]
    with pytest.raises(DataError, match="coords_mask"):
        to_device(batch, torch.device("cpu"))


def test_a_batch_brings_the_resolutions_that_its_metas_tell():
    batch = FakeFeed().batch(1)
    metas = [{"resolution": 2.5}, {"resolution": None}]
    resolution = to_device({**batch, "meta": metas}, torch.device("cpu"))["resolution"]
    assert resolution.dtype == torch.float32
    assert resolution[0] == 2.5
    assert resolution[1].isnan()
