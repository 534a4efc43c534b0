"""Training samples from a cache behind a URL are those from the disk, whatever the network and disks do."""

import json
import os
import subprocess
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from megafold.cache_store import (
    Digest,
    LocalStore,
    ReadThrough,
    RemoteCacheWarning,
    RemoteError,
    RemoteStore,
    RetryPolicy,
)
from megafold.cli.main import group, is_told
from megafold.pipeline import schema
from megafold.pipeline.stream import CropConfig, SamplingConfig, Stream, StreamConfig
from megafold.pipeline.stream.config import FailureConfig
from tests.cache_store import remote_servers as servers
from tests.pipeline import stream_cache as fake
from tests.pipeline.stream_cache import Chain

torch = pytest.importorskip("torch")

from megafold.pipeline.stream.torch_dataset import StreamDataset  # noqa: E402

CONFIG = StreamConfig(
    crop=CropConfig(tokens=12, atoms=80),
    sampling=SamplingConfig(epoch_size=12),
    failures=FailureConfig(max_share=0.9, min_failures=100),
    seed=5,
)
_ENTRIES = 4


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> LocalStore:
    path = tmp_path_factory.mktemp("remote") / "cache"
    store = LocalStore.create(path)
    entries = []
    for number in range(_ENTRIES):
        deep = ["".join("AGK"[(i * j + number) % 3] for j in range(20)) for i in range(30)]
        hits = [{"entry": f"{number}xyz", "release_date": "2001-01-01", "restype": number}]
        chains = [
            Chain(
                ["ALA", "GLY", "LYS", "MSE"] * 5,
                msa=str(store.put(fake.msa("AGKM" * 5, deep))),
                template=str(store.put(fake.template("AGKM" * 5, hits))),
            ),
            Chain(["LGD"], schema.MolType.LIGAND, entity=2, origin=(5, 4, 0)),
        ]
        entries.append((fake.structure(f"{number}abc", chains, (), [(0, 1)]), chains, ""))
    return fake.publish(path, entries)


@pytest.fixture(scope="module")
def endpoint():
    with servers.s3_server() as address:
        yield address


