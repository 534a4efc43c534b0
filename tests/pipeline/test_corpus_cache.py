"""The real corpus through the whole data path: build, reuse, samples."""

import itertools
from collections import Counter

import numpy as np
import pytest
from torch.utils.data import DataLoader

from megafold.cache_store import LocalStore
from megafold.pipeline import schema
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
from megafold.pipeline.stream.crop import crop_entry
from megafold.pipeline.stream.entry import EntryTables
from megafold.pipeline.stream.random_streams import RandomStreams
from megafold.pipeline.stream.torch_dataset import RankSampler, StreamDataset
from megafold.pipeline.structure import StructureOptions
from tests.pipeline.structure_files import make

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


SIZES = (32, 64, 128, 256, 384, 512, 640, 768)


def check_crops(entry: EntryTables, name: str, place: int) -> bool:
    """Crops of every size, with many and few atoms, around 0, 1 and 2 chains; whether one was atomised."""
    atomised = False
    n_chain = len(entry.chains["asym_id"])
    is_standard = entry.residues["is_standard"][entry.tokens["residue"]].astype(bool)
    is_polymer = entry.chains["mol_type"][entry.token_chain] != schema.MolType.LIGAND
    for tokens, per_token, index in itertools.product(SIZES, (4, ATOMS_PER_TOKEN), range(3)):
        config = CropConfig(tokens=tokens, atoms=per_token * tokens)
        streams = RandomStreams(index, tokens, place)
        interest = streams("test").choice(n_chain, min(index, n_chain), replace=False).tolist()
        crop = crop_entry(entry, config, streams, sorted(interest)).tokens
        assert 1 <= len(crop) <= tokens, name
        assert entry.tokens["atom_count"][crop].sum() <= per_token * tokens, name
        assert (np.diff(crop) > 0).all(), name
        assert len(np.unique(entry.token_chain[crop])) <= 20, name
        atomised |= bool((is_polymer & ~is_standard)[crop].any())
    return atomised


def test_crops_of_every_entry_hold_to_every_limit(built):
    stream = Stream(built[0])
    rows = list(entry_rows(LocalStore.at(built[0]).manifest()))
    atomised = [
        row.entry for place, row in enumerate(rows) if check_crops(stream.read_entry(row), row.entry, place)
    ]
    assert len(atomised) >= 9
    assert sum(len(row.chains) > 20 for row in rows) >= 4


@pytest.mark.exhaustive
def test_crops_of_the_other_entries_hold_to_every_limit(corpus_dir):
    """Those of the second batch, as their files say, without a cache."""
    paths = sorted((corpus_dir / "more/structures").iterdir())
    assert len(paths) == 70
    atomised, many_chains = 0, 0
    for place, path in enumerate(paths):
        content = make(path, StructureOptions()).content
        entry = EntryTables.from_arrays(content.arrays, content.attributes)
        atomised += check_crops(entry, path.name, place)
        many_chains += len(entry.chains["asym_id"]) > 20
    assert atomised >= 10
    assert many_chains >= 7


def naive_targets(rows):
    """AF3 SI 2.5.1, chain by chain: {(row, chains): weight}, and each target's cluster."""
    alpha = {"protein": 3, "rna": 3, "dna": 3, "ligand": 1}
    members: dict = {}
    for place, row in enumerate(rows):
        names = [
            chain.cluster or chain.sequence_digest or f"{place} {chain.entity_id}" for chain in row.chains
        ]
        resolved = [chain.n_resolved > 0 for chain in row.chains]
        weights = [alpha[chain.mol_type] for chain in row.chains]
        for i, name in enumerate(names):
            if resolved[i]:
                members.setdefault(name, []).append(((place, i), 0.5 * weights[i]))
        for pair in row.interfaces:
            i, j = pair.chain_i, pair.chain_j
            if resolved[i] and resolved[j]:
                cluster = pair.cluster or tuple(sorted((names[i], names[j])))
                members.setdefault(cluster, []).append(((place, i, j), 1.0 * (weights[i] + weights[j])))
    return {key: weight / len(group) for group in members.values() for key, weight in group}


def test_chains_and_interfaces_are_drawn_by_the_supplements_weights(built):
    stream = Stream(built[0])
    rows = list(entry_rows(LocalStore.at(built[0]).manifest()))
    expected = naive_targets(rows)
    targets = stream.sampler.targets
    found = {
        (int(row), int(i), int(j)) if j >= 0 else (int(row), int(i)): float(weight)
        for row, i, j, weight in zip(
            targets.row, targets.chain_i, targets.chain_j, targets.weight, strict=True
        )
    }
    assert found == pytest.approx(expected)
    n_draw = 5000
    counts = Counter(stream.sampler.draw(0, index).row for index in range(n_draw))
    total = sum(expected.values())
    shares = np.zeros(len(rows))
    for key, weight in expected.items():
        shares[key[0]] += weight / total
    wanted = n_draw * shares
    drawn = np.array([counts[row] for row in range(len(rows))])
    common = wanted >= 5
    chi_square = ((drawn - wanted)[common] ** 2 / wanted[common]).sum()
    assert chi_square < common.sum() + 5 * np.sqrt(2 * common.sum())
    assert not drawn[wanted == 0].any()
