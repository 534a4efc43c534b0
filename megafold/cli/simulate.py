"""``megafold simulate``: a training step on many GPUs, projected from what was measured on one."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from megafold.cli.locations import OutputFile

_GPUS = [2**power for power in range(11)]
#: Length of the comparison of schemes where none is asked for.
_TOKENS = 2048


@click.command(name="simulate", short_help="Project steps and longest samples on many GPUs.")
@click.option(
    "--inputs",
    "name",
    default="h200",
    show_default=True,
    help="Measured times, links and memory: h200, paper, or a JSON file of the same form.",
)
@click.option("--gpus", type=click.IntRange(1), multiple=True, help="Repeatable; default 1, 2, 4, … 1024.")
@click.option("--tokens", type=click.IntRange(1), help="Also project steps of so many tokens.")
@click.option(
    "--sp", type=click.IntRange(1), help="GPUs a sample, with --tokens; default: as few as hold it."
)
@click.option(
    "--schemes", is_flag=True, help="Also compare ways to share the trunk: ours, gathering rows, tiles."
)
@click.option("--plot", type=OutputFile(".png"), help="Draw that comparison: a PNG file.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    name: str,
    gpus: tuple[int, ...],
    tokens: int | None,
    sp: int | None,
    schemes: bool,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Project the longest complex, the time of a step and its exposed communication.

    The first table shares the longest sample that fits among the GPUs. With --tokens a second one shares
    each sample among --sp GPUs and spreads the others over samples.
    """
    from megafold.trainer.parallel.simulator import bundled, read_inputs

    path = bundled().get(name, Path(name))
    if not path.exists():
        raise click.UsageError(f"--inputs {name}: no such file; give one, or {' or '.join(bundled())}")
    inputs = read_inputs(path)
    numbers = gpus or _GPUS
    tables = {"longest": ("The longest sample that fits:", [_longest(inputs, number) for number in numbers])}
    if tokens is not None:
        divided = [number for number in numbers if number % (sp or 1) == 0]
        if not divided:
            raise click.UsageError(f"--sp {sp} divides none of --gpus {', '.join(map(str, numbers))}")
        tables["steps"] = (f"{tokens} tokens:", [_step(inputs, number, tokens, sp) for number in divided])
    length = tokens or _TOKENS
    if schemes:
        title = f"Ways to share the trunk; bytes and seconds for {length} tokens:"
        tables["schemes"] = (title, [row for number in numbers for row in _schemes(inputs, number, length)])
    if plot is not None:
        from megafold.trainer.parallel.simulator_plot import draw

        draw(inputs, numbers, length, plot)
    if as_json:
        click.echo(
            json.dumps({"inputs": inputs.name} | {key: rows for key, (_, rows) in tables.items()}, indent=1)
        )
        return
    click.echo(inputs.name)
    for title, rows in tables.values():
        click.echo(f"\n{title}")
        _print(rows)
    if plot is not None:
        click.echo(f"\nDrawn: {plot}")


def _schemes(inputs: Any, p: int, tokens: int) -> list[dict[str, Any]]:
    from megafold.trainer.parallel import schemes

    n = p * -(-tokens // p)
    return [
        {
            "gpus": p,
            "scheme": scheme,
            "tokens": schemes.longest(scheme, inputs, p),
            "block_mib": round(2 * schemes.sent(scheme, inputs.network, n, p) / 2**20, 1),
            "transfers_s": round(schemes.transfers_s(scheme, inputs, n, p), 3),
        }
        for scheme in schemes.SCHEMES
        if p > 1 and schemes.exists(scheme, p)
    ]


def _longest(inputs: Any, gpus: int) -> dict[str, Any]:
    from megafold.trainer.parallel.simulator import longest

    length, sp = longest(inputs.memory, gpus)
    row = {"gpus": gpus, "sp": sp, "tokens": length}
    row["times_longer"] = round(length / (inputs.baseline_length or inputs.memory.longest(1)), 2)
    return row if inputs.operators is None else {**row, **_times(inputs, gpus, sp, length)}


def _step(inputs: Any, gpus: int, tokens: int, sp: int | None) -> dict[str, Any]:
    from megafold.trainer.parallel.simulator import smallest_sp

    chosen = sp or smallest_sp(inputs, tokens, gpus)
    if chosen is None:
        return {"gpus": gpus, "sp": None, "tokens": tokens, "step_s": None}
    return {"gpus": gpus, "sp": chosen, "tokens": tokens, **_times(inputs, gpus, chosen, tokens)}


def _times(inputs: Any, gpus: int, sp: int, tokens: int) -> dict[str, Any]:
    from megafold.trainer.parallel.simulator import project

    projection = project(inputs, gpus=gpus, sp=sp, tokens=tokens)
    values = asdict(projection) | {
        "step_s": projection.step_s,
        "exposed_share": projection.exposed_s / projection.step_s,
        "samples_per_s": projection.samples_per_s,
    }
    return {key: round(value, 4) for key, value in values.items() if key not in ("gpus", "sp", "tokens")}


def _print(rows: list[dict[str, Any]]) -> None:
    titles = max((list(row) for row in rows), key=len)
    click.echo("  ".join(f"{title:>13s}" for title in titles))
    for row in rows:
        cells = [row.get(title) for title in titles]
        click.echo("  ".join(f"{'does not fit' if cell is None else cell:>13}" for cell in cells))
