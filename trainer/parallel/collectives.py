"""Collectives with their backward passes.

Everywhere in the sharded network the loss is the *sum* of what the ranks of an SP group compute, and the
backward pass of a collective is its transpose: of an ``all_to_all`` the ``all_to_all`` back, of an
``all_gather`` a ``reduce_scatter`` that sums. So the gradient of a parameter is the sum over the group,
whatever part of the work a rank did, and no rank's part is ever forgotten.

The single representation is the one thing that all ranks compute alike. Its gradient is kept equal on all
of them, the P-th part of the whole on each: :func:`gather_alike` and :func:`enter_shards` hold that.

P ranks; a tensor [P, ...] has one piece for, or from, every rank. With one rank nothing is sent.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from megafold.trainer.ops.precision import wide
from megafold.trainer.parallel.mesh import Peers

Kind = Literal["all_to_all", "all_gather", "reduce_scatter", "all_reduce"]

#: Every place in the network that calls a collective, with what it moves.
USES: Final[dict[str, str]] = {}

# torch 2.13 renamed both; the old names warn there, the new ones do not exist before it.
_gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def use(name: str, moves: str) -> str:
    """Register a place that calls a collective; returns its name."""
    assert name not in USES, f"{name} is taken"
    USES[name] = moves
    return name


# --------------------------------------------------------------------------------------------------
# Counting, and leaving out


@dataclass(frozen=True)
class Traffic:
    """One collective as a rank saw it.

    Attributes:
        use: the place that called it.
        kind: which.
        backward: called by the backward pass.
        sent: bytes that this rank sends to others, at the least that a collective needs: of a buffer of n
            bytes n·(P-1)/P for an ``all_to_all`` and a ``reduce_scatter`` (n for all ranks) and an
            ``all_gather`` (n from all ranks), twice that for an ``all_reduce``.
    """

    use: str
    kind: Kind
    backward: bool
    sent: int


# Plain variables and not context variables: on a GPU the backward pass runs in a thread of its own.
_records: list[Traffic] | None = None
_left_out: "_LeftOut | None" = None


@dataclass
class _LeftOut:
    """A use whose backward forgets the other ranks: the ``turn``-th time that it runs, or always if None."""

    name: str
    turn: int | None
    seen: int = 0


@contextmanager
def record_traffic() -> Iterator[list[Traffic]]:
    """Within, every collective adds itself to the list. Recomputed ones count as of the backward pass."""
    global _records
    before, _records = _records, []
    try:
        yield _records
    finally:
        _records = before


@contextmanager
def leave_out_backward(name: str, turn: int | None = None) -> Iterator[None]:
    """Within, the collectives called ``name`` keep this rank's part of a gradient and forget the others'.

    With ``turn``, the one alone that runs after so many others of that name.
    For tests: whatever holds the gradients right must notice each of them.
    """
    global _left_out
    assert name in USES, name
    before, _left_out = _left_out, _LeftOut(name, turn)
    try:
        yield
    finally:
        _left_out = before


def _is_left_out(name: str) -> bool:
    """Asked once by each backward pass of a collective."""
    if _left_out is None or _left_out.name != name:
        return False
    turn = _left_out.seen
    _left_out.seen += 1
    return _left_out.turn is None or _left_out.turn == turn


def _record(name: str, kind: Kind, buffer: Tensor, peers: Peers, *, backward: bool) -> None:
    if _records is not None:
        whole = buffer.numel() * buffer.element_size()
        times = 2 if kind == "all_reduce" else 1
        _records.append(Traffic(name, kind, backward, times * whole * (peers.size - 1) // peers.size))


def _exchange(x: Tensor, peers: Peers, name: str, *, backward: bool) -> Tensor:
    """[P, ...] → [P, ...]: piece p goes to rank p, and comes from rank p."""
    x = x.contiguous()
    received = torch.empty_like(x)
    _record(name, "all_to_all", x, peers, backward=backward)
    dist.all_to_all_single(received, x, group=peers.group)
    return received


# --------------------------------------------------------------------------------------------------
# all_to_all


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, name: str) -> Tensor:
        ctx.peers, ctx.name = peers, name
        return _exchange(x, peers, name, backward=not _in_forward())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        if _is_left_out(ctx.name):
            own = torch.zeros_like(gradient)
            own[ctx.peers.rank] = gradient[ctx.peers.rank]
            return own, None, None
        return _exchange(gradient, ctx.peers, ctx.name, backward=True), None, None


def all_to_all(x: Tensor, peers: Peers, name: str) -> Tensor:
    """[P, ...] → [P, ...]: piece p of ``x`` goes to rank p; piece p of the result comes from rank p."""
    if peers.size == 1:
        return x
    received: Tensor = _AllToAll.apply(x, peers, name)
    return received


def transpose(x: Tensor, peers: Peers, name: str) -> Tensor:
    """Rows of a matrix → rows of its transpose: the rotation between a shard of rows and one of columns.

    Args:
        x: [B, R, P·R, C], this rank's R rows.
        peers: the ranks that hold the others.
        name: the use.

    Returns:
        [B, R, P·R, C], this rank's R columns, as rows: ``result[b, j, i] = x[b, i, j]`` over all ranks.
    """
    if peers.size == 1:
        return x.transpose(1, 2)
    pieces = x.unflatten(2, (peers.size, -1)).permute(2, 0, 3, 1, 4)  # [P, B, R (j), R (i), C]
    return all_to_all(pieces, peers, name).permute(1, 2, 0, 3, 4).flatten(2, 3)


# --------------------------------------------------------------------------------------------------
# all_gather and reduce_scatter


class Transfer:
    """An ``all_gather`` under way, or in the backward pass the ``reduce_scatter`` of its gradient."""

    def __init__(self, peers: Peers, name: str) -> None:
        self.peers, self.name = peers, name
        self._work: Any = None
        self._buffer: Tensor | None = None
        self._alive: Tensor | None = None

    def begin_gather(self, x: Tensor) -> None:
        """Start to send."""
        self._alive = x.contiguous()
        self._buffer = x.new_empty((self.peers.size, *x.shape))
        _record(self.name, "all_gather", self._buffer, self.peers, backward=not _in_forward())
        self._work = _gather_into(
            self._buffer.view(-1), self._alive.view(-1), group=self.peers.group, async_op=True
        )

    def begin_scatter(self, gradient: Tensor) -> None:
        """Start to sum the gradients of all ranks, in float32 at least."""
        if _is_left_out(self.name):
            self._work, self._buffer = None, wide(gradient[self.peers.rank])
            return
        self._alive = wide(gradient).contiguous()
        self._buffer = self._alive.new_empty(gradient.shape[1:])
        _record(self.name, "reduce_scatter", self._alive, self.peers, backward=True)
        self._work = _reduce_scatter_into(
            self._buffer.view(-1), self._alive.view(-1), group=self.peers.group, async_op=True
        )

    def end(self) -> Tensor:
        """What has arrived."""
        if self._work is not None:
            self._work.wait()
        buffer = self._buffer
        assert buffer is not None
        self._work = self._buffer = self._alive = None
        return buffer


class _StartGather(torch.autograd.Function):
    """Returns a number without meaning, which ties the two halves together in autograd's graph."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: Transfer) -> Tensor:
        ctx.transfer, ctx.dtype = transfer, x.dtype
        transfer.begin_gather(x)
        return x.new_zeros(())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return ctx.transfer.end().to(ctx.dtype), None


