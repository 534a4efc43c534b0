"""Batches for an SP group: tokens padded to a multiple of P, pair-shaped features cut to a rank's rows."""

from collections.abc import Mapping
from copy import copy
from typing import Final

from torch import Tensor

from megafold.trainer.batches import Batch
from megafold.trainer.errors import DataError
from megafold.trainer.model.msa_rows import DRAWS
from megafold.trainer.parallel.mesh import Peers
from megafold.trainer.parallel.shards import Shards, pad_tokens

#: Axes of tokens in the features of a sample, the batch axis being 0. Padding is false or 0: masks keep it
#: out of every result.
TOKEN_AXES: Final[Mapping[str, tuple[int, ...]]] = {
    **dict.fromkeys(
        "token_mask residue_index token_index asym_id entity_id sym_id restype is_protein is_rna is_dna "
        "is_ligand token_atom_start token_atom_count center_atom rep_atom frame_mask frame_atoms "
        "deletion_mean profile".split(),
        (1,),
    ),
    **dict.fromkeys("msa has_deletion deletion_value msa_mask".split(), (2,)),
    **dict.fromkeys(
        "template_restype template_pseudo_beta_mask template_backbone_frame_mask template_pseudo_beta "
        "template_backbone_frame".split(),
        (2,),
    ),
    "token_bonds": (1, 2),
}

#: Number of tokens before they were padded, under which a cut batch holds it.
N_TOKEN: Final = "n_token"


def shard_batch(batch: Batch, peers: Peers) -> Batch:
    """A rank's share of a batch: the features with N padded to P·R tokens, pair-shaped ones [B, R, P·R].

    Features without an axis of tokens are as they were.

    Raises:
        DataError: the batch has no ``token_mask``.
    """
    if "token_mask" not in batch:
        raise DataError(f"a batch lacks the feature 'token_mask'; it has {sorted(batch)}")
    shards = Shards(peers, batch["token_mask"].shape[1])
    cut: Batch = copy(batch)  # of its kind: a loader may hand over some kinds at less cost
    cut[N_TOKEN] = shards.n_token
    for name, axes in TOKEN_AXES.items():
        if name not in batch:
            continue
        value: Tensor = batch[name]
        for axis in axes:
            value = pad_tokens(value, axis, shards.n_padded)
        # A copy: a view would keep, and send between processes, what other ranks hold.
        cut[name] = value[:, shards.rows].clone() if len(axes) == 2 else value
    if DRAWS in batch:
        cut[DRAWS] = {name: pad_tokens(value, 3, shards.n_padded) for name, value in batch[DRAWS].items()}
    return cut
