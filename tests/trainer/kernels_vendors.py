"""What stands for a slow instruction sequence gives the same numbers; in Triton's interpreter or on a GPU."""

import torch
import triton
import triton.language as tl

from megafold.trainer.kernels.vendors import rounded
from tests.trainer.kernels_checks import DEVICE


@triton.jit
def rounding_kernel(x, out, N: tl.constexpr):
    n = tl.arange(0, N)
    tl.store(out + n, rounded(tl.load(x + n)))


def rounding(x: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(x, float("nan"), dtype=torch.bfloat16)
    rounding_kernel[(1,)](x, out, len(x))
    return out


def test_rounding_is_to_nearest():
    x = (torch.randn(4096) * torch.logspace(-38, 38, 4096)).to(DEVICE)
    x[:4] = torch.tensor([0.0, -0.0, float("inf"), -float("inf")])
    assert torch.equal(rounding(x), x.to(torch.bfloat16))


def test_rounding_goes_away_from_zero_where_two_are_as_near():
    x = torch.tensor([1 + 2**-8, -1 - 2**-8, 1 + 3 * 2**-8, -1 - 3 * 2**-8]).to(DEVICE)
    assert rounding(x).tolist() == [1 + 2**-7, -1 - 2**-7, 1 + 2**-6, -1 - 2**-6]


def test_rounding_keeps_what_is_no_number():
    # The NaN that AMD's instructions give, and those that come from bfloat16.
    bits = torch.tensor([0x7FC00000, -0x400000, 0x7FFF0000, 0x7F810000], dtype=torch.int32)
    assert rounding(bits.view(torch.float32).to(DEVICE)).isnan().all()
