"""Sizes of the network: frozen, keyword-only, checked when made. Defaults are the AF3 supplement's."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from typing import Any, Final, Literal

from megafold.trainer.errors import ConfigError

Backend = Literal["eager", "compile", "triton"]
BACKENDS: Final[tuple[Backend, ...]] = ("eager", "compile", "triton")

#: Classes of ``restype`` (AF3 SI table 5), elements and characters of an atom name.
N_RESTYPE: Final = 32
N_ELEMENT: Final = 128
N_CHAR: Final = 64


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def _require_positive(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(value > 0, f"{type(config).__name__}.{name} must be positive, got {value}")


def _require_rate(config: Any, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        _require(0 <= value < 1, f"{type(config).__name__}.{name} must lie in [0, 1), got {value}")


@dataclass(frozen=True, kw_only=True)
class AtomTransformerConfig:
    """Sequence-local atom attention (algorithms 5 to 7): ``n_queries`` atoms see ``n_keys`` around them."""

    n_block: int = 3
    n_head: int = 4
    n_queries: int = 32
    n_keys: int = 128

    def __post_init__(self) -> None:
        _require_positive(self, "n_block", "n_head", "n_queries", "n_keys")
        _require(
            self.n_keys >= self.n_queries and (self.n_keys - self.n_queries) % 2 == 0,
            f"n_keys ({self.n_keys}) must exceed n_queries ({self.n_queries}) by an even number of atoms",
        )


@dataclass(frozen=True, kw_only=True)
class PairformerConfig:
    """Widths within a Pairformer block (algorithm 17); the MSA and template stacks use them too."""

    c_triangle: int = 128
    c_attention: int = 32
    n_head_pair: int = 4
    n_head_single: int = 16
    n_transition: int = 4
    dropout: float = 0.25

    def __post_init__(self) -> None:
        _require_positive(self, "c_triangle", "c_attention", "n_head_pair", "n_head_single", "n_transition")
        _require_rate(self, "dropout")


@dataclass(frozen=True, kw_only=True)
class MSAConfig:
    """Widths within an MSA block (algorithms 8 to 10)."""

    c_outer_product: int = 32
    c_average: int = 32
    n_head: int = 8
    dropout: float = 0.15

    def __post_init__(self) -> None:
        _require_positive(self, "c_outer_product", "c_average", "n_head")
        _require_rate(self, "dropout")


@dataclass(frozen=True, kw_only=True)
class TemplateConfig:
    """Width of the template embedder (algorithm 16)."""

    c: int = 64

    def __post_init__(self) -> None:
        _require_positive(self, "c")


@dataclass(frozen=True, kw_only=True)
class DiffusionConfig:
    """The diffusion module and its noise (algorithms 18 to 24, SI 3.7). Lengths in Å.

    ``p_mean`` and ``p_std`` are of ln(sigma / sigma_data) in training; ``s_max``, ``s_min`` and ``p``
    shape the sampling schedule (equation 7), in units of sigma_data; the rest is algorithm 18's.
    """

    n_block: int = 24
    n_head: int = 16
    n_transition: int = 2
    c_fourier: int = 256
    p_mean: float = -1.2
    p_std: float = 1.5
    s_trans: float = 1.0
    s_max: float = 160.0
    s_min: float = 4e-4
    p: float = 7.0
    n_steps: int = 200
    gamma_0: float = 0.8
    gamma_min: float = 1.0
    noise_scale: float = 1.003
    step_scale: float = 1.5

    def __post_init__(self) -> None:
        _require_positive(self, "n_block", "n_head", "n_transition", "c_fourier", "p_std", "n_steps")
        _require_positive(self, "s_max", "s_min", "p", "step_scale")
        _require(self.s_min < self.s_max, f"s_min ({self.s_min}) must be below s_max ({self.s_max})")
        _require(
            min(self.s_trans, self.gamma_0, self.gamma_min, self.noise_scale) >= 0,
            "s_trans, gamma_0, gamma_min and noise_scale must not be negative",
        )


@dataclass(frozen=True, kw_only=True)
class ConfidenceConfig:
    """The confidence head (algorithm 31); widths of its blocks are the Pairformer's.

    ``n_atom`` is the most atoms that a token can have: those of guanosine with OP3.
    """

    n_block: int = 4
    n_atom: int = 24
    n_plddt_bins: int = 50
    n_pae_bins: int = 64
    n_pde_bins: int = 64

    def __post_init__(self) -> None:
        _require_positive(self, "n_block", "n_atom", "n_plddt_bins", "n_pae_bins", "n_pde_bins")


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Sizes of the whole network.

    ``n_pairformer``, ``n_msa`` and ``n_template`` count blocks. ``n_cycles`` is the number of passes
    through the trunk that a caller should use when nothing else is asked (training draws 1 to
    ``n_cycles``). ``c_token`` is the width of the diffusion transformer; the input embedder's tokens
    have ``c_s`` channels. ``confidence`` is None for a network without that head.
    ``activation_checkpointing`` keeps the inputs of every block alone and
    recomputes the rest in the backward pass.
    """

    c_s: int = 384
    c_z: int = 128
    c_m: int = 64
    c_token: int = 768
    c_atom: int = 128
    c_atompair: int = 16
    n_pairformer: int = 48
    n_msa: int = 4
    n_template: int = 2
    n_cycles: int = 4
    sigma_data: float = 16.0
    r_max: int = 32
    s_max: int = 2
    n_distogram_bins: int = 64
    atom: AtomTransformerConfig = field(default_factory=AtomTransformerConfig)
    pairformer: PairformerConfig = field(default_factory=PairformerConfig)
    msa: MSAConfig = field(default_factory=MSAConfig)
    template: TemplateConfig = field(default_factory=TemplateConfig)
    diffusion: DiffusionConfig = field(default_factory=DiffusionConfig)
    confidence: ConfidenceConfig | None = field(default_factory=ConfidenceConfig)
    activation_checkpointing: bool = False
    backend: Backend = "eager"

    def __post_init__(self) -> None:
        _require_positive(self, "c_s", "c_z", "c_m", "c_token", "c_atom", "c_atompair", "n_pairformer")
        _require_positive(self, "n_msa", "n_template", "n_cycles", "sigma_data", "r_max", "s_max")
        _require_positive(self, "n_distogram_bins")
        for width, heads, name in (
            (self.c_s, self.pairformer.n_head_single, "c_s"),
            (self.c_token, self.diffusion.n_head, "c_token"),
            (self.c_atom, self.atom.n_head, "c_atom"),
        ):
            _require(width % heads == 0, f"{name} ({width}) must be a multiple of its {heads} heads")
        _require(self.backend in BACKENDS, f"backend must be one of {BACKENDS}, got {self.backend!r}")

    @property
    def c_s_inputs(self) -> int:
        """Channels of ``s_inputs``: atoms' summary, restype, profile and deletion_mean (algorithm 2)."""
        return self.c_s + 2 * N_RESTYPE + 1

    def to_dict(self) -> dict[str, Any]:
        """Nested plain values, as a checkpoint stores them."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "ModelConfig":
        """The inverse of :meth:`to_dict`; groups that ``values`` leaves out keep their defaults.

        Raises:
            ConfigError: a name is unknown or a value is not acceptable.
        """
        known = {item.name: item for item in fields(cls)}
        unknown = sorted(set(values) - set(known))
        _require(not unknown, f"unknown model settings {unknown}; known are {sorted(known)}")
        groups = {
            "atom": AtomTransformerConfig,
            "pairformer": PairformerConfig,
            "msa": MSAConfig,
            "template": TemplateConfig,
            "diffusion": DiffusionConfig,
            "confidence": ConfidenceConfig,
        }
        made: dict[str, Any] = dict(values)
        for name, group in groups.items():
            if made.get(name) is not None and not is_dataclass(made[name]):
                wrong = sorted(set(made[name]) - {item.name for item in fields(group)})
                _require(not wrong, f"unknown model settings {[f'{name}.{key}' for key in wrong]}")
                made[name] = group(**made[name])
        return cls(**made)
