"""For which lengths kernels are compiled anew, by Triton's own account of what it specialises a launch on.

Operators run on fake tensors, whose launches go no further than to be noted: no GPU, nothing computed.
"""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
import triton
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend
from triton.runtime.jit import MockTensor, create_function_from_signature

from megafold.trainer import kernels, ops
from megafold.trainer.kernels.evoattention.tiles import bucket
from megafold.trainer.kernels.launch import Launch
from megafold.trainer.model.config import PairformerConfig
from megafold.trainer.model.pairformer import PairformerBlock

pytestmark = pytest.mark.skipif(triton.knobs.runtime.interpret, reason="TRITON_INTERPRET is set")

TARGET = GPUTarget("cuda", 90, 32)
NAME = "cuda:90"
#: Kernels that have variants for lengths that fit their tiles and for others; compiled ahead are all of them.
OF_LENGTHS = "triangle_multiplication"
#: What stands for the properties of an H200 in the kernels' modules.
H200: dict[str, Any] = {
    "_INTERPRETED": True,
    "architecture": lambda _device: NAME,
    "multiprocessors": lambda _device: 132,
    "shared_memory": lambda _device: 232448,
}

#: A kernel's name and all that it is compiled for.
Variant = tuple[str, str]


class Placed(MockTensor):
    """What Triton asks of a tensor. PyTorch's allocators place memory at multiples of 512 bytes."""

    def __init__(self, tensor: Tensor) -> None:
        super().__init__(tensor.dtype)
        self._place = 512 + int(tensor.storage_offset()) * tensor.element_size()

    def data_ptr(self) -> int:
        return self._place


class Notes:
    """Launches, each as the variant that would serve it; ``ahead``: and as all that are compiled with it."""

    def __init__(self) -> None:
        self.ahead = False
        self.variants: set[Variant] = set()
        self._binders: dict[Any, Callable[..., Any]] = {}

    def launch(self, launch: Any, *tensors: Tensor) -> None:
        """In the place of :meth:`Launch.__call__`."""
        kernel = launch._kernel
        if kernel not in self._binders:
            self._binders[kernel] = create_function_from_signature(
                kernel.signature, kernel.params, make_backend(TARGET)
            )
        arguments = [*(Placed(t) for t in tensors), *launch._numbers]
        family = kernel.fn.__module__.split(".")[-2]
        for constants in (launch._constants, *(launch._others if self.ahead else ())):
            _, specialisation, _ = self._binders[kernel](*arguments, **constants, **launch._options)
            named = [f"{p.name}: {s}" for p, s in zip(kernel.params, specialisation, strict=True)]
            self.variants.add((f"{family}.{kernel.fn.__name__}", ", ".join([*named, str(launch._options)])))


@pytest.fixture
def notes(monkeypatch: pytest.MonkeyPatch) -> Notes:
    made = Notes()
    for name, module in list(sys.modules.items()):
        if name.startswith(kernels.__name__):
            for key, value in H200.items():
                if hasattr(module, key):
                    monkeypatch.setattr(module, key, value)
    # What the row-wise operators' module says of the interpreter also decides between ways; here it does not.
    for name in ("layernorm", "layernorm_linear", "transition", "adaln"):
        monkeypatch.setattr(f"{kernels.__name__}.{name}.operator.INTERPRETED", True)
    for name in ("layernorm_linear.launches", "transition.fused"):
        monkeypatch.setattr(f"{kernels.__name__}.{name}.INTERPRETED", False)
    monkeypatch.setattr(Launch, "__call__", lambda launch, *tensors: made.launch(launch, *tensors))
    return made


@pytest.fixture(scope="module")
def fake() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def backward(*results: Tensor) -> None:
    torch.autograd.backward(results, [torch.randn_like(t) for t in results])


def leaf(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, dtype=dtype).requires_grad_()


@pytest.fixture(scope="module")
def block(fake: FakeTensorMode) -> PairformerBlock:
    """Of AF3's sizes, dropout and all, with fake parameters."""
    made = PairformerBlock(384, 128, PairformerConfig()).train()
    with fake:
        for module in made.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    module._parameters[name] = nn.Parameter(torch.empty_like(parameter))
    return made


