"""EvoFlash-3D's kernels, launched on tensors of any strides with a bias and a mask that are prepared."""

from functools import cache, lru_cache
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from megafold.trainer.kernels.evoattention import kernel
from megafold.trainer.kernels.evoattention.tiles import Tile, Tiles, architecture, tiles
from megafold.trainer.kernels.launch import Launch, blocks

LOG2E: Final = 1.4426950408889634
#: What a logit is kept times. In 2 bytes the factor is folded into queries and bias, at no cost.
UNIT: Final = {torch.bfloat16: LOG2E, torch.float16: LOG2E, torch.float32: 1.0}
#: float16 would make an infinity, and that a NaN, of a bias it cannot hold.
LIMIT: Final = {torch.bfloat16: 0.0, torch.float16: 6e4, torch.float32: 0.0}
#: Rows of bias and mask are padded to a multiple of the widest tile, so that no tile reads beyond its row.
_PAD: Final = 128
#: The tile in which the bias is prepared, and the rows of the mask's, which is read byte by byte.
_BLOCK: Final = 64
_MASK_ROWS: Final = 16
#: Programs that fill the largest GPU a few times over; the bias gradient splits its rows to have as many.
_ENOUGH_PROGRAMS: Final = 1024

#: Where float32 is added to memory by loops that compare and swap, each number by itself.
_SWAPPING: Final = ("hip:gfx90a",)

#: Launches remembered for a kernel: far more than a model's shapes.
_REMEMBERED: Final = 1024
#: Sizes and strides of a tensor, or strides alone.
Ints = tuple[int, ...]


class Saved(NamedTuple):
    """What the gradients are computed from: arguments and results of :func:`attend`.

    Attributes:
        mask: [B, R or 1, J] boolean, what ``masked`` was made of, or None. dK and dV need no ``masked``.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    masked: Tensor
    out: Tensor
    lse: Tensor
    mask: Tensor | None = None


class Prepared(NamedTuple):
    """What :func:`prepare` made: the bias's forms, room for its gradient, the mask. Empty: not asked for.

    Attributes:
        plain: [B, H, I, J padded] in the queries' dtype.
        transposed: [B, H, J padded, I padded], likewise.
        dbias: [B, H, I, J padded] float32, zeros.
        masked: [B, R or 1, J padded] in the queries' dtype: 0 where the key is present, else -inf.
    """

    plain: Tensor
    transposed: Tensor
    dbias: Tensor
    masked: Tensor


class Wanted(NamedTuple):
    """What :func:`prepare` is to make of a bias; ``again``: the bias is what it made plain."""

    plain: bool = False
    transposed: bool = False
    zeros: bool = False
    again: bool = False


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


def adds_bias_gradient(device: torch.device) -> bool:
    """Whether the queries' kernel adds the bias's gradient to memory; if not, a kernel of its own sums it.

    Added in no fixed order it is not repeatable, and not every GPU is quick at it.
    """
    return not torch.are_deterministic_algorithms_enabled() and architecture(device) not in _SWAPPING


@cache
def nothing(device: torch.device) -> Tensor:
    """Stands for a tensor that is not there."""
    return torch.empty(0, dtype=torch.float32, device=device)


def in_bytes(mask: Tensor) -> Tensor:
    """A boolean mask as kernels read it; one that is so already, as it is."""
    return mask.view(torch.uint8) if mask.dtype == torch.bool else mask


def prepare(
    bias: Tensor | None, mask: Tensor | None, like: Tensor, wanted: Wanted, lengths: tuple[int, int]
) -> Prepared:
    """Bias [B, H, I, J] and mask [B, R or 1, J] as the kernels read them, in one launch.

    ``like``: a tensor of the queries' dtype; ``lengths``: I and J.
    """
    i, j = lengths
    ip, jp = padded(i), padded(j)
    plain = transposed = dbias = masked = nothing(like.device)
    shape: Ints = (0, 0)
    b_strides: Ints = (0, 0, 0, 0)
    m_shape: Ints = (0, 1)
    m_strides: Ints = (0, 0, 0)
    if bias is not None:
        bias = bias.contiguous() if wanted.again else bias
        shape, b_strides = tuple(bias.shape[:2]), (0, 0, 0, 1) if wanted.again else bias.stride()
        if wanted.plain:
            plain = like.new_empty((*shape, i, jp))
        if wanted.transposed:
            transposed = like.new_empty((*shape, jp, ip))
        if wanted.zeros:
            dbias = torch.empty((*shape, i, jp), dtype=torch.float32, device=like.device)
    if mask is not None:
        m_shape, m_strides = tuple(mask.shape[:2]), mask.stride()
        masked = like.new_empty((*m_shape, jp))
    result = Prepared(plain, transposed, dbias, masked)
    if bias is None and mask is None:
        return result
    launch = _plan_prepare(shape, m_shape, lengths, b_strides, m_strides, like.dtype, wanted)
    launch(
        like if bias is None else bias, like if mask is None else in_bytes(mask),
        like if not wanted.plain else plain, like if not wanted.transposed else transposed, dbias, masked,
    )  # fmt: skip
    return result


@lru_cache(_REMEMBERED)
def _plan_prepare(
    shape: Ints, m_shape: Ints, lengths: tuple[int, int], b_strides: Ints, m_strides: Ints,
    dtype: torch.dtype, wanted: Wanted,
) -> Launch:  # fmt: skip
    b, h = shape
    i, j = lengths
    ip, jp = padded(i), padded(j)
    return Launch(
        kernel.prepare_kernel,
        (b * h * blocks(ip, _BLOCK) + m_shape[0] * blocks(m_shape[1], _MASK_ROWS)) * blocks(jp, _BLOCK),
        (b * h, max(h, 1), i, j, ip, jp, m_shape[1], *b_strides, *m_strides),
        {"SCALE": UNIT[dtype], "LIMIT": LIMIT[dtype], "BLOCK": _BLOCK, "MASK_ROWS": _MASK_ROWS,
         "PREPARED": wanted.again,
         "PLAIN": wanted.plain, "TRANSPOSED": wanted.transposed, "ZEROS": wanted.zeros},
        {},
    )  # fmt: skip


class _Shapes(NamedTuple):
    """All that a launch of the attention's kernels depends on beside tensors."""

    q: Ints
    keys: int
    strides: tuple[Ints, ...]
    mask: Ints
    dtype: torch.dtype
    device: torch.device
    precision: str
    has_bias: bool
    has_mask: bool

    @property
    def lengths(self) -> Ints:
        """R, H, I and J, and I and J padded."""
        _, r, h, i, _ = self.q
        return r, h, i, self.keys, padded(i), padded(self.keys)

    @property
    def inputs(self) -> Ints:
        """Strides of q, k, v and mask: of its batch and row, and of its key unless it is prepared."""
        q, k, v, *_ = self.strides
        return (*q, *k, *v, *self.mask)

    @property
    def outputs(self) -> Ints:
        """The other strides, as the kernels take them."""
        return tuple(stride for strides in self.strides[3:] for stride in strides)

    @property
    def scales(self) -> tuple[float, float]:
        """Of a logit in the softmax's base, and of a logit."""
        scale = self.q[-1] ** -0.5
        return scale * UNIT[self.dtype], scale

    def tiles(self) -> Tiles:
        """The tiles of this case."""
        length = max(self.q[3], self.keys)
        return tiles(architecture(self.device), self.dtype, padded_channels(self.q[-1]), length)

    def constants(self, tile: Tile, *, rows: bool = True) -> dict[str, Any]:
        """Constants that the kernels share, in the order of their parameters."""
        channels = self.q[-1]
        return (
            {"BQ": tile.bq, "BK": tile.bk}
            | ({"ROWS": tile.rows if self.q[1] > 1 else 1} if rows else {})
            | {"D": channels, "DP": padded_channels(channels), "PRECISION": self.precision}
            | {"HAS_MASK": self.has_mask}
        )


