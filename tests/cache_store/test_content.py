import hashlib
import pickle
import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from megafold.cache_store import Content, ContentError
from megafold.cache_store.content import DTYPES

ARRAYS = st.sampled_from(sorted(DTYPES)).flatmap(
    lambda dtype: npst.arrays(dtype, npst.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=5))
)


def test_golden_digest():
    """The digest of a small object, spelled out byte by byte. It may never change."""
    content = Content(
        arrays={
            "table": np.array([[1, -2, 3], [4, 5, -32768]], np.int16),
            "mask": np.array([True, False]),
            "pos": np.array([1.5, np.nan], np.float32),
            "count": np.array(7, np.uint8),
            "empty": np.empty((0, 3), np.float64),
        },
        attributes={"kind": "golden", "b": [None, True, 1, 0.5], "a": {"ü": "Å"}},
        chunks={"table": (1, 3)},
    )
    stream = b"".join(
        [
            b"megafold content 1\n",
            b'{"dtype":"uint8","name":"count","shape":[]}\n' + b"\x07",
            b'{"dtype":"float64","name":"empty","shape":[0,3]}\n',
            b'{"dtype":"bool","name":"mask","shape":[2]}\n' + b"\x01\x00",
            b'{"dtype":"float32","name":"pos","shape":[2]}\n' + bytes.fromhex("0000c03f 0000c07f"),
            b'{"dtype":"int16","name":"table","shape":[2,3]}\n' + struct.pack("<6h", 1, -2, 3, 4, 5, -32768),
            b"attributes\n",
            '{"a":{"ü":"Å"},"b":[null,true,1,0.5],"kind":"golden"}'.encode(),
        ]
    )
    assert str(content.digest()) == hashlib.sha256(stream).hexdigest()
    assert str(content.digest()) == "1c0f5dfb9a518510eaeec7d09568e9e5bd6663fc5a525ebe3e4eed5ea37867f3"


@settings(deadline=None)
@given(ARRAYS)
def test_memory_layout_and_byte_order_do_not_count(array: np.ndarray):
    digest = Content({"a": array}).digest()
    padded = np.zeros(tuple(2 * length for length in array.shape), array.dtype)
    every_other: Any = (..., *(slice(None, None, 2) for _ in array.shape))
    strided = padded[every_other]
    strided[...] = array
    for other in (
        np.asfortranarray(array) if array.ndim else array,
        array.astype(array.dtype.newbyteorder(">")),
        strided,
        array.tolist() if array.dtype.name in ("int64", "float64", "bool") and array.size else array,
    ):
        assert Content({"a": other}).digest() == digest


def negative(array: np.ndarray) -> np.ndarray:
    """Where a float has its sign bit set, -0.0 included."""
    return np.signbit(np.nan_to_num(array)) if array.dtype.kind == "f" else np.zeros(array.shape, bool)


@settings(deadline=None)
@given(ARRAYS, ARRAYS)
def test_different_arrays_have_different_digests(first: np.ndarray, second: np.ndarray):
    # Bytes tell apart what == does not (0.0 and -0.0); all NaNs are the same.
    same = (
        first.dtype == second.dtype
        and first.shape == second.shape
        and np.array_equal(first, second, equal_nan=first.dtype.kind == "f")
        and (
            first.dtype.kind != "f"
            or np.array_equal(np.signbit(np.nan_to_num(first)), np.signbit(np.nan_to_num(second)))
        )
    )
    assert (Content({"a": first}).digest() == Content({"a": second}).digest()) == same


def test_everything_that_counts():
    base = Content({"a": np.zeros(4, np.int8), "b": np.zeros(2, np.int8)}, {"x": 1})
    others = [
        Content({"a": np.zeros(4, np.uint8), "b": np.zeros(2, np.int8)}, {"x": 1}),
        Content({"a": np.zeros((2, 2), np.int8), "b": np.zeros(2, np.int8)}, {"x": 1}),
        Content({"a": np.zeros(2, np.int8), "b": np.zeros(4, np.int8)}, {"x": 1}),
        Content({"a": np.zeros(4, np.int8), "c": np.zeros(2, np.int8)}, {"x": 1}),
        Content({"a": np.zeros(4, np.int8), "b": np.zeros(2, np.int8)}, {"x": 1.0}),
        Content({"a": np.zeros(4, np.int8), "b": np.zeros(2, np.int8)}, {"x": True}),
        Content({"a": np.zeros(4, np.int8), "b": np.zeros(2, np.int8)}, {"x": "1"}),
        Content({"a": np.zeros(4, np.int8), "b": np.zeros(2, np.int8)}),
        Content({"a": np.zeros(4, np.int8)}, {"x": 1}),
    ]
    assert len({base.digest(), *(other.digest() for other in others)}) == 1 + len(others)
    chunked = Content(base.arrays, base.attributes, {"a": (2,)})
    assert chunked.digest() == base.digest()


def test_all_nans_and_all_true_bytes_are_the_same():
    odd = np.array([0xFFC00001, 0x7F800001, 0x3F800000], np.uint32).view(np.float32)
    plain = np.array([np.nan, np.nan, 1.0], np.float32)
    assert Content({"a": odd}).digest() == Content({"a": plain}).digest()
    assert Content({"a": odd}).arrays["a"].view(np.uint32)[0] == 0x7FC00000
    assert odd.view(np.uint32)[0] == 0xFFC00001, "the caller's array is left alone"
    odd_bools = np.array([2, 0, 255], np.uint8).view(bool)
    assert Content({"a": odd_bools}).digest() == Content({"a": np.array([True, False, True])}).digest()


def test_clean_arrays_are_not_copied():
    array = np.arange(6.0).reshape(2, 3)
    assert np.shares_memory(Content({"a": array}).arrays["a"], array)


@pytest.mark.parametrize(
    ("arrays", "attributes", "chunks", "message"),
    [
        ({"a": np.array([None])}, {}, {}, "array a: dtype object"),
        ({"a": np.array(["x"])}, {}, {}, "array a: dtype <U1"),
        ({"a": np.array([1j])}, {}, {}, "complex128"),
        ({"a": np.array([0], "M8[s]")}, {}, {}, "datetime64"),
        ({"a": np.zeros(1, [("x", "i4")])}, {}, {}, "dtype"),
        ({"a/b": np.zeros(1)}, {}, {}, "a/b"),
        ({"": np.zeros(1)}, {}, {}, "array name"),
        ({"zarr.json": np.zeros(1)}, {}, {}, "array name"),
        ({}, {"x": float("nan")}, {}, r"\$\.x is nan"),
        ({}, {"x": np.float32(1)}, {}, r"\$\.x"),
        ({"a": np.zeros(3)}, {}, {"b": (1,)}, "'b', which is no array"),
        ({"a": np.zeros(3)}, {}, {"a": (1, 1)}, "array a: chunks"),
        ({"a": np.zeros(3)}, {}, {"a": (0,)}, "array a: chunks"),
    ],
)
def test_what_cannot_be_stored(arrays, attributes, chunks, message: str):
    with pytest.raises(ContentError, match=message):
        Content(arrays, attributes, chunks)


def test_contents_pickle():
    content = Content({"a": np.arange(3)}, {"x": [1]}, {"a": (2,)})
    copy = pickle.loads(pickle.dumps(content))
    assert copy.digest() == content.digest()
    assert copy.chunks == content.chunks
    assert content.nbytes == 24
