"""EvoFlash-3D as a torch operator with its backward, registered for the back end ``triton``."""

from typing import Any, Final

import torch
import triton
from torch import Tensor
from torch.autograd.function import once_differentiable

from megafold.trainer.kernels.evoattention import kernel
from megafold.trainer.kernels.evoattention.tiles import Tile, architecture, tiles
from megafold.trainer.kernels.launch import Launcher, blocks
from megafold.trainer.ops.precision import result_dtype
from megafold.trainer.ops.registry import register

LOG2E: Final = 1.4426950408889634
#: What a logit is kept times. In 2 bytes the factor is folded into queries and bias, at no cost.
_UNIT: Final = {torch.bfloat16: LOG2E, torch.float16: LOG2E, torch.float32: 1.0}
#: Rows of bias and mask are padded to a multiple of the widest tile, so that no tile reads beyond its row.
_PAD: Final = 128
#: The tile in which the bias is prepared.
_BLOCK: Final = 64
#: Triton runs on the CPU.
_INTERPRETED: Final = bool(triton.knobs.runtime.interpret)
#: Programs that fill the largest GPU a few times over; the bias gradient splits its rows to have as many.
_ENOUGH_PROGRAMS: Final = 1024

_launch_bias = Launcher(kernel.prepare_bias_kernel)
_launch_mask = Launcher(kernel.prepare_mask_kernel)
_launch_forward = Launcher(kernel.forward_kernel)
_launch_query = Launcher(kernel.query_gradient_kernel)
_launch_key = Launcher(kernel.key_gradient_kernel)
_launch_bias_gradient = Launcher(kernel.bias_gradient_kernel)


def _padded_channels(channels: int) -> int:
    return max(16, 1 << (channels - 1).bit_length())


def _precision(dtype: torch.dtype) -> str:
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _padded(length: int) -> int:
    return blocks(length, _PAD) * _PAD


def _prepare_bias(bias: Tensor | None, like: Tensor, transpose: bool = False) -> Tensor:
    """The bias in ``like``'s dtype as the kernels read it; empty where there is none.

    [B, H, I, J padded] or, transposed, [B, H, J padded, I padded].
    """
    if bias is None:
        return like.new_empty(0)
    b, h, i, j = bias.shape
    ip, jp = _padded(i), _padded(j)
    shape = (b, h, jp, ip) if transpose else (b, h, i, jp)
    out = torch.empty(shape, dtype=like.dtype, device=bias.device)
    # float16 would make an infinity, and that a NaN, of a number it cannot hold.
    limit = 6e4 if like.dtype == torch.float16 else 0.0
    _launch_bias(
        b * h * blocks(ip, _BLOCK) * blocks(jp, _BLOCK),
        (bias, out), (h, i, j, ip, jp, *bias.stride()),
        {"SCALE": _UNIT[like.dtype], "LIMIT": limit, "BLOCK": _BLOCK, "TRANSPOSE": transpose}, {},
    )  # fmt: skip
    return out


def _prepare_mask(mask: Tensor | None, like: Tensor) -> Tensor:
    """[B, R or 1, J padded] float32: 0 where the key is present, else -inf; empty where there is none."""
    if mask is None:
        return torch.empty(0, dtype=torch.float32, device=like.device)
    b, r, j = mask.shape
    jp = _padded(j)
    out = torch.empty((b, r, jp), dtype=torch.float32, device=mask.device)
    _launch_mask(b * r, (mask.view(torch.uint8), out), (r, j, jp, *mask.stride()), {"BLOCK": 1024}, {})
    return out


def _mask_strides(prepared: Tensor) -> tuple[int, int]:
    if prepared.numel() == 0:
        return 0, 0
    return prepared.stride(0), 0 if prepared.shape[1] == 1 else prepared.stride(1)


def _sizes(tile: Tile) -> dict[str, Any]:
    return {"BQ": tile.bq, "BK": tile.bk}


def _fixed(q: Tensor, masked: Tensor) -> dict[str, Any]:
    """Constants that one call's kernels share, in the order of their parameters."""
    channels = q.shape[-1]
    return {
        "D": channels,
        "DP": _padded_channels(channels),
        "PRECISION": _precision(q.dtype),
        "HAS_MASK": masked.numel() > 0,
    }


def _even(tile: Tile, i: int, j: int) -> bool:
    return i % tile.bq == 0 and j % tile.bk == 0


