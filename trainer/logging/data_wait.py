"""How much of a run is spent waiting for data."""

import math


class DataWait:
    """Adds up what the steps of a run waited for their batches.

    The first step of a run waits for loaders to start, which a longer run would not notice: it is kept apart.
    """

    def __init__(self) -> None:
        self.steps = 0
        #: Seconds that the first step waited; NaN before it.
        self.first_s = math.nan
        #: The longest wait of a later step, seconds.
        self.longest_s = 0.0
        self._waited_s = 0.0
        self._all_s = 0.0

    def add(self, waited_s: float, step_s: float) -> None:
        """A step of ``step_s`` seconds, ``waited_s`` of which it waited for data."""
        self.steps += 1
        if self.steps == 1:
            self.first_s = waited_s
            return
        self._waited_s += waited_s
        self._all_s += step_s
        self.longest_s = max(self.longest_s, waited_s)

    @property
    def share(self) -> float:
        """Waiting over all time of the steps after the first, 0 to 1; NaN without such a step."""
        return self._waited_s / self._all_s if self._all_s else math.nan

    def line(self) -> str:
        """A sentence for the console."""
        text = f"Waited {self.first_s:.1f} s for the first batch"
        if self.steps < 2:
            return text
        return (
            f"{text}, then {100 * self.share:.2f} % of the time for data: {self._waited_s:.2f} s of "
            f"{self._all_s:.1f} s in {self.steps - 1} steps, {self.longest_s:.2f} s at most"
        )
