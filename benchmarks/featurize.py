"""Seconds an entry takes to featurize, and how many times longer AtomWorks takes to make one sample of it.

    python benchmarks/featurize.py --rival-python RIVAL/bin/python [--entries 1abc …] [--every N] [--json F]

Ours is everything of an entry that is computed once: its structure object, the MSA objects of its chains and
their pairing, from files to arrays that fit the schema. The component library is there already, as in all but
the first build of a cache. Theirs is what the same entry costs whenever a sample of it is drawn: parsing the
file, and the AF3 transforms to one training sample of 384 tokens, with conformers made on the fly and without
alignments (``benchmarks/rival.py`` says how to install it). Without ``--rival-python``, ours alone.

Both run on one core with one thread, imports and first-use costs excluded. Entries take turns: ours, theirs,
ours again; the slower of our two counts. An entry that one of them cannot do is listed and has no ratio.
Ratios are of wall time; those of CPU time beside them matter where the machine has other things to do.
"""

import argparse
import hashlib
import json
import os
import platform
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
from rival import Rival, RivalSample, pin

from megafold.cache_store import Content
from megafold.pipeline.alignments import AlignmentIndex
from megafold.pipeline.chemistry import ComponentDictionary, load_dictionary
from megafold.pipeline.corpus import EntrySource, discover
from megafold.pipeline.errors import InputError
from megafold.pipeline.msa import MsaRows, featurize_msa, pair_msas
from megafold.pipeline.schema import MolType
from megafold.pipeline.structure import featurize_structure

CORPUS = Path(os.environ.get("MEGAFOLD_CORPUS", Path(__file__).resolve().parents[2] / "shared" / "corpus"))


@dataclass(frozen=True, kw_only=True)
class OurTime:
    """What one entry took, in seconds; ``error`` says why it failed, '' for none."""

    structure_s: float = 0.0
    alignments_s: float = 0.0
    cpu_s: float = 0.0
    tokens: int = 0
    msa_rows: int = 0
    error: str = ""

    @property
    def wall_s(self) -> float:
        return self.structure_s + self.alignments_s


def featurize(source: EntrySource, dictionary: ComponentDictionary, index: AlignmentIndex | None) -> OurTime:
    """Time all objects of an entry."""
    started, cpu = time.perf_counter(), time.process_time()
    try:
        structure = featurize_structure(source.path, source.entry, dictionary).content
        structured = time.perf_counter()
        msas = alignments(source.entry, structure, index)
        pair_msas([MsaRows.from_content(msa) for msa in msas if msa.attributes["mol_type"] == "protein"])
    except InputError as error:
        return OurTime(error=f"{error.reason}: {error}"[:300])
    return OurTime(
        structure_s=structured - started,
        alignments_s=time.perf_counter() - structured,
        cpu_s=time.process_time() - cpu,
        tokens=structure.arrays["tokens"].shape[1],
        msa_rows=sum(msa.arrays["msa"].shape[1] for msa in msas),
    )


def alignments(entry: str, structure: Content, index: AlignmentIndex | None) -> list[Content]:
    """The MSA objects of an entry's distinct sequences, read from their files."""
    entities: Any = structure.attributes["entities"]
    found: list[Content] = []
    for entity in entities if index is not None else ():
        if not entity["sequence"]:
            continue
        assert index is not None
        digest = hashlib.sha256(entity["sequence"].encode()).hexdigest()
        files = index.find(entry, "", "", digest)
        if files is not None and files.msas:
            result = featurize_msa(entity["sequence"], MolType(entity["mol_type"]), files.msas)
            found += [result.content] if result.content is not None else []
    return found


def slower(first: OurTime, second: OurTime) -> OurTime:
    return first if first.wall_s >= second.wall_s else second


