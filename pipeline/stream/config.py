"""What a stream is asked for. Everything here decides samples, so a training run records all of it."""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Literal, get_type_hints

from megafold.pipeline.errors import InputError

#: No token has more atoms: a nucleotide with its terminal oxygen has 24.
MAX_TOKEN_ATOMS = 24


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InputError(f"stream settings: {message}", reason="stream-setting")


@dataclass(frozen=True, kw_only=True)
class CropConfig:
    """How entries are cropped (AF3 SI 2.7).

    ``contiguous``, ``spatial`` and ``interface`` are the probabilities of the three methods.
    """

    tokens: int = 384
    atoms: int = 4608
    contiguous: float = 0.2
    spatial: float = 0.4
    interface: float = 0.4
    interface_distance: float = 15.0  # Å between centre atoms
    max_chains: int = 20

    def __post_init__(self) -> None:
        _require(self.tokens >= 1, f"crop.tokens is {self.tokens}, at least 1")
        _require(
            self.atoms >= MAX_TOKEN_ATOMS,
            f"crop.atoms is {self.atoms}, at least {MAX_TOKEN_ATOMS}, the atoms of one token",
        )
        weights = (self.contiguous, self.spatial, self.interface)
        _require(min(weights) >= 0 and abs(sum(weights) - 1) < 1e-6, f"crop probabilities {weights} sum to 1")
        _require(self.max_chains >= 1, f"crop.max_chains is {self.max_chains}, at least 1")


@dataclass(frozen=True, kw_only=True)
class MsaConfig:
    """How many rows of an MSA a sample holds at most, the query's included."""

    rows: int = 1024

    def __post_init__(self) -> None:
        _require(1 <= self.rows <= 16384, f"msa.rows is {self.rows}, 1 to 16384")


@dataclass(frozen=True, kw_only=True)
class TemplateConfig:
    """Which template hits a sample may use (AF3 SI 2.4).

    ``missing_date`` and ``entry_missing_date`` are ISO dates that stand in for a template's and an entry's
    own date where it has none; None rejects such templates.
    """

    count: int = 4
    candidates: int = 20
    days_before_release: int = 60
    min_aligned: int = 10
    min_coverage: float = 0.1
    duplicate_coverage: float = 0.95
    missing_date: str | None = None
    entry_missing_date: str | None = None

    def __post_init__(self) -> None:
        _require(self.count >= 0, f"template.count is {self.count}, at least 0")
        _require(self.candidates >= self.count, f"template.candidates {self.candidates} < count {self.count}")
        for name in ("missing_date", "entry_missing_date"):
            _check_date(getattr(self, name), f"template.{name}")


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Which entries are used, and how often (AF3 SI 2.5.1).

    ``weights``: ``af3`` draws chains and interfaces by cluster and type; ``uniform`` goes through all
    entries, in another order each epoch. ``entries``: only these, () for all. Entries without a resolution
    or date (NMR, models) pass the limits on them. ``epoch_size``: samples an epoch; None is one an entry.
    """

    weights: Literal["af3", "uniform"] = "af3"
    entries: tuple[str, ...] = ()
    released_from: str | None = None  # inclusive
    released_before: str | None = None  # exclusive
    max_resolution: float | None = None  # Å
    max_tokens: int | None = None
    methods: tuple[str, ...] = ()
    epoch_size: int | None = None

    def __post_init__(self) -> None:
        _require(self.weights in ("af3", "uniform"), f"sampling.weights {self.weights!r}: af3 or uniform")
        _check_date(self.released_from, "sampling.released_from")
        _check_date(self.released_before, "sampling.released_before")
        _require(self.epoch_size is None or self.epoch_size >= 1, "sampling.epoch_size is at least 1")


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """All settings of a stream. ``augment=False`` leaves reference and label coordinates unrotated."""

    seed: int = 0
    crop: CropConfig = field(default_factory=CropConfig)
    msa: MsaConfig = field(default_factory=MsaConfig)
    template: TemplateConfig = field(default_factory=TemplateConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    augment: bool = True

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "StreamConfig":
        """Read nested mappings, as presets and checkpoints hold them.

        Raises:
            InputError: an unknown setting, or a value out of range.
        """
        read: StreamConfig = _from_mapping(cls, values, "stream")
        return read


def _from_mapping(cls: type, values: Mapping[str, Any], where: str) -> Any:
    known = {item.name for item in fields(cls)}
    unknown = sorted(set(values) - known)
    _require(not unknown, f"unknown {', '.join(unknown)} in {where}; known: {', '.join(sorted(known))}")
    hints = get_type_hints(cls)
    read = {}
    for name, value in values.items():
        if is_dataclass(hints[name]) and isinstance(value, Mapping):
            value = _from_mapping(hints[name], value, f"{where}.{name}")
        read[name] = tuple(value) if isinstance(value, list) else value
    return cls(**read)


def _check_date(text: str | None, where: str) -> None:
    if text is None:
        return
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        _require(False, f"{where} {text!r} is not an ISO date such as 2021-09-30")
