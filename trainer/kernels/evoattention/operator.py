"""EvoFlash-3D as a torch operator with its backward, registered for the back end ``triton``."""

from typing import Any, Final

import torch
import triton
from torch import Tensor

from megafold.trainer.kernels.evoattention import kernel
from megafold.trainer.kernels.evoattention.tiles import Tile, architecture, tiles
from megafold.trainer.ops.precision import result_dtype
from megafold.trainer.ops.registry import register

LOG2E: Final = 1.4426950408889634
#: What a logit is kept times. In 2 bytes the factor is folded into queries and bias, at no cost.
_UNIT: Final = {torch.bfloat16: LOG2E, torch.float16: LOG2E, torch.float32: 1.0}
#: Rows of bias and mask are padded to a multiple of the widest tile, so that no tile reads beyond its row.
_PAD: Final = 128
#: Programs that fill the largest GPU a few times over; the bias gradient splits its rows to have as many.
_ENOUGH_PROGRAMS: Final = 1024


def _padded_channels(channels: int) -> int:
    return max(16, triton.next_power_of_2(channels))


def _precision(dtype: torch.dtype) -> str:
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _padded(length: int) -> int:
    return triton.cdiv(length, _PAD) * _PAD


def _prepare_bias(bias: Tensor | None, like: Tensor) -> tuple[Tensor, Tensor]:
    """The bias as the kernels read it: [B, H, I, J padded], and transposed, [B, H, J padded, I padded].

    Both in ``like``'s dtype; empty where there is none.
    """
    if bias is None:
        return like.new_empty(0), like.new_empty(0)
    b, h, i, j = bias.shape
    ip, jp = _padded(i), _padded(j)
    out = torch.empty((b, h, i, jp), dtype=like.dtype, device=bias.device)
    out_t = torch.empty((b, h, jp, ip), dtype=like.dtype, device=bias.device)
    # float16 would make an infinity, and that a NaN, of a number it cannot hold.
    limit = 6e4 if like.dtype == torch.float16 else 0.0
    block = 64
    kernel.prepare_bias_kernel[(b * h * triton.cdiv(ip, block) * triton.cdiv(jp, block),)](
        bias, out, out_t, h, i, j, ip, jp, *bias.stride(), SCALE=_UNIT[like.dtype], LIMIT=limit, BLOCK=block
    )
    return out, out_t


def _prepare_mask(mask: Tensor | None, like: Tensor) -> Tensor:
    """[B, R or 1, J padded] float32: 0 where the key is present, else -inf; empty where there is none."""
    if mask is None:
        return torch.empty(0, dtype=torch.float32, device=like.device)
    b, r, j = mask.shape
    jp = _padded(j)
    out = torch.empty((b, r, jp), dtype=torch.float32, device=mask.device)
    block = min(1024, triton.next_power_of_2(jp))
    kernel.prepare_mask_kernel[(b * r, triton.cdiv(jp, block))](
        mask.view(torch.uint8), out, r, j, jp, *mask.stride(), BLOCK=block
    )
    return out


def _mask_strides(prepared: Tensor) -> tuple[int, int]:
    if prepared.numel() == 0:
        return 0, 0
    return prepared.stride(0), 0 if prepared.shape[1] == 1 else prepared.stride(1)


def _even(tile: Tile, i: int, j: int) -> bool:
    return i % tile.bq == 0 and j % tile.bk == 0


#: Output, log of the denominator, bias, bias transposed, mask.
Prepared = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


@torch.library.custom_op("megafold::evoattention", mutates_args=())
def _forward(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None) -> Prepared:
    """The output, and what the backward reads again."""
    b, r, h, i, d = q.shape
    j = k.shape[3]
    # Laid out as the queries are, which is how the next projection reads it.
    out = torch.empty_like(q)
    lse = torch.empty((b, r, h, i), dtype=torch.float32, device=q.device)
    prepared, transposed = _prepare_bias(bias, q)
    masked = _prepare_mask(mask, q)
    padded = _padded_channels(d)
    tile = tiles(architecture(q.device), q.dtype, padded, max(i, j)).forward
    kernel.forward_kernel[(triton.cdiv(i, tile.bq) * b * triton.cdiv(r, tile.rows) * h,)](
        q, k, v, prepared, masked, out, lse, r, h, i, j, _padded(j),
        *q.stride(), *k.stride(), *v.stride(), *_mask_strides(masked), *out.stride(),
        d**-0.5 * _UNIT[q.dtype], ROWS=tile.rows, D=d, DP=padded,
        HAS_BIAS=bias is not None, HAS_MASK=mask is not None,
        EVEN=_even(tile, i, j), PRECISION=_precision(q.dtype), **tile.options(),
    )  # fmt: skip
    return out, lse, prepared, transposed, masked


@_forward.register_fake
def _(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None) -> Prepared:
    b, _rows, h, i, _channels = q.shape
    ip, jp = _padded(i), _padded(k.shape[3])
    return (
        torch.empty_like(q),
        q.new_empty(q.shape[:-1], dtype=torch.float32),
        q.new_empty((0,) if bias is None else (b, h, i, jp)),
        q.new_empty((0,) if bias is None else (b, h, jp, ip)),
        q.new_empty((0,) if mask is None else (b, mask.shape[1], jp), dtype=torch.float32),
    )


