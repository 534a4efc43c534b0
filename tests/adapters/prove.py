"""Train each peer's real model on samples of the corpus: ``python tests/adapters/prove.py [PEER …]``.

Makes an environment for each peer under ``.adapters/``, a cache of a few corpus entries, and runs the
adapter's example there. Fails unless the loss is finite and falls over 20 steps, unless the peers whose
losses exchange atoms and chains find exchanged ones, and unless features are those of the peer's
own featurizer, where that can be run (``exchange.py``, ``features_*.py``).
"""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WORK = ROOT / ".adapters"
PEERS = json.loads((Path(__file__).parent / "environments.json").read_text())
ENTRIES = ("1cbs", "1bna", "1crn", "1pfe", "1ay7", "1lcd", "2hhb", "6ydw", "1fix", "209d-assembly1")
#: What reading a cache takes, without building one.
STREAM = "zarr numcodecs pyarrow gemmi msgpack zstandard fsspec"
STEPS = 20
#: One thread, and products that do not depend on where arrays lie: the same losses in every run.
ONE_ORDER = {"OMP_NUM_THREADS": "1", "MKL_CBWR": "COMPATIBLE"}
#: Two chains of one kind and one of another, part of a heme, paired rows; their copies lie outside the crop.
SAMPLE = ("--entry", "2hhb", "--index", "13")
#: Eight chains of three kinds; two chains with many equivalent atoms; bonded chains; unresolved atoms.
EXCHANGES = (
    ("--entry", "2hhb", "--index", "1"),
    ("--entry", "2hhb", "--index", "2"),
    ("--entry", "1pfe", "--index", "8"),
    ("--entry", "209d-assembly1", "--index", "1"),
)


def environment(peer: str) -> Path:
    """Python of the peer's environment, made if it is not there."""
    folder = WORK / peer
    python, done = folder / "bin" / "python", folder / "complete"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        tested = Path(__file__).parent / "constraints" / f"{peer}.txt"
        pip: list[str | Path] = [python, "-m", "pip", "install", "--quiet", "--constraint", tested]
        subprocess.run([*pip, "torch"], check=True)
        subprocess.run([*pip, "--no-deps", PEERS[peer]["package"]], check=True)
        subprocess.run([*pip, *PEERS[peer]["needs"].split(), *STREAM.split()], check=True)
        done.touch()
    return python


def cache() -> Path:
    """A cache of ENTRIES."""
    corpus = Path(os.environ.get("MEGAFOLD_CORPUS", ROOT.parent / "shared" / "corpus"))
    if not (corpus / "structures").is_dir():
        sys.exit(f"needs the real corpus: no structures/ in {corpus}; set MEGAFOLD_CORPUS to its folder")
    target, chosen = WORK / "cache", WORK / "structures"
    chosen.mkdir(parents=True, exist_ok=True)
    for entry in ENTRIES:
        link = chosen / f"{entry}.cif.gz"
        link.unlink(missing_ok=True)
        link.symlink_to(corpus / "structures" / link.name)
    command: list[str | Path] = [sys.executable, "-m", "megafold", "cache", "build", chosen, target]
    command += ["--quiet", "--workers", "0"]
    command += ["--alignments", corpus / "alignments", "--template-structures", corpus / "structures"]
    subprocess.run(command, check=True, cwd=ROOT)
    return target


def run(peer: str, script: Path, *arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a script in the peer's environment."""
    scripts = [script]
    if peer == "alphafold3_pytorch":
        scripts.insert(0, Path(__file__).parent / "without_web_app.py")
    return subprocess.run(
        [environment(peer), *scripts, *arguments],
        env={**os.environ, "PYTHONPATH": str(ROOT), **ONE_ORDER, **PEERS[peer].get("settings", {})},
        capture_output=True,
        text=True,
    )


def train(peer: str, data: Path) -> str:
    """Run the peer's example; what is wrong, or nothing."""
    script = ROOT / "examples" / f"adapter_{peer}.py"
    done = run(peer, script, data, *SAMPLE, "--steps", str(STEPS))
    losses = [float(value) for value in re.findall(r"^step \d+ loss (\S+)$", done.stdout, re.MULTILINE)]
    if done.returncode or len(losses) != STEPS:
        return f"stopped after {len(losses)} steps: {done.stderr.strip()[-2000:]}"
    print(f"{peer}: {PEERS[peer]['package']}, loss {losses[0]:.4f} to {losses[-1]:.4f} in {STEPS} steps")
    if not all(math.isfinite(loss) for loss in losses):
        return f"a loss is not finite: {losses}"
    return "" if losses[-1] < losses[0] else f"the loss does not fall: {losses}"


def exchange(peer: str, data: Path) -> str:
    """Let the peer find exchanged atoms and chains; what is wrong, or nothing."""
    for sample in EXCHANGES if PEERS[peer]["exchanges"] else ():
        done = run(peer, Path(__file__).parent / "exchange.py", peer, data, *sample)
        print(*re.findall(rf"^{peer}, .*$", done.stdout, re.MULTILINE), sep="\n")
        if done.returncode:
            return done.stderr.strip()[-2000:]
    return ""


def compare_features(peer: str, data: Path) -> str:
    """Compare the adapter with the peer's own featurizer, where it can be run; what is wrong, or nothing."""
    script = Path(__file__).parent / f"features_{peer}.py"
    # Not the first of EXCHANGES: the package fills rows of which a crop has gaps alone.
    for sample in (SAMPLE, *EXCHANGES[1:]) if script.exists() else ():
        done = run(peer, script, data, *sample)
        print(*re.findall(rf"^{peer}, .*$", done.stdout, re.MULTILINE), sep="\n")
        if done.returncode:
            return done.stderr.strip()[-2000:]
    return ""


def first_fault(peer: str, data: Path) -> str:
    """What is wrong, or nothing."""
    return train(peer, data) or exchange(peer, data) or compare_features(peer, data)


def main() -> None:
    """Prove the peers named, or all."""
    data = cache()
    wrong = {peer: first_fault(peer, data) for peer in sys.argv[1:] or PEERS}
    wrong = {peer: reason for peer, reason in wrong.items() if reason}
    for peer, reason in wrong.items():
        print(f"{peer}: {reason}", file=sys.stderr)
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
