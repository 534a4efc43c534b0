"""Reference conformers of the component dictionary: where they come from, what fails, how long it takes.

    python benchmarks/components.py --workers 2 --json components.json --table docs/components.md   # all
    python benchmarks/components.py --number 600 --rows sample.jsonl                                # some

Every component's outcome is appended to a JSON-lines file as it is made; the same command goes on where it
was stopped. A component that kills its process is recorded as ``crash``. Rows of another version of
the chemistry stage or of RDKit are made again.
"""

import argparse
import json
import multiprocessing
import os
import platform
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import numpy as np

from megafold.pipeline.chemistry import ComponentDictionary, load_dictionary
from megafold.pipeline.chemistry.reference import stage_versions

#: Components that share a pool: as many are tried again, one by one, when one of them crashes.
_BATCH = 1000

_dictionary: ComponentDictionary | None = None

Row = dict[str, Any]
Work = Callable[[str, float], Row]


def made_by() -> str:
    """What a row depends on beside the definition."""
    return ", ".join(f"{name} {version}" for name, version in sorted(stage_versions().items()))


def open_dictionary(ccd: Path | None) -> None:
    global _dictionary
    os.environ["OMP_NUM_THREADS"] = "1"
    _dictionary = load_dictionary(ccd)


def outcome(code: str, timeout_s: float) -> Row:
    """One component's row; its time is the processor's, which a busy machine does not change."""
    from megafold.pipeline.chemistry.conformers import build_reference

    assert _dictionary is not None
    component = _dictionary.get(code)
    assert component is not None
    started = time.process_time()
    ref = build_reference(component, timeout_s)
    return {
        "code": code,
        "made_by": made_by(),
        "origin": ref.origin.name,
        "failure": ref.failure,
        "time_s": round(time.process_time() - started, 4),
        "atoms": len(component),
        "automorphisms": len(ref.automorphisms),
        "capped": ref.capped,
        "bytes": len(json.dumps(ref.to_json())),
    }


def rows_of(codes: Sequence[str], args: argparse.Namespace, work: Work = outcome) -> Iterator[Row]:
    """Rows as they are made. A crash breaks the pool: what was in its batch is then tried one at a time."""
    for batch in batched(codes, _BATCH):
        suspects = []
        for code, row in attempt(batch, args.workers, args, work):
            if row is None:
                suspects.append(code)
            else:
                yield row
        for suspect in suspects:
            for code, row in attempt((suspect,), 1, args, work):
                yield row or {"code": code, "made_by": made_by(), "origin": "NONE", "failure": "crash"}


def attempt(
    codes: Sequence[str], workers: int, args: argparse.Namespace, work: Work
) -> Iterator[tuple[str, Row | None]]:
    """Codes with their rows, None where the pool broke, as they are made by a pool of their own."""
    with ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=open_dictionary,
        initargs=(args.ccd,),
    ) as pool:
        futures = {pool.submit(work, code, args.timeout): code for code in codes}
        for future in as_completed(futures):
            try:
                yield futures[future], future.result()
            except BrokenProcessPool:
                yield futures[future], None


def batched(codes: Sequence[str], size: int) -> Iterator[Sequence[str]]:
    for start in range(0, len(codes), size):
        yield codes[start : start + size]


def finished_rows(path: Path) -> dict[str, Row]:
    """Rows of this version that an earlier run left, by code; a line that was cut short is dropped."""
    if not path.exists():
        return {}
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        path.write_bytes(whole)
    rows = [json.loads(line) for line in whole.splitlines()]
    return {row["code"]: row for row in rows if row.get("made_by") == made_by()}


def table(rows: Sequence[Row]) -> dict[str, Any]:
    """The figures, from the rows. Shares are of the components that have atoms."""
    made = [row for row in rows if "time_s" in row]
    atomless = [row["code"] for row in rows if row["failure"] == "no-atoms"]
    with_atoms = len(rows) - len(atomless)
    origins = Counter(row["origin"] for row in rows if row["failure"] != "no-atoms")
    times = np.array([row["time_s"] for row in made]) if made else np.zeros(1)
    automorphisms = np.array([row["automorphisms"] for row in made]) if made else np.zeros(1)
    return {
        "components": len(rows),
        "without_atoms": atomless,
        "with_atoms": with_atoms,
        "share_with_coordinates": share(with_atoms - origins["NONE"], with_atoms),
        "share_from_rdkit": share(origins["RDKIT"], with_atoms),
        "origins": {name: origins[name] for name in ("RDKIT", "IDEAL", "MODEL", "NONE")},
        "failures": dict(Counter(row["failure"] for row in rows if row["failure"]).most_common()),
        "failures_by_origin": by_origin(rows),
        "failed_codes": {row["code"]: row["failure"] for row in rows if row["failure"]},
        "time_s": {
            "total": round(float(times.sum()), 1),
            "mean": round(float(times.mean()), 4),
            **{f"p{p}": round(float(np.percentile(times, p)), 4) for p in (50, 90, 99)},
            "p99.9": round(float(np.percentile(times, 99.9)), 4),
            "max": float(times.max()),
        },
        "slowest": {row["code"]: row["time_s"] for row in sorted(made, key=lambda row: -row["time_s"])[:10]},
        "automorphisms": {
            **{f"p{p}": float(np.percentile(automorphisms, p)) for p in (50, 90, 99)},
            "capped": sum(row["capped"] for row in made),
        },
        "journal_bytes_mean": round(float(np.mean([row["bytes"] for row in made])), 1) if made else 0,
        "versions": {**stage_versions(), "python": platform.python_version()},
    }


