"""``make demo``: the whole path on a sample corpus, with something to look at.

Runs the commands that a user would type, in order, and prints each before it runs.
"""

import csv
import json
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Final

ENTRIES: Final = 24
SAMPLES: Final = 1_000
STEPS: Final = 400
AVERAGED: Final = 50


def main(folder: Path) -> None:
    """Run the demo in ``folder``, going on where an earlier run stopped."""
    corpus, cache, run = folder / "corpus", folder / "cache", folder / "run"
    structures = str(corpus / "structures")
    more = ("--alignments", str(corpus / "alignments"), "--clusters", str(corpus / "clusters.tsv"))
    started = time.monotonic()
    _say("1. A small corpus of made-up molecules, chemically real")
    if not corpus.exists():
        _run("sample-corpus", str(corpus), "--entries", str(ENTRIES))
    _say("2. Featurize it once, into a cache")
    _run("cache", "build", structures, str(cache), *more)
    _say("3. Is the cache whole, does it fit its corpus, does it come out the same again?")
    _run("cache", "verify", str(cache), "--corpus", structures, *more, "--recompute", "3")
    _say(f"4. {SAMPLES} random crops from it")
    crop = folder / "crop.png"
    _stream(cache, crop)
    _say("5. Train a tiny model on them")
    resume = ("--resume",) if (run / "checkpoints").exists() else ()
    sizes = ("--tokens", "48", "--msa-rows", "32", "--templates", "1")
    settings = ("--preset", "tiny", "--steps", str(STEPS), *sizes, "--sample-structures", "1")
    _run("train", str(cache), *settings, "--out", str(run), *resume)
    _print_loss(run / "metrics.csv")
    _say(f"Done in {time.monotonic() - started:.0f} s. To look at:")
    for path, what in (
        (crop, "a crop as the model sees it: contact map, MSA, projection"),
        (run / "loss.png", "the loss"),
        (run / "metrics.csv", "every number of every step"),
        *((path, "a structure the model predicts") for path in sorted(run.glob("structures/*.cif"))),
    ):
        print(f"  {path}  {what}")


def _say(text: str) -> None:
    print(f"\n== {text}", flush=True)


def _run(*arguments: str) -> None:
    print("$ megafold " + shlex.join(arguments), flush=True)
    status = subprocess.run([sys.executable, "-m", "megafold", *arguments], check=False).returncode
    if status:
        sys.exit(f"the demo stops here: the command above ended with status {status}")


def _stream(cache: Path, picture: Path) -> None:
    """Stream samples from the cache in this process and draw one of the largest."""
    from megafold.pipeline.drawing import draw_sample
    from megafold.pipeline.stream import CropConfig, Stream, StreamConfig

    stream = Stream(cache, StreamConfig(crop=CropConfig(tokens=256)))
    started, tokens, largest = time.monotonic(), 0, None
    for index in range(SAMPLES):
        sample = stream.sample(epoch=0, index=index)
        tokens += len(sample.features["token_index"])
        if largest is None or len(sample.features["msa"]) > len(largest.features["msa"]):
            largest = sample
    elapsed = time.monotonic() - started
    assert largest is not None
    draw_sample(largest.features, largest.meta, picture)
    rate = {"samples": SAMPLES, "per_s": round(SAMPLES / elapsed, 1), "mean_tokens": tokens // SAMPLES}
    print(f"{json.dumps(rate)} on one core; {picture} shows {largest.meta['entry']}", flush=True)


def _print_loss(metrics: Path) -> None:
    """The mean loss at both ends: single steps differ by what they drew, a DNA or a lone ligand."""
    with open(metrics, newline="", encoding="utf-8") as file:
        losses = [float(row["loss"]) for row in csv.DictReader(file)]
    first, last = (sum(part) / len(part) for part in (losses[:AVERAGED], losses[-AVERAGED:]))
    print(
        f"mean loss of the first {AVERAGED} steps {first:.2f}, of the last {AVERAGED} {last:.2f}", flush=True
    )


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo"))
