from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megafold.pipeline.schema import GAP
from megafold.pipeline.stream.msa import MsaBlock, msa_features, plan_rows, squashed


def rng(seed=0):
    return np.random.default_rng(seed)


def block(tokens, columns, msa, deletion=None):
    msa = np.array(msa, np.int8).T  # tests write rows, objects store columns
    deletion = np.zeros(msa.shape, np.uint8) if deletion is None else np.array(deletion, np.uint8).T
    return MsaBlock(
        tokens=np.array(tokens),
        columns=np.array(columns),
        msa=msa,
        deletion=deletion,
        profile=np.full((len(msa), 32), 1 / 32, np.float16),
        deletion_mean=np.arange(len(msa), dtype=np.float32),
    )


def test_blocks_by_hand():
    # Tokens 0, 1 and copies 3, 4 are one protein; 2 is a ligand; 5 and 6 are atoms of one residue of another.
    first = block(
        [0, 1, 3, 4], [0, 1, 0, 1], [[1, 2], [3, 4], [5, 6], [7, 8]], [[0, 0], [0, 3], [0, 0], [9, 0]]
    )
    second = block([5, 6], [0, 0], [[10], [11], [12]])
    pairing = np.array([[0, 0], [3, 1]], np.int32)
    plan = plan_rows([4, 3], pairing, 16, rng())
    features = msa_features(np.array([1, 2, 20, 1, 2, 20, 20], np.int32), [first, second], plan)
    gap = GAP
    assert features["msa"].tolist() == [
        [1, 2, 20, 1, 2, 10, 10],
        [7, 8, gap, 7, 8, 11, 11],  # paired: row 3 with row 1
        [3, 4, gap, 3, 4, gap, gap],  # unpaired of the first: rows 1 and 2, in both copies
        [5, 6, gap, 5, 6, gap, gap],
        [gap, gap, gap, gap, gap, 12, 12],  # unpaired of the second
    ]
    nine, three = 2 / np.pi * np.arctan(3), 2 / np.pi * np.arctan(1)
    expected = np.zeros((5, 7))
    expected[1, [0, 3]] = nine
    expected[2, [1, 4]] = three
    np.testing.assert_allclose(features["deletion_value"], expected, atol=1e-6)
    assert (features["has_deletion"] == (expected > 0)).all()
    assert features["msa_mask"].all()
    assert features["profile"][2].tolist() == [float(i == 20) for i in range(32)]
    np.testing.assert_allclose(features["profile"][0], 1 / 32)
    assert features["deletion_mean"].tolist() == [
        0,
        1,
        0,
        0,
        1,
        0,
        0,
    ]  # counts: only single rows' are squashed


def test_a_chain_that_a_paired_row_lacks_has_a_gap_there_without_deletions():
    first = block([0], [0], [[1], [2], [3]], [[0], [1], [2]])
    second = block([1], [0], [[4], [5]], [[7], [0]])
    plan = plan_rows([3, 2], np.array([[0, 0], [1, 1], [2, -1]], np.int32), 16, rng())
    features = msa_features(np.array([1, 4], np.int32), [first, second], plan)
    assert features["msa"].tolist() == [[1, 4], [2, 5], [3, GAP]]
    assert features["has_deletion"].tolist() == [[0, 1], [1, 0], [1, 0]]
    expected = 2 / np.pi * np.arctan(np.array([[0, 7], [1, 0], [2, 0]]) / 3)
    np.testing.assert_allclose(features["deletion_value"], expected, rtol=1e-6)


def test_without_any_msa_there_is_the_query_alone():
    plan = plan_rows([], None, 16, rng())
    features = msa_features(np.array([3, 20], np.int32), [], plan)
    assert features["msa"].tolist() == [[3, 20]]
    assert features["profile"].argmax(axis=1).tolist() == [3, 20]
    assert not features["deletion_mean"].any()


def test_a_row_that_the_pairing_uses_is_never_unpaired_even_if_the_subset_left_it_out():
    pairing = np.stack([np.arange(0, 50), np.arange(0, 50)], axis=1).astype(np.int32)
    for seed in range(10):
        plan = plan_rows([60, 80], pairing, 21, rng(seed))
        assert len(plan.paired) == 10
        assert all((rows >= 50).all() for rows in plan.unpaired)
        assert plan.n_row == 21


