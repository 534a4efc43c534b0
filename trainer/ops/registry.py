"""Which back end runs an operator."""

import importlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import update_wrapper
from typing import Any, Final, Generic, ParamSpec, TypeVar

import torch

from megafold.trainer.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

#: Modules that register a back end's implementations when they are imported.
_PROVIDERS: Final = {
    "eager": None,
    "compile": "megafold.trainer.ops.compiled",
    "triton": "megafold.trainer.kernels",
}

#: Says why an implementation does not take these arguments; None: it does.
Supports = Callable[..., str | None]


@dataclass(frozen=True)
class _Implementation:
    function: Callable[..., Any]
    supports: Supports | None


_operators: dict[str, "Operator[..., Any]"] = {}
_implementations: dict[tuple[str, str], _Implementation] = {}
_fallbacks: Counter[tuple[str, str, str]] = Counter()
_active: ContextVar[str] = ContextVar("megafold_backend", default="eager")
#: What `use_backend` was last entered with, by whichever thread. ``torch.compile`` cannot read a context
#: variable; a plain global it reads while it traces, and guards.
_traced: str = "eager"


class Operator(Generic[P, R]):
    """A function that runs the active back end's implementation; ``naive`` is its reference."""

    def __init__(self, naive: Callable[P, R]) -> None:
        self.naive = naive
        self.name = naive.__name__
        update_wrapper(self, naive)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run on the active back end, or on the reference where that back end has nothing for it."""
        compiling = torch.compiler.is_compiling()
        backend = _traced if compiling else _active.get()
        if backend == "eager":
            return self.naive(*args, **kwargs)
        implementation = _implementations.get((self.name, backend))
        reason: str | None = "no implementation"
        if implementation is not None:
            reason = None if implementation.supports is None else implementation.supports(*args, **kwargs)
            if reason is None:
                result: R = implementation.function(*args, **kwargs)
                return result
        if not compiling:  # what runs later is not known of here
            _fallbacks[self.name, backend, str(reason)] += 1
        return self.naive(*args, **kwargs)


def operator(naive: Callable[P, R]) -> Operator[P, R]:
    """Make an operator of its plain PyTorch reference, under the function's own name."""
    made = Operator(naive)
    _operators[made.name] = made
    return made


def operators() -> dict[str, Operator[..., Any]]:
    """All operators by name."""
    return dict(_operators)


def register(
    op: str, backend: str, *, supports: Supports | None = None
) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a back end's implementation of ``op``: same arguments and result as the reference.

    ``supports`` is called with the operator's arguments before each run and returns the reason why
    the implementation cannot take them (the reference runs instead), or None.

    Raises:
        ConfigError: no such operator or back end, or the pair is taken.
    """
    if op not in _operators:
        raise ConfigError(f"no operator {op!r}; there are {sorted(_operators)}")
    if backend not in _PROVIDERS or backend == "eager":
        raise ConfigError(f"cannot register for back end {backend!r}; there are {sorted(_PROVIDERS)}")
    if (op, backend) in _implementations:
        raise ConfigError(f"{op} already has a {backend} implementation")

    def add(function: Callable[P, R]) -> Callable[P, R]:
        _implementations[op, backend] = _Implementation(function, supports)
        return function

    return add


def active_backend() -> str:
    """The back end that operators run on here: ``eager`` unless :func:`use_backend` says otherwise."""
    return _active.get()


@contextmanager
def use_backend(backend: str) -> Iterator[None]:
    """Run the operators within on ``backend``.

    Raises:
        ConfigError: no such back end.
        ImportError: the back end's packages are not installed.
    """
    global _traced
    _load(backend)
    token, before = _active.set(backend), _traced
    _traced = backend
    try:
        yield
    finally:
        _active.reset(token)
        _traced = before


def backend_report(backend: str | None = None) -> dict[str, str]:
    """What runs each operator on ``backend`` (default: the active one), and what fell back so far.

    The value is the back end's name, or ``eager (reason)``; runs that fell back because an
    implementation did not take its arguments are added with their reason and number.
    """
    chosen = _active.get() if backend is None else backend
    _load(chosen)
    report = {}
    for op in sorted(_operators):
        if chosen != "eager" and (op, chosen) not in _implementations:
            report[op] = f"eager (no {chosen} implementation)"
            continue
        fallen = [
            f"eager {count} times: {reason}"
            for (name, on, reason), count in sorted(_fallbacks.items())
            if name == op and on == chosen and reason != "no implementation"
        ]
        report[op] = "; ".join([chosen, *fallen])
    return report


def _load(backend: str) -> None:
    if backend not in _PROVIDERS:
        raise ConfigError(f"no back end {backend!r}; there are {sorted(_PROVIDERS)}")
    provider = _PROVIDERS[backend]
    if provider is None:
        return
    try:
        importlib.import_module(provider)
    except ImportError as error:
        raise ImportError(
            f"back end {backend!r} cannot be loaded ({error}); install megafold[train], or use 'eager'"
        ) from error
