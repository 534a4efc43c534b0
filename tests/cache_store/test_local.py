import errno
import json
import os
import stat
from pathlib import Path

import pytest

from megafold.cache_store import (
    CorruptManifest,
    CorruptObject,
    Digest,
    LocalStore,
    LockHeld,
    NotACache,
    ReadOnlyCache,
    Store,
    SwappedObject,
    WriteFailed,
    audit,
    collect,
    local,
    objects,
)
from megafold.cache_store.ledger import ledger_table
from megafold.cache_store.locks import KernelLock
from tests.cache_store.store_conformance import ABSENT, StoreConformance, small_content, small_manifest


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore.create(tmp_path / "cache")


class TestLocalStore(StoreConformance):
    def path_of_manifest(self, store: Store, digest: Digest) -> Path:
        assert isinstance(store, LocalStore)
        path = store.manifest_path(digest)
        path.chmod(0o644)
        return path

    def path_of_ledger(self, store: Store, digest: Digest) -> Path:
        assert isinstance(store, LocalStore)
        return store.ledger_path(digest)


def test_the_layout(store: LocalStore):
    digest = store.put(small_content())
    manifest = store.put_manifest(small_manifest(digest))
    ledger = store.put_ledger([])
    store.move_ref("main", None, manifest)
    with store.journal("b1") as journal:
        journal.append({})
    files = {str(path.relative_to(store.path)) for path in store.path.rglob("*") if path.is_file()}
    assert files - {"locks/refs"} == {
        "megafold-cache.json",
        f"objects/{digest.hex[:2]}/{digest}.zarr.zip",
        f"manifests/{manifest}.parquet",
        f"failures/{ledger}.parquet",
        "refs/main",
        "journal/b1.jsonl",
    }
    assert json.loads((store.path / "megafold-cache.json").read_text()) == {"format": 1, "digest": "sha256"}
    assert (store.path / "refs" / "main").read_text() == f"{manifest}\n"
    for path in (store.object_path(digest), store.manifest_path(manifest), store.ledger_path(ledger)):
        assert stat.S_IMODE(path.stat().st_mode) == 0o444


def test_create_and_open(tmp_path: Path):
    path = tmp_path / "new" / "cache"
    with pytest.raises(NotACache, match="new/cache is not a cache"):
        LocalStore.at(path)
    digest = LocalStore.create(path).put(small_content())
    for store in (LocalStore.create(path), LocalStore.at(path), LocalStore.at(str(path))):
        assert store.path == path
        assert list(store.digests()) == [digest]
    with pytest.raises(FileExistsError, match="a cache already"):
        LocalStore.create(path, exist_ok=False)
    assert LocalStore.create(tmp_path / "empty").path.is_dir()


def test_paths_are_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    LocalStore.create("cache")
    store = LocalStore.at("cache")
    monkeypatch.chdir("/")
    store.check(store.put(small_content()))
    assert store.path == tmp_path / "cache"


def test_folders_that_are_no_cache(tmp_path: Path):
    (tmp_path / "notes.txt").write_text("mine")
    for open_or_create in (LocalStore.at, LocalStore.create):
        with pytest.raises(NotACache, match=str(tmp_path)):
            open_or_create(tmp_path)
    with pytest.raises(NotACache, match=r"notes\.txt"):
        LocalStore.create(tmp_path)
    with pytest.raises(NotACache, match="is a file"):
        LocalStore.create(tmp_path / "notes.txt")
    with pytest.raises(NotACache):
        LocalStore.at(tmp_path / "notes.txt")
    assert os.listdir(tmp_path) == ["notes.txt"]
    (tmp_path / "unmounted").symlink_to(tmp_path / "nowhere")
    with pytest.raises(NotACache, match="unmounted is a link to nothing"):
        LocalStore.create(tmp_path / "unmounted")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"format": 2, "digest": "sha256"}', "format 2 .* reads format 1"),
        ('{"format": 1, "digest": "blake3"}', "blake3"),
        ("{", "damaged"),
        ("[]", "damaged"),
        ('{"format": 1}', "damaged"),
    ],
)
def test_caches_of_another_format(tmp_path: Path, text: str, message: str):
    (tmp_path / "megafold-cache.json").write_text(text)
    for open_or_create in (LocalStore.at, LocalStore.create):
        with pytest.raises(NotACache, match=message):
            open_or_create(tmp_path)


