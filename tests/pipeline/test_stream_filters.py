"""Filters, by expressions, and the parts of a split: by hand."""

import numpy as np
import pytest

from megafold.pipeline.errors import InputError
from megafold.pipeline.stream import SamplingConfig, SplitConfig, StreamConfig
from megafold.pipeline.stream.filters import COLUMNS, matching_rows
from megafold.pipeline.stream.sampling import Selection, TargetSampler
from megafold.pipeline.stream.split import part_reasons, training_rows
from tests.pipeline import test_stream_sampling
from tests.pipeline.test_stream_sampling import entry, manifest

DIGEST = "ab" * 32


def chain(*args, msa_depth=0, template="", **changes):
    made = test_stream_sampling.chain(*args, **changes)
    return made | {"msa": DIGEST if msa_depth else "", "msa_depth": msa_depth, "template": template}


DATA = manifest(
    entry(
        "1aaa", [chain(), chain("rna", "UU")], [(0, 1, "")], n_chain_protein=1, n_chain_rna=1, resolution=1.5
    ),
    entry("2bbb", [chain(msa_depth=70, template=DIGEST)], release_date="2022-03-01", n_token=900),
    entry("3ccc", [chain("dna", "GG")], n_chain_dna=1, resolution=None, method=None, release_date=None),
    entry(
        "4ddd",
        [chain(), chain(msa_depth=5)],
        method="SOLUTION NMR",
        release_date="2021-10-01",
    ),
)


def names(where):
    found = matching_rows(DATA.table, where)
    assert len(found) == 4
    return {place + 1 for place in np.flatnonzero(found == True)}  # noqa: E712


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("resolution < 1.6", {1}),
        ("resolution IS NULL OR resolution < 1.6", {1, 3}),
        ("release_date >= '2021-10-01'", {2, 4}),
        ("release_date < DATE '2021-10-01'", {1}),
        ("n_token BETWEEN 800 AND 1000 -- a comment", {2}),
        ("method ILIKE '%nmr%'", {4}),
        ("method = 'X-RAY DIFFRACTION' AND NOT has_msa", {1}),
        ("has_msa", {2, 4}),
        ("n_chain_msa = n_chain", {2}),
        ("msa_depth >= 6", {2}),
        ("has_template", {2}),
        ("list_contains(chain_types, 'rna')", {1}),
        ("'dna' IN chain_types", {3}),
        ("n_interface > 0", {1}),
        ("entry IN ('1aaa', '3ccc') and n_chain = 1", {3}),
        ("n_chain_rna + n_chain_dna > 0", {1, 3}),
    ],
)
def test_expressions(where, expected):
    assert names(where) == expected


def test_unknown_is_neither_true_nor_false():
    assert list(matching_rows(DATA.table, "resolution < 100")) == [True, True, None, True]


@pytest.mark.parametrize(
    ("where", "message"),
    [
        (
            "resoluton < 2",
            r"\"resoluton\" not found.*Columns: entry, assembly, release_date, resolution, method",
        ),
        ("release_date < 2021", "DATE and type INTEGER"),
        ("release_date < '2021-13-01'", "out of range"),
        ("resolution <", "syntax error"),
        ("resolution", "it gives DOUBLE, not true or false"),
        ("1) FROM manifest; DROP TABLE manifest; --", "not one expression|syntax error"),
        ("true), (true", "not one expression|syntax error|it gives"),
        ("n_token > (SELECT 3)", "subquery is not possible"),
        ("random() < 0.5", r"random\(\) does not depend on the entry alone"),
        ("release_date < today()", r"today\(\) does not depend on the entry alone"),
        ("release_date < current_date", r"current_date\(\) does not depend"),
        ("count(*) > 1", "stream settings"),
        ("nonsense(entry)", "nonsense"),
        ("entry IN (SELECT content FROM read_text('/etc/hostname'))", "subquery is not possible"),
    ],
)
def test_expressions_that_cannot_be_used_say_why_and_what_there_is(where, message):
    with pytest.raises(InputError, match=f"(?s){message}") as caught:
        matching_rows(DATA.table, where)
    assert "Columns: entry" in str(caught.value)


def test_every_column_can_be_asked_for():
    for name in COLUMNS:
        matching_rows(DATA.table, f"{name} IS NOT NULL")


def test_an_empty_manifest_has_no_rows_that_match():
    assert list(matching_rows(manifest().table, "has_msa")) == []


