"""The template embedder (algorithm 16).

Shapes: z [B, N, N, C_z]; T templates, which join the batch axis within. Coordinates in Å.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megafold.trainer.model.config import N_RESTYPE, ModelConfig
from megafold.trainer.model.pairformer import PairUpdate
from megafold.trainer.model.primitives import LayerNorm, Linear, NormLinear, run_block
from megafold.trainer.ops.precision import full_precision

#: Distogram of the pseudo-beta atoms (SI 2.9): 38 bins between these edges, and one above.
N_BINS = 39
MIN_BIN, MAX_BIN = 3.25, 50.75
_N_FEATURES = N_BINS + 1 + 3 + 1 + 2 * N_RESTYPE
_TRANSITION_N = 2


def template_distogram(pseudo_beta: Tensor, rows: slice = slice(None)) -> Tensor:
    """One-hot distances [..., N, N, 39] of ``pseudo_beta`` [..., N, 3]; all zero below 3.25 Å."""
    offsets = pseudo_beta[..., rows, :].unsqueeze(-2) - pseudo_beta.unsqueeze(-3)
    distance = offsets.square().sum(-1).sqrt()
    edges = torch.linspace(MIN_BIN, MAX_BIN, N_BINS, device=pseudo_beta.device, dtype=pseudo_beta.dtype)
    index = torch.searchsorted(edges, distance.contiguous())
    return F.one_hot(index, N_BINS + 1)[..., 1:]


def backbone_frames(atoms: Tensor) -> Tensor:
    """Rotations [..., 3, 3] (columns are axes) from N, CA and C in ``atoms`` [..., 3, 3].

    CA is the origin, C lies on the x axis and N in the xy plane (AF2 SI algorithm 21).
    Atoms that coincide give finite numbers, not a rotation.
    """
    n, ca, c = atoms.unbind(-2)
    e1 = F.normalize(c - ca, dim=-1)
    v2 = n - ca
    e2 = F.normalize(v2 - e1 * (e1 * v2).sum(-1, keepdim=True), dim=-1)
    return torch.stack([e1, e2, torch.linalg.cross(e1, e2)], dim=-1)


def unit_vectors(atoms: Tensor, rows: slice = slice(None)) -> Tensor:
    """Direction of token j's CA in token i's frame, [..., N, N, 3], from ``atoms`` [..., N, 3, 3]."""
    ca = atoms[..., 1, :]
    offsets = ca.unsqueeze(-3) - ca[..., rows, :].unsqueeze(-2)
    frames = backbone_frames(atoms[..., rows, :, :])
    local = torch.einsum("...iyx,...ijy->...ijx", frames, offsets)
    return F.normalize(local, dim=-1)


def template_features(batch: dict[str, Tensor], rows: slice = slice(None)) -> Tensor:
    """Pair features of every template, [B, T, N, N, 108]; only those rows i of it, if given.

    Distogram, pseudo-beta mask, unit vectors, frame mask (all within a chain alone), restype of j and
    of i. Single-chain templates say nothing of how chains lie to each other.
    """
    asym_id = batch["asym_id"]
    same_chain = (asym_id[:, rows, None] == asym_id[:, None, :])[:, None]
    beta_mask = _pair(batch["template_pseudo_beta_mask"], rows) & same_chain
    frame_mask = _pair(batch["template_backbone_frame_mask"], rows) & same_chain
    restype = F.one_hot(batch["template_restype"].long(), N_RESTYPE)
    shape = (*beta_mask.shape, N_RESTYPE)
    parts = [
        template_distogram(batch["template_pseudo_beta"], rows) * beta_mask.unsqueeze(-1),
        beta_mask.unsqueeze(-1),
        unit_vectors(batch["template_backbone_frame"], rows) * frame_mask.unsqueeze(-1),
        frame_mask.unsqueeze(-1),
        restype.unsqueeze(-3).expand(shape),
        restype[..., rows, :].unsqueeze(-2).expand(shape),
    ]
    return torch.cat(parts, dim=-1)


def _pair(mask: Tensor, rows: slice) -> Tensor:
    return mask[..., rows].unsqueeze(-1) & mask.unsqueeze(-2)


class TemplateEmbedder(nn.Module):
    """Algorithm 16. The mean is over the templates that have an atom in the crop."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        c = config.template.c
        self.query = NormLinear(config.c_z, c, init="relu")
        self.linear_features = Linear(_N_FEATURES, c, init="relu")
        self.blocks = nn.ModuleList(
            PairUpdate(c, config.pairformer, n_transition=_TRANSITION_N) for _ in range(config.n_template)
        )
        self.norm_out = LayerNorm(c)
        self.linear_out = Linear(c, config.c_z, init="relu")
        self.recompute = config.activation_checkpointing

    def forward(self, batch: dict[str, Tensor], z: Tensor, pair_mask: Tensor) -> Tensor:
        """[B, N, N, C_z] to add to ``z``; zeros where there is no template."""
        n_template = batch["template_restype"].shape[1]
        if n_template == 0:
            return torch.zeros_like(z)
        with full_precision(z):
            features = template_features(batch)
        features = features.to(self.linear_features.weight.dtype)
        v = self.query(z)[:, None] + self.linear_features(features)
        v = v.flatten(0, 1)
        mask = pair_mask.repeat_interleave(n_template, dim=0)
        for block in self.blocks:
            v = run_block(block, v, mask, recompute=self.recompute)
        return self.mean(batch, v)

    def mean(self, batch: dict[str, Tensor], v: Tensor) -> Tensor:
        """[B·T, I, J, c] → [B, I, J, C_z]: the mean over the templates that are there."""
        v = self.norm_out(v).unflatten(0, (len(batch["template_restype"]), -1))
        present = batch["template_pseudo_beta_mask"] | batch["template_backbone_frame_mask"]
        weight = present.any(-1).to(v.dtype)
        weight = weight / weight.sum(1, keepdim=True).clamp(min=1)
        u = torch.einsum("bt,btijc->bijc", weight, v)
        out: Tensor = self.linear_out(torch.relu(u))
        return out