def _shapes(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, mask_axes: int, has_bias: bool, *others: Tensor
) -> _Shapes:
    """``mask``: prepared, empty, or as it is; a kernel takes the strides of so many of its axes."""
    has_mask = mask.numel() > 0
    mask_strides: Ints = (0,) * mask_axes
    if has_mask:
        b_stride, r_stride, *j_stride = mask.stride()[:mask_axes]
        mask_strides = (b_stride, 0 if mask.shape[1] == 1 else r_stride, *j_stride)
    return _Shapes(
        q.shape, k.shape[3], tuple([t.stride() for t in (q, k, v, *others)]), mask_strides, q.dtype, q.device,
        precision(q.dtype), has_bias, has_mask,
    )  # fmt: skip


def attend(
    q: Tensor, k: Tensor, v: Tensor, prepared: Tensor, masked: Tensor, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The output, laid out as ``q``, and the logarithm of the denominator [B, R, H, :func:`line_length`].

    ``out``: where the output goes, with strides of its own.
    """
    if out is None:
        out = torch.empty_like(q)
    lse = torch.empty((*q.shape[:3], line_length(q.shape[3], q.dtype)), dtype=torch.float32, device=q.device)
    launch = _plan_forward(_shapes(q, k, v, masked, 2, prepared.numel() > 0, out))
    launch(q, k, v, prepared, masked, out, lse)
    return out, lse


@lru_cache(_REMEMBERED)
def _plan_forward(shapes: _Shapes) -> Launch:
    b, r, h, i, _ = shapes.q
    tile = shapes.tiles().forward
    return Launch(
        kernel.forward_kernel,
        blocks(i, tile.bq) * b * blocks(r, tile.rows) * h,
        (*shapes.lengths, *shapes.inputs, *shapes.outputs, shapes.scales[0]),
        shapes.constants(tile) | {"HAS_BIAS": shapes.has_bias},
        tile.options(),
    )  # fmt: skip


def query_gradient(
    grad: Tensor, saved: Saved, prepared: Tensor, dq: Tensor, dbias: Tensor, *, needs_bias: bool
) -> tuple[Tensor, Tensor]:
    """Fills ``dq``, whose strides are those of the output.

    ``dbias``: zeros to which the bias's gradient is added, or empty; then, if the gradient is needed, it is
    summed in an order of its own.

    Returns:
        Σ dO·O of each query [B, R, H, I padded], and dBias [B, H, I, J padded] in float32, empty unless it is
        needed.
    """
    q, k, v, masked, out, lse, _ = saved
    delta = torch.empty((*q.shape[:3], padded(q.shape[3])), dtype=torch.float32, device=q.device)
    added = dbias.numel() > 0
    launch = _plan_query(_shapes(q, k, v, masked, 2, prepared.numel() > 0, dq, grad), added)
    launch(q, k, v, prepared, masked, out, lse, grad, delta, dq, dbias)
    if needs_bias and not added:
        dbias = bias_gradient(grad, saved, prepared, delta)
    return delta, dbias


@lru_cache(_REMEMBERED)
def _plan_query(shapes: _Shapes, added: bool) -> Launch:
    b, r, h, i, _ = shapes.q
    chosen = shapes.tiles()
    tile = chosen.query_bias if added else chosen.query
    return Launch(
        kernel.query_gradient_kernel,
        blocks(i, tile.bq) * b * blocks(r, tile.rows) * h,
        (*shapes.lengths, *shapes.inputs, *shapes.outputs, *shapes.scales),
        shapes.constants(tile) | {"HAS_BIAS": shapes.has_bias, "BIAS_GRADIENT": added},
        tile.options(),
    )


def key_gradient(
    grad: Tensor, saved: Saved, transposed: Tensor, delta: Tensor, dk: Tensor, dv: Tensor
) -> None:
    """Fills ``dk`` and ``dv``, which have the same strides; ``transposed``: the prepared bias, likewise."""
    q, k, v, lse = saved.q, saved.k, saved.v, saved.lse
    mask = nothing(q.device) if saved.mask is None else in_bytes(saved.mask)
    launch = _plan_key(_shapes(q, k, v, mask, 3, transposed.numel() > 0, dk, grad))
    launch(q, k, v, transposed, mask, lse, grad, delta, dk, dv)


@lru_cache(_REMEMBERED)
def _plan_key(shapes: _Shapes) -> Launch:
    b, r, h, *_ = shapes.q
    tile = shapes.tiles().key
    return Launch(
        kernel.key_gradient_kernel,
        blocks(shapes.keys, tile.bk) * b * blocks(r, tile.rows) * h,
        (*shapes.lengths, *shapes.inputs, *shapes.outputs, *shapes.scales),
        shapes.constants(tile) | {"HAS_BIAS": shapes.has_bias},
        tile.options(),
    )


def bias_gradient(grad: Tensor, saved: Saved, prepared: Tensor, delta: Tensor) -> Tensor:
    """dBias [B, H, I, J padded] in float32, always summed in the same order."""
    q, k, v, masked, _, lse, _ = saved
    shapes = _shapes(q, k, v, masked, 2, True, grad)
    b, r, h, i, _ = shapes.q
    j, jp = shapes.keys, padded(shapes.keys)
    tile = shapes.tiles().bias
    programs = b * h * blocks(i, tile.bq) * blocks(j, tile.bk)
    part_rows = blocks(r, max(1, min(r, _ENOUGH_PROGRAMS // programs)))
    parts = blocks(r, part_rows)
    dbias = torch.empty((parts, b, h, i, jp), dtype=torch.float32, device=q.device)
    _plan_bias(shapes, part_rows)(q, k, v, prepared, masked, lse, grad, delta, dbias)
    return dbias[0] if parts == 1 else dbias.sum(0)


@lru_cache(_REMEMBERED)
def _plan_bias(shapes: _Shapes, part_rows: int) -> Launch:
    b, r, h, i, _ = shapes.q
    j, tile = shapes.keys, shapes.tiles().bias
    return Launch(
        kernel.bias_gradient_kernel,
        b * h * blocks(i, tile.bq) * blocks(j, tile.bk) * blocks(r, part_rows),
        (b, *shapes.lengths, part_rows, *shapes.inputs, *shapes.outputs, shapes.scales[0]),
        shapes.constants(tile, rows=False),
        tile.options(),
    )


def forget_plans() -> None:
    """Choose tiles anew: for whoever changes the tables."""
    for plan in (_plan_prepare, _plan_forward, _plan_query, _plan_key, _plan_bias):
        plan.cache_clear()
