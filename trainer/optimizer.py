"""Adam, its learning rate and the clipping of gradients (AF3 SI 5.4)."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from megafold.trainer.config import TrainConfig


def make_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Adam:
    """Adam over the parameters that want a gradient, which are all on one device.

    On a GPU it is the fused one: the others go through thousands of tensors on the host, while the GPU waits.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.Adam(
        parameters,
        lr=config.learning_rate,
        betas=(config.beta_1, config.beta_2),
        eps=config.epsilon,
        fused=all(parameter.is_cuda for parameter in parameters) or None,
    )


def load_optimizer(optimizer: torch.optim.Adam, state: Mapping[str, Any]) -> None:
    """Take over a state dict, whatever device it is from; how steps are computed stays as it is.

    Raises:
        ValueError: it is of other parameters.
    """
    fused = optimizer.defaults["fused"]
    groups = [{**group, "fused": fused} for group in state["param_groups"]]
    optimizer.load_state_dict({**state, "param_groups": groups})


def learning_rate(step: int, config: TrainConfig) -> float:
    """Rate of the ``step``-th step, counted from 1.

    Rises linearly to the configured rate at step ``warmup_steps``, and is multiplied by ``decay_factor``
    after every ``decay_every`` steps. A function of the step alone, so nothing of it needs to be stored.
    """
    warmup = min(1.0, step / config.warmup_steps) if config.warmup_steps else 1.0
    decays = (step - 1) // config.decay_every
    return float(config.learning_rate * warmup * config.decay_factor**decays)


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Set the rate of every group."""
    for group in optimizer.param_groups:
        group["lr"] = rate


def gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Global 2-norm of the gradients, a float32 scalar; not finite if any gradient is not."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    return torch.nn.utils.get_total_norm(gradients)


def clip_gradients(parameters: Iterable[nn.Parameter], norm: Tensor, largest: float) -> None:
    """Scale the gradients so that their global norm, which is ``norm``, does not exceed ``largest``."""
    torch.nn.utils.clip_grads_with_norm_(parameters, largest, norm)
