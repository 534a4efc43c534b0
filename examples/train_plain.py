"""A training loop in plain PyTorch on a cache: ``python examples/train_plain.py CACHE``.

A run that goes on from a checkpoint has the samples that an unbroken one would have had.
"""

import argparse
from itertools import chain, islice, repeat
from pathlib import Path

import torch
from pair_distances import PairDistances
from torch.utils.data import DataLoader

from megafold.pipeline.stream import CropConfig, MsaConfig, SamplerState, StreamConfig
from megafold.pipeline.stream.torch_dataset import RankSampler, StreamDataset, TorchCollate

parser = argparse.ArgumentParser()
parser.add_argument("cache")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--checkpoint", type=Path, help="go on from this file; write it")
args = parser.parse_args()

torch.manual_seed(0)
model = PairDistances()
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
parts = {"model": model, "optimizer": optimizer}
dataset = StreamDataset(args.cache, StreamConfig(crop=CropConfig(tokens=64), msa=MsaConfig(rows=64)))
sampler = RankSampler(len(dataset), SamplerState(seed=0))
if args.checkpoint and args.checkpoint.exists():
    saved = torch.load(args.checkpoint)
    for name, part in parts.items():
        part.load_state_dict(saved[name])
    sampler.load_state_dict(saved["sampler"])
start = sampler.state
loader = DataLoader(dataset, sampler=sampler, num_workers=args.workers, collate_fn=TorchCollate())
for step, batch in enumerate(islice(chain.from_iterable(repeat(loader)), args.steps)):
    loss = model(batch)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    print(f"step {step} loss {loss.item():.4f}")
if args.checkpoint:
    saved = {name: part.state_dict() for name, part in parts.items()}
    saved["sampler"] = start.advanced(args.steps, len(dataset)).to_dict()
    torch.save(saved, args.checkpoint)
