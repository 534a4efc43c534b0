"""What a stream is asked for. Everything here decides samples, so a training run records all of it."""

import datetime
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from types import NoneType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from megafold.pipeline.errors import InputError

#: No token has more atoms: a nucleotide with its terminal oxygen has 24.
MAX_TOKEN_ATOMS = 24


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise InputError(f"stream settings: {message}", reason="stream-setting")


@dataclass(frozen=True, kw_only=True)
class CropConfig:
    """How entries are cropped (AF3 SI 2.7).

    ``atoms``: at most; 0 is twelve a token, which proteins and most complexes stay below, or 4 608 if that is
    more. ``contiguous``, ``spatial`` and ``interface`` are the probabilities of the three methods.
    """

    tokens: int = 384
    atoms: int = 0
    contiguous: float = 0.2
    spatial: float = 0.4
    interface: float = 0.4
    interface_distance: float = 15.0  # Å between centre atoms
    max_chains: int = 20

    def __post_init__(self) -> None:
        _require(self.tokens >= 1, f"crop.tokens is {self.tokens}, at least 1")
        if not self.atoms:
            object.__setattr__(self, "atoms", max(12 * self.tokens, 4608))
        _require(
            self.atoms >= MAX_TOKEN_ATOMS,
            f"crop.atoms is {self.atoms}, at least {MAX_TOKEN_ATOMS}, the atoms of one token",
        )
        weights = (self.contiguous, self.spatial, self.interface)
        _require(min(weights) >= 0 and abs(sum(weights) - 1) < 1e-6, f"crop probabilities {weights} sum to 1")
        _require(self.max_chains >= 1, f"crop.max_chains is {self.max_chains}, at least 1")


