import subprocess
import sys

import numpy as np
import pytest

from megafold.cache_store import LocalStore
from megafold.pipeline import schema
from megafold.pipeline.stream import CropConfig, PadSizes, SamplerState, SamplingConfig, Stream, StreamConfig
from tests.pipeline import stream_cache as fake
from tests.pipeline.stream_cache import Chain

torch = pytest.importorskip("torch")

from megafold.pipeline.stream.torch_dataset import RankSampler, StreamDataset, TorchCollate  # noqa: E402

CONFIG = StreamConfig(crop=CropConfig(tokens=12, atoms=80), sampling=SamplingConfig(epoch_size=8), seed=11)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    path = tmp_path_factory.mktemp("torch") / "cache"
    store = LocalStore.create(path)
    entries = []
    for number in range(3):
        deep = ["".join("AGK"[(i * j + number) % 3] for j in range(20)) for i in range(30)]
        chains = [
            Chain(["ALA", "GLY", "LYS", "MSE"] * 5, msa=str(store.put(fake.msa("AGKM" * 5, deep)))),
            Chain(["LGD"], schema.MolType.LIGAND, entity=2, origin=(5, 4, 0)),
        ]
        entries.append((fake.structure(f"{number}abc", chains, (), [(0, 1)]), chains, ""))
    fake.publish(path, entries)
    return path


def expected(cache, epoch):
    stream = Stream(cache, CONFIG)
    return [stream.sample(index, epoch=epoch) for index in range(8)]


def check(batches, samples):
    """Batches of two hold the samples in order."""
    assert len(batches) == 4
    for place, sample in enumerate(samples):
        batch = batches[place // 2]
        assert batch["meta"][place % 2] == sample.meta
        for name, value in sample.features.items():
            inside = tuple(slice(n) for n in value.shape)
            np.testing.assert_array_equal(batch[name][place % 2].numpy()[inside], value)


@pytest.mark.parametrize(("workers", "method"), [(0, None), (4, "fork"), (1, "spawn"), (1, "forkserver")])
def test_loaders_hand_over_the_same_samples_whatever_the_workers(cache, workers, method):
    dataset = StreamDataset(cache, CONFIG)
    dataset[0]  # the parent has the cache open when it forks
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=2,
        num_workers=workers,
        multiprocessing_context=method,
        persistent_workers=workers > 0,
        collate_fn=TorchCollate(PadSizes(templates=4), meta=True),
    )
    check(list(loader), expected(cache, 0))
    dataset.set_epoch(1)  # seen by workers that are running
    check(list(loader), expected(cache, 1))


def test_rank_sampler_and_epochs_in_indices(cache):
    dataset = StreamDataset(cache, CONFIG)
    samples = expected(cache, 5)
    for rank in range(2):
        sampler = RankSampler(len(dataset), SamplerState(11, 5, 2), rank, 2)
        assert len(sampler) == 3
        got = [dataset[item].meta["index"] for item in sampler]
        assert sampler.state_dict() == {"seed": 11, "epoch": 6, "position": 0}
        assert len(sampler) == 3  # of the iteration that is over
        assert got == [2 + rank, 4 + rank, 6 + rank]
        assert dataset[5, rank].meta == samples[rank].meta
    with pytest.raises(IndexError, match="index 8"):
        dataset[8]


def test_batches_are_tensors_with_the_schemas_dtypes(cache):
    dataset = StreamDataset(cache, CONFIG)
    batch = TorchCollate()([dataset[0], dataset[1], dataset[2]])
    assert set(batch) == set(schema.FEATURES)
    kinds = {"int32": torch.int32, "float32": torch.float32, "bool": torch.bool}
    for feature in schema.SAMPLE:
        assert batch[feature.name].dtype == kinds[feature.dtype]
        assert len(batch[feature.name]) == 3


def test_the_stream_itself_needs_no_torch():
    code = (
        "import sys, megafold.pipeline.stream; sys.exit(bool({'torch', 'rdkit', 'dask'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