def test_filters_are_counted_by_the_first_reason():
    config = SamplingConfig(where="resolution < 3", max_tokens=800, methods=("X-RAY DIFFRACTION",))
    selection = Selection.of(DATA.table, config)
    assert selection.rows.tolist() == [0]
    assert selection.filtered == {"too-many-tokens": 1, "method": 2}
    assert Selection.of(DATA.table, SamplingConfig(where="resolution > 1.7")).filtered == {
        "where": 1,
        "where-unknown": 1,
    }
    settings = {"sampling": {"where": "has_msa", "split": {"part": "train", "date": "2022-01-01"}}}
    sampler = TargetSampler(DATA, StreamConfig.from_mapping(settings).sampling)
    assert sampler.rows.tolist() == [3]
    assert sampler.filtered == {"where": 2, "split-date": 1}


def test_a_split_by_date():
    train, validation = (
        Selection.of(DATA.table, SamplingConfig(split=SplitConfig(part=part, date="2021-10-01")))
        for part in ("train", "validation")
    )
    assert train.rows.tolist() == [0, 2]  # the one without a date, too
    assert validation.rows.tolist() == [1, 3]
    assert train.filtered == validation.filtered == {"split-date": 2}


def clustered(count=60):
    """Entry i: a chain of cluster i, or of i and its neighbour; each third one has a ligand."""
    rows = []
    for i in range(count):
        clusters = [f"c{i}", f"c{(i + 1) % count}"] if i % 4 == 0 else [f"c{i}"]
        chains = [chain(sequence="A" * (i + 1), cluster=name) for name in clusters]
        rows.append(entry(f"{i:04d}", chains + [chain("ligand", "")] * (i % 3 == 0)))
    return manifest(*rows)


def test_a_split_by_cluster_shares_no_cluster_and_counts_the_mixed():
    data = clustered()

    def part_clusters(part, **changes):
        split = SplitConfig(part=part, held_out=0.3, **changes)
        reasons = part_reasons(data.table, split)
        rows = np.flatnonzero(reasons == "")
        chains = [chain for row in data.table["chains"].take(rows).to_pylist() for chain in row]
        return (
            set(rows),
            {chain["cluster"] for chain in chains if chain["cluster"]},
            (reasons == "split-mixed").sum(),
        )

    train, in_train, mixed = part_clusters("train")
    validation, in_validation, also_mixed = part_clusters("validation")
    assert not in_train & in_validation
    assert not train & validation
    assert mixed == also_mixed == 60 - len(train) - len(validation)
    assert mixed > 0
    assert 0.1 < len(validation) / 60 < 0.5
    assert part_clusters("train", salt="another")[0] != train
    # Another row or another order changes nothing for those that are there.
    fewer = data.table.slice(7, 20)
    reasons = part_reasons(fewer, SplitConfig(part="train", held_out=0.3))
    assert set(np.flatnonzero(reasons == "") + 7) == {row for row in train if 7 <= row < 27}


def test_validation_on_new_clusters_alone():
    a, b, c, new = (chain(sequence=name * 4, cluster=name) for name in "ABCN")
    ligand = chain("ligand", "", cluster="HEM")
    data = manifest(
        entry("1aaa", [a, b, ligand], [(0, 1, ""), (0, 2, "")], release_date="2020-01-01"),
        entry("2bbb", [c], release_date="2020-01-01"),
        entry("3ccc", [a, b], [(0, 1, "")], release_date="2022-01-01"),
        entry("4ddd", [a, c], [(0, 1, "")], release_date="2022-01-01"),
        entry("5eee", [b, new, ligand], [(0, 1, ""), (0, 2, "")], release_date="2022-01-01"),
    )
    split = SplitConfig(part="validation", date="2021-10-01", new_clusters=True)
    assert training_rows(data.table, split).tolist() == [0, 1]
    sampler = TargetSampler(data, SamplingConfig(split=split))
    targets = sampler.targets
    # A and B were seen together; A with C, B with the new one, and B with haem were not.
    assert set(
        zip(targets.row.tolist(), targets.chain_i.tolist(), targets.chain_j.tolist(), strict=True)
    ) == {
        (3, 0, 1),
        (4, 1, -1),
        (4, 0, 1),
        (4, 0, 2),
    }
    assert sampler.filtered == {"split-date": 2, "split-no-new-cluster": 1}
    # An interface weighs as many as there are of its kind among what can be drawn.
    assert targets.weight.tolist() == pytest.approx([1.5, 6, 6, 4])


@pytest.mark.parametrize(
    "changes",
    [{"part": "test"}, {"part": "train"}, {"held_out": 1.0}, {"new_clusters": True}, {"date": "1.10.2021"}],
)
def test_splits_that_say_nothing_are_refused(changes):
    with pytest.raises(InputError, match=r"sampling\.split"):
        SplitConfig(**changes)
