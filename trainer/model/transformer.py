"""Attention with pair bias and the diffusion transformer (algorithms 23 to 26).

Shapes: a [B, S, N, C_a], S rows (noised copies) that share one pair representation; s [B, S or 1, N, C_s]
its conditioning; z [B, N, N, C_z], or [B, W, Q, K, C_z] over W windows of Q queries and K keys; mask
[B, N] boolean. N are tokens, or atoms where there are windows.
"""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafold.trainer import ops
from megafold.trainer.model.primitives import LayerNorm, Linear, NormLinear, run_block
from megafold.trainer.model.windows import AtomWindows


class AdaLN(nn.Module):
    """Algorithm 26. Starts as LayerNorm(a) / 2: the layers that read s start at zero."""

    def __init__(self, c_a: int, c_s: int) -> None:
        super().__init__()
        self.norm_s = LayerNorm(c_s, offset=False)
        self.linear_scale = Linear(c_s, c_a, bias=True, init="gate")
        self.linear_shift = Linear(c_s, c_a, init="gate")

    def forward(self, a: Tensor, s: Tensor) -> Tensor:
        """[B, S, N, C_a] → [B, S, N, C_a]."""
        scale, shift = self.linear_scale, self.linear_shift
        return ops.adaln(a, s, self.norm_s.weight, scale.weight, scale.bias, shift.weight)


class ConditionedGate(nn.Module):
    """sigmoid(Linear(s)) of algorithms 24 and 25: starts at sigmoid(-2), about 0.12 ("adaLN-Zero")."""

    def __init__(self, c_a: int, c_s: int) -> None:
        super().__init__()
        self.linear = Linear(c_s, c_a, bias=True, init="gate")
        nn.init.constant_(self.linear.bias, -2.0)

    def forward(self, a: Tensor, s: Tensor) -> Tensor:
        """Gate ``a`` [B, S, N, C_a]."""
        return torch.sigmoid(self.linear(s)) * a


class ConditionedTransition(nn.Module):
    """Algorithm 25."""

    def __init__(self, c_a: int, c_s: int, n: int) -> None:
        super().__init__()
        self.adaln = AdaLN(c_a, c_s)
        self.linear_in = Linear(c_a, 2 * n * c_a, init="relu")
        self.linear_out = Linear(n * c_a, c_a)
        self.gate = ConditionedGate(c_a, c_s)

    def forward(self, a: Tensor, s: Tensor) -> Tensor:
        """[B, S, N, C_a] → [B, S, N, C_a], without the residual."""
        x = ops.swiglu(self.adaln(a, s), self.linear_in.weight, self.linear_out.weight)
        gated: Tensor = self.gate(x, s)
        return gated


