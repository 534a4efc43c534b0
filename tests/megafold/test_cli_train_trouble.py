"""``megafold train`` when a worker is killed, a disk is full, an object is damaged: docs/design/006."""

import csv
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from megafold.cache_store import Digest, LocalStore
from tests.pipeline import stream_cache as fake
from tests.pipeline.stream_cache import Chain

pytest.importorskip("torch")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
OPTIONS = (
    "--preset tiny --tokens 12 --msa-rows 8 --device cpu --sample-structures 0 --epoch-size 64 "
    "--set n_copies=2 --set log_every=1 --set checkpoint_every=2"
).split()


@pytest.fixture
def cache(tmp_path: Path) -> LocalStore:
    """Sixteen entries."""
    path = tmp_path / "cache"
    store = LocalStore.create(path)
    entries = []
    for number in range(16):
        deep = ["".join("AGK"[(i * j + number) % 3] for j in range(20)) for i in range(30)]
        chains = [Chain(["ALA", "GLY", "LYS", "MSE"] * 5, msa=str(store.put(fake.msa("AGKM" * 5, deep))))]
        entries.append((fake.structure(f"{number:x}abc", chains), chains, ""))
    return fake.publish(path, entries)


def start(cache: object, out: Path, *options: str, **environment: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "megafold", "train", str(cache), "--out", str(out), *OPTIONS, *options],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def train(cache: object, out: Path, *options: str, **environment: str) -> tuple[dict[str, Any], str]:
    """The summary of a run that succeeds, and what it wrote to the standard error."""
    process = start(cache, out, "--json", *options, **environment)
    printed, told = process.communicate(timeout=300)
    assert process.returncode == 0, told
    summary: dict[str, Any] = json.loads(printed)
    return summary, told


def losses(out: Path) -> list[str]:
    path = out / "metrics.csv"
    if not path.exists():
        return []
    with path.open() as file:
        return [row["loss"] for row in csv.DictReader(file) if row["loss"]]


def workers_of(process: subprocess.Popen[str]) -> list[int]:
    """Forked children that run the same command."""
    command = Path(f"/proc/{process.pid}/cmdline").read_bytes()
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    return [int(child) for child in children if Path(f"/proc/{child}/cmdline").read_bytes() == command]


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_a_killed_worker_ends_the_run_and_resume_goes_on_exactly(cache: LocalStore, tmp_path: Path):
    cut = tmp_path / "cut"
    workers = ("--workers", "2", "--set", "worker_start=fork", "--set", "prefetch=1")
    process = start(cache.path, cut, "--steps", "100000", *workers)
    try:
        deadline = time.monotonic() + 200
        while len(losses(cut)) < 3:
            assert process.poll() is None, process.communicate()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        os.kill(workers_of(process)[0], signal.SIGKILL)
        _, told = process.communicate(timeout=60)
    finally:
        process.kill()
    assert process.returncode == 2
    done = len(losses(cut))
    assert f"newest checkpoint: {cut / 'checkpoints'}/step-" in told
    assert "Start again with --resume" in told
    assert "Traceback" not in told
    steps = ("--steps", str(done + 2))
    train(cache.path, cut, *steps, "--resume", *workers)
    train(cache.path, tmp_path / "whole", *steps)
    assert losses(cut) == losses(tmp_path / "whole")


def test_a_damaged_object_costs_its_entry_and_is_named(cache: LocalStore, tmp_path: Path):
    (row,) = (row for row in cache.manifest().table.to_pylist() if row["entry"] == "2abc")
    path = Path(cache.object_path(Digest(row["structure"])))
    data = bytearray(path.read_bytes())
    for place in range(100, len(data), 300):  # wherever a crop may read
        data[place] ^= 16
    path.chmod(0o644)
    path.write_bytes(data)
    allowed = tmp_path / "stream.json"
    allowed.write_text(json.dumps({"failures": {"max_share": 0.5}}))
    summary, told = train(
        cache.path, tmp_path / "run", "--steps", "64", "--workers", "1", "--stream", str(allowed)
    )
    assert (summary["steps"], summary["skipped"]) == (64, 0)
    assert "samples failed and were replaced" in told
    assert "2abc: corrupt-object" in told
    assert row["structure"] in told

    process = start(cache.path, tmp_path / "strict", "--steps", "64", "--stream", str(strict(tmp_path)))
    _, told = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "2abc: corrupt-object" in told
    assert "megafold cache verify" in told
    assert "Traceback" not in told


def strict(folder: Path) -> Path:
    """Settings that allow no failure."""
    path = folder / "strict.json"
    path.write_text(json.dumps({"failures": {"max_share": 0.0, "min_failures": 1}}))
    return path


@pytest.mark.exhaustive
def test_a_full_disk_for_the_copies_costs_nothing_but_time(cache: LocalStore, tmp_path: Path):
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(disk)]
    if os.name != "posix" or subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("needs the right to mount a small file system")
    try:
        url = f"file://{cache.path}"
        steps = ("--steps", "6", "--workers", "1")
        _, told = train(url, tmp_path / "full", *steps, MEGAFOLD_REMOTE_CACHE=str(disk / "copies"))
    finally:
        subprocess.run(["umount", "--lazy", str(disk)], check=True)
    assert "No space left on device" in told
    train(cache.path, tmp_path / "local", *steps)
    assert len(losses(tmp_path / "full")) == 6
    assert losses(tmp_path / "full") == losses(tmp_path / "local")
