"""The training loop: what happens between two weights, and what is kept of it."""

import math
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megafold.trainer import ops
from megafold.trainer.batches import Batch, SamplerState
from megafold.trainer.checkpoint import (
    CheckpointFolder,
    load_checkpoint,
    random_state,
    require_same_data,
    restore_random_state,
    with_new_parts,
)
from megafold.trainer.config import TrainConfig
from megafold.trainer.data_parallel import Ranks
from megafold.trainer.devices import autocast, resolve_device, to_device
from megafold.trainer.ema import WeightAverage
from megafold.trainer.errors import CheckpointError, ConfigError, DataError, DivergedError
from megafold.trainer.graphs import BlockGraphs, CudaRecorder
from megafold.trainer.logging import RunLog, SilentLog
from megafold.trainer.losses import TrainingLoss, training_loss
from megafold.trainer.mini_rollout import MiniRollout, is_judged
from megafold.trainer.model.model import AlphaFold3
from megafold.trainer.model.msa_rows import DRAWS
from megafold.trainer.optimizer import (
    clip_gradients,
    gradient_norm,
    learning_rate,
    load_optimizer,
    make_optimizer,
    set_learning_rate,
)
from megafold.trainer.parallel.watch import PeerError, PeerWatch
from megafold.trainer.rehearsal import rehearsal
from megafold.trainer.signals import StopSignals

#: Weight of the past in the smoothed loss, by which the best checkpoint is chosen.
_SMOOTHING = 0.98


@dataclass(frozen=True, kw_only=True)
class Feed:
    """The data of a run.

    Attributes:
        batches: gives batches; taken from the start again when it ends.
        sampler: its place, for checkpoints; None for data whose order does not matter.
        identity: what the data are, for checkpoints; see :func:`require_same_data`.
    """

    batches: Iterable[Batch]
    sampler: SamplerState | None = None
    identity: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """How a run ended.

    Attributes:
        step: last step.
        skipped: steps whose loss or gradient was not finite, in all.
        stopped: a signal ended the run before its last step.
        checkpoint: the newest checkpoint; None if no step has been done.
        values: what was recorded of the last step.
    """

    step: int
    skipped: int
    stopped: bool
    checkpoint: Path | None
    values: Mapping[str, float | int]


