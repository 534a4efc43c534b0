"""Rows of the MSA that differ between passes through the trunk (algorithm 8, line 2).

Shapes: B batch, R draws of rows, M rows, N tokens.
"""

from collections.abc import Mapping
from typing import Any, Final

from torch import Tensor

#: Key of a loader's batch that has the MSA's features [B, R, M, N] of each pass, by name.
DRAWS: Final = "recycles"


def named_draws(batch: Mapping[str, Any]) -> dict[str, Any]:
    """The draws of a loader's batch under names of their own, as the model takes them; none without any."""
    return {f"{DRAWS}.{name}": value for name, value in batch.get(DRAWS, {}).items()}


def with_msa_of(batch: dict[str, Tensor], cycle: int) -> dict[str, Tensor]:
    """The batch with the MSA rows of pass ``cycle``, from 0.

    In the batch are the draws as :func:`named_draws` names them. Passes beyond the last draw begin with the
    first again. Without draws all passes have the batch's own rows.
    """
    start = f"{DRAWS}."
    drawn = {
        name.removeprefix(start): value[:, cycle % value.shape[1]]
        for name, value in batch.items()
        if name.startswith(start)
    }
    return {**batch, **drawn} if drawn else batch
