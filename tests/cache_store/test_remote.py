"""A cache behind a URL: what every store does, and what servers, disks and networks do to it."""

import errno
import multiprocessing
import os
import pickle
import random
import shutil
import threading
import time
import uuid
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from megafold.cache_store import (
    Content,
    CorruptManifest,
    CorruptObject,
    CorruptRef,
    Digest,
    LocalStore,
    MissingManifest,
    MissingObject,
    NotACache,
    ReadOnlyCache,
    ReadThrough,
    RemoteCacheWarning,
    RemoteError,
    RemoteStore,
    RetryPolicy,
    Store,
    SwappedObject,
    audit,
    files,
    open_store,
)
from tests.cache_store import remote_servers as servers
from tests.cache_store.store_conformance import ABSENT, StoreConformance, small_content, small_manifest

QUICK = RetryPolicy(attempts=4, base_s=0.001, cap_s=0.002)


class WrittenBeside(RemoteStore):
    """A remote store over ``file://`` whose folder a local store writes: for the suite, which writes."""

    writer: LocalStore

    def put(self, content):
        return self.writer.put(content)

    def delete(self, digest):
        self.writer.delete(digest)
        self._copies.drop(f"objects/{digest.hex[:2]}/{digest}.zarr.zip")

    def put_manifest(self, manifest):
        return self.writer.put_manifest(manifest)

    def put_ledger(self, failures):
        return self.writer.put_ledger(failures)

    def move_ref(self, name, expected, new):
        self.writer.move_ref(name, expected, new)

    def build_lock(self, wait=0.0):
        return self.writer.build_lock(wait)

    def journal(self, build, *, sync_every_s=0.0):
        return self.writer.journal(build, sync_every_s=sync_every_s)

    def journals(self):
        return self.writer.journals()

    def sweep(self, older_than_s=3600.0, lock=None):
        return self.writer.sweep(older_than_s, lock)


class TestRemoteStore(StoreConformance):
    @pytest.fixture
    def store(self, tmp_path: Path) -> RemoteStore:
        writer = LocalStore.create(tmp_path / "cache")
        store = WrittenBeside.at(
            (tmp_path / "cache").as_uri(), copies=ReadThrough(tmp_path / "copies"), retries=QUICK
        )
        assert isinstance(store, WrittenBeside)
        store.writer = writer
        return store

    def file_of(self, store: Store, place: Path | str) -> Path:
        assert isinstance(place, str)
        # What the suite changes on the server shows through no copy that was made before.
        shutil.rmtree(store._copies.path, ignore_errors=True)  # type: ignore[attr-defined]
        return Path(place.removeprefix("file://"))

    def path_of_manifest(self, store: Store, digest: Digest) -> Path:
        path = self.file_of(store, f"{store.url}/manifests/{digest}.parquet")  # type: ignore[attr-defined]
        path.chmod(0o644)
        return path

    def path_of_ledger(self, store: Store, digest: Digest) -> Path:
        return self.file_of(store, f"{store.url}/failures/{digest}.parquet")  # type: ignore[attr-defined]


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    with servers.s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def source(tmp_path: Path) -> LocalStore:
    """A small cache of two objects, a manifest and a ledger, to be put behind a URL."""
    store = LocalStore.create(tmp_path / "source")
    digests = [store.put(small_content(number)) for number in range(2)]
    manifest = store.put_manifest(small_manifest(*digests))
    store.put_ledger([])
    store.move_ref("main", None, manifest)
    return store


Opener = Callable[[], RemoteStore]


@pytest.fixture(params=["s3", "http", "memory"])
def opener(
    request: pytest.FixtureRequest, tmp_path: Path, source: LocalStore, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Opener]:
    """Opens the small cache behind a URL of each kind; ``opener.url`` is it."""
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    address = None
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "s3":
            endpoint = request.getfixturevalue("s3")
            servers.use_s3(patch, endpoint)
            servers.make_bucket(endpoint, name)
            servers.upload(endpoint, source.path, f"{name}/some/cache")
            url = f"s3://{name}/some/cache"
        elif request.param == "http":
            server = servers.http_server(source.path.parent)
            address = server.__enter__()
            url = f"{address}/source/"
        else:
            import fsspec

            fs = fsspec.filesystem("memory")
            for path in source.path.rglob("*"):
                if path.is_file():
                    fs.pipe_file(f"/{name}/{path.relative_to(source.path).as_posix()}", path.read_bytes())
            url = f"memory://{name}"

        def open_remote() -> RemoteStore:
            return RemoteStore.at(url, copies=ReadThrough(tmp_path / "copies"), retries=QUICK)

        open_remote.url = url  # type: ignore[attr-defined]
        yield open_remote
        if address is not None:
            server.__exit__(None, None, None)


