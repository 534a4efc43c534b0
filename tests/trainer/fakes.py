"""A small network and data with the real ones' interfaces, quick enough to train in a test."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megafold.trainer.config import TrainConfig
from megafold.trainer.model.outputs import ModelOutputs, TrunkOutputs
from tests.trainer.batches import random_batch

N_TOKEN = 8


def quick_config(**changes: Any) -> TrainConfig:
    """Settings for a run of a second."""
    settings = {
        "steps": 14,
        "n_copies": 3,
        "n_cycles": 2,
        "learning_rate": 0.02,
        "warmup_steps": 2,
        "ema_decay": 0.9,
        "device": "cpu",
        "precision": "fp32",
        "checkpoint_every": 100,
        "log_every": 100,
        "plot_every": 1000,
    }
    return TrainConfig.from_dict({**settings, **changes})


class FakeModel(nn.Module):
    """Learns the positions of the atoms by heart: a table of offsets from the noised positions' mean.

    Draws its noise from the given generator and a dropout from torch's own, as the network does.
    """

    calls: Tensor

    def __init__(self, n_atom: int = 64, seed: int = 0, *, quiet: bool = False) -> None:
        """``quiet``: the same noise at every call, and no dropout."""
        super().__init__()
        self.quiet = quiet
        generator = torch.Generator().manual_seed(seed)
        self.table = nn.Parameter(torch.randn(n_atom, 3, generator=generator))
        self.pull = nn.Parameter(torch.zeros(()))
        self.bins = nn.Parameter(torch.zeros(64))
        self.unused = nn.Parameter(torch.ones(3))
        self.dropout = nn.Dropout(0.0 if quiet else 0.1)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(
        self,
        batch: Mapping[str, Tensor],
        *,
        n_cycles: int,
        n_copies: int,
        generator: torch.Generator | None = None,
    ) -> ModelOutputs:
        self.calls += n_cycles
        if self.quiet:
            generator = torch.Generator().manual_seed(0)
        coords = batch["coords"].unsqueeze(1)
        shape = (len(coords), n_copies, *coords.shape[2:])
        sigma = (torch.rand(1, n_copies, generator=generator) * 4 + 0.5).expand(shape[:2])
        noised = coords + sigma[..., None, None] * torch.randn(1, *shape[1:], generator=generator)
        guess = self.dropout(self.table[: shape[2]])
        pull = torch.sigmoid(self.pull)
        n_token = batch["token_mask"].shape[1]
        single = torch.zeros(len(coords), n_token, 1)
        logits = self.bins.expand(len(coords), n_token, n_token, 64)
        return ModelOutputs(
            trunk=TrunkOutputs(
                s_inputs=single,
                s_trunk=single,
                z_trunk=torch.zeros(len(coords), n_token, n_token, 1),
                distogram_logits=logits,
            ),
            denoised=pull * guess + (1 - pull) * noised,
            noised=noised,
            sigma=sigma,
            target=coords.expand(shape),
        )

    def sample(
        self,
        batch: Mapping[str, Tensor],
        *,
        n_cycles: int,
        n_samples: int,
        n_steps: int,
        generator: torch.Generator,
    ) -> Tensor:
        coords = batch["coords"].unsqueeze(1)
        shape = (len(coords), n_samples, *coords.shape[2:])
        return coords + 0.01 * torch.randn(shape, generator=generator)


class FakeFeed:
    """Batches that depend on their position alone, without an end; its own sampler state."""

    def __init__(self, *, bad: frozenset[int] = frozenset(), rank: int = 0) -> None:
        """``bad``: positions whose coordinates are not numbers."""
        self.position = 0
        self.bad = bad
        self.rank = rank

    def __iter__(self) -> Iterator[dict[str, Any]]:
        while True:
            self.position += 1
            yield self.batch(self.position)

    def batch(self, position: int) -> dict[str, Any]:
        batch = random_batch(0, N_TOKEN, unresolved=0.1)
        noise = torch.Generator().manual_seed(1000 * self.rank + position)
        shift = 0.1 * torch.randn(batch["coords"].shape, generator=noise)
        batch["coords"] = batch["coords"] + shift
        if position in self.bad:
            batch["coords"] = batch["coords"] * torch.nan
        return batch

    def state_dict(self) -> dict[str, int]:
        return {"seed": 0, "epoch": 0, "position": self.position}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        self.position = state["position"]
