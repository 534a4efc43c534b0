"""Settings of a training run. Sizes of the network are not here: see ``trainer/model/config.py``."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any, Final, Literal, get_args

from megafold.trainer.errors import ConfigError
from megafold.trainer.losses.total import LossWeights
from megafold.trainer.model.config import BACKENDS, Backend

Precision = Literal["bf16", "fp32"]
CudaGraphs = Literal["auto", "off"]
WorkerStart = Literal["fork", "forkserver", "spawn"]

#: Settings that may differ between a run and its resumption without changing what is computed.
_FREE_ON_RESUME: Final = frozenset(
    "steps sp device backend cuda_graphs log_every plot_every checkpoint_every keep_checkpoints num_workers "
    "prefetch worker_start sample_count sample_steps sample_cycles max_skipped_in_a_row "
    "peer_timeout_s".split()
)


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Settings of a training run; the defaults are AF3's initial training (SI 5.4 and table 6).

    Attributes:
        preset: name of the network's sizes.
        steps: optimizer steps in all, those before a resumption included.
        batch_size: samples a rank takes per forward pass.
        accumulate: forward passes per optimizer step.
        sp: ranks that share one sample, each with a part of its pair representation; 1: every rank has its
            own samples.
        n_copies: noised copies of each sample that the diffusion module sees.
        n_cycles: most passes through the trunk; each step draws 1 to ``n_cycles``, alike on all ranks.
        redraw_msa: rows of the MSA are drawn anew for each pass (SI algorithm 8, line 2), of data that have
            such draws; else all passes see the same rows.
        rollout_steps: denoising steps of the mini roll-out (SI 4.1), by which equal chains and equivalent
            atoms of the ground truth are exchanged (SI 4.2), of data that say what may be; 0: they stay.
        learning_rate: after the warm-up and before any decay.
        warmup_steps: steps over which the rate rises linearly.
        decay_every: steps after which the rate is multiplied by ``decay_factor``, again and again.
        beta_1, beta_2, epsilon: of Adam.
        clip_norm: largest global norm of the gradient.
        ema_decay: decay of the weights' moving average; 0 makes it the weights themselves.
        alpha_diffusion, alpha_distogram, alpha_bond: weights of the losses.
        alpha_confidence: weight of the confidence head's losses, of a network that has one.
        alpha_pae: what that of PAE counts among them; 1 in AF3's last stage of training.
        device: ``auto`` (CUDA or ROCm where there is one, else the CPU) or a torch device.
        backend: implementation of the hot operators; parameters and results do not depend on it.
        cuda_graphs: ``auto`` replays the network's blocks as CUDA graphs where that can be
            (``trainer/graphs/``), ``off`` does not.
        precision: ``bf16`` (autocast; parameters, losses and optimizer stay float32) or ``fp32``.
        deterministic: ask torch for deterministic kernels, where it has them, on GPUs; CPUs always have them.
        seed: of the initial weights, the noise and everything else random on the trainer's side.
        peer_timeout_s: seconds without a sign of life after which a rank is taken for dead, and the job ends.
        max_skipped_in_a_row: give up after so many steps whose loss or gradient was not finite.
        log_every: steps between console lines.
        plot_every: steps between drawings of the loss; it is drawn at the end in any case.
        checkpoint_every: steps between checkpoints.
        keep_checkpoints: newest checkpoints kept besides the best.
        num_workers: processes that load data; 0 loads in the trainer's own.
        prefetch: batches each of them keeps ready.
        worker_start: how they start.
        sample_count: structures sampled of one batch after training; 0 for none.
        sample_steps: denoising steps of each.
        sample_cycles: passes through the trunk for them.
    """

    preset: str = "af3"
    steps: int = 100_000
    batch_size: int = 1
    accumulate: int = 1
    sp: int = 1
    n_copies: int = 48
    n_cycles: int = 4
    redraw_msa: bool = True
    rollout_steps: int = 20
    learning_rate: float = 1.8e-3
    warmup_steps: int = 1_000
    decay_every: int = 50_000
    decay_factor: float = 0.95
    beta_1: float = 0.9
    beta_2: float = 0.95
    epsilon: float = 1e-8
    clip_norm: float = 10.0
    ema_decay: float = 0.999
    alpha_diffusion: float = 4.0
    alpha_distogram: float = 3e-2
    alpha_bond: float = 0.0
    alpha_confidence: float = 1e-4
    alpha_pae: float = 0.0
    device: str = "auto"
    backend: Backend = "eager"
    cuda_graphs: CudaGraphs = "auto"
    precision: Precision = "bf16"
    deterministic: bool = False
    seed: int = 0
    peer_timeout_s: float = 40.0
    max_skipped_in_a_row: int = 50
    log_every: int = 1
    plot_every: int = 1_000
    checkpoint_every: int = 500
    keep_checkpoints: int = 3
    num_workers: int = 0
    prefetch: int = 4
    worker_start: WorkerStart = "forkserver"
    sample_count: int = 0
    sample_steps: int = 200
    sample_cycles: int = 4

    def __post_init__(self) -> None:
        positive = (
            "batch_size accumulate sp n_copies n_cycles learning_rate decay_every decay_factor epsilon "
            "clip_norm peer_timeout_s max_skipped_in_a_row log_every plot_every checkpoint_every "
            "keep_checkpoints prefetch sample_steps sample_cycles"
        )
        for name in positive.split():
            _require(getattr(self, name) > 0, f"{name} must be positive, not {getattr(self, name)}")
        not_negative = (
            "steps rollout_steps warmup_steps alpha_diffusion alpha_distogram alpha_bond alpha_confidence "
            "alpha_pae num_workers sample_count seed"
        )
        for name in not_negative.split():
            _require(getattr(self, name) >= 0, f"{name} must not be negative, not {getattr(self, name)}")
        for name in ("beta_1", "beta_2", "ema_decay"):
            _require(0 <= getattr(self, name) < 1, f"{name} must lie in [0, 1), not {getattr(self, name)}")
        allowed = {
            "backend": BACKENDS,
            "cuda_graphs": get_args(CudaGraphs),
            "precision": get_args(Precision),
            "worker_start": get_args(WorkerStart),
        }
        for name, choices in allowed.items():
            _require(
                getattr(self, name) in choices,
                f"{name} must be one of {', '.join(choices)}, not {getattr(self, name)!r}",
            )

    @property
    def loss_weights(self) -> LossWeights:
        """Weights of the losses."""
        return LossWeights(
            diffusion=self.alpha_diffusion,
            distogram=self.alpha_distogram,
            bond=self.alpha_bond,
            confidence=self.alpha_confidence,
            pae=self.alpha_pae,
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain values, as a checkpoint stores them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TrainConfig":
        """The inverse of :meth:`to_dict`.

        Raises:
            ConfigError: a name is unknown or a value cannot be used.
        """
        known = {item.name for item in fields(cls)}
        unknown = sorted(set(values) - known)
        _require(not unknown, f"unknown training settings {unknown}; known are {sorted(known)}")
        return cls(**values)

    @classmethod
    def for_preset(cls, preset: str, **changes: Any) -> "TrainConfig":
        """Settings that go with a network preset, with ``changes`` on top.

        A preset without settings of its own gets the defaults.

        Raises:
            ConfigError: a name in ``changes`` is unknown or a value cannot be used.
        """
        return cls.from_dict({"preset": preset, **PRESET_SETTINGS.get(preset, {}), **changes})

    def changed_for_resume(self, earlier: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
        """Settings that change what is computed and differ from a checkpoint's: name → (then, now)."""
        now = self.to_dict()
        return {
            name: (earlier.get(name), value)
            for name, value in now.items()
            if name not in _FREE_ON_RESUME and earlier.get(name) != value
        }


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(f"training settings: {message}")


#: ``tiny`` learns one small entry by heart on a CPU within minutes; it is for trying things out.
PRESET_SETTINGS: Final[Mapping[str, Mapping[str, Any]]] = {
    "tiny": {
        "steps": 1_500,
        "n_copies": 16,
        "n_cycles": 1,
        "rollout_steps": 0,
        "learning_rate": 2e-3,
        "warmup_steps": 50,
        "ema_decay": 0.99,
        "precision": "fp32",
        "log_every": 10,
        "plot_every": 100,
        "checkpoint_every": 250,
        "sample_count": 5,
        "sample_steps": 50,
        "sample_cycles": 1,
    },
}
