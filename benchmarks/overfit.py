"""Can the tiny preset learn one entry by heart? The whole path, from an mmCIF file to sampled structures.

    python benchmarks/overfit.py STRUCTURE.cif.gz [--no-augment] [--steps N] [--json FILE]

Builds a cache of that one entry, trains on the CPU through ``megafold train --preset tiny`` and samples
structures. Prints the all-atom lDDT (pairs within a residue left out) and the RMSD of each against the ground
truth.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path


def megafold(*arguments: str, capture: bool = False) -> str:
    """Run a command of the command line; its output where asked for."""
    done = subprocess.run(
        [sys.executable, "-m", "megafold", *arguments],
        check=True,
        text=True,
        stdout=subprocess.PIPE if capture else None,
    )
    return done.stdout or ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("structure", type=Path)
    parser.add_argument("--steps", type=int, help="default: the preset's")
    parser.add_argument("--no-augment", action="store_true", help="leave conformers and coordinates unturned")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="megafold-overfit-") as scratch:
        listed = Path(scratch) / "corpus.txt"
        listed.write_text(f"{args.structure.resolve()}\n")
        cache = f"{scratch}/cache"
        megafold("cache", "build", str(listed), cache, "--workers", "0", "--quiet")
        options = ["--preset", "tiny", "--device", "cpu", "--out", f"{scratch}/run", "--json"]
        options += ["--steps", str(args.steps)] if args.steps else []
        options += ["--no-augment"] if args.no_augment else []
        summary = json.loads(megafold("train", cache, *options, capture=True))
    (structure,) = summary["structures"]
    print(f"\n{'sample':<8}{'lDDT':>8}{'RMSD / Å':>10}")
    for number, (lddt, rmsd) in enumerate(zip(structure["lddt"], structure["rmsd"], strict=True), 1):
        print(f"{number:<8}{lddt:>8.3f}{rmsd:>10.2f}")
    print(f"{summary['steps']} steps in {summary['minutes']:.1f} min, {summary['parameters']:,} parameters")
    if args.json:
        result = {name: summary[name] for name in ("steps", "minutes", "loss", "parameters")}
        result |= {"entry": structure["entry"], "lddt": structure["lddt"], "rmsd": structure["rmsd"]}
        args.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