class _FinishGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, transfer: Transfer, widen: bool) -> Tensor:
        ctx.transfer = transfer
        gathered = transfer.end()
        return wide(gathered) if widen else gathered

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        ctx.transfer.begin_scatter(gradient)
        return gradient.new_zeros(()), None, None


class Gathering:
    """The first half of an ``all_gather``; :meth:`wait` is the second.

    Between them other work hides the transfer. In the backward pass autograd runs what was computed
    between them between the two halves of the transposed collective, so that it is hidden likewise.
    """

    def __init__(self, x: Tensor, peers: Peers, name: str) -> None:
        # Autograd's nodes know the transfer but not this object, which knows a node: that would be a
        # circle that nothing ever frees.
        self._transfer = Transfer(peers, name)
        self._token: Tensor = x if peers.size == 1 else _StartGather.apply(x, self._transfer)

    def wait(self, *, widen: bool = False) -> Tensor:
        """[P, ...]: every rank's tensor; ``widen``: in float32 at least, and so are gradients that come back.

        Else the ranks' parts of a gradient are rounded to the tensor's dtype before they are summed.
        """
        if self._transfer.peers.size == 1:
            return wide(self._token.unsqueeze(0)) if widen else self._token.unsqueeze(0)
        gathered: Tensor = _FinishGather.apply(self._token, self._transfer, widen)
        return gathered


def start_gather(x: Tensor, peers: Peers, name: str) -> Gathering:
    """Begin to gather ``x`` [...] from all ranks; go on with :meth:`Gathering.wait`."""
    return Gathering(x, peers, name)