def test_a_remote_cache_reads_as_the_local_one(opener: Opener, source: LocalStore, tmp_path: Path):
    store = opener()
    assert list(store.digests()) == list(source.digests())
    assert list(store.sizes()) == list(source.sizes())
    assert list(store.manifests()) == list(source.manifests())
    assert list(store.ledgers()) == list(source.ledgers())
    assert list(store.refs()) == ["main"]
    assert store.ref("main") == source.ref("main")
    assert store.ref("other") is None
    assert store.manifest().table.equals(source.manifest().table)
    for digest in source.digests():
        assert store.has(digest)
        assert store.age_s(digest) < 600
        with store.open(digest) as reader, source.open(digest) as own:
            for name, array in own.read_all().arrays.items():
                np.testing.assert_array_equal(reader.read({name: None})[name], array)
        copy = tmp_path / "copies" / "objects" / digest.hex[:2] / f"{digest}.zarr.zip"
        assert copy.read_bytes() == source.object_path(digest).read_bytes()
    assert not audit(store, source.digests())
    assert not audit(store, source.digests(), quick=True)


def test_what_is_here_is_not_fetched_again(opener: Opener, source: LocalStore):
    store = opener()
    digest = next(source.digests())
    for _ in range(3):
        store.open(digest).close()
        store.manifest()
    assert store.counts.downloads == 2
    assert store.counts.copies_used == 4
    other = opener()
    other.open(digest).close()
    assert (other.counts.downloads, other.counts.copies_used) == (0, 1)


def test_what_is_not_there_is_named_with_its_url(opener: Opener):
    store = opener()
    url = opener.url.rstrip("/")  # type: ignore[attr-defined]
    assert not store.has(ABSENT)
    for operation in (store.open, store.size, store.age_s, store.check, store.quick_check):
        with pytest.raises(MissingObject) as caught:
            operation(ABSENT)
        assert str(ABSENT) in str(caught.value)
        assert f"{url}/objects/00/{ABSENT}" in str(caught.value)
        assert "cache push" in str(caught.value)
    with pytest.raises(MissingManifest, match=f"{url}/manifests/{ABSENT}"):
        store.manifest(ABSENT)
    with pytest.raises(NotACache, match=f"{url}/objects is not a cache"):
        RemoteStore.at(f"{url}/objects", retries=QUICK)
    assert store.counts.retries == 0


def test_nothing_is_written_behind_a_url(opener: Opener):
    store = opener()
    for operation in (
        lambda: store.put(small_content()),
        lambda: store.put_manifest(small_manifest()),
        lambda: store.put_ledger([]),
        lambda: store.move_ref("main", None, ABSENT),
        lambda: store.delete(ABSENT),
        lambda: store.build_lock(),
        lambda: store.journal("b"),
        lambda: store.sweep(),
    ):
        with pytest.raises(ReadOnlyCache, match="read-only"):
            operation()
    assert not list(store.journals())


# What a server may do ---------------------------------------------------------------------------------


@pytest.fixture
def folder_store(source: LocalStore, tmp_path: Path) -> RemoteStore:
    return RemoteStore.at(source.path.as_uri(), copies=ReadThrough(tmp_path / "copies"), retries=QUICK)


@pytest.mark.parametrize("position", [0, 1000, 9999, -1])
def test_a_flipped_bit_on_the_server_is_named_and_never_kept(
    folder_store: RemoteStore, source: LocalStore, tmp_path: Path, position: int
):
    digest = next(source.digests())
    path = source.object_path(digest)
    servers.spoil(path, position % (8 * path.stat().st_size))
    for _ in range(2):
        with pytest.raises(CorruptObject) as caught:
            folder_store.open(digest)
        assert caught.value.digest == digest
        assert f"{folder_store.url}/objects/{digest.hex[:2]}/{digest}" in str(caught.value)
    assert not list((tmp_path / "copies").rglob("*.zip"))
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (str(copy), copy.digest, copy.action) == (str(caught.value), digest, caught.value.action)


