"""The real corpus through the whole data path: build, reuse, samples."""

import pytest
from torch.utils.data import DataLoader

from megafold.cache_store import LocalStore
from megafold.pipeline.builder.config import BuildConfig, Resources, Sources
from megafold.pipeline.builder.engine import Build, BuildReport
from megafold.pipeline.builder.progress import BuildProgress
from megafold.pipeline.manifest import entry_rows
from megafold.pipeline.stream import (
    CropConfig,
    MsaConfig,
    SamplerState,
    Stream,
    StreamConfig,
    validate_sample,
)
from megafold.pipeline.stream.torch_dataset import RankSampler, StreamDataset

pytestmark = [pytest.mark.corpus, pytest.mark.slow]

ATOMS_PER_TOKEN = 12


def build(corpus_dir, cache) -> BuildReport:
    structures = corpus_dir / "structures"
    sources = Sources(
        corpus=structures, alignments=corpus_dir / "alignments", template_structures=(structures,)
    )
    config = BuildConfig(sources=sources, cache=cache, resources=Resources(workers=2))
    return Build(config, BuildProgress(quiet=True)).run()


@pytest.fixture(scope="module")
def built(corpus_dir, tmp_path_factory):
    cache = tmp_path_factory.mktemp("corpus") / "cache"
    return cache, build(corpus_dir, cache)


def test_entries_succeed(built):
    cache, report = built
    rows = {row.entry: row for row in entry_rows(LocalStore.at(cache).manifest())}
    assert len(rows) >= 79
    assert {"209d-assembly1", "721p-assembly1"} <= set(rows)
    assert len(rows) + len({f["entry"] for f in report.failures if f["stage"] == "structure"}) == 81


def test_second_build_computes_nothing(built, corpus_dir):
    again = build(corpus_dir, built[0])
    assert again.computed == {}
    assert again.manifest == built[1].manifest


def stream_config(tokens: int) -> StreamConfig:
    crop = CropConfig(tokens=tokens, atoms=ATOMS_PER_TOKEN * tokens)
    return StreamConfig(seed=11, crop=crop, msa=MsaConfig(rows=256))


@pytest.mark.parametrize(("tokens", "samples"), [(64, 1000), (256, 600), (384, 400)])
def test_samples_keep_limits_and_masks(built, tokens, samples):
    stream = Stream(built[0], stream_config(tokens))
    entries = set()
    for index in range(samples):
        epoch, place = divmod(index, len(stream))
        sample = stream.sample(place, epoch=epoch)
        features = sample.features
        validate_sample(features)  # dtypes, axes; finite wherever a mask is true
        assert 1 <= len(features["token_mask"]) <= tokens
        assert len(features["atom_mask"]) <= ATOMS_PER_TOKEN * tokens
        assert len(features["msa"]) <= 256
        entries.add(sample.meta["entry"])
    assert len(entries) > 40


def fingerprint(sample) -> dict[str, bytes]:
    return {name: value.tobytes() for name, value in sample.features.items()}


def first(samples):
    """Collation that keeps a sample as it is."""
    return samples[0]


def test_samples_do_not_depend_on_workers_or_a_resume(built):
    config = stream_config(64)
    dataset = StreamDataset(built[0], config)
    alone = [fingerprint(dataset[index]) for index in range(24)]
    loader = DataLoader(
        StreamDataset(built[0], config),
        num_workers=4,
        multiprocessing_context="forkserver",
        collate_fn=first,
        sampler=RankSampler(24, SamplerState(seed=11)),
    )
    assert [fingerprint(sample) for sample in loader] == alone
    resumed = DataLoader(
        StreamDataset(built[0], config),
        num_workers=1,
        multiprocessing_context="spawn",
        collate_fn=first,
        sampler=RankSampler(24, SamplerState(seed=11, position=15)),
    )
    assert [fingerprint(sample) for sample in resumed] == alone[15:]
