"""What an interrupted build left: which of its results and failures the next one takes for known."""

from pathlib import Path

import numpy as np
import pytest

from megafold.cache_store import Content, Digest, LocalStore
from megafold.pipeline.builder.known import Known

#: Failures of the moment and of the machine: no word about the input.
TRANSIENT = [
    "unreadable",
    "unreadable-file",
    "unreadable-dictionary",
    "unreadable-cache",
    "no-such-folder",
    "damaged-cache",
    "changed-meanwhile",
    "out-of-memory",
]


@pytest.fixture
def known(tmp_path: Path) -> Known:
    return Known(LocalStore.create(tmp_path / "cache"), "dictionary")


def failure(*reasons: str, dictionary: str = "dictionary", result: object = None) -> dict[str, object]:
    problems = [[reason, "why"] for reason in reasons]
    outcome = {"result": result, "problems": problems}
    return {"stage": "msa", "recipe": "r", "dictionary": dictionary, "outcome": outcome}


def is_known(known: Known, record: dict[str, object], *, with_failures: bool = True) -> bool:
    known.add_journal_record(record, with_failures=with_failures)
    return known.find("r") is not None


@pytest.mark.parametrize("reason", TRANSIENT)
def test_failures_of_the_moment_are_tried_again(known: Known, reason: str):
    assert not is_known(known, failure(reason))
    assert not is_known(known, failure("query-mismatch", reason, result={"object": "", "rows": 0}))


@pytest.mark.parametrize("reason", ["query-mismatch", "worker-died", "timeout", "defect:ValueError"])
def test_failures_of_an_input_are_not_tried_again_unless_that_is_asked(known: Known, reason: str):
    assert not is_known(known, failure(reason), with_failures=False)
    assert is_known(known, failure(reason, dictionary="another"))


def test_an_unknown_component_is_tried_again_with_another_dictionary(known: Known):
    assert not is_known(known, failure("unknown-component", dictionary="another"))
    assert is_known(known, failure("unknown-component"))


@pytest.mark.parametrize("name", ["structure", "object"])
def test_a_result_is_known_as_long_as_its_object_is_there(tmp_path: Path, name: str):
    store = LocalStore.create(tmp_path / "cache")
    digest = store.put(Content({"x": np.zeros(3, np.float32)}))
    known = Known(store, "dictionary")
    assert is_known(known, failure(result={name: str(digest)}), with_failures=False)
    assert not is_known(known, failure(result={name: str(Digest("0" * 64))}))
    assert is_known(known, failure(result={"object": "", "rows": 0}))
