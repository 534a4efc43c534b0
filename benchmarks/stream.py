"""How long a sample takes, where the time goes, and how long AtomWorks' AF3 pipeline takes for the same.

    python benchmarks/stream.py CACHE --tokens 384 --msa-rows 1024 --templates 4 --json stream.json
    python benchmarks/stream.py CACHE --rival-python RIVAL/bin/python --corpus STRUCTURES --rival-entries 20

One process, one thread, on one core (``--cpu``) where the system can pin it; the rival inherits that core.
*Cold*: no object is open and no table of an entry is in memory when a sample starts; the manifest and the
component library are, as a worker loads them once. *Warm*: the same samples again, with what the stream
keeps between samples. The operating system's page cache is left alone. Use the CPU columns on a machine
that is busy with other things. ``--full`` measures samples that reach the token limit alone; ``--any-date``
lets templates of any date in.

Against the rival (``benchmarks/rival.py`` says how to install it), each entry in turn is sampled cold three
times by us, then by the rival (parsing and the transforms of its AF3 pipeline; it has no alignment to read),
then cold three times by us again; the median of ours counts. A first sample of the rival, discarded, loads
what it loads once.
"""

import argparse
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
from rival import Rival, pin

from megafold.pipeline.corpus import discover
from megafold.pipeline.errors import InputError
from megafold.pipeline.stream import (
    CropConfig,
    MsaConfig,
    SamplingConfig,
    Stream,
    StreamConfig,
    TemplateConfig,
    validate_sample,
)
from megafold.pipeline.stream.measure import SampleCost, measure_sample, resident_bytes, summary

ANY_DAYS = 100_000
CORPUS = Path(__file__).resolve().parents[2] / "shared" / "corpus"


def config_of(args: argparse.Namespace, entries: tuple[str, ...]) -> StreamConfig:
    return StreamConfig(
        crop=CropConfig(tokens=args.tokens, atoms=args.atoms),
        msa=MsaConfig(rows=args.msa_rows),
        template=TemplateConfig(count=args.templates, days_before_release=-ANY_DAYS if args.any_date else 60),
        sampling=SamplingConfig(entries=entries),
    )


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
    stream: Stream, indices: list[int], *, cold: bool
) -> tuple[list[SampleCost], dict[str, list[int]]]:
    """Costs of samples, and their sizes."""
    costs: list[SampleCost] = []
    sizes: dict[str, list[int]] = {"tokens": [], "atoms": [], "MSA rows": [], "templates": []}
    for index in indices:
        sample, cost = measure_sample(stream, index, cold=cold)
        costs.append(cost)
        features = ("token_mask", "atom_mask", "msa", "template_restype")
        for values, feature in zip(sizes.values(), features, strict=True):
            values.append(len(sample.features[feature]))
    return costs, sizes


def compare(args: argparse.Namespace, stream: Stream) -> dict[str, Any]:
    """The rival's time over ours, entry by entry."""
    known = set(args.entries) or {row["entry"] for row in entry_names(stream)}
    sources = [source for source in discover(args.corpus) if source.entry in known]
    if args.rival_entries:
        # Spread over the list, so that entries of all sorts are among them.
        places = np.linspace(0, len(sources) - 1, min(args.rival_entries, len(sources))).round().astype(int)
        sources = [sources[place] for place in places]
    if not sources:
        raise InputError(
            f"no structure of the cache's entries in {args.corpus}: give --corpus", reason="corpus"
        )
    rows = []
    heads = ("ours, ms", "CPU", "rival, s", "parse", "CPU", "ratio", "CPU")
    print(f"\n{'entry':16s}" + "".join(f"{head:>10s}" for head in heads))
    with Rival(args.rival_python) as rival:
        rival.sample(sources[0].path, tokens=args.tokens, seed=0)
        for number, source in enumerate(sources):
            own = Stream(args.cache, config_of(args, (source.entry,)), stream.manifest)
            measure_sample(own, 0)
            costs = measure(own, [0, 1, 2], cold=True)[0]
            theirs = rival.sample(source.path, tokens=args.tokens, seed=number)
            costs += measure(own, [3, 4, 5], cold=True)[0]
            row: dict[str, Any] = {
                "entry": source.entry,
                "ours_s": float(np.median([cost.wall_s for cost in costs])),
                "ours_cpu_s": float(np.median([cost.cpu_s for cost in costs])),
                "rival_s": theirs.wall_s,
                "rival_cpu_s": theirs.cpu_s,
                "rival_parse_s": theirs.parse_s,
                "rival_error": theirs.error,
            }
            if not theirs.error:
                row["ratio"] = row["rival_s"] / row["ours_s"]
                row["cpu_ratio"] = row["rival_cpu_s"] / row["ours_cpu_s"]
            rows.append(row)
            show(row)
        versions = rival.versions
    both = [row for row in rows if "ratio" in row]
    result: dict[str, Any] = {"versions": versions, "rows": rows, "compared": len(both)}
    for name in ("ratio", "cpu_ratio", "ours_s", "ours_cpu_s", "rival_s", "rival_cpu_s") if both else ():
        result[f"median_{name}"] = float(np.median([row[name] for row in both]))
    return result