def _forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """The output; for the backward: the logarithm of the denominator, and the mask as the kernels read it."""
    b, r, h, i, d = q.shape
    j = k.shape[3]
    # Laid out as the queries are, which is how the next projection reads it.
    out = torch.empty_like(q)
    ip, jp = _padded(i), _padded(j)
    lse = torch.empty((b, r, h, ip), dtype=torch.float32, device=q.device)
    prepared = _prepare_bias(bias, q)
    masked = _prepare_mask(mask, q)
    tile = tiles(architecture(q.device), q.dtype, _padded_channels(d), max(i, j)).forward
    _launch_forward(
        blocks(i, tile.bq) * b * blocks(r, tile.rows) * h,
        (q, k, v, prepared, masked, out, lse),
        (r, h, i, j, ip, jp, *q.stride(), *k.stride(), *v.stride(), *_mask_strides(masked), *out.stride(),
         d**-0.5 * _UNIT[q.dtype]),
        _sizes(tile) | {"ROWS": tile.rows} | _fixed(q, masked)
        | {"EVEN": _even(tile, i, j), "HAS_BIAS": bias is not None},
        tile.options(),
    )  # fmt: skip
    return out, lse, masked


def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, masked: Tensor,
    out: Tensor, lse: Tensor, needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV, and dBias [B, H, I, J padded] in float32, empty unless it is needed."""
    b, r, h, i, d = q.shape
    j = k.shape[3]
    ip, jp = _padded(i), _padded(j)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(k)
    delta = torch.empty_like(lse)
    chosen = tiles(architecture(q.device), q.dtype, _padded_channels(d), max(i, j))
    inputs = (*q.stride(), *k.stride(), *v.stride(), *_mask_strides(masked))
    scales = (d**-0.5 * _UNIT[q.dtype], d**-0.5)
    fixed = _fixed(q, masked)
    has_bias = {"HAS_BIAS": bias is not None}
    in_order = needs_bias and torch.are_deterministic_algorithms_enabled()
    added = needs_bias and not in_order
    dbias = torch.zeros((b, h, i, jp) if added else (0,), dtype=torch.float32, device=q.device)
    prepared = _prepare_bias(bias, q)
    tile = chosen.query_bias if added else chosen.query
    _launch_query(
        blocks(i, tile.bq) * b * blocks(r, tile.rows) * h,
        (q, k, v, prepared, masked, out, lse, grad, delta, dq, dbias),
        (r, h, i, j, ip, jp, *inputs, *dq.stride(), *grad.stride(), *scales),
        _sizes(tile) | {"ROWS": tile.rows} | fixed | {"EVEN": _even(tile, i, j)} | has_bias
        | {"BIAS_GRADIENT": added},
        tile.options(),
    )  # fmt: skip
    if in_order:
        dbias = _bias_gradient(q, k, v, prepared, masked, lse, grad, delta)
    # The two forms of the bias are never there together: they are what a step needs beside its result.
    del prepared
    transposed = _prepare_bias(bias, q, transpose=True)
    tile = chosen.key
    _launch_key(
        blocks(j, tile.bk) * b * blocks(r, tile.rows) * h,
        (q, k, v, transposed, masked, lse, grad, delta, dk, dv),
        (r, h, i, j, ip, jp, *inputs, *dk.stride(), *grad.stride(), *scales),
        _sizes(tile) | {"ROWS": tile.rows} | fixed | {"EVEN": _even(tile, i, j)} | has_bias,
        tile.options(),
    )  # fmt: skip
    return dq, dk, dv, dbias


def _bias_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prepared: Tensor,
    masked: Tensor,
    lse: Tensor,
    grad: Tensor,
    delta: Tensor,
) -> Tensor:
    """dBias [B, H, I, J padded] in float32, always summed in the same order."""
    b, r, h, i, d = q.shape
    j = k.shape[3]
    ip, jp = _padded(i), _padded(j)
    tile = tiles(architecture(q.device), q.dtype, _padded_channels(d), max(i, j)).bias
    programs = b * h * blocks(i, tile.bq) * blocks(j, tile.bk)
    part_rows = blocks(r, max(1, min(r, _ENOUGH_PROGRAMS // programs)))
    parts = blocks(r, part_rows)
    dbias = torch.empty((parts, b, h, i, jp), dtype=torch.float32, device=q.device)
    _launch_bias_gradient(
        programs * parts,
        (q, k, v, prepared, masked, lse, grad, delta, dbias),
        (b, r, h, i, j, ip, jp, part_rows, *q.stride(), *k.stride(), *v.stride(), *_mask_strides(masked),
         *grad.stride(), d**-0.5 * _UNIT[q.dtype]),
        _sizes(tile) | _fixed(q, masked) | {"EVEN": _even(tile, i, j)},
        tile.options(),
    )  # fmt: skip
    return dbias[0] if parts == 1 else dbias.sum(0)


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    q, k, v, bias, _mask = inputs
    out, lse, masked = output
    # Not the prepared bias but the caller's own, which is there anyway.
    ctx.save_for_backward(q, k, v, bias, masked, out, lse)
    ctx.bias_dtype = bias.dtype if bias is not None and ctx.needs_input_grad[3] else None
    ctx.set_materialize_grads(False)


def _finish(ctx: Any, keys: int, gradients: tuple[Tensor, ...]) -> tuple[Tensor | None, ...]:
    dq, dk, dv, dbias = gradients
    if ctx.bias_dtype is None:
        return dq, dk, dv, None, None
    return dq, dk, dv, dbias[..., :keys].to(ctx.bias_dtype), None


class _Attention(torch.autograd.Function):
    """The operator outside of ``torch.compile``, where a custom operator's dispatch costs 0.1 ms more."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        output = _forward(*inputs)
        _setup_context(ctx, inputs, output)
        return output[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor | None) -> tuple[Tensor | None, ...]:
        if grad is None:
            return None, None, None, None, None
        q, k, v, bias, masked, out, lse = ctx.saved_tensors
        wanted = ctx.bias_dtype is not None
        return _finish(ctx, k.shape[3], _backward(grad, q, k, v, bias, masked, out, lse, wanted))


