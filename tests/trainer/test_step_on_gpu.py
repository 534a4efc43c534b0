"""What a step does on a GPU, told without one: no two devices meet, dtypes are autocast's, nothing waits."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorDeviceMismatchError

from megafold.trainer.confidence_scores import confidence_scores
from megafold.trainer.config import TrainConfig
from megafold.trainer.loop import Feed, Trainer, loss_of_whole_samples
from megafold.trainer.losses import LossTerm, TrainingLoss
from megafold.trainer.model.model import AlphaFold3
from megafold.trainer.model.pairformer import PairformerBlock
from megafold.trainer.model.transformer import DiffusionTransformerBlock
from megafold.trainer.parallel.batches import shard_batch
from megafold.trainer.parallel.mesh import Peers
from megafold.trainer.parallel.training import SharedLoss
from megafold.trainer.signals import StopSignals
from tests.trainer.batches import random_batch
from tests.trainer.fake_gpu import GPU, Waits, backward, batch_on_host, fake_gpu, to_gpu
from tests.trainer.networks import MINI_JUDGING, as_dtype, mini_model

#: Every step sends its batch.
SENT = "to device, devices.py:to_device"
NAMES = {"diffusion", "mse", "smooth_lddt", "distogram", "plddt", "resolved", "pde", "pae"}


#: One block of each kind.
SIZES = replace(MINI_JUDGING, n_pairformer=1, n_msa=2, diffusion=replace(MINI_JUDGING.diffusion, n_block=1))


def config_of(**changes: Any) -> TrainConfig:
    settings = {"n_copies": 2, "n_cycles": 2, "rollout_steps": 1, "alpha_pae": 1.0, "device": "cpu"}
    return TrainConfig.from_dict({**settings, **changes})


def batch_of() -> dict[str, Any]:
    return {**random_batch(0, batch_size=2), "meta": [{"resolution": 2.0}, {"resolution": None}]}


def exchangeable() -> dict[str, Any]:
    """Two atoms of the first sample are equivalent."""
    order = torch.tensor([[[0, 1], [1, 0]]])
    return {**batch_of(), "symmetry": [{"chains": [], "orders": [order]}, {"chains": [], "orders": []}]}


@contextmanager
def trainer_on_gpu(config: TrainConfig, *, recompute: bool = False) -> Iterator[tuple[Any, Any]]:
    """What a forward pass asks of a trainer, and the mode in which tensors are fake."""
    model = AlphaFold3(replace(SIZES, activation_checkpointing=recompute)).train()
    with fake_gpu() as mode:
        to_gpu(mode, model)
        yield SimpleNamespace(config=config, device=GPU, model=model, generator=None), mode


def all_on_gpu(model: nn.Module, loss: TrainingLoss) -> None:
    for name, value in loss.values().items():
        assert (value.device, value.dtype) == (GPU, torch.float32), name
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert (parameter.grad.device, parameter.grad.dtype) == (GPU, parameter.dtype), name


def test_a_step_computes_on_the_gpu_alone_and_waits_for_nothing():
    with trainer_on_gpu(config_of(), recompute=True) as (trainer, mode):
        with Waits() as waits:
            loss = loss_of_whole_samples(trainer, batch_on_host(mode, batch_of()), 1)
            backward(loss.total)
        assert loss.terms.keys() == NAMES
        all_on_gpu(trainer.model, loss)
    assert waits.seen.keys() == {SENT}


def test_a_shared_step_computes_on_the_gpu_alone():
    """A group of one rank: the sharded modules, without an exchange."""
    with trainer_on_gpu(config_of()) as (trainer, mode):
        batch = batch_on_host(mode, shard_batch(batch_of(), Peers()))
        with Waits() as waits:
            loss = SharedLoss(Peers())(trainer, batch, 2)
            backward(loss.total)
        all_on_gpu(trainer.model, loss)
    assert waits.seen.keys() == {SENT}


def test_what_a_step_waits_for(monkeypatch):
    """For the bonds' number, and for the roll-out, whose exchanges the host decides."""
    monkeypatch.setattr("megafold.trainer.losses.permutation.nearest_truth", lambda x, *given: given[:2])
    with trainer_on_gpu(config_of(alpha_bond=1.0)) as (trainer, mode), Waits() as waits:
        loss_of_whole_samples(trainer, batch_on_host(mode, exchangeable()), 1)
    assert waits.seen.pop(SENT) > 30
    assert waits.seen == {
        "diffusion.py:polymer_ligand_bonds": 1,
        "permutation.py:with_nearest_truth": 5,  # the first of them waits
        "to device, permutation.py:with_nearest_truth": 2,
    }


def test_autocast_gives_blocks_the_dtypes_that_they_have_on_a_cpu():
    """CUDA's list of what stays float32 is longer. The head's blocks are called as the trunk's are."""
    batch, config = batch_of(), config_of()
    on_cpu = AlphaFold3(SIZES).train()
    plain: Any = SimpleNamespace(config=config, device=torch.device("cpu"), model=on_cpu, generator=None)
    with blocks_called(on_cpu) as expected:
        loss_of_whole_samples(plain, batch, 2)
    with trainer_on_gpu(config) as (trainer, mode), Waits(), blocks_called(trainer.model) as found:
        loss_of_whole_samples(trainer, batch_on_host(mode, batch), 2)
    assert found == expected
    assert len(found) == 6
    assert found["confidence.pairformer.blocks.0"] == found["trunk.pairformer.blocks.0"][-1:]


