"""How many processes a command starts where nobody says."""

import os


def usable_cores() -> int:
    """Cores that this process may use, fewer than the machine has within a batch system; macOS cannot say."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
