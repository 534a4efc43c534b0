"""Real processes, really killed."""

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megafold.cache_store import LocalStore, LockHeld, audit
from tests.cache_store import processes
from tests.cache_store.store_conformance import named, small_content, small_manifest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def store(tmp_path: Path) -> LocalStore:
    return LocalStore.create(tmp_path / "cache")


def start(what: str, store: LocalStore, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, str(processes.__file__), what, str(store.path), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )


def read_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def test_killed_writers_leave_a_clean_store(store: LocalStore):
    """Two writers of partly the same objects, killed at random moments, several times over."""
    chance = random.Random(0)
    done: dict[str, int] = {}
    for round_ in range(3):
        seeds = (str(2 * round_ + 1), str(2 * round_ + 2))
        writers = {seed: start("publish", store, seed) for seed in seeds}
        try:
            for seed, writer in writers.items():
                for _ in range(3):
                    done[seed] = int(read_line(writer))
            time.sleep(chance.uniform(0, 0.1))
        finally:
            for writer in writers.values():
                writer.kill()
                writer.wait()

        expected = {digest for manifest in store.manifests() for digest in named(store.manifest(manifest))}
        findings = audit(store, expected)
        assert [finding for finding in findings if finding.level == "error"] == []
        assert {finding.kind for finding in findings} <= {"unreferenced-object", "temporary-file"}
        assert store.manifest().table.num_rows == 2
        for seed, number in done.items():
            journal = store.journal(f"writer-{seed}").scan()
            assert journal.damaged == 0
            assert [record["number"] for record in journal.records[: number + 1]] == list(range(number + 1))
    store.sweep(older_than_s=0)
    assert not list(store.temporary_files())


def _publish_and_die(store: LocalStore, moment: int) -> None:
    """In a child: publish a snapshot, and stop dead at the ``moment``-th call that touches the disk."""
    calls = itertools.count()

    def dying(function: Callable) -> Callable:
        def call(*arguments, **named_arguments):
            if next(calls) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments, **named_arguments)

        return call

    for name in ("open", "fsync", "replace", "write", "mkdir"):
        setattr(os, name, dying(getattr(os, name)))
    digest = store.put(small_content(1))
    with store.journal("b") as journal:
        journal.append({"object": str(digest)})
    manifest = store.put_manifest(small_manifest(digest))
    store.move_ref("main", store.ref("main"), manifest)


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_death_at_any_call_leaves_a_clean_store(tmp_path: Path):
    """The ref names the old snapshot or the new one, both whole, and doing it again completes it."""
    for moment in itertools.count():
        store = LocalStore.create(tmp_path / str(moment))
        old = store.put_manifest(small_manifest(store.put(small_content(0))))
        store.move_ref("main", None, old)
        child = os.fork()
        if child == 0:
            try:
                _publish_and_die(store, moment)
                os._exit(0)
            finally:
                os._exit(1)
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL)

        findings = audit(store, named(store.manifest()))
        assert [finding for finding in findings if finding.level == "error"] == []
        if (new := store.ref("main")) != old:
            assert list(store.journal("b").replay()) == [{"object": str(small_content(1).digest())}]
        digest = store.put(small_content(1))
        store.check(digest)
        assert store.journal("b").scan().damaged == 0
        store.move_ref("main", new, store.put_manifest(small_manifest(digest)))
        store.sweep(older_than_s=0)
        assert [finding.kind for finding in audit(store, [digest])] == ["unreferenced-object"]
        if status == 0:
            break
    assert moment > 12


def test_a_killed_build_leaves_no_lock(store: LocalStore):
    holder = start("hold", store)
    try:
        assert read_line(holder) == "held"
        with pytest.raises(LockHeld, match=f"process {holder.pid} on .*since 20"):
            store.build_lock().acquire()
        with pytest.raises(LockHeld, match=r"after waiting 0\.1 s"):
            store.build_lock(wait=0.1).acquire()
    finally:
        holder.kill()
        holder.wait()
    assert (store.path / "locks" / "build").exists()
    with store.build_lock() as lock:
        assert lock.held
    assert not lock.held


def test_waiting_for_a_lock(store: LocalStore):
    holder = start("hold", store)
    try:
        assert read_line(holder) == "held"
        subprocess.Popen(["sh", "-c", f"sleep 0.3; kill -9 {holder.pid}"])
        with store.build_lock(wait=60) as lock:
            assert lock.held
    finally:
        holder.kill()
        holder.wait()


def test_of_racing_writers_of_a_ref_none_is_lost(store: LocalStore):
    racers = [start("count", store, "15") for _ in range(3)]
    assert [racer.wait(timeout=120) for racer in racers] == [0, 0, 0]
    final = store.ref("count")
    assert final is not None
    assert store.manifest(final).attributes["note"] == "45"
