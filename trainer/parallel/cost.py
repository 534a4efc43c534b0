"""What the collectives of a block move, by formula; a triangle multiplication is chosen by it.

Numbers of tensor elements that one rank sends, per sample. N tokens (padded), P ranks.
"""

from typing import Literal

#: How a triangle multiplication is shared: channels over ranks, or one operand on every rank.
TriangleScheme = Literal["channels", "operand"]


def channel_exchange(n: int, c: int, p: int) -> float:
    """Forward of a triangle multiplication by channels: both operands out, the product back."""
    c_padded = p * -(-c // p)
    return 3 * c_padded * n**2 / p * (p - 1) / p


def operand_gather(n: int, c: int, p: int) -> float:
    """Forward of a triangle multiplication by operand: one operand (or the product's parts) to all."""
    return c * n**2 * (p - 1) / p


def rotation(n: int, c: int, p: int) -> float:
    """Rows of a pair tensor to columns, or back."""
    return c * n**2 / p * (p - 1) / p


def bias_gather(n: int, n_head: int, p: int) -> float:
    """The bias of a triangle attention to all ranks; its gradient back is as much, in float32."""
    return n_head * n**2 * (p - 1) / p


def choose_triangle_scheme(n: int, c: int, p: int) -> TriangleScheme:
    """By operand where that moves a tenth less at least, as it holds one operand whole; else by channels.

    That is by operand for two ranks (2/3 of the bytes), and by channels for more (3/P of the operand's).
    The transposed collectives of the backward pass move the same elements, so they change nothing.
    """
    return "operand" if operand_gather(n, c, p) < 0.9 * channel_exchange(n, c, p) else "channels"
