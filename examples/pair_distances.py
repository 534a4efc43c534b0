"""The tiny network of the training loops: put your own in its place."""

import torch
from torch import nn


class PairDistances(nn.Module):
    """Distances of tokens' representative atoms from the profiles of their MSA; its output is the loss."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2 * 32, 64), nn.ReLU(), nn.Linear(64, 1), nn.Softplus())

    def forward(self, batch):
        atom = batch["rep_atom"].long()
        coords = batch["coords"].gather(1, atom[..., None].expand(-1, -1, 3))
        known = batch["coords_mask"].gather(1, atom) & batch["token_mask"]
        profile = batch["profile"][:, :, None].expand(-1, -1, atom.shape[1], -1)
        distance = self.layers(torch.cat([profile, profile.transpose(1, 2)], dim=-1))[..., 0]
        pairs = known[:, :, None] & known[:, None]
        return (distance - torch.cdist(coords, coords))[pairs].abs().mean()
