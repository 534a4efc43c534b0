"""What building a cache and opening it cost as the number of entries grows.

    python benchmarks/scale.py --entries 1000 5000 --rows 25000 250000 --json scale.json

For each number of ``--entries``, a corpus of so many structure files in one folder (the sample corpus under
other entry ids; every fourth entry has alignments of its own) is built, built again with nothing changed and
with one file edited, interrupted at half and resumed, and read by the other commands. A line is one command:
wall time, CPU time and peak memory of its first process (which schedules; workers are others), and entries a
second.

For each number of ``--rows``, a snapshot of so many entries (rows of the first corpus under other ids, with
sequences and clusters of their own, three chains an entry) is published, read by commands, and opened by a
stream that draws by AF3's weights: seconds until it is open, seconds until the first sample is there, seconds
a draw, and the memory that each process (a loader's worker, too) holds for it.
"""

import argparse
import gzip
import hashlib
import itertools
import json
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

import psutil

from megafold.cache_store import LocalStore
from megafold.pipeline.manifest import manifest_from_rows
from megafold.pipeline.sample_corpus import write_sample_corpus

_DIGITS: Final = "0123456789abcdefghijklmnopqrstuvwxyz"
#: Letters of proteins and of RNA alike.
_LETTERS: Final = "ACG"
_ALIGNED_EVERY: Final = 4
#: Of the entries with most chains: as many chains an entry as the PDB has.
_ROW_SOURCES: Final = 9
_LOOK_EVERY_S: Final = 0.02
_SOURCES: Final = 24


@dataclass(frozen=True, kw_only=True)
class Cost:
    """One command: seconds, and peak bytes of its first process."""

    wall_s: float
    cpu_s: float
    peak_bytes: int
    status: int


