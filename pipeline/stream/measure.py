"""What a sample costs: wall and CPU time, the time of its stages, the bytes it reads.

Nothing of this is in the way of a sample that is not measured: :func:`clock_stages` puts clocks around the
stages' functions while it is open.
"""

import functools
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np

from megafold.pipeline.stream import sample as sample_module
from megafold.pipeline.stream.sample import Sample, Stream
from megafold.pipeline.stream.sampling import TargetSampler

#: The stages of a sample: whose attribute the function is, and its name. None calls another.
STAGES: Final[Mapping[str, tuple[Any, str]]] = {
    "choose the entry": (TargetSampler, "draw"),
    "read the entry's tables": (Stream, "read_entry"),
    "crop": (sample_module, "crop_entry"),
    "read atoms and MSA": (Stream, "_read"),
    "read templates": (Stream, "_read_templates"),
    "choose MSA rows": (sample_module, "plan_rows"),
    "assemble the MSA": (sample_module, "msa_features"),
    "token features": (sample_module, "token_features"),
    "token bonds": (sample_module, "token_bonds"),
    "reference": (sample_module, "reference_features"),
    "templates": (sample_module, "template_features"),
    "labels": (sample_module, "label_features"),
}
#: What a sample takes outside all of :data:`STAGES`.
REST: Final = "rest"


@dataclass(frozen=True, kw_only=True)
class SampleCost:
    """What one sample took.

    Attributes:
        wall_s: by the clock, seconds.
        cpu_s: CPU time of the process, seconds.
        bytes_read: bytes read from files, cached by the operating system or not; None where it does not say.
        stages: seconds by the clock of each of :data:`STAGES` and of the rest; they add up to ``wall_s``.
    """

    wall_s: float
    cpu_s: float
    bytes_read: int | None
    stages: Mapping[str, float] = field(default_factory=dict)


@contextmanager
def clock_stages() -> Iterator[dict[str, float]]:
    """Put clocks around the stages; the mapping adds up their seconds until it is cleared."""
    spent: dict[str, float] = defaultdict(float)

    def clocked(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - started

        return run

    originals = {name: getattr(owner, attribute) for name, (owner, attribute) in STAGES.items()}
    try:
        for name, (owner, attribute) in STAGES.items():
            setattr(owner, attribute, clocked(name, originals[name]))
        yield spent
    finally:
        for name, (owner, attribute) in STAGES.items():
            setattr(owner, attribute, originals[name])


def measure_sample(
    stream: Stream, index: int, *, epoch: int = 0, cold: bool = False
) -> tuple[Sample, SampleCost]:
    """Sample ``index`` and its cost.

    With ``cold`` no object is open and no entry's table is in memory when it starts; manifest and component
    library are, as a process loads them once. The operating system's page cache is left alone.
    """
    len(stream)  # opens what is opened once
    if cold:
        stream.forget()
    with clock_stages() as spent:
        read, cpu, started = bytes_read(), time.process_time(), time.perf_counter()
        sample = stream.sample(index, epoch=epoch)
        wall = time.perf_counter() - started
        cpu = time.process_time() - cpu
        after = bytes_read()
    stages = {name: spent.get(name, 0.0) for name in STAGES}
    stages[REST] = wall - sum(stages.values())
    cost = SampleCost(
        wall_s=wall,
        cpu_s=cpu,
        bytes_read=None if read is None or after is None else after - read,
        stages=stages,
    )
    return sample, cost


def bytes_read() -> int | None:
    """Bytes that this process has read by system calls so far; None where there is no /proc."""
    try:
        text = Path("/proc/self/io").read_text()
    except OSError:
        return None
    return int(next(line for line in text.splitlines() if line.startswith("rchar")).split()[1])


def resident_bytes(pid: int | str = "self") -> tuple[int, int] | None:
    """Bytes of memory that a process has and has had at most; None where there is no /proc."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return None
    sizes = {name: value for name, _, value in (line.partition(":") for line in lines)}
    if "VmRSS" not in sizes:  # it has ended
        return None
    now, most = (1024 * int(sizes[name].split()[0]) for name in ("VmRSS", "VmHWM"))
    return now, most


class MeasuredSamples:
    """A map-style data set of costs: item ``(epoch, index)`` makes the sample and adds what it cost.

    For a loader whose workers are measured. Whoever collates gets ``(Sample, SampleCost, pid)``.
    """

    def __init__(self, stream: Stream, *, cold: bool = False) -> None:
        self._stream = stream
        self._cold = cold

    def __len__(self) -> int:
        """Samples in an epoch."""
        return len(self._stream)

    def __getitem__(self, place: tuple[int, int]) -> tuple[Sample, SampleCost, int]:
        epoch, index = place
        return (*measure_sample(self._stream, index, epoch=epoch, cold=self._cold), os.getpid())


def summary(costs: Sequence[SampleCost]) -> dict[str, Any]:
    """Percentiles over samples, ms; the mean of each stage, ms; bytes read a sample, mean and at most."""
    wall, cpu = (1e3 * np.array([getattr(cost, name) for cost in costs]) for name in ("wall_s", "cpu_s"))
    read = [cost.bytes_read for cost in costs if cost.bytes_read is not None]
    return {
        "samples": len(costs),
        **{f"p{part}_ms": float(np.percentile(wall, part)) for part in (50, 90, 99)},
        **{f"cpu_p{part}_ms": float(np.percentile(cpu, part)) for part in (50, 90, 99)},
        "mean_ms": float(wall.mean()),
        "bytes_read": float(np.mean(read)) if read else None,
        "most_bytes_read": max(read, default=None),
        "stages_ms": {
            name: 1e3 * float(np.mean([cost.stages.get(name, 0.0) for cost in costs]))
            for name in (*STAGES, REST)
        },
    }