@pytest.fixture
def url(cache: LocalStore, endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The cache in a bucket of its own, and an empty folder for local copies."""
    name = f"bucket-{tmp_path.name.replace('_', '-').lower()}"[:60].strip("-")
    servers.make_bucket(endpoint, name)
    servers.upload(endpoint, cache.path, f"{name}/cache")
    servers.use_s3(monkeypatch, endpoint)
    monkeypatch.setenv("MEGAFOLD_REMOTE_CACHE", str(tmp_path / "copies"))
    return f"s3://{name}/cache"


def assert_same(found, expected):
    assert found.features.keys() == expected.features.keys()
    for name, value in expected.features.items():
        assert found.features[name].dtype == value.dtype
        assert found.features[name].shape == value.shape
        assert found.features[name].tobytes() == value.tobytes(), name
    assert found.meta == expected.meta


def expected(cache: LocalStore) -> list:
    stream = Stream(cache.path, CONFIG)
    return [stream.sample(index) for index in range(12)]


def test_samples_from_s3_are_those_from_the_disk(cache: LocalStore, url: str):
    stream = Stream(url, CONFIG)
    assert stream.manifest == cache.ref()
    for _ in range(2):  # fetched, then from the local copies
        for index, sample in enumerate(expected(cache)):
            assert_same(stream.sample(index), sample)
        stream.forget()


def _as_it_is(samples):
    return samples


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_workers_read_s3_however_they_are_started(cache: LocalStore, url: str, method: str):
    dataset = StreamDataset(url, CONFIG)
    dataset[0]  # the parent has a connection when it forks
    loader = torch.utils.data.DataLoader(
        dataset,
        batch_size=2,
        num_workers=2,
        multiprocessing_context=method,
        collate_fn=_as_it_is,
        persistent_workers=True,
    )
    for _ in range(2):
        found = [sample for batch in loader for sample in batch]
        for sample, own in zip(found, expected(cache), strict=True):
            assert_same(sample, own)
    assert_same(dataset[3], expected(cache)[3])  # the parent's connection still works
    assert not dataset.failures.failures


def objects_of(cache: LocalStore, entry: str) -> tuple[Digest, Digest]:
    """The structure and the MSA of an entry."""
    (row,) = (row for row in cache.manifest().table.to_pylist() if row["entry"] == entry)
    return Digest(row["structure"]), Digest(row["chains"][0]["msa"])


@pytest.mark.parametrize(("place", "reason"), [(0, "corrupt-object"), (1, "missing-object")])
def test_a_bad_object_on_the_server_costs_its_entry_and_is_named(
    cache: LocalStore, url: str, endpoint: str, tmp_path: Path, place: int, reason: str
):
    digest = objects_of(cache, "2abc")[place]
    fs = servers.bucket_system(endpoint)
    path = f"{url.removeprefix('s3://')}/objects/{digest.hex[:2]}/{digest}.zarr.zip"
    data = bytearray(fs.cat_file(path))
    if reason == "corrupt-object":
        data[len(data) // 3] ^= 16
        fs.pipe_file(path, bytes(data))
    else:
        fs.rm_file(path)

    dataset = StreamDataset(url, CONFIG)
    loader = torch.utils.data.DataLoader(
        dataset, batch_size=None, num_workers=2, multiprocessing_context="fork"
    )
    found = list(loader)
    own = expected(cache)
    replaced = 0
    for sample, good in zip(found, own, strict=True):
        assert sample.meta["entry"] != "2abc"
        if good.meta["entry"] == "2abc":
            replaced += 1
            assert {failure["entry"] for failure in sample.meta["replaced"]} == {"2abc"}
        else:
            assert_same(sample, good)
    assert replaced
    assert set(dataset.failures.counts) == {("2abc", reason)}
    for failure in dataset.failures.failures:
        assert str(digest) in failure.message
        assert f"{url}/objects/" in failure.message
    assert not list((tmp_path / "copies").rglob(f"{digest}*"))


def test_a_disk_that_is_full_costs_no_sample(cache: LocalStore, url: str, tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=48k", "tmpfs", str(disk)]
    if os.name != "posix" or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        store = RemoteStore.at(url, copies=ReadThrough(disk / "copies"))
        stream = Stream(store, CONFIG)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = [stream.sample(index) for index in range(12)]
        for sample, own in zip(found, expected(cache), strict=True):
            assert_same(sample, own)
        texts = [str(one.message) for one in told if one.category is RemoteCacheWarning]
        assert "No space left on device" in texts[0]
        assert "(1 so far" in texts[0]
        counts = store.counts
        assert counts.from_memory >= 1
        # Whatever did fit is whole.
        for path in (disk / "copies" / "objects").rglob("*.zip"):
            cache.quick_check(Digest(path.name.split(".")[0]))
            assert path.read_bytes() == cache.object_path(Digest(path.name.split(".")[0])).read_bytes()
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)  # the stream has files of it open


def test_connections_that_drop_cost_no_sample(
    cache: LocalStore, url: str, endpoint: str, monkeypatch: pytest.MonkeyPatch
):
    # Bodies are torn: where not a byte has come, aiohttp asks again by itself.
    with servers.Cutter(endpoint, cuts=0, least=1000) as cutter:
        servers.use_s3(monkeypatch, cutter.address)
        store = RemoteStore.at(url)
        stream = Stream(store, CONFIG)
        own = expected(cache)
        for index in range(12):
            cutter.cuts += 1
            assert_same(stream.sample(index), own[index])
        assert cutter.made >= 3
        assert store.counts.retries >= 3


def megafold(*arguments: str) -> Any:
    return CliRunner().invoke(group, arguments)


def test_the_command_line_takes_urls(cache: LocalStore, url: str, endpoint: str, tmp_path: Path):
    other = url.replace("/cache", "/pushed")
    pushed = megafold("cache", "push", str(cache.path), other, "--json")
    assert json.loads(pushed.stdout)["uploaded"] == len(list(cache.digests()))
    assert megafold("cache", "push", str(cache.path), other).stdout.startswith("0 objects copied")
    for arguments in (("info",), ("ls",), ("show", "1abc")):
        found, own = (
            megafold("cache", arguments[0], where, *arguments[1:], "--json").stdout
            for where in (other, str(cache.path))
        )
        assert json.loads(found) == json.loads(own)
    verified = megafold("cache", "verify", other, "--workers", "1", "--json")
    assert json.loads(verified.stdout) == {"ok": True, "findings": []}

    digest = objects_of(cache, "3abc")[0]
    fs = servers.bucket_system(endpoint)
    path = f"{other.removeprefix('s3://')}/objects/{digest.hex[:2]}/{digest}.zarr.zip"
    data = bytearray(fs.cat_file(path))
    data[50] ^= 1
    fs.pipe_file(path, bytes(data))
    verified = megafold("cache", "verify", other, "--quick", "--workers", "1", "--json")
    assert verified.exit_code == 1
    (finding,) = json.loads(verified.stdout)["findings"]
    assert (finding["kind"], finding["subject"]) == ("corrupt-object", str(digest))
    assert finding["entries"] == ["3abc"]

    refused = megafold("cache", "build", str(tmp_path), other)
    assert refused.exit_code == 2
    assert "cache push" in refused.stderr
    missing = megafold("cache", "info", "s3://no-such-bucket-here/cache").exception
    assert is_told(missing)
    assert "s3://no-such-bucket-here/cache is not a cache" in str(missing)
    unnamed = megafold("cache", "push", str(cache.path), "somewhere").exception
    assert is_told(unnamed)
    assert "somewhere is no URL" in str(unnamed)


@pytest.mark.slow
def test_training_from_s3_is_training_from_the_disk(cache: LocalStore, url: str, tmp_path: Path):
    options = ("--tokens", "12", "--msa-rows", "8", "--device", "cpu", "--sample-structures", "0", "--json")
    losses: list[float] = []
    for place in (str(cache.path), url):
        out = str(tmp_path / f"run{len(losses)}")
        done = megafold("train", place, "--out", out, "--steps", "1", "--workers", "0", *options)
        assert done.exit_code == 0, done.output
        losses.append(json.loads(done.stdout)["loss"])
    assert np.isfinite(losses[0])
    assert losses[0] == losses[1]


def test_a_server_that_is_gone_ends_the_run(url: str, endpoint: str, monkeypatch: pytest.MonkeyPatch):
    with servers.Cutter(endpoint, cuts=0) as cutter:
        servers.use_s3(monkeypatch, cutter.address)
        store = RemoteStore.at(url, retries=RetryPolicy(attempts=3, base_s=0.001))
        dataset = StreamDataset(store, CONFIG)
        cutter.cuts = 10**6
        with pytest.raises(RemoteError, match=f"{url}/objects/.*3 attempts failed"):
            list(map(dataset.__getitem__, range(12)))
        # The samples are as good as ever: none was replaced, and none is counted.
        assert not dataset.failures.failures