class Trainer:
    """Trains a model and keeps checkpoints and a log in ``folder``.

    A step whose loss or gradient is not finite on any rank is left out by all of them: weights, optimizer
    and average stay as they are, the step counts, and so does the skip. Ranks decide together, so none
    waits for another that has gone on.
    """

    def __init__(
        self,
        model: nn.Module,
        config: TrainConfig,
        feed: Feed,
        folder: Path,
        ranks: Ranks | None = None,
        loss_of: "LossOf | None" = None,
    ) -> None:
        """The model is moved to the configured device, where its training state lives.

        ``loss_of``: the forward pass; None: the model's own, of whole samples.
        """
        self.ranks = ranks or Ranks()
        self._loss_of = loss_of or loss_of_whole_samples
        self.config = config
        self.device = resolve_device(config.device, self.ranks)
        self.model = model.to(self.device)
        self.ranks.same_weights(self.model)
        self.parameters = [p for p in self.model.parameters() if p.requires_grad]
        self.optimizer = make_optimizer(self.model, config)
        self.average = WeightAverage(self.model, config.ema_decay)
        self.generator = torch.Generator(self.device)
        self.graphs = block_graphs(config, self.device)
        self.checkpoints = CheckpointFolder(folder / "checkpoints", config.keep_checkpoints)
        self.step = 0
        self.skipped = 0
        self._skipped_in_a_row = 0
        self._smoothed_loss = math.nan
        self._best_score = math.inf
        self._saved_step = 0
        self._compiled: set[int] = set()
        self._feed = feed
        self._folder = folder

    # ----------------------------------------------------------------------------------------------
    # Running

    def run(self, watch: PeerWatch | None = None) -> RunResult:
        """Train until the configured step, or until SIGINT or SIGTERM; a checkpoint is written at the end.

        ``watch`` knows which rank is gone when a step fails for want of it.

        Raises:
            DivergedError: too many steps in a row were skipped.
            PeerError: another rank has died.
            DataError: there are no data, or a batch lacks a feature.
        """
        config = self.config
        # On a CPU several threads add an indexed tensor's gradients in the order in which they come, and
        # adding them in one order costs little: a run repeats itself there without being asked to.
        torch.use_deterministic_algorithms(config.deterministic or self.device.type == "cpu", warn_only=True)
        self.model.train()
        stopped = False
        recordings = 0
        values: dict[str, float | int] = {}
        batches = self._batches()
        log = RunLog(self._folder, config, self.step) if self.ranks.is_first else SilentLog()
        with StopSignals() as signals, log, self._telling_what_is_gone(watch):
            while self.step < config.steps and not stopped:
                values, stopped = self._step(batches, signals)
                # Alone, a signal after the ranks' agreement need not wait for the next one.
                stopped |= self.ranks.world == 1 and signals.received is not None
                log.step(values)
                if self.graphs is not None and len(self.graphs) > recordings:
                    recordings = len(self.graphs)
                    log.say(str(self.graphs))
                if self._skipped_in_a_row >= config.max_skipped_in_a_row:
                    raise DivergedError(self._divergence())
                if self.step % config.checkpoint_every == 0:
                    self.save()
            if self._saved_step != self.step:
                self.save()
            stopped = stopped and self.step < config.steps
            if stopped:
                log.say(
                    f"Stopped after step {self.step}; checkpoint {self.checkpoints.latest()}. "
                    "To go on, give the same command with --resume."
                )
        return RunResult(
            step=self.step,
            skipped=self.skipped,
            stopped=stopped,
            checkpoint=self.checkpoints.latest(),
            values=values,
        )

    @contextmanager
    def _telling_what_is_gone(self, watch: PeerWatch | None) -> Iterator[None]:
        """Let an error that comes from a rank or a worker that is gone say so.

        PyTorch raises a dead worker's wherever the main thread happens to be, between two steps, too.
        """
        try:
            yield
        except RuntimeError as error:
            missing = watch.missing() if watch is not None else []
            if not missing and "DataLoader worker" in str(error):
                newest = self.checkpoints.latest() or "none yet"
                raise DataError(
                    f"{error}. This run ends in step {self.step}; newest checkpoint: {newest}. Start again "
                    "with --resume, with fewer workers if they had too little memory"
                ) from error
            if not missing:
                raise
            message = (
                f"{', '.join(missing)} died in step {self.step}, and this run ends. Newest checkpoint: "
                f"{self.checkpoints.latest() or 'none yet'}. Start again with --resume"
            )
            # At once: torchrun ends the other ranks as soon as it can, and here its signal only is a wish.
            print(f"Error: {message}", file=sys.stderr, flush=True)
            raise PeerError(message) from error

    def _step(self, batches: Iterator[Batch], signals: StopSignals) -> tuple[dict[str, float | int], bool]:
        """One optimizer step; returns what is recorded of it, and whether some rank wants to stop."""
        config = self.config
        self.step += 1
        began = time.perf_counter()
        rate = learning_rate(self.step, config)
        set_learning_rate(self.optimizer, rate)
        self._clear_gradients()
        sums, own_samples, waited = self._accumulate(batches)
        norm = gradient_norm(self.parameters)
        losses, skip, stop, samples = self._agree(sums, norm, signals.received is not None, own_samples)
        if self.ranks.world > 1 and not skip:
            self.ranks.average_gradients(self.parameters)
            norm = gradient_norm(self.parameters)
        # Asked for before the optimizer's work, which the next step need not wait for.
        grad_norm = norm.item()
        # Every rank has the same gradients now, so all take the same decision about their norm.
        skip = skip or not math.isfinite(grad_norm)
        if skip:
            self.skipped += 1
            self._skipped_in_a_row += 1
        else:
            clip_gradients(self.parameters, norm, config.clip_norm)
            self.optimizer.step()
            self.average.update()
            self._skipped_in_a_row = 0
            self._smooth(losses["loss"])
        seconds = time.perf_counter() - began
        values: dict[str, float | int] = {
            "step": self.step,
            **losses,
            "learning_rate": rate,
            "grad_norm": grad_norm,
            "skipped": self.skipped,
            "samples_per_s": samples / seconds,
            "data_wait": waited / seconds,
            "step_s": seconds,
        }
        return values, stop

    def _accumulate(self, batches: Iterator[Batch]) -> tuple[dict[str, Tensor], int, float]:
        """Add up the gradients of a step; returns mean losses, samples, and seconds waited for data.

        If memory is short and graphs hold some, they give it back, and the step begins anew without them.
        """
        taken = _Taken(batches)
        self._compile_for(taken)
        if self.graphs is None:
            return self._add_up(taken)
        try:
            return self._add_up(taken)
        except torch.OutOfMemoryError:
            if not len(self.graphs):
                raise
        # Out of reach of the error, which holds what was computed.
        self.graphs.release()
        self._clear_gradients()
        taken.rewind()
        return self._add_up(taken)

    def _compile_for(self, batches: "_Taken") -> None:
        """Have the kernels compiled that a step with batches like the next takes, many at a time.

        Tiles depend on the length, by buckets; what else kernels are compiled for is the same in every step.
        """
        config = self.config
        # Ranks that share a sample would wait for one that worthless numbers stop.
        if config.backend != "triton" or self.device.type != "cuda" or config.sp > 1:
            return
        # Not for a run that has no use for them: importing the kernels takes a second.
        from megafold.trainer.kernels.ahead import compile_ahead
        from megafold.trainer.kernels.evoattention.tiles import architecture, bucket

        batch = self._used(next(batches))
        batches.rewind()
        length = bucket(architecture(self.device), batch["token_mask"].shape[-1])
        if length in self._compiled:
            return
        self._compiled.add(length)
        self._seed_noise(0)
        # Two passes through the trunk, if there ever are: one without gradients.
        cycles = min(2, config.n_cycles)
        # Worthless numbers may fail; what fails on real ones does so again in the step.
        with compile_ahead(), rehearsal(), suppress(RuntimeError, ValueError):
            self._loss_of(self, batch, cycles).total.backward()
        self._clear_gradients()

    def _add_up(self, batches: "_Taken") -> tuple[dict[str, Tensor], int, float]:
        config = self.config
        sums: dict[str, Tensor] = {}
        samples = 0
        cycles = _cycles(config, self.step)
        for turn in range(config.accumulate):
            batch = self._used(next(batches))
            self._seed_noise(turn)
            with nullcontext() if self.graphs is None else self.graphs.active():
                loss = self._loss_of(self, batch, cycles)
            # On this thread: PyTorch's own for the GPU costs a hand-over there and back and cold caches, and
            # the host is what a short crop's step waits for.
            with torch.autograd.set_multithreading_enabled(False):
                (loss.total / config.accumulate).backward()
            samples += len(batch["token_mask"])
            for name, value in loss.values().items():
                sums[name] = sums.get(name, 0.0) + value / config.accumulate
        return sums, samples, batches.waited

    def _used(self, batch: Batch) -> Batch:
        """What the network is given of a batch."""
        if self.config.redraw_msa:
            return batch
        return {name: value for name, value in batch.items() if name != DRAWS}

    def _seed_noise(self, turn: int) -> None:
        """Noise and dropout are functions of the seed, the step and the batch's place in the step.

        So they are the same on the ranks that share a batch, and on any number of ranks among which as
        many batches are divided in another way.
        """
        place = turn * self.ranks.dp + self.ranks.dp_rank
        noise, dropout = _seeds(self.config.seed, self.step, place)
        self.generator.manual_seed(noise)
        torch.manual_seed(dropout)

    def _clear_gradients(self) -> None:
        """Zero gradients for every parameter.

        Not None: a parameter that a batch does not reach must be the same to Adam, and to the other ranks,
        as one whose gradient happens to be 0.
        """
        there = [parameter.grad for parameter in self.parameters if parameter.grad is not None]
        if there:
            torch._foreach_zero_(there)
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)

    def _agree(
        self, losses: Mapping[str, Tensor], norm: Tensor, stop: bool, samples: int
    ) -> tuple[dict[str, float], bool, bool, int]:
        """Means of the losses over the groups, and whether any rank must skip the step or wants to stop."""
        finite = losses["loss"].isfinite() & norm.isfinite()
        head = torch.tensor([stop, samples], dtype=torch.float64, device=self.device)
        packed = torch.stack([(~finite).double(), *head, *(value.double() for value in losses.values())])
        bad, stops, count, *means = self.ranks.sum(packed).tolist()
        # The ranks of a group have parts of its samples' losses, which add up.
        averaged = {name: mean / self.ranks.dp for name, mean in zip(losses, means, strict=True)}
        return averaged, bad > 0, stops > 0, round(count) // self.ranks.sp

    def _smooth(self, loss: float) -> None:
        past = loss if math.isnan(self._smoothed_loss) else self._smoothed_loss
        self._smoothed_loss = _SMOOTHING * past + (1 - _SMOOTHING) * loss

    def _divergence(self) -> str:
        newest = self.checkpoints.latest() or "none yet"
        return (
            f"{self._skipped_in_a_row} steps in a row, up to step {self.step}, had a loss or gradient that "
            f"is not finite. Newest checkpoint: {newest}. Resume from it, or from an older one, with a lower "
            "learning_rate."
        )

    def _batches(self) -> Iterator[Batch]:
        """The feed's batches, over and over."""
        while True:
            empty = True
            for batch in self._feed.batches:
                empty = False
                yield batch
            if empty:
                raise DataError("the data yield no batch: is the data set empty?")

    # ----------------------------------------------------------------------------------------------
    # Checkpoints

    def save(self) -> Path | None:
        """Write a checkpoint (the first rank does); returns its path."""
        # The generators differ by rank, everything else is the same on all of them.
        random_states = self.ranks.gather(random_state(self.generator))
        self._saved_step = self.step
        if not self.ranks.is_first:
            return None
        is_best = self._smoothed_loss < self._best_score
        if is_best:
            self._best_score = self._smoothed_loss
        state = {
            "step": self.step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "average": self.average.state_dict(),
            "sampler": self._feed.sampler.state_dict() if self._feed.sampler is not None else None,
            "rng": random_states,
            "config": self.config.to_dict(),
            "data": dict(self._feed.identity),
            "skipped": self.skipped,
            "smoothed_loss": self._smoothed_loss,
            "best_score": self._best_score,
        }
        return self.checkpoints.save(state, is_best=is_best)

    def resume(self, path: Path, *, allow_other_data: bool = False) -> None:
        """Go on from a checkpoint: on the same devices, exactly as if the run had not stopped.

        Raises:
            CheckpointError: it cannot be read, is of another network, or was trained on other data (unless
                ``allow_other_data``, which starts these data from their beginning).
        """
        state = load_checkpoint(path)
        same_data = state["data"] == dict(self._feed.identity)
        preset = state["config"].get("preset")
        if preset != self.config.preset:
            raise CheckpointError(
                f"{path} is of another network: its preset is {preset!r} and not {self.config.preset!r}; "
                f"resume with --preset {preset}, or give another output folder"
            )
        if not allow_other_data:
            require_same_data(path, state["data"], self._feed.identity)
        grown = with_new_parts(state, self.model, "confidence.")
        if grown is not state and self.ranks.is_first:
            print(f"{path} is from before the confidence head, which starts anew", flush=True)
        state = grown
        try:
            self.model.load_state_dict(state["model"])
            self.average.load_state_dict(state["average"])
            load_optimizer(self.optimizer, state["optimizer"])
        except (RuntimeError, KeyError, ValueError) as error:
            raise CheckpointError(
                f"{path} is of another network than preset {self.config.preset!r} makes: {error}"
            ) from error
        self.step = self._saved_step = state["step"]
        self.skipped = state["skipped"]
        self._smoothed_loss = state["smoothed_loss"]
        self._best_score = state["best_score"]
        if same_data and self._feed.sampler is not None and state["sampler"] is not None:
            self._feed.sampler.load_state_dict(state["sampler"])
        self._restore_random_state(state["rng"])
        self._report_changes(path, state["config"])

    def _restore_random_state(self, states: list[Mapping[str, Any]]) -> None:
        if len(states) == self.ranks.world:
            restore_random_state(states[self.ranks.rank], self.generator)
            return
        if self.ranks.is_first:
            print(
                f"The checkpoint is of {len(states)} ranks and this run has {self.ranks.world}: sums are "
                "taken in another order, so the run goes on but not bit for bit",
                flush=True,
            )

    def _report_changes(self, path: Path, earlier: Mapping[str, Any]) -> None:
        changed = self.config.changed_for_resume(earlier)
        if self.ranks.is_first:
            print(f"Resumed from {path} after step {self.step}", flush=True)
            for name, (then, now) in changed.items():
                print(f"  changed setting: {name} was {then!r}, is {now!r}", flush=True)