@dataclass(frozen=True, kw_only=True)
class MsaConfig:
    """Which rows of an MSA a sample holds (AF3 SI 2.2).

    ``rows``: at most, the query's included. ``random_size``: as many as a uniform draw from 1 to all there
    are (or ``rows``) says. ``recycles``: how often rows are drawn for one sample: once for each pass through
    the trunk, where each is to see others.
    """

    rows: int = 1024
    random_size: bool = False
    recycles: int = 1

    def __post_init__(self) -> None:
        _require(1 <= self.rows <= 16384, f"msa.rows is {self.rows}, 1 to 16384")
        _require(self.recycles >= 1, f"msa.recycles is {self.recycles}, at least 1")


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
class SplitConfig:
    """Which part of a data set is used: what is held out from training, or the rest (``split.py``).

    ``date``: entries released on it or later are for validation, those without a date for training.
    ``new_clusters``: of these, only chains and interfaces whose clusters training has none of.
    ``held_out``: this share of the polymers' clusters is for validation, chosen by a hash of their names and
    ``salt``; entries with clusters of both kinds are used for neither.
    """

    part: Literal["all", "train", "validation"] = "all"
    date: str | None = None
    new_clusters: bool = False
    held_out: float = 0.0
    salt: str = ""

    def __post_init__(self) -> None:
        parts = ("all", "train", "validation")
        _require(self.part in parts, f"sampling.split.part {self.part!r}: {', '.join(parts)}")
        _check_date(self.date, "sampling.split.date")
        _require(
            0 <= self.held_out < 1, f"sampling.split.held_out is {self.held_out}, 0 or more, less than 1"
        )
        _require(
            self.part == "all" or self.date is not None or self.held_out > 0,
            "sampling.split needs a date or a share of clusters that is held_out",
        )
        _require(
            not self.new_clusters or self.date is not None,
            "sampling.split.new_clusters needs a date: new is what entries before it have not",
        )


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Which entries are used, and how often (AF3 SI 2.5.1).

    ``weights``: ``af3`` draws chains and interfaces by cluster and type; ``uniform`` goes through all
    entries, in another order each epoch. ``entries``: only these, () for all. Entries without a resolution
    or date (NMR, models) pass the limits on them. ``where``: an expression over the manifest (``filters.py``)
    that has to be true. ``epoch_size``: samples an epoch; None is one an entry.
    """

    weights: Literal["af3", "uniform"] = "af3"
    entries: tuple[str, ...] = ()
    released_from: str | None = None  # inclusive
    released_before: str | None = None  # exclusive
    max_resolution: float | None = None  # Å
    max_tokens: int | None = None
    methods: tuple[str, ...] = ()
    where: str = ""
    split: SplitConfig = field(default_factory=SplitConfig)
    epoch_size: int | None = None

    def __post_init__(self) -> None:
        _require(self.weights in ("af3", "uniform"), f"sampling.weights {self.weights!r}: af3 or uniform")
        _check_date(self.released_from, "sampling.released_from")
        _check_date(self.released_before, "sampling.released_before")
        _require(self.epoch_size is None or self.epoch_size >= 1, "sampling.epoch_size is at least 1")


@dataclass(frozen=True, kw_only=True)
class FailureConfig:
    """What becomes of samples that fail while a model is trained (``failures.py``).

    ``attempts``: samples that are tried for one index before the run ends. ``time_budget_s``: a sample that
    takes longer counts as failed; None is no limit. ``max_share``: the run ends when more than this share of
    the samples tried failed, and at least ``min_failures`` of them.
    """

    attempts: int = 10
    time_budget_s: float | None = 60.0
    max_share: float = 0.01
    min_failures: int = 10

    def __post_init__(self) -> None:
        _require(self.attempts >= 1, f"failures.attempts is {self.attempts}, at least 1")
        budget = self.time_budget_s
        _require(budget is None or budget > 0, f"failures.time_budget_s is {budget}, more than 0 or none")
        _require(0 <= self.max_share <= 1, f"failures.max_share is {self.max_share}, 0 to 1")
        _require(self.min_failures >= 1, f"failures.min_failures is {self.min_failures}, at least 1")


@dataclass(frozen=True, kw_only=True)
class StreamConfig:
    """All settings of a stream.

    ``augment=False`` leaves reference and label coordinates unrotated. ``symmetry``: samples carry the
    exchanges of atoms and chains that leave them as they are, for losses that are to allow for them.
    """

    seed: int = 0
    crop: CropConfig = field(default_factory=CropConfig)
    msa: MsaConfig = field(default_factory=MsaConfig)
    template: TemplateConfig = field(default_factory=TemplateConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    failures: FailureConfig = field(default_factory=FailureConfig)
    augment: bool = True
    symmetry: bool = False

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
        value = tuple(value) if isinstance(value, list) else value
        _require(
            _is_a(value, hints[name]), f"{where}.{name} is {value!r}: it has to be {_in_words(hints[name])}"
        )
        read[name] = value
    return cls(**read)


def _is_a(value: Any, hint: Any) -> bool:
    """Whether a value is of a setting's type; which texts a ``Literal`` takes the class itself tells."""
    kind, arguments = get_origin(hint), get_args(hint)
    if kind is Literal:
        return isinstance(value, str)
    if kind is UnionType:
        return any(_is_a(value, argument) for argument in arguments)
    if kind is tuple:
        return isinstance(value, tuple) and all(_is_a(item, arguments[0]) for item in value)
    if hint is float:
        return _is_a(value, int) or isinstance(value, float)
    return isinstance(value, hint) and not (hint is int and isinstance(value, bool))


def _in_words(hint: Any) -> str:
    kind, arguments = get_origin(hint), get_args(hint)
    if kind is UnionType:
        return " or ".join(map(_in_words, arguments))
    if kind is tuple:
        return f"a list, each item {_in_words(arguments[0])}"
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text", NoneType: "null"}
    return words.get(hint, "text" if kind is Literal else "an object")


def _check_date(text: str | None, where: str) -> None:
    if text is None:
        return
    try:
        datetime.date.fromisoformat(text)
    except ValueError:
        _require(False, f"{where} {text!r} is not an ISO date such as 2021-09-30")