def test_deep_pairing_leaves_half_of_the_rows_to_the_unpaired():
    rows = np.arange(0, 8192, dtype=np.int32)
    plan = plan_rows([9000, 9000], np.stack([rows, rows], axis=1), 1024, rng())
    assert len(plan.paired) == 511
    assert sum(map(len, plan.unpaired)) == 512
    alone = plan_rows([8192, 8192], np.stack([rows, rows], axis=1), 1024, rng())
    assert len(alone.paired) == 1023
    assert sum(map(len, alone.unpaired)) == 0


def test_rows_paired_only_outside_the_crop_are_gone_but_stay_excluded():
    # Row 5 of the first is paired with a chain that is not here; a row of -1 alone disappears.
    pairing = np.array([[0, 0], [5, -1], [-1, -1], [-1, 2]], np.int32)
    plan = plan_rows([7, 4], pairing, 100, rng())
    assert plan.paired.tolist() == [[5, -1], [-1, 2]]
    assert [rows.tolist() for rows in plan.unpaired] == [[1, 2, 3, 4, 6], [1, 3]]


@settings(max_examples=200, deadline=None)
@given(data=st.data(), limit=st.integers(1, 40), seed=st.integers(0, 1000))
def test_plans_are_subsets_in_order_without_repeats(data, limit, seed):
    depths = data.draw(st.lists(st.integers(1, 15), min_size=1, max_size=4))
    pairing = None
    if data.draw(st.booleans()):
        n_row = data.draw(st.integers(0, 10))
        columns = []
        for depth in depths:
            choices = data.draw(st.permutations(range(1, depth)))[:n_row]
            columns.append([*choices, *[-1] * (n_row - len(choices))])
        pairing = np.array([[0] * len(depths), *np.array(columns).T.tolist()], np.int32)
    plan = plan_rows(depths, pairing, limit, rng(seed))
    paired_rows = 0 if pairing is None else int((pairing[1:] >= 0).any(axis=1).sum())
    excluded = [set() if pairing is None else set(pairing[:, b]) - {0, -1} for b in range(len(depths))]
    unpaired_rows = sum(depth - 1 - len(out) for depth, out in zip(depths, excluded, strict=True))
    assert plan.n_row == min(limit, 1 + paired_rows + unpaired_rows)
    for b, rows in enumerate(plan.unpaired):
        assert (np.diff(rows) > 0).all()
        assert set(rows) <= set(range(1, depths[b])) - excluded[b]
    if pairing is not None:
        stored = [tuple(row) for row in pairing.tolist()]
        places = [stored.index(tuple(row)) for row in plan.paired.tolist()]
        assert places == sorted(set(places))


def test_every_row_has_the_same_chance():
    n_draw, counts = 3000, np.zeros(30)
    for seed in range(n_draw):
        plan = plan_rows([11, 21], None, 11, rng(seed))
        for rows, start in zip(plan.unpaired, (0, 10), strict=True):
            counts[start + rows - 1] += 1
    assert abs(counts / n_draw - 1 / 3).max() < 5 * np.sqrt(2 / 9 / n_draw)


@pytest.mark.parametrize("count", [0, 1, 3, 255])
def test_deletion_values(count):
    assert squashed(np.array([count], np.uint8))[0] == pytest.approx(
        2 / np.pi * np.arctan(count / 3), abs=1e-6
    )


def test_a_random_size_is_uniform_from_the_query_alone_to_all_there_are():
    pairing = np.array([[0, 0], [1, 1], [2, 2]], np.int32)
    counts = Counter(
        plan_rows([6, 5], pairing, 100, rng(seed), random_size=True).n_row for seed in range(3000)
    )
    # The query, two pairs, and three and two rows that are in none.
    assert set(counts) == set(range(1, 9))
    assert sum((count - 375) ** 2 / 375 for count in counts.values()) < 7 + 5 * np.sqrt(14)
    limited = {plan_rows([6, 5], pairing, 4, rng(seed), random_size=True).n_row for seed in range(100)}
    assert limited == {1, 2, 3, 4}
