"""What the tests' other processes do. Run as ``python processes.py WHAT CACHE [ARGUMENT …]``."""

import contextlib
import itertools
import sys
import time

from megafold.cache_store import LocalStore, RefMoved
from tests.cache_store.store_conformance import small_content, small_manifest


def publish(store: LocalStore, seed: str) -> None:
    """Publish until killed: objects (others write some of them, too), manifest, ledger, ref, journal."""
    with store.journal(f"writer-{seed}") as journal:
        for number in itertools.count():
            own = store.put(small_content(1000 * int(seed) + number))
            shared = store.put(small_content(number))
            journal.append({"number": number, "own": str(own)})
            manifest = store.put_manifest(small_manifest(own, shared, note=seed))
            store.put_ledger([])
            with contextlib.suppress(RefMoved):
                store.move_ref("main", store.ref("main"), manifest)
            print(number, flush=True)


def hold(store: LocalStore) -> None:
    """Hold the build lock until killed."""
    with store.build_lock():
        print("held", flush=True)
        time.sleep(600)


def count(store: LocalStore, times: str) -> None:
    """Add to the number that ref ``count`` stands for, again and again, by compare-and-swap."""
    added = 0
    while added < int(times):
        now = store.ref("count")
        number = int(str(store.manifest(now).attributes["note"])) if now else 0
        new = store.put_manifest(small_manifest(note=str(number + 1)))
        try:
            store.move_ref("count", now, new)
            added += 1
        except RefMoved:
            continue


if __name__ == "__main__":
    what, path, *rest = sys.argv[1:]
    store = LocalStore.at(path)
    if what == "publish":
        publish(store, *rest)
    elif what == "hold":
        hold(store)
    else:
        count(store, *rest)
