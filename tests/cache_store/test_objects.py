import io
import json
import tempfile
import warnings
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.storage import ZipStore

from megafold.cache_store import Content, CorruptObject, Digest, ObjectReader
from megafold.cache_store.objects import claimed_digest, damage, encode
from tests.cache_store.store_conformance import flip, small_content
from tests.cache_store.test_content import ARRAYS
from tests.cache_store.test_digest import TEXT, VALUES


@settings(max_examples=40, deadline=None)
@given(
    st.dictionaries(st.sampled_from(["a", "B", "c_1"]), ARRAYS, max_size=2),
    st.dictionaries(TEXT, VALUES, max_size=3),
    st.integers(1, 4),
)
def test_whatever_goes_in_comes_out(arrays: dict[str, np.ndarray], attributes: dict, chunk: int):
    content = Content(arrays, attributes, {name: (chunk,) * array.ndim for name, array in arrays.items()})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "object.zarr.zip"
        path.write_bytes(encode(content))
        with ObjectReader(path, content.digest()) as reader:
            found = reader.read_all()
    assert found.digest() == content.digest()
    assert found.attributes == content.attributes
    assert {name: found.chunks[name] for name in arrays} == dict(content.chunks)


def test_any_zarr_reader_opens_an_object(tmp_path: Path):
    content = small_content()
    path = tmp_path / "object.zarr.zip"
    path.write_bytes(encode(content))
    for consolidated in (True, False):
        with ZipStore(path, mode="r") as store:
            group = zarr.open_group(store, mode="r", use_consolidated=consolidated)
            assert dict(group.attrs) == dict(content.attributes)
            assert sorted(group.array_keys()) == sorted(content.arrays)
            for name, array in content.arrays.items():
                stored: Any = group[name]
                np.testing.assert_array_equal(stored[...], array)
                assert [codec.to_dict()["name"] for codec in stored.metadata.codecs] == [
                    "bytes",
                    "zstd",
                    "crc32c",
                ]


def test_the_file_is_a_plain_deterministic_zip(tmp_path: Path):
    content = small_content()
    data = encode(content)
    assert encode(small_content()) == data
    path = tmp_path / "object.zarr.zip"
    path.write_bytes(data)
    with zipfile.ZipFile(path) as archive:
        assert archive.testzip() is None
        members = archive.infolist()
        assert archive.comment.startswith(b"megafold object %s sha256 " % str(content.digest()).encode())
    names = [member.filename for member in members]
    assert names == sorted(names)
    assert {member.date_time for member in members} == {(1980, 1, 1, 0, 0, 0)}
    assert {member.compress_type for member in members} == {zipfile.ZIP_STORED}
    # Every chunk, those of zeros as well: 4 of msa, 3 of zeros, 1 of mask, 1 of number, none of empty.
    assert sum("/c" in name for name in names) == 9
    assert claimed_digest(path) == content.digest()
    assert damage(io.BytesIO(path.read_bytes())) == (content.digest(), "")


def test_the_seal_is_the_hash_of_all_the_other_bytes(tmp_path: Path):
    data = encode(small_content())
    assert data[-64:].decode() == str(Digest.of_bytes(data[:-64]))


def test_writing_warns_of_nothing():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        encode(small_content())


def test_a_partial_read_notices_a_flipped_bit(tmp_path: Path):
    content = small_content()
    path = tmp_path / "object.zarr.zip"
    path.write_bytes(encode(content))
    clean = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        chunks = [member for member in archive.infolist() if "/c" in member.filename]
    numbers = np.random.default_rng(0)
    for member in chunks:
        start = member.header_offset + 30 + len(member.filename)
        for position in numbers.integers(8 * start, 8 * (start + member.file_size), 5):
            flip(path, int(position))
            array = member.filename.split("/")[0]
            with ObjectReader(path, content.digest()) as reader, pytest.raises(CorruptObject) as caught:
                reader.read({array: None})
            assert f"array {array}" in caught.value.reason
            path.write_bytes(clean)


def test_metadata_is_never_read_with_a_flipped_bit(tmp_path: Path):
    content = small_content()
    path = tmp_path / "object.zarr.zip"
    path.write_bytes(encode(content))
    clean = path.read_bytes()
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo("zarr.json")
    start = member.header_offset + 30 + len(member.filename)
    for position in range(8 * start, 8 * (start + member.file_size), 151):
        flip(path, position)
        with ObjectReader(path, content.digest()) as reader, pytest.raises(CorruptObject, match="checksum"):
            reader.attributes
        path.write_bytes(clean)


def test_no_flipped_bit_gives_wrong_values(tmp_path: Path):
    """Reading, without any check of the whole file, either fails or is right."""
    content = small_content()
    path = tmp_path / "object.zarr.zip"
    path.write_bytes(encode(content))
    clean = path.read_bytes()
    for position in np.random.default_rng(1).choice(8 * len(clean), 150, replace=False):
        flip(path, int(position))
        try:
            with ObjectReader(path, content.digest()) as reader:
                found = reader.read_all().digest()
        except CorruptObject:
            found = content.digest()
        assert found == content.digest()
        path.write_bytes(clean)


def test_a_lost_chunk_is_an_error_not_zeros(tmp_path: Path):
    content = small_content()
    whole, path = tmp_path / "whole.zip", tmp_path / "object.zarr.zip"
    whole.write_bytes(encode(content))
    with zipfile.ZipFile(whole) as source, zipfile.ZipFile(path, "w") as target:
        for member in source.infolist():
            if member.filename != "zeros/c/1/0":
                target.writestr(member, source.read(member))
    with ObjectReader(path, content.digest()) as reader:
        reader.read({"zeros": (slice(0, 10),)})
        with pytest.raises(CorruptObject, match="zeros/c/1/0 is missing"):
            reader.read({"zeros": None})


def test_files_that_are_no_objects(tmp_path: Path):
    path = tmp_path / "object.zarr.zip"
    digest = Digest.of_bytes(b"")
    for data in (b"", b"PK", b"x" * 500, encode(small_content())[:-1], encode(small_content()) + b"x"):
        path.write_bytes(data)
        assert claimed_digest(path) is None
        assert damage(io.BytesIO(path.read_bytes()))[1]
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("zarr.json", json.dumps({"attributes": {}, "node_type": "group"}))
    with pytest.raises(CorruptObject, match=r"zarr\.json"):
        ObjectReader(path, digest).attributes
    path.write_bytes(b"x" * 500)
    with pytest.raises(CorruptObject, match="zip"):
        ObjectReader(path, digest).attributes
