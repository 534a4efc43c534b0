"""Files that appear whole or not at all."""

import contextlib
import errno
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from megafold.cache_store.errors import ReadOnlyCache, WriteFailed

#: Files with this prefix are being written, or were when their process died.
TEMPORARY_PREFIX = ".tmp-"


def publish(path: Path, data: bytes, mode: int = 0o444) -> None:
    """Write a file so that any reader, at any moment and after any crash, sees all of it or none.

    The bytes go to a temporary name in the same directory and to the disk, then take their name, and the
    directory goes to the disk. An existing file is replaced; who has it open keeps reading the old one.

    Raises:
        ReadOnlyCache: the directory cannot be written.
        WriteFailed: the disk is full, or failing.
    """
    with explain_refusal(path):
        make_directory(path.parent)
        temporary = path.parent / f"{TEMPORARY_PREFIX}{os.getpid()}-{secrets.token_hex(8)}"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
        try:
            with open(fd, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(fd)
            os.replace(temporary, path)
        except BaseException:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise
        sync_directory(path.parent)


def make_directory(path: Path) -> None:
    """Create a directory and its parents, durably."""
    if path.is_dir():
        return
    make_directory(path.parent)
    path.mkdir(exist_ok=True)
    sync_directory(path.parent)


def sync_directory(path: Path) -> None:
    """Bring the names in a directory to the disk."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    except OSError as error:  # some network file systems cannot, and need not
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(fd)


@contextlib.contextmanager
def explain_refusal(path: Path) -> Iterator[None]:
    """Turn the system's refusals to write at ``path`` into errors that say so, and what to do."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            raise WriteFailed(
                f"cannot write {path}: {error.strerror}. "
                "Make room on that disk, or mend it: the same command then goes on from what is finished."
            ) from error
        if is_read_only(error):
            raise ReadOnlyCache(
                f"cannot write {path}: {error.strerror}. "
                "The cache is read-only for this user: build into a folder of your own."
            ) from error
        raise


def is_read_only(error: OSError) -> bool:
    """Whether the system says that something may not be written here, or not by this user."""
    return error.errno in (errno.EROFS, errno.EACCES, errno.EPERM)


def is_temporary(path: Path) -> bool:
    """Whether a file is being written, or was when its process died."""
    return path.name.startswith(TEMPORARY_PREFIX)


def temporary_files(directory: Path) -> Iterator[Path]:
    """Temporary files below ``directory``, sorted."""
    yield from sorted(directory.rglob(f"{TEMPORARY_PREFIX}*"))
