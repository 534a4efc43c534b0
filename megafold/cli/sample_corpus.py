"""``megafold sample-corpus``: a small synthetic corpus, chemically real."""

import json
import sys
from dataclasses import asdict
from pathlib import Path

import click

from megafold.cli.locations import writing


@click.command(name="sample-corpus", short_help="Write a small made-up corpus to try things with.")
@click.argument("directory", type=click.Path(path_type=Path, file_okay=False))
@click.option("--entries", type=click.IntRange(1), default=24, show_default=True, help="Entries to write.")
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same bytes.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for scripts.")
def command(directory: Path, entries: int, seed: int, as_json: bool) -> None:
    """Write structures, alignments and template hits of made-up molecules into DIRECTORY.

    Proteins, DNA, RNA, ligands, ions, modified residues, glycans and disulfides, built from the CCD's
    chemistry with plausible geometry: enough to try everything without a PDB mirror. Thousands of entries
    serve tests of scale.
    """
    from megafold.pipeline.sample_corpus import write_sample_corpus

    def show(done: int, total: int) -> None:
        if not as_json and sys.stderr.isatty():
            click.echo(f"\r{done}/{total} entries", err=True, nl=done == total)

    with writing(directory):
        corpus = write_sample_corpus(directory, entries=entries, seed=seed, progress=show)
    if as_json:
        click.echo(json.dumps(asdict(corpus), indent=1, default=str))
        return
    click.echo(f"{entries} entries in {corpus.structures}, alignments in {corpus.alignments}")
    click.echo(f"Next: megafold cache build {corpus.structures} CACHE --alignments {corpus.alignments}")