@torch.library.custom_op("megafold::evoattention_backward", mutates_args=())
def _backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, prepared: Tensor, transposed: Tensor, masked: Tensor,
    out: Tensor, lse: Tensor, needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """dQ, dK, dV, and dBias [B, H, I, J padded] in float32, empty unless it is needed."""
    b, r, h, i, d = q.shape
    j = k.shape[3]
    ip, jp = _padded(i), _padded(j)
    dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(k)
    delta = torch.empty_like(lse)
    padded = _padded_channels(d)
    chosen = tiles(architecture(q.device), q.dtype, padded, max(i, j))
    inputs = (*q.stride(), *k.stride(), *v.stride(), *_mask_strides(masked))
    scales = (d**-0.5 * _UNIT[q.dtype], d**-0.5)
    fixed: dict[str, Any] = {
        "D": d, "DP": padded, "HAS_MASK": masked.numel() > 0, "PRECISION": _precision(q.dtype)
    }  # fmt: skip
    has_bias = prepared.numel() > 0
    in_order = needs_bias and torch.are_deterministic_algorithms_enabled()
    added = needs_bias and not in_order
    dbias = torch.zeros((b, h, i, jp) if added else (0,), dtype=torch.float32, device=q.device)
    tile = chosen.query_bias if added else chosen.query
    kernel.query_gradient_kernel[(triton.cdiv(i, tile.bq) * b * triton.cdiv(r, tile.rows) * h,)](
        q, k, v, prepared, masked, out, lse, grad, delta, dq, dbias, r, h, i, j, jp,
        *inputs, *dq.stride(), *grad.stride(), *scales, ROWS=tile.rows,
        HAS_BIAS=has_bias, BIAS_GRADIENT=added, EVEN=_even(tile, i, j), **fixed, **tile.options(),
    )  # fmt: skip
    tile = chosen.key
    kernel.key_gradient_kernel[(triton.cdiv(j, tile.bk) * b * triton.cdiv(r, tile.rows) * h,)](
        q, k, v, transposed, masked, lse, grad, delta, dk, dv, r, h, i, j, ip, jp,
        *inputs, *dk.stride(), *grad.stride(), *scales, ROWS=tile.rows,
        HAS_BIAS=has_bias, EVEN=_even(tile, i, j), **fixed, **tile.options(),
    )  # fmt: skip
    if not in_order:
        return dq, dk, dv, dbias
    tile = chosen.bias
    programs = b * h * triton.cdiv(i, tile.bq) * triton.cdiv(j, tile.bk)
    part_rows = triton.cdiv(r, max(1, min(r, _ENOUGH_PROGRAMS // programs)))
    parts = triton.cdiv(r, part_rows)
    dbias = torch.empty((parts, b, h, i, jp), dtype=torch.float32, device=q.device)
    kernel.bias_gradient_kernel[(programs * parts,)](
        q, k, v, prepared, masked, lse, grad, delta, dbias, b, r, h, i, j, jp, part_rows,
        *inputs, *grad.stride(), scales[0], EVEN=_even(tile, i, j), **fixed, **tile.options(),
    )  # fmt: skip
    return dq, dk, dv, dbias[0] if parts == 1 else dbias.sum(0)


@_backward.register_fake
def _(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, prepared: Tensor, transposed: Tensor, masked: Tensor,
    out: Tensor, lse: Tensor, needs_bias: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dbias = lse.new_empty(prepared.shape if needs_bias else (0,))
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(k), dbias


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Prepared) -> None:
    q, k, v, bias, _mask = inputs
    out, lse, *prepared = output
    ctx.save_for_backward(q, k, v, *prepared, out, lse)
    ctx.bias_dtype = bias.dtype if bias is not None and ctx.needs_input_grad[3] else None
    ctx.set_materialize_grads(False)


def _gradients(ctx: Any, grad: Tensor | None, *_others: None) -> tuple[Tensor | None, ...]:
    if grad is None:
        return None, None, None, None, None
    k = ctx.saved_tensors[1]
    dq, dk, dv, dbias = _backward(grad, *ctx.saved_tensors, ctx.bias_dtype is not None)
    if ctx.bias_dtype is None:
        return dq, dk, dv, None, None
    return dq, dk, dv, dbias[..., : k.shape[3]].to(ctx.bias_dtype), None


_forward.register_autograd(_gradients, setup_context=_setup_context)


def _no_second_derivative(ctx: Any, *grads: Any) -> None:
    raise RuntimeError("evoattention has no second derivative; use the eager back end for it")


_backward.register_autograd(_no_second_derivative)


def unsupported(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, mask: Tensor | None = None
) -> str | None:
    """Why the kernels cannot take these arguments; None: they can."""
    if q.device.type != "cuda" and not triton.knobs.runtime.interpret:
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
    out, *_ = _forward(q, k, v, bias, mask)
    return out