def pairformer(block: PairformerBlock, n: int, dtype: torch.dtype) -> None:
    mask, pair_mask = torch.ones(1, n, dtype=torch.bool), torch.ones(1, n, n, dtype=torch.bool)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        backward(*block(leaf(1, n, 384), leaf(1, n, n, 128, dtype=dtype), mask, pair_mask))


def others(n: int, dtype: torch.dtype) -> None:
    """Operators that a Pairformer block does not call, or calls in another way."""
    q, k, v = (torch.randn(1, n, n, 4, 32, dtype=dtype).transpose(2, 3).requires_grad_() for _ in range(3))
    mask = torch.ones(1, n, n, dtype=torch.bool)
    for bias in (leaf(1, 4, n, n), leaf(1, n, n, 4).permute(0, 3, 1, 2)):
        backward(ops.evoattention(q, k, v, bias, mask))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: True)
        backward(ops.evoattention(q, k, v, leaf(1, 4, n, n), mask))
    x, weight, offset = leaf(2, n, 128, dtype=dtype), leaf(128), leaf(128)
    backward(ops.layernorm(x, weight, offset))
    backward(ops.layernorm_linear(leaf(n, n, 128, dtype=dtype), weight, offset, leaf(256, 128), leaf(256)))
    copies, conditioning = leaf(48, n, 128, dtype=dtype), leaf(1, n, 64, dtype=dtype)
    backward(ops.adaln(copies, conditioning, leaf(64), leaf(128, 64), leaf(128), leaf(128, 64)))
    radius = torch.full((1, n), 15.0)
    backward(ops.smooth_lddt(leaf(1, 5, n, 3), torch.randn(1, n, 3), radius))
    z = leaf(1, n, n, 128, dtype=dtype)
    backward(ops.dropout_add(z, leaf(1, n, n, 128, dtype=dtype), torch.ones(1, 1, n, 128, dtype=dtype)))


def variants(
    notes: Notes, fake: FakeTensorMode, block: PairformerBlock, n: int, dtype: torch.dtype
) -> set[Variant]:
    notes.variants.clear()
    with fake, ops.use_backend("triton"):
        pairformer(block, n, dtype)
        others(n, dtype)
    return set(notes.variants)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("lengths", [(2, 3, 8, 15, 16), (17, 32, 50, 63), (64, 77, 99, 128, 200, 299, 300)])
def test_lengths_of_a_bucket_share_all_variants(notes, fake, block, lengths, dtype):
    assert len({bucket(NAME, n) for n in lengths}) == 1
    notes.ahead = True
    ahead = variants(notes, fake, block, lengths[0], dtype)
    notes.ahead = False
    first = variants(notes, fake, block, lengths[0], dtype)
    assert len(first) > 25
    for n in lengths[1:]:
        these = variants(notes, fake, block, n, dtype)
        assert not these - ahead, f"{n}: {sorted(these - ahead)}"
        new = {each for each in these - first if not each[0].startswith(OF_LENGTHS)}
        assert not new, f"{n}: {sorted(new)}"


def test_another_bucket_has_other_kernels_of_the_attention_alone(notes, fake, block):
    notes.ahead = True
    short, long = (variants(notes, fake, block, n, torch.bfloat16) for n in (50, 128))
    assert {name.split(".")[0] for name, _ in long - short} == {"evoattention"}
    assert len(long - short) <= 12


def test_no_kernel_is_left_out(notes, fake, block):
    seen = variants(notes, fake, block, 128, torch.bfloat16) | variants(notes, fake, block, 40, torch.float32)
    expected = {
        f"{name.split('.')[-2]}.{key}"
        for name, module in sys.modules.items()
        if name.startswith(kernels.__name__)
        for key, value in vars(module).items()
        if isinstance(value, triton.JITFunction) and key.endswith("_kernel") and value.__module__ == name
    }
    assert not expected - {name for name, _ in seen}
