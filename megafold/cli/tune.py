"""``megafold tune``: tile sizes for the GPU at hand, as data."""

import sys
from pathlib import Path

import click

from megafold.cli.cores import usable_cores
from megafold.cli.locations import OutputFile

FAMILIES = (
    "evoattention",
    "triangle_attention",
    "gated_output",
    "transition",
    "triangle_multiplication",
    "layernorm_linear",
    "layernorm_linear_narrow",
    "layernorm",
    "adaln",
)
#: Processes that compile where there are more cores: each holds inputs of its own on the GPU.
_MOST_WORKERS = 8


@click.command(name="tune", short_help="Measure and keep the Triton kernels' tiles here.")
@click.option(
    "--kernels", multiple=True, type=click.Choice(FAMILIES), help="Which to tune; repeatable. Default: all."
)
@click.option(
    "--dtype",
    "dtypes",
    multiple=True,
    type=click.Choice(["bf16", "fp32"]),
    default=("bf16",),
    show_default=True,
    help="Repeatable. 16-bit types share their tiles.",
)
@click.option(
    "--length",
    "lengths",
    multiple=True,
    type=click.IntRange(17, 4096),
    default=(128, 384, 768),
    show_default=True,
    help="Tokens; one bucket of the attention's table for each. Repeatable. Other kernels take the longest.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(1),
    default=20.0,
    show_default=True,
    help="For each kernel, to compile candidates and as much to measure them.",
)
@click.option(
    "--workers",
    type=click.IntRange(0),
    help="Processes that compile candidates.  [default: one for each core, at most 8]",
)
@click.option(
    "--out",
    type=OutputFile(".json"),
    help="The table to write. Default: the installed one of this architecture.",
)
def command(
    kernels: tuple[str, ...],
    dtypes: tuple[str, ...],
    lengths: tuple[int, ...],
    seconds: float,
    workers: int | None,
    out: Path | None,
) -> None:
    """Measure the Triton kernels' tiles on this GPU and keep the fastest in its architecture's table.

    A tile is replaced by one that is at least 2 % faster. Entries of the table for other dtypes, channels and
    lengths stay. The table is written after each family and size: run the same command again to go on after
    an interruption. Without a table a GPU runs tiles that fit everywhere, correct and slower.
    """
    from megafold.trainer.kernels.evoattention.tiles import architecture
    from megafold.trainer.kernels.tables import path_of
    from megafold.trainer.kernels.tune import subjects, tune
    from megafold.trainer.kernels.tune_problems import gpu

    path = out or path_of(architecture(gpu()))
    if workers is None:
        workers = min(_MOST_WORKERS, usable_cores())
    todo = subjects(kernels or FAMILIES, dtypes, lengths)
    try:
        result = tune(todo, path, seconds, workers, lambda line: click.echo(line, err=True))
    except KeyboardInterrupt:
        click.echo(f"Interrupted. What was found is in {path}; the same command goes on from here.", err=True)
        sys.exit(130)
    click.echo(f"Tiles of {result.target} in {path}")
