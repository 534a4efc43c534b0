"""EvoFlash-3D's kernels, launched on tensors of any strides with a bias and a mask that are prepared."""

from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from megafold.trainer.kernels.evoattention import kernel
from megafold.trainer.kernels.evoattention.tiles import Tile, architecture, tiles
from megafold.trainer.kernels.launch import Launcher, blocks

LOG2E: Final = 1.4426950408889634
#: What a logit is kept times. In 2 bytes the factor is folded into queries and bias, at no cost.
UNIT: Final = {torch.bfloat16: LOG2E, torch.float16: LOG2E, torch.float32: 1.0}
#: float16 would make an infinity, and that a NaN, of a bias it cannot hold.
LIMIT: Final = {torch.bfloat16: 0.0, torch.float16: 6e4, torch.float32: 0.0}
#: Rows of bias and mask are padded to a multiple of the widest tile, so that no tile reads beyond its row.
_PAD: Final = 128
#: The tile in which the bias is prepared.
_BLOCK: Final = 64
#: Programs that fill the largest GPU a few times over; the bias gradient splits its rows to have as many.
_ENOUGH_PROGRAMS: Final = 1024

_launch_bias = Launcher(kernel.prepare_bias_kernel)
_launch_mask = Launcher(kernel.prepare_mask_kernel)
_launch_forward = Launcher(kernel.forward_kernel)
_launch_query = Launcher(kernel.query_gradient_kernel)
_launch_key = Launcher(kernel.key_gradient_kernel)
_launch_bias_gradient = Launcher(kernel.bias_gradient_kernel)


class Saved(NamedTuple):
    """What the gradients are computed from: arguments and results of :func:`attend`."""

    q: Tensor
    k: Tensor
    v: Tensor
    masked: Tensor
    out: Tensor
    lse: Tensor


def padded_channels(channels: int) -> int:
    """Channels of a head in a tile."""
    return max(16, 1 << (channels - 1).bit_length())


def precision(dtype: torch.dtype) -> str:
    """How products of ``dtype`` are taken."""
    return "tf32" if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def padded(length: int) -> int:
    """Length of a row of the prepared bias, of the mask and of ``lse``."""
    return blocks(length, _PAD) * _PAD


def line_length(queries: int, dtype: torch.dtype) -> int:
    """What ``lse`` holds of a row: one number for each query, two in float32."""
    return padded(queries) * (2 if dtype == torch.float32 else 1)


def prepare_bias(
    bias: Tensor | None, like: Tensor, *, transpose: bool = False, scale: float | None = None
) -> Tensor:
    """The bias in ``like``'s dtype as the kernels read it; empty where there is none.

    ``scale``: what it is multiplied by; None: what the dtype's logits are.

    [B, H, I, J padded] or, transposed, [B, H, J padded, I padded].
    """
    if bias is None:
        return like.new_empty(0)
    b, h, i, j = bias.shape
    ip, jp = padded(i), padded(j)
    shape = (b, h, jp, ip) if transpose else (b, h, i, jp)
    out = torch.empty(shape, dtype=like.dtype, device=bias.device)
    factor = UNIT[like.dtype] if scale is None else scale
    _launch_bias(
        b * h * blocks(ip, _BLOCK) * blocks(jp, _BLOCK),
        (bias, out), (h, i, j, ip, jp, *bias.stride()),
        {"SCALE": factor, "LIMIT": LIMIT[like.dtype], "BLOCK": _BLOCK, "TRANSPOSE": transpose}, {},
    )  # fmt: skip
    return out


def prepare_mask(mask: Tensor | None, like: Tensor) -> Tensor:
    """[B, R or 1, J padded] float32: 0 where the key is present, else -inf; empty where there is none."""
    if mask is None:
        return torch.empty(0, dtype=torch.float32, device=like.device)
    b, r, j = mask.shape
    jp = padded(j)
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
        "DP": padded_channels(channels),
        "PRECISION": precision(q.dtype),
        "HAS_MASK": masked.numel() > 0,
    }


def _even(tile: Tile, i: int, j: int) -> bool:
    return i % tile.bq == 0 and j % tile.bk == 0


def attend(q: Tensor, k: Tensor, v: Tensor, prepared: Tensor, masked: Tensor) -> tuple[Tensor, Tensor]:
    """The output, laid out as ``q``, and the logarithm of the denominator [B, R, H, :func:`line_length`]."""
    b, r, h, i, d = q.shape
    j = k.shape[3]
    out = torch.empty_like(q)
    ip, jp = padded(i), padded(j)
    lse = torch.empty((b, r, h, line_length(i, q.dtype)), dtype=torch.float32, device=q.device)
    tile = tiles(architecture(q.device), q.dtype, padded_channels(d), max(i, j)).forward
    _launch_forward(
        blocks(i, tile.bq) * b * blocks(r, tile.rows) * h,
        (q, k, v, prepared, masked, out, lse),
        (r, h, i, j, ip, jp, *q.stride(), *k.stride(), *v.stride(), *_mask_strides(masked), *out.stride(),
         d**-0.5 * UNIT[q.dtype]),
        _sizes(tile) | {"ROWS": tile.rows} | _fixed(q, masked)
        | {"EVEN": _even(tile, i, j), "HAS_BIAS": prepared.numel() > 0},
        tile.options(),
    )  # fmt: skip
    return out, lse


