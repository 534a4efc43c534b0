"""``megafold stream``: how fast samples come from a cache."""

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from megafold.cli.locations import CacheLocation
from megafold.cli.stream_options import stream_options, stream_settings
from megafold.pipeline.errors import InputError

#: Batches that a loader asks of each worker ahead.
_AHEAD = 2


@click.group(name="stream")
def command() -> None:
    """Streaming training samples."""


def _worker_numbers(_: click.Context, __: click.Parameter, text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() for part in parts):
        raise click.BadParameter(f"{text!r}: give numbers with commas between them, as in 0,1,2,4")
    return list(dict.fromkeys(int(part) for part in parts))


@command.command(short_help="Samples a second, and what one costs.")
@click.argument("cache", type=CacheLocation())
@click.option(
    "--workers",
    default="0,1,2",
    show_default=True,
    metavar="N,N,…",
    callback=_worker_numbers,
    help="Numbers of loader processes to try; 0: this process.",
)
@click.option(
    "--samples", type=click.IntRange(1), default=200, show_default=True, help="Samples of each try."
)
@click.option("--entry", "entries", multiple=True, help="Samples of this entry alone; repeatable.")
@stream_options
@click.option("--cold", is_flag=True, help="Forget open objects and tables of entries before each sample.")
@click.option(
    "--start",
    type=click.Choice(["fork", "forkserver", "spawn"]),
    default="forkserver",
    show_default=True,
    help="How workers are started.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
def bench(cache: Path | str, workers: list[int], as_json: bool, **values: Any) -> None:
    """Print samples a second by number of loader processes, and what a sample costs.

    Times and bytes are of making a sample, in the process that makes it; samples a second are what a trainer
    gets, batched, while all workers run.
    """
    stream = _stream(cache, values)
    tries = []
    for number in workers:
        tries.append(_try(stream, number, values))
        if not as_json:
            _print_row(tries[-1], heading=len(tries) == 1)
    if as_json:
        settings = dict(values)
        facts = {"cache": str(cache), "manifest": str(stream.manifest), "settings": settings, "tries": tries}
        click.echo(json.dumps(facts, indent=1))
        return
    _print_stages(tries)


def _stream(cache: Path | str, values: dict[str, Any]) -> Any:
    from megafold.pipeline.stream import Stream, StreamConfig

    entries = [entry.lower() for entry in values["entries"]]
    sampling = {"entries": entries, "epoch_size": values["samples"]}
    return Stream(cache, StreamConfig.from_mapping({**stream_settings(values), "sampling": sampling}))


@dataclass
class _Arrival:
    """A batch that has come: when, the costs of its sample, and the process that made it."""

    at: float
    cost: Any
    pid: int


def _try(stream: Any, workers: int, values: dict[str, Any]) -> dict[str, Any]:
    """One number of workers: rate, costs of samples, memory."""
    from megafold.pipeline.stream.measure import resident_bytes, summary

    len(stream)
    started = time.perf_counter()
    if workers:
        arrivals = _from_workers(stream, workers, values)
    else:
        arrivals = _from_here(stream, values)
    come: list[_Arrival] = []
    most: dict[int, int] = {}
    for arrival in arrivals:
        come.append(arrival)
        memory = resident_bytes(arrival.pid)
        if memory is not None:
            most[arrival.pid] = memory[1]
    # Until each worker has given what it was asked for at the start, the clock measures its start, too.
    first = min(workers * _AHEAD, len(come) - 1)
    since, counted = (come[first - 1].at, len(come) - first) if first else (started, len(come))
    return {
        "workers": workers,
        "samples_per_s": counted / (come[-1].at - since),
        "first_sample_s": come[0].at - started,
        "peak_bytes": max(most.values(), default=None),
        **summary([arrival.cost for arrival in come]),
    }


def _from_here(stream: Any, values: dict[str, Any]) -> Iterator[_Arrival]:
    import os

    from megafold.pipeline.stream import PadSizes, collate
    from megafold.pipeline.stream.measure import measure_sample

    for index in range(values["samples"]):
        sample, cost = measure_sample(stream, index, cold=values["cold"])
        collate([sample.features], PadSizes())
        yield _Arrival(time.perf_counter(), cost, os.getpid())


def _from_workers(stream: Any, workers: int, values: dict[str, Any]) -> Iterator[_Arrival]:
    try:
        from torch.utils.data import DataLoader
    except ImportError as error:
        raise InputError(
            f"loader processes are torch's ({error}): pip install 'megafold[train]', or give --workers 0",
            reason="no-torch",
        ) from error
    from megafold.pipeline.stream.measure import MeasuredSamples

    loader: Any = DataLoader(
        MeasuredSamples(stream, cold=values["cold"]),  # type: ignore[arg-type]
        batch_size=1,
        sampler=[(0, index) for index in range(values["samples"])],
        num_workers=workers,
        collate_fn=_batch,
        prefetch_factor=_AHEAD,
        multiprocessing_context=values["start"],
    )
    for _, cost, pid in loader:
        yield _Arrival(time.perf_counter(), cost, pid)


def _batch(items: list[Any]) -> tuple[dict[str, Any], Any, int]:
    """The batch that a trainer would get, and what its one sample cost."""
    from megafold.pipeline.stream.torch_dataset import TorchCollate

    sample, cost, pid = items[0]
    return TorchCollate()([sample]), cost, pid


def _print_row(row: dict[str, Any], *, heading: bool) -> None:
    titles = ("workers", "samples/s", "p50 ms", "p99 ms", "CPU p50", "CPU p99", "kB/sample", "peak MB")
    if heading:
        click.echo(" ".join(f"{title:>9s}" for title in titles))
    cells = [f"{row['workers']}", f"{row['samples_per_s']:.1f}"]
    cells += [f"{row[name]:.1f}" for name in ("p50_ms", "p99_ms", "cpu_p50_ms", "cpu_p99_ms")]
    for name, unit in (("bytes_read", 1e3), ("peak_bytes", 1e6)):
        cells.append("unknown" if row[name] is None else f"{row[name] / unit:.0f}")
    click.echo(" ".join(f"{cell:>9s}" for cell in cells))


def _print_stages(tries: list[dict[str, Any]]) -> None:
    click.echo(f"\n{'mean ms of a sample':24s}" + "".join(f"{row['workers']:>4d} workers" for row in tries))
    for stage in tries[0]["stages_ms"]:
        shares = "".join(f"{row['stages_ms'][stage]:12.2f}" for row in tries)
        click.echo(f"{stage:24s}{shares}")
    click.echo(f"{'all':24s}" + "".join(f"{row['mean_ms']:12.2f}" for row in tries))
