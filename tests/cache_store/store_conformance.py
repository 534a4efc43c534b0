"""What every store has to do. A store's own test module subclasses :class:`StoreConformance`."""

import pickle
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from megafold.cache_store import (
    MAIN_REF,
    Content,
    CorruptManifest,
    CorruptObject,
    CorruptRef,
    Digest,
    Failure,
    LockHeld,
    Manifest,
    MissingManifest,
    MissingObject,
    RefMoved,
    Store,
    SwappedObject,
    audit,
    collect,
    reachable,
)


def small_content(number: int = 0) -> Content:
    """A few arrays of different kinds, over several chunks."""
    random_numbers = np.random.default_rng(number)
    return Content(
        arrays={
            "msa": random_numbers.integers(0, 32, (50, 40)).astype(np.int8),
            "zeros": np.zeros((30, 3), np.float32),
            "mask": random_numbers.random(17) < 0.5,
            "number": np.array(number, np.float64),
            "empty": np.empty((0, 4), np.int32),
        },
        attributes={"kind": "small", "number": number, "names": ["α", "β"], "nested": {"resolution": None}},
        chunks={"msa": (16, 40), "zeros": (10, 3)},
    )


def small_manifest(*objects: Digest, note: str = "") -> Manifest:
    return Manifest(pa.table({"object": [str(digest) for digest in objects]}), {"note": note})


def named(manifest: Manifest) -> list[Digest]:
    return [Digest(text) for text in manifest.table["object"].to_pylist()]


