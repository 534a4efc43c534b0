"""A training run from its settings and data to checkpoints, logs and sampled structures."""

import json
import time
from collections import Counter
from contextlib import closing, nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from megafold.trainer.batches import Batch, BatchStream, TrainingData
from megafold.trainer.checkpoint import CheckpointFolder
from megafold.trainer.config import TrainConfig
from megafold.trainer.data_parallel import Ranks
from megafold.trainer.devices import resolve_device
from megafold.trainer.errors import CheckpointError
from megafold.trainer.evaluation import SampledStructure, sample_structures
from megafold.trainer.loop import Feed, RunResult, Trainer
from megafold.trainer.model.model import AlphaFold3
from megafold.trainer.parallel.mesh import ParallelMesh, require_divisible
from megafold.trainer.parallel.training import SharedLoss, shared_data
from megafold.trainer.parallel.watch import PeerWatch
from megafold.trainer.presets.model import model_preset
from megafold.trainer.run_lock import only_run


@dataclass(frozen=True, kw_only=True)
class Resume:
    """How a run continues an earlier one.

    Attributes:
        path: a checkpoint; None for the newest of the output folder, or a fresh start where it has none.
        allow_other_data: go on although the data are not those of the checkpoint.
    """

    path: Path | None = None
    allow_other_data: bool = False


@dataclass(frozen=True, kw_only=True)
class TrainingSummary:
    """What a run has done.

    Attributes:
        steps: last step.
        skipped: steps that were left out because their loss or gradient was not finite.
        stopped: a signal ended the run early.
        loss: total loss of the last step; NaN if the run did none.
        minutes: wall time of the training loop.
        parameters: number of trained numbers.
        checkpoint: newest checkpoint.
        structures: structures sampled after training; none if the run was stopped.
    """

    steps: int
    skipped: int
    stopped: bool
    loss: float
    minutes: float
    parameters: int
    checkpoint: Path | None
    structures: tuple[SampledStructure, ...]

    def to_dict(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self), default=str))
        return plain


def build_model(config: TrainConfig) -> AlphaFold3:
    """The network of a preset, with weights that depend on the seed alone.

    Raises:
        ConfigError: there is no such preset.
    """
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        model = AlphaFold3(model_preset(config.preset))
    model.backend = config.backend
    return model


def run_training(
    config: TrainConfig,
    data: TrainingData,
    folder: Path,
    *,
    resume: Resume | None = None,
    model: nn.Module | None = None,
) -> TrainingSummary:
    """Train, keep everything in ``folder``, and sample structures at the end if so configured.

    Under torchrun every rank calls this alike; they average their gradients, and the first one writes.
    With ``config.sp`` above 1 so many of them share each sample.
    The folder gets ``config.json``, ``metrics.csv``, ``loss.png``, ``tensorboard/``, ``checkpoints/`` and,
    with samples, ``structures/*.cif``; at the end ``summary.json``.

    Args:
        config: settings.
        data: data set, collation and identity.
        folder: output folder.
        resume: go on from a checkpoint. Without it a folder that has checkpoints is refused.
        model: a network to train instead of the preset's; it needs ``sample`` if structures are wanted.

    Raises:
        CheckpointError: the folder holds another run, or one is at work there, or a checkpoint does not fit.
        ConfigError: there is no such preset or device, or ``sp`` does not divide the ranks.
        DataError: there are no data, or a batch lacks a feature.
        DivergedError: too many steps in a row were not finite.
        PeerError: another rank has died.
    """
    ranks = replace(Ranks.from_environment(), sp=config.sp)
    require_divisible(ranks.world, config.sp)
    with only_run(folder) if ranks.is_first else nullcontext():
        return _run(config, data, folder, ranks, resume, model)


def _run(
    config: TrainConfig,
    data: TrainingData,
    folder: Path,
    ranks: Ranks,
    resume: Resume | None,
    model: nn.Module | None,
) -> TrainingSummary:
    device = resolve_device(config.device, ranks)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    started_group = ranks.start(device)
    peers = ParallelMesh.create(device, config.sp).sp
    stream = BatchStream(shared_data(data, peers), config, ranks)
    try:
        feed = Feed(batches=stream, sampler=stream, identity=data.identity)
        network = model or build_model(config)
        loss_of = SharedLoss(peers) if peers.size > 1 else None
        trainer = Trainer(network, config, feed, folder, ranks, loss_of)
        began = time.perf_counter()
        with PeerWatch(ranks.rank, ranks.world, config.peer_timeout_s) as watch:
            _begin(trainer, folder, resume)
            if ranks.is_first:
                _write_json(folder / "config.json", config.to_dict())
            result = trainer.run(watch)
        minutes = (time.perf_counter() - began) / 60
        structures: list[SampledStructure] = []
        if config.sample_count and not result.stopped and ranks.is_first:
            structures = _sample(trainer, data, stream, folder)
        summary = _summary(trainer, result, minutes, structures)
        if ranks.is_first:
            _write_json(folder / "summary.json", summary.to_dict())
    finally:
        stream.close()
        if started_group:
            dist.destroy_process_group()
    return summary


def _begin(trainer: Trainer, folder: Path, resume: Resume | None) -> None:
    """Resume, or make sure that the folder is free."""
    latest = CheckpointFolder(folder / "checkpoints").latest()
    if resume is None:
        if latest is not None:
            raise CheckpointError(
                f"{folder} holds a run ({latest.name}): resume it (--resume), or give another output folder"
            )
        return
    path = resume.path or latest
    if path is not None:
        trainer.resume(path, allow_other_data=resume.allow_other_data)
    elif trainer.ranks.is_first:
        print(f"{folder} has no checkpoint to go on from: the run begins at its start", flush=True)


def _sample(
    trainer: Trainer, data: TrainingData, stream: BatchStream, folder: Path
) -> list[SampledStructure]:
    """Sample with the averaged weights."""
    if data.evaluate:
        batches = [data.collate([data.dataset[index]]) for index in data.evaluate]
    else:
        batches = [_whole_batch(trainer, data, stream) if trainer.ranks.sp > 1 else next(stream)]
    written: Counter[str] = Counter()
    with trainer.average.applied(trainer.model):
        return [
            structure
            for batch in batches
            for structure in sample_structures(
                trainer.model, batch, trainer.config, folder / "structures", trainer.device, written
            )
        ]


def _whole_batch(trainer: Trainer, data: TrainingData, stream: BatchStream) -> Batch:
    """The batch that a stream of parts of batches would give next."""
    with closing(BatchStream(data, trainer.config, trainer.ranks)) as whole:
        whole.load_state_dict(stream.state_dict())
        return next(whole)


def _summary(
    trainer: Trainer, result: RunResult, minutes: float, structures: list[SampledStructure]
) -> TrainingSummary:
    return TrainingSummary(
        steps=result.step,
        skipped=result.skipped,
        stopped=result.stopped,
        loss=float(result.values.get("loss", float("nan"))),
        minutes=minutes,
        parameters=sum(parameter.numel() for parameter in trainer.parameters),
        checkpoint=result.checkpoint,
        structures=tuple(structures),
    )


def _write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
