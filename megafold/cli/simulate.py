"""``megafold simulate``: a training step on many GPUs, projected from what was measured on one."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

_GPUS = [2**power for power in range(11)]


@click.command(name="simulate")
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
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(name: str, gpus: tuple[int, ...], tokens: int | None, sp: int | None, as_json: bool) -> None:
    """Project the longest complex, the time of a step and its exposed communication.

    The first table shares the longest sample that fits among the GPUs. With --tokens a second one shares
    each sample among --sp GPUs and spreads the others over samples.
    """
    from megafold.trainer.parallel.simulator import bundled, read_inputs

    inputs = read_inputs(bundled().get(name, Path(name)))
    lengths = [_longest(inputs, number) for number in gpus or _GPUS]
    steps = [] if tokens is None else [_step(inputs, number, tokens, sp) for number in gpus or _GPUS]
    if as_json:
        click.echo(json.dumps({"inputs": inputs.name, "longest": lengths, "steps": steps}, indent=1))
        return
    click.echo(f"{inputs.name}\n\nThe longest sample that fits:")
    _print(lengths)
    if tokens is not None:
        click.echo(f"\n{tokens} tokens:")
        _print(steps)


def _longest(inputs: Any, gpus: int) -> dict[str, Any]:
    from megafold.trainer.parallel.simulator import longest

    length, sp = longest(inputs.memory, gpus)
    row = {"gpus": gpus, "sp": sp, "tokens": length}
    row["times_longer"] = round(length / (inputs.baseline_length or inputs.memory.longest(1)), 2)
    return row if inputs.operators is None else {**row, **_times(inputs, gpus, sp, length)}


def _step(inputs: Any, gpus: int, tokens: int, sp: int | None) -> dict[str, Any]:
    from megafold.trainer.parallel.simulator import smallest_sp

    chosen = sp or smallest_sp(inputs, tokens, gpus)
    if chosen is None or gpus % chosen:
        return {"gpus": gpus, "sp": chosen, "tokens": tokens}
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
