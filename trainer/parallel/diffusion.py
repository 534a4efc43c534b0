"""The diffusion module in an SP group (algorithm 20): each rank denoises some of the noised copies.

Shapes: S noised copies, of which a rank has S/P, rounded up; z [B, R, N, C_z], this rank's rows.
"""

import torch
from torch import Tensor

from megafold.trainer.model.diffusion import DiffusionContext, DiffusionModule
from megafold.trainer.model.outputs import TrunkOutputs
from megafold.trainer.parallel.collectives import enter_shards, gather_rows, use
from megafold.trainer.parallel.mesh import Peers
from megafold.trainer.parallel.shards import Shards

PAIR = use("diffusion.pair", "the conditioned pair representation, once a step")
SINGLE = use("diffusion.single", "gradient of the trunk's single representation, once a step")


def prepare(
    module: DiffusionModule, batch: dict[str, Tensor], trunk: TrunkOutputs, shards: Shards
) -> DiffusionContext:
    """What copies share, whole on every rank. The pair part is conditioned before it is gathered."""
    conditioning, peers = module.conditioning, shards.peers
    z = gather_rows(conditioning.shared_pair(batch, trunk.z_trunk, shards.rows), 1, peers, PAIR)
    s_trunk = enter_shards(trunk.s_trunk, peers, SINGLE)
    s = conditioning.single(torch.cat([s_trunk, trunk.s_inputs], dim=-1))
    atoms = module.encoder.conditioner(batch, s_trunk, z)
    return DiffusionContext(s=s, z=z, atoms=atoms, token_mask=batch["token_mask"])


def own_copies(n_copies: int, peers: Peers, like: Tensor) -> tuple[Tensor, Tensor]:
    """Which copies this rank denoises, and what each of them counts in a mean over all.

    Where copies do not go round, the last one is denoised again with weight 0: every rank must run the
    same backward pass, or the others wait for it for ever.

    Returns:
        Indices [S/P], and weights [S/P], 1/S or 0, in the dtype of ``like``.
    """
    each = -(-n_copies // peers.size)
    index = torch.arange(peers.rank * each, (peers.rank + 1) * each, device=like.device)
    weight = (index < n_copies).to(like.dtype) / n_copies
    return index.clamp(max=n_copies - 1), weight
