"""Files appear whole or not at all: what is asked of the disk, in which order, and what its errors become."""

import errno
import os
import stat
from pathlib import Path

import pytest

from megafold.cache_store import ReadOnlyCache, WriteFailed, files


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """What is brought to the disk and renamed, as it happens: each file and folder by its inode."""
    made: list[tuple[str, int]] = []
    fsync, replace = os.fsync, os.replace

    def synced(fd: int) -> None:
        made.append(("fsync", os.fstat(fd).st_ino))
        fsync(fd)

    def renamed(source: Path, target: Path) -> None:
        assert source.parent == target.parent, "only within a folder is a rename one step"
        assert files.is_temporary(source)
        made.append(("rename", source.stat().st_ino))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    return made


def test_a_file_is_on_the_disk_before_it_has_its_name_and_its_name_before_anybody_is_told(
    tmp_path: Path, calls: list[tuple[str, int]]
):
    path = tmp_path / "name"
    files.publish(path, b"data")
    file, folder = path.stat().st_ino, tmp_path.stat().st_ino
    assert calls == [("fsync", file), ("rename", file), ("fsync", folder)]
    assert path.read_bytes() == b"data"


def test_new_folders_are_on_the_disk_before_what_is_in_them(tmp_path: Path, calls: list[tuple[str, int]]):
    outer = tmp_path / "outer"
    files.make_directory(outer / "inner")
    assert calls == [("fsync", tmp_path.stat().st_ino), ("fsync", outer.stat().st_ino)]


def test_a_folder_that_another_writer_makes_meanwhile_is_as_good(tmp_path: Path, monkeypatch):
    mkdir = Path.mkdir

    def second(path: Path, *rest: object, **named: object) -> None:
        os.mkdir(path)
        mkdir(path, *rest, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", second)
    files.make_directory(tmp_path / "objects")


@pytest.mark.parametrize("failing", ["write", "fsync", "replace"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_a_disk_that_takes_no_more_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch, failing: str, code: int
):
    path = tmp_path / "name"
    files.publish(path, b"old")

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        if failing == "write":
            # A buffer that has no room on the disk when it is written out.
            patch.setattr(files, "open", lambda fd, mode: Full(fd, code), raising=False)
        else:
            patch.setattr(os, failing, fail)
        with pytest.raises(WriteFailed, match=f"{os.strerror(code)}.*Make room"):
            files.publish(path, b"new")
    assert [inner.name for inner in tmp_path.iterdir()] == ["name"]
    assert path.read_bytes() == b"old"


class Full:
    """A file whose disk is full."""

    def __init__(self, fd: int, code: int) -> None:
        self._fd, self._code = fd, code

    def __enter__(self) -> "Full":
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def write(self, data: bytes) -> int:
        raise OSError(self._code, os.strerror(self._code))


@pytest.mark.parametrize("code", [errno.EINVAL, errno.ENOTSUP])
def test_a_file_system_that_cannot_sync_folders_is_written_all_the_same(
    tmp_path: Path, monkeypatch, code: int
):
    fsync = os.fsync

    def files_alone(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(code, os.strerror(code))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", files_alone)
    files.publish(tmp_path / "new" / "name", b"data")
    assert (tmp_path / "new" / "name").read_bytes() == b"data"


def test_a_folder_that_fails_to_reach_the_disk_is_an_error(tmp_path: Path, monkeypatch):
    fsync = os.fsync

    def files_alone(fd: int) -> None:
        if stat.S_ISDIR(os.fstat(fd).st_mode):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(fd)

    monkeypatch.setattr(os, "fsync", files_alone)
    with pytest.raises(WriteFailed):
        files.publish(tmp_path / "name", b"data")


@pytest.mark.parametrize("code", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_a_refusal_says_that_the_cache_is_read_only(tmp_path: Path, code: int):
    with pytest.raises(ReadOnlyCache, match="read-only for this user"), files.explain_refusal(tmp_path):
        raise OSError(code, os.strerror(code))


def test_other_errors_are_left_as_they_are(tmp_path: Path):
    with pytest.raises(FileNotFoundError), files.explain_refusal(tmp_path):
        raise OSError(errno.ENOENT, os.strerror(errno.ENOENT))