@contextmanager
def blocks_called(model: nn.Module) -> Iterator[dict[str, list[tuple[torch.dtype, ...]]]]:
    """dtypes of the tensors that each block is given and gives, by the block's name, for each call."""
    calls: dict[str, list[tuple[torch.dtype, ...]]] = {}
    hooks = []
    for name, module in model.named_modules():
        if isinstance(module, (PairformerBlock, DiffusionTransformerBlock)):

            def note(_: Any, given: Any, result: Any, name: str = name) -> None:
                results = result if isinstance(result, tuple) else (result,)
                tensors = [x for x in (*given, *results) if isinstance(x, Tensor)]
                calls.setdefault(name, []).append(tuple(x.dtype for x in tensors))

            hooks.append(module.register_forward_hook(note))
    yield calls
    for hook in hooks:
        hook.remove()


def test_scores_are_computed_on_the_gpu_alone():
    with trainer_on_gpu(config_of()) as (trainer, mode), Waits(), torch.autocast("cuda", torch.bfloat16):
        batch = {name: x.to(GPU) for name, x in batch_on_host(mode, random_batch(0, batch_size=2)).items()}
        trunk = trainer.model.run_trunk(batch, n_cycles=1)
        coords = trainer.model.rollout(batch, trunk, n_samples=2, n_steps=2)
        scores = confidence_scores(batch, trainer.model.judge(batch, trunk, coords[:, 1]))
        for item in fields(scores):
            own = getattr(scores, item.name)
            for value in own if isinstance(own, tuple) else (own,):
                assert value.device == GPU, item.name
                assert value.dtype == (torch.bool if item.name == "has_clash" else torch.float32), item.name


def test_a_trainers_step_waits_once_for_its_loss(tmp_path, monkeypatch):
    """And for a norm that is there by then, before the optimizer's work begins."""
    monkeypatch.setattr("megafold.trainer.loop.resolve_device", lambda *_: GPU)
    monkeypatch.setattr("megafold.trainer.loop.block_graphs", lambda *_: None)
    monkeypatch.setattr("torch.Generator", lambda _: None)
    monkeypatch.setattr(Trainer, "_seed_noise", lambda *_: None)
    monkeypatch.setattr(Tensor, "backward", backward)
    model = nn.Linear(3, 1)
    monkeypatch.setattr(model, "to", lambda _: model)

    def loss_of(trainer: Trainer, batch: dict[str, Tensor], cycles: int) -> TrainingLoss:
        per_sample = model(batch["x"]).squeeze(-1)
        term = LossTerm(per_sample, torch.ones_like(per_sample, dtype=torch.bool))
        return TrainingLoss(term.mean, {"mse": term})

    with fake_gpu() as mode:
        to_gpu(mode, model)
        trainer = Trainer(model, config_of(), Feed(batches=[]), tmp_path, loss_of=loss_of)
        batch = {"x": torch.ones(2, 3, device=GPU), "token_mask": torch.ones(2, 5)}
        before: list[set[str]] = []
        waits = Waits()
        monkeypatch.setattr(trainer.optimizer, "step", lambda: before.append(set(waits.seen)))
        with waits, StopSignals() as signals:
            trainer._step(iter([batch]), signals)
    agreed = "loop.py:Trainer._agree"
    assert before == [set(waits.seen)] == [{agreed, f"to device, {agreed}", "loop.py:Trainer._step"}]
    assert waits.seen["loop.py:Trainer._step"] == 1


# ----------------------------------------------------------------------------------------------------------
# The GPU that is not there


def test_devices_do_not_mix_on_the_gpu_that_is_not_there():
    with fake_gpu(), pytest.raises(FakeTensorDeviceMismatchError):
        torch.ones(3, device=GPU) + torch.ones(3)


def test_waits_are_counted():
    questions = [
        lambda x: x.sum().item(),
        lambda x: bool(x.any()),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.cpu(),
        lambda x: x.long().bincount(minlength=2),
        lambda x: x.unique(),
    ]
    with fake_gpu():
        for ask in questions:
            with Waits() as waits:
                ask(torch.ones(4, device=GPU))
            assert sum(waits.seen.values()) >= 1
        with Waits() as waits:
            ask(torch.ones(4))
            torch.ones(4, device=GPU).sum()
        assert not waits.seen
        with Waits() as waits:
            torch.tensor([1.0, 2.0], device=GPU)[torch.tensor([1])]
        assert waits.seen == {"to device, test": 2}


def test_going_back_node_by_node_gives_autograds_gradients():
    batch, model = as_dtype(random_batch(1, 9)), mini_model(config=MINI_JUDGING)
    trainer: Any = SimpleNamespace(
        config=config_of(precision="fp32"),
        device=torch.device("cpu"),
        model=model,
        generator=torch.Generator(),
    )
    gradients = []
    for go_back in (torch.Tensor.backward, backward):
        trainer.generator.manual_seed(0)
        model.zero_grad()
        go_back(loss_of_whole_samples(trainer, batch, 1).total)
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    for name, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], expected)
