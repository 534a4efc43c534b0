"""What the first call at a length costs: a Pairformer block, forward and backward, on back end `triton`.

    python benchmarks/first_calls.py --lengths 384 391 400 50 96 769 768 16

Triton's cache is empty at first. With `--workers` the kernels of all buckets of lengths are compiled ahead,
so many at a time, as the trainer does; 0: each when it is first launched. Prints seconds, and how many
kernels were compiled meanwhile.
"""

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

C_S, C_Z = 384, 128


def inputs(length: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    s = torch.randn(1, length, C_S, device="cuda").requires_grad_()
    z = torch.randn(1, length, length, C_Z, device="cuda", dtype=torch.bfloat16).requires_grad_()
    pair_mask = torch.ones(1, length, length, dtype=torch.bool, device="cuda")
    return s, z, pair_mask[:, 0], pair_mask


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[384, 391, 400, 50, 96, 769, 768, 16])
    parser.add_argument("--workers", type=int, default=len(os.sched_getaffinity(0)))
    options = parser.parse_args()
    os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()

    import triton

    from megafold.trainer import ops
    from megafold.trainer.kernels.ahead import compile_ahead
    from megafold.trainer.kernels.evoattention.tiles import architecture, bucket
    from megafold.trainer.model.config import PairformerConfig
    from megafold.trainer.model.pairformer import PairformerBlock
    from megafold.trainer.model.primitives import run_block
    from megafold.trainer.rehearsal import rehearsal

    compiled: list[Any] = []
    triton.knobs.runtime.jit_post_compile_hook = lambda **told: compiled.append(told)
    block = PairformerBlock(C_S, C_Z, PairformerConfig()).cuda().train()

    def forward(length: int) -> tuple[Tensor, Tensor]:
        with torch.autocast("cuda", torch.bfloat16), ops.use_backend("triton"):
            results: tuple[Tensor, Tensor] = run_block(block, *inputs(length), recompute=False)
        return results

    def timed(what: str, run: Any) -> None:
        compiled.clear()
        began = time.perf_counter()
        run()
        torch.cuda.synchronize()
        print(f"{what}: {time.perf_counter() - began:.2f} s, {len(compiled)} kernels compiled", flush=True)

    def step(length: int) -> None:
        results = forward(length)
        torch.autograd.backward(results, [torch.ones_like(x) for x in results])

    def ahead(length: int) -> None:
        with compile_ahead(options.workers), rehearsal():
            forward(length)

    # PyTorch's and cuBLAS's own beginnings.
    timed("a product", lambda: inputs(16)[1] @ torch.ones(C_Z, C_Z, device="cuda", dtype=torch.bfloat16))
    target = architecture(torch.device("cuda", torch.cuda.current_device()))
    if options.workers:
        for length in {bucket(target, n): n for n in options.lengths}.values():
            timed(f"ahead for {length} and its bucket", lambda n=length: ahead(n))
    for length in options.lengths:
        timed(f"{length}, first", lambda n=length: step(n))
        timed(f"{length}, second", lambda n=length: step(n))


if __name__ == "__main__":
    main()
