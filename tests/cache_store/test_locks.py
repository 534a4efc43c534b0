import errno
import fcntl
import os
from pathlib import Path

import pytest

from megafold.cache_store import BuildLock, LockHeld, WriteFailed, locks


def test_a_lock_nests_in_one_object_and_excludes_others(tmp_path: Path):
    lock, other = BuildLock(tmp_path / "locks" / "build"), BuildLock(tmp_path / "locks" / "build")
    assert not lock.held
    lock.release()
    with lock:
        with lock:
            assert lock.held
        # As a sweep within a build is: what it releases is not the build's.
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


@pytest.mark.parametrize("code", ["ENOSYS", "ENOLCK", "EOPNOTSUPP"])
def test_a_file_system_without_locks_is_told(tmp_path: Path, monkeypatch, code):
    """Lustre mounted without ``flock``, NFS without its lock daemon, and others."""

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock = BuildLock(tmp_path / "build")
    with pytest.raises(WriteFailed, match=r"cannot lock .*build.*file system with locks"):
        lock.acquire()
    assert not lock.held
    monkeypatch.undo()
    with lock:
        assert lock.held


def test_a_forked_child_does_not_keep_a_lock_that_was_released(tmp_path: Path):
    lock = BuildLock(tmp_path / "build")
    here, there = os.pipe()
    with lock:
        child = os.fork()
        if not child:
            os.close(there)
            os.read(here, 1)
            os._exit(0)
    with BuildLock(tmp_path / "build"):
        os.close(there)
        os.waitpid(child, 0)


def test_a_negative_wait_has_no_end(tmp_path: Path, monkeypatch):
    holder = BuildLock(tmp_path / "build")
    holder.acquire()
    monkeypatch.setattr(locks.time, "sleep", lambda _: holder.release())
    with BuildLock(tmp_path / "build", wait=-1) as lock:
        assert lock.held


def test_a_lock_that_is_not_had_leaves_no_file_open(tmp_path: Path):
    with BuildLock(tmp_path / "build"):
        free = os.open(tmp_path, os.O_RDONLY)
        os.close(free)
        with pytest.raises(LockHeld):
            BuildLock(tmp_path / "build").acquire()
        again = os.open(tmp_path, os.O_RDONLY)
        os.close(again)
    assert again == free
