import itertools
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megafold.pipeline.errors import InputError
from megafold.pipeline.schema import MolType
from megafold.pipeline.stream import CropConfig
from megafold.pipeline.stream.crop import (
    METHODS,
    contiguous_order,
    crop_entry,
    nearest_chains,
    random_interface_token,
    spatial_order,
)
from megafold.pipeline.stream.entry import EntryTables, ranges
from megafold.pipeline.stream.random_streams import RandomStreams
from tests.pipeline.stream_cache import Chain, structure


def tables(chains):
    content = structure("test", chains)
    return EntryTables.from_arrays(content.arrays, content.attributes)


def atoms_of(entry, tokens):
    return int(entry.tokens["atom_count"][tokens].sum())


CODES = {
    MolType.PROTEIN: ["ALA", "GLY", "LYS", "MSE"],
    MolType.RNA: ["U", "PSU"],
    MolType.LIGAND: ["LGD", "ZN"],
}


@st.composite
def entries(draw):
    chains: list[Chain] = []
    for _ in range(draw(st.integers(1, 6))):
        kind = draw(st.sampled_from(list(CODES)))
        length = 1 if kind == MolType.LIGAND else draw(st.integers(1, 12))
        codes = draw(st.lists(st.sampled_from(CODES[kind]), min_size=length, max_size=length))
        origin = tuple(draw(st.integers(-20, 20)) for _ in range(3))
        unresolved = draw(st.sets(st.integers(0, length - 1)))
        chains.append(Chain(codes, kind, entity=len(chains) + 1, origin=origin, unresolved=unresolved))
    return tables(chains)


@settings(max_examples=150, deadline=None)
@given(
    entry=entries(),
    limit=st.integers(1, 60),
    atoms=st.integers(24, 200),
    seed=st.integers(0, 2**32),
    method=st.sampled_from(METHODS),
    data=st.data(),
)
def test_limits_hold_and_order_is_kept(entry, limit, atoms, seed, method, data):
    n_chain = len(entry.chains["asym_id"])
    interest = data.draw(st.sets(st.integers(0, n_chain - 1), max_size=2))
    config = CropConfig(
        tokens=limit, atoms=atoms, max_chains=3, **{name: float(name == method) for name in METHODS}
    )
    crop = crop_entry(entry, config, RandomStreams(seed, 0, 0), sorted(interest))
    assert 1 <= len(crop.tokens) <= limit
    assert atoms_of(entry, crop.tokens) <= atoms
    assert (np.diff(crop.tokens) > 0).all()
    assert len(set(entry.token_chain[crop.tokens])) <= 3
    pool = nearest_chains(entry, config, RandomStreams(seed, 0, 0), sorted(interest))
    assert set(crop.tokens) <= set(pool)
    if crop.center is not None:
        assert entry.resolved[crop.center]
        assert crop.center in crop.tokens
    if len(pool) <= limit and atoms_of(entry, pool) <= atoms:
        assert list(crop.tokens) == list(pool)


@settings(max_examples=40, deadline=None)
@given(entry=entries(), seed=st.integers(0, 2**32))
def test_the_same_key_gives_the_same_crop(entry, seed):
    config = CropConfig(tokens=8, atoms=50)
    first, second = (crop_entry(entry, config, RandomStreams(seed, 1, 2), (0,)) for _ in range(2))
    assert list(first.tokens) == list(second.tokens)
    assert (first.method, first.center) == (second.method, second.center)


def test_polymer_of_modified_residues_stays_within_both_limits():
    # Every MSE is eight tokens, the last nine: a limit in residues would overshoot eightfold.
    entry = tables([Chain(["MSE"] * 60)])
    for index in range(30):
        crop = crop_entry(entry, CropConfig(tokens=100, atoms=60), RandomStreams(0, 0, index))
        assert len(crop.tokens) == 60  # one atom each: the atom limit binds
        crop = crop_entry(entry, CropConfig(tokens=100, atoms=4608), RandomStreams(0, 0, index))
        assert len(crop.tokens) == 100


def test_nucleotides_stop_at_the_atom_limit():
    entry = tables([Chain(["U"] * 50, MolType.RNA)])
    for index in range(20):
        crop = crop_entry(entry, CropConfig(tokens=50, atoms=110), RandomStreams(0, 0, index))
        # 20 atoms each, 21 the first: five fit
        assert len(crop.tokens) == 5