def share(part: int, whole: int) -> float:
    """Percent, at three digits; 0 of nothing."""
    return round(100 * part / whole, 3) if whole else 0.0


def by_origin(rows: Sequence[Row]) -> dict[str, dict[str, int]]:
    """Failure class to where the coordinates come from instead."""
    counts = Counter((row["failure"], row["origin"]) for row in rows if row["failure"])
    found: dict[str, dict[str, int]] = {}
    for (failure, origin), number in counts.most_common():
        found.setdefault(failure, {})[origin] = number
    return found


_TABLE = """# The component dictionary

What the featurizer makes of the bundled component dictionary, measured by

    python benchmarks/components.py --workers 2 --json components.json --table docs/components.md

which writes this file. Chemistry stage {chemistry}, RDKit {rdkit}, Python {python}. Why it is done so:
[design/004-chemistry.md](design/004-chemistry.md).

| components | number | of those with atoms |
|---|---:|---:|
{shares}

Where RDKit makes no conformer, the dictionary's coordinates stand in:

| failure | ideal | model | none | codes |
|---|---:|---:|---:|---|
{failures}

Time of a processor for a component, automorphisms included; a busy machine makes it longer:

| | s |
|---|---:|
{times}

The slowest: {slowest}. All together {total:.0f} s.

Half of the components have {p50:.0f} automorphisms or fewer, 99 of a hundred {p99:.0f} or fewer;
{capped} have more than are kept.

The failures are: `distorted`, a bond far from the sum of covalent radii (mostly at metals that RDKit has no
parameters for); `valence`, one that RDKit does not accept; `embedding`, no conformer of the right handedness
within the attempts; `rdkit-error`, distance bounds that contradict each other; `timeout`, which another
machine may not have; `no-atoms`, nothing to place.
"""


def markdown(figures: dict[str, Any]) -> str:
    """The figures as a document."""
    with_atoms, origins = figures["with_atoms"], figures["origins"]
    lines: list[tuple[str, int, float | None]] = [("all", figures["components"], None)]
    lines += [(f"without atoms ({', '.join(figures['without_atoms'])})", len(figures["without_atoms"]), None)]
    lines += [
        ("with atoms", with_atoms, 100.0),
        ("carry reference coordinates", with_atoms - origins["NONE"], figures["share_with_coordinates"]),
        ("from RDKit", origins["RDKIT"], figures["share_from_rdkit"]),
        ("the dictionary's ideal coordinates", origins["IDEAL"], share(origins["IDEAL"], with_atoms)),
        ("the dictionary's model coordinates", origins["MODEL"], share(origins["MODEL"], with_atoms)),
        ("no coordinates", origins["NONE"], share(origins["NONE"], with_atoms)),
    ]
    rows = [
        f"| {name} | {number} | {'' if part is None else f'{part:.2f} %'} |" for name, number, part in lines
    ]
    codes: dict[str, list[str]] = {}
    for code, failure in sorted(figures["failed_codes"].items()):
        codes.setdefault(failure, []).append(code)
    failures = [
        f"| {name} | {' | '.join(str(of.get(o, 0)) for o in origins if o != 'RDKIT')} | {some(codes[name])} |"
        for name, of in figures["failures_by_origin"].items()
    ]
    times = [f"| {name} | {value:.3g} |" for name, value in figures["time_s"].items() if name != "total"]
    return _TABLE.format(
        **figures["versions"],
        shares="\n".join(rows),
        failures="\n".join(failures),
        times="\n".join(times),
        slowest=", ".join(f"{code} {time_s:.0f} s" for code, time_s in list(figures["slowest"].items())[:5]),
        total=figures["time_s"]["total"],
        **figures["automorphisms"],
    )


def some(codes: Sequence[str], most: int = 8) -> str:
    return ", ".join(codes[:most]) + (" …" if len(codes) > most else "")


def parse_args(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--number", type=int, help="this many random components (default: all)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--timeout", type=float, default=480, help="RDKit's time limit, s")
    parser.add_argument("--ccd", type=Path, help="a dictionary other than the bundled one")
    parser.add_argument("--rows", type=Path, default=Path("components.jsonl"), help="where rows are appended")
    parser.add_argument("--json", type=Path, help="where the figures are written")
    parser.add_argument("--table", type=Path, help="where a document of them is written (Markdown)")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None, work: Work = outcome) -> None:
    args = parse_args(argv)
    codes = load_dictionary(args.ccd).codes()
    number = len(codes) if args.number is None else min(args.number, len(codes))
    codes = random.Random(args.seed).sample(codes, number)
    known = finished_rows(args.rows)
    with args.rows.open("a") as file:
        for row in rows_of([code for code in codes if code not in known], args, work):
            known[row["code"]] = row
            file.write(json.dumps(row) + "\n")
            file.flush()
    figures = table([known[code] for code in codes])
    for name, value in figures.items():
        print(f"{name:24} {json.dumps(value)}")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    if args.table:
        args.table.write_text(markdown(figures))


if __name__ == "__main__":
    main()
