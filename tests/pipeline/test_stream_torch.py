import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from megafold.cache_store import LocalStore
from megafold.pipeline import schema
from megafold.pipeline.stream import (
    CropConfig,
    MsaConfig,
    PadSizes,
    SampleError,
    SamplerState,
    SamplingConfig,
    Stream,
    StreamConfig,
)
from megafold.pipeline.stream.symmetry import exchanges
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


def test_batches_carry_the_samples_symmetry_if_asked(cache, tmp_path):
    chains = [Chain(["ALA", "GLY"], sym=sym, origin=(0, 9 * sym, 0)) for sym in (1, 2, 3)]
    content = fake.structure("1abc", chains)
    fake.publish(tmp_path / "copies", [(content, chains, "")])
    stream = Stream(tmp_path / "copies", replace(CONFIG, symmetry=True))
    loader = torch.utils.data.DataLoader(
        StreamDataset(stream),
        batch_size=2,
        num_workers=1,
        multiprocessing_context="fork",
        collate_fn=TorchCollate(),
    )
    samples = [stream.sample(index) for index in range(8)]
    found = [own for batch in loader for own in batch["symmetry"]]
    for own, sample in zip(found, samples, strict=True):
        expected = exchanges(sample.features, sample.symmetry)
        assert own["orders"] == []  # this cache's components have no equivalent atoms
        assert len(own["chains"]) == 3
        for ours, theirs in zip(own["chains"], expected["chains"], strict=True):
            assert list(ours) == list(theirs)
            for name, value in theirs.items():
                np.testing.assert_array_equal(ours[name].numpy(), value)
    plain = StreamDataset(cache, CONFIG)
    assert "symmetry" not in TorchCollate()([plain[0]])


def test_rows_can_be_drawn_for_each_recycle(cache):
    changed = replace(CONFIG, msa=MsaConfig(rows=12, random_size=True, recycles=4))
    stream = Stream(cache, changed)
    samples = [stream.sample(index) for index in range(3)]
    batch = TorchCollate()(samples)
    assert set(batch) == {*schema.FEATURES, "recycles"}
    recycles = batch["recycles"]
    n_msa = max(len(turn["msa"]) for sample in samples for turn in (sample.features, *sample.recycles))
    assert set(recycles) == {"msa", "has_deletion", "deletion_value", "msa_mask"}
    assert recycles["msa"].shape == (3, 4, n_msa, batch["msa"].shape[-1])
    for place, sample in enumerate(samples):
        turns = [sample.features, *sample.recycles]
        assert len({turn["msa"].tobytes() for turn in turns}) > 1
        for recycle, turn in enumerate(turns):
            found = recycles["msa"][place, recycle][: len(turn["msa"])].numpy()
            np.testing.assert_array_equal(found[:, : turn["msa"].shape[1]], turn["msa"])
            assert recycles["msa_mask"][place, recycle].sum() == turn["msa_mask"].sum()
            # Row 0 is the query, whatever else there is.
            np.testing.assert_array_equal(turn["msa"][0], sample.features["msa"][0])
        # The first recycle is the sample of a stream that draws once.
        once = Stream(cache, replace(changed, msa=replace(changed.msa, recycles=1))).sample(place)
        np.testing.assert_array_equal(once.features["msa"], sample.features["msa"])
        assert once.recycles == ()
    padded = TorchCollate(PadSizes(msa=12, tokens=12))(samples)["recycles"]
    assert padded["deletion_value"].shape == (3, 4, 12, 12)
    assert padded["deletion_value"].dtype == torch.float32
    with pytest.raises(SampleError, match="different numbers of recycles"):
        TorchCollate()([samples[0], once])
    with pytest.raises(SampleError, match="N_msa"):
        TorchCollate(PadSizes(msa=1))(samples)
