"""``megafold tune``: tile sizes for the GPU at hand, as data."""

from pathlib import Path

import click

FAMILIES = ("evoattention", "triangle_attention", "gated_output")


@click.command(name="tune")
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
    help="Tokens; one bucket of the table for each. Repeatable.",
)
@click.option(
    "--seconds", type=click.FloatRange(1), default=20.0, show_default=True, help="To try for each kernel."
)
@click.option(
    "--out",
    type=click.Path(path_type=Path, dir_okay=False),
    help="The table to write. Default: the installed one of this architecture.",
)
def command(
    kernels: tuple[str, ...],
    dtypes: tuple[str, ...],
    lengths: tuple[int, ...],
    seconds: float,
    out: Path | None,
) -> None:
    """Measure the Triton kernels' tiles on this GPU and keep the fastest in its architecture's table.

    Entries of the table for other dtypes, channels and lengths stay. Without a table a GPU runs tiles that
    fit everywhere, correct and slower.
    """
    from megafold.trainer.kernels.tables import path_of
    from megafold.trainer.kernels.tune import tuned_table

    families = kernels or FAMILIES
    result = tuned_table(families, dtypes, sorted(lengths), seconds, lambda line: click.echo(line, err=True))
    path = out or path_of(result.target)
    result.write(path)
    click.echo(f"Tiles of {result.target} in {path}")
