"""``megafold cache gc``: free the space of what no snapshot names."""

import json
from pathlib import Path

import click

from megafold.cli.locations import CacheFolder

_HOUR_S = 3600.0


@click.command(short_help="Remove objects that nothing needs any more.")
@click.argument("cache", type=CacheFolder())
@click.option("--dry-run", is_flag=True, help="Remove nothing, and say what would be removed.")
@click.option(
    "--older-than",
    type=click.FloatRange(0),
    default=24.0,
    show_default=True,
    metavar="HOURS",
    help="Keep what was written or wanted since.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
def gc(cache: Path, dry_run: bool, older_than: float, as_json: bool) -> None:
    """Remove objects of CACHE that no snapshot names and no interrupted build needs.

    Each build that changes something leaves the snapshot before it in manifests/, as a training run may have
    been recorded with it; its objects stay as long as its file does. Nothing is removed while a build runs.
    """
    from megafold.cache_store import LocalStore, collect
    from megafold.pipeline.builder.garbage import needed_objects

    store = LocalStore.at(cache)
    with store.build_lock() as lock:
        done = collect(
            store, needed_objects(store), older_than_s=older_than * _HOUR_S, lock=lock, dry_run=dry_run
        )
        if not dry_run:
            store.sweep(lock=lock)
    if as_json:
        facts = {
            "removed": [str(digest) for digest in done.removed],
            "freed_bytes": done.freed_bytes,
            "too_young": done.too_young,
            "dry_run": dry_run,
        }
        click.echo(json.dumps(facts, indent=1))
        return
    young = (
        f"; {done.too_young} that nothing names are younger than {older_than:g} h" if done.too_young else ""
    )
    click.echo(
        f"{len(done.removed)} objects {'would be' if dry_run else 'were'} removed "
        f"({done.freed_bytes / 1e6:.1f} MB){young}"
    )