class SingleAttention(nn.Module):
    """Algorithm 24 without conditioning, as in the Pairformer."""

    def __init__(self, c_s: int, c_z: int, n_head: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.norm = LayerNorm(c_s)
        self.linear_q = Linear(c_s, c_s, bias=True)
        self.linear_kv = Linear(c_s, 2 * c_s)
        self.bias = NormLinear(c_z, n_head)
        self.linear_gate = Linear(c_s, c_s, init="gate")
        self.linear_out = Linear(c_s, c_s, init="final")

    def forward(self, s: Tensor, z: Tensor, mask: Tensor, *, residual: bool = False) -> Tensor:
        """[B, N, C_s] → [B, N, C_s]; ``residual``: add ``s``."""
        assert self.norm.bias is not None
        assert self.bias.norm.bias is not None
        weights = ops.SingleAttentionWeights(
            norm_weight=self.norm.weight,
            norm_bias=self.norm.bias,
            q=self.linear_q.weight,
            q_bias=self.linear_q.bias,
            kv=self.linear_kv.weight,
            gate=self.linear_gate.weight,
            bias_norm_weight=self.bias.norm.weight,
            bias_norm_bias=self.bias.norm.bias,
            bias=self.bias.linear.weight,
            output=self.linear_out.weight,
        )
        return ops.single_attention(s, z, mask, weights, residual=residual)


class AttentionPairBias(nn.Module):
    """Algorithm 24."""

    def __init__(self, c_a: int, c_z: int, n_head: int, *, c_s: int) -> None:
        super().__init__()
        self.n_head = n_head
        self.norm = AdaLN(c_a, c_s)
        self.linear_q = Linear(c_a, c_a, bias=True)
        self.linear_kv = Linear(c_a, 2 * c_a)
        # Of keys, values and gates, which have none; kept, for making it anew would be a launch each time.
        self.register_buffer("no_offset", torch.zeros(3 * c_a), persistent=False)
        self.bias = NormLinear(c_z, n_head)
        self.linear_gate = Linear(c_a, c_a, init="gate")
        self.linear_out = Linear(c_a, c_a)
        self.gate = ConditionedGate(c_a, c_s)

    def forward(
        self,
        a: Tensor,
        s: Tensor,
        z: Tensor | None,
        mask: Tensor,
        windows: AtomWindows | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """[B, S, N, C_a] → [B, S, N, C_a], without the residual; ``bias``: what :attr:`bias` made of z."""
        q, k, v, gate = self._projections(a, s).chunk(4, dim=-1)
        if bias is None:
            bias = self.bias(z)
        if windows is None:
            o = self._dense(q, k, v, bias, mask)
        else:
            o = self._windowed(q, k, v, bias, mask, windows)
        gated: Tensor = self.gate(ops.gated_output(o, gate, self.linear_out.weight), s)
        return gated

    def _projections(self, a: Tensor, s: Tensor) -> Tensor:
        """q, k, v and gate [B, S, N, 4·C_a]: one product instead of three."""
        weight = torch.cat([self.linear_q.weight, self.linear_kv.weight, self.linear_gate.weight])
        offset = torch.cat([self.linear_q.bias, self.get_buffer("no_offset")])
        return F.linear(self.norm(a, s), weight, offset)

    def _heads(self, x: Tensor) -> Tensor:
        """[..., N, H·D] → [..., H, N, D]."""
        return x.unflatten(-1, (self.n_head, -1)).transpose(-2, -3)

    def _dense(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        heads = self._heads
        o = ops.evoattention(heads(q), heads(k), heads(v), bias.permute(0, 3, 1, 2), mask[:, None])
        return o.transpose(-2, -3).flatten(-2)

    def _windowed(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor, windows: AtomWindows
    ) -> Tensor:
        def fold(x: Tensor) -> Tensor:
            # [B, S, W, n, H·D] → [B·W, S, H, n, D]: windows join the batch, as each has its own bias.
            return self._heads(x).transpose(1, 2).flatten(0, 1)

        o = ops.evoattention(
            fold(windows.queries(q)),
            fold(windows.keys(k)),
            fold(windows.keys(v)),
            bias.flatten(0, 1).permute(0, 3, 1, 2),
            windows.keys(mask.unsqueeze(-1)).squeeze(-1).flatten(0, 1)[:, None],
        )
        o = o.unflatten(0, (q.shape[0], -1)).transpose(1, 2)
        return windows.atoms(o.transpose(-2, -3).flatten(-2))


class DiffusionTransformerBlock(nn.Module):
    """One round of algorithm 23.

    Attention and transition each add to ``a``. The supplement's text has no residual around the
    attention, which its published code has.
    """

    def __init__(self, c_a: int, c_s: int, c_z: int, n_head: int, n_transition: int) -> None:
        super().__init__()
        self.attention = AttentionPairBias(c_a, c_z, n_head, c_s=c_s)
        self.transition = ConditionedTransition(c_a, c_s, n_transition)

    def forward(
        self,
        a: Tensor,
        s: Tensor,
        z: Tensor | None,
        mask: Tensor,
        windows: AtomWindows | None = None,
        bias: Tensor | None = None,
    ) -> Tensor:
        """[B, S, N, C_a] → [B, S, N, C_a]; ``bias``: of z, which is then not needed."""
        a = a + self.attention(a, s, z, mask, windows, bias)
        return a + self.transition(a, s)


class DiffusionTransformer(nn.Module):
    """Algorithm 23; with windows, algorithm 7 (AtomTransformer)."""

    def __init__(self, blocks: list[DiffusionTransformerBlock], *, recompute: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)
        self.recompute = recompute

    def biases(self, z: Tensor) -> list[Tensor]:
        """Each block's pair bias: [B, N, N, H], or [B, W, Q, K, H] over windows."""
        return [cast(DiffusionTransformerBlock, block).attention.bias(z) for block in self.blocks]

    def forward(
        self,
        a: Tensor,
        s: Tensor,
        z: Tensor,
        mask: Tensor,
        windows: AtomWindows | None = None,
        biases: Sequence[Tensor] | None = None,
    ) -> Tensor:
        """[B, S, N, C_a] → [B, S, N, C_a]; ``biases``: what :meth:`biases` gave, if it is known already."""
        for index, block in enumerate(self.blocks):
            pair = (z, mask, windows) if biases is None else (None, mask, windows, biases[index])
            a = run_block(block, a, s, *pair, recompute=self.recompute)
        return a
