"""Bytes for every pair of tokens that a training step keeps for its backward pass, by part of AF3's network.

    python benchmarks/saved_bytes.py --json saved_bytes.json

Nothing is computed: the network runs on torch's fake tensors, and what autograd saves is counted, each piece
of memory once, weights left out; in float32, and in bfloat16 by autocast. A part runs at three lengths, which
give the bytes that grow with the square of the length; the rest is left out. Attention keeps what a kernel
keeps: queries, keys, values, bias, mask, output and the denominators, not its logits. All else is plain
PyTorch, as back end `eager` has it.
"""

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from megafold.trainer import ops
from megafold.trainer.losses import confidence_losses
from megafold.trainer.model.confidence import ConfidenceHead
from megafold.trainer.model.diffusion import DiffusionModule
from megafold.trainer.model.model import AlphaFold3
from megafold.trainer.model.outputs import TrunkOutputs
from megafold.trainer.model.pairformer import PairformerBlock
from megafold.trainer.model.primitives import run_block
from megafold.trainer.ops import registry
from megafold.trainer.parallel.mesh import Peers
from megafold.trainer.parallel.pairformer import pairformer_block
from megafold.trainer.parallel.shards import Shards
from megafold.trainer.parallel.triangle import triangle_attention, triangle_multiplication
from megafold.trainer.presets.model import AF3

LENGTHS = (256, 512, 1024)
COPIES = 1


