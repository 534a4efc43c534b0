"""``megafold sample``: what a model would see of an entry."""

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import click

from megafold.cli.locations import CacheLocation, OutputFile, writing
from megafold.cli.stream_options import stream_options, stream_settings

_METHODS = ("contiguous", "spatial", "interface")
_ANY_DAYS = 100_000


@click.group(name="sample")
def command() -> None:
    """Look at training samples."""


@command.command(short_help="Draw what a model would see of ENTRY.")
@click.argument("cache", type=CacheLocation())
@click.argument("entry")
@click.option("--index", type=click.IntRange(0), default=0, show_default=True, help="Which of its samples.")
@click.option("--epoch", type=click.IntRange(0), default=0, show_default=True)
@click.option(
    "--crop",
    "method",
    type=click.Choice(_METHODS),
    help="Crop in this way alone; default: each with AlphaFold 3's probability.",
)
@stream_options
@click.option("--any-date", is_flag=True, help="Let templates in that are newer than the entry allows.")
@click.option(
    "-o",
    "--out",
    type=OutputFile(".png"),
    help="Picture to write; default: <ENTRY>-<INDEX>.png here.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
def show(cache: Path | str, entry: str, out: Path | None, as_json: bool, **values: Any) -> None:
    """Draw sample --index of ENTRY: crop, tokens, alignment, templates, bonds, contacts and coordinates.

    It is what training on this entry alone would see with the same seed, epoch and index.
    """
    from megafold.pipeline.drawing import draw_sample
    from megafold.pipeline.drawing.sample import counts_of, counts_text

    stream = _stream(cache, entry, values)
    sample = stream.sample(values["index"], epoch=values["epoch"])
    path = out or Path(f"{sample.meta['entry']}-{values['index']}.png")
    with writing(path):
        draw_sample(sample.features, sample.meta, path)
    names = ("entry", "assembly", "crop_method", "crop_center", "paired_rows", "templates_rejected")
    facts = {name: sample.meta[name] for name in names} | counts_of(sample.features) | {"picture": str(path)}
    if as_json:
        click.echo(json.dumps(facts, indent=1))
        return
    click.echo(f"{facts['entry']}: {facts['crop_method']} crop, {counts_text(sample.features, sample.meta)}")
    rejected = ", ".join(f"{number} {reason}" for reason, number in facts["templates_rejected"].items())
    if rejected:
        click.echo(f"templates left out: {rejected}")
    if values["method"] is not None and values["method"] != facts["crop_method"]:
        click.echo(f"No {values['method']} crop of it is possible; this one is {facts['crop_method']}.")
    click.echo(path)


def _stream(cache: Path | str, entry: str, values: dict[str, Any]) -> Any:
    """The stream of one entry.

    Raises:
        click.UsageError: the cache has no such entry; the message has the nearest names.
    """
    from megafold.cache_store import open_store
    from megafold.pipeline.stream import Stream, StreamConfig
    from megafold.pipeline.stream.mixture import merged_settings
    from megafold.pipeline.stream.sample import current_manifest

    store = open_store(cache)
    digest = current_manifest(store)
    known = store.manifest(digest).table["entry"].to_pylist()
    found = entry if entry in known else entry.lower()
    if found not in known:
        near = get_close_matches(found, known, n=5, cutoff=0.5)
        hint = f"the nearest are {', '.join(near)}" if near else "none is called alike"
        raise click.UsageError(
            f"{cache} has no entry {entry}: {hint}; "
            f"`megafold cache ls {cache}` lists its {len(known)} entries"
        )
    method = values["method"]
    chances: dict[str, Any] = {} if method is None else {name: float(name == method) for name in _METHODS}
    dates: dict[str, Any] = {"days_before_release": -_ANY_DAYS} if values["any_date"] else {}
    settings = merged_settings(
        stream_settings(values), {"crop": chances, "template": dates, "sampling": {"entries": [found]}}
    )
    return Stream(store, StreamConfig.from_mapping(settings), digest)
