import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megafold.cache_store import JSON, ContentError, Digest, canonical_json, mapping_digest

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=10)
VALUES = st.recursive(
    SCALARS | TEXT, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4)
)


def test_digests_of_known_bytes(tmp_path: Path):
    # FIPS 180-2, appendix B.1.
    known = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert str(Digest.of_bytes(b"abc")) == known
    (tmp_path / "abc").write_bytes(b"abc")
    assert Digest.of_file(tmp_path / "abc") == Digest.of_bytes(memoryview(b"abc")) == Digest(known)
    assert Digest.parse(f" {known.upper()}\n") == Digest(known)


@pytest.mark.parametrize("text", ["", "abc", "g" * 64, "A" * 64, "0" * 63, "0" * 65, "0" * 64 + "\n"])
def test_what_is_no_digest(text: str):
    with pytest.raises(ValueError, match="64"):
        Digest(text)


def test_digests_sort_hash_and_stay():
    low, high = Digest("0" * 64), Digest("f" * 64)
    assert sorted([high, low]) == [low, high]
    assert len({low, high, Digest("0" * 64)}) == 2
    with pytest.raises(AttributeError):
        low.hex = "1" * 64  # type: ignore[misc]


def test_canonical_json_by_hand():
    value: dict[str, JSON] = {
        "b": [1, 1.0, -0.0, 1e22, 0.1, True, None],
        "a": {"ü": '\n"/ \U0001f9ec'},
        "B": (),
    }
    expected = '{"B":[],"a":{"ü":"\\n\\"/ \U0001f9ec"},"b":[1,1.0,-0.0,1e+22,0.1,true,null]}'
    assert canonical_json(value) == expected.encode()
    assert str(mapping_digest(value)) == hashlib.sha256(expected.encode()).hexdigest()


@settings(deadline=None)
@given(VALUES)
def test_canonical_json_survives_reading(value):
    text = canonical_json(value)
    assert canonical_json(json.loads(text)) == text


@settings(deadline=None)
@given(st.dictionaries(TEXT, SCALARS, min_size=2))
def test_the_order_of_keys_does_not_count(value):
    assert canonical_json(dict(reversed(value.items()))) == canonical_json(value)


@pytest.mark.parametrize(
    ("value", "where"),
    [
        (float("nan"), r"\$ is nan"),
        ({"a": [0, float("-inf")]}, r"\$\.a\[1\] is -inf"),
        ({"a": np.float64(1)}, r"\$\.a is a numpy"),
        ({"a": np.int64(1)}, r"\$\.a is a numpy"),
        ({"a": {1: 2}}, r"\$\.a has the key 1"),
        ({"a": b"bytes"}, r"\$\.a is a builtins.bytes"),
        ({"a": {1, 2}}, "set"),
        ("\ud800", "surrogate"),
        ({"\ud800": 1}, "surrogate"),
    ],
)
def test_what_json_cannot_hold(value, where: str):
    with pytest.raises(ContentError, match=where):
        canonical_json(value)
