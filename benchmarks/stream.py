"""How long a sample takes, and where the time goes.

    python benchmarks/stream.py CACHE --tokens 384 --msa-rows 1024 --templates 4 --json stream.json

One process, one thread. *Cold*: no object is open and no table of an entry is in memory when a sample starts;
the manifest and the component library are, as a worker loads them once. *Warm*: the same samples again, with
what the stream keeps between samples. CPU time says what a sample costs where the machine is busy with other
things. The operating system's page cache is left alone. ``--full``
measures samples that reach the token limit alone; ``--any-date`` lets templates of any date in.
"""

import argparse
import functools
import json
import os
import platform
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np

from megafold.pipeline.stream import (
    CropConfig,
    MsaConfig,
    SamplingConfig,
    Stream,
    StreamConfig,
    TemplateConfig,
    validate_sample,
)
from megafold.pipeline.stream import sample as sample_module

ANY_DAYS = 100_000
PARTS = {
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


def clock_parts() -> dict[str, float]:
    """Wrap the parts of a sample; the returned mapping adds up their seconds."""
    spent: dict[str, float] = defaultdict(float)

    def wrap(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                spent[name] += time.perf_counter() - started

        return timed

    for name, (owner, attribute) in PARTS.items():
        setattr(owner, attribute, wrap(name, getattr(owner, attribute)))
    return spent


def indices_of(stream: Stream, samples: int, tokens: int | None) -> list[int]:
    """The first ``samples`` indices, or the first whose samples have ``tokens`` tokens."""
    if tokens is None:
        return list(range(samples))
    found: list[int] = []
    for index in range(50 * samples):
        if stream.entry(stream.sampler.draw(0, index).row).n_token < tokens:
            continue
        if len(stream.sample(index).features["token_mask"]) == tokens:
            found.append(index)
        if len(found) == samples:
            break
    return found


def measure(
    stream: Stream, indices: list[int], spent: dict[str, float], *, cold: bool
) -> tuple[np.ndarray, np.ndarray, dict[str, float]]:
    """Milliseconds of each sample by the wall clock and of CPU time, and of its parts on average."""
    spent.clear()
    wall, cpu = [], []
    for index in indices:
        if cold:
            stream.forget()
        started = time.perf_counter(), time.process_time()
        stream.sample(index)
        wall.append(1e3 * (time.perf_counter() - started[0]))
        cpu.append(1e3 * (time.process_time() - started[1]))
    return np.array(wall), np.array(cpu), {name: 1e3 * spent[name] / len(indices) for name in PARTS}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("cache", type=Path)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--atoms", type=int, default=4608)
    parser.add_argument("--msa-rows", type=int, default=1024)
    parser.add_argument("--templates", type=int, default=4)
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--entries", nargs="*", default=[])
    parser.add_argument("--full", action="store_true")
    parser.add_argument("--any-date", action="store_true")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    config = StreamConfig(
        crop=CropConfig(tokens=args.tokens, atoms=args.atoms),
        msa=MsaConfig(rows=args.msa_rows),
        template=TemplateConfig(count=args.templates, days_before_release=-ANY_DAYS if args.any_date else 60),
        sampling=SamplingConfig(entries=tuple(args.entries)),
    )
    started = time.perf_counter()
    stream = Stream(args.cache, config)
    len(stream)
    opened_ms = 1e3 * (time.perf_counter() - started)
    indices = indices_of(stream, args.samples, args.tokens if args.full else None)
    samples = [stream.sample(index).features for index in indices]
    validate_sample(samples[0])
    axes = {
        "tokens": [len(features["token_mask"]) for features in samples],
        "atoms": [len(features["atom_mask"]) for features in samples],
        "msa rows": [len(features["msa"]) for features in samples],
        "templates": [len(features["template_restype"]) for features in samples],
    }
    del samples
    spent = clock_parts()
    cold, cold_cpu, cold_parts = measure(stream, indices, spent, cold=True)
    warm, warm_cpu, warm_parts = measure(stream, indices, spent, cold=False)
    result = {
        "cold_p50_ms": float(np.percentile(cold, 50)),
        "cold_p99_ms": float(np.percentile(cold, 99)),
        "warm_p50_ms": float(np.percentile(warm, 50)),
        "warm_p99_ms": float(np.percentile(warm, 99)),
        "cold_cpu_p50_ms": float(np.percentile(cold_cpu, 50)),
        "warm_cpu_p50_ms": float(np.percentile(warm_cpu, 50)),
        "open_ms": opened_ms,
        "samples": len(indices),
        "median": {name: float(np.median(values)) for name, values in axes.items()},
        "cold_parts_ms": cold_parts,
        "warm_parts_ms": warm_parts,
        "settings": {key: value for key, value in vars(args).items() if key not in ("cache", "json")},
        "python": platform.python_version(),
        "machine": platform.machine(),
    }
    report(result, float(cold.mean()), float(warm.mean()))
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")


def report(result: dict[str, Any], cold_mean: float, warm_mean: float) -> None:
    medians = ", ".join(f"{value:.0f} {name}" for name, value in result["median"].items())
    print(f"{result['samples']} samples, median {medians}; opening {result['open_ms']:.0f} ms")
    print(f"{'ms a sample':28s}{'p50':>8s}{'p99':>8s}{'CPU p50':>9s}")
    for name in ("cold", "warm"):
        columns = [result[f"{name}_{kind}_ms"] for kind in ("p50", "p99", "cpu_p50")]
        print(f"{name:28s}{columns[0]:8.1f}{columns[1]:8.1f}{columns[2]:9.1f}")
    print(f"\n{'mean ms by part':28s}{'cold':>8s}{'warm':>8s}")
    for name in PARTS:
        print(f"{name:28s}{result['cold_parts_ms'][name]:8.2f}{result['warm_parts_ms'][name]:8.2f}")
    rest = [
        total - sum(result[f"{name}_parts_ms"].values())
        for name, total in (("cold", cold_mean), ("warm", warm_mean))
    ]
    print(f"{'rest':28s}{rest[0]:8.2f}{rest[1]:8.2f}")


if __name__ == "__main__":
    main()
