import hashlib
import json
from collections import Counter
from dataclasses import asdict
from fractions import Fraction

import numpy as np
import pyarrow as pa
import pytest

from megafold.pipeline.errors import InputError
from megafold.pipeline.manifest import manifest_from_rows
from megafold.pipeline.stream import CropConfig, SamplingConfig, StreamConfig
from megafold.pipeline.stream.random_streams import RandomStreams, random_rotations
from megafold.pipeline.stream.sampling import TargetSampler, target_weights
from tests.pipeline.test_manifest import attributes, chain_row, entry_row


def chain(kind="protein", sequence="AAAA", cluster="", n_resolved=4, entity=1):
    digest = hashlib.sha256(sequence.encode()).hexdigest() if sequence else ""
    return chain_row(
        mol_type=kind, sequence_digest=digest, cluster=cluster, n_resolved=n_resolved, entity_id=entity
    )


def entry(name, chains, pairs=(), **changes):
    interfaces = [{"chain_i": i, "chain_j": j, "cluster": c} for i, j, c in pairs]
    return entry_row(name, chains=chains, interfaces=interfaces, **changes)


def manifest(*rows):
    return manifest_from_rows(rows, attributes())


def weights(data, rows=None):
    rows = np.arange(data.table.num_rows) if rows is None else np.array(rows)
    targets = target_weights(data.table, rows)
    keys = zip(targets.row, targets.chain_i, targets.chain_j, strict=True)
    return {
        tuple(map(int, key)): Fraction(float(w)).limit_denominator(1000)
        for key, w in zip(keys, targets.weight, strict=True)
    }


HALF = Fraction(1, 2)


def test_weights_by_hand():
    data = manifest(
        entry("1aaa", [chain(), chain(), chain("ligand", "")], [(0, 1, ""), (1, 2, "")]),
        entry("2bbb", [chain(), chain("rna", "UUUU")], [(0, 1, "")]),
        entry("3ccc", [chain("dna", "GGGG", n_resolved=0), chain("ligand", "")], [(0, 1, "")]),
    )
    assert weights(data) == {
        # three chains of one sequence; a ligand without a sequence is a cluster of its own
        (0, 0, -1): HALF * 3 / 3,
        (0, 1, -1): HALF * 3 / 3,
        (0, 2, -1): HALF * 1 / 1,
        (1, 0, -1): HALF * 3 / 3,
        (1, 1, -1): HALF * 3 / 1,
        # the DNA chain of 3ccc is unresolved: neither it nor its interface can be drawn
        (2, 1, -1): HALF * 1 / 1,
        (0, 0, 1): Fraction(6),
        (0, 1, 2): Fraction(4),
        (1, 0, 1): Fraction(6),
    }


def test_copies_of_a_ligand_in_an_entry_are_one_cluster():
    ions = [chain("ligand", "", entity=2) for _ in range(4)]
    data = manifest(
        entry("1aaa", [chain(), *ions, chain("ligand", "", entity=3)], [(0, i, "") for i in (1, 2, 3, 4, 5)]),
        entry("2bbb", [chain(), chain("ligand", "", entity=2)]),
    )
    found = weights(data)
    assert [found[0, i, -1] for i in range(1, 6)] == [HALF / 4] * 4 + [HALF]
    assert [found[0, 0, i] for i in range(1, 6)] == [Fraction(1)] * 4 + [Fraction(4)]
    assert found[1, 1, -1] == HALF


def test_given_clusters_are_used_and_kept_apart_from_sequences():
    data = manifest(
        entry("1aaa", [chain(cluster="c1"), chain(sequence="GGGG", cluster="c1")], [(0, 1, "")]),
        entry("2bbb", [chain(sequence="KKKK", cluster="c1"), chain(sequence="AAAA")], [(0, 1, "x")]),
        entry("3ccc", [chain(sequence="VVVV", cluster="c1"), chain(sequence="LLLL")], [(0, 1, "x")]),
    )
    found = weights(data)
    assert found[0, 0, -1] == found[0, 1, -1] == found[1, 0, -1] == HALF * 3 / 4
    assert found[1, 1, -1] == HALF * 3  # same sequence as a clustered chain, but in no cluster itself
    assert found[0, 0, 1] == 6
    assert found[1, 0, 1] == found[2, 0, 1] == 3


def test_interfaces_without_a_cluster_use_their_chains_clusters_in_either_order():
    a, b = chain(sequence="AAAA"), chain(sequence="GGGG")
    data = manifest(entry("1aaa", [a, b], [(0, 1, "")]), entry("2bbb", [b, a], [(0, 1, "")]))
    assert weights(data)[0, 0, 1] == weights(data)[1, 0, 1] == 3


def test_cluster_sizes_count_selected_rows_alone():
    data = manifest(entry("1aaa", [chain()]), entry("2bbb", [chain()]), entry("3ccc", [chain()]))
    assert weights(data, [0, 2]) == {(0, 0, -1): HALF * 3 / 2, (2, 0, -1): HALF * 3 / 2}


