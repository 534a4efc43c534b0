"""Digests of all that the real corpus is made into, and how they are recorded.

    python -m tests.pipeline.record_digests                   # record them in corpus_digests.json
    python -m tests.pipeline.record_digests --check --workers 4 --order reversed --rdkit-threads 8

``--check`` builds the corpus as told and says what differs from the record. Record again where a stage's
output was meant to change (raise its version) or libraries are new, never to make a test pass.
"""

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import dask

from megafold.cache_store import LocalStore
from megafold.pipeline.builder.config import BuildConfig, Resources, Sources
from megafold.pipeline.builder.engine import Build
from megafold.pipeline.builder.progress import BuildProgress
from megafold.pipeline.manifest import entry_rows
from tests.pipeline.rdkit_threads import VARIABLE, set_rdkit_threads

RECORD: Final = Path(__file__).with_name("corpus_digests.json")
DEFAULT_CORPUS: Final = Path(__file__).resolve().parents[3] / "shared" / "corpus"
#: Whose output is in the objects: another version may rightly give other digests.
LIBRARIES: Final = ("biotite", "gemmi", "numpy", "rdkit", "scipy")
#: As many digits tell any two of a few hundred objects apart.
DIGITS: Final = 16


def build_corpus(corpus: Path, cache: Path, resources: Resources) -> None:
    """Build the 81 entries with their alignments, their own structures as templates and their clusters."""
    structures = corpus / "structures"
    config = BuildConfig(
        sources=Sources(
            corpus=structures, alignments=corpus / "alignments", template_structures=(structures,)
        ),
        cache=cache,
        resources=resources,
        clusters=str(corpus / "clusters.tsv"),
    )
    Build(config, BuildProgress(quiet=True)).run()


def read_digests(cache: Path) -> dict[str, Any]:
    """The digests of a cache, its stages' versions and those of the libraries."""
    manifest = LocalStore.at(cache).manifest()
    attributes: Any = manifest.attributes
    entries = {}
    for row in entry_rows(manifest):
        chains = {chain.entity_id: chain for chain in row.chains}
        entries[row.entry] = {
            "structure": _short(row.structure),
            "pairing": _short(row.pairing),
            "msa": [_short(chain.msa) for _, chain in sorted(chains.items()) if chain.msa],
            "template": [_short(chain.template) for _, chain in sorted(chains.items()) if chain.template],
        }
    return {
        "libraries": {name: version(name) for name in LIBRARIES},
        "stages": dict(attributes["versions"]),
        "manifest": str(manifest.digest()),
        "components": str(attributes["components"]),
        "ledger": str(attributes["ledger"]),
        "entries": entries,
    }


def _short(digest: str) -> str:
    return digest[:DIGITS]


def differences(found: dict[str, Any], recorded: dict[str, Any]) -> Iterator[str]:
    """What is not as recorded, one line each; libraries and the stages' versions apart."""
    for entry in sorted(found["entries"].keys() | recorded["entries"].keys()):
        ours, theirs = found["entries"].get(entry), recorded["entries"].get(entry)
        if ours is None or theirs is None:
            yield f"{entry}: {'not built' if ours is None else 'not in the record'}"
            continue
        for stage in theirs:
            if ours[stage] != theirs[stage]:
                yield f"{entry}: {stage} is {ours[stage]}, recorded as {theirs[stage]}"
    for name in ("components", "ledger", "manifest"):
        if found[name] != recorded[name]:
            yield f"{name} is {found[name]}, recorded as {recorded[name]}"


def main() -> int:
    """Record, or check."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--order", choices=["largest-first", "sorted", "reversed"], default="sorted")
    parser.add_argument("--rdkit-threads", type=int, default=1)
    args = parser.parse_args()
    corpus = Path(os.environ.get("MEGAFOLD_CORPUS", DEFAULT_CORPUS))
    os.environ[VARIABLE] = str(args.rdkit_threads)
    if args.workers:
        dask.config.set({"distributed.worker.preload": ["tests.pipeline.rdkit_threads"]})
    else:
        set_rdkit_threads(args.rdkit_threads)
    with tempfile.TemporaryDirectory() as folder:
        build_corpus(corpus, Path(folder) / "cache", Resources(workers=args.workers, order=args.order))
        found = read_digests(Path(folder) / "cache")
    if not args.check:
        RECORD.write_text(json.dumps(found, indent=1, sort_keys=True) + "\n")
        print(f"{RECORD.name}: {len(found['entries'])} entries, manifest {found['manifest']}")
        return 0
    changed = list(differences(found, json.loads(RECORD.read_text())))
    print("\n".join(changed) or f"{len(found['entries'])} entries are as recorded: {found['manifest']}")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
