"""Tile sizes of the kernels, by architecture, dtype and channels: a table's, or safe ones.

No length enters: a block is a run of positions, of which even a short sequence has thousands.
"""

from dataclasses import dataclass
from typing import Final

import torch

from megafold.trainer.kernels.tables import Family, launch_options


@dataclass(frozen=True)
class Tile:
    """``rows`` positions by ``channels`` at a time, and how a program runs.

    ``resident``: how many programs share a multiprocessor, of the kernels that keep sums and of held forms.
    ``registers`` and ``instruction``: see :func:`~megafold.trainer.kernels.tables.launch_options`. ``held``:
    as many programs as are resident go through all positions, with the matrices in shared memory: of the
    projections and, in 2 bytes, of the input's gradient, whatever ``channels`` says; without the cap of
    registers, of the output's gradient where the matrices are four tiles of ``channels``. ``fetch``: what is
    read later is fetched into the L2 cache when a program begins, or during the block before. NVIDIA GPUs
    alone have both, but for held projections of float32.
    """

    rows: int
    channels: int
    warps: int
    stages: int
    resident: int = 1
    registers: int | None = None
    held: bool = False
    fetch: bool = False
    instruction: int | None = None

    def options(self) -> dict[str, int]:
        """What a launch takes of it beside the kernel's own parameters."""
        return launch_options(self.warps, self.stages, self.registers, self.instruction)


@dataclass(frozen=True, kw_only=True)
class Tiles:
    """One tile for each kernel."""

    project: Tile
    output: Tile
    output_gradient: Tile
    input_gradient: Tile
    weight_gradient: Tile
    output_weight_gradient: Tile


def _alike(rows: int, channels: int, warps: int, stages: int, resident: int) -> Tiles:
    tile = Tile(rows, channels, warps, stages, resident)
    return Tiles(
        project=tile,
        output=tile,
        output_gradient=tile,
        input_gradient=tile,
        weight_gradient=tile,
        output_weight_gradient=tile,
    )


#: Fits the smallest shared memory (64 KiB on CDNA) for 128 channels of float32.
_SAFE: Final = _alike(16, 16, 4, 1, 1)
#: The same for 2 bytes.
_SAFE_HALF: Final = _alike(32, 32, 4, 1, 1)

#: By the larger of Z and C.
FAMILY: Final = Family(
    "triangle_multiplication", Tile, Tiles, lambda itemsize, _channels: _SAFE_HALF if itemsize == 2 else _SAFE
)


def tiles(target: str, dtype: torch.dtype, channels: int) -> Tiles:
    """Tiles for inputs of ``dtype``; ``channels`` is the larger of Z and C."""
    return FAMILY.find(target, dtype.itemsize, channels)