def test_another_object_or_half_of_one_is_never_kept(
    folder_store: RemoteStore, source: LocalStore, tmp_path: Path
):
    first, second = source.digests()
    data = source.object_path(second).read_bytes()
    path = source.object_path(first)
    path.chmod(0o644)
    path.write_bytes(data)
    with pytest.raises(SwappedObject, match=str(second)):
        folder_store.open(first)
    path.write_bytes(data[:-100])
    with pytest.raises(CorruptObject, match="cut short"):
        folder_store.open(first)
    assert not list((tmp_path / "copies").rglob("*.zip"))


def test_a_seal_that_lies_about_the_content_is_found(
    folder_store: RemoteStore, source: LocalStore, tmp_path: Path
):
    from megafold.cache_store import objects

    first, _ = source.digests()
    path = source.object_path(first)
    path.chmod(0o644)
    # Sealed as it should be, by somebody who gave the wrong digest for it.
    path.write_bytes(objects.encode(small_content(7), first))
    with pytest.raises(SwappedObject, match=str(small_content(7).digest())):
        folder_store.open(first)
    assert not list((tmp_path / "copies").rglob("*.zip"))


def test_damage_on_the_way_alone_is_mended_by_asking_again(
    folder_store: RemoteStore, source: LocalStore, monkeypatch: pytest.MonkeyPatch
):
    digest = next(source.digests())
    real, asked = folder_store._transport.read, []

    def read(name: str) -> bytes:
        asked.append(name)
        data = bytearray(real(name))
        if len(asked) == 1:
            data[100] ^= 4
        return bytes(data)

    monkeypatch.setattr(folder_store._transport, "read", read)
    with folder_store.open(digest) as reader:
        assert reader.read_all().digest() == digest
    assert len(asked) == 2


def test_manifests_ledgers_and_refs_are_checked(folder_store: RemoteStore, source: LocalStore):
    manifest = source.ref("main")
    assert manifest is not None
    servers.spoil(source.manifest_path(manifest), 777)
    with pytest.raises(CorruptManifest, match=f"{folder_store.url}/manifests/{manifest}"):
        folder_store.manifest()
    (ledger,) = source.ledgers()
    servers.spoil(source.ledger_path(ledger), 777)
    for read in (folder_store.ledger, folder_store.check_ledger):
        with pytest.raises(CorruptManifest, match=str(ledger)):
            read(ledger)
    # Sealed as it should be, by somebody who gave the wrong digest for it.
    other = small_manifest(note="other")
    source.manifest_path(manifest).write_bytes(other.to_parquet(manifest))
    for check in (folder_store.manifest, folder_store.check_manifest):
        with pytest.raises(CorruptManifest, match=f"its rows have the digest {other.digest()}"):
            check(manifest)
    source.ref_path("main").write_bytes(b"nothing\n")
    with pytest.raises(CorruptRef, match=f"{folder_store.url}/refs/main"):
        folder_store.manifest()
    source.ref_path("main").write_text(f"{ABSENT}\n")
    with pytest.raises(MissingManifest, match=str(ABSENT)):
        folder_store.manifest()
    source.ref_path("main").unlink()
    with pytest.raises(MissingManifest, match="nothing was published"):
        folder_store.manifest()


