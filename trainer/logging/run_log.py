"""Everything a run writes about its steps."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megafold.trainer.config import TrainConfig
from megafold.trainer.logging.csv_log import CsvLog
from megafold.trainer.logging.data_wait import DataWait
from megafold.trainer.logging.plot import draw_losses

_PARTS = ("mse", "smooth_lddt", "distogram", "bond")


class RunLog:
    """The console, ``metrics.csv``, ``tensorboard/`` and ``loss.png`` of a run.

    Every step goes to the file and to TensorBoard, every ``log_every``-th to the console; at the end, how
    much of the time the run waited for data.
    """

    def __init__(self, folder: Path, config: TrainConfig, last_step: int) -> None:
        """``last_step``: the step that the run resumes after, 0 for a new run."""
        self.csv_path = folder / "metrics.csv"
        self.png_path = folder / "loss.png"
        self._config = config
        self._csv = CsvLog(self.csv_path, last_step)
        self._board = _tensorboard(folder / "tensorboard", last_step)
        self.data_wait = DataWait()
        self._first_step = last_step
        self._began = time.perf_counter()

    def __enter__(self) -> "RunLog":
        return self

    def __exit__(self, *error: object) -> None:
        self._csv.close()
        if self._board is not None:
            self._board.close()
        if self.data_wait.steps:
            self.say(self.data_wait.line())
        self._draw()

    def step(self, values: Mapping[str, float | int]) -> None:
        """Record a step: ``step``, ``loss`` and its parts, ``learning_rate``, ``grad_norm``, and so on."""
        self._csv.append(values)
        self.data_wait.add(values["data_wait"] * values["step_s"], values["step_s"])
        step = int(values["step"])
        if self._board is not None:
            for name, value in values.items():
                if name != "step":
                    self._board.add_scalar(name, value, step)
        if step % self._config.log_every == 0 or step in (self._first_step + 1, self._config.steps):
            self.say(self._line(values))
        if step % self._config.plot_every == 0:
            self._draw()

    def _draw(self) -> None:
        """Draw the loss; a disk that has no room for that ends no run, and hides no error that does."""
        try:
            draw_losses(self.csv_path, self.png_path)
        except OSError as error:
            self.say(f"{self.png_path} is not drawn: {error}")

    def say(self, message: str) -> None:
        """Print a line now."""
        print(message, flush=True)

    def _line(self, values: Mapping[str, float | int]) -> str:
        step = int(values["step"])
        per_step = (time.perf_counter() - self._began) / max(step - self._first_step, 1)
        left = (self._config.steps - step) * per_step
        parts = "  ".join(f"{name} {values[name]:.3f}" for name in _PARTS if name in values)
        skipped = f"  skipped {values['skipped']}" if values["skipped"] else ""
        return (
            f"step {step}/{self._config.steps}  loss {values['loss']:.4f}  {parts}  "
            f"lr {values['learning_rate']:.2e}  grad {values['grad_norm']:.2f}  "
            f"{values['samples_per_s']:.2f} samples/s  data {100 * values['data_wait']:.1f}%  "
            f"ETA {_duration(left)}{skipped}"
        )


class SilentLog:
    """The log of the ranks that do not talk."""

    def __enter__(self) -> "SilentLog":
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def step(self, values: Mapping[str, float | int]) -> None:
        """Nothing."""

    def say(self, message: str) -> None:
        """Nothing."""


def _duration(seconds: float) -> str:
    """Hours, minutes and seconds, as in 1:02:03."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"


def _tensorboard(folder: Path, last_step: int) -> Any:
    """A TensorBoard writer, which forgets steps that will run again; None where it is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        print("No TensorBoard event files are written: pip install tensorboard", flush=True)
        return None
    return SummaryWriter(str(folder), purge_step=last_step + 1 if last_step else None)