def spread(values: list[float]) -> dict[str, float]:
    """Median, 90th percentile and worst, seconds."""
    if not values:
        return {}
    return {
        "median_s": float(np.median(values)),
        "p90_s": float(np.percentile(values, 90)),
        "worst_s": max(values),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """The figures over all entries that both can do."""
    both = [row for row in rows if "ratio" in row]
    ratios = [row["ratio"] for row in both]
    result: dict[str, Any] = {
        "entries": len(rows),
        "compared": len(both),
        "ours": spread([row["ours_s"] for row in rows if not row["ours_error"]]),
        "ours_cpu": spread([row["ours_cpu_s"] for row in rows if not row["ours_error"]]),
        "rival": spread([row["rival_s"] for row in both]),
        "rival_cpu": spread([row["rival_cpu_s"] for row in both]),
        "rival_parse": spread([row["rival_parse_s"] for row in both]),
    }
    if ratios:
        result["median_ratio"] = float(np.median(ratios))
        result["minimum_ratio"] = min(ratios)
        result["slowest_entry"] = min(both, key=lambda row: row["ratio"])["entry"]
        cpu_ratios = [row["rival_cpu_s"] / row["ours_cpu_s"] for row in both]
        result["median_cpu_ratio"] = float(np.median(cpu_ratios))
        result["minimum_cpu_ratio"] = min(cpu_ratios)
    return result


def row_of(source: EntrySource, ours: OurTime, theirs: RivalSample | None) -> dict[str, Any]:
    row: dict[str, Any] = {
        "entry": source.entry,
        "ours_s": ours.wall_s,
        "ours_error": ours.error,
        **{f"ours_{key}": value for key, value in asdict(ours).items() if key != "error"},
    }
    if theirs is not None:
        row |= {
            "rival_s": theirs.wall_s,
            "rival_cpu_s": theirs.cpu_s,
            **{f"rival_{key}": value for key, value in asdict(theirs).items() if not key.endswith("cpu_s")},
        }
        if not ours.error and not theirs.error:
            row["ratio"] = theirs.wall_s / ours.wall_s
    return row


def show(row: dict[str, Any]) -> None:
    ours = row["ours_error"] or f"{row['ours_structure_s']:9.3f} {row['ours_alignments_s']:7.3f}"
    theirs = ""
    if "rival_error" in row:
        theirs = row["rival_error"][:30] or f"{row['rival_parse_s']:8.2f} {row['rival_transforms_s']:10.2f}"
    print(
        f"{row['entry']:16s} {row['ours_tokens']:7d} {ours} {theirs} {row.get('ratio', np.nan):8.1f}",
        flush=True,
    )


def report(result: dict[str, Any]) -> None:
    print(f"\n{'seconds an entry':24s}{'median':>9s}{'p90':>9s}{'worst':>9s}")
    for name in ("ours", "ours_cpu", "rival", "rival_cpu", "rival_parse"):
        values = result[name]
        if values:
            print(f"{name.replace('_', ' '):24s}" + "".join(f"{value:9.3f}" for value in values.values()))
    if "median_ratio" in result:
        print(
            f"\n{result['compared']} of {result['entries']} entries compared: rival / ours is"
            f" {result['median_ratio']:.1f} in the median, at least {result['minimum_ratio']:.1f}"
            f" ({result['slowest_entry']}); CPU {result['median_cpu_ratio']:.1f} and"
            f" {result['minimum_cpu_ratio']:.1f}"
        )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--corpus", type=Path, default=CORPUS / "structures")
    parser.add_argument("--alignments", type=Path, default=CORPUS / "alignments")
    parser.add_argument("--rival-python", type=Path)
    parser.add_argument("--tokens", type=int, default=384)
    parser.add_argument("--entries", nargs="*", default=[], help="these entries alone")
    parser.add_argument("--every", type=int, default=1, help="every Nth entry")
    parser.add_argument("--cpu", type=int, help="core to run on; the last one by default")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()

    sources = [s for s in discover(args.corpus) if not args.entries or s.entry in args.entries][:: args.every]
    if not sources:
        print(f"no such entries in {args.corpus}", file=sys.stderr)
        return 2
    cpu = pin(args.cpu)
    dictionary = load_dictionary()
    index = AlignmentIndex(args.alignments) if args.alignments.is_dir() else None
    rival = Rival(args.rival_python) if args.rival_python else None
    featurize(sources[0], dictionary, index)
    if rival is not None:
        rival.sample(sources[0].path, tokens=args.tokens, seed=0)
    heads = f"{'structure':>9s} {'MSAs':>7s} {'parse':>8s} {'transforms':>10s} {'ratio':>8s}"
    print(f"{'entry':16s} {'tokens':>7s} {heads}")
    rows = []
    for number, source in enumerate(sources):
        ours = featurize(source, dictionary, index)
        theirs = None
        if rival is not None:
            theirs = rival.sample(source.path, tokens=args.tokens, seed=number)
            ours = slower(ours, featurize(source, dictionary, index))
        rows.append(row_of(source, ours, theirs))
        show(rows[-1])
    result = summary(rows)
    report(result)
    for side in ("ours", "rival"):
        failed = {row["entry"]: row[f"{side}_error"] for row in rows if row.get(f"{side}_error")}
        result[f"{side}_failures"] = failed
        if failed:
            print(
                f"\n{side}: {len(failed)} failed: " + "; ".join(f"{k}: {v[:100]}" for k, v in failed.items())
            )
    if rival is not None:
        result["rival_versions"] = rival.versions
        rival.close()
    if args.json:
        result |= {
            "python": platform.python_version(),
            "machine": platform.machine(),
            "cpu": cpu,
            "rows": rows,
        }
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
