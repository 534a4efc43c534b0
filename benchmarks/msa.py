"""How fast alignments are read, and in how much memory.

    python benchmarks/msa.py [FILE ...] [--repeat N] [--json FILE]

Without files: the deepest A3M and Stockholm files of the corpus ($MEGAFOLD_CORPUS, or ../shared/corpus
beside the checkout). Rates are megabytes of decompressed text a second of this process' CPU time, best of N,
one thread: what other programs do on the machine counts little. ``parse`` turns text in memory into
classes and insertions; ``featurize`` reads the file from disk, decompresses, parses, names species, removes
duplicates and makes the stored object.

Memory is over the size of the decompressed text, from the file on disk to the object's arrays, the text
itself included. ``rss`` is how much the resident memory of a fresh process grows at its peak, after one
small alignment has warmed it up; ``traced`` is the peak of what Python and NumPy ask for (tracemalloc).
"""

import argparse
import json
import multiprocessing
import os
import sys
import tempfile
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

from megafold.pipeline.msa import featurize_msa
from megafold.pipeline.msa.alphabet import Alphabet
from megafold.pipeline.msa.source import parse_alignment
from megafold.pipeline.msa.text import read_text
from megafold.pipeline.schema import MolType

CORPUS = Path(os.environ.get("MEGAFOLD_CORPUS", Path(__file__).resolve().parents[2] / "shared" / "corpus"))
DEEPEST = (
    "more/spare_alignments/3en2_A.a3m.gz",
    "spare_alignments/pdb_data__data_caches__msa__msas__a4__7a4d-assembly1A_protein.a3m.gz",
    "spare_alignments/7st3__msa__2__pairing.a3m.gz",
    "spare_alignments/afdb_data__data_caches__train__1a2y_B__a3m__uniref90_hits.a3m.gz",
    "alignments/c01ba18b1378712e/1.a3m.gz",
    "alignments/0b3dfcaf972bfc9a/3.a3m.gz",
    "alignments/625c708d1e51d4df/uniref_hits.sto.gz",
    "more/alignments/f93383c092af9d3c/uniref_hits.sto.gz",
)
COLUMNS = (
    ("file", "40", ""),
    ("rows", ">6", ""),
    ("columns", ">5", ""),
    ("mb", ">6", ".2f"),
    ("parse_mb_s", ">11", ".0f"),
    ("featurize_mb_s", ">15", ".0f"),
    ("rss", ">6", ".2f"),
    ("traced", ">7", ".2f"),
)


def best_seconds(call: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        start = time.process_time()
        call()
        times.append(time.process_time() - start)
    return min(times)


def traced_peak(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def resident_growth(query: str, path: Path) -> int:
    """Bytes by which a process' peak of resident memory grows; call it in a fresh process."""
    with tempfile.TemporaryDirectory() as folder:
        warm = Path(folder) / "warm.a3m"
        warm.write_text(">q\nMKV\n>a TaxID=1\nMaRV\n>b TaxID=2\nMRV\n")
        featurize_msa("MKV", MolType.PROTEIN, [warm])
    before = peak_resident()
    featurize_msa(query, MolType.PROTEIN, [path])
    return peak_resident() - before


def peak_resident() -> int:
    """Linux's count for this program alone: ``getrusage`` would go on from its parent's peak."""
    status = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in status if line.startswith("VmHWM"))


def measure(path: Path, repeat: int) -> dict[str, Any]:
    alphabet = Alphabet.of(MolType.PROTEIN)
    text = read_text(path)
    alignment = parse_alignment(text, alphabet)[0]
    query, size = alignment.query, len(text.data)
    del alignment
    parse = best_seconds(lambda: parse_alignment(text, alphabet), repeat)
    featurize = best_seconds(lambda: featurize_msa(query, MolType.PROTEIN, [path]), repeat)
    result = featurize_msa(query, MolType.PROTEIN, [path])
    assert result.content is not None, result.failures
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        resident = pool.apply(resident_growth, (query, path))
    return {
        "file": path.name[-40:],
        "rows": result.content.attributes["sources"][0]["rows"] + 1,
        "columns": len(query),
        "mb": size / 1e6,
        "parse_mb_s": size / 1e6 / parse,
        "featurize_mb_s": size / 1e6 / featurize,
        "rss": resident / size,
        "traced": traced_peak(lambda: featurize_msa(query, MolType.PROTEIN, [path])) / size,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="How fast alignments are read, and in how much memory.")
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    files = arguments.files or [CORPUS / name for name in DEEPEST]
    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        print(f"no such file: {', '.join(missing)}; name files or set MEGAFOLD_CORPUS", file=sys.stderr)
        return 2
    print("MB of decompressed text per second of CPU time; memory over the size of the text")
    print(" ".join(format(name, width) for name, width, _ in COLUMNS))
    rows = []
    for path in files:
        row = measure(path, arguments.repeat)
        rows.append(row)
        print(" ".join(format(format(row[name], spec), width) for name, width, spec in COLUMNS), flush=True)
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
