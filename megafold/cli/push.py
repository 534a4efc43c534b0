"""``megafold cache push``: copy a cache behind a URL."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from megafold.cli.locations import CacheFolder


@click.command(short_help="Copy the snapshot of CACHE to a URL.")
@click.argument("cache", type=CacheFolder())
@click.argument("url")
@click.option("--recheck", is_flag=True, help="Read what is there already, and replace what is damaged.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
def push(cache: Path, url: str, recheck: bool, as_json: bool) -> None:
    """Copy the snapshot of CACHE to URL (s3://bucket/folder, gs://…, file:///…).

    Objects first, then the manifest, then the ref, so that readers see the old snapshot or the new one. Run
    it again after an interruption: what is there is not copied again. Nothing is deleted.
    """
    from megafold.cache_store import Digest, LocalStore, RemoteError, Snapshot, is_url
    from megafold.cache_store import push as push_snapshot
    from megafold.pipeline.manifest import referenced_digests

    if not is_url(url):
        raise RemoteError(f"{url} is no URL: give s3://bucket/folder, gs://bucket/folder or file:///folder")
    store = LocalStore.at(cache)
    manifest = store.manifest()
    ledger = str(manifest.attributes.get("ledger") or "")
    snapshot = Snapshot(
        manifest=manifest.digest(),
        objects=frozenset(referenced_digests(manifest)),
        ledgers=frozenset({Digest.parse(ledger)} if ledger else ()),
    )
    done = push_snapshot(store, url, snapshot, recheck=recheck, progress=_progress(silent=as_json))
    if as_json:
        click.echo(json.dumps(asdict(done) | {"manifest": str(snapshot.manifest)}, indent=1))
        return
    click.echo(
        f"{done.uploaded} objects copied ({done.uploaded_bytes / 1e6:.1f} MB), {done.present} were there; "
        f"main {'now names' if done.ref_moved else 'named already'} {snapshot.manifest}"
    )


def _progress(*, silent: bool) -> Any:
    """A progress line on a terminal."""

    def show(done: int, total: int) -> None:
        if not silent and sys.stderr.isatty():
            click.echo(f"\r{done}/{total} objects", err=True, nl=done == total)

    return show