def all_gather(x: Tensor, peers: Peers, name: str) -> Tensor:
    """[...] → [P, ...] at once."""
    return start_gather(x, peers, name).wait()


def gather_rows(x: Tensor, axis: int, peers: Peers, name: str) -> Tensor:
    """All rows of a tensor of which every rank has as many, along ``axis``."""
    return join(all_gather(x, peers, name), axis)


def join(pieces: Tensor, axis: int) -> Tensor:
    """[P, ..., R, ...] → [..., P·R, ...]: the ranks' rows behind each other along ``axis`` of one piece."""
    return pieces.movedim(0, axis).flatten(axis, axis + 1)


def _gathered(x: Tensor, peers: Peers, name: str) -> Tensor:
    """[...] → [P, ...], for a function that has a backward of its own."""
    transfer = Transfer(peers, name)
    transfer.begin_gather(x)
    return transfer.end()


class _GatherOperand(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, name: str) -> Tensor:
        ctx.peers, ctx.name = peers, name
        return _gathered(x, peers, name)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        if _is_left_out(ctx.name):
            return gradient[ctx.peers.rank], None, None
        return _exchanged_sum(gradient, ctx.peers, ctx.name, backward=True), None, None


class _SumScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, name: str) -> Tensor:
        ctx.peers, ctx.name = peers, name
        return _exchanged_sum(x, peers, name, backward=not _in_forward())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        if _is_left_out(ctx.name):
            own = gradient.new_zeros((ctx.peers.size, *gradient.shape))
            own[ctx.peers.rank] = gradient
            return own, None, None
        return _gathered(gradient, ctx.peers, ctx.name), None, None


def gather_operand(x: Tensor, peers: Peers, name: str) -> Tensor:
    """[...] → [P, ...], for a few ranks and a large tensor.

    Its gradients travel in their own dtype and are summed in float32 where they arrive: half of what a
    ``reduce_scatter`` in float32 sends in bfloat16, with one rounding a rank.
    """
    if peers.size == 1:
        return x.unsqueeze(0)
    gathered: Tensor = _GatherOperand.apply(x, peers, name)
    return gathered


def sum_scatter(x: Tensor, peers: Peers, name: str) -> Tensor:
    """[P, ...] → [...]: the ranks' pieces for this rank, summed; the transpose of :func:`gather_operand`."""
    if peers.size == 1:
        return x[0]
    scattered: Tensor = _SumScatter.apply(x, peers, name)
    return scattered


def _exchanged_sum(x: Tensor, peers: Peers, name: str, *, backward: bool) -> Tensor:
    return wide(_exchange(x, peers, name, backward=backward)).sum(0).to(x.dtype)


# --------------------------------------------------------------------------------------------------
# What all ranks compute alike


class _GatherAlike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, name: str) -> Tensor:
        ctx.peers, ctx.name = peers, name
        return _gathered(x, peers, name)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        own = gradient[ctx.peers.rank]
        # Every rank has the same P-th part of the gradient: its P-fold is the sum over the ranks.
        return own if _is_left_out(ctx.name) else own * ctx.peers.size, None, None


class _EnterShards(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, peers: Peers, name: str) -> Tensor:
        ctx.peers, ctx.name = peers, name
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = gradients
        if _is_left_out(ctx.name):
            return gradient, None, None
        total = wide(gradient).clone(memory_format=torch.contiguous_format)
        _record(ctx.name, "all_reduce", total, ctx.peers, backward=True)
        dist.all_reduce(total, group=ctx.peers.group)
        return (total / ctx.peers.size).to(gradient.dtype), None, None


def gather_alike(x: Tensor, axis: int, peers: Peers, name: str) -> Tensor:
    """Gather rows along ``axis`` into a tensor that all ranks go on with alike.

    Backward: its own rows, without a word to the others, as the gradient is the same on all ranks.
    """
    if peers.size == 1:
        return x
    return join(_GatherAlike.apply(x, peers, name), axis)


def enter_shards(x: Tensor, peers: Peers, name: str) -> Tensor:
    """``x``, equal on all ranks, each of which now does another part of the work with it.

    Backward: an ``all_reduce`` of the ranks' parts, of which each gets an equal share.
    """
    if peers.size == 1:
        return x
    entered: Tensor = _EnterShards.apply(x, peers, name)
    return entered


def _in_forward() -> bool:
    """False while autograd runs: what is called then is recomputed for the backward pass."""
    return torch._C._current_graph_task_id() == -1