def flip(path: Path, position: int) -> None:
    """Flip one bit of a file, as a disk would: without asking for permission."""
    data = bytearray(path.read_bytes())
    data[position // 8] ^= 1 << (position % 8)
    path.chmod(0o644)
    path.write_bytes(data)


ABSENT = Digest("0" * 64)


class StoreConformance:
    """Subclasses give the fixture ``store``: an empty, writable store."""

    def file_of(self, store: Store, place: Path | str) -> Path:
        """The file at a place that the store has told: where damage is done to it."""
        return Path(place)

    def path_of_manifest(self, store: Store, digest: Digest) -> Path:
        raise NotImplementedError

    def path_of_ledger(self, store: Store, digest: Digest) -> Path:
        raise NotImplementedError

    # Objects

    def test_an_object_comes_back_as_it_was_put(self, store: Store):
        content = small_content()
        digest = store.put(content)
        assert digest == content.digest()
        assert store.has(digest)
        assert list(store.digests()) == [digest]
        with store.open(digest) as reader:
            assert reader.digest == digest
            assert reader.attributes == dict(content.attributes)
            assert reader.shapes == {name: array.shape for name, array in content.arrays.items()}
            assert reader.dtypes == {name: array.dtype for name, array in content.arrays.items()}
            found = reader.read(dict.fromkeys(content.arrays))
        assert found.keys() == content.arrays.keys()
        for name, array in content.arrays.items():
            assert found[name].dtype == array.dtype
            np.testing.assert_array_equal(found[name], array)
        assert store.size(digest) > 0
        assert store.age_s(digest) < 600
        store.check(digest)
        store.quick_check(digest)

    def test_putting_twice_stores_once(self, store: Store):
        first = store.put(small_content())
        # The same content in another memory order and other chunks is the same object.
        other = small_content()
        arrays = {name: np.asfortranarray(array) for name, array in other.arrays.items() if array.ndim}
        other = Content({**other.arrays, **arrays}, dict(other.attributes), {"msa": (50, 7)})
        assert store.put(other) == first
        assert len(list(store.digests())) == 1

    def test_empty_content(self, store: Store):
        digest = store.put(Content({}, {}))
        with store.open(digest) as reader:
            assert reader.read({}) == {}
            assert reader.read_all().digest() == digest

    def test_absent_objects(self, store: Store):
        assert not store.has(ABSENT)
        for operation in (store.open, store.size, store.age_s, store.check, store.quick_check):
            with pytest.raises(MissingObject, match=str(ABSENT)):
                operation(ABSENT)
        store.delete(ABSENT)

    def test_deleted_objects_are_gone(self, store: Store):
        kept, gone = store.put(small_content(1)), store.put(small_content(2))
        store.delete(gone)
        assert list(store.digests()) == [kept]
        with pytest.raises(MissingObject):
            store.open(gone)

    def test_a_store_pickles(self, store: Store):
        digest = store.put(small_content())
        copy = pickle.loads(pickle.dumps(store))
        with pickle.loads(pickle.dumps(copy.open(digest))) as reader:
            assert reader.read_all().digest() == digest

    def test_threads_may_put_the_same_objects(self, store: Store):
        contents = [small_content(number % 4) for number in range(16)]
        with ThreadPoolExecutor(4) as pool:
            digests = list(pool.map(store.put, contents))
        assert sorted(set(digests)) == list(store.digests())
        assert not audit(store, digests)

    @pytest.mark.parametrize("number", range(3))
    def test_every_flipped_bit_of_an_object_is_found(self, store: Store, number: int):
        digest = store.put(small_content(number))
        path = self.file_of(store, store.object_path(digest))
        clean = path.read_bytes()
        positions = random.Random(number).sample(range(8 * len(clean)), 50)
        # Always the first and last bits: the zip's first header, the last digit of the seal.
        for position in [*positions, 0, 8 * len(clean) - 1]:
            flip(path, position)
            for check in (store.check, store.quick_check):
                with pytest.raises(CorruptObject) as caught:
                    check(digest)
                assert caught.value.digest == digest
                assert caught.value.path == store.object_path(digest)
                assert str(digest) in str(caught.value)
            path.write_bytes(clean)
        store.check(digest)

    @pytest.mark.parametrize("keep", [0, 1, 100, -1, -200])
    def test_a_truncated_object_is_found_and_put_again(self, store: Store, keep: int):
        digest = store.put(small_content())
        path = self.file_of(store, store.object_path(digest))
        clean = path.read_bytes()
        path.chmod(0o644)
        path.write_bytes(clean[:keep])
        with pytest.raises(CorruptObject):
            store.check(digest)
        assert store.put(small_content()) == digest
        store.check(digest)
        assert path.read_bytes() == clean

    def test_swapped_objects_are_found(self, store: Store):
        first, second = store.put(small_content(1)), store.put(small_content(2))
        path = self.file_of(store, store.object_path(first))
        path.chmod(0o644)
        path.write_bytes(self.file_of(store, store.object_path(second)).read_bytes())
        for check in (store.check, store.quick_check):
            with pytest.raises(SwappedObject, match=str(second)):
                check(first)
            check(second)

    # Manifests and ledgers

    def test_manifests(self, store: Store):
        manifest = small_manifest(ABSENT, note="ü")
        digest = store.put_manifest(manifest)
        assert store.put_manifest(manifest) == digest == manifest.digest()
        assert list(store.manifests()) == [digest]
        found = store.manifest(digest)
        assert found.table.equals(manifest.table)
        assert found.attributes == {"note": "ü"}
        with pytest.raises(MissingManifest, match=str(ABSENT)):
            store.manifest(ABSENT)

    def test_without_a_digest_main_is_meant(self, store: Store):
        with pytest.raises(MissingManifest, match="nothing was published"):
            store.manifest()
        digest = store.put_manifest(small_manifest())
        store.move_ref(MAIN_REF, None, digest)
        assert store.manifest().digest() == digest

    def test_every_flipped_bit_of_a_manifest_is_found(self, store: Store):
        digest = store.put_manifest(small_manifest(ABSENT))
        path = self.path_of_manifest(store, digest)
        clean = path.read_bytes()
        for position in [*random.Random(1).sample(range(8 * len(clean)), 100), 0, 8 * len(clean) - 1]:
            flip(path, position)
            for operation in (store.manifest, store.check_manifest):
                with pytest.raises(CorruptManifest, match=path.name):
                    operation(digest)
            path.write_bytes(clean)
        path.write_bytes(clean[:-9])
        with pytest.raises(CorruptManifest):
            store.manifest(digest)
        assert store.put_manifest(small_manifest(ABSENT)) == digest
        store.check_manifest(digest)

    def test_ledgers(self, store: Store):
        failure = Failure(
            entry="1abc", stage="structure", reason="no-polymer", message="1abc.cif: …", inputs=("ab",)
        )
        other = replace(failure, entry="0xyz", attempts=2)
        digest = store.put_ledger([failure, other])
        assert store.put_ledger([other, failure]) == digest
        assert store.ledger(digest) == [other, failure]
        assert list(store.ledgers()) == [digest]
        store.check_ledger(digest)
        assert store.ledger(store.put_ledger([])) == []
        with pytest.raises(MissingManifest):
            store.ledger(ABSENT)
        flip(self.path_of_ledger(store, digest), 999)
        with pytest.raises(CorruptManifest):
            store.ledger(digest)

    # Refs

    def test_a_ref_moves_from_where_it_is(self, store: Store):
        first = store.put_manifest(small_manifest(note="1"))
        second = store.put_manifest(small_manifest(note="2"))
        assert store.ref("main") is None
        assert list(store.refs()) == []
        store.move_ref("main", None, first)
        assert store.ref("main") == first
        with pytest.raises(RefMoved, match=str(first)) as caught:
            store.move_ref("main", None, second)
        assert (caught.value.expected, caught.value.found) == (None, first)
        with pytest.raises(RefMoved):
            store.move_ref("main", second, second)
        store.move_ref("main", first, second)
        store.move_ref("release-1.0", None, first)
        assert [(name, store.ref(name)) for name in store.refs()] == [
            ("main", second),
            ("release-1.0", first),
        ]

    def test_a_ref_never_names_what_is_not_there(self, store: Store):
        with pytest.raises(MissingManifest):
            store.move_ref("main", None, ABSENT)
        assert store.ref("main") is None

    @pytest.mark.parametrize("name", ["", ".", "..", "../main", "a/b", ".tmp-1", "-x", "a b", "ä", "x" * 101])
    def test_bad_ref_names(self, store: Store, name: str):
        with pytest.raises(ValueError, match="ref"):
            store.ref(name)
        with pytest.raises(ValueError, match="ref"):
            store.move_ref(name, None, ABSENT)

    # Builds and housekeeping

    def test_journals_go_by_build(self, store: Store):
        with store.journal("build-1") as journal:
            journal.append({"entry": "1abc"})
        assert list(store.journals()) == ["build-1"]
        assert list(store.journal("build-1").replay()) == [{"entry": "1abc"}]
        store.journal("build-1").remove()
        assert list(store.journals()) == []
        with pytest.raises(ValueError, match="build id"):
            store.journal("../x")

    def test_one_build_at_a_time(self, store: Store):
        with store.build_lock() as lock:
            assert lock.held
            with pytest.raises(LockHeld, match="process"):
                store.build_lock().acquire()
            with pytest.raises(LockHeld):
                collect(store, frozenset())
            with pytest.raises(LockHeld):
                store.sweep()
        with store.build_lock():
            pass

    def test_garbage_is_what_no_manifest_names(self, store: Store):
        kept, garbage = store.put(small_content(1)), store.put(small_content(2))
        keep = reachable([small_manifest(kept), small_manifest(kept, note="2")], named)
        assert keep == {kept}
        assert collect(store, keep, older_than_s=3600).too_young == 1
        trial = collect(store, keep, older_than_s=0, dry_run=True)
        assert len(list(store.digests())) == 2
        with store.build_lock() as lock:
            done = collect(store, keep, older_than_s=0, lock=lock)
            assert lock.held
        assert trial == done
        assert done.removed == (garbage,)
        assert done.freed_bytes > 0
        assert list(store.digests()) == [kept]

    def test_an_audit_names_everything(self, store: Store):
        good, corrupt, swapped, spare = (store.put(small_content(number)) for number in range(4))
        manifest = store.put_manifest(small_manifest(good, corrupt, swapped, ABSENT))
        bad_manifest = store.put_manifest(small_manifest())
        bad_ledger = store.put_ledger([])
        store.move_ref("main", None, manifest)
        store.move_ref("lost", None, bad_manifest)
        expected = named(store.manifest())

        flip(self.file_of(store, store.object_path(corrupt)), 1000)
        path = self.file_of(store, store.object_path(swapped))
        path.chmod(0o644)
        path.write_bytes(self.file_of(store, store.object_path(spare)).read_bytes())
        flip(self.path_of_manifest(store, bad_manifest), 500)
        flip(self.path_of_ledger(store, bad_ledger), 500)
        flip(self.file_of(store, store.ref_path("lost")), 1)

        progress: list[tuple[int, int]] = []
        for quick in (False, True):
            with ThreadPoolExecutor(2) as pool:
                findings = audit(
                    store, expected, quick=quick, progress=lambda *now: progress.append(now), mapper=pool.map
                )
            assert {(finding.kind, finding.subject) for finding in findings} == {
                ("corrupt-object", str(corrupt)),
                ("swapped-object", str(swapped)),
                ("missing-object", str(ABSENT)),
                ("unreferenced-object", str(spare)),
                ("corrupt-manifest", str(bad_manifest)),
                ("corrupt-ledger", str(bad_ledger)),
                (findings[-1].kind, "lost"),
            }
            assert findings[-1].kind in ("corrupt-ref", "dangling-ref")
            assert [finding.subject for finding in findings if finding.level == "info"] == [str(spare)]
            assert all(finding.message and finding.action and finding.path for finding in findings)
        assert progress == [(1, 4), (2, 4), (3, 4), (4, 4)] * 2

    def test_refs_that_hold_no_digest(self, store: Store):
        digest = store.put_manifest(small_manifest())
        store.move_ref("main", None, digest)
        path = self.file_of(store, store.ref_path("main"))
        for text in (b"", b"main", b"\xff" * 64, str(digest).encode() + b" "):
            path.write_bytes(text)
            with pytest.raises(CorruptRef, match="main"):
                store.ref("main")
        path.write_text(str(digest))  # a missing newline is forgiven
        assert store.ref("main") == digest
