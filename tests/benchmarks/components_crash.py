"""Work for the component benchmark that takes its process down, where spawned processes find it."""

import os
import time
from typing import Any

from benchmarks.components import outcome


def killed_by_the_second(code: str, timeout_s: float) -> dict[str, Any]:
    """As the benchmark's own, but C1 ends its process as a crash in a library would."""
    if code == "C1":
        os._exit(11)
    time.sleep(0.02)
    return outcome(code, timeout_s)


def refused(code: str, timeout_s: float) -> dict[str, Any]:
    raise AssertionError(f"{code} was to be read from the file")
