from pathlib import Path

import pytest

from megafold.cache_store import BuildLock, LockHeld


def test_a_lock_nests_in_one_object_and_excludes_others(tmp_path: Path):
    lock, other = BuildLock(tmp_path / "locks" / "build"), BuildLock(tmp_path / "locks" / "build")
    assert not lock.held
    lock.release()
    with lock, lock:
        assert lock.held
        with pytest.raises(LockHeld):
            other.acquire()
        assert not other.held
    assert not lock.held
    with other:
        pass


def test_a_damaged_note_hides_nothing_but_the_name(tmp_path: Path):
    with BuildLock(tmp_path / "build"):
        (tmp_path / "build.holder").write_bytes(b"\xff{")
        with pytest.raises(LockHeld, match="another process"):
            BuildLock(tmp_path / "build").acquire()
