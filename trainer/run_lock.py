"""One run at a time in a folder."""

import errno
import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from megafold.trainer.errors import CheckpointError

#: Seconds to wait for the lock: loader processes of a run that was killed have it until they notice.
_WAIT_S: Final = 15.0
_POLL_S: Final = 0.2


@contextmanager
def only_run(folder: Path, wait_s: float = _WAIT_S) -> Iterator[None]:
    """Keep other runs out of ``folder``. The kernel lets go of it with the process, however that ends.

    Where the file system knows no locks this goes on without one.

    Raises:
        CheckpointError: another run is at work there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    until = time.monotonic() + wait_s
    with (folder / ".lock").open("a", encoding="utf-8") as file:
        while not _taken(file.fileno()):
            if time.monotonic() >= until:
                raise CheckpointError(
                    f"another run is at work in {folder}: wait for its end, or give another output folder"
                )
            time.sleep(_POLL_S)
        yield


def _taken(descriptor: int) -> bool:
    """Whether the lock is ours, or cannot be had by anybody."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno not in (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)
    return True