@pytest.mark.parametrize("error", [errno.EROFS, errno.EACCES])
def test_a_read_only_cache_reads_and_says_why_it_does_not_write(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch, error: int
):
    digest = store.put(small_content())
    manifest = store.put_manifest(small_manifest())
    store.move_ref("main", None, manifest)
    real_open = os.open

    def refuse(path, flags, *rest, **named):
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(error, os.strerror(error), path)
        return real_open(path, flags, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    reopened = LocalStore.at(store.path)
    reopened.check(digest)
    assert not audit(reopened, [digest])
    for write in (
        lambda: reopened.put(small_content(1)),
        lambda: reopened.put_manifest(small_manifest(digest)),
        lambda: reopened.put_ledger([]),
        lambda: reopened.move_ref("main", manifest, manifest),
        lambda: reopened.journal("b").append({}),
        lambda: reopened.build_lock().acquire(),
    ):
        with pytest.raises(ReadOnlyCache, match=r"cannot write .*read-only"):
            write()
    assert reopened.put(small_content()) == digest, "what is there need not be written"


@pytest.mark.skipif(os.geteuid() == 0, reason="permissions do not bind root")
def test_a_folder_without_write_permission(store: LocalStore):
    store.path.chmod(0o555)
    try:
        with pytest.raises(ReadOnlyCache):
            store.put(small_content())
    finally:
        store.path.chmod(0o755)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_full_disk_leaves_nothing_behind(store: LocalStore, monkeypatch: pytest.MonkeyPatch, code: int):
    def fail(fd):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        for write in (
            lambda: store.put(small_content()),
            lambda: store.put_manifest(small_manifest()),
            lambda: store.journal("b").append({}),
        ):
            with pytest.raises(WriteFailed, match=f"{os.strerror(code)}.*Make room"):
                write()
    assert not list(store.digests())
    assert not list(store.temporary_files())


def test_leftovers_are_swept_when_old_and_nobody_builds(store: LocalStore):
    digest = store.put(small_content())
    folder = store.object_path(digest).parent
    leftover, stranger = folder / ".tmp-1-ab", folder / "notes.txt"
    leftover.write_bytes(b"half an obj")
    stranger.write_text("mine")
    misplaced = folder / f"{'0' * 64}.zarr.zip"
    misplaced.write_bytes(b"")
    assert list(store.digests()) == [digest]
    assert list(store.temporary_files()) == [leftover]
    assert list(store.foreign_files()) == [misplaced, stranger]
    for name in ("refs", "journal"):
        (store.path / name).mkdir()
        (store.path / name / ".tmp-2-cd").write_bytes(b"half a ref")
    assert list(store.refs()) == list(store.journals()) == []
    leftovers = {store.path / "journal" / ".tmp-2-cd", store.path / "refs" / ".tmp-2-cd", leftover}
    assert {(finding.kind, finding.path) for finding in audit(store, [digest])} == {
        *(("temporary-file", path) for path in leftovers),
        ("foreign-file", misplaced),
        ("foreign-file", stranger),
    }
    assert store.sweep() == []
    with store.build_lock() as lock:
        assert set(store.sweep(older_than_s=0, lock=lock)) == leftovers
    assert not list(store.temporary_files())
    assert stranger.exists()


def test_an_object_that_is_there_needs_no_right_to_touch_it(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
):
    digest = store.put(small_content())

    def refuse(path):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), path)

    monkeypatch.setattr(os, "utime", refuse)
    assert store.put(small_content()) == digest


def test_an_object_that_is_wanted_again_is_young_again(store: LocalStore):
    digest = store.put(small_content())
    os.utime(store.object_path(digest), (1, 1))
    assert store.age_s(digest) > 1e9
    store.put(small_content())
    assert store.age_s(digest) < 600
    assert collect(store, frozenset(), older_than_s=600).too_young == 1


def test_one_process_at_a_time_moves_a_ref(store: LocalStore, monkeypatch: pytest.MonkeyPatch):
    manifest = store.put_manifest(small_manifest())
    monkeypatch.setattr(local, "_REF_LOCK_WAIT_S", 0.0)
    with KernelLock(store.path / "locks" / "refs"), pytest.raises(LockHeld):
        store.move_ref("main", None, manifest)
    store.move_ref("main", None, manifest)


