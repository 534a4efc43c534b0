"""The trunk over shards (algorithm 1, lines 1 to 14 and 17) and its template embedder (algorithm 16).

Shapes: s [B, N, C_s], the same on all ranks; z [B, R, N, C_z], this rank's rows. N is padded. In the batch
every feature is whole, but ``token_bonds`` [B, R, N].
"""

from functools import partial
from typing import cast

import torch
from torch import Tensor

from megafold.trainer.model.msa_rows import with_msa_of
from megafold.trainer.model.outputs import TrunkOutputs
from megafold.trainer.model.pairformer import PairUpdate
from megafold.trainer.model.primitives import run_block
from megafold.trainer.model.template import TemplateEmbedder, template_features
from megafold.trainer.model.trunk import DistogramHead, Trunk
from megafold.trainer.ops.precision import full_precision
from megafold.trainer.parallel.collectives import transpose, use
from megafold.trainer.parallel.mesh import Peers
from megafold.trainer.parallel.msa import msa_module
from megafold.trainer.parallel.pairformer import pairformer
from megafold.trainer.parallel.shards import Shards
from megafold.trainer.parallel.triangle import pair_update

DISTOGRAM = use("distogram.transpose", "the distogram's logits, for its symmetric part")


def template_embedder(
    module: TemplateEmbedder, batch: dict[str, Tensor], z: Tensor, pair_mask: Tensor, shards: Shards
) -> Tensor:
    """[B, R, N, C_z] to add to ``z``; zeros where there is no template."""
    n_template = batch["template_restype"].shape[1]
    if n_template == 0:
        return torch.zeros_like(z)
    with full_precision(z):
        features = template_features(batch, shards.rows).to(module.linear_features.weight.dtype)
    v = (module.query(z)[:, None] + module.linear_features(features)).flatten(0, 1)
    mask = pair_mask.repeat_interleave(n_template, dim=0)
    for block in module.blocks:
        run = partial(pair_update, cast(PairUpdate, block), shards=shards)
        v = run_block(run, v, mask, recompute=module.recompute)
    return module.mean(batch, v)


def distogram_head(head: DistogramHead, z: Tensor, peers: Peers) -> Tensor:
    """[B, R, N, C_z] → [B, R, N, n_bins], rows of a symmetric matrix."""
    logits = head.linear(z)
    symmetric: Tensor = logits + transpose(logits, peers, DISTOGRAM)
    return symmetric


def run_trunk(module: Trunk, batch: dict[str, Tensor], n_cycles: int, shards: Shards) -> TrunkOutputs:
    """Recycle ``n_cycles`` times; of ``z_trunk`` and ``distogram_logits`` the result has this rank's rows."""
    mask = batch["token_mask"]
    pair_mask = shards.pair_mask(mask)
    s_inputs = module.input_embedder(batch)
    s_init, z_init = _initial(module, batch, s_inputs, shards.rows)
    s, z = torch.zeros_like(s_init), torch.zeros_like(z_init)
    for cycle in range(n_cycles):
        last = cycle == n_cycles - 1
        if last:
            # Autocast keeps the weights that it cast without gradients, and would use them again.
            torch.clear_autocast_cache()
        with torch.set_grad_enabled(torch.is_grad_enabled() and last):
            z = z_init + module.recycle_z(z)
            z = z + template_embedder(module.template_embedder, batch, z, pair_mask, shards)
            rows = with_msa_of(batch, cycle)
            z = msa_module(module.msa_module, rows, s_inputs, z, pair_mask, shards)
            s = s_init + module.recycle_s(s)
            s, z = pairformer(module.pairformer, s, z, mask, pair_mask, shards)
    logits = distogram_head(module.distogram_head, z, shards.peers)
    return TrunkOutputs(s_inputs=s_inputs, s_trunk=s, z_trunk=z, distogram_logits=logits)


def _initial(module: Trunk, batch: dict[str, Tensor], s_inputs: Tensor, rows: slice) -> tuple[Tensor, Tensor]:
    """s and this rank's rows of z before the first cycle (lines 2 to 5)."""
    z = module.linear_z_row(s_inputs[:, rows])[:, :, None] + module.linear_z_column(s_inputs)[:, None]
    z = z + module.relative_position(batch, rows)
    bonds = batch["token_bonds"].unsqueeze(-1).to(module.linear_bonds.weight.dtype)
    return module.linear_s_init(s_inputs), z + module.linear_bonds(bonds)
