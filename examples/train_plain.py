"""A training loop in plain PyTorch on a cache: ``python examples/train_plain.py CACHE``.

The network is tiny: put your own in its place. What this shows is the data: samples in the same order on any
number of ranks and workers, resumed where it stopped.
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader

from megafold.pipeline.stream import CropConfig, MsaConfig, SamplerState, StreamConfig
from megafold.pipeline.stream.torch_dataset import RankSampler, StreamDataset, TorchCollate

parser = argparse.ArgumentParser()
parser.add_argument("cache")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--start", type=int, default=0, help="samples that were used before")
args = parser.parse_args()

config = StreamConfig(seed=0, crop=CropConfig(tokens=64), msa=MsaConfig(rows=64))
dataset = StreamDataset(args.cache, config)
sampler = RankSampler(len(dataset), SamplerState(seed=0, epoch=0, position=args.start))
loader = DataLoader(dataset, sampler=sampler, num_workers=args.workers, collate_fn=TorchCollate())

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(2 * 32, 64), nn.ReLU(), nn.Linear(64, 1), nn.Softplus())
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for step, batch in enumerate(loader):
    if step == args.steps:
        break
    # Predict the distance of each pair of tokens' representative atoms from their MSA profiles.
    atom = batch["rep_atom"].long()
    coords = batch["coords"].gather(1, atom[..., None].expand(-1, -1, 3))
    known = batch["coords_mask"].gather(1, atom) & batch["token_mask"]
    n_token = atom.shape[1]
    profile = batch["profile"][:, :, None].expand(-1, -1, n_token, -1)
    distance = model(torch.cat([profile, profile.transpose(1, 2)], dim=-1))[..., 0]
    pairs = known[:, :, None] & known[:, None]
    loss = (distance - torch.cdist(coords, coords))[pairs].abs().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
