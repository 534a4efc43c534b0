"""Copying a snapshot behind a URL."""

from pathlib import Path

import pytest

from megafold.cache_store import (
    CorruptManifest,
    CorruptObject,
    Digest,
    LocalStore,
    MissingObject,
    NotACache,
    ReadThrough,
    RefMoved,
    RemoteError,
    RemoteStore,
    RetryPolicy,
    Snapshot,
    audit,
    pushing,
)
from megafold.cache_store.transport import Transport
from tests.cache_store import remote_servers as servers
from tests.cache_store.store_conformance import small_content, small_manifest

QUICK = RetryPolicy(attempts=3, base_s=0.001, cap_s=0.002)


@pytest.fixture
def source(tmp_path: Path) -> LocalStore:
    return LocalStore.create(tmp_path / "source")


def snapshot(store: LocalStore, objects: int) -> Snapshot:
    digests = [store.put(small_content(number)) for number in range(objects)]
    manifest = store.put_manifest(small_manifest(*digests))
    return Snapshot(manifest, frozenset(digests), frozenset({store.put_ledger([])}))


def remote(url: str, tmp_path: Path) -> RemoteStore:
    return RemoteStore.at(url, copies=ReadThrough(tmp_path / "copies"), retries=QUICK)


def test_a_push_to_s3_is_whole_and_repeats_as_nothing(
    source: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    with servers.s3_server() as endpoint:
        servers.use_s3(monkeypatch, endpoint)
        servers.make_bucket(endpoint, "pushed")
        url = "s3://pushed/to/cache"
        first = snapshot(source, 12)
        progress: list[tuple[int, int]] = []
        done = pushing.push(source, url, first, progress=lambda *now: progress.append(now), retries=QUICK)
        assert (done.uploaded, done.present, done.ref_moved) == (12, 0, True)
        assert done.uploaded_bytes == sum(size for _, size in source.sizes())
        assert progress == [(number, 12) for number in range(13)]
        store = remote(url, tmp_path)
        assert store.ref() == first.manifest
        assert store.manifest().table.equals(source.manifest(first.manifest).table)
        assert not audit(store, first.objects)
        assert list(store.ledgers()) == list(source.ledgers())

        again = pushing.push(source, url, first, retries=QUICK)
        assert (again.uploaded, again.present, again.ref_moved) == (0, 12, False)
        second = snapshot(source, 14)
        done = pushing.push(source, url, second, retries=QUICK)
        assert (done.uploaded, done.present, done.ref_moved) == (2, 12, True)
        assert store.ref() == second.manifest
        assert list(store.manifests()) == sorted([first.manifest, second.manifest])


def test_an_interrupted_push_goes_on(source: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole, target = snapshot(source, 20), tmp_path / "target"
    real = Transport.write
    written: list[str] = []

    def write(self: Transport, name: str, data: bytes) -> None:
        if len(written) == 9:
            raise KeyboardInterrupt
        written.append(name)
        real(self, name, data)

    with monkeypatch.context() as patch:
        patch.setattr(Transport, "write", write)
        with pytest.raises(KeyboardInterrupt):
            pushing.push(source, target.as_uri(), whole, retries=QUICK)
    store = remote(target.as_uri(), tmp_path)
    assert store.ref() is None
    assert list(store.manifests()) == []
    there = len(list(store.digests()))
    assert 0 < there < 20
    # A copy that was cut short by the interruption, too.
    cut = LocalStore.at(target).object_path(next(store.digests()))
    cut.write_bytes(cut.read_bytes()[:-5])
    done = pushing.push(source, target.as_uri(), whole, retries=QUICK)
    assert (done.uploaded, done.present) == (21 - there, there - 1)
    assert not audit(LocalStore.at(target), whole.objects)


def test_the_order_is_objects_manifest_ref(
    source: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    real = Transport.write
    written: list[str] = []

    def write(self: Transport, name: str, data: bytes) -> None:
        real(self, name, data)
        written.append(name.split("/")[0])

    monkeypatch.setattr(Transport, "write", write)
    pushing.push(source, (tmp_path / "target").as_uri(), snapshot(source, 3), retries=QUICK)
    assert written == ["megafold-cache.json", *["objects"] * 3, "failures", "manifests", "refs"]


def test_what_is_damaged_here_is_not_sent_and_what_is_damaged_there_is_mended(
    source: LocalStore, tmp_path: Path
):
    whole, target = snapshot(source, 5), tmp_path / "target"
    bad = source.object_path(min(whole.objects))
    clean = bad.read_bytes()
    servers.spoil(bad, 999)
    with pytest.raises(CorruptObject, match=str(bad)):
        pushing.push(source, target.as_uri(), whole, retries=QUICK)
    assert remote(target.as_uri(), tmp_path).ref() is None
    bad.unlink()
    with pytest.raises(MissingObject, match=str(bad)):
        pushing.push(source, target.as_uri(), whole, retries=QUICK)
    bad.write_bytes(clean)
    pushing.push(source, target.as_uri(), whole, retries=QUICK)

    there = LocalStore.at(target).object_path(max(whole.objects))
    servers.spoil(there, 999)
    assert pushing.push(source, target.as_uri(), whole, retries=QUICK).uploaded == 0
    with pytest.raises(CorruptObject, match="--recheck"):
        remote(target.as_uri(), tmp_path).open(max(whole.objects))
    assert pushing.push(source, target.as_uri(), whole, recheck=True, retries=QUICK).uploaded == 1
    assert not audit(LocalStore.at(target), whole.objects)


@pytest.mark.parametrize("what", ["manifest", "ledger"])
def test_a_damaged_manifest_or_ledger_is_not_sent(source: LocalStore, tmp_path: Path, what: str):
    whole, target = snapshot(source, 1), tmp_path / "target"
    (ledger,) = whole.ledgers
    path = source.manifest_path(whole.manifest) if what == "manifest" else source.ledger_path(ledger)
    servers.spoil(path, 99)
    with pytest.raises(CorruptManifest, match=str(path)):
        pushing.push(source, target.as_uri(), whole, retries=QUICK)
    assert remote(target.as_uri(), tmp_path).ref() is None


def test_urls_that_take_no_cache(source: LocalStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole, target = snapshot(source, 1), tmp_path / "target"
    target.mkdir()
    (target / "notes.txt").write_text("mine")
    with pytest.raises(NotACache, match=r"notes\.txt"):
        pushing.push(source, target.as_uri(), whole, retries=QUICK)
    (target / "megafold-cache.json").write_text('{"format": 2, "digest": "sha256"}')
    with pytest.raises(NotACache, match="format 2"):
        pushing.push(source, target.as_uri(), whole, retries=QUICK)
    with servers.http_server(tmp_path) as address, pytest.raises(RemoteError, match="cannot be written"):
        pushing.push(source, f"{address}/new", whole, retries=QUICK)
    refs = iter([None, Digest("1" * 64)])
    monkeypatch.setattr(pushing, "_ref", lambda _: next(refs))
    with pytest.raises(RefMoved):
        pushing.push(source, (tmp_path / "other").as_uri(), whole, retries=QUICK)