def entry_names(stream: Stream) -> list[dict[str, str]]:
    return [{"entry": stream.entry(int(row)).entry} for row in stream.sampler.rows]


def show(row: dict[str, Any]) -> None:
    head = f"{row['entry']:16s}{1e3 * row['ours_s']:10.1f}{1e3 * row['ours_cpu_s']:10.1f}"
    if row["rival_error"]:
        print(f"{head}  {row['rival_error'][:60]}", flush=True)
        return
    seconds = "".join(f"{row[name]:10.2f}" for name in ("rival_s", "rival_parse_s", "rival_cpu_s"))
    print(f"{head}{seconds}{row['ratio']:10.0f}{row['cpu_ratio']:10.0f}", flush=True)


def report(result: dict[str, Any]) -> None:
    medians = ", ".join(f"{value:.0f} {name}" for name, value in result["median"].items())
    print(f"{result['samples']} samples, median {medians}")
    columns = ("p50_ms", "p90_ms", "p99_ms", "cpu_p50_ms", "cpu_p90_ms", "cpu_p99_ms")
    heads = ("p50", "p90", "p99", "CPU p50", "CPU p90", "CPU p99")
    print(f"{'ms a sample':28s}" + "".join(f"{head:>9s}" for head in heads) + f"{'kB read':>9s}")
    for name in ("cold", "warm"):
        found = result[name]
        read = "unknown" if found["bytes_read"] is None else f"{found['bytes_read'] / 1e3:.0f}"
        print(f"{name:28s}" + "".join(f"{found[column]:9.1f}" for column in columns) + f"{read:>9s}")
    if result["peak_bytes"] is not None:
        print(f"peak memory of the process: {result['peak_bytes'] / 1e6:.0f} MB")
    print(f"\n{'mean ms by stage':28s}{'cold':>9s}{'warm':>9s}")
    for stage, cold in result["cold"]["stages_ms"].items():
        print(f"{stage:28s}{cold:9.2f}{result['warm']['stages_ms'][stage]:9.2f}", flush=True)


def parse() -> argparse.Namespace:
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
    parser.add_argument("--cpu", type=int, help="core to run on; the last one by default")
    parser.add_argument("--rival-python", type=Path, help="interpreter of the rival's environment")
    parser.add_argument("--rival-entries", type=int, default=0, help="entries to compare; 0: all")
    parser.add_argument("--corpus", type=Path, default=CORPUS / "structures", help="the cache's structures")
    parser.add_argument("--json", type=Path)
    return parser.parse_args()


def main() -> int:
    args = parse()
    cpu = pin(args.cpu)
    stream = Stream(args.cache, config_of(args, tuple(args.entries)))
    indices = indices_of(stream, args.samples, args.tokens if args.full else None)
    validate_sample(measure_sample(stream, indices[0])[0].features)
    cold, sizes = measure(stream, indices, cold=True)
    warm, _ = measure(stream, indices, cold=False)
    memory = resident_bytes()
    result: dict[str, Any] = {
        "samples": len(indices),
        "median": {name: float(np.median(values)) for name, values in sizes.items()},
        "cold": summary(cold),
        "warm": summary(warm),
        "peak_bytes": None if memory is None else memory[1],
        "settings": {name: str(value) for name, value in vars(args).items()},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": cpu,
    }
    report(result)
    if args.rival_python:
        result["rival"] = rival = compare(args, stream)
        if rival["compared"]:
            print(
                f"\n{rival['compared']} of {len(rival['rows'])} entries compared: rival / ours is"
                f" {rival['median_ratio']:.0f} in the median by the clock,"
                f" {rival['median_cpu_ratio']:.0f} by CPU time"
            )
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
