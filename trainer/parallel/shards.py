"""How the tokens of a sample fall onto the ranks that share it."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megafold.trainer.model.primitives import Dropout
from megafold.trainer.parallel.mesh import Peers


@dataclass(frozen=True)
class Shards:
    """N tokens in P contiguous shards of R tokens; N is padded to P·R.

    A pair tensor is [B, R, P·R, C]: the rows of this rank's tokens, all columns. Between the two rotations
    of a block it holds columns, as the rows of the transposed matrix, so its shape is the same.

    Attributes:
        peers: the ranks.
        n_token: N, without the padding: dropout masks are drawn for so many tokens, whatever P.
    """

    peers: Peers
    n_token: int

    @property
    def size(self) -> int:
        """R, tokens of a rank."""
        return -(-self.n_token // self.peers.size)

    @property
    def n_padded(self) -> int:
        """P·R, tokens of all ranks."""
        return self.size * self.peers.size

    @property
    def rows(self) -> slice:
        """This rank's tokens."""
        return slice(self.peers.rank * self.size, (self.peers.rank + 1) * self.size)

    def pair_mask(self, token_mask: Tensor) -> Tensor:
        """[B, P·R] → [B, R, P·R]: both tokens are present. Symmetric, so it serves rows and columns."""
        return token_mask[:, self.rows, None] & token_mask[:, None, :]


def shared_dropout(layer: Dropout, like: Tensor, shards: Shards, count: int = 1) -> Sequence[Tensor | None]:
    """What :class:`Dropout` multiplies ``count`` tensors by, drawn at once for all N tokens.

    The numbers are those that the serial model draws: the ranks of an SP group, whose generators stand
    alike, agree on the mask of every token without a word, and it does not depend on P.

    Args:
        layer: the layer; its shared axis says which axis of the whole tensor has one mask.
        like: [B, ..., C]: batch, channels and dtype.
        shards: N.
        count: how many tensors.

    Returns:
        For each tensor [B, 1, P·R, C], to multiply with rows (of the transposed tensor, where the mask is
        shared along columns); None where nothing is dropped.
    """
    whole = like.new_empty(()).expand(like.shape[0], shards.n_token, shards.n_token, like.shape[-1])
    missing = shards.n_padded - shards.n_token
    return [
        None if keep is None else F.pad(keep.flatten(1, 2).unsqueeze(1), (0, 0, 0, missing))
        for keep in layer.draws(whole, count)
    ]


def dropped(x: Tensor, mask: Tensor | None) -> Tensor:
    """``x`` times a mask of :func:`shared_dropout`."""
    return x if mask is None else x * mask


def pad_tokens(x: Tensor, axis: int, n_padded: int, value: float | bool = 0) -> Tensor:
    """``x`` with ``n_padded`` tokens along ``axis``."""
    missing = n_padded - x.shape[axis]
    if missing == 0:
        return x
    shape = list(x.shape)
    shape[axis] = missing
    return torch.cat([x, x.new_full(shape, value)], dim=axis)
