import asyncio
import gc
import multiprocessing
import os
import pickle
import struct
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.core.metadata.v3 import ArrayV3Metadata

from megafold.cache_store import (
    Content,
    CorruptObject,
    Digest,
    LocalStore,
    MissingArray,
    MissingObject,
    ObjectReader,
    read_many,
)
from megafold.cache_store.reader import run
from megafold.cache_store.zarr_file import SerialPipeline, ZippedGroup, parse_metadata
from tests.cache_store.store_conformance import flip


@pytest.fixture(scope="module")
def content() -> Content:
    numbers = np.random.default_rng(0)
    return Content(
        {
            "cube": numbers.integers(0, 100, (23, 9, 4)).astype(np.int16),
            "flat": numbers.random(31),
            "empty": np.empty((0, 3), np.float32),
            "scalar": np.array(True),
        },
        {"kind": "test"},
        {"cube": (5, 4, 4), "flat": (7,)},
    )


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    return LocalStore.create(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="module")
def reader(store: LocalStore, content: Content) -> ObjectReader:
    return store.open(store.put(content))


def along(length: int) -> st.SearchStrategy:
    """A slice or indices along an axis of this length."""
    bound = st.none() | st.integers(-length - 3, length + 3)
    slices = st.builds(slice, bound, bound)
    indices = st.lists(st.integers(-length, length - 1), max_size=12).map(
        lambda items: np.array(items, np.int64)
    )
    return slices | indices


@settings(deadline=None, max_examples=150)
@given(
    st.tuples(along(23), along(9), along(4)).flatmap(lambda all_: st.integers(0, 3).map(lambda n: all_[:n]))
)
def test_selections_are_orthogonal(reader: ObjectReader, content: Content, selection: tuple):
    found = reader.read({"cube": selection})["cube"]
    expected = content.arrays["cube"]
    for axis, item in enumerate(selection):
        if isinstance(item, slice):
            expected = expected[(slice(None),) * axis + (item,)]
        else:
            expected = expected.take(item, axis)
    assert found.dtype == expected.dtype
    np.testing.assert_array_equal(found, expected)


def test_one_trip_for_several_objects(store: LocalStore, reader: ObjectReader, content: Content):
    other = Content({"x": np.arange(5)})
    with store.open(store.put(other)) as second:
        results = read_many(
            [(reader, {"flat": (slice(3, 9),), "scalar": None, "empty": None}), (second, {"x": None})]
        )
    np.testing.assert_array_equal(results[0]["flat"], content.arrays["flat"][3:9])
    assert results[0]["scalar"].shape == ()
    assert results[0]["scalar"].dtype == bool
    assert results[0]["scalar"]
    assert results[0]["empty"].shape == (0, 3)
    np.testing.assert_array_equal(results[1]["x"], np.arange(5))
    assert read_many([]) == []


def test_results_are_the_callers_own(reader: ObjectReader, content: Content):
    for selection in (None, (slice(0, 5),), (np.arange(3),)):
        first = reader.read({"flat": selection})["flat"]
        first[:] = -1
        assert (reader.read({"flat": selection})["flat"] >= 0).all()


@pytest.mark.parametrize(
    ("name", "selection", "error", "message"),
    [
        ("nothing", None, MissingArray, r"no array 'nothing', it has .*flat.*Build the cache again"),
        ("flat", (np.array([31]),), IndexError, "array flat .* axis 0: index out of range for length 31"),
        ("flat", (np.array([-32]),), IndexError, "out of range"),
        ("flat", (slice(None), slice(None)), IndexError, "2 selections"),
        ("flat", (slice(None, None, 2),), IndexError, "step"),
        ("flat", (np.array([0.5]),), IndexError, "integer"),
        ("flat", (np.array([True] * 31),), IndexError, "integer"),
        ("flat", (np.zeros((2, 2), int),), IndexError, "1-d"),
        ("scalar", (slice(None),), IndexError, "no axes"),
        ("empty", (np.array([0]),), IndexError, "length 0"),
    ],
)
def test_selections_that_do_not_fit(reader: ObjectReader, name, selection, error, message: str):
    with pytest.raises(error, match=message):
        reader.read({name: selection})


def test_metadata(reader: ObjectReader, content: Content):
    assert reader.shapes["cube"] == (23, 9, 4)
    assert reader.dtypes["scalar"] == np.dtype(bool)
    assert reader.chunks["cube"] == (5, 4, 4)
    assert str(reader.path) in repr(reader)


def test_metadata_are_those_that_zarr_reads(reader: ObjectReader):
    for values in reader._open().metadata.values():
        # Twice: the second time, what does not depend on lengths is known.
        assert parse_metadata(values) == parse_metadata(values) == ArrayV3Metadata.from_dict(values)
        longer = {**values, "shape": [length + 3 for length in values["shape"]]}
        assert parse_metadata(longer).to_dict() == ArrayV3Metadata.from_dict(longer).to_dict()
        with pytest.raises(ValueError):
            parse_metadata({**values, "shape": [*values["shape"], 2]})


