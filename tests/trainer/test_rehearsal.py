"""Going through a step so that its kernels are compiled: nothing is launched, nothing changes."""

from collections import OrderedDict
from typing import Any

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor, nn
from triton.backends.compiler import GPUTarget

from megafold.trainer.kernels.ahead import compile_ahead
from megafold.trainer.kernels.launch import OPTIONS, Launch, only_compile
from megafold.trainer.model.primitives import run_block
from megafold.trainer.rehearsal import rehearsal, rehearsed


class Kernel:
    """Stands for a Triton kernel: what was launched, and what was only compiled."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def __getitem__(self, grid: tuple[int]) -> Any:
        return lambda *arguments, **options: self.calls.append(("launched", arguments, options))

    def warmup(self, *arguments: Any, grid: tuple[int], **options: Any) -> "Kernel":
        self.calls.append(("compiled", arguments, options))
        return self

    @property
    def run(self) -> None:
        """What launches it, which is made when it is first asked for."""
        self.calls.append(("launcher", (), {}))


def test_a_kernel_is_compiled_with_what_it_will_be_launched_with():
    kernel = Kernel()
    launch = Launch(kernel, 7, (5, 0.5), {"C": 16}, {"num_warps": 4})
    x = torch.ones(3)
    made: list[Any] = []
    with only_compile(made):
        launch(x)
    assert made == [kernel]
    launch(x)
    (first, *compiled), (second, *launched) = kernel.calls
    assert (first, second) == ("compiled", "launched")
    assert compiled == launched == [(x, 5, 0.5), {"C": 16, **OPTIONS, "num_warps": 4}]


def test_what_other_lengths_will_take_is_compiled_with_it():
    kernel = Kernel()
    made: list[Any] = []
    launch = Launch(kernel, 1, (), {"EVEN": True}, {"num_warps": 4}, [{"EVEN": False}])
    with only_compile(made):
        launch(torch.ones(3))
    assert [options for _, _, options in kernel.calls] == [
        {"EVEN": True, **OPTIONS, "num_warps": 4},
        {"EVEN": False, **OPTIONS, "num_warps": 4},
    ]
    launch(torch.ones(3))
    assert len(kernel.calls) == 3


class Inner(torch.autograd.Function):
    """Worthless numbers forward; notes that its backward pass ran."""

    ran: bool = False

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return torch.full_like(x, torch.nan)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        Inner.ran = True
        return grads[0]


class Block(nn.Module):
    def __init__(self, several: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.several = several

    def forward(self, x: Tensor, mask: Tensor) -> Any:
        y: Tensor = Inner.apply(self.linear(x) * mask[:, None])
        return (y, x) if self.several else y


@pytest.mark.parametrize("several", [True, False])
@pytest.mark.parametrize("gradients", [True, False])
def test_a_block_runs_forward_and_backward_and_leaves_zeros(several, gradients):
    block, mask = Block(several), torch.ones(3, dtype=torch.bool)
    x = torch.randn(3, 4, requires_grad=True)
    Inner.ran = False
    with rehearsal(), torch.set_grad_enabled(gradients):
        results = run_block(block, x, mask, recompute=True)
    assert Inner.ran == gradients
    assert isinstance(results, tuple) == several
    for each in results if several else (results,):
        assert torch.equal(each, torch.zeros(3, 4))
        assert each.requires_grad == gradients
    assert x.grad is None
    assert block.linear.weight.grad is None
    assert torch.isnan(run_block(Block(False), x, mask, recompute=False)).all()


def test_what_is_no_module_is_left_to_the_step():
    with rehearsal():
        assert rehearsed(lambda x: x, (torch.ones(2),)) is None
    assert rehearsed(Block(False), (torch.ones(3, 4), torch.ones(3))) is None


def test_all_is_compiled_when_the_context_is_left(monkeypatch):
    """Triton's asynchronous mode is entered with the workers, and left before the pool ends."""
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set")
    seen: dict[str, Any] = OrderedDict()

    class Mode:
        def __init__(self, pool: Any) -> None:
            self.future = pool.submit(lambda: 3)
            seen["workers"] = pool._max_workers

        def __enter__(self) -> None:
            pass

        def __exit__(self, *_: object) -> None:
            seen["waited for"] = self.future.result()

    monkeypatch.setattr(triton, "AsyncCompileMode", Mode)
    kernel = Kernel()
    with compile_ahead(5):
        assert not torch.autograd.is_multithreading_enabled()
        Launch(kernel, 1, (), {}, {})(torch.ones(1))
    assert seen == {"workers": 5, "waited for": 3}
    assert [name for name, *_ in kernel.calls] == ["compiled", "launcher"]
    assert torch.autograd.is_multithreading_enabled()


@triton.jit(do_not_specialize=["count"])
def double_kernel(x, out, count, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, 2 * tl.load(x + at, mask=at < count), mask=at < count)


class Driver:
    """Stands for a GPU's driver: compiles for an H200, and notes what would be launched."""

    def __init__(self) -> None:
        self.launchers: list[str] = []
        self.launched: list[tuple[Any, ...]] = []
        self.utils = self

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, _device: int) -> int:
        return 0

    def get_device_properties(self, _device: int) -> dict[str, int]:
        return {"max_shared_mem": 232448}

    def load_binary(self, *_: Any) -> tuple[Any, ...]:
        return "module", "function", 32, 0, 1024

    def launcher_cls(self, source: Any, _metadata: Any) -> Any:
        self.launchers.append(source.fn.fn.__name__)
        return lambda *arguments: self.launched.append(arguments)


def test_compiled_kernels_are_there_for_the_launch(monkeypatch, tmp_path):
    if triton.knobs.runtime.interpret:
        pytest.skip("TRITON_INTERPRET is set")
    made = Driver()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(triton.runtime.driver, "_active", made)
    compiled: list[str] = []
    hook = "jit_cache_hook"  # asked before anything is compiled
    monkeypatch.setattr(triton.knobs.runtime, hook, lambda **told: compiled.append(told["fn"].name))
    launches = [
        Launch(double_kernel, 1, (5,), {"BLOCK": size}, {}, [{"BLOCK": 2 * size}]) for size in (16, 64)
    ]
    x, out = torch.zeros(8), torch.zeros(8)
    with compile_ahead(2):
        for launch in [*launches, launches[0]]:
            launch(x, out)
    assert made.launched == []
    assert made.launchers.count("double_kernel") == 4
    assert len(compiled) >= 4
    compiled.clear()
    for launch in launches:
        launch(x, out)
    assert len(made.launched) == 2
    assert compiled == []
    assert made.launchers.count("double_kernel") == 4
