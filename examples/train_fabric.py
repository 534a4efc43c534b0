"""A training loop in Lightning Fabric on a cache: ``python examples/train_fabric.py CACHE --devices 2``.

The order of the samples is the same on any number of devices, and after a checkpoint of another number.
"""

import argparse
from itertools import chain, islice, repeat
from pathlib import Path

import torch
from lightning_fabric import Fabric
from pair_distances import PairDistances
from torch.utils.data import DataLoader

from megafold.pipeline.stream import CropConfig, MsaConfig, SamplerState, StreamConfig
from megafold.pipeline.stream.torch_dataset import RankSampler, StreamDataset, TorchCollate

parser = argparse.ArgumentParser()
parser.add_argument("cache")
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--workers", type=int, default=0)
parser.add_argument("--devices", type=int, default=1)
parser.add_argument("--accelerator", default="auto")
parser.add_argument("--checkpoint", type=Path, help="go on from this file; write it")
args = parser.parse_args()

fabric = Fabric(accelerator=args.accelerator, devices=args.devices)
fabric.launch()
torch.manual_seed(0)
model = PairDistances()
model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters(), lr=1e-3))
parts = {"model": model, "optimizer": optimizer}
dataset = StreamDataset(args.cache, StreamConfig(crop=CropConfig(tokens=64), msa=MsaConfig(rows=64)))
sampler = RankSampler(len(dataset), SamplerState(seed=0), fabric.global_rank, fabric.world_size)
if args.checkpoint and args.checkpoint.exists():
    sampler.load_state_dict(fabric.load(args.checkpoint, parts)["sampler"])
start = sampler.state
loader = DataLoader(dataset, sampler=sampler, num_workers=args.workers, collate_fn=TorchCollate())
loader = fabric.setup_dataloaders(loader, use_distributed_sampler=False)
for step, batch in enumerate(islice(chain.from_iterable(repeat(loader)), args.steps)):
    loss = model(batch)
    optimizer.zero_grad()
    fabric.backward(loss)
    optimizer.step()
    fabric.print(f"step {step} loss {fabric.all_reduce(loss.detach()).item():.4f}")
if args.checkpoint:
    done = start.advanced(args.steps * fabric.world_size, len(dataset))
    fabric.save(args.checkpoint, parts | {"sampler": done.to_dict()})
