"""What the files of kernel checks share: where they run and how errors are judged.

Import it before Triton's kernels: where there is neither a GPU nor the interpreter, all of a file is skipped.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final

import pytest
import torch
import triton
from torch import Tensor

from tests.trainer.interpreter import hasten

hasten()
DEVICE: Final = "cpu" if triton.knobs.runtime.interpret else "cuda"
#: The interpreter's bfloat16 dot is wrong.
HALF: Final = torch.float16 if DEVICE == "cpu" else torch.bfloat16
DTYPES: Final = (torch.float32, HALF) if DEVICE == "cpu" else (torch.float32, torch.float16, torch.bfloat16)
if DEVICE == "cuda" and not torch.cuda.is_available():
    pytest.skip("needs a GPU or TRITON_INTERPRET=1", allow_module_level=True)
needs_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")

#: How much larger than eager's in the same dtype an error may be.
FACTOR: Final = 1.3
#: The least error that is held against anyone, in units of the dtype's epsilon. Eager is free of it where it
#: is exact by chance, as sums of equal numbers are. That of one rounding, of the result; float32's is of some
#: five, since what it is computed of is float32 as well.
ROUNDING: Final = 0.25
ROUNDING_WIDE: Final = 0.55
#: Draws of the inputs that are pooled where the first one does not show enough: some, and if need be more.
SOME_DRAWS: Final = 4
DRAWS: Final = 12

#: What ``torch.library.opcheck`` is to check: all that it can.
OPCHECKS: Final = (
    "test_schema",
    "test_autograd_registration",
    "test_faketensor",
    "test_aot_dispatch_dynamic",
)

Results = Mapping[str, Tensor]


def in_order(monkeypatch: pytest.MonkeyPatch, wanted: bool) -> None:
    """Whether kernels shall sum in a fixed order."""
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: wanted)


def unpoisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory as ever: Dynamo guards the deterministic mode, which must be what it says it is."""
    monkeypatch.undo()
    torch.use_deterministic_algorithms(False)


def relative(value: Tensor, exact: Tensor) -> float:
    """The error's norm in units of the exact one's; that of the error itself where that is 0."""
    norm = exact.norm().item()
    return (value.double() - exact).norm().item() / (norm if norm > 0 else 1.0)


def assert_as_exact_as_eager(
    case: Any, judge: Callable[[Any], tuple[Results, Results, Results]], rounding_wide: float = ROUNDING_WIDE
) -> None:
    """Every result's error is within :data:`FACTOR` of the reference's in the same dtype.

    ``judge`` gives a case's results by the kernels, by the reference in float64, and by the reference.
    ``rounding_wide``: see :data:`ROUNDING_WIDE`.

    The error of one draw is chance where a result has few elements or few roundings: the ratio of two such
    errors scatters around its mean by tens of percents. So a result that one draw does not clear is judged by
    the root mean square over up to :data:`DRAWS` draws, in which a kernel that is less exact stays so.
    """
    pooled = {name: [errors] for name, errors in _errors(*judge(case), rounding_wide).items()}
    late = {name for name, errors in pooled.items() if not _within(errors)}
    for seed in range(1, DRAWS):
        if seed in (1, SOME_DRAWS) and all(_within(pooled[name]) for name in late):
            return
        for name, errors in _errors(*judge(redrawn(case, seed)), rounding_wide).items():
            pooled[name].append(errors)
    for name in sorted(late):
        ours, eager, floor = _root_mean_square(pooled[name])
        assert _within(pooled[name]), f"{name}: {ours:.3g}, eager {eager:.3g}, at least {floor:.3g}"


def _errors(
    ours: Results, exact: Results, eager: Results, rounding_wide: float = ROUNDING_WIDE
) -> dict[str, tuple[float, float, float]]:
    """By result: our error, eager's, and what is not held against us."""
    assert set(ours) == set(exact) == set(eager)
    assert any(torch.count_nonzero(each) for each in exact.values()), "where all is 0 nothing is checked"
    errors = {}
    for name, value in ours.items():
        assert torch.isfinite(value).all(), name
        assert value.dtype == eager[name].dtype, name
        assert value.shape == eager[name].shape, name
        roundings = rounding_wide if value.dtype == torch.float32 else ROUNDING
        floor = roundings * torch.finfo(value.dtype).eps
        errors[name] = (relative(value, exact[name]), relative(eager[name], exact[name]), floor)
    return errors


def _root_mean_square(errors: list[tuple[float, float, float]]) -> tuple[float, ...]:
    return tuple(math.sqrt(sum(e * e for e in each) / len(each)) for each in zip(*errors, strict=True))


def _within(errors: list[tuple[float, float, float]]) -> bool:
    ours, eager, floor = _root_mean_square(errors)
    return ours <= FACTOR * max(eager, floor)


def redrawn(value: Any, seed: int) -> Any:
    """A case with the elements of its float tensors in another order; dtypes and strides stay."""
    generator = torch.Generator().manual_seed(seed)

    def draw(each: Any) -> Any:
        if isinstance(each, Tensor):
            return _shuffled(each, generator) if each.is_floating_point() else each
        if isinstance(each, dict):
            return {key: draw(item) for key, item in each.items()}
        if isinstance(each, tuple) and hasattr(each, "_fields"):
            return type(each)(*map(draw, each))
        if isinstance(each, list | tuple):
            return type(each)(map(draw, each))
        if is_dataclass(each) and not isinstance(each, type):
            return replace(each, **{f.name: draw(getattr(each, f.name)) for f in fields(each)})
        return each

    return draw(value)


def _shuffled(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """In its memory, so that expanded and strided tensors stay what they are."""
    count = tensor.untyped_storage().nbytes() // tensor.element_size()
    memory = tensor.detach().as_strided((count,), (1,), 0)
    mixed = memory[torch.randperm(count, generator=generator).to(memory.device)]
    shuffled = mixed.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
    return shuffled.requires_grad_(tensor.requires_grad)