def test_a_closed_reader_is_closed(store: LocalStore, content: Content):
    reader = store.open(store.put(content))
    reader.read({"flat": None})
    before = len(os.listdir("/proc/self/fd"))
    reader.close()
    reader.close()
    assert len(os.listdir("/proc/self/fd")) == before - 1
    with pytest.raises(ValueError, match="closed"):
        reader.read({"flat": None})


def test_a_dropped_reader_leaks_no_descriptor(store: LocalStore, content: Content):
    digest = store.put(content)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        store.open(digest).read({"flat": None})
    gc.collect()
    assert len(os.listdir("/proc/self/fd")) == before


def test_objects_that_go_missing(tmp_path: Path, content: Content):
    store = LocalStore.create(tmp_path)
    digest = store.put(content)
    reader = store.open(digest)
    store.delete(digest)
    with pytest.raises(MissingObject):
        reader.read({"flat": None})
    digest = store.put(content)
    reader = store.open(digest)
    assert reader.shapes
    store.delete(digest)
    assert reader.read_all().digest() == digest, "an open object stays readable"


def test_errors_pickle():
    error = CorruptObject(Digest("0" * 64), Path("x.zip"), "why")
    copy = pickle.loads(pickle.dumps(error))
    assert (copy.digest, copy.path, copy.reason, str(copy)) == (error.digest, error.path, "why", str(error))


def test_threads_share_a_reader(reader: ObjectReader, content: Content):
    def read(start: int) -> bool:
        found = reader.read({"flat": (slice(start, None),), "cube": (np.array([start]),)})
        return bool(
            (found["flat"] == content.arrays["flat"][start:]).all()
            and (found["cube"] == content.arrays["cube"][[start]]).all()
        )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(read, list(range(20)) * 5))


def _read_digest(reader: ObjectReader) -> str:
    return str(reader.read_all().digest())


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_readers_cross_into_other_processes(reader: ObjectReader, method: str):
    reader.read({"flat": None})  # opened here before
    with multiprocessing.get_context(method).Pool(2) as pool:
        assert pool.map(_read_digest, [reader] * 4) == [str(reader.digest)] * 4


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_reads_what_its_parent_opened(reader: ObjectReader):
    """As a DataLoader's forked worker: nothing is pickled, the open object is inherited."""
    reader.read({"flat": None})
    with ThreadPoolExecutor(1) as pool:  # a thread is alive while forking
        pool.submit(reader.read, {"flat": None}).result()
        child = os.fork()
        if child == 0:
            try:
                os._exit(0 if reader.read_all().digest() == reader.digest else 1)
            finally:
                os._exit(2)
        assert os.waitpid(child, 0)[1] == 0
    assert reader.read_all().digest() == reader.digest


def test_codecs_without_synchronous_entry_points(
    store: LocalStore, content: Content, monkeypatch: pytest.MonkeyPatch
):
    """As in zarr before 3.1.6: the trip runs on the event loop, and damage is damage there, too."""
    monkeypatch.setattr(SerialPipeline, "_decoders", None)
    digest = store.put(content)
    with store.open(digest) as reader:
        assert reader.read_all().digest() == digest
    path = store.object_path(digest)
    clean = path.read_bytes()
    flip(path, 8 * clean.index(b"flat/c/0") + 100)
    with store.open(digest) as reader, pytest.raises(CorruptObject, match="array flat"):
        reader.read({"flat": None})
    path.write_bytes(clean)


def test_coroutines_that_wait_run_on_the_event_loop():
    async def waits() -> str:
        await asyncio.sleep(0)
        return "done"

    async def gathers() -> list[str]:
        return list(await asyncio.gather(waits(), waits()))

    async def fails() -> None:
        await asyncio.sleep(0)
        raise KeyError("x")

    assert run(waits) == "done"
    assert run(gathers) == ["done", "done"]
    with pytest.raises(KeyError):
        run(fails)


def test_a_file_system_that_gives_a_little_at_a_time_is_read_to_the_end(store, content, monkeypatch):
    """As some network file systems do where a signal comes between."""
    digest, pread = store.put(content), os.pread
    monkeypatch.setattr(os, "pread", lambda fd, size, offset: pread(fd, min(size, 11), offset))
    with store.open(digest) as reader:
        assert reader.read_all().digest() == digest


def test_members_with_extra_fields_are_read(tmp_path: Path):
    """As zip files have where a member is larger than 4 GiB."""
    path = tmp_path / "large.zip"
    with zipfile.ZipFile(path, "w") as archive:
        member = zipfile.ZipInfo("zarr.json")
        member.extra = struct.pack("<HH8s", 0xCAFE, 8, b"whatever")
        archive.writestr(member, b"{}")
    group = ZippedGroup(path)
    assert bytes(group.read_checked("zarr.json")) == b"{}"
    group.close()
