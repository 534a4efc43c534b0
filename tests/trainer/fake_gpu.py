"""A GPU for a machine without one: tensors on it have shapes, dtypes and a device, and no numbers.

PyTorch's fake tensors refuse an operation between devices. What the host would wait for (a number that Python
reads, a shape that numbers decide, a copy to the host) is answered with something plausible, and noted.
"""

import ctypes
import sys
from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

GPU = torch.device("cuda", 0)

aten = torch.ops.aten
#: What PyTorch calls devices of each kind: ``c10::DeviceType``.
_CUDA, _META = 1, 14
_INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}


@contextmanager
def fake_gpu() -> Iterator[FakeTensorMode]:
    """Within, tensors are fake, on the host as on the device; autocast takes CUDA for present."""
    with _streams(), _autocast(), FakeTensorMode() as mode:
        yield mode


@contextmanager
def _streams() -> Iterator[None]:
    """Autograd asks each tensor's device for its stream; a PyTorch without CUDA has nobody who answers.

    The meta device's answer, that there is but one, will do.
    """
    if torch.backends.cuda.is_built():
        yield
        return
    library = ctypes.CDLL(str(Path(torch.__file__).parent / "lib/libc10.so"))
    guards = (ctypes.c_void_p * (_META + 1)).in_dll(library, "_ZN3c104impl26device_guard_impl_registryE")
    before = guards[_CUDA]
    guards[_CUDA] = guards[_META]
    try:
        yield
    finally:
        guards[_CUDA] = before


@contextmanager
def _autocast() -> Iterator[None]:
    with (
        mock.patch("torch.cuda.amp.common.amp_definitely_not_available", return_value=False),
        mock.patch("torch.cuda.is_bf16_supported", return_value=True),
    ):
        yield


def batch_on_host(mode: FakeTensorMode, batch: Mapping[str, Any]) -> dict[str, Any]:
    """A loader's batch of fake tensors."""
    return {name: mode.from_tensor(x) if isinstance(x, Tensor) else x for name, x in batch.items()}


def to_gpu(mode: FakeTensorMode, module: nn.Module) -> None:
    """Exchange a module's parameters and buffers for fake ones on the device."""
    for part in module.modules():
        for name, own in list(part._parameters.items()):
            if own is not None:
                part._parameters[name] = nn.Parameter(mode.from_tensor(own).detach().to(GPU))
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = mode.from_tensor(buffer).to(GPU)


class Waits(TorchDispatchMode):
    """Counts what the host waits for, by the function that asks: ``seen["file.py:function"]``.

    Copies from the host to the device are counted, too, as ``"to device, …"``.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        on_gpu = bool(args) and isinstance(args[0], Tensor) and args[0].device == GPU
        if func is aten._local_scalar_dense.default:
            self._note(on_gpu)
            kind = args[0].dtype
            return 0.0 if kind.is_floating_point else True if kind == torch.bool else 1
        if func is aten.nonzero.default:
            self._note(on_gpu)
            return args[0].new_empty((args[0].numel(), args[0].ndim), dtype=torch.int64)
        if func is aten.bincount.default:
            self._note(on_gpu)
            return args[0].new_empty(args[2] if len(args) > 2 else kwargs["minlength"], dtype=torch.int64)
        if func is aten._unique2.default:
            self._note(on_gpu)
            return args[0].new_empty(2), args[0].long(), args[0].new_empty(2, dtype=torch.int64)
        if func in _INDEXING:
            if any(i is not None and i.dtype == torch.bool for i in args[1]):
                self._note(on_gpu)
            if any(i is not None and i.device != GPU for i in args[1]):
                self._note(on_gpu, "to device, ")
            args = (args[0], [part for i in args[1] for part in _all_of(i)], *args[2:])
        result = func(*args, **kwargs)
        if func in (aten._to_copy.default, aten.copy_.default):
            source = args[func is aten.copy_.default]
            if source.device == GPU and result.device != GPU:
                self._note(True)
            if source.device != GPU and result.device == GPU:
                self._note(True, "to device, ")
        return result

    def _note(self, waits: bool, what: str = "") -> None:
        if waits:
            self.seen[what + _asking()] += 1


def _all_of(index: Tensor | None) -> Sequence[Tensor | None]:
    """Indices of as many places as a mask has, or the index as it is."""
    if index is None or index.dtype != torch.bool:
        return [index]
    return [index.new_empty(index.numel(), dtype=torch.int64) for _ in range(index.ndim)]


def _asking() -> str:
    """The innermost function of the trainer on the stack."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if "megafold" in path.parts and "trainer" in path.parts and "tests" not in path.parts:
            return f"{path.name}:{frame.f_code.co_qualname.partition('.<locals>')[0]}"
        frame = frame.f_back
    return "test"


@torch.no_grad()
def backward(loss: Tensor) -> None:
    """``loss.backward()``, node by node: autograd's engine does not run on a device that is not there.

    Raises:
        AssertionError: a gradient is on another device than what it is of.
    """
    root = loss.grad_fn
    assert root is not None
    # What recomputes a block does so once in each pass, by this number.
    with mock.patch("torch._C._current_graph_task_id", return_value=0):
        _go_back(root, torch.ones_like(loss))


def _go_back(root: Any, grad: Tensor) -> None:
    waiting = _uses(root)
    arrived: dict[Any, list[Tensor | None]] = {root: [grad]}
    ready = deque([root])
    while ready:
        node = ready.popleft()
        grads = arrived.pop(node, [])
        users = [each for each in node.next_functions if each[0] is not None]
        is_reached = any(grad is not None for grad in grads)
        results = _run(node, grads) if is_reached else [None] * len(users)
        for (user, place), result in zip(users, results, strict=True):
            if result is not None:
                slots = arrived.setdefault(user, [None] * len(user._input_metadata))
                slots[place] = _as_of(user._input_metadata[place], result, slots[place])
            waiting[user] -= 1
            if not waiting[user]:
                ready.append(user)


def _uses(root: Any) -> Counter[Any]:
    """How many results of other nodes each node waits for."""
    uses: Counter[Any] = Counter()
    seen, todo = {root}, [root]
    while todo:
        for user, _ in todo.pop().next_functions:
            if user is not None:
                uses[user] += 1
                if user not in seen:
                    seen.add(user)
                    todo.append(user)
    return uses


def _run(node: Any, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """What a node passes on along each of its edges."""
    if hasattr(node, "variable"):
        (grad,) = grads
        own = node.variable
        own.grad = grad if own.grad is None else own.grad + grad
        return ()
    is_function = isinstance(node, torch.autograd.function.BackwardCFunction)
    found = node.apply(*grads) if is_function else node(*grads)
    found = found if isinstance(found, tuple) else (found,)
    # A function written in Python answers for all its arguments.
    wanted = node.needs_input_grad if is_function else [user is not None for user, _ in node.next_functions]
    return [grad for grad, wants in zip(found, wanted, strict=True) if wants]


def _as_of(meta: Any, grad: Tensor, other: Tensor | None) -> Tensor:
    """A gradient as autograd hands it on: in its tensor's dtype and shape, added to others."""
    assert grad.device == meta.device, f"a gradient on {grad.device} of a tensor on {meta.device}"
    grad = grad.to(meta.dtype).sum_to_size(meta.shape)
    return grad if other is None else grad + other
