"""The settings of samples that commands share: one place for the options and for what they mean."""

from collections.abc import Callable
from typing import Any, TypeVar

import click

F = TypeVar("F", bound=Callable[..., Any])

#: Atoms of a crop for each of its tokens, at most; and some for a last residue.
_ATOMS_PER_TOKEN, _MORE_ATOMS = 12, 24
#: Template hits that are looked at, at least.
_CANDIDATES = 20

_OPTIONS = (
    click.option(
        "--tokens", type=click.IntRange(1), default=384, show_default=True, help="Tokens of a crop."
    ),
    click.option(
        "--msa-rows",
        type=click.IntRange(1),
        default=1024,
        show_default=True,
        help="Rows of the MSA, at most.",
    ),
    click.option(
        "--templates", type=click.IntRange(0), default=4, show_default=True, help="Templates, at most."
    ),
    click.option("--seed", type=int, default=0, show_default=True),
)


def stream_options(command: F) -> F:
    """The options ``--tokens``, ``--msa-rows``, ``--templates`` and ``--seed``."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def stream_settings(values: dict[str, Any]) -> dict[str, Any]:
    """What the options' ``values`` mean, as settings of a stream (nested, of ``StreamConfig``'s names)."""
    tokens, templates = values["tokens"], values["templates"]
    return {
        "seed": values["seed"],
        "crop": {"tokens": tokens, "atoms": _ATOMS_PER_TOKEN * tokens + _MORE_ATOMS},
        "msa": {"rows": values["msa_rows"]},
        "template": {"count": templates, "candidates": max(_CANDIDATES, templates)},
    }