def test_draws_follow_the_weights():
    data = manifest(
        entry("1aaa", [chain(), chain("ligand", "")], [(0, 1, "")]), entry("2bbb", [chain("rna", "UU")])
    )
    sampler = TargetSampler(data, SamplingConfig())
    n_draw = 4000
    drawn = (sampler.draw(0, index) for index in range(n_draw))
    counts = Counter((draw.row, *draw.interest) for draw in drawn)
    expected = {(0, 0): 1.5, (0, 1): 0.5, (0, 0, 1): 4.0, (1, 0): 1.5}
    assert set(counts) == set(expected)
    for key, weight in expected.items():
        share = weight / 7.5
        assert abs(counts[key] / n_draw - share) < 5 * np.sqrt(share * (1 - share) / n_draw)


def test_a_draw_depends_on_seed_epoch_and_index_alone():
    rows = [entry(f"{i}aaa", [chain(sequence="A" * (i + 2))]) for i in range(8)]
    for mode in ("af3", "uniform"):
        config = SamplingConfig(weights=mode, epoch_size=20)
        straight = [TargetSampler(manifest(*rows), config).draw(1, i, 5) for i in range(20)]
        sampler = TargetSampler(manifest(*reversed(rows)), config)
        shuffled = {i: sampler.draw(1, i, 5) for i in reversed(range(20))}
        assert straight == [shuffled[i] for i in range(20)]
        assert straight != [sampler.draw(2, i, 5) for i in range(20)]
        assert straight != [sampler.draw(1, i, 6) for i in range(20)]


def test_uniform_goes_through_all_entries_before_any_comes_again():
    data = manifest(*(entry(f"{i}aaa", [chain()]) for i in range(9)))
    sampler = TargetSampler(data, SamplingConfig(weights="uniform"))
    assert sampler.epoch_size == 9
    for start in (0, 9):
        draws = [sampler.draw(0, start + i) for i in range(9)]
        assert {draw.row for draw in draws} == set(range(9))
        assert {draw.interest for draw in draws} == {()}


def test_filters_count_what_they_leave_out():
    data = manifest(
        entry("1aaa", [chain()], release_date="2001-01-01"),
        entry("2bbb", [chain()], release_date="2022-01-01"),
        entry("3ccc", [chain()], resolution=9.5),
        entry("4ddd", [chain()], resolution=None, release_date=None),
        entry("5eee", [chain()], n_token=9000),
        entry("6fff", [chain()], method="SOLUTION NMR"),
        entry("7ggg", [chain()], release_date="1975-01-01"),
    )
    config = SamplingConfig(
        released_from="1976-01-01",
        released_before="2021-10-01",
        max_resolution=9,
        max_tokens=5000,
        methods=("X-RAY DIFFRACTION",),
    )
    sampler = TargetSampler(data, config)
    assert list(sampler.rows) == [0, 3]
    assert sampler.filtered == {
        "released-too-late": 1,
        "released-too-early": 1,
        "resolution": 1,
        "too-many-tokens": 1,
        "method": 1,
    }


def test_one_entry_alone_can_be_asked_for():
    data = manifest(*(entry(f"{i}aaa", [chain()]) for i in range(4)))
    sampler = TargetSampler(data, SamplingConfig(entries=("2aaa",), epoch_size=5))
    assert {sampler.draw(0, i).row for i in range(5)} == {2}
    with pytest.raises(InputError, match="9zzz"):
        TargetSampler(data, SamplingConfig(entries=("9zzz",)))
    with pytest.raises(InputError, match="no entry"):
        TargetSampler(data, SamplingConfig(max_tokens=1))


def test_purposes_seeds_epochs_and_indices_have_streams_of_their_own():
    keys = [
        (0, 0, 0, "a"),
        (0, 0, 0, "b"),
        (1, 0, 0, "a"),
        (0, 1, 0, "a"),
        (0, 0, 1, "a"),
        (2**63, 0, 0, "a"),
    ]
    draws = {key: tuple(RandomStreams(*key[:3])(key[3]).random(4)) for key in keys}
    assert len({number for draw in draws.values() for number in draw}) == 4 * len(keys)
    streams = RandomStreams(0, 0, 0)
    streams("b").random(100)
    assert tuple(streams("a").random(4)) == draws[0, 0, 0, "a"]


def test_rotations_are_uniform_and_proper():
    rotations = random_rotations(np.random.default_rng(0), 20000).astype(np.float64)
    identity = np.einsum("rij,rkj->rik", rotations, rotations)
    assert abs(identity - np.eye(3)).max() < 1e-6
    assert np.linalg.det(rotations).min() > 0.999
    # Haar measure: entries have mean 0 and variance 1/3; the trace has mean 0, its square mean 1.
    assert abs(rotations.mean(axis=0)).max() < 5 * np.sqrt(1 / 3 / 20000)
    assert abs((rotations**2).mean(axis=0) - 1 / 3).max() < 0.02
    trace = np.trace(rotations, axis1=1, axis2=2)
    assert abs((trace**2).mean() - 1) < 0.05


