"""Memory that a program reads later, fetched into the L2 cache when it begins.

NVIDIA GPUs alone have the instruction, so a tile of their tables asks for it (``fetch``). What is fetched for
a program that begins later is evicted by what the running ones write, and only costs.
"""

import triton
import triton.language as tl

INTERPRETED = tl.constexpr(bool(triton.knobs.runtime.interpret))
_LINE = tl.constexpr(128)


@triton.jit
def fetch(pointers):
    """Fetch the lines of 128 bytes that the pointers point into, if they are not there."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [pointers.to(tl.int64)], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def fetch_rows(base, row, WIDTH: tl.constexpr):
    """Fetch the rows ``row`` of a tensor [rows, WIDTH]."""
    STEP: tl.constexpr = _LINE * 8 // base.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = (WIDTH + STEP - 1) // STEP
    fetch(base + (row[:, None] * WIDTH + (tl.arange(0, LINES) * STEP)[None, :]))


@triton.jit
def fetch_channels(base, first, R, CHANNELS: tl.constexpr, ROWS: tl.constexpr):
    """Fetch the positions ``first`` to ``first`` + ROWS of a tensor [CHANNELS, R]."""
    STEP: tl.constexpr = _LINE * 8 // base.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = (ROWS + STEP - 1) // STEP
    place = tl.minimum(first + tl.arange(0, LINES) * STEP, R - 1)
    fetch(base + (tl.arange(0, CHANNELS).to(tl.int64)[:, None] * R + place[None, :]))


@triton.jit
def loaded(THREADS: tl.constexpr):
    """Have loaded here what is loaded before: the compiler would put it off until shortly before its use."""
    if not INTERPRETED:
        tl.inline_asm_elementwise(
            "bar.warp.sync 0xffffffff; mov.b32 $0, $1;", "=r,r", [tl.arange(0, THREADS)], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
