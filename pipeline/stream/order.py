"""In what order ranks and workers go through the data: an elastic order whose state is three integers.

The samples of all epochs form one sequence: index 0 to the last of epoch 0, then index 0 of epoch 1, and so
on. Of ``R`` ranks each takes every ``R``-th of what comes next. An epoch's end is no border: where it does
not go round, the last turn's ranks go on with the next epoch. So whatever the number of ranks, and however
often it changes, all samples are used once and in the same order.

What a sample is depends on (seed, epoch, index) and the manifest alone (``sampling.py``), so that order
needs no shuffling.
"""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from megafold.pipeline.errors import InputError


@dataclass(frozen=True)
class SamplerState:
    """Where training stands: everything needed to go on exactly.

    ``position`` counts the samples of the epoch that all ranks together have had. ``seed`` is a record of the
    stream's, which alone decides samples (``StreamConfig.seed``): order needs none.
    """

    seed: int = 0
    epoch: int = 0
    position: int = 0

    def __post_init__(self) -> None:
        if min(self.seed, self.epoch, self.position) < 0:
            raise InputError(f"{self}: none of the numbers may be negative", reason="sampler-state")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "SamplerState":
        """The inverse of :meth:`to_dict`.

        Raises:
            InputError: it is no state of a sampler.
        """
        if set(values) != {"seed", "epoch", "position"}:
            raise InputError(
                f"a sampler's state has seed, epoch and position, not {', '.join(map(str, values))}",
                reason="sampler-state",
            )
        return cls(**{name: int(value) for name, value in values.items()})

    def to_dict(self) -> dict[str, int]:
        """Plain values, for checkpoints."""
        return asdict(self)

    def advanced(self, samples: int, epoch_size: int) -> "SamplerState":
        """The state after ``samples`` more samples, over all ranks, of epochs of ``epoch_size``."""
        epochs, position = divmod(self.position + samples, epoch_size)
        return SamplerState(self.seed, self.epoch + epochs, position)

    def rounds(self, epoch_size: int, world_size: int = 1) -> int:
        """Samples that each rank takes until this epoch's are used up."""
        return -(-max(0, epoch_size - self.position) // world_size)

    def indices(self, epoch_size: int, rank: int = 0, world_size: int = 1) -> Iterator[tuple[int, int]]:
        """(epoch, index) of one rank until this epoch's samples are used up.

        Every rank gets the same number, so that ranks never wait for each other; the last turn may reach
        into the next epoch, which then starts behind it (:meth:`advanced`).
        """
        for turn in range(self.rounds(epoch_size, world_size)):
            here = self.advanced(turn * world_size + rank, epoch_size)
            yield here.epoch, here.position


def find_sampler_state(checkpoint: Any) -> SamplerState:
    """The one state of a sampler within nested mappings, such as the state of torchdata's StatefulDataLoader.

    That loader goes on from its own state with as many workers as before, no other number; with this, a
    sampler can be set to the same place for any loader.

    Raises:
        InputError: there is none, or several that differ.
    """
    found = set(_sampler_states(checkpoint))
    if len(found) != 1:
        raise InputError(
            f"the checkpoint holds {len(found)} states of a sampler, not one", reason="sampler-state"
        )
    return found.pop()


def _sampler_states(value: Any) -> Iterator[SamplerState]:
    if isinstance(value, Mapping):
        if set(value) == {"seed", "epoch", "position"}:
            yield SamplerState.from_mapping(value)
        else:
            for inner in value.values():
                yield from _sampler_states(inner)