@pytest.mark.parametrize("least", [0, 1000])
@pytest.mark.parametrize("kind", ["s3", "http"])
def test_a_dropped_connection_is_tried_again(
    kind: str, least: int, s3: str, source: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    digest = next(source.digests())
    name = f"bucket-{uuid.uuid4().hex[:12]}"
    with (
        servers.http_server(source.path) as web,
        servers.Cutter(s3 if kind == "s3" else web, cuts=0, least=least) as cutter,
    ):
        if kind == "s3":
            servers.make_bucket(s3, name)
            servers.upload(s3, source.path, name)
            servers.use_s3(monkeypatch, cutter.address)
        url = f"s3://{name}" if kind == "s3" else cutter.address
        store = RemoteStore.at(url, copies=ReadThrough(tmp_path / "copies"), retries=QUICK)
        cutter.cuts = 2
        with store.open(digest) as reader:
            assert reader.read_all().digest() == digest
        assert cutter.made == 2
        # aiohttp asks once again by itself where no byte of an answer has come.
        assert store.counts.retries >= 1
        cutter.cuts = 1000
        with pytest.raises(RemoteError) as caught:
            store.open(next(other for other in source.digests() if other != digest))
        assert "4 attempts failed" in str(caught.value)
        assert f"{url}/objects/" in str(caught.value)


@pytest.mark.parametrize("kind", ["s3", "http"])
def test_no_server_is_a_clear_error(kind: str, monkeypatch: pytest.MonkeyPatch):
    servers.use_s3(monkeypatch, "http://127.0.0.1:9")  # nobody listens at the discard port
    url = "s3://bucket/cache" if kind == "s3" else "http://127.0.0.1:9/cache"
    with pytest.raises(RemoteError, match=f"{url}/megafold-cache.json cannot be read, 4 attempts failed"):
        RemoteStore.at(url, retries=QUICK)


def test_refusals_are_not_tried_again(folder_store: RemoteStore, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> bytes:
        raise PermissionError("403 Forbidden")

    fs, _ = folder_store._transport._connection()
    monkeypatch.setattr(fs, "cat_file", refuse)
    with pytest.raises(RemoteError, match=r"403 Forbidden.*rights"):
        folder_store.open(ABSENT)
    assert folder_store.counts.retries == 0


def test_no_credentials_are_one_clear_error_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    for name in [name for name in os.environ if name.startswith(("AWS_", "FSSPEC_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail(f"it waits {seconds} s to try again"))
    with pytest.raises(RemoteError, match=r"NoCredentialsError.*AWS_ACCESS_KEY_ID.*anon") as caught:
        RemoteStore.at("s3://bucket/cache")
    assert "attempts" not in str(caught.value)


def test_a_callers_alarm_is_none_of_the_servers_failures(
    folder_store: RemoteStore, monkeypatch: pytest.MonkeyPatch
):
    class Alarm(Exception):
        pass

    def ring(*_: object) -> bytes:
        raise Alarm

    fs, _ = folder_store._transport._connection()
    monkeypatch.setattr(fs, "cat_file", ring)
    with pytest.raises(Alarm):
        folder_store.open(ABSENT)
    assert folder_store.counts.retries == 0


def test_waits_grow_are_random_and_bounded():
    policy = RetryPolicy(attempts=8, base_s=1.0, cap_s=10.0)
    for failed, most in ((1, 1.0), (2, 2.0), (4, 8.0), (5, 10.0), (50, 10.0)):
        waits = [policy.wait_s(failed) for _ in range(200)]
        assert 0 <= min(waits) < max(waits) <= most
        assert max(waits) > 0.8 * most
    random.seed(5)
    expected = random.Random(5).random()
    policy.wait_s(3)
    assert random.random() == expected  # a training run's random numbers are left alone


def test_a_server_that_lists_nothing_says_so(folder_store: RemoteStore, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(folder_store._transport, "files", lambda folder: [])
    assert list(folder_store.digests()) == []  # nothing there is no error where something else is
    monkeypatch.setattr(folder_store._transport, "names", lambda: [])
    with pytest.raises(RemoteError, match="lists no folders"):
        list(folder_store.digests())


# Opening ----------------------------------------------------------------------------------------------


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch):
    def missing(protocol: str) -> None:
        raise ImportError(f"install the file system of {protocol}")

    monkeypatch.setattr("fsspec.core.get_filesystem_class", missing)
    for protocol, extra in (("s3", "s3"), ("gs", "gs"), ("https", "http")):
        with pytest.raises(RemoteError, match=rf"pip install 'megafold\[{extra}\]'"):
            open_store(f"{protocol}://somewhere/cache")


def test_what_is_no_cache_and_no_url(tmp_path: Path, source: LocalStore):
    assert open_store(source) is source
    assert isinstance(open_store(source.path), LocalStore)
    assert isinstance(open_store(str(source.path)), LocalStore)
    with pytest.raises(RemoteError, match="nonsense"):
        open_store("nonsense://a/b")
    with pytest.raises(NotACache, match="give it as text"):
        open_store(Path("s3://bucket/cache"))
    with pytest.raises(RemoteError, match=r"without \?"):
        open_store("https://host/cache?token=1")
    with pytest.raises(RemoteError, match=r"s3:// names no folder: give s3://bucket"):
        open_store("s3://")
    (source.path / "megafold-cache.json").write_text('{"format": 2, "digest": "sha256"}')
    with pytest.raises(NotACache, match="format 2"):
        open_store(source.path.as_uri())


def test_passwords_stay_out_of_messages():
    with pytest.raises(RemoteError) as caught:
        RemoteStore.at("http://me:secret@127.0.0.1:9/cache", retries=QUICK)
    assert "http://127.0.0.1:9/cache" in str(caught.value)
    assert "secret" not in str(caught.value)


# The local copies -------------------------------------------------------------------------------------


def test_a_damaged_copy_is_fetched_again(folder_store: RemoteStore, source: LocalStore, tmp_path: Path):
    first, second = source.digests()
    readers = [folder_store.open(digest) for digest in (first, second)]
    for digest in (first, second):
        path = tmp_path / "copies" / "objects" / digest.hex[:2] / f"{digest}.zarr.zip"
        data = path.read_bytes()
        # In place, so that whoever has the file open sees it.
        path.chmod(0o644)
        with path.open("r+b") as file:
            file.write(bytes(len(data) // 2))
    for reader, digest in zip(readers, (first, second), strict=True):
        assert reader.read_all().digest() == digest  # damage that shows while reading
    assert folder_store.counts.refetched == 2
    path.chmod(0o644)
    path.write_bytes(data[: len(data) // 2])
    with folder_store.open(second) as reader:  # and while opening
        assert reader.read_all().digest() == second
    assert folder_store.counts.refetched == 3
    manifest = folder_store.manifest().digest()
    path = tmp_path / "copies" / "manifests" / f"{manifest}.parquet"
    servers.spoil(path, 500)
    assert folder_store.manifest().digest() == manifest
    assert folder_store.counts.refetched == 4


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO])
def test_a_full_disk_means_reading_from_memory_with_a_count(
    folder_store: RemoteStore, source: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
):
    real = files.os.open

    def full(path, flags, *rest, **named):
        if flags & files.os.O_CREAT and str(path).startswith(str(tmp_path / "copies")):
            raise OSError(code, "no luck with this disk")
        return real(path, flags, *rest, **named)

    monkeypatch.setattr(files.os, "open", full)
    first, second = source.digests()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        reader = folder_store.open(first)
        assert reader.read_all().digest() == first
        expected = small_content(int(str(reader.attributes["number"]))).arrays["msa"][3:20, [5, 1]]
        found = reader.read({"msa": (slice(3, 20), np.array([5, 1]))})["msa"]
        np.testing.assert_array_equal(found, expected)
        for _ in range(3):
            folder_store.open(second).close()
        folder_store.manifest()
    assert folder_store.counts.from_memory == 5
    texts = [str(one.message) for one in told if one.category is RemoteCacheWarning]
    assert len(texts) == 3  # of the 1st, 2nd and 4th time
    for text, number in zip(texts, (1, 2, 4), strict=True):
        assert "no luck with this disk" in text
        assert f"{number} so far" in text
    assert not list((tmp_path / "copies").rglob("*.*"))

    monkeypatch.setattr(files.os, "open", real)  # there is room again
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        folder_store.open(first).close()
        folder_store.open(first).close()
    assert folder_store.counts.from_memory == 5
    assert folder_store.counts.copies_used == 1


def filled(path: Path, number: int) -> tuple[LocalStore, list[Digest]]:
    """A cache of objects of about 20 kB each that do not compress."""
    store = LocalStore.create(path)
    noise = np.random.default_rng(0)
    return store, [
        store.put(Content({"noise": noise.integers(0, 256, 20_000).astype(np.uint8)})) for _ in range(number)
    ]


def test_copies_used_longest_ago_make_room(tmp_path: Path):
    source, digests = filled(tmp_path / "source", 12)
    store = RemoteStore.at(source.path.as_uri(), copies=ReadThrough(tmp_path / "copies", 105_000))
    kept = store.open(digests[0])
    for digest in digests:
        store.open(digest).close()
        store.open(digests[1]).close()  # always in use
        copies = list((tmp_path / "copies").rglob("*.zip"))
        assert sum(path.stat().st_size for path in copies) <= 105_000
    assert store.counts.downloads == len(digests)
    names = {path.name.split(".")[0] for path in copies}
    assert {str(digests[1]), str(digests[-1])} <= names
    assert str(digests[2]) not in names
    assert kept.read_all().digest() == digests[0]  # open although its file has gone
    copy = pickle.loads(pickle.dumps(kept))
    assert copy.read_all().digest() == digests[0]  # and fetched again elsewhere
    small = RemoteStore.at(source.path.as_uri(), copies=ReadThrough(tmp_path / "small", 1000))
    with pytest.warns(RemoteCacheWarning, match="over the limit"):
        kept = small.open(digests[0])
    assert kept.read_all().digest() == digests[0]


def test_killed_writers_leftovers_go_and_other_peoples_files_stay(tmp_path: Path):
    source, digests = filled(tmp_path / "source", 2)
    copies = tmp_path / "copies"
    store = RemoteStore.at(source.path.as_uri(), copies=ReadThrough(copies, 10**6))
    store.open(digests[0]).close()
    old, young = copies / "objects" / ".tmp-1-old", copies / "objects" / ".tmp-2-young"
    for path in (old, young):
        path.write_bytes(b"x")
    files.os.utime(old, (1e9, 1e9))
    store = RemoteStore.at(source.path.as_uri(), copies=ReadThrough(copies, 10**6))
    store.open(digests[1]).close()
    assert not old.exists()
    assert young.exists()
    with pytest.raises(NotACache, match="holds other things"):
        ReadThrough(source.path)


def test_the_environment_says_where_copies_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MEGAFOLD_REMOTE_CACHE", str(tmp_path / "here"))
    monkeypatch.setenv("MEGAFOLD_REMOTE_CACHE_BYTES", "2e9")
    found = ReadThrough.from_environment()
    assert (found.path, found.limit_bytes) == (tmp_path / "here", 2_000_000_000)
    monkeypatch.delenv("MEGAFOLD_REMOTE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert ReadThrough.from_environment().path == tmp_path / "xdg" / "megafold" / "remote"
    for text in ("much", "-1", "inf"):
        monkeypatch.setenv("MEGAFOLD_REMOTE_CACHE_BYTES", text)
        with pytest.raises(RemoteError, match="bytes"):
            ReadThrough.from_environment()


def read_all(url: str, copies: Path, limit: int, digests: list[Digest], seed: int) -> int:
    """Read every object a few times in an order of one's own; returns how many were fetched."""
    store = RemoteStore.at(url, copies=ReadThrough(copies, limit))
    for digest in random.Random(seed).choices(digests, k=4 * len(digests)):
        with store.open(digest) as reader:
            assert reader.read_all().digest() == digest
    return store.counts.downloads


def test_processes_share_the_copies_whoever_is_killed(tmp_path: Path):
    source, digests = filled(tmp_path / "source", 12)
    copies, limit = tmp_path / "copies", 105_000
    spawn = multiprocessing.get_context("spawn")
    arguments = (source.path.as_uri(), copies, limit, digests * 100)
    victim = spawn.Process(target=read_all, args=(*arguments, 0))
    victim.start()
    try:
        while not list(copies.rglob("*.zip")):
            assert victim.is_alive()
            time.sleep(0.01)
        with ProcessPoolExecutor(2, mp_context=spawn) as pool:
            tasks = [pool.submit(read_all, *arguments[:3], digests, seed) for seed in (1, 2, 3, 4)]
            tasks[0].result()
            victim.kill()
            assert all(task.result() > 0 for task in tasks)
    finally:
        victim.kill()
        victim.join()
    kept = list(copies.rglob("*.zip"))
    assert kept
    for path in kept:
        digest = Digest(path.name.split(".")[0])
        assert path.read_bytes() == source.object_path(digest).read_bytes()
    assert sum(path.stat().st_size for path in kept) <= limit + 3 * limit // 64 + 25_000


def test_threads_fetch_an_object_once(
    folder_store: RemoteStore, source: LocalStore, monkeypatch: pytest.MonkeyPatch
):
    digest = next(source.digests())
    real, start = folder_store._transport.read, threading.Barrier(4)
    asked = []

    def read(name: str) -> bytes:
        asked.append(name)
        return real(name)

    def open_one(_: int) -> Digest:
        start.wait()
        with folder_store.open(digest) as reader:
            return reader.read_all().digest()

    monkeypatch.setattr(folder_store._transport, "read", read)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(open_one, range(4))) == [digest] * 4
    assert len(asked) == 1