def query_gradient(
    grad: Tensor, saved: Saved, prepared: Tensor, dq: Tensor, *, needs_bias: bool
) -> tuple[Tensor, Tensor]:
    """Fills ``dq``, whose strides are those of the output.

    Returns:
        Σ dO·O of each query [B, R, H, I padded], and dBias [B, H, I, J padded] in float32, empty unless
        it is needed.
    """
    q, k, v, masked, out, lse = saved
    b, r, h, i, d = q.shape
    j = k.shape[3]
    ip, jp = padded(i), padded(j)
    delta = torch.empty((b, r, h, ip), dtype=torch.float32, device=q.device)
    chosen = tiles(architecture(q.device), q.dtype, padded_channels(d), max(i, j))
    in_order = needs_bias and torch.are_deterministic_algorithms_enabled()
    added = needs_bias and not in_order
    dbias = torch.zeros((b, h, i, jp) if added else (0,), dtype=torch.float32, device=q.device)
    tile = chosen.query_bias if added else chosen.query
    _launch_query(
        blocks(i, tile.bq) * b * blocks(r, tile.rows) * h,
        (q, k, v, prepared, masked, out, lse, grad, delta, dq, dbias),
        (r, h, i, j, ip, jp, *q.stride(), *k.stride(), *v.stride(), *_mask_strides(masked), *dq.stride(),
         *grad.stride(), d**-0.5 * UNIT[q.dtype], d**-0.5),
        _sizes(tile) | {"ROWS": tile.rows} | _fixed(q, masked) | {"EVEN": _even(tile, i, j)}
        | {"HAS_BIAS": prepared.numel() > 0, "BIAS_GRADIENT": added},
        tile.options(),
    )  # fmt: skip
    if in_order:
        dbias = _bias_gradient(grad, saved, prepared, delta)
    return delta, dbias


def key_gradient(
    grad: Tensor, saved: Saved, transposed: Tensor, delta: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Fills ``dk`` and ``dv``, which have the same strides; ``transposed``: the prepared bias, likewise."""
    q, k, v, masked, _, lse = saved
    b, r, h, i, d = q.shape
    j = k.shape[3]
    tile = tiles(architecture(q.device), q.dtype, padded_channels(d), max(i, j)).key
    _launch_key(
        blocks(j, tile.bk) * b * blocks(r, tile.rows) * h,
        (q, k, v, transposed, masked, lse, grad, delta, dk, dv),
        (r, h, i, j, padded(i), padded(j), *q.stride(), *k.stride(), *v.stride(), *_mask_strides(masked),
         *dk.stride(), *grad.stride(), d**-0.5 * UNIT[q.dtype], d**-0.5),
        _sizes(tile) | {"ROWS": tile.rows} | _fixed(q, masked) | {"EVEN": _even(tile, i, j)}
        | {"HAS_BIAS": transposed.numel() > 0},
        tile.options(),
    )  # fmt: skip


def _bias_gradient(grad: Tensor, saved: Saved, prepared: Tensor, delta: Tensor) -> Tensor:
    """dBias [B, H, I, J padded] in float32, always summed in the same order."""
    q, k, v, masked, _, lse = saved
    b, r, h, i, d = q.shape
    j = k.shape[3]
    ip, jp = padded(i), padded(j)
    tile = tiles(architecture(q.device), q.dtype, padded_channels(d), max(i, j)).bias
    programs = b * h * blocks(i, tile.bq) * blocks(j, tile.bk)
    part_rows = blocks(r, max(1, min(r, _ENOUGH_PROGRAMS // programs)))
    parts = blocks(r, part_rows)
    dbias = torch.empty((parts, b, h, i, jp), dtype=torch.float32, device=q.device)
    _launch_bias_gradient(
        programs * parts,
        (q, k, v, prepared, masked, lse, grad, delta, dbias),
        (b, r, h, i, j, ip, jp, part_rows, *q.stride(), *k.stride(), *v.stride(), *_mask_strides(masked),
         *grad.stride(), d**-0.5 * UNIT[q.dtype]),
        _sizes(tile) | _fixed(q, masked) | {"EVEN": _even(tile, i, j)},
        tile.options(),
    )  # fmt: skip
    return dbias[0] if parts == 1 else dbias.sum(0)
