"""Exponential moving average of the weights (AF3 SI 5.4)."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor, nn


class WeightAverage:
    """Moving average of a model's parameters; buffers are taken as they are."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        """Of ``model``, whose parameters and buffers stay the same tensors."""
        self._decay = decay
        # Gathered once: on a GPU it would take longer, at every step, than moving the average.
        self._followed = model.state_dict(keep_vars=True)
        self._average = {name: value.detach().clone() for name, value in self._followed.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Move the average towards the model's present weights, by 1 - decay."""
        floating = [name for name, value in self._followed.items() if value.is_floating_point()]
        torch._foreach_lerp_(
            [self._average[name] for name in floating],
            [self._followed[name] for name in floating],
            1.0 - self._decay,
        )
        for name in self._followed.keys() - set(floating):
            self._average[name].copy_(self._followed[name])

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Within the context the model has the averaged weights; its own come back at the end."""
        own = {name: value.detach().clone() for name, value in model.state_dict().items()}
        model.load_state_dict(self._average)
        try:
            yield
        finally:
            model.load_state_dict(own)

    def state_dict(self) -> dict[str, Tensor]:
        """The averaged weights, under the model's own names."""
        return dict(self._average)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take over averaged weights.

        Raises:
            KeyError: the names are not the model's.
        """
        if state.keys() != self._average.keys():
            raise KeyError(
                f"averaged weights of another model: {sorted(state.keys() ^ self._average.keys())[:5]}"
            )
        for name, value in state.items():
            self._average[name].copy_(value)