def entry_name(number: int) -> str:
    """Four characters, a name for each number below 36⁴."""
    return "".join(_DIGITS[number // 36**place % 36] for place in (3, 2, 1, 0))


def write_corpus(folder: Path, entries: int) -> None:
    """``structures`` and ``alignments`` of so many entries, no two files of which are the same."""
    sources = folder / "sources"
    write_sample_corpus(sources, entries=_SOURCES)
    structures, alignments = folder / "structures", folder / "alignments"
    structures.mkdir()
    alignments.mkdir()
    texts = [(path.name[:4], _text(path)) for path in sorted((sources / "structures").iterdir())]
    chains = _aligned_chains(sources)
    for number in range(entries):
        old, text = texts[number % len(texts)]
        new = entry_name(number)
        _write(structures / f"{new}.cif.gz", _renamed(text, old, new))
        if number % _ALIGNED_EVERY == 0:
            for chain, files in chains[old]:
                _write_alignments(alignments / f"{new}_{chain}", files, old, new)


def _aligned_chains(corpus: Path) -> dict[str, list[tuple[str, dict[str, str]]]]:
    """By entry, the first chain of each aligned entity, and the texts of its files by name."""
    head, *lines = (line.split("\t") for line in (corpus / "chains.tsv").read_text().splitlines())
    found: dict[str, list[tuple[str, dict[str, str]]]] = {
        path.name[:4]: [] for path in (corpus / "structures").iterdir()
    }
    for row in (dict(zip(head, line, strict=True)) for line in lines):
        if row["alignments"]:
            files = {path.name: _text(path) for path in sorted((corpus / row["alignments"]).iterdir())}
            found[row["entry"]].append((row["subchains"].split(",")[0], files))
    return found


def _write_alignments(folder: Path, files: dict[str, str], old: str, new: str) -> None:
    folder.mkdir()
    for name, text in files.items():
        if ".a3m" in name:
            # A row of its own, so that no two entries have the same alignment.
            query, number = text.splitlines()[1], int(new, 36)
            letters = (_LETTERS[number // 3**place % 3] for place in range(10))
            text += f">own_{new}\n{''.join(letters)}{query[10:]}\n"
        _write(folder / name, _renamed(text, old, new))


def _renamed(text: str, old: str, new: str) -> str:
    return text.replace(old.upper(), new.upper()).replace(old, new)


def _text(path: Path) -> str:
    return gzip.decompress(path.read_bytes()).decode()


def _write(path: Path, text: str) -> None:
    path.write_bytes(gzip.compress(text.encode(), compresslevel=1, mtime=0))


def megafold(*words: object, until: Callable[[], bool] = lambda: False) -> Cost:
    """Run a command of MegaFold's and watch its first process; interrupt it when ``until`` says so."""
    command = [sys.executable, "-m", "megafold", *map(str, words)]
    started, peak, cpu, interrupted = time.perf_counter(), 0, 0.0, False
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        watched = psutil.Process(process.pid)
        while process.poll() is None:
            try:
                peak = max(peak, watched.memory_info().rss)
                cpu = sum(watched.cpu_times()[:2])
            except psutil.Error:
                break
            if not interrupted and until():
                interrupted = True
                process.send_signal(signal.SIGINT)
            time.sleep(_LOOK_EVERY_S)
        assert process.stderr is not None
        said = process.stderr.read().decode(errors="replace")
    if process.returncode not in (0, 1, 130) or "Traceback" in said:
        raise SystemExit(f"{' '.join(command)}: exit status {process.returncode}\n{said}")
    return Cost(wall_s=time.perf_counter() - started, cpu_s=cpu, peak_bytes=peak, status=process.returncode)


def build_costs(folder: Path, entries: int, workers: int) -> Iterator[tuple[str, Cost]]:
    """What the commands cost on a corpus of so many entries, one after the other."""
    write_corpus(folder, entries)
    corpus, cache, half = folder / "structures", folder / "cache", folder / "half"
    options = ("--alignments", folder / "alignments", "--workers", workers, "--clusters", "none", "--json")
    yield "build", megafold("cache", "build", corpus, cache, *options)
    yield "build, nothing new", megafold("cache", "build", corpus, cache, *options)
    edited = corpus / f"{entry_name(0)}.cif.gz"
    _write(edited, _text(edited).replace("_struct.title '", "_struct.title 'edited "))
    yield "build, one edited", megafold("cache", "build", corpus, cache, *options)

    def half_done() -> bool:
        return sum(1 for _ in (half / "objects").glob("*/*.zip")) >= entries // 2

    yield "build, interrupted", megafold("cache", "build", corpus, half, *options, until=half_done)
    yield "build, resumed", megafold("cache", "build", corpus, half, *options)
    shutil.rmtree(half)
    yield "verify --quick", megafold("cache", "verify", cache, "--quick", "--json")
    yield "verify", megafold("cache", "verify", cache, "--json")
    yield (
        "verify --corpus",
        megafold("cache", "verify", cache, "--quick", "--corpus", corpus, *options[:2], "--json"),
    )
    for name in ("info", "ls", "gc"):
        yield name, megafold("cache", name, cache)
    yield "show", megafold("cache", "show", cache, entry_name(1))


def publish_rows(source: Path, cache: Path, rows: int) -> None:
    """A cache with the objects of another and a snapshot of so many rows, made of its rows."""
    shutil.copytree(source, cache)
    store = LocalStore.at(cache)
    before = store.manifest()
    templates = sorted(before.table.to_pylist(), key=lambda row: -len(row["chains"]))[:_ROW_SOURCES]
    named = (_row(templates[number % len(templates)], number) for number in range(rows))
    digest = store.put_manifest(manifest_from_rows(named, before.attributes))
    store.move_ref("main", store.ref(), digest)


def _row(template: dict[str, Any], number: int) -> dict[str, Any]:
    chains = [
        {**chain, **_own_sequence(chain, f"{number // 3} {chain['entity_id']}")}
        for chain in template["chains"]
    ]
    recipes = {item["stage"]: _digest(f"{number} {item['stage']}") for item in template["recipes"]}
    return {
        **template,
        "entry": entry_name(number),
        "source_digest": _digest(f"{number} file"),
        "recipes": recipes,
        "chains": chains,
    }


def _own_sequence(chain: dict[str, Any], name: str) -> dict[str, str]:
    if not chain["sequence_digest"]:
        return {}
    digest = _digest(name)
    return {"sequence_digest": digest, "cluster": f"{chain['mol_type']}:{digest[:16]}"}


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def open_stream(cache: Path) -> dict[str, float]:
    """Seconds and bytes of a stream's opening in this process, which has done nothing else yet."""
    from megafold.pipeline.stream import SamplingConfig, Stream, StreamConfig

    process = psutil.Process()
    before = process.memory_info().rss
    started = time.perf_counter()
    stream = Stream(cache, StreamConfig(sampling=SamplingConfig(weights="af3")))
    size = len(stream)
    opened = time.perf_counter()
    stream.sample(0)
    first = time.perf_counter()
    for _ in itertools.islice(map(stream.sampler.draw, itertools.repeat(0), range(size)), 1000):
        pass
    return {
        "open_s": opened - started,
        "first_sample_s": first - opened,
        "draw_s": (time.perf_counter() - first) / min(size, 1000),
        "held_bytes": process.memory_info().rss - before,
    }


def stream_costs(source: Path, cache: Path, rows: int) -> Iterator[tuple[str, Cost | dict[str, float]]]:
    """What a snapshot of so many rows costs to publish, to look at and to open."""
    started = time.perf_counter()
    publish_rows(source, cache, rows)
    yield "publish", {"wall_s": time.perf_counter() - started}
    for name, words in (
        ("info", ("info", cache)),
        ("ls", ("ls", cache)),
        ("show", ("show", cache, entry_name(1))),
        ("gc", ("gc", cache)),
        ("verify --quick", ("verify", cache, "--quick", "--json")),
    ):
        yield name, megafold("cache", *words)
    told = subprocess.run(
        [sys.executable, __file__, "--open", str(cache)], stdout=subprocess.PIPE, check=True, text=True
    )
    yield "stream", json.loads(told.stdout)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--entries", type=int, nargs="+", default=[1000, 5000, 20000])
    parser.add_argument("--rows", type=int, nargs="*", default=[25000, 250000])
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, help="where to write; a temporary folder by default")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--open", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.open:
        print(json.dumps(open_stream(args.open)))
        return 0
    result: dict[str, Any] = {"python": platform.python_version(), "machine": platform.machine()}
    result |= {"workers": args.workers, "builds": [], "snapshots": []}
    with tempfile.TemporaryDirectory(prefix="megafold-scale-", dir=args.folder) as scratch:
        folder = Path(scratch)
        print(f"{'entries':>8s}  {'command':20s}{'s':>9s}{'CPU s':>9s}{'MB':>8s}{'entries/s':>11s}")
        for entries in args.entries:
            (folder / str(entries)).mkdir()
            for name, cost in build_costs(folder / str(entries), entries, args.workers):
                result["builds"].append({"entries": entries, "command": name, **asdict(cost)})
                _show(entries, name, cost)
        print(f"\n{'rows':>8s}  {'':20s}{'s':>9s}{'CPU s':>9s}{'MB':>8s}")
        for rows in args.rows:
            source = folder / str(args.entries[0]) / "cache"
            for name, found in stream_costs(source, folder / f"rows-{rows}", rows):
                values = asdict(found) if isinstance(found, Cost) else found
                result["snapshots"].append({"rows": rows, "what": name, **values})
                if isinstance(found, Cost):
                    _show(rows, name, found)
                else:
                    words = ", ".join(f"{key} {value:.6g}" for key, value in values.items())
                    print(f"{rows:8d}  {name:20s} {words}", flush=True)
    if args.json:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


def _show(entries: int, name: str, cost: Cost) -> None:
    times = f"{cost.wall_s:9.2f}{cost.cpu_s:9.2f}{cost.peak_bytes / 1e6:8.0f}"
    print(f"{entries:8d}  {name:20s}{times}{entries / cost.wall_s:11.1f}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