def test_what_a_seal_says_of_the_content_is_not_taken_for_it(store: LocalStore):
    """Files that were written with a wrong digest: whole to the last bit, and not what their names say."""
    digest = store.put(small_content(1))
    path = store.object_path(digest)
    path.chmod(0o644)
    path.write_bytes(objects.encode(small_content(2), digest))
    store.quick_check(digest)
    with pytest.raises(SwappedObject, match=str(small_content(2).digest())):
        store.check(digest)

    for table, place, read, check in (
        (small_manifest(note="other"), store.manifest_path, store.manifest, store.check_manifest),
        (ledger_table([]), store.ledger_path, store.ledger, store.check_ledger),
    ):
        place(ABSENT).parent.mkdir()
        place(ABSENT).write_bytes(table.to_parquet(ABSENT))
        read(ABSENT)
        with pytest.raises(CorruptManifest, match=str(table.digest())):
            check(ABSENT)


def test_tables_under_other_names_and_in_other_places(store: LocalStore):
    first, second = small_manifest(note="1"), small_manifest(note="2")
    digest = store.put_manifest(first)
    path = store.manifest_path(second.digest())
    path.write_bytes(store.manifest_path(digest).read_bytes())
    with pytest.raises(CorruptManifest, match=f"holds the manifest {digest}"):
        store.manifest(second.digest())
    store.put_ledger([])
    store.ledger_path(digest).write_bytes(store.manifest_path(digest).read_bytes())
    for read in (store.ledger, store.check_ledger):
        with pytest.raises(CorruptManifest, match="not a ledger"):
            read(digest)


def test_files_that_cannot_be_read_are_damage(store: LocalStore):
    """As a disk's bad sector is; here something that is no file."""
    digest, manifest = store.put(small_content()), store.put_manifest(small_manifest())
    for path in (store.object_path(digest), store.manifest_path(manifest)):
        path.unlink()
        path.mkdir()
    for check in (store.check, store.quick_check):
        with pytest.raises(CorruptObject, match="cannot be read"):
            check(digest)
    with pytest.raises(CorruptManifest, match="cannot be read"):
        store.manifest(manifest)


def test_what_others_remove_meanwhile_ends_neither_a_collection_nor_an_audit_nor_a_sweep(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
):
    garbage = store.put(small_content())
    monkeypatch.setattr(store, "digests", lambda: iter([ABSENT, garbage]))
    monkeypatch.setattr(store, "manifests", lambda: iter([ABSENT]))
    assert {finding.kind for finding in audit(store, [])} == {"unreferenced-object", "corrupt-manifest"}
    assert collect(store, frozenset(), older_than_s=0).removed == (garbage,)
    monkeypatch.setattr(local.files, "temporary_files", lambda path: iter([path / ".tmp-gone"]))
    assert store.sweep(older_than_s=0) == []


def test_a_snapshot_that_is_published_during_an_audit_is_no_finding(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
):
    store.move_ref("main", None, store.put_manifest(small_manifest(note="1")))
    read = store.ref

    def published_just_now(name: str) -> Digest | None:
        before = read(name)
        new = store.put_manifest(small_manifest(note="2"))
        if before is not None and before != new:
            with monkeypatch.context() as patch:
                patch.setattr(store, "ref", read)
                store.move_ref(name, before, new)
        return read(name)

    monkeypatch.setattr(store, "ref", published_just_now)
    assert audit(store, []) == []


def test_a_refusal_to_remove_says_that_the_cache_is_read_only(
    store: LocalStore, monkeypatch: pytest.MonkeyPatch
):
    garbage = store.put(small_content())

    def refuse(path: Path, *, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr(Path, "unlink", refuse)
    with pytest.raises(ReadOnlyCache):
        store.delete(garbage)


def test_garbage_makes_room_on_a_full_disk(store: LocalStore, monkeypatch: pytest.MonkeyPatch):
    """Where there is no room for the note of who has the lock, nor for anything else."""
    garbage = store.put(small_content())
    with store.build_lock():
        pass
    note = store.path / "locks" / "build.holder"
    assert note.exists()

    def full(fd: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with store.build_lock() as lock:
            assert not note.exists(), "an old note would name somebody else"
            assert collect(store, frozenset(), older_than_s=0, lock=lock).removed == (garbage,)
    with store.build_lock():
        assert note.exists()
