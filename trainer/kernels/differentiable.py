"""Operators whose backward needs their inputs alone, made of a forward and a backward function.

Each becomes a ``torch.library`` custom operator, for ``torch.compile``, and an autograd function, for eager
mode, where a custom operator's dispatch would cost more host time than a short kernel takes.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

Tensors = Sequence[Tensor | None]


class Differentiable:
    """The operator ``megafold::<name>``.

    Args:
        name: of the operator; its backward is ``<name>_backward``.
        forward: of tensors (or None) and, last, the dtype of the result; gives one new tensor. Its
            annotations become the operator's schema.
        backward: of the contiguous gradient, the same tensors, and a list that says which of them want a
            gradient; gives one for each, in its tensor's shape and dtype, empty where none is wanted.
        shape: the result's shape for the same tensors.
    """

    def __init__(
        self,
        name: str,
        forward: Callable[..., Tensor],
        backward: Callable[..., list[Tensor]],
        shape: Callable[..., Sequence[int]],
    ) -> None:
        self._function = _function(forward, backward)
        self._operator = torch.library.custom_op(f"megafold::{name}", forward, mutates_args=())
        backward_operator = torch.library.custom_op(f"megafold::{name}_backward", backward, mutates_args=())

        def fake(*inputs: Any) -> Tensor:
            first: Tensor = inputs[0]
            return first.new_empty(shape(*inputs[:-1]), dtype=inputs[-1])

        def fake_backward(grad: Tensor, *inputs: Any) -> list[Tensor]:
            return [no_gradient(grad) if not want else t.new_empty(t.shape)
                    for t, want in zip(inputs[:-1], inputs[-1], strict=True)]  # fmt: skip

        def setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
            ctx.save_for_backward(*inputs[:-1])
            ctx.set_materialize_grads(False)

        def gradients(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
            return _gradients(backward_operator, ctx, grad)

        def no_second_derivative(ctx: Any, *grads: Any) -> None:
            raise RuntimeError(f"{name} cannot be differentiated twice; use the eager back end for it")

        self._operator.register_fake(fake)
        backward_operator.register_fake(fake_backward)
        self._operator.register_autograd(gradients, setup_context=setup)
        backward_operator.register_autograd(no_second_derivative)

    def __call__(self, *inputs: Any) -> Tensor:
        """The forward's result, differentiable once."""
        if torch.compiler.is_compiling():
            result: Tensor = self._operator(*inputs)
        else:
            result = self._function.apply(*inputs)
        return result


def no_gradient(like: Tensor) -> Tensor:
    """Stands for a gradient that is not wanted."""
    return like.new_empty(0)


def gradient_like(parameter: Tensor | None, wanted: bool, like: Tensor) -> Tensor:
    """Room for the gradient of ``parameter``, contiguous; empty if there is none or none is wanted."""
    return (
        torch.empty_like(parameter, memory_format=torch.contiguous_format)
        if (wanted and parameter is not None)
        else no_gradient(like)
    )


def _gradients(
    backward: Callable[..., list[Tensor]], ctx: Any, grad: Tensor | None
) -> tuple[Tensor | None, ...]:
    wanted = list(ctx.needs_input_grad[:-1])
    if grad is None:
        return (*(None for _ in wanted), None)
    found = backward(grad.contiguous(), *ctx.saved_tensors, wanted)
    return (*(t if want else None for t, want in zip(found, wanted, strict=True)), None)


def _function(forward: Callable[..., Tensor], backward: Callable[..., list[Tensor]]) -> Any:
    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *inputs: Any) -> Tensor:
            ctx.save_for_backward(*inputs[:-1])
            ctx.set_materialize_grads(False)
            return forward(*inputs)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
            return _gradients(backward, ctx, grad)

    return Function


def as_rows(x: Tensor) -> Tensor:
    """[..., C] as [rows, C] with neighbouring channels: a view, or a copy where the strides allow none."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 or rows.shape[1] == 1 else rows.contiguous()
