from collections import Counter

import numpy as np
import pytest

from megafold.pipeline import schema
from megafold.pipeline.stream import TemplateConfig
from megafold.pipeline.stream.template import (
    TemplateBlock,
    allowed_hits,
    choose_hits,
    template_features,
)
from tests.pipeline.stream_cache import template


def allowed(hits, release_date="2020-03-01", entry="9zzz", **config):
    sequence = "A" * 100
    content = template(sequence, hits)
    table = schema.TEMPLATE.table("hits").unpack(content.arrays["hits"])
    kept, rejected = allowed_hits(
        table, content.attributes["hits"], TemplateConfig(**config), entry, release_date
    )
    return kept.tolist(), rejected


def hit(entry="1abc", release_date="2000-01-01", **values):
    return {"entry": entry, "release_date": release_date} | values


def test_templates_are_released_sixty_days_before_the_entry():
    # 2020 was a leap year: 60 days before 1 March is 1 January.
    hits = [hit(release_date=date) for date in ("2020-01-01", "2020-01-02", "2020-03-01", "2021-01-01")]
    assert allowed(hits) == ([0], {"too-recent": 3})
    assert allowed(hits, days_before_release=0) == ([0, 1, 2], {"too-recent": 1})


def test_hits_without_a_date_are_rejected_or_take_the_date_that_is_set():
    hits = [hit(release_date=None), hit()]
    assert allowed(hits) == ([1], {"no-date": 1})
    assert allowed(hits, missing_date="1999-01-01") == ([0, 1], {})
    assert allowed(hits, missing_date="2020-02-28") == ([1], {"too-recent": 1})


def test_an_entry_without_a_date_has_no_templates_unless_one_is_set():
    assert allowed([hit()], release_date=None) == ([], {"entry-no-date": 1})
    assert allowed([hit()], release_date=None, entry_missing_date="2024-01-01") == ([0], {})


def test_own_entry_short_hits_and_duplicates_are_rejected():
    hits = [
        hit("9ZZZ"),
        hit(aligned=9, coverage=90),
        hit(aligned=10, coverage=99),
        hit(aligned=10, coverage=100),
        hit(identity=1000, coverage=951),
        hit(identity=1000, coverage=950),
        hit(identity=999, coverage=1000),
    ]
    assert allowed(hits) == ([3, 5, 6], {"own-entry": 1, "too-short": 2, "duplicate": 1})


def test_at_most_twenty_candidates_in_the_order_of_the_files():
    assert allowed([hit() for _ in range(25)]) == (list(range(20)), {"over-limit": 5})


def test_two_allowed_hits_give_none_one_or_both_equally_often():
    rng = np.random.default_rng(0)
    sizes = Counter(len(choose_hits(np.arange(2), 4, rng)) for _ in range(3000))
    assert set(sizes) == {0, 1, 2}
    assert all(abs(count / 3000 - 1 / 3) < 5 * np.sqrt(2 / 9 / 3000) for count in sizes.values())


def test_numbers_of_templates_are_min_of_uniform_and_four():
    rng = np.random.default_rng(0)
    chosen = [choose_hits(np.arange(5, 15), 4, rng) for _ in range(4400)]
    sizes = Counter(len(hits) for hits in chosen)
    assert all(len(set(hits)) == len(hits) for hits in chosen)
    for size, share in {0: 1 / 11, 1: 1 / 11, 2: 1 / 11, 3: 1 / 11, 4: 7 / 11}.items():
        assert abs(sizes[size] / 4400 - share) < 5 * np.sqrt(share * (1 - share) / 4400)
    first = Counter(int(hits[0]) for hits in chosen if len(hits))
    assert set(first) == set(range(5, 15))
    assert max(first.values()) < 1.4 * min(first.values())
    assert len(choose_hits(np.array([], int), 4, rng)) == 0


def test_slots_are_shared_and_masked():
    position = np.arange(2 * 3 * 4 * 3, dtype=np.float32).reshape(2, 3, 4, 3)
    position[0, 0, 3] = np.nan  # no pseudo-beta
    position[1, 2, 1, 0] = np.nan  # no CA
    two = TemplateBlock(
        tokens=np.array([0, 3]),
        columns=np.array([0, 2]),
        restype=np.array([[1, 2, 3], [4, 5, 31]], np.int8),
        atom_pos=position,
    )
    one = TemplateBlock(
        tokens=np.array([1]),
        columns=np.array([1]),
        restype=np.array([[7, 8]], np.int8),
        atom_pos=np.ones((1, 2, 4, 3), np.float32),
    )
    found = template_features(4, [two, one])
    assert found["template_restype"].tolist() == [[1, 8, 31, 3], [4, 31, 31, 31]]
    assert found["template_pseudo_beta_mask"].tolist() == [
        [False, True, False, True],
        [True, False, False, True],
    ]
    assert found["template_backbone_frame_mask"].tolist() == [
        [True, True, False, True],
        [True, False, False, False],
    ]
    np.testing.assert_array_equal(found["template_pseudo_beta"][0, 3], position[0, 2, 3])
    np.testing.assert_array_equal(found["template_backbone_frame"][1, 0], position[1, 0, :3])
    assert not found["template_pseudo_beta"][0, 0].any()
    assert not found["template_backbone_frame"][1, 3].any()


@pytest.mark.parametrize("n_token", [0, 3])
def test_no_templates_are_no_slots(n_token):
    found = template_features(n_token, [])
    assert found["template_backbone_frame"].shape == (0, n_token, 3, 3)