class Attention(torch.autograd.Function):
    """What a kernel keeps of attention."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, *others: Tensor | None) -> Tensor:
        out = torch.empty_like(q)
        ctx.save_for_backward(q, k, v, *others, out, q.new_empty(q.shape[:-1], dtype=torch.float32))
        return out

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError


@dataclass(frozen=True)
class Part:
    """A part of the network: ``run`` takes N; the answer is what it computes."""

    name: str
    run: Callable[[int], Any]


def counted(part: Part, n: int, weights: set[int]) -> int:
    """Bytes that autograd saves while the part runs at length ``n``."""
    seen: dict[int, Tensor] = {}

    def keep(x: Tensor) -> Tensor:
        key = x.untyped_storage()._cdata
        if key not in weights:
            seen[key] = x  # alive, so that no other gets its number
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        result = part.run(n)
    total = sum(x.untyped_storage().nbytes() for x in seen.values())
    del result
    return total


def per_pair(part: Part, weights: set[int]) -> float:
    """The coefficient of N² in the parabola through three lengths."""
    return float(np.polyfit(LENGTHS, [counted(part, n, weights) for n in LENGTHS], 2)[0])


def new(*shape: int) -> Tensor:
    dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else torch.float32
    return torch.empty(shape, dtype=dtype, requires_grad=True)


def ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.bool)


def parts(model: AlphaFold3) -> list[Part]:
    """Of the trunk, one block of each kind; of the diffusion module, all that has pairs."""
    c_s, c_z, alone = AF3.c_s, AF3.c_z, Peers()
    block = cast(PairformerBlock, model.trunk.pairformer.blocks[0])
    pair = block.pair

    def whole_block(n: int, *, recompute: bool) -> Any:
        run = partial(pairformer_block, block, shards=Shards(alone, n))
        return run_block(
            run, new(1, n, c_s), new(1, n, n, c_z), ones(1, n), ones(1, n, n), recompute=recompute
        )

    return [
        Part(
            "triangle multiplication",
            lambda n: triangle_multiplication(
                pair.multiplication_outgoing, new(1, n, n, c_z), ones(1, n, n), alone
            ),
        ),
        Part(
            "triangle attention",
            lambda n: triangle_attention(pair.attention_starting, new(1, n, n, c_z), ones(1, n, n), alone),
        ),
        Part("transition of z", lambda n: pair.transition(new(1, n, n, c_z))),
        Part("Pairformer block", partial(whole_block, recompute=False)),
        Part("Pairformer block, recomputed", partial(whole_block, recompute=True)),
        Part("distogram", lambda n: model.trunk.distogram_head(new(1, n, n, c_z))),
        *diffusion_parts(model.diffusion),
        *confidence_parts(cast(ConfidenceHead, model.confidence)),
    ]


def diffusion_parts(diffusion: DiffusionModule) -> list[Part]:
    """Conditioning of z, and the transformer whose blocks have a norm and a bias of it each."""
    c_s, c_z, blocks = AF3.c_s, AF3.c_z, AF3.diffusion.n_block

    def batch(n: int) -> dict[str, Tensor]:
        names = "asym_id entity_id sym_id residue_index token_index".split()
        features = {name: torch.zeros(1, n, dtype=torch.int32) for name in names}
        return features | {"token_mask": ones(1, n)}

    def transform(n: int, *, recompute: bool) -> Any:
        diffusion.transformer.recompute = recompute
        a, s = new(1, COPIES, n, AF3.c_token), new(1, COPIES, n, c_s)
        return diffusion.transformer(a, s, new(1, n, n, c_z), ones(1, n))

    def condition(n: int) -> Any:
        return diffusion.conditioning.shared_pair(batch(n), new(1, n, n, c_z))

    return [
        Part("diffusion: conditioning of z", condition),
        Part(f"diffusion: {blocks} blocks", partial(transform, recompute=False)),
        Part(f"diffusion: {blocks} blocks, recomputed", partial(transform, recompute=True)),
    ]


def confidence_parts(head: ConfidenceHead) -> list[Part]:
    """What the confidence head keeps besides its blocks' inputs: embedding, logits, and their losses."""

    def judge(n: int, *, with_pae: bool) -> Any:
        # One atom a token: what has pairs is of tokens.
        each = torch.arange(n).expand(1, n)
        batch = {
            **dict.fromkeys("token_mask atom_mask coords_mask is_protein frame_mask".split(), ones(1, n)),
            **dict.fromkeys("is_dna is_rna is_ligand".split(), torch.zeros(1, n, dtype=torch.bool)),
            **dict.fromkeys("atom_to_token token_atom_start center_atom rep_atom".split(), each),
            "token_atom_count": torch.ones(1, n, dtype=torch.int32),
            "frame_atoms": each.unsqueeze(-1).expand(1, n, 3),
            "coords": torch.zeros(1, n, 3),
        }
        s, z, coords = new(1, n, AF3.c_s), new(1, n, n, AF3.c_z), torch.zeros(1, n, 3)
        inputs = new(1, n, AF3.c_s_inputs)
        trunk = TrunkOutputs(s_inputs=inputs, s_trunk=s, z_trunk=z, distogram_logits=z)
        embedded = head.embed(batch, trunk, coords)
        logits = head.logits(batch, s, new(*z.shape), coords)
        with torch.autocast("cpu", enabled=False):
            return embedded, confidence_losses(batch, logits, with_pae=with_pae)

    return [
        Part("confidence: without its blocks", partial(judge, with_pae=True)),
        Part("confidence: without PAE's loss", partial(judge, with_pae=False)),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    registry._PROVIDERS["triton"] = None  # its place is taken by the count of what its attention keeps
    registry.register("evoattention", "triton")(Attention.apply)
    nn.init.trunc_normal_ = lambda tensor, **_: tensor  # which looks at values, and there are none
    rows: dict[str, dict[str, float]] = {}
    with FakeTensorMode(), ops.use_backend("triton"):
        model = AlphaFold3(AF3).train()
        weights = {x.untyped_storage()._cdata for x in (*model.parameters(), *model.buffers())}
        for name, low in (("float32", False), ("bfloat16", True)):
            for part in parts(model):
                with torch.autocast("cpu", torch.bfloat16, enabled=low):
                    rows.setdefault(part.name, {})[name] = per_pair(part, weights)
    print("bytes a pair of tokens            float32  bfloat16")
    for name, by_dtype in rows.items():
        print(f"{name:32s} {by_dtype['float32']:8.0f}  {by_dtype['bfloat16']:8.0f}")
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