class _Taken:
    """Batches of a step, which can be taken once more; ``waited`` seconds for them."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self.waited = 0.0
        self._batches = batches
        self._taken: list[Batch] = []
        self._place = 0

    def __next__(self) -> Batch:
        if self._place == len(self._taken):
            asked = time.perf_counter()
            self._taken.append(next(self._batches))
            self.waited += time.perf_counter() - asked
        self._place += 1
        return self._taken[self._place - 1]

    def rewind(self) -> None:
        """Go back to the first."""
        self._place = 0


#: Forward pass of a batch, as the loader gave it, with so many trunk passes: its loss, or this rank's part.
LossOf = Callable[[Trainer, Batch, int], TrainingLoss]


def loss_of_whole_samples(trainer: Trainer, batch: Batch, cycles: int) -> TrainingLoss:
    """The loss of a batch that is this rank's alone."""
    config = trainer.config
    features = to_device(batch, trainer.device)
    mini_rollout = MiniRollout.of(batch, config, judged=is_judged(trainer.model, config))
    settings: dict[str, Any] = {"n_copies": config.n_copies, "generator": trainer.generator}
    with autocast(trainer.device, config.precision):
        if mini_rollout is None:
            outputs = trainer.model(features, n_cycles=cycles, **settings)
        else:
            model = _rolling(trainer.model)
            trunk = model.run_trunk(features, n_cycles=cycles)
            rollout = partial(model.rollout, features, trunk, n_samples=1, generator=trainer.generator)
            features, predicted = mini_rollout.settle(features, lambda n_steps: rollout(n_steps=n_steps))
            # First, and so last in the backward pass: by then all that the copies kept is free again.
            confidence = model.judge(features, trunk, predicted) if mini_rollout.judged else None
            outputs = model.denoise_copies(features, trunk, **settings)
            outputs = replace(outputs, confidence=confidence)
    with ops.use_backend(config.backend):
        return training_loss(features, outputs, config.loss_weights)