def naive_spatial(center, pool, reference):
    def key(token):
        distance = sum((float(a) - float(b)) ** 2 for a, b in zip(center[token], center[reference]))  # noqa: B905
        return (token != reference, np.inf if np.isnan(distance) else distance, token)

    return sorted(pool, key=key)


def test_a_crop_holds_its_centre_beside_others_in_its_place():
    entry = tables([Chain(["ZN"], MolType.LIGAND, entity=2)] * 4)  # an ion on an axis, with its copies
    config = CropConfig(tokens=1, contiguous=0, spatial=1, interface=0)
    crops = [crop_entry(entry, config, RandomStreams(0, 0, index)) for index in range(40)]
    assert all(list(crop.tokens) == [crop.center] for crop in crops)
    assert {crop.center for crop in crops} == {0, 1, 2, 3}


@settings(max_examples=60, deadline=None)
@given(entry=entries(), data=st.data())
def test_spatial_order_is_the_centre_then_by_distance_then_index_unresolved_last(entry, data):
    resolved = np.flatnonzero(entry.resolved)
    if not len(resolved):
        return
    reference = data.draw(st.sampled_from(list(resolved)))
    pool = np.arange(entry.n_token)
    order = spatial_order(entry.token_center, pool, int(reference))
    assert list(order) == naive_spatial(entry.token_center, pool, reference)


def naive_interface_tokens(entry, interest, distance=15.0):
    found = set()
    for a, b in itertools.permutations(np.flatnonzero(entry.resolved), 2):
        if entry.token_chain[a] == entry.token_chain[b]:
            continue
        near = np.linalg.norm(entry.token_center[a].astype(float) - entry.token_center[b]) < distance
        if near and (not interest or entry.token_chain[a] in interest):
            if len(interest) == 2 and entry.token_chain[b] not in interest:
                continue
            found.add(int(a))
    return found


@pytest.mark.parametrize("interest", [(), (0,), (0, 1), (0, 2)])
def test_interface_tokens_are_uniform_over_all_there_are(interest):
    # B lies 10 Å off A's far end, C 10 Å off A's near end; B and C do not touch.
    entry = tables(
        [
            Chain(["ALA"] * 20, unresolved={0}),
            Chain(["ALA"] * 6, entity=2, origin=(3.8 * 18, 10, 0)),
            Chain(["LGD"], MolType.LIGAND, entity=3, origin=(0, 10, 0)),
        ]
    )
    expected = naive_interface_tokens(entry, interest)
    assert expected
    pool = np.arange(entry.n_token)
    n_draw = 3000
    counts = Counter(
        random_interface_token(entry, pool, interest, 15.0, np.random.default_rng(i)) for i in range(n_draw)
    )
    assert set(counts) == expected
    share = n_draw / len(expected)
    chi_square = sum((count - share) ** 2 / share for count in counts.values())
    degrees = len(expected) - 1
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees)


def test_interface_of_two_chains_that_do_not_touch_falls_back_to_any_other_chain():
    entry = tables(
        [
            Chain(["ALA"] * 3),
            Chain(["ALA"] * 3, entity=2, origin=(500, 0, 0)),
            Chain(["ALA"] * 3, entity=3, origin=(500, 8, 0)),
        ]
    )
    rng = np.random.default_rng(0)
    found = {random_interface_token(entry, np.arange(9), (0, 1), 15.0, rng) for _ in range(60)}
    assert found == {3, 4, 5}
    assert random_interface_token(entry, np.arange(9), (0,), 15.0, rng) is None
    crop = crop_entry(entry, CropConfig(contiguous=0, spatial=0, interface=1), RandomStreams(0, 0, 0), (0,))
    assert crop.method == "spatial"
    assert crop.center in (0, 1, 2)


def naive_contiguous(lengths, limit, rng):
    """AlphaFold-Multimer's algorithm 1 as printed: the number of residues kept of each chain."""
    added, remaining = 0, sum(lengths)
    kept = [0] * len(lengths)
    chains = list(range(len(lengths)))
    rng.shuffle(chains)
    for k in chains:
        remaining -= lengths[k]
        most = min(limit - added, lengths[k])
        least = min(lengths[k], max(0, limit - (added + remaining)))
        kept[k] = rng.randint(least, most)
        added += kept[k]
    return kept


