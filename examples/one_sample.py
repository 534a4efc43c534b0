"""What the adapters' examples share: their arguments, a sample to train on, and the steps.

Each trains on one sample with the same random numbers in each step, so that the loss alone shows whether the
model learns from it.
"""

import argparse
import random

import numpy as np
import torch

from megafold.pipeline.stream import (
    CropConfig,
    MsaConfig,
    SamplingConfig,
    Stream,
    StreamConfig,
    TemplateConfig,
)


def arguments():
    parser = argparse.ArgumentParser()
    parser.add_argument("cache")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--entry", help="draw samples from this entry alone")
    parser.add_argument("--index", type=int, default=0, help="which sample")
    return parser.parse_args()


def draw(args):
    """A sample: a crop of 48 tokens, with what may be exchanged in it."""
    config = StreamConfig(
        crop=CropConfig(tokens=48),
        msa=MsaConfig(rows=16),
        template=TemplateConfig(days_before_release=-40_000),  # of any date: not for real training
        sampling=SamplingConfig(entries=(args.entry,) if args.entry else ()),
        symmetry=True,
    )
    sample = Stream(args.cache, config).sample(args.index)
    print(sample.meta["entry"], len(sample.features["restype"]), "tokens")
    return sample


def seed(number):
    """Of all generators that the packages draw from."""
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002
    torch.manual_seed(number)


def train(model, loss_of, steps, rate):
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    for step in range(steps):
        seed(1)
        loss = loss_of()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(f"step {step} loss {loss.item():.4f}", flush=True)
