"""The schedule by hand, Adam and the average against numpy, the clipping."""

import numpy as np
import pytest
import torch
from torch import nn

from megafold.trainer.config import TrainConfig
from megafold.trainer.ema import WeightAverage
from megafold.trainer.errors import ConfigError
from megafold.trainer.losses import LossWeights
from megafold.trainer.optimizer import (
    clip_gradients,
    gradient_norm,
    learning_rate,
    load_optimizer,
    make_optimizer,
)


def test_schedule_by_hand():
    config = TrainConfig()
    by_hand = {
        1: 1.8e-6,
        500: 0.9e-3,
        1_000: 1.8e-3,
        50_000: 1.8e-3,
        50_001: 1.71e-3,
        100_000: 1.71e-3,
        100_001: 1.6245e-3,
        150_001: 1.543275e-3,
    }
    for step, rate in by_hand.items():
        assert learning_rate(step, config) == pytest.approx(rate, rel=1e-12)


def test_defaults_are_those_of_initial_training():
    """SI 3.7.1 (48 copies), 4.1, 5.4 and table 6."""
    config = TrainConfig()
    assert (config.n_copies, config.n_cycles, config.rollout_steps) == (48, 4, 20)
    assert (config.clip_norm, config.ema_decay) == (10.0, 0.999)
    assert config.loss_weights == LossWeights(
        diffusion=4.0, distogram=0.03, bond=0.0, smooth_lddt=1.0, sigma_data=16.0
    )
    assert LossWeights() == config.loss_weights
    own = TrainConfig(alpha_diffusion=1.0, alpha_distogram=2.0, alpha_bond=3.0).loss_weights
    assert (own.diffusion, own.distogram, own.bond) == (1.0, 2.0, 3.0)


def test_no_warmup():
    assert learning_rate(1, TrainConfig(warmup_steps=0)) == 1.8e-3


def test_adam_is_the_supplements():
    model = nn.Linear(2, 1, bias=False)
    optimizer = make_optimizer(model, TrainConfig(learning_rate=0.1))
    start = model.weight.detach().double().numpy().copy()
    gradients = [np.array([[0.5, -2.0]]), np.array([[1.0, 3.0]])]
    for gradient in gradients:
        model.weight.grad = torch.tensor(gradient, dtype=torch.float32)
        optimizer.step()
    weight, m, v = start, np.zeros((1, 2)), np.zeros((1, 2))
    for step, gradient in enumerate(gradients, start=1):
        m = 0.9 * m + 0.1 * gradient
        v = 0.95 * v + 0.05 * gradient**2
        weight = weight - 0.1 * (m / (1 - 0.9**step)) / (np.sqrt(v / (1 - 0.95**step)) + 1e-8)
    np.testing.assert_allclose(model.weight.detach(), weight, rtol=1e-5)


@pytest.mark.parametrize("fused", [True, None])
def test_a_checkpoint_does_not_decide_how_steps_are_computed(fused):
    """A run may go on with another kind of device, where Adam is fused or is not."""
    models = [nn.Linear(2, 1, bias=False) for _ in range(2)]
    nn.init.constant_(models[0].weight, 1.0)
    nn.init.constant_(models[1].weight, 1.0)
    first = torch.optim.Adam(models[0].parameters(), lr=0.1, fused=not fused or None)
    second = torch.optim.Adam(models[1].parameters(), lr=0.1, fused=fused)
    for step in range(2):
        for model in models:
            model.weight.grad = torch.tensor([[0.5, -2.0]])
        first.step()
        if step:
            second.step()
        else:
            load_optimizer(second, first.state_dict())
            models[1].load_state_dict(models[0].state_dict())
    assert [group["fused"] for group in second.param_groups] == [fused]
    torch.testing.assert_close(models[1].weight, models[0].weight)


@pytest.mark.parametrize(("scale", "factor"), [(100.0, 10 / 500), (1.0, 1.0)])
def test_clipping_is_global(scale, factor):
    parameters = [nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))]
    for parameter, value in zip(parameters, (3.0, 4.0), strict=True):
        parameter.grad = torch.tensor([value * scale])
    norm = gradient_norm(parameters)
    assert norm.item() == pytest.approx(5 * scale)
    clip_gradients(parameters, norm, 10.0)
    assert [float(p.grad) for p in parameters if p.grad is not None] == pytest.approx(
        [3 * scale * factor, 4 * scale * factor], rel=1e-5
    )


def test_norm_tells_of_values_that_are_not_finite():
    parameter = nn.Parameter(torch.zeros(2))
    for bad in (torch.nan, torch.inf):
        parameter.grad = torch.tensor([1.0, bad])
        assert not gradient_norm([parameter]).isfinite()


class Counted(nn.Linear):
    """A weight and a counter."""

    count: torch.Tensor

    def __init__(self):
        super().__init__(1, 1, bias=False)
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))


def test_average_by_hand():
    model = Counted()
    nn.init.constant_(model.weight, 2.0)
    average = WeightAverage(model, decay=0.75)
    expected = 2.0
    for value in (4.0, -1.0, 7.0):
        nn.init.constant_(model.weight, value)
        model.count += 1
        average.update()
        expected = 0.75 * expected + 0.25 * value
    assert average.state_dict()["weight"].item() == pytest.approx(expected)
    with average.applied(model):
        assert model.weight.item() == pytest.approx(expected)
        assert model.count == 3
    assert model.weight.item() == 7.0
    with pytest.raises(KeyError, match="another model"):
        average.load_state_dict({"other": torch.zeros(1)})


def test_a_models_own_weights_come_back_after_an_error():
    model = nn.Linear(1, 1, bias=False)
    nn.init.constant_(model.weight, 2.0)
    average = WeightAverage(model, decay=0.5)
    nn.init.constant_(model.weight, 7.0)
    with pytest.raises(ValueError, match=r"^2\.0$"), average.applied(model):
        raise ValueError(model.weight.item())
    assert model.weight.item() == 7.0


def test_an_average_takes_over_values_and_keeps_its_memory():
    """A checkpoint is read on the CPU, in whatever memory; the average stays where the model is."""
    model = nn.Linear(1, 1, bias=False)
    average = WeightAverage(model, decay=0.5)
    own = average.state_dict()["weight"]
    stored = torch.tensor([[3.0]], dtype=torch.float64)
    average.load_state_dict({"weight": stored})
    stored.fill_(9.0)
    assert average.state_dict()["weight"] is own
    assert (own.item(), own.dtype) == (3.0, torch.float32)


def test_average_without_decay_is_the_model():
    model = nn.Linear(1, 1)
    average = WeightAverage(model, decay=0.0)
    nn.init.constant_(model.weight, 5.0)
    average.update()
    assert average.state_dict()["weight"].item() == 5.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate must be positive"),
        ({"ema_decay": 1.0}, "ema_decay must lie"),
        ({"precision": "fp16"}, "bf16, fp32"),
        ({"backend": "fast"}, "backend must be one of eager"),
        ({"worker_start": "thread"}, "worker_start"),
        ({"num_workers": -1}, "num_workers must not be negative"),
        ({"lr": 1e-3}, "unknown training settings .'lr'"),
    ],
)
def test_settings_are_checked(changes, message):
    with pytest.raises(ConfigError, match=message):
        TrainConfig.from_dict(changes)


def test_settings_make_the_round_trip():
    config = TrainConfig.for_preset("tiny", steps=7)
    assert config.steps == 7
    assert config.precision == "fp32"
    assert TrainConfig.from_dict(config.to_dict()) == config
    assert TrainConfig.for_preset("small") == TrainConfig(preset="small")
