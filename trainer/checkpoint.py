"""Checkpoints: whole or absent, bounded in number, and sure of what they belong to."""

import contextlib
import os
import random
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from torch import nn

from megafold.trainer.errors import CheckpointError

FORMAT: Final = 1
_PARTS: Final = frozenset(
    "format step model optimizer average sampler rng config data skipped smoothed_loss best_score".split()
)


class CheckpointFolder:
    """The checkpoints of one run: ``step-00000500.pt`` and so on, and ``best.pt``.

    A file is written under a temporary name, synced and renamed, so a name in the folder always stands for
    a complete checkpoint, whenever the process died.
    """

    def __init__(self, path: Path, keep: int = 3) -> None:
        """``keep``: how many of the newest to keep besides the best."""
        self.path = path
        self._keep = keep

    def steps(self) -> dict[int, Path]:
        """Checkpoints by step, the oldest first."""
        found = ((path.stem.removeprefix("step-"), path) for path in self.path.glob("step-*.pt"))
        return dict(sorted((int(number), path) for number, path in found if number.isdigit()))

    def latest(self) -> Path | None:
        """The newest checkpoint, if there is any."""
        return next(reversed(self.steps().values()), None)

    @property
    def best(self) -> Path:
        """Where the best checkpoint is, once there is one."""
        return self.path / "best.pt"

    def save(self, state: Mapping[str, Any], *, is_best: bool = False) -> Path:
        """Write a checkpoint, then remove those that are too many.

        ``state`` holds the parts that :func:`load_checkpoint` asks for, except ``format``.

        Raises:
            CheckpointError: the disk does not take it; those that are there stay as they are.
        """
        path = self.path / f"step-{state['step']:08d}.pt"
        temporary = self.path / f".{path.name}.tmp"
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                torch.save({"format": FORMAT, **state}, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except (OSError, RuntimeError) as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            # Of a full disk torch's writer tells in words of its own, while it handles the system's.
            cause = error if isinstance(error, OSError) else error.__context__
            if not isinstance(cause, OSError):
                raise
            raise CheckpointError(
                f"{path} cannot be written ({cause}). Make room for it, then go on from the newest one that "
                f"is there ({self.latest() or 'none yet'})"
            ) from error
        if is_best:
            self._link_best(path)
        _sync_folder(self.path)
        for old in list(self.steps().values())[: -self._keep]:
            old.unlink()
        return path

    def _link_best(self, path: Path) -> None:
        """Make ``best.pt`` a second name of ``path``, or a copy where the file system has no links."""
        temporary = self.path / ".best.pt.tmp"
        temporary.unlink(missing_ok=True)
        try:
            os.link(path, temporary)
        except OSError:
            temporary.write_bytes(path.read_bytes())
        temporary.replace(self.best)


def _sync_folder(path: Path) -> None:
    """Make renames in a folder outlast a power cut."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def load_checkpoint(path: Path) -> dict[str, Any]:
    """Read a checkpoint onto the CPU. Nothing in the file is executed (``weights_only``).

    Returns:
        ``step``, ``model``, ``optimizer``, ``average`` (weights' moving average), ``sampler``, ``rng`` (one
        item a rank), ``config``, ``data`` (identity of the data), ``skipped``, ``smoothed_loss`` and
        ``best_score``.

    Raises:
        CheckpointError: there is no such file, it cannot be read, or it is no checkpoint of this format.
    """
    if not path.is_file():
        raise CheckpointError(f"{path}: no such checkpoint")
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises many kinds for a damaged or foreign file
        # Not with torch's own text: it advises to load the file without weights_only.
        raise CheckpointError(
            f"{path}: not a readable checkpoint ({type(error).__name__}): damaged, or another kind of file. "
            "Move it away, and --resume takes the one before it in the same folder"
        ) from error
    if not isinstance(state, dict) or state.keys() != _PARTS:
        raise CheckpointError(f"{path}: not a checkpoint of a training run")
    if state["format"] != FORMAT:
        raise CheckpointError(f"{path}: checkpoint format {state['format']}, this version reads {FORMAT}")
    return state


def require_same_data(path: Path, stored: Mapping[str, Any], present: Mapping[str, Any]) -> None:
    """Refuse to go on with other data than a checkpoint was trained on.

    Both mappings are opaque: by convention ``manifest`` is the digest of the cache's manifest, and
    ``stream`` the configuration of the sample stream.

    Raises:
        CheckpointError: they differ; the message names where.
    """
    if differences := list(_differences(stored, present)):
        raise CheckpointError(
            f"{path} was trained on other data ({'; '.join(differences)}). Resume with the same manifest and "
            "stream settings, or allow other data (--allow-other-data)."
        )


def _differences(stored: Mapping[str, Any], present: Mapping[str, Any], within: str = "") -> Iterator[str]:
    for name in sorted(stored.keys() | present.keys()):
        then, now = stored.get(name), present.get(name)
        if isinstance(then, Mapping) and isinstance(now, Mapping):
            yield from _differences(then, now, f"{within}{name}.")
        elif then != now:
            yield f"{within}{name} was {then!r}, is {now!r}"


def with_new_parts(state: dict[str, Any], model: nn.Module, prefix: str) -> dict[str, Any]:
    """A checkpoint for a model that has been given parts since, whose names begin with ``prefix``.

    They start as the model has them, without moments; they must come last among its parameters. A checkpoint
    that lacks nothing, or anything else, is returned as it is.
    """
    present = model.state_dict()
    new = {name: value for name, value in present.items() if name not in state["model"]}
    if not new or not all(name.startswith(prefix) for name in new):
        return state
    trained = sum(parameter.requires_grad for parameter in model.parameters())
    groups = [{**group, "params": list(range(trained))} for group in state["optimizer"]["param_groups"]]
    return {
        **state,
        "model": {**state["model"], **new},
        "average": {**state["average"], **new},
        "optimizer": {**state["optimizer"], "param_groups": groups},
    }


def random_state(generator: torch.Generator) -> dict[str, Any]:
    """States of all random number generators: Python's, numpy's, torch's and the trainer's own.

    numpy's is the legacy global one: the trainer has no use for it, but a data set might.
    """
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)  # noqa: NPY002
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "generator": generator.get_state(),
    }


def restore_random_state(state: Mapping[str, Any], generator: torch.Generator) -> None:
    """Put the generators where :func:`random_state` found them.

    CUDA's are left alone where the number of devices has changed, and the trainer's own where it is on a
    device of another kind: each batch seeds it anew.
    """
    random.setstate(state["python"])
    name, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))  # noqa: NPY002
    torch.set_rng_state(state["torch"])
    if state["cuda"] and len(state["cuda"]) == torch.cuda.device_count():
        torch.cuda.set_rng_state_all(state["cuda"])
    if state["generator"].shape == generator.get_state().shape:
        generator.set_state(state["generator"])
