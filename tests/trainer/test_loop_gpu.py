"""The loop on a GPU, in bfloat16."""

import math

import pytest
import torch

from megafold.trainer.checkpoint import load_checkpoint
from megafold.trainer.loop import Feed, Trainer
from megafold.trainer.losses import LossWeights, training_loss
from megafold.trainer.train import build_model
from tests.trainer.fakes import FakeFeed, quick_config
from tests.trainer.test_losses import fake_outputs, random_batch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA or ROCm device"),
]


def make_trainer(folder, **changes):
    config = quick_config(
        preset="tiny", device="cuda", precision="bf16", deterministic=True, learning_rate=1e-3, **changes
    )
    feed = FakeFeed()
    return Trainer(build_model(config), config, Feed(batches=feed, sampler=feed), folder)


def test_losses_are_those_of_the_cpu():
    batch = random_batch(3, 14, batch_size=2)
    outputs = fake_outputs(batch)
    expected = training_loss(batch, outputs, LossWeights(bond=1.0))
    moved = fake_outputs(batch)
    for name in ("denoised", "sigma", "target", "noised"):
        object.__setattr__(moved, name, getattr(moved, name).cuda())
    object.__setattr__(moved.trunk, "distogram_logits", moved.trunk.distogram_logits.cuda())
    loss = training_loss({name: value.cuda() for name, value in batch.items()}, moved, LossWeights(bond=1.0))
    torch.testing.assert_close(loss.total.cpu(), expected.total, rtol=1e-5, atol=1e-5)


def test_a_resumed_run_is_bit_equal(tmp_path):
    torch.manual_seed(5)  # dropout draws from the global generators, which both runs must find alike
    make_trainer(tmp_path / "whole", steps=6).run()
    torch.manual_seed(5)
    first = make_trainer(tmp_path / "parts", steps=3).run()
    torch.manual_seed(99)
    second = make_trainer(tmp_path / "parts", steps=6)
    assert first.checkpoint is not None
    second.resume(first.checkpoint)
    result = second.run()
    assert math.isfinite(result.values["loss"])
    states = [
        load_checkpoint(tmp_path / name / "checkpoints/step-00000006.pt") for name in ("whole", "parts")
    ]
    for part in ("model", "average"):
        for name, value in states[0][part].items():
            assert torch.equal(value, states[1][part][name]), name