_operator = torch.library.custom_op("megafold::evoattention", _forward, mutates_args=())
_operator_backward = torch.library.custom_op("megafold::evoattention_backward", _backward, mutates_args=())


@_operator.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    b, r, h, i, _channels = q.shape
    masked = (0,) if mask is None else (b, mask.shape[1], _padded(k.shape[3]))
    lse = q.new_empty((b, r, h, _padded(i)), dtype=torch.float32)
    return torch.empty_like(q), lse, q.new_empty(masked, dtype=torch.float32)


@_operator_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, masked: Tensor,
    out: Tensor, lse: Tensor, needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    b, _rows, h, i, _channels = q.shape
    dbias = lse.new_empty((b, h, i, _padded(k.shape[3])) if needs_bias else (0,))
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(k), dbias


def _operator_gradients(ctx: Any, grad: Tensor | None, *_others: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None, None
    saved = ctx.saved_tensors
    return _finish(ctx, saved[1].shape[3], _operator_backward(grad, *saved, ctx.bias_dtype is not None))


def _no_second_derivative(ctx: Any, *grads: Any) -> None:
    raise RuntimeError("evoattention cannot be differentiated twice; use the eager back end for it")


_operator.register_autograd(_operator_gradients, setup_context=_setup_context)
_operator_backward.register_autograd(_no_second_derivative)


def unsupported(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, mask: Tensor | None = None
) -> str | None:
    """Why the kernels cannot take these arguments; None: they can."""
    if q.device.type != "cuda" and not _INTERPRETED:
        return f"device {q.device.type}"
    if result_dtype(q) not in _UNIT or any(t.dtype not in _UNIT for t in (q, k, v)):
        return f"dtypes {q.dtype}, {k.dtype}, {v.dtype}"
    if q.shape[-1] > 128:
        return f"{q.shape[-1]} channels"
    if q.numel() == 0 or k.numel() == 0:
        return "empty"
    return None


@register("evoattention", "triton", supports=unsupported)
def evoattention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, mask: Tensor | None = None
) -> Tensor:
    """See :func:`megafold.trainer.ops.attention.evoattention`."""
    dtype = result_dtype(q)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    b, _rows, h, i, _channels = q.shape
    j = k.shape[3]
    if bias is not None:
        bias = bias.expand(b, h, i, j)
    if mask is not None:
        mask = mask.expand(b, mask.shape[1], j)
    if torch.compiler.is_compiling():
        out, *_ = _operator(q, k, v, bias, mask)
        return out
    result: Tensor = _Attention.apply(q, k, v, bias, mask)
    return result