def test_contiguous_crops_have_the_distribution_of_the_algorithm():
    lengths = [10, 25, 5]
    entry = tables([Chain(["ALA"] * n, entity=i + 1) for i, n in enumerate(lengths)])
    pool = np.arange(entry.n_token)
    rng, reference = np.random.default_rng(5), random.Random(5)
    n_draw, limit = 3000, 18
    drawn, printed = [], []
    for _ in range(n_draw):
        order = contiguous_order(entry, pool, limit, rng)
        assert len(order) == limit
        chain = entry.token_chain[order]
        for c in set(chain):
            assert (np.diff(order[chain == c]) == 1).all()
        drawn.append(np.bincount(chain, minlength=3))
        printed.append(naive_contiguous(lengths, limit, reference))
    ours, naive = np.array(drawn), np.array(printed)
    error = np.sqrt((ours.var(axis=0) + naive.var(axis=0)) / n_draw)
    assert (abs(ours.mean(axis=0) - naive.mean(axis=0)) < 5 * error).all()
    assert (abs(ours.std(axis=0) - naive.std(axis=0)) < 0.15 * naive.std(axis=0)).all()


def test_contiguous_crops_hold_a_resolved_token():
    entry = tables([Chain(["ALA"] * 200, unresolved=set(range(180)))])
    config = CropConfig(tokens=10, contiguous=1, spatial=0, interface=0)
    for index in range(100):
        crop = crop_entry(entry, config, RandomStreams(0, 0, index))
        assert entry.resolved[crop.tokens].any()
        assert (np.diff(crop.tokens) == 1).all()


def test_an_entry_without_coordinates_is_cropped_all_the_same():
    entry = tables([Chain(["ALA"] * 30, unresolved=set(range(30)))])
    for index in range(10):
        crop = crop_entry(entry, CropConfig(tokens=10), RandomStreams(0, 0, index))
        assert (crop.method, crop.center, len(crop.tokens)) == ("contiguous", None, 10)


def test_methods_are_chosen_with_their_probabilities():
    entry = tables([Chain(["ALA"] * 3), Chain(["ALA"] * 3, entity=2, origin=(0, 5, 0))])
    config = CropConfig(tokens=4, contiguous=0.2, spatial=0.5, interface=0.3)
    counts = Counter(crop_entry(entry, config, RandomStreams(3, 0, i)).method for i in range(2000))
    for method, expected in (("contiguous", 0.2), ("spatial", 0.5), ("interface", 0.3)):
        assert abs(counts[method] / 2000 - expected) < 0.05  # over four standard deviations


def test_centres_are_tokens_of_the_chain_of_interest():
    entry = tables([Chain(["ALA"] * 9), Chain(["ALA"] * 4, entity=2, origin=(0, 5, 0), unresolved={1})])
    config = CropConfig(tokens=3, contiguous=0, spatial=1, interface=0)
    centers = {crop_entry(entry, config, RandomStreams(0, 0, i), (1,)).center for i in range(60)}
    assert centers == {9, 11, 12}


def test_over_twenty_chains_are_cut_to_the_nearest_twenty():
    # 30 chains in a row 6 Å apart: the nearest 20 to any token are a run of neighbours, or an end.
    chains = [Chain(["ALA"] * 2, sym=i + 1, origin=(0, 6 * i, 0)) for i in range(30)]
    entry = tables(chains)
    config = CropConfig(tokens=60, contiguous=1, spatial=0, interface=0)
    for index in range(20):
        kept = sorted(
            set(entry.token_chain[crop_entry(entry, config, RandomStreams(0, 0, index), (29,)).tokens])
        )
        assert kept == list(range(10, 30))


@pytest.mark.parametrize("changes", [{"tokens": 0}, {"atoms": 5}, {"spatial": 0.9}, {"max_chains": 0}])
def test_impossible_settings_are_refused(changes):
    with pytest.raises(InputError, match="stream settings"):
        CropConfig(**changes)


def test_long_crops_have_room_for_their_atoms():
    # Amino acids have 7.8 heavy atoms in the mean, so 4 608 would end a protein's crop at some 590 tokens.
    assert [CropConfig(tokens=tokens).atoms for tokens in (64, 384, 768)] == [4608, 4608, 9216]
    assert CropConfig(tokens=768, atoms=100).atoms == 100


def test_ranges_are_concatenated():
    assert list(ranges(np.array([5, 0, 9]), np.array([2, 0, 3]))) == [5, 6, 9, 10, 11]
    assert list(ranges(np.array([], int), np.array([], int))) == []
