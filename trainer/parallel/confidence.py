"""The confidence head in an SP group (algorithm 31).

Shapes: s [B, N, C_s], the same on all ranks; z [B, R, N, C_z], this rank's rows. N is padded.
"""

from torch import Tensor

from megafold.trainer.model.confidence import ConfidenceHead
from megafold.trainer.model.outputs import ConfidenceLogits, TrunkOutputs
from megafold.trainer.parallel.collectives import transpose, use
from megafold.trainer.parallel.pairformer import pairformer
from megafold.trainer.parallel.shards import Shards

PDE = use("confidence.transpose", "logits of the distance error, for their symmetric part")


def judge(
    head: ConfidenceHead, batch: dict[str, Tensor], trunk: TrunkOutputs, coords: Tensor, shards: Shards
) -> ConfidenceLogits:
    """What :class:`ConfidenceHead` says: this rank's rows of the pair-shaped logits, all of the others.

    ``coords`` [B, A, 3] must be the same on all ranks.
    """
    mask = batch["token_mask"]
    coords = coords.detach()
    z = head.embed(batch, trunk, coords, shards.rows)
    s = trunk.s_trunk.detach()
    s, z = pairformer(head.pairformer, s, z, mask, shards.pair_mask(mask), shards)
    plddt, resolved = head.of_atoms(batch, s)
    half = head.pde(z)
    return ConfidenceLogits(
        plddt=plddt,
        resolved=resolved,
        pae=head.pae(z),
        pde=half + transpose(half, shards.peers, PDE),
        coords=coords,
    )