def _rolling(model: nn.Module) -> AlphaFold3:
    """The model, which can predict structures during training."""
    if not isinstance(model, AlphaFold3):
        raise ConfigError(
            f"a {type(model).__name__} has no mini roll-out: train with rollout_steps=0, and the truth "
            "keeps its order of equal chains and atoms"
        )
    return model


def block_graphs(config: TrainConfig, device: torch.device) -> BlockGraphs | None:
    """CUDA graphs of a run's blocks; None where there can be none.

    Ranks that share samples exchange parts within a block. On ROCm graphs were not tried.
    """
    possible = device.type == "cuda" and torch.version.hip is None and config.sp == 1
    return BlockGraphs(CudaRecorder(device)) if possible and config.cuda_graphs == "auto" else None


def _cycles(config: TrainConfig, step: int) -> int:
    """Passes through the trunk at a step: 1 to ``n_cycles``, a function of seed and step alone."""
    return int(np.random.default_rng((config.seed, step)).integers(1, config.n_cycles + 1))


def _seeds(seed: int, step: int, place: int) -> tuple[int, int]:
    """Seeds of 63 bits for the noise and the dropout of a batch."""
    noise, dropout = np.random.SeedSequence((seed, step, place)).generate_state(2, np.uint64) >> np.uint64(1)
    return int(noise), int(dropout)