def test_defaults_are_those_of_initial_training():
    """AF3 SI 2.2, 2.4 (templates), 2.5.4 (chains), 2.7 and table 6 (crops)."""
    config = StreamConfig()
    crop, template = config.crop, config.template
    assert (crop.tokens, crop.atoms, crop.max_chains, crop.interface_distance) == (384, 4608, 20, 15.0)
    assert (crop.contiguous, crop.spatial, crop.interface) == (0.2, 0.4, 0.4)
    assert CropConfig(tokens=640).atoms == 7680
    assert CropConfig(tokens=64).atoms == 4608
    assert (template.count, template.candidates, template.days_before_release) == (4, 20, 60)
    assert (template.min_aligned, template.min_coverage, template.duplicate_coverage) == (10, 0.1, 0.95)
    assert (template.missing_date, template.entry_missing_date) == (None, None)
    assert (config.augment, config.sampling.weights) == (True, "af3")


def test_settings_are_read_from_mappings():
    config = StreamConfig.from_mapping(
        {"seed": 3, "crop": {"tokens": 128}, "sampling": {"entries": ["1abc"], "weights": "uniform"}}
    )
    assert (config.seed, config.crop.tokens, config.sampling.entries) == (3, 128, ("1abc",))
    with pytest.raises(InputError, match=r"unknown token in stream\.crop; known: atoms"):
        StreamConfig.from_mapping({"crop": {"token": 1}})
    with pytest.raises(InputError, match="not an ISO date"):
        SamplingConfig(released_before="30.9.2021")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seed": "1"}, r"stream\.seed is '1': it has to be a whole number"),
        ({"augment": "no"}, r"stream\.augment is 'no': it has to be true or false"),
        ({"crop": {"tokens": 1.5}}, r"stream\.crop\.tokens is 1\.5"),
        ({"crop": {"tokens": True}}, r"stream\.crop\.tokens is True"),
        ({"crop": 5}, r"stream\.crop is 5: it has to be an object"),
        ({"sampling": {"entries": "1abc"}}, r"entries is '1abc': it has to be a list, each item text"),
        ({"sampling": {"max_tokens": "9"}}, "max_tokens is '9': it has to be a whole number or null"),
        ({"sampling": {"where": 5}}, "where is 5: it has to be text"),
        ({"sampling": {"split": {"part": 1}}}, "part is 1: it has to be text"),
    ],
)
def test_settings_of_another_type_are_refused(settings, message):
    with pytest.raises(InputError, match=message):
        StreamConfig.from_mapping(settings)


def test_settings_come_back_from_what_json_makes_of_them():
    config = StreamConfig(
        crop=CropConfig(contiguous=0, spatial=1, interface=0),
        sampling=SamplingConfig(entries=("1abc",), max_resolution=3, released_before="2021-09-30"),
    )
    assert StreamConfig.from_mapping(json.loads(json.dumps(asdict(config)))) == config


def test_weights_take_a_few_columns_of_the_manifest():
    """Of 250 000 entries, all of the others would be copied for each process."""
    data = manifest(
        entry("1aaa", [chain(), chain("rna", "UUUU"), chain("ligand", "")], [(0, 1, ""), (1, 2, "")]),
        entry("2bbb", [chain(sequence="CCCC"), chain("dna", "GGGG")], [(0, 1, "")]),
        entry("3ccc", [chain(), chain(cluster="protein:x")], [(0, 1, "")]),
    )
    names = {
        "chains": ("mol_type", "n_resolved", "cluster", "sequence_digest", "entity_id"),
        "interfaces": ("chain_i", "chain_j", "cluster"),
    }
    columns = {
        column: [
            [{name: item[name] for name in wanted} for item in row] for row in data.table[column].to_pylist()
        ]
        for column, wanted in names.items()
    }
    for rows, known in (([0, 1, 2], None), ([2, 0], None), ([2], [0, 1]), ([0, 2], [1])):
        chosen, before = np.array(rows), None if known is None else np.array(known)
        expected = target_weights(data.table, chosen, before)
        found = target_weights(pa.table(columns), chosen, before)
        for name in ("row", "chain_i", "chain_j", "weight"):
            np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))


def test_weights_of_a_table_in_several_chunks_are_those_of_one():
    rows = [
        entry(f"{n}aaa", [chain(sequence="A" * (4 + n // 2)), chain("ligand", "")], [(0, 1, "")])
        for n in range(5)
    ]
    data = manifest(*rows)
    chunks = pa.concat_tables([data.table.slice(0, 2), data.table.slice(2, 1), data.table.slice(3)])
    assert chunks["chains"].num_chunks == 3
    for chosen in (np.arange(5), np.array([4, 1])):
        one, several = target_weights(data.table, chosen), target_weights(chunks, chosen)
        for name in ("row", "chain_i", "chain_j", "weight"):
            np.testing.assert_array_equal(getattr(several, name), getattr(one, name))
