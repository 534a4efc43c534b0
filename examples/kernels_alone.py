"""The kernels in a model of your own, without cache and trainer: ``python examples/kernels_alone.py``.

``use_backend`` says what runs the operators within it: ``triton``, ``compile`` or ``eager``, the plain
PyTorch of ``trainer/ops``. The backward pass runs what the forward pass ran. Parameters stay your modules'.
"""

import argparse
from contextlib import nullcontext

import torch
from torch import nn

from megafold.trainer.ops import (
    TriangleMultiplicationWeights,
    backend_report,
    evoattention,
    triangle_multiplication,
    use_backend,
)


class TriangleMultiplication(nn.Module):
    """AF3's algorithm 12 with modules as many models have them; ``plain`` is what yours may look like now."""

    def __init__(self, c_z, c):
        super().__init__()
        self.norm_in, self.norm_out = nn.LayerNorm(c_z), nn.LayerNorm(c)
        # a's channels, then b's. A model with a layer for each hands over torch.cat([a.weight, b.weight]).
        self.p_in, self.g_in = nn.Linear(c_z, 2 * c, bias=False), nn.Linear(c_z, 2 * c, bias=False)
        self.p_out, self.g_out = nn.Linear(c, c_z, bias=False), nn.Linear(c_z, c_z, bias=False)

    def plain(self, z, mask):
        normal = self.norm_in(z)
        a, b = (torch.sigmoid(self.g_in(normal)) * self.p_in(normal) * mask[..., None]).chunk(2, dim=-1)
        x = torch.einsum("...ikc,...jkc->...ijc", a, b)
        return torch.sigmoid(self.g_out(normal)) * self.p_out(self.norm_out(x))

    def forward(self, z, mask):
        weights = TriangleMultiplicationWeights(
            norm_in_weight=self.norm_in.weight,
            norm_in_bias=self.norm_in.bias,
            projection=self.p_in.weight,
            gate=self.g_in.weight,
            norm_out_weight=self.norm_out.weight,
            norm_out_bias=self.norm_out.bias,
            output=self.p_out.weight,
            output_gate=self.g_out.weight,
        )
        return triangle_multiplication(z, mask, weights, outgoing=True)


class RowAttention(nn.Module):
    """Attention along the rows of z, with a bias that the rows share: the core of triangle attention."""

    def __init__(self, c_z, n_head):
        super().__init__()
        self.n_head = n_head
        self.qkv = nn.Linear(c_z, 3 * c_z, bias=False)
        self.bias = nn.Linear(c_z, n_head, bias=False)

    def heads(self, z):
        """q, k, v of [B, N, H, N, D], and the bias, [B, H, N, N]."""
        q, k, v = self.qkv(z).unflatten(-1, (3, self.n_head, -1)).permute(3, 0, 1, 4, 2, 5)
        return q, k, v, self.bias(z).permute(0, 3, 1, 2)

    def plain(self, z, mask):
        q, k, v, bias = self.heads(z)
        shared = bias[:, None].masked_fill(~mask[:, :, None, None, :], float("-inf"))
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=shared)
        return attended.transpose(2, 3).flatten(-2)

    def forward(self, z, mask):
        q, k, v, bias = self.heads(z)
        return evoattention(q, k, v, bias, mask).transpose(2, 3).flatten(-2)


parser = argparse.ArgumentParser()
parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
parser.add_argument("--backend", default="triton", choices=["triton", "compile", "eager"])
parser.add_argument("--tokens", type=int, default=48)
args = parser.parse_args()

torch.manual_seed(0)
z = torch.randn(1, args.tokens, args.tokens, 128, device=args.device)
mask = torch.ones(z.shape[:-1], dtype=torch.bool, device=args.device)
mask[:, :, -3:] = False  # absent keys: padding
on_gpu = z.device.type == "cuda"
for module in (TriangleMultiplication(128, 128), RowAttention(128, 4)):
    module.to(args.device)
    results = []
    for forward in (module.plain, module):
        module.zero_grad()
        with (
            torch.autocast("cuda", torch.bfloat16) if on_gpu else nullcontext(),
            use_backend(args.backend),
        ):
            out = forward(z, mask)
        out.float().square().sum().backward()
        results.append([out.detach().float(), *(parameter.grad.float() for parameter in module.parameters())])
    off = max(float((mine - plain).norm() / plain.norm()) for plain, mine in zip(*results, strict=True))
    print(f"{type(module).__name__}: output and gradients are off plain PyTorch's by {off:.1e} at most")
for name in ("triangle_multiplication", "evoattention"):
    print(f"{name}: {backend_report(args.backend)[name]}")
