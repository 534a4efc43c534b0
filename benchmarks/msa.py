"""How fast alignments are read, and in how much memory.

    python benchmarks/msa.py [FILE ...] [--repeat N] [--json FILE]

Without files: the deepest A3M and Stockholm files of the corpus ($MEGAFOLD_CORPUS, or ../shared/corpus
beside the checkout). Rates are over the decompressed text, best of N, one core: ``parse`` turns text into
classes and insertions; ``featurize`` reads the file from disk, decompresses, parses, removes duplicates and
makes the object. Memory is the peak that tracemalloc sees over the size of the decompressed text, the text
itself included.
"""

import argparse
import json
import os
import sys
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


def best_seconds(call: Callable[[], object], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return min(times)


def peak_bytes(call: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def measure(path: Path, repeat: int) -> dict[str, Any]:
    alphabet = Alphabet.of(MolType.PROTEIN)
    text = read_text(path)
    alignment = parse_alignment(text, alphabet)[0]
    query, size = alignment.query, len(text.data)
    del alignment
    parse = best_seconds(lambda: parse_alignment(text, alphabet), repeat)
    featurize = best_seconds(lambda: featurize_msa(query, MolType.PROTEIN, [path]), repeat)
    parse_peak = peak_bytes(lambda: parse_alignment(read_text(path), alphabet))
    result = featurize_msa(query, MolType.PROTEIN, [path])
    assert result.content is not None, result.failures
    return {
        "file": path.name[-40:],
        "rows": result.content.attributes["sources"][0]["rows"],
        "columns": len(query),
        "mb": size / 1e6,
        "parse_mb_s": size / 1e6 / parse,
        "featurize_mb_s": size / 1e6 / featurize,
        "parse_peak": parse_peak / size,
        "featurize_peak": peak_bytes(lambda: featurize_msa(query, MolType.PROTEIN, [path])) / size,
    }


def main() -> int:
    parser = argparse.ArgumentParser(description="How fast alignments are read, and in how much memory.")
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    files = arguments.files or [CORPUS / name for name in DEEPEST]
    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        print(f"no such file: {', '.join(missing)}; name files or set MEGAFOLD_CORPUS", file=sys.stderr)
        return 2
    print(
        f"{'file':40} {'rows':>6} {'cols':>5} {'MB':>6} {'parse MB/s':>11} {'featurize MB/s':>15}"
        f" {'parse peak':>11} {'featurize peak':>15}"
    )
    rows = []
    for path in files:
        row = measure(path, arguments.repeat)
        rows.append(row)
        print(
            f"{row['file']:40} {row['rows']:6} {row['columns']:5} {row['mb']:6.2f} {row['parse_mb_s']:11.0f}"
            f" {row['featurize_mb_s']:15.0f} {row['parse_peak']:10.1f}x {row['featurize_peak']:14.1f}x"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
